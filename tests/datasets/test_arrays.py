"""Your own data: D4RL's arrays by hand, episodes made in Python, stores as they are."""

import tracemalloc
from pathlib import Path
from zipfile import ZipFile

import h5py
import numpy as np
import pytest

from decisionllm.datasets import d4rl_files
from decisionllm.datasets.arrays import from_episodes, load, split_episodes
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store import open_store
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.runs import directory
from decisionllm.schema import Episode, Spec
from tests.conftest import LOOP, NANO, command, episode, node


def columns(**changed):
    """Five rows: an episode of two that terminates, one of two that is cut off, one of one that the
    log ends.
    """
    defaults = {
        "observations": np.arange(10.0).reshape(5, 2),
        "actions": np.array([[0.1], [0.2], [-0.3], [0.4], [0.5]]),
        "rewards": np.array([1.0, 2, 3, 4, 5]),
        "terminals": np.array([0, 1, 0, 0, 0], bool),
        "timeouts": np.array([0, 0, 0, 1, 0], bool),
    }
    return {key: column for key, column in (defaults | changed).items() if column is not None}


def put(path, **changed):
    np.savez(path, **columns(**changed))
    return str(path)


def test_episodes_end_at_terminals_timeouts_and_the_last_row(tmp_path):
    source = load(path=put(tmp_path / "mine.npz"))
    episodes = list(source.episodes)
    assert [e.rewards.tolist() for e in episodes] == [[1, 2], [3, 4], [5]]
    assert [e.observations.tolist() for e in episodes] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9]],
    ]
    assert [(e.terminated, e.truncated, e.group) for e in episodes] == [
        (True, False, 0),
        (False, True, 1),
        (False, True, 2),
    ]
    assert (source.spec.observation_dim, source.spec.action_dim, source.spec.horizon) == (2, 1, 2)
    assert (source.spec.low, source.spec.high) == ((np.float32(-0.3),), (0.5,)) and source.info[
        "name"
    ] == "mine"
    assert all(e.final_observation is None and e.task == "" for e in episodes)


def test_an_episode_may_both_terminate_and_be_cut_off(tmp_path):
    both = np.array([0, 1, 0, 0, 0], bool)
    first, second = load(path=put(tmp_path / "mine.npz", terminals=both, timeouts=both)).episodes
    assert (first.terminated, first.truncated) == (True, True)
    assert (second.terminated, second.truncated) == (False, True)


def test_next_observations_give_the_final_ones(tmp_path):
    path = put(
        tmp_path / "mine.npz", next_observations=np.arange(10.0).reshape(5, 2) + 100, timeouts=None
    )
    episodes = list(load(path=path).episodes)
    assert [e.final_observation.tolist() for e in episodes] == [[102, 103], [108, 109]]
    assert [e.rewards.tolist() for e in episodes] == [[1, 2], [3, 4, 5]]


def test_observations_of_one_number_may_be_a_column(tmp_path):
    after = np.arange(5.0) + 1
    seen = np.arange(5.0)
    path = put(tmp_path / "mine.npz", observations=seen, next_observations=after, timeouts=None)
    assert [e.final_observation.tolist() for e in load(path=path).episodes] == [[2], [5]]


def test_next_observations_of_another_width_are_refused(tmp_path):
    path = put(tmp_path / "mine.npz", next_observations=np.zeros((5, 3)))
    with pytest.raises(ValueError, match=f"{path}: expected next_observations of 2 columns"):
        load(path=path)


def test_discrete_actions_have_no_bounds(tmp_path):
    path = put(tmp_path / "mine.npz", actions=np.array([0, 2, 1, 0, 2]))
    with pytest.raises(ValueError, match=r"num_actions: expected no bounds .*got \[-5\] and"):
        load(path=path, num_actions=3, low=[-5], high=[5])


def test_integer_actions_are_discrete(tmp_path):
    path = put(tmp_path / "mine.npz", actions=np.array([0, 2, 1, 0, 2]), rewards=np.ones((5, 1)))
    assert (
        load(path=path).spec.num_actions == 3
        and load(path=path, num_actions=7).spec.num_actions == 7
    )
    assert next(load(path=path).episodes).actions.tolist() == [[0], [2]]


@pytest.mark.parametrize("block", [1, 100])
def test_next_observations_that_are_not_those_of_the_next_row_are_a_fault(
    block, tmp_path, monkeypatch
):
    monkeypatch.setattr(d4rl_files, "BLOCK", block)
    seen = columns()["observations"]
    after = np.append(seen[1:], [[0.0, 0.0]], axis=0)
    after[[1, 3]] = 100  # the last rows of their episodes
    assert "faults" not in load(path=put(tmp_path / "good.npz", next_observations=after)).info
    after[2] = 100
    source = load(path=put(tmp_path / "bad.npz", next_observations=after))
    fault = "next_observations: 1 of 2 are not the observation of the next row, although"
    assert source.info["faults"][0].startswith(fault)


def test_integer_actions_with_bounds_are_continuous(tmp_path):
    path = put(tmp_path / "mine.npz", actions=np.array([0, 2, 1, 0, 2]))
    assert load(path=path, low=[-1], high=[3]).spec == Spec(2, 1, 2, (-1,), (3,))
    assert load(path=path, high=[3]).spec == Spec(2, 1, 2, (0,), (3,))


def test_rows_of_nan_actions_are_missing(tmp_path):
    gaps = columns()["actions"]
    gaps[[0, 2]] = np.nan
    source = load(path=put(tmp_path / "mine.npz", actions=gaps))
    assert [
        None if e.action_weight is None else e.action_weight.tolist() for e in source.episodes
    ] == [[0, 1], [0, 1], None]
    assert (source.spec.low, source.spec.high) == ((np.float32(0.2),), (0.5,)), (
        "of the actions that are there"
    )
    with pytest.raises(
        ValueError, match="expected the recorded action of some steps, all of them are missing"
    ):
        prepare_store(
            node(
                "dataset",
                "arrays",
                path=put(tmp_path / "none.npz", actions=np.full((5, 1), np.nan)),
            ),
            tmp_path,
        )
    with pytest.raises(ValueError, match="expected finite actions, got inf in row 0"):
        load(path=put(tmp_path / "inf.npz", actions=np.array([[np.inf]] * 5)))
    with pytest.raises(ValueError, match="expected finite actions, got nan in row 0"):
        load(path=put(tmp_path / "half.npz", actions=np.array([[np.nan, 1.0]] * 5)))


def test_options_name_the_data_the_task_and_the_space(tmp_path):
    source = load(
        path=put(tmp_path / "a.npz"),
        name="pump",
        task="Fill.",
        text="constant",
        low=[-2],
        high=[2],
        horizon=9,
    )
    assert (
        source.spec == Spec(2, 1, 9, (-2,), (2,))
        and source.info["name"] == "pump"
        and next(source.episodes).task == "Fill."
    )


@pytest.mark.parametrize("bounds", [["a"], [None], 3])
@pytest.mark.parametrize("key", ["low", "high"])
def test_bounds_that_are_no_numbers_are_refused(key, bounds, tmp_path):
    with pytest.raises(ValueError, match=rf"dataset.{key}: expected a list of numbers, got"):
        load(path=put(tmp_path / "a.npz"), **{key: bounds})


def test_a_constant_text_needs_a_task(tmp_path):
    with pytest.raises(
        ValueError, match="dataset.task: text=constant needs a text, got none; give dataset.task="
    ):
        load(path=put(tmp_path / "a.npz"), text="constant")
    with pytest.raises(
        ValueError, match="dataset.text: expected one of auto, none, constant, episode, got 'goal'"
    ):
        load(path=put(tmp_path / "a.npz"), text="goal")


def test_a_task_that_is_not_read_is_a_fault_of_the_log(tmp_path):
    source = load(path=put(tmp_path / "a.npz"), task="Fill.")
    assert source.info["faults"] == ["the task text 'Fill.' is not read, since text=none"]
    assert "faults" not in load(path=put(tmp_path / "a.npz"), task="Fill.", text="constant").info


def test_a_column_that_is_a_group_of_hdf5_is_refused(tmp_path):
    with h5py.File(tmp_path / "dict.hdf5", "w") as file:
        for key, column in columns().items():
            file[f"{key}/goal" if key == "observations" else key] = column
    with pytest.raises(
        ValueError, match="expected observations as one array, got a group of goal; np.hstack"
    ):
        load(path=str(tmp_path / "dict.hdf5"))


@pytest.mark.parametrize(
    "there",
    [h5py.ExternalLink("nowhere.hdf5", "/rewards"), h5py.SoftLink("/nowhere"), h5py.Empty("f4")],
    ids=["external link", "link", "empty"],
)
def test_a_column_of_hdf5_that_holds_nothing_is_refused(there, tmp_path):
    with h5py.File(tmp_path / "mine.hdf5", "w") as file:
        for key, column in columns(rewards=there).items():
            file[key] = column
    message = "expected rewards as an array, got a broken link or an empty dataset"
    with pytest.raises(ValueError, match=message):
        load(path=str(tmp_path / "mine.hdf5"))


def test_a_member_of_npz_that_is_no_array_is_no_column(tmp_path):
    path = put(tmp_path / "mine.npz", rewards=None)
    with ZipFile(path, "a") as archive:
        archive.writestr("rewards", b"1 2 3 4 5")
    with pytest.raises(ValueError, match="rewards not among observations, actions, terminals"):
        load(path=path)


def test_an_hdf5_file_has_the_same_layout(tmp_path):
    with h5py.File(tmp_path / "mine.hdf5", "w") as file:
        for key, column in columns().items():
            file[key] = column
    assert [e.rewards.tolist() for e in load(path=str(tmp_path / "mine.hdf5")).episodes] == [
        [1, 2],
        [3, 4],
        [5],
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rewards": None},
            "expected D4RL's keys, rewards not among observations, actions, terminals, timeouts",
        ),
        (
            {"actions": np.zeros((4, 1))},
            "expected columns of one length, at least 1, got .*'actions': 4",
        ),
        ({"rewards": np.ones((5, 2))}, r"expected rewards of 1 columns, got shape \(5, 2\)"),
        (
            {"observations": np.ones((5, 2, 2))},
            r"expected observations of some columns, got shape \(5, 2, 2\)",
        ),
        (
            {"observations": np.array(list("abcde"))},
            r"expected observations of some columns, got shape \(5,\), <U1",
        ),
        ({"rewards": np.array([1, 2, np.nan, 4, 5])}, "expected finite rewards, got nan in row 2"),
        ({"terminals": np.arange(5)}, "terminals: expected 0 or 1, got 2 in row 2"),
        ({"timeouts": np.full(5, 0.5)}, "timeouts: expected 0 or 1, got 0.5 in row 0"),
    ],
)
def test_what_is_not_such_a_file_is_refused(tmp_path, changed, message):
    path = put(tmp_path / "mine.npz", **changed)
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        load(path=path)


def test_a_file_that_marks_no_end_is_refused(tmp_path):
    unmarked = np.zeros(5, bool)
    message = (
        "expected a row where terminals or timeouts is set, got 5 rows without; .* "
        "dataset.horizon cuts nothing"
    )
    for name, timeouts in (("one", None), ("both", unmarked)):
        path = put(tmp_path / f"{name}.npz", terminals=unmarked, timeouts=timeouts)
        with pytest.raises(ValueError, match=f"{path}: {message}"):
            load(path=path, horizon=2)


def test_a_file_of_one_episode_marks_its_last_row(tmp_path, capsys):
    last = np.arange(5) == 4
    path = put(tmp_path / "one.npz", terminals=np.zeros(5, bool), timeouts=last)
    assert [e.rewards.tolist() for e in load(path=path).episodes] == [[1, 2, 3, 4, 5]]
    loop = [word for word in LOOP if not word.startswith("dataset")]
    words = [
        "dataset=arrays",
        f"dataset.path={path}",
        "dataset.low=[-1]",
        "dataset.high=[1]",
        *loop,
        *NANO,
        "steps=1",
    ]
    assert command("train", *words, f"run={tmp_path}/run") == 0
    assert (
        "1 episodes, 5 steps; 0 episodes held out (data.held_out=0.02 of 1 groups leaves none)"
        in capsys.readouterr().out
    )
    assert command("train", *words, "data.held_out=0", f"run={tmp_path}/all") == 0
    assert "1 episodes, 5 steps; 0 episodes held out\n" in capsys.readouterr().out


GYMNASIUM = {"rewards": None, "terminals": None, "timeouts": None, "observations": None}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            GYMNASIUM
            | {
                "obs": np.ones((5, 2)),
                "reward": np.ones(5),
                "terminations": np.ones(5),
                "truncations": np.ones(5),
            },
            "observations, rewards, terminals, timeouts not among .*; rename obs: observations, "
            "reward: rewards, terminations: terminals, "
            "truncations: timeouts$",
        ),
        (
            {"terminals": None, "dones": np.ones(5)},
            r"terminals not among .*; rename dones: terminals \(timeouts where a time limit ended the episode\)$",
        ),
        (
            {"terminals": None},
            "terminals not among .*; add terminals, all false if only time limits end the episodes$",
        ),
        (
            {"timeouts": None, "truncations": np.ones(5)},
            "timeouts not among .*; rename truncations: timeouts$",
        ),
        (
            {"next_obs": np.ones((5, 2))},
            "next_observations not among .*; rename next_obs: next_observations$",
        ),
    ],
)
def test_names_of_other_libraries_are_translated(tmp_path, changed, message):
    with pytest.raises(ValueError, match=f"expected D4RL's keys, {message}"):
        load(path=put(tmp_path / "mine.npz", **changed))


def test_a_number_that_float32_cannot_hold_is_named(tmp_path):
    for key, row in (("observations", 3), ("actions", 1), ("rewards", 2)):
        column = columns()[key].copy()
        column[row] = -1e300
        path = put(tmp_path / f"{key}.npz", **{key: column})
        with pytest.raises(
            ValueError,
            match=rf"{path}: expected finite {key} \(float32\), got -1e\+300 in row {row}",
        ):
            load(path=path)


@pytest.mark.parametrize(
    ("first", "rounded"),
    [
        (1.7e9 + 30.0 * np.arange(5), "observation [0]: rounded by up to 0.5 of its range"),
        (2**24 + np.arange(5), "observation [0]: rounded by up to 0.25 of its range"),
        (1.7e9 + 1e9 * np.arange(5), None),  # steps of 128 of a range of 4e9 are not seen
        (np.full(5, 0.1), None),  # a constant stays one
        (np.arange(5) / 10, None),
    ],
)
@pytest.mark.parametrize("block", [2, 100])
def test_numbers_that_float32_rounds_visibly_are_a_fault(
    first, rounded, block, tmp_path, monkeypatch
):
    monkeypatch.setattr(d4rl_files, "BLOCK", block)
    path = put(tmp_path / "mine.npz", observations=np.stack([first, np.arange(5)], 1))
    dataset = node("dataset", "arrays", path=path, task="Fill.")
    unread, *faults = prepare_store(dataset, tmp_path / "home").info["faults"]
    assert unread.startswith("the task text")
    assert [fault.partition(" in float32")[0] for fault in faults] == ([rounded] if rounded else [])


def test_a_file_of_another_format_is_not_called_damaged(tmp_path):
    for name, content in (
        ("mine.csv", b"x,y,reward\n1,2,3\n"),
        ("mine.npy", b"\x93NUMPY"),
        ("mine", b"{}"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ValueError,
            match=f"{name}: expected an .npz or HDF5 file in D4RL's layout, got another format; "
            "np.savez makes one of the columns of a table, see docs/data.md",
        ):
            load(path=str(tmp_path / name))


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match="none.npz: expected an .npz or HDF5 file in D4RL's layout, found none",
    ):
        prepare_store(node("dataset", "arrays", path=str(tmp_path / "none.npz")), tmp_path)
    whole = Path(put(tmp_path / "mine.npz")).read_bytes()
    for damaged in (whole[:200], b"<html>404</html>", b""):
        (tmp_path / "mine.npz").write_bytes(damaged)
        with pytest.raises(
            ValueError, match="mine.npz: not a readable npz file, perhaps truncated"
        ):
            load(path=str(tmp_path / "mine.npz"))


@pytest.mark.parametrize("block", [1, 3, 4, 100])
def test_blocks_of_any_size_give_the_same_episodes(block, tmp_path, monkeypatch):
    by_columns = {"observations": np.asfortranarray(columns()["observations"])}
    paths = [
        put(tmp_path / "a.npz", next_observations=np.arange(10.0).reshape(5, 2)),
        put(tmp_path / "b.npz", **by_columns),
    ]
    whole = [list(load(path=path).episodes) for path in paths]
    monkeypatch.setattr(d4rl_files, "BLOCK", block)
    for path, expected in zip(paths, whole, strict=True):
        for e, expected_episode in zip(load(path=path).episodes, expected, strict=True):
            assert all(
                np.array_equal(value, vars(expected_episode)[name])
                for name, value in vars(e).items()
            )


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_a_file_is_not_held_as_a_whole(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(d4rl_files, "BLOCK", 10_000)
    n = 40_000  # rows, 7 MB
    log = {
        "observations": np.ones((n, 20)),
        "actions": np.zeros((n, 1)),
        "rewards": np.ones(n),
        "terminals": np.arange(1, n + 1) % 50 == 0,
    }
    if kind == "npz":
        np.savez(tmp_path / "log.npz", **log)
    else:
        with h5py.File(tmp_path / "log.hdf5", "w") as file:
            for key, column in log.items():
                file[key] = column
    del log
    tracemalloc.start()
    source = load(path=str(tmp_path / f"log.{kind}"), low=[-1], high=[1])
    steps = sum(len(e.rewards) for e in source.episodes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == n and source.spec.horizon == 50
    assert peak < 3e6  # bytes; a column of observations alone is 6.4e6


def test_a_changed_file_is_read_again(tmp_path):
    dataset = node("dataset", "arrays", path=put(tmp_path / "mine.npz"))
    first = prepare_store(dataset, tmp_path)
    assert prepare_store(dataset, tmp_path).path == first.path
    put(tmp_path / "mine.npz", rewards=np.arange(5.0), next_observations=np.zeros((5, 2)))
    assert prepare_store(dataset, tmp_path).rewards.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_episodes_made_in_python_are_trained_on(tmp_path):
    made = [episode([1, 2, 3], S=3, A=2, start=i, task="Go.") for i in range(6)]
    dataset = from_episodes(made, tmp_path / "mine", name="mine")
    store = prepare_store(dataset, tmp_path / "cache")
    assert store.path == tmp_path / "mine" and not (tmp_path / "cache").exists(), "it is not copied"
    assert store.fingerprint == open_store(tmp_path / "mine").fingerprint and store.info == {
        "name": "mine"
    }
    assert store.spec == Spec(
        3, 2, 3, (0.0, 0.0), (float(np.float32(0.07)),) * 2
    ) and store.tasks == ("Go.",)
    loop = [word for word in LOOP if not word.startswith("dataset")]
    words = [
        "env=none",
        "dataset=store",
        f"dataset.path={tmp_path / 'mine'}",
        "optim.batch_size=4",
        f"run={tmp_path / 'run'}",
    ]
    for text, tasks in {"auto": ["Go."], "none": [""]}.items():
        assert command("train", *loop, *NANO, *words, f"text={text}", "fresh=true") == 0
        assert directory.read(tmp_path / "run")[1]["embodiments"][ONLY]["tasks"] == tasks


def test_integer_actions_of_episodes_are_discrete(tmp_path):
    made = [
        Episode(np.zeros((2, 3)), np.array(actions), np.ones(2))
        for actions in ([[0], [4]], [[1], [0]])
    ]
    store = open_store(from_episodes(made, tmp_path / "mine", name="mine")["path"])
    assert store.spec == Spec(3, 1, 2, num_actions=5) and store.actions.tolist() == [
        [0],
        [4],
        [1],
        [0],
    ]
    pair = [Episode(np.zeros((2, 3)), np.ones((2, 2), int), np.ones(2))]
    with pytest.raises(
        ValueError, match="expected one index .*, got 2 integers; .* save floating-point numbers"
    ):
        from_episodes(pair, tmp_path / "pair", name="pair")


def test_episodes_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="episodes: expected at least one, got none"):
        from_episodes([], tmp_path / "mine", name="mine")
    with pytest.raises(
        ValueError,
        match="episode 1: expected observations of 2 and actions of 1 numbers, got 2 and 2",
    ):
        from_episodes([episode([1, 2]), episode([1], A=2)], tmp_path / "mine", name="mine")
    discrete = Spec(2, 1, 5, num_actions=2)
    with pytest.raises(ValueError, match="episode 0, step 1: expected an action an index below 2"):
        from_episodes([episode([1, 2])], tmp_path / "mine", name="mine", spec=discrete)
    for spec in (None, discrete):
        with pytest.raises(ValueError, match="episode 0: expected an Episode, got dict; make it"):
            from_episodes([{"rewards": [1]}], tmp_path / "mine", name="mine", spec=spec)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": np.full(2, 1e300)}, "expected rewards within float32, got 1e.300"),
        (
            {"rewards": np.full(2, 1e300, np.longdouble)},
            "expected rewards within float32, got 1e.3",
        ),
        ({"loss_mask": np.full(2, 0.3)}, "expected loss_mask of true and false, got float64"),
        ({"action_masks": np.ones((2, 3))}, "expected action_masks of true and false, got float64"),
        ({"action_weight": np.array([1.0, 2.0])}, "expected action_weight within 0 .. 1, got 2.0"),
        ({"final_observation": np.full(1, 1e300)}, "expected final_observation within float32"),
        ({"action_log_prob": np.full(2, 0.25)}, "expected the logarithm of .*, got 0.25; np.log"),
    ],
    ids=str,
)
def test_numbers_that_a_store_would_change_are_refused(changed, message, tmp_path):
    fields = {
        "observations": np.zeros((2, 1)),
        "actions": np.zeros((2, 1), int),
        "rewards": np.ones(2),
    }
    spec = Spec(observation_dim=1, action_dim=1, horizon=2, num_actions=3)
    with pytest.raises(ValueError, match=f"episode 0(, step 0)?: {message}"):
        from_episodes([Episode(**fields | changed)], tmp_path / "store", name="mine", spec=spec)


def test_a_store_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: expected a data store"):
        prepare_store(node("dataset", "store", path=str(tmp_path / "nowhere")), tmp_path)


def test_arrays_in_memory_are_split_too():
    assert [e.task for e in split_episodes([columns()], task="Fill.")] == ["Fill."] * 3


PARTS = np.array([[0, 0], [2, 1], [1, 0], [0, 1], [2, 0]])  # of MultiDiscrete([3, 2])


@pytest.mark.parametrize("actions", [PARTS, PARTS.astype(float), np.array([0, 5, 2, 1, 4])])
def test_parts_of_a_multidiscrete_action_become_an_index(tmp_path, actions):
    source = load(path=put(tmp_path / "mine.npz", actions=actions), action_parts=[3, 2])
    indices = np.concatenate([each.actions for each in source.episodes])
    assert indices.tolist() == [[0], [5], [2], [1], [4]]
    assert (source.spec.num_actions, source.info["action_parts"]) == (6, [3, 2])


def test_a_missing_action_of_parts_stays_missing(tmp_path):
    actions = PARTS.astype(float)
    actions[1] = np.nan
    source = load(path=put(tmp_path / "mine.npz", actions=actions), action_parts=[3, 2])
    first, *_ = source.episodes
    assert first.action_weight.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"got 2 integers; .*give their sizes, dataset.action_parts="),
        ({"action_parts": [2, 2]}, r"episode 0: dataset.action_parts=\[2, 2\]"),
        ({"action_parts": [3, 2], "num_actions": 5}, "sizes whose product is 5"),
    ],
)
def test_parts_of_another_action_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load(path=put(tmp_path / "mine.npz", actions=PARTS), **options)


def test_a_file_says_the_parts_of_its_observations(tmp_path):
    path = put(tmp_path / "mine.npz")
    source = load(path=path, observation_parts={"goal": 1, "arm": 1})
    assert source.info["observation_parts"] == [["goal", 1], ["arm", 1]]
    with pytest.raises(ValueError, match="sizes that add up to 2, .* got goal 3, 3 in all"):
        load(path=path, observation_parts={"goal": 3})


def test_one_number_of_an_action_that_is_missing_is_refused(tmp_path):
    actions = PARTS.astype(float)
    actions[1, 0] = np.nan
    with pytest.raises(ValueError, match="got nan in row 1; an action that was not recorded is"):
        load(path=put(tmp_path / "mine.npz", actions=actions))


def test_a_training_states_the_return_of_the_whole_log(tmp_path, capsys):
    ends = np.arange(80) % 2 == 1
    log = columns(
        observations=np.zeros((80, 2)),
        actions=np.linspace(-1, 1, 80)[:, None],
        rewards=np.arange(80.0),
        terminals=ends,
        timeouts=None,
    )
    np.savez(tmp_path / "log.npz", **log)
    words = ["dataset=arrays", f"dataset.path={tmp_path / 'log.npz'}", "env=none"]
    words += ["data.held_out=0.5", f"run={tmp_path / 'run'}"]
    assert command("train", *LOOP[2:], *NANO, *words) == 0
    # 40 episodes with the returns 1, 5, ..., 157, half of them held out
    assert "returns of the log: 79 on average, 157 at best" in "".join(capsys.readouterr())
