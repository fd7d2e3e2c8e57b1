"""The store: what is written comes back, is found again, and anything damaged or out of bounds is
refused by name.
"""

import json
import mmap
import os
import resource
import shutil
import signal
import time
import tracemalloc
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from decisionllm.datasets import windows
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.store import open_store, read_and_verify
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import ColumnFile, write_store
from decisionllm.protocols import Source
from decisionllm.registry import build
from decisionllm.schema import Episode, Spec
from decisionllm.worlds.maze2d import dataset as maze2d
from tests.conftest import episode, make_store, node


def discrete(actions, masks, **fields):
    n = len(actions)
    return Episode(
        np.zeros((n, 2), np.float32),
        np.array(actions, np.float32)[:, None],
        np.ones(n, np.float32),
        action_masks=masks,
        **fields,
    )


def folders(path):
    return sorted(p.name for p in path.iterdir())


def test_episodes_come_back_as_they_were_written(tmp_path):
    written = [
        episode(
            [1, 2, 3], task="go north", group=7, final_observation=np.array([3, 3], np.float32)
        ),
        episode(
            [4],
            task="go south",
            group=9,
            terminated=True,
            truncated=False,
            final_observation=np.array([1, 1], np.float32),
        ),
        episode(
            [5, 6],
            task="go north",
            group=7,
            start=20,
            final_observation=np.array([22, 22], np.float32),
        ),
    ]
    store = open_store(make_store(tmp_path / "s", written).path)
    assert store.offsets.tolist() == [0, 3, 4, 6] and store.lengths.tolist() == [3, 1, 2]
    assert store.returns.tolist() == [6, 4, 11]
    assert store.tasks == ("go north", "go south") and store.info == {"name": "test"}
    assert store.spec == Spec(observation_dim=2, action_dim=1, horizon=50, low=(-1.0,), high=(1.0,))
    for e, before in enumerate(written):
        after = store.episode(e)
        for name, value in vars(before).items():
            np.testing.assert_array_equal(getattr(after, name), value, err_msg=name)


def test_discrete_actions_and_their_masks_come_back(tmp_path):
    masks = np.array([[True, False, True], [False, True, False]])
    spec = Spec(observation_dim=2, action_dim=1, horizon=2, num_actions=3)
    store = write_store(tmp_path / "s", Source(spec, [discrete([2, 1], masks)]))
    assert store.spec == spec
    assert store.episode(0).actions.tolist() == [[2], [1]]
    assert (
        store.episode(0).action_masks.dtype == bool
        and store.episode(0).action_masks.tolist() == masks.tolist()
    )


def test_members_of_a_team_come_back_and_what_it_was_paid_after_they_were_gone_counts(tmp_path):
    gone = replace(episode([1, 2]), agent=0, start=0, return_after_exit=5.0)
    stays = replace(episode([2, 5], S=2), agent=1, start=3, return_after_exit=0.0)
    store = open_store(make_store(tmp_path / "s", [gone, stays]).path)
    assert [
        (e.agent, e.start, e.return_after_exit) for e in (store.episode(0), store.episode(1))
    ] == [(0, 0, 5.0), (1, 3, 0.0)]
    assert store.returns.tolist() == [8, 7]
    assert windows.load_steps(store).returns_to_go.tolist() == [8, 7, 7, 5]


def test_a_layout_comes_back_and_must_fill_the_observation(tmp_path):
    spec = Spec(
        5, 1, horizon=3, low=(-1.0,), high=(1.0,), entity_schema=(("own", 1, 1), ("goal", 2, 2))
    )
    store = write_store(
        tmp_path / "s",
        Source(spec, [Episode(np.zeros((1, 5), np.float32), np.zeros((1, 1)), np.zeros(1))]),
    )
    assert open_store(store.path).spec == spec
    with pytest.raises(ValueError, match="blocks of 5 numbers in all"):
        replace(spec, entity_schema=(("own", 1, 2),))


def test_categorical_columns_change_no_fingerprint_of_other_data(tmp_path):
    plain = Spec(2, 1, horizon=3, low=(-1.0,), high=(1.0,))
    marked = replace(plain, categorical=[[0, 2]])
    one, other = (
        write_store(tmp_path / str(i), Source(spec, [episode([1, 2])]))
        for i, spec in enumerate((plain, marked))
    )
    assert open_store(other.path).spec.categorical == ((0, 2),) and verify(other)
    assert other.fingerprint != one.fingerprint == "3c08ad739775f2097cb6e03f563ef0d6"


@pytest.mark.parametrize(
    "field",
    ["observations", "actions", "rewards", "task", "group", "terminated", "final_observation"],
)
def test_one_changed_number_is_another_fingerprint(tmp_path, field):
    facts = {"final_observation": np.zeros(2, np.float32)}
    changed = {"task": {"task": "x"}, "group": {"group": 1}, "terminated": {"terminated": True}}
    changed["final_observation"] = {"final_observation": np.array([0, 1e-6], np.float32)}
    before = episode([1, 2], **facts)
    after = episode([1, 2], **facts | changed.get(field, {}))
    if field in ("observations", "actions", "rewards"):
        getattr(after, field)[1] += 1e-6
    one, same, other = (
        make_store(tmp_path / name, [e])
        for name, e in (("a", before), ("b", episode([1, 2], **facts)), ("c", after))
    )
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_where_episodes_part_is_in_the_fingerprint(tmp_path):
    early = make_store(tmp_path / "a", [episode([1]), episode([2, 3, 4], start=1)])
    late = make_store(tmp_path / "b", [episode([1, 2]), episode([3, 4], start=2)])
    assert (
        early.rewards.tolist() == late.rewards.tolist()
        and early.observations.tolist() == late.observations.tolist()
    )
    assert early.fingerprint != late.fingerprint


def test_a_damaged_store_is_refused_by_the_file_that_is_damaged(tmp_path):
    path = make_store(tmp_path / "s", [episode([1, 2, 3])]).path
    rewards, card = path / "rewards.npy", path / "card.json"
    good, good_card = rewards.read_bytes(), card.read_text(encoding="utf-8")
    for damage, message in (
        (
            lambda: rewards.write_bytes(good[:-1]),
            r"rewards.npy is damaged or missing .*delete the folder",
        ),
        (lambda: rewards.write_bytes(b"\0" * len(good)), r"rewards.npy is damaged or missing"),
        (rewards.unlink, r"rewards.npy is damaged or missing"),
        (
            lambda: np.save(rewards, np.zeros(2, np.float32)),
            r"rewards.npy: expected float32 \[3\], got float32 \[2\]",
        ),
        (
            lambda: np.save(rewards, np.zeros(3)),
            r"rewards.npy: expected float32 \[3\], got float64 \[3\]",
        ),
        (
            lambda: rewards.write_bytes(b""),
            r"rewards.npy is damaged or missing .*delete the folder",
        ),
        (lambda: card.write_text(good_card[:-9], encoding="utf-8"), r"card.json is damaged"),
        (
            lambda: card.write_text("[]", encoding="utf-8"),
            r"card.json is damaged \(expected {KEY: VALUE}, got \[\]",
        ),
        (
            lambda: card.write_text('{"format": 1}', encoding="utf-8"),
            r"card.json is damaged \(it lacks spec, tasks",
        ),
        (
            lambda: card.write_text(
                json.dumps(json.loads(good_card) | {"format": 0}), encoding="utf-8"
            ),
            r"expected store format 1, got 0",
        ),
    ):
        damage()
        with pytest.raises(ValueError, match=message):
            open_store(path)
        rewards.write_bytes(good)
        card.write_text(good_card, encoding="utf-8")
    assert open_store(path).rewards.tolist() == [1, 2, 3]
    card.unlink()
    with pytest.raises(FileNotFoundError, match="expected a data store .* found none"):
        open_store(path)


def test_unequal_lengths_and_numbers_that_are_none_are_refused_when_an_episode_is_made():
    rows = np.zeros((3, 2), np.float32)
    with pytest.raises(
        ValueError, match=r"Episode.actions: expected shape \(n=3, A\), got \(2, 1\)"
    ):
        Episode(rows, np.zeros((2, 1), np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"Episode.rewards: expected shape \(n=3\), got \(4,\)"):
        Episode(rows, np.zeros((3, 1), np.float32), np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="expected at least one step"):
        episode([])
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(
            ValueError, match=rf"Episode.rewards: expected finite numbers, got {bad} at \[1\]"
        ):
            episode([0, bad])


@pytest.mark.parametrize(
    "episodes, message",
    [
        (
            [episode([1] * 4), episode([1] * 6)],
            r"episode 1: expected at most 5 steps \(the horizon\), got 6",
        ),
        (
            [episode([1]), episode([1, 1], start=150)],
            r"episode 1, step 0: expected an action within \[-1.0\] .. \[1.0\], got \[1.5\]",
        ),
        (
            [episode([1], S=2), episode([1], S=3)],
            "episode 1: expected observations of 2 and actions of 1 numbers, got 3 and 1",
        ),
        (
            [episode([1], final_observation=np.zeros(2)), episode([1])],
            "episode 1: expected final_observation in every episode or in none",
        ),
        ([], "expected at least one episode, got none"),
    ],
    ids=["too long", "action beyond its bound", "another size", "a part of some", "none"],
)
def test_what_does_not_fit_the_spec_is_refused_and_leaves_nothing(tmp_path, episodes, message):
    spec = Spec(observation_dim=2, action_dim=1, horizon=5, low=(-1.0,), high=(1.0,))
    with pytest.raises(ValueError, match=message):
        write_store(tmp_path / "s", Source(spec, episodes))
    assert folders(tmp_path) == []


def test_rounding_beyond_a_bound_is_not_an_action_outside_its_space(tmp_path):
    row = np.array([[1.0 + 1e-6]], np.float32)
    assert row > 1
    spec = Spec(observation_dim=1, action_dim=1, horizon=5, low=(-1.0,), high=(1.0,))
    write_store(tmp_path / "s", Source(spec, [Episode(row, row, np.zeros(1, np.float32))]))


@pytest.mark.parametrize(
    "actions, masks, message",
    [
        ([0, 3], None, r"episode 0, step 1: expected an action an index below 3, got \[3.0\]"),
        ([0, -1], None, "step 1: expected an action an index below 3"),
        ([0, 0.5], None, "step 1: expected an action an index below 3"),
        (
            [0, 2],
            [[1, 1, 1], [1, 1, 0]],
            "episode 0, step 1: the mask forbids the recorded action 2",
        ),
        ([0, 1], [[1, 1], [1, 1]], "expected action masks of 3 actions, got 2"),
    ],
)
def test_impossible_discrete_actions_are_refused(tmp_path, actions, masks, message):
    spec = Spec(observation_dim=2, action_dim=1, horizon=5, num_actions=3)
    with pytest.raises(ValueError, match=message):
        write_store(
            tmp_path / "s", Source(spec, [discrete(actions, masks and np.array(masks, bool))])
        )


def test_a_write_that_fails_half_way_leaves_nothing_behind_and_the_old_store_whole(tmp_path):
    old = make_store(tmp_path / "s", [episode([1, 2])])
    # the first episode is on disk by the time the second one is refused
    source = Source(old.spec, [episode([9]), episode([9], S=3)])
    with pytest.raises(ValueError, match="episode 1: expected observations of 2"):
        write_store(tmp_path / "s", source)
    assert folders(tmp_path) == ["s"]
    assert open_store(tmp_path / "s").rewards.tolist() == [1, 2]
    make_store(tmp_path / "s", [episode([3])])
    assert folders(tmp_path) == ["s"] and open_store(tmp_path / "s").rewards.tolist() == [3]


@pytest.mark.parametrize("facts", [{"info": {"n": np.int64(3)}}, {"facts": {"Go.": np.ones(2)}}])
def test_facts_that_json_cannot_hold_are_refused_before_an_episode_is_read(tmp_path, facts):
    spec = Spec(observation_dim=2, action_dim=1, horizon=5, num_actions=3)
    episodes = iter([episode([1])])
    with pytest.raises(ValueError, match=r"expected info and facts that JSON can hold \(Object of"):
        write_store(tmp_path / "s", Source(spec, episodes, **facts))
    assert len(list(episodes)) == 1


def test_a_folder_or_file_that_is_no_store_is_never_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("kept", encoding="utf-8")
    for path in (tmp_path / "data", tmp_path / "data" / "notes.txt"):
        with pytest.raises(
            FileExistsError,
            match=f"{path}: expected a new folder, or a store to replace; choose another path",
        ):
            make_store(path, [episode([1])])
    assert (
        folders(tmp_path) == ["data"]
        and (tmp_path / "data" / "notes.txt").read_text(encoding="utf-8") == "kept"
    )
    (tmp_path / "empty").mkdir()
    assert make_store(tmp_path / "empty", [episode([1])]).rewards.tolist() == [1]


def test_prepare_makes_a_store_once_and_finds_it_by_its_options(tmp_path):
    one = prepare_store(node("dataset", "synthetic", episodes=3), tmp_path)
    stamp = (one.path / "card.json").stat().st_mtime_ns
    again = prepare_store(node("dataset", "synthetic", episodes=3), str(tmp_path))
    other = prepare_store(node("dataset", "synthetic", episodes=3, seed=1), tmp_path)
    assert again.path == one.path and (one.path / "card.json").stat().st_mtime_ns == stamp
    assert other.path != one.path and other.fingerprint != one.fingerprint
    assert len(folders(tmp_path / "stores")) == 2


AUCTION = Path(__file__).parents[1] / "fixtures" / "auctionnet" / "trajectories_periods_7_8.csv.gz"
WORDED = [
    ("maze2d-umaze", {"steps": 1000, "seed": 1}, ("none", "constant")),
    (
        "maze2d-umaze",
        {"steps": 1000, "seed": 1, "without_goals": "1,3"},
        ("goal", "paraphrased", "shuffled"),
    ),
    (
        "auction",
        {"path": str(AUCTION), "relabel": 1},
        ("none", "constant", "informative", "paraphrased", "shuffled"),
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "texts"), WORDED, ids=["without goals", "with goals", "auction"]
)
def test_a_changed_wording_opens_the_store_and_its_texts_are_the_readers(
    name, options, texts, tmp_path
):
    cards = []
    for text in texts:
        dataset = node("dataset", name, text=text, **options)
        store = prepare_store(dataset, tmp_path)
        made = write_store(tmp_path / text, build(dataset))
        cards.append((store.path, (store.path / "card.json").stat().st_mtime_ns))
        assert [store.episode(e).task for e in range(len(store.lengths))] == [
            made.episode(e).task for e in range(len(made.lengths))
        ]
        assert store.tasks == made.tasks and store.info == made.info
        assert verify(store).fingerprint == made.fingerprint, (
            "as if it had been written with these texts"
        )
    assert len({*cards}) == 1 and len(folders(tmp_path / "stores")) == 1


def test_a_goal_in_the_text_changes_the_data_of_a_maze(tmp_path):
    dataset = node("dataset", "maze2d-umaze", steps=1000)
    bare, named = (prepare_store(dataset | {"text": text}, tmp_path) for text in ("none", "goal"))
    assert bare.path != named.path and bare.rewards.sum() != named.rewards.sum()


def test_a_store_of_before_its_facts_is_made_again(tmp_path, monkeypatch):
    dataset = node("dataset", "maze2d-umaze", steps=1000, text="goal")
    older = replace(maze2d.READER, version=1)
    monkeypatch.setattr("decisionllm.worlds.maze2d.dataset.READER", older)
    before = prepare_store(dataset, tmp_path)
    monkeypatch.undo()
    assert (
        prepare_store(dataset, tmp_path).path != before.path
        and prepare_store(dataset, tmp_path).facts
    )


def test_a_changed_byte_is_found_when_every_byte_is_read(tmp_path):
    store = make_store(tmp_path / "s", [episode([1, 2, 3])])
    assert verify(open_store(store.path)).rewards.tolist() == [1, 2, 3]
    content = bytearray((store.path / "rewards.npy").read_bytes())
    content[-1] ^= 1
    (store.path / "rewards.npy").write_bytes(content)
    with pytest.raises(
        ValueError,
        match=f"damaged: expected fingerprint {store.fingerprint}, got .*delete the folder",
    ):
        verify(open_store(store.path))


def test_a_store_of_another_version_of_its_reader_is_made_again(tmp_path, monkeypatch):
    one = prepare_store(node("dataset", "synthetic", episodes=3), tmp_path)
    newer = DatasetReader(version=2)
    monkeypatch.setattr("decisionllm.datasets.synthetic.READER", newer, raising=False)
    assert prepare_store(node("dataset", "synthetic", episodes=3), tmp_path).path != one.path


@pytest.mark.parametrize("name", ["VERSION", "files", "data_options", "set_texts"])
def test_what_no_reader_object_names_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / f"unnamed_{name}.py").write_text(f"load = {name} = list", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    message = rf"unnamed_{name}: expected READER = .*DatasetReader.*, got {name} that nothing"
    with pytest.raises(ValueError, match=message):
        prepare_store({"_target_": f"unnamed_{name}.load"}, tmp_path / "home")


def test_what_a_reader_must_return_is_said(tmp_path, monkeypatch):
    (tmp_path / "own_readers.py").write_text(
        """
from decisionllm.protocols import Source
def nothing():
    return None
def episodes():
    return []
def without_a_name():
    return Source(None, [], {"text": "none"})
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    for reader, got in (
        ("nothing", "NoneType"),
        ("episodes", "list"),
        ("without_a_name", "info {'text': 'none'}"),
    ):
        message = rf"own_readers.{reader}: expected a .*Source\(.* of a reader, got {got}$"
        with pytest.raises(ValueError, match=message):
            prepare_store({"_target_": f"own_readers.{reader}"}, tmp_path / "home")


def write_log(path, reward, steps=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["observations"] = np.ones((steps, 4), np.float32)
        file["actions"] = np.zeros((steps, 2), np.float32)
        file["rewards"] = np.full(steps, reward, np.float32)
        file["terminals"] = np.zeros(steps, bool)
    # a clock too coarse to tell two writes apart must not decide this test
    later = time.time_ns() + 10**9 * int(reward)
    os.utime(path, ns=(later, later))


def test_prepare_reads_a_replaced_file_again(tmp_path):
    dataset = node("dataset", "maze2d-umaze", path=str(tmp_path / "log.hdf5"), source="file")
    for reward in (1, 2):
        write_log(tmp_path / "log.hdf5", reward)
        assert prepare_store(dataset, tmp_path / "home").returns.tolist() == [4 * reward]
    prepare_store(dataset, tmp_path / "home")
    assert len(folders(tmp_path / "home/stores")) == 2


def test_prepare_reads_a_file_that_has_come_to_the_users_folder(tmp_path):
    dataset = node("dataset", "maze2d-umaze", steps=50)
    assert (
        prepare_store(dataset, tmp_path / "home").info["name"] == "maze2d-umaze-v1@regen-seed0-50"
    )
    write_log(Path("~/.d4rl/datasets/maze2d-umaze-sparse-v1.hdf5").expanduser(), reward=3)
    assert prepare_store(dataset, tmp_path / "home").returns.tolist() == [12]


def test_opening_a_million_steps_reads_none_of_them(tmp_path):
    n = 1_000_000
    rows = np.zeros((n, 4), np.float32)
    rows[-1] = 7
    spec = Spec(observation_dim=4, action_dim=2, horizon=n, low=(-1.0, -1.0), high=(1.0, 1.0))
    path = write_store(
        tmp_path / "s",
        Source(spec, [Episode(rows, np.zeros((n, 2), np.float32), np.zeros(n, np.float32))]),
    ).path
    tracemalloc.start()
    store = open_store(path)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 200_000, "bytes; the arrays have 28 million"
    for array in (store.observations, store.actions, store.rewards):
        while isinstance(array, np.ndarray):
            array = array.base
        assert isinstance(array, mmap.mmap)
    assert store.episode(0).observations[-1].tolist() == [7, 7, 7, 7]


def endless(n=10**9):
    """Episodes of 1,000 steps of 20 numbers, made one after the other."""
    return (
        Episode(np.full((1000, 20), e % 7, np.float32), np.zeros((1000, 1)), np.ones(1000), group=e)
        for e in range(n)
    )


def verify(store):
    """The store, of which every byte was read."""
    deque(read_and_verify(store, 9), 0)
    return store


WIDE = Spec(observation_dim=20, action_dim=1, horizon=1000, low=(-1.0,), high=(1.0,))
NAMED = {"name": "wide"}


def test_files_are_those_of_numpy_whatever_the_number_of_rows(tmp_path):
    for blocks in (
        [],
        [np.zeros((0, 3))],
        [np.ones((2, 3)), np.zeros((1, 3))],
        [np.full((1000, 3), i) for i in range(30)],
    ):
        with closing(ColumnFile(tmp_path / "ours.npy", np.float32)) as column:
            for block in blocks:
                column.append(block)
        np.save(
            tmp_path / "theirs.npy",
            np.concatenate([*blocks, np.zeros((0, 3) if blocks else 0)]).astype(np.float32),
        )
        assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


def test_the_memory_of_writing_does_not_depend_on_the_number_of_episodes(tmp_path):
    def peak(n):
        tracemalloc.start()
        write_store(tmp_path / "s", Source(WIDE, endless(n)))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(100) < 1.2 * peak(10)  # the larger store has 9 MB


def test_a_killed_writer_leaves_no_store_and_the_next_one_removes_its_files(tmp_path, monkeypatch):
    options = node("dataset", "synthetic", episodes=3)

    def reader(**_):
        yield from endless(5)
        os.kill(os.getpid(), signal.SIGKILL)

    whole = prepare_store(options, tmp_path)
    shutil.rmtree(whole.path)
    if not (child := os.fork()):
        with monkeypatch.context() as patch:
            patch.setattr(
                "decisionllm.datasets.store_cache.build", lambda _: Source(WIDE, reader(), NAMED)
            )
            try:
                prepare_store(options, tmp_path)
            finally:
                os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    left = folders(tmp_path / "stores")
    assert (
        len(left) == 1
        and left[0].startswith(".partial-")
        and not list((tmp_path / "stores" / left[0]).glob("card.json"))
    )
    assert prepare_store(options, tmp_path).fingerprint == whole.fingerprint and folders(
        tmp_path / "stores"
    ) == [whole.path.name]


def test_a_store_that_two_prepare_at_once_is_made_once(tmp_path, monkeypatch, capsys):
    """Also by a reader whose work is done before it returns its source, as `imagined` is."""
    made = []

    def read(dataset):
        made.append(dataset)
        time.sleep(0.2)
        return Source(WIDE, endless(3), NAMED)

    monkeypatch.setattr("decisionllm.datasets.store_cache.build", read)
    with ThreadPoolExecutor(2) as pool:
        stores = list(
            pool.map(
                lambda _: prepare_store(node("dataset", "synthetic", episodes=3), tmp_path),
                range(2),
            )
        )
    assert (
        len(made) == 1
        and stores[0].fingerprint == stores[1].fingerprint
        and stores[1].rewards.sum() == 3000
    )
    assert "waiting for another process that reads synthetic-" in capsys.readouterr().err


@pytest.mark.parametrize("room", [200_000, 30])
def test_a_full_disk_is_one_clear_error_and_leaves_the_old_store(room, tmp_path):
    """By the limit of this process on the size of a file: within the rows, and within a file's
    header.
    """
    old = write_store(tmp_path / "s", Source(WIDE, endless(2)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(
            OSError,
            match=r"/s: the store could not be written \(File too large\); nothing of it is left. Make room",
        ):
            write_store(tmp_path / "s", Source(WIDE, endless(20)))
        with pytest.raises(OSError, match="t: the store could not be written"):
            write_store(tmp_path / "t", Source(WIDE, endless(20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        folders(tmp_path) == ["s"]
        and verify(open_store(tmp_path / "s")).fingerprint == old.fingerprint
    )


def test_a_store_without_one_of_its_files_is_refused(tmp_path):
    path = write_store(tmp_path / "s", Source(WIDE, endless(2))).path
    (path / "rewards.npy").unlink()
    with pytest.raises(
        ValueError,
        match=r"rewards.npy is damaged or missing \(.*\); delete the folder to make it again",
    ):
        open_store(path)
