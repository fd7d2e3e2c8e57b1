"""D4RL's Maze2D logs: every quirk of the published files, every way to cut them, and the protocol
run again.
"""

import hashlib
import re
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest

from decisionllm.datasets import d4rl_files
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.worlds.maze2d import d4rl
from decisionllm.worlds.maze2d import dataset as maze2d
from decisionllm.worlds.maze2d.dataset import (
    cut_points,
    files,
    generate,
    load,
    name_in,
    read_hdf5,
    save,
    task_text,
    write_hdf5,
)
from decisionllm.worlds.maze2d.simulator import Maze, reward
from tests.conftest import episode, make_store, node

# Ten rows in the upper corridor of umaze, whose goal is at (1, 1) with radius 0.5. The planner's
# goals change after rows 3, 6 and 7; between rows 7 and 8 the ball jumps, so another run begins
# there.
Y = [1.46, 1.49, 1.52, 1.55, 1.51, 1.48, 1.47, 1.51, 3.0, 3.01]
GOALS = [(1.05, 1.96)] * 4 + [(2.91, 1.02)] * 3 + [(1.0, 1.0)] + [(3.09, 2.95)] * 2


def log(**changed):
    """The columns of a D4RL file: rewards are 0, 1, 2, ... so that each row is known."""
    n = len(Y)
    x = np.where(np.arange(n) < 8, 1.0, 3.0)
    columns = {
        "observations": np.stack([x, Y, np.zeros(n), np.zeros(n)], 1).astype(np.float32),
        "actions": np.stack([np.arange(n) / 10, np.zeros(n)], 1).astype(np.float32),
        "rewards": np.arange(n, dtype=np.float32),
        "terminals": np.zeros(n, bool),
        "timeouts": np.isin(np.arange(n), [3, 6]),
        "infos/goal": np.array(GOALS, np.float32),
    }
    return {key: column for key, column in (columns | changed).items() if column is not None}


def put(path, **changed):
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, column in log(**changed).items():
            file[key] = column
    return path


def cut_by(path, **options):
    return list(load(maze="umaze", path=str(path), **options).episodes)


def test_a_file_comes_back_as_the_episodes_that_its_timeouts_part(tmp_path):
    source = load(maze="umaze", path=str(put(tmp_path / "maze2d-umaze-sparse-v1.hdf5")))
    episodes, rows = list(source.episodes), log()
    assert [e.rewards.tolist() for e in episodes] == [[0, 1, 2, 3], [4, 5, 6], [7], [8, 9]]
    for key in ("observations", "actions"):
        np.testing.assert_array_equal(
            np.concatenate([getattr(e, key) for e in episodes]), rows[key]
        )
    assert [(e.terminated, e.truncated, e.task, e.group) for e in episodes] == [
        (False, True, "", i) for i in range(4)
    ]
    assert source.spec.horizon == 300 and source.spec.low == (-1, -1)


@pytest.mark.parametrize(
    "cut, lengths",
    [
        ("timeouts", [4, 3, 1, 2]),
        ("run", [3, 5, 2]),  # pieces of at most 5, counted back from where a run ends
    ],
)
def test_where_an_episode_ends_by_hand(tmp_path, cut, lengths):
    blocks = read_hdf5(put(tmp_path / "log.hdf5"))
    first, last, _ = cut_points(blocks, cut, 5).T
    assert (last - first).tolist() == lengths


@pytest.mark.parametrize(
    "cut, lengths", [("timeouts", [20, 30, 300, 300, 300, 300]), ("run", [250, 1000])]
)
def test_no_episode_is_longer_than_an_evaluation_or_a_piece(tmp_path, cut, lengths):
    n = 1250
    flat = {"observations": np.ones((n, 4)), "actions": np.zeros((n, 2)), "rewards": np.zeros(n)}
    flags = {"terminals": np.zeros(n, bool), "timeouts": np.arange(n) == 19, "infos/goal": None}
    episodes = cut_by(put(tmp_path / "log.hdf5", **flat, **flags), cut=cut)
    assert [len(e.rewards) for e in episodes] == lengths


def test_a_ball_at_full_speed_does_not_jump():
    n = 20
    moving = np.stack([np.ones(n), 1 + 0.0532 * np.arange(n)], 1)
    columns = {
        "observations": np.concatenate([moving, np.zeros((n, 2))], 1),
        "ends": np.zeros(n, bool),
    }
    first, last, _ = cut_points([columns], "run", 300).T
    assert (first.tolist(), last.tolist()) == ([0], [20])


def test_goals_in_words_relabel_the_rewards(tmp_path):
    episodes = cut_by(put(tmp_path / "log.hdf5"), text="goal")
    assert [e.task for e in episodes] == [
        "Maze2D umaze. Push the ball to the goal at the top centre, row 1, column 2 (x = 1.0, y = "
        "2.0), and keep it there.",
        "Maze2D umaze. Push the ball to the goal at the bottom left, row 3, column 1 (x = 3.0, y = "
        "1.0), and keep it there.",
        "Maze2D umaze. Push the ball to the goal at the top left, row 1, column 1 (x = 1.0, y = "
        "1.0), and keep it there.",
        "Maze2D umaze. Push the ball to the goal at the bottom right, row 3, column 3 (x = 3.0, y "
        "= 3.0), and keep it there.",
    ]
    assert [e.rewards.tolist() for e in episodes] == [[0, 0, 1, 1], [0, 0, 0], [0], [1, 1]]
    dense = cut_by(tmp_path / "log.hdf5", text="goal", dense=True)
    np.testing.assert_allclose(dense[0].rewards, np.exp([-0.54, -0.51, -0.48, -0.45]), rtol=1e-5)


def test_steps_after_a_goal_have_no_loss(tmp_path):
    path = put(tmp_path / "log.hdf5")
    episodes = cut_by(path, text="goal", steps_after_goal=2)
    # the ball jumps after row 7, and the log ends after row 9
    assert [(10 * e.actions[:, 0]).round().tolist() for e in episodes] == [
        [0, 1, 2, 3, 4, 5],
        [4, 5, 6, 7],
        [7],
        [8, 9],
    ]
    assert [e.loss_mask.tolist() for e in episodes] == [
        [True] * 4 + [False] * 2,
        [True] * 3 + [False],
        [True],
        [True] * 2,
    ]
    # of the goal in the text: y = 1.51 is near, 1.48 is not
    assert episodes[0].rewards.tolist() == [0, 0, 1, 1, 1, 0]
    store = write_store(
        tmp_path / "store", load(maze="umaze", path=str(path), text="goal", steps_after_goal=2)
    )
    assert (
        store.loss_mask.tolist() == [a for e in episodes for a in e.loss_mask.tolist()]
        and store.spec.horizon == 302
    )
    assert store.episode(1).loss_mask.tolist() == [True, True, True, False]
    with pytest.raises(ValueError, match="dataset.steps_after_goal=2: needs text=goal, got none"):
        cut_by(path, steps_after_goal=2)


def test_shuffled_texts_are_those_of_other_episodes(tmp_path):
    named, shuffled = (
        list(load(maze="umaze", steps=4000, text=text).episodes) for text in ("goal", "shuffled")
    )
    assert [e.rewards.tolist() for e in named] == [e.rewards.tolist() for e in shuffled]
    assert sorted(e.task for e in named) == sorted(e.task for e in shuffled)
    assert np.mean([a.task != b.task for a, b in zip(named, shuffled, strict=True)]) > 0.5


def test_a_constant_text_names_the_maze_and_leaves_the_rewards(tmp_path):
    episodes = cut_by(put(tmp_path / "log.hdf5"), text="constant")
    assert {e.task for e in episodes} == {task_text("umaze")} and sum(
        e.rewards.sum() for e in episodes
    ) == 45


def test_without_timeouts_the_terminals_end_an_episode(tmp_path):
    flags = {"timeouts": None, "terminals": np.isin(np.arange(10), [1])}
    assert [len(e.rewards) for e in cut_by(put(tmp_path / "log.hdf5", **flags))] == [2, 6, 2]


def test_terminals_end_an_episode_beside_timeouts(tmp_path):
    flags = {"terminals": np.isin(np.arange(10), [1])[:, None]}
    assert [len(e.rewards) for e in cut_by(put(tmp_path / "log.hdf5", **flags))] == [2, 2, 3, 1, 2]


def test_rewards_may_stand_in_a_column(tmp_path):
    path = put(tmp_path / "log.hdf5", rewards=np.arange(10, dtype=np.float32)[:, None])
    assert [e.rewards.tolist() for e in cut_by(path)] == [[0, 1, 2, 3], [4, 5, 6], [7], [8, 9]]


def test_without_a_goal_column_goals_cannot_be_named(tmp_path):
    path = put(tmp_path / "log.hdf5", **{"infos/goal": None})
    assert len(cut_by(path)) == 4
    with pytest.raises(ValueError, match="log.hdf5: text=goal needs the log's goal column"):
        cut_by(path, text="goal")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"observations": None}, "expected D4RL's keys, observations not among actions"),
        (
            {"rewards": None, "terminals": None},
            "expected D4RL's keys, rewards, terminals not among",
        ),
        (
            {"actions": np.zeros((9, 2))},
            "expected columns of one length, at least 1, got .*'actions': 9",
        ),
        (
            {"timeouts": np.zeros(9, bool)},
            "expected columns of one length, at least 1, got .*'timeouts': 9",
        ),
        (
            {"terminals": np.zeros(9, bool)},
            "expected columns of one length, at least 1, got .*'terminals': 9",
        ),
        (
            {key: column[:0] for key, column in log().items()},
            "expected columns of one length, at least 1, got .*'rewards': 0",
        ),
        (
            {"observations": np.zeros((10, 3))},
            r"expected observations of 4 columns, got shape \(10, 3\)",
        ),
        ({"actions": np.zeros(10)}, r"expected actions of 2 columns, got shape \(10,\)"),
        ({"rewards": np.zeros((10, 2))}, r"expected rewards of 1 columns, got shape \(10, 2\)"),
        (
            {"rewards": np.where(np.arange(10) == 6, np.nan, 0)},
            "expected finite rewards, got nan in row 6",
        ),
        (
            {"observations": np.where(np.arange(40).reshape(10, 4) == 21, np.inf, 1)},
            "expected finite observations, got inf in row 5",
        ),
    ],
)
def test_a_file_that_is_not_such_a_log_is_refused(tmp_path, changed, message):
    path = put(tmp_path / "log.hdf5", **changed)
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        cut_by(path)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((1.0, 5.0), r"row 6: expected a position in a free cell of the maze umaze, got \[1"),
        ((2.0, 1.0), r"row 6: expected a position in a free cell of the maze umaze, got \[2"),
    ],
)
def test_a_file_of_another_maze_is_refused(place, message, tmp_path, monkeypatch):
    monkeypatch.setattr(d4rl_files, "BLOCK", 8)  # 2 rows
    seen = log()["observations"]
    seen[6, :2] = place
    path = put(tmp_path / "log.hdf5", observations=seen)
    with pytest.raises(ValueError, match=f"{path}, {message}"):
        load(maze="umaze", path=str(path))


@pytest.mark.parametrize("goal", [(2, 1), (257, 3)])
def test_a_goal_in_a_wall_is_refused(goal, tmp_path):
    path = put(tmp_path / "log.hdf5", **{"infos/goal": np.array([*GOALS[:8], goal, goal])})
    with pytest.raises(ValueError, match="episode 3: expected a goal in a free cell of the maze"):
        load(maze="umaze", path=str(path), text="goal")


def test_an_action_beyond_its_bound_is_refused_by_episode_and_step(tmp_path):
    source = load(maze="umaze", path=str(put(tmp_path / "log.hdf5", actions=np.eye(10, 2, -5) * 2)))
    with pytest.raises(ValueError, match="episode 1, step 1: expected an action within"):
        write_store(tmp_path / "s", source)


def test_a_damaged_file_says_that_it_should_be_fetched_again(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "log.hdf5"
    made = {
        "observations": rng.random((3000, 4)),
        "actions": rng.random((3000, 2)),
        "rewards": np.ones(3000),
        "ends": np.zeros(3000, bool),
    }
    write_hdf5(path, made)
    whole = path.read_bytes()
    middle = len(whole) // 4  # amid the compressed observations
    for damaged in (
        whole[:-1000],
        whole[:100],
        b"<html>404</html>",
        whole[:middle] + b"\0" * 2000 + whole[middle + 2000 :],
    ):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError,
            match="log.hdf5: not a readable HDF5 file, perhaps truncated .*fetch it again",
        ):
            list(read_hdf5(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"maze2d-large-dense-v1: no D4RL file .*put maze2d-large-dense-v1.hdf5 in one",
    ):
        load(maze="large", dense=True, source="file")
    with pytest.raises(FileNotFoundError, match="nowhere.hdf5: no D4RL file there"):
        load(maze="umaze", path=str(tmp_path / "nowhere.hdf5"))


def test_a_file_is_found_in_d4rls_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "logs"))
    sources = []
    for place, reward_of_all in (
        ("~/.d4rl/datasets/maze2d-umaze-sparse.hdf5", 1),
        ("~/.d4rl/datasets/maze2d-umaze-sparse-v1.hdf5", 2),
        (tmp_path / "logs/maze2d-umaze-sparse-v1.hdf5", 3),
    ):
        put(place, rewards=np.full(10, reward_of_all))
        source = load(maze="umaze")
        sources.append((source.info["name"], next(source.episodes).rewards[0]))
    named = [(name.partition("@file-")[0], first) for name, first in sources]
    assert named == [("maze2d-umaze-v0", 1), ("maze2d-umaze-v1", 2), ("maze2d-umaze-v1", 3)]
    assert (
        load(maze="umaze", dense=True, steps=50).info["name"]
        == "maze2d-umaze-dense-v1@regen-seed0-50"
    )
    assert files(maze="umaze", source="regenerate") == []
    assert (
        load(maze="umaze", source="regenerate", steps=50).info["name"]
        == "maze2d-umaze-v1@regen-seed0-50"
    )


def test_a_log_may_be_made_with_more_noise():
    logs = {
        noise: load(maze="umaze", source="regenerate", steps=4000, noise=noise)
        for noise in (0.0, 0.5, 2.0)
    }
    lengths = {
        noise: np.mean([len(e.actions) for e in log.episodes]) for noise, log in logs.items()
    }
    assert lengths[0.0] < lengths[0.5] < lengths[2.0], "it reaches its goals later"
    assert [log.info["name"].partition("-4000")[2] for log in logs.values()] == [
        "-noise0",
        "",
        "-noise2",
    ]
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="dataset.noise: expected a deviation"):
            load(maze="umaze", source="regenerate", steps=50, noise=wrong)


def test_a_file_of_another_name_is_not_called_the_published_one(tmp_path):
    assert (
        load(maze="umaze", path=str(put(tmp_path / "mine.hdf5"))).info["name"]
        == "maze2d-umaze-v1@mine"
    )


@pytest.fixture
def ten_rows(monkeypatch):
    """The published umaze log has the ten rows of `log`, of which 3 and 6 are the first and the
    last with timeouts.
    """
    monkeypatch.setitem(maze2d.STEPS, "umaze", 10)
    monkeypatch.setattr(d4rl, "TIMEOUTS", {"maze2d-umaze-v1": ((3,), (6,))})


def as_published(**changed):
    """`log` with all keys of a published file, and the rewards of the fixed goal at (1, 1)."""
    inside = np.array([1, 1, 0, 0, 0, 1, 1, 0, 0, 0], np.float32)
    halves = {
        "infos/qpos": log()["observations"][:, :2],
        "infos/qvel": log()["observations"][:, 2:],
    }
    return {"rewards": inside, **halves} | changed


def test_a_file_like_the_published_one_has_its_name(tmp_path, ten_rows):
    path = put(tmp_path / "maze2d-umaze-sparse-v1.hdf5", **as_published())
    info = load(maze="umaze", path=str(path)).info
    assert info["name"] == "maze2d-umaze-v1" and info["recognised"]
    assert (
        info["content"]
        == "like D4RL's in name, keys, 10 rows, rewards and timeouts; its bytes could not be compared"
    )
    assert info["digest"] == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    assert info["dense"] is False and info["file"] == str(path)


def test_rewards_of_a_dense_file_are_compared_too(tmp_path, ten_rows):
    dense = np.exp(-np.linalg.norm(log()["observations"][:, :2] - [1, 1], axis=1))
    path = put(
        tmp_path / "maze2d-umaze-dense-v1.hdf5", **as_published(rewards=dense.astype(np.float32))
    )
    info = load(maze="umaze", dense=True, path=str(path)).info
    assert info["name"] == "maze2d-umaze-dense-v1"
    assert (
        info["content"]
        == "like D4RL's in name, keys, 10 rows and rewards; its bytes could not be compared"
    )


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        (
            "maze2d-umaze-sparse-v1",
            {"infos/qvel": None},
            "keys: expected .* infos/qvel, .*, got actions, infos/goal, infos/qpos, ",
        ),
        ("maze2d-umaze-sparse-v1", {"metadata": np.ones(10)}, "keys: expected "),
        (
            "maze2d-umaze-sparse-v1",
            {"rewards": np.arange(10.0)},
            "rewards: row 0 has 0, its position earns 1",
        ),
        (
            "maze2d-umaze-sparse-v1",
            {"timeouts": np.arange(10) == 3},
            r"timeouts: expected the first in rows \[3\] and the last in \[6\]",
        ),
        (
            "maze2d-umaze-sparse",
            {},
            "name: expected maze2d-umaze-sparse-v1.hdf5, got maze2d-umaze-sparse.hdf5",
        ),
    ],
)
def test_a_file_unlike_the_published_one_says_why(name, changed, why, tmp_path, ten_rows):
    path = put(tmp_path / f"{name}.hdf5", **as_published(**changed))
    info = load(maze="umaze", path=str(path)).info
    kind = "maze2d-umaze-v1" if name.endswith("v1") else "maze2d-umaze-v0"
    assert info["name"] == f"{kind}@file-{info['digest'][:8]}" and not info["recognised"]
    assert re.match(f"not known to be D4RL's: {why}", info["content"])


@pytest.mark.parametrize("stated", ["maze2d-umaze-v1", "maze2d-umaze-v1-run"])
def test_an_exported_store_is_not_the_published_file(stated, tmp_path, ten_rows):
    path = put(tmp_path / "maze2d-umaze-sparse-v1.hdf5", **as_published())
    with h5py.File(path, "a") as file:
        file.attrs["name"] = stated  # that of the store it was exported from
    info = load(maze="umaze", path=str(path)).info
    assert info["content"] == f"not known to be D4RL's: attributes: expected no name, got {stated}"
    assert info["name"] == f"maze2d-umaze-v1@file-{info['digest'][:8]}"


def test_a_file_of_other_rows_is_not_the_published_one(tmp_path):
    path = put(tmp_path / "maze2d-umaze-sparse-v1.hdf5", **as_published())
    info = load(maze="umaze", path=str(path)).info
    assert (
        info["content"] == "not known to be D4RL's: rows: expected 1,000,000, got 10"
        and not info["recognised"]
    )


def test_a_path_may_begin_with_a_tilde():
    put("~/logs/mine.hdf5")
    assert len(cut_by("~/logs/mine.hdf5")) == 4


def test_columns_come_back_from_the_file_that_they_are_written_to(tmp_path):
    made = generate(Maze.from_name("umaze"), 500, seed=3)
    made["rewards"] = np.arange(500, dtype=np.float32)
    write_hdf5(tmp_path / "log.hdf5", made, name="mine")
    (back,) = read_hdf5(tmp_path / "log.hdf5")
    assert name_in(tmp_path / "log.hdf5") == "mine" and back.keys() == made.keys()
    for key in made:
        np.testing.assert_array_equal(back[key], made[key], err_msg=key)


def test_an_exported_store_reads_back_as_the_same_data(tmp_path):
    store = prepare_store(node("dataset", "maze2d-umaze", steps=3000), tmp_path)
    save(tmp_path / "exported.hdf5", store)
    back = prepare_store(
        node("dataset", "maze2d-umaze", path=str(tmp_path / "exported.hdf5")), tmp_path
    )
    assert back.fingerprint == store.fingerprint and back.path != store.path
    assert back.info["name"] == "maze2d-umaze-v1@regen-seed0-3000"


def test_an_exported_store_is_what_d4rls_users_read(tmp_path):
    store = prepare_store(node("dataset", "maze2d-umaze", steps=3000), tmp_path)
    save(tmp_path / "new/exported.hdf5", store)
    columns = {}
    # as `OfflineEnv.get_dataset` reads and checks it
    with h5py.File(tmp_path / "new/exported.hdf5") as file:
        file.visititems(
            lambda name, item: columns.update(
                {name: item[()]} if isinstance(item, h5py.Dataset) else {}
            )
        )
    n = len(columns["observations"])
    assert columns["observations"].shape == (n, 4) and columns["actions"].shape == (n, 2)
    assert columns["rewards"].shape == (n,) == columns["terminals"].shape
    np.testing.assert_array_equal(
        np.concatenate([columns["infos/qpos"], columns["infos/qvel"]], 1), columns["observations"]
    )
    # where `sequence_dataset` parts episodes
    ends = np.flatnonzero(columns["terminals"] | columns["timeouts"])
    assert np.diff(ends, prepend=-1).tolist() == store.lengths.tolist()
    assert not columns["terminals"].any()


def test_what_a_d4rl_file_cannot_hold_is_not_exported(tmp_path):
    named = prepare_store(node("dataset", "maze2d-umaze", steps=500, text="goal"), tmp_path)
    other = make_store(tmp_path / "s", [episode([1])])
    for store in (named, other):
        with pytest.raises(
            ValueError, match="export=hdf5: expected a Maze2D dataset with text=none or constant"
        ):
            save(tmp_path / "exported.hdf5", store)
    assert not (tmp_path / "exported.hdf5").exists()


def test_an_export_does_not_replace_a_file_and_leaves_no_half_of_one(tmp_path):
    store = prepare_store(node("dataset", "maze2d-umaze", steps=500), tmp_path)
    before = put(tmp_path / "folder/log.hdf5").read_bytes()
    with pytest.raises(FileExistsError, match="log.hdf5: is there already"):
        save(tmp_path / "folder/log.hdf5", store)
    assert (tmp_path / "folder/log.hdf5").read_bytes() == before
    with pytest.raises(KeyError, match="rewards"):
        write_hdf5(
            tmp_path / "folder/half.hdf5",
            {key: column for key, column in log().items() if key != "rewards"},
        )
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["log.hdf5"]


def test_a_regenerated_log_repeats_by_its_seed():
    one, same, other = (
        list(load(maze="umaze", steps=1000, seed=seed).episodes) for seed in (0, 0, 1)
    )
    assert [e.observations.tolist() for e in one] == [e.observations.tolist() for e in same]
    assert [e.actions.tolist() for e in one] == [e.actions.tolist() for e in same]
    assert one[0].observations.tolist() != other[0].observations.tolist()


def test_a_regenerated_log_follows_the_simulator():
    maze = Maze.from_name("medium")
    made = generate(maze, 4000, seed=2)  # two balls, one after the other
    after = maze.step(made["observations"][:-1], made["actions"][:-1])
    # float32, and contacts are stiff
    wrong = np.abs(after - made["observations"][1:]).max(1) > 1e-3
    assert np.flatnonzero(wrong).tolist() == [1999]
    assert made["ends"][[1999, 3999]].all()


@pytest.mark.parametrize("dense", [False, True])
def test_a_regenerated_reward_is_that_of_its_own_row(dense):
    episodes = list(load(maze="umaze", dense=dense, steps=2000).episodes)
    for e in episodes:
        np.testing.assert_allclose(
            e.rewards, reward(e.observations[:, :2], [1, 1], dense=dense), rtol=1e-6
        )
    assert sum(e.rewards.sum() for e in episodes) > 0


def test_regenerated_statistics_are_the_published_ones():
    """The published umaze log has 12,459 timeouts in 1,000,000 steps; the other bands are those of
    five regenerated millions.
    """
    steps = 200_000
    made = generate(Maze.from_name("umaze"), steps)
    rewards = reward(made["observations"][:, :2], [1, 1])
    first, last, _ = cut_points([made], "timeouts", 300).T
    assert made["ends"].sum() / steps == pytest.approx(0.012459, rel=0.03)
    # drawn where the ball is
    assert (last - first).max() <= 300 and (last - first == 1).mean() == pytest.approx(
        0.14, abs=0.02
    )
    assert 0.075 < rewards.mean() < 0.087
    assert 6.0 < np.add.reduceat(rewards, first).mean() < 6.8
    assert 0.30 < (np.abs(made["actions"]) == 1).mean() < 0.33
    np.testing.assert_allclose(made["observations"].mean(0), [1.93, 2.39, 0, 0], atol=0.05)
    np.testing.assert_allclose(made["observations"].std(0), [0.90, 0.70, 2.22, 2.45], rtol=0.05)
    np.testing.assert_allclose(made["actions"].std(0), [0.71, 0.75], rtol=0.03)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"maze": "giant"}, "maze: expected one of open, umaze, medium, large, got 'giant'"),
        (
            {"text": "goals"},
            "dataset.text: expected one of none, constant, goal, paraphrased, shuffled, got 'goals'",
        ),
        (
            {"cut": "rolling"},
            "dataset.cut: expected one of timeouts, run, got 'rolling'",
        ),
        ({"steps": -5}, "dataset.steps: expected 0 or more, got -5"),
        ({"source": "web"}, "dataset.source: expected one of auto, file, regenerate, got 'web'"),
        ({"without_goals": "1,3"}, "dataset.without_goals=1,3: needs text=goal, got none"),
        (
            {"text": "goal", "without_goals": "2,2"},
            "dataset.without_goals: expected free cells as row,column, of 1,1 .*; got '2,2'",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(options, message):
    with pytest.raises(ValueError, match=message):
        load(**{"maze": "umaze"} | options)


def test_a_file_in_blocks_gives_the_same_episodes_in_less_memory(tmp_path, monkeypatch):
    made = generate(Maze.from_name("umaze"), 20_000, seed=3)
    made["rewards"] = np.arange(20_000, dtype=np.float32)
    write_hdf5(tmp_path / "log.hdf5", made)
    goals = {"text": "shuffled", "steps_after_goal": 7, "without_goals": "1,1"}
    options = [{"cut": "timeouts"}, {"cut": "run"}, goals]

    def stores():
        sources = (load(maze="umaze", path=str(tmp_path / "log.hdf5"), **each) for each in options)
        return [write_store(tmp_path / "s", source).fingerprint for source in sources]

    def peak():
        tracemalloc.start()
        assert (
            sum(
                len(e.rewards) for e in load(maze="umaze", path=str(tmp_path / "log.hdf5")).episodes
            )
            == 20_000
        )
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    whole, most = stores(), peak()
    monkeypatch.setattr(d4rl_files, "BLOCK", 400)  # 100 rows
    assert stores() == whole and peak() < most / 4
