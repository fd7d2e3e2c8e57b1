"""OGBench's logs: read from a file, made again by the protocol, and cut into pieces with goals."""

import hashlib

import numpy as np
import pytest

from decisionllm.registry import choice
from decisionllm.worlds.ogbench import dataset as ogbench
from decisionllm.worlds.ogbench.dataset import (
    Log,
    episode_to_goal,
    generate,
    load,
    random_pieces,
    task_text,
)
from decisionllm.worlds.ogbench.simulator import Maze, cell_of, is_reached

STITCH = "pointmaze-medium-stitch-v0"
# a walk of 0.5 a row to the right from (0, 0), cell (1, 1), and one that stays in cell (6, 6)
WALK = np.array([(0.5 * t, 0.0) for t in range(9)] + [(20.0, 20.0)] * 3, np.float32)


def columns(**changed):
    """The arrays of a file of OGBench: two episodes of 9 and 3 rows."""
    n = len(WALK)
    actions = np.stack([np.arange(n) / 20, np.zeros(n)], 1).astype(np.float32)
    ends = np.isin(np.arange(n), [8, 11])
    columns = {"observations": WALK, "actions": actions, "terminals": ends, "qpos": WALK}
    return {key: x for key, x in (columns | changed).items() if x is not None}


def put(folder, **changed):
    """Write such a file."""
    np.savez(folder / "log.npz", **columns(**changed))
    return folder / "log.npz"


def episodes(source):
    return list(source.episodes)


def test_a_file_is_read_with_goals_at_the_ends_of_its_pieces(tmp_path):
    file = put(tmp_path)
    source = load(name=STITCH, path=str(file), piece=1000)
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    assert source.info["name"] == f"{STITCH}@file-{digest[:8]}"
    assert source.info["digest"] == digest
    # the point of the second episode stands on its goal from the start: no piece
    for one in episodes(source):
        assert one.group == 0 and one.terminated
        goal = one.observations[0, 2:]
        assert (one.observations[:, 2:] == goal).all() and (one.final_observation[2:] == goal).all()
        first = int(2 * one.observations[0, 0])
        np.testing.assert_array_equal(
            one.observations[:, :2], WALK[first : first + len(one.rewards)]
        )
        np.testing.assert_allclose(one.actions[:, 0], (first + np.arange(len(one.rewards))) / 20)
        assert one.rewards.tolist() == [0.0] * (len(one.rewards) - 1) + [1.0]
        assert is_reached(one.final_observation[:2], goal)


def test_a_piece_ends_where_its_goal_is_reached():
    log = Log(
        **{"positions": WALK, "actions": columns()["actions"], "ends": columns()["terminals"]}
    )
    options = {"text": "none", "group": 3}
    one = episode_to_goal(log, 0, 8, np.array([3.0, 0.0]), "medium", **options)
    # within 1.0 of x = 3 from x = 2 on, the position of row 4
    assert one.rewards.tolist() == [0, 0, 0, 1] and one.final_observation.tolist() == [2, 0, 3, 0]
    assert (one.terminated, one.truncated, one.group) == (True, False, 3)
    far = episode_to_goal(log, 0, 8, np.array([20.0, 20.0]), "medium", **options)
    assert far.rewards.sum() == 0 and len(far.rewards) == 8 and far.truncated
    assert episode_to_goal(log, 0, 8, np.array([0.6, 0.0]), "medium", **options) is None


def test_pieces_cover_the_log_and_none_is_longer():
    made = list(random_pieces(10, 500, 20, np.random.default_rng(0)))
    assert [start for start, _ in made[1:]] == [stop for _, stop in made[:-1]]
    assert made[0][0] == 10 and made[-1][1] == 500
    lengths = {stop - start for start, stop in made}
    assert max(lengths) == 20 and min(lengths) == 1


def test_a_stitch_episode_walks_four_cells_and_stays():
    maze = Maze.from_name("large")
    log = generate(maze, "stitch", 30, 201, noise=0.0, seed=0)
    positions = log.positions.reshape(30, 201, 2)
    assert np.flatnonzero(log.ends).tolist() == (201 * np.arange(1, 31) - 1).tolist()
    first, last = cell_of(positions[:, 0]), cell_of(positions[:, -1])
    moves = [
        maze.distances(a)[(maze.free_cells == b).all(1)][0]
        for a, b in zip(first, last, strict=True)
    ]
    assert set(moves) == {4}
    np.testing.assert_allclose(positions[:, 150], positions[:, -1], atol=0.2)


def test_a_navigate_episode_goes_on_to_new_goals():
    maze = Maze.from_name("medium")
    log = generate(maze, "navigate", 4, 1001, noise=0.5, seed=0)
    cells = cell_of(log.positions.reshape(4, 1001, 2))
    visited = [len(np.unique(one, axis=0)) for one in cells]
    assert min(visited) > 10
    assert np.abs(log.actions).max() == 1 and 0.4 < np.abs(log.actions).mean() < 0.8


def test_the_noise_of_a_log_is_that_of_its_actions():
    maze = Maze.from_name("medium")
    quiet = generate(maze, "navigate", 20, 50, noise=0.0, seed=0)
    speeds = np.linalg.norm(quiet.actions, axis=1)
    np.testing.assert_allclose(speeds, 1, atol=1e-3)


def test_the_text_names_the_goal_and_the_observation_does_not():
    options = {"name": STITCH, "source": "regenerate", "episodes": 5}
    numbers, words = (episodes(load(**options, text=text)) for text in ("none", "goal"))
    assert len(numbers) == len(words)
    for one, other in zip(numbers, words, strict=True):
        np.testing.assert_array_equal(one.observations[:, :2], other.observations)
        assert one.task == "" and other.task == task_text("medium", one.observations[0, 2:])
    text = task_text("medium", np.array([12.74, -0.1]))
    assert text == "Point maze medium. Go to x = 12.5, y = 0.0."


def test_the_name_says_what_was_made():
    for options, name in [
        ({}, "pointmaze-giant-stitch-v0@regen-seed3-2"),
        ({"noise": 0.2}, "pointmaze-giant-stitch-v0@regen-seed3-2-noise0.2"),
    ]:
        source = load(
            name="pointmaze-giant-stitch", source="regenerate", episodes=2, seed=3, **options
        )
        assert source.info["name"] == name


def test_the_name_is_an_option_in_python_too():
    assert choice("dataset", "ogbench", name=STITCH)["name"] == STITCH


def test_a_file_like_the_published_one_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setitem(ogbench.SIZES, ("stitch", "medium"), (2, 6))
    file = put(tmp_path, terminals=np.isin(np.arange(12), [5, 11]))
    assert load(name=STITCH, path=str(file)).info["name"] == STITCH


def test_the_published_file_is_found_where_ogbench_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ogbench.files(name=STITCH) == []
    folder = tmp_path / ".ogbench" / "data"
    folder.mkdir(parents=True)
    file = put(folder).rename(folder / f"{STITCH}.npz")
    assert ogbench.files(name="pointmaze-medium-stitch") == [file]
    assert ogbench.files(name=STITCH, source="regenerate") == []
    assert load(name=STITCH).info["file"] == str(file)


def test_a_dataset_that_is_not_there_is_refused():
    for name in ("antmaze-large-stitch-v0", "pointmaze-teleport-navigate-v0", "pointmaze-large"):
        with pytest.raises(ValueError, match=r"dataset.name: expected one of pointmaze-medium-nav"):
            load(name=name)
    with pytest.raises(
        FileNotFoundError, match=r"/none.npz: expected the file of .*, got none; give"
    ):
        load(name=STITCH, path="/none.npz")
    for wrong in ({"piece": 0}, {"episodes": -1}):
        with pytest.raises(ValueError, match=f"dataset.{next(iter(wrong))}: expected"):
            load(name=STITCH, source="regenerate", **wrong)
    with pytest.raises(ValueError, match=r"dataset.noise: expected a deviation"):
        load(name=STITCH, source="regenerate", noise=-0.1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"actions": None},
            r"expected the keys .*, got observations, terminals, qpos; give the file",
        ),
        ({"observations": np.zeros((12, 29))}, r"observations \(n, 2\).*got \(12, 29\) float64"),
        ({"terminals": np.zeros((12, 1))}, r"and terminals \(n,\) of a point maze, got"),
        (
            {"observations": WALK + [0, 30]},
            r"row 0: expected a position in a free cell of pointmaze",
        ),
        ({"observations": WALK * np.nan}, r"row 0: expected a position in a free cell"),
        ({"actions": np.full((12, 2), 2.0)}, r"row 0: expected an action within -1 .. 1, got \[2"),
        ({"actions": np.full((12, 2), "east")}, r"expected numbers: .*got .*, \(12, 2\) <U4 and"),
        ({"terminals": np.zeros(12, bool)}, r"expected terminals to end with the last row"),
        ({"terminals": np.full(12, 0.5)}, r"terminals: expected 0 or 1, got 0.5 in row 0"),
    ],
)
def test_a_file_of_another_world_is_refused(tmp_path, changed, words):
    with pytest.raises(ValueError, match=words):
        load(name=STITCH, path=str(put(tmp_path, **changed)))


def test_a_damaged_file_is_refused(tmp_path):
    file = put(tmp_path)
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"log.npz: not a readable .npz file .*fetch it again"):
        load(name=STITCH, path=str(file))
