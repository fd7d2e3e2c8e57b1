"""Task texts in a file of columns: by hand, in every form that a log may have them."""

import h5py
import numpy as np
import pytest

from decisionllm.commands.data import card
from decisionllm.datasets import text_columns
from decisionllm.datasets.arrays import from_episodes, load, open_folder
from decisionllm.datasets.store import check_texts
from decisionllm.datasets.store_cache import prepare_store
from tests.conftest import LOOP, NANO, command, episode, node
from tests.datasets.test_arrays import columns, put

# five rows, episodes of two, two and one; a text for each
TASKS = ["Go left.", "Fahre nach Köln.", ""]
ROWS = [TASKS[0], TASKS[0], TASKS[1], TASKS[1], TASKS[2]]


def tasks_of(path, **options):
    return [each.task for each in load(path=str(path), **options).episodes]


def write_hdf5(path, **more):
    with h5py.File(path, "w") as file:
        for key, column in (columns() | more).items():
            file[key] = column
    return path


@pytest.mark.parametrize("block", [1, 2, 100])
@pytest.mark.parametrize(
    "texts",
    [
        np.array(ROWS),
        np.array(ROWS)[:, None],
        np.array(TASKS),
        np.char.encode(ROWS, "utf-8"),
        np.char.encode(TASKS, "utf-8"),
    ],
    ids=["rows", "rows of one column", "episodes", "bytes of rows", "bytes of episodes"],
)
def test_a_column_of_texts_gives_each_episode_its_text(texts, block, tmp_path, monkeypatch):
    monkeypatch.setattr(text_columns, "BLOCK", block)
    path = put(tmp_path / "mine.npz", language_instruction=texts)
    assert tasks_of(path) == TASKS
    assert load(path=path).info["text"] == "episode"


def test_one_text_is_that_of_every_episode(tmp_path):
    for text in (np.array("Go."), np.array(["Go."])):
        assert tasks_of(put(tmp_path / "mine.npz", task=text)) == ["Go."] * 3


@pytest.mark.parametrize("index", [[2, 2, 0, 0, 3], [2, 0, 3]], ids=["rows", "episodes"])
def test_an_index_chooses_from_a_table_of_texts(index, tmp_path):
    table = np.array(["b", "unused", "a", "c"])
    path = put(tmp_path / "mine.npz", tasks=table, task_index=np.array(index))
    assert tasks_of(path) == ["a", "b", "c"]
    path = put(tmp_path / "beyond.npz", tasks=table[:2], task_index=np.array([1, 1, 0, 0, 2]))
    with pytest.raises(ValueError, match="task_index within 0 .. 1, .* got 2 in episode 2"):
        load(path=path)


def test_as_many_texts_as_episodes_are_theirs_unless_a_number_stands_beside_several(tmp_path):
    texts = np.array(["a", "b", "c"])
    path = put(tmp_path / "mine.npz", tasks=texts, task_id=np.array([7, 9, 8]))
    assert tasks_of(path) == ["a", "b", "c"]
    path = put(tmp_path / "mine.npz", tasks=texts, task_index=np.array([1, 2, 1]))
    assert tasks_of(path) == ["b", "c", "b"]


@pytest.mark.parametrize("key", ["tasks", "infos/task"])
@pytest.mark.parametrize("texts", [ROWS, TASKS], ids=["rows", "episodes"])
@pytest.mark.parametrize("fixed", [False, True], ids=["strings", "bytes of fixed length"])
def test_texts_of_hdf5(fixed, texts, key, tmp_path):
    values = np.char.encode(texts, "utf-8") if fixed else texts
    assert tasks_of(write_hdf5(tmp_path / "mine.hdf5", **{key: values})) == TASKS


def test_task_from_names_a_column_and_text_none_reads_no_texts(tmp_path):
    path = put(tmp_path / "mine.npz", tasks=np.array(TASKS), remark=np.array(["x", "y", "z"]))
    assert tasks_of(path, task_from="remark") == ["x", "y", "z"]
    assert tasks_of(path, task_from="remark", text="none") == [""] * 3
    assert load(path=path, text="none").info["unread"] == ["tasks (text)", "remark (text)"]
    assert load(path=path).info["unread"] == ["remark (text)"]
    assert tasks_of(path, text="constant", task="Fill.") == ["Fill."] * 3


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        (
            {"tasks": np.array(TASKS), "prompt": np.array(TASKS)},
            {},
            "got tasks, prompt; dataset.task",
        ),
        ({"tasks": np.array(["a", "b"])}, {}, r"each of 5 rows or 3 episodes, got 2; bring"),
        (
            {"tasks": np.array(["a", "b", "b", "b", "c"])},
            {},
            "'a' and then 'b' in row 1, step 1 of",
        ),
        ({"tasks": np.array(TASKS, object)}, {}, "tasks as texts, got Python objects.*dtype=str"),
        ({"tasks": np.array([b"K\xf6ln"] * 5)}, {}, "expected tasks as texts in UTF-8"),
        ({}, {"task_from": "taks"}, "no column 'taks'"),
        ({}, {"task_from": "rewards"}, "expected rewards as texts, got float64"),
        ({}, {"text": "episode"}, "column of task texts in .* for text=episode, got observations"),
        (
            {"tasks": np.array(TASKS)},
            {"text": "constant", "task": "x", "task_from": "tasks"},
            "expected none with text=constant",
        ),
    ],
)
def test_texts_that_cannot_be_read_are_refused(more, options, message, tmp_path):
    path = put(tmp_path / "mine.npz", **more)
    with pytest.raises(ValueError, match=message):
        load(path=path, **options)


def test_numbers_called_task_are_no_texts(tmp_path):
    source = load(path=put(tmp_path / "mine.npz", task=np.array([0, 0, 1, 1, 2])))
    assert {each.task for each in source.episodes} == {""}
    assert source.info["unread"] == ["task"]


def test_columns_that_are_not_read_are_on_the_card_and_said_by_train(tmp_path, capsys):
    more = {"tasks": np.array(TASKS), "images": np.zeros((5, 2, 2)), "speed": np.arange(5.0)}
    path = put(tmp_path / "mine.npz", **more)
    lines = list(card(prepare_store(node("dataset", "arrays", path=path), tmp_path)))
    assert "  not read     images, speed" in lines
    assert any("3 different" in line for line in lines)
    words = ["dataset=arrays", f"dataset.path={path}", f"run={tmp_path / 'run'}"]
    assert command("train", *NANO, *LOOP[2:], *words) == 0
    assert "note: not read of the log: images, speed" in capsys.readouterr().out


def test_text_none_leaves_the_texts_of_a_store_out(tmp_path):
    episodes = [episode([1, 2], task=task, group=i) for i, task in enumerate("ab")]
    path = from_episodes(episodes, tmp_path / "store", name="mine")["path"]
    assert prepare_store(node("dataset", "store", path=path), tmp_path).tasks == ("a", "b")
    store = prepare_store(node("dataset", "store", path=path, text="none"), tmp_path)
    assert store.tasks == ("",)
    parts = {"one": {"dataset": "store", "path": path}}
    for text, tasks in {"auto": ("a", "b"), "none": ("",)}.items():
        mixture = node("dataset", "mixture", parts=parts, text=text)
        assert prepare_store(mixture, tmp_path).tasks == tasks
    assert store.fingerprint != open_folder(path=path).fingerprint


def test_a_text_option_that_the_texts_of_a_log_do_not_follow_is_refused(tmp_path, capsys):
    episodes = [episode([1, 2], task=task, group=i) for i, task in enumerate("abcd")]
    path = from_episodes(episodes, tmp_path / "store", name="mine")["path"]
    words = [*NANO, *LOOP[2:], f"run={tmp_path / 'run'}", "dataset=store", f"dataset.path={path}"]
    for text in ("paraphrased", "constant"):
        assert command("train", *words, f"text={text}") == 1
        message = f"dataset.text: expected one of auto, none, episode, got '{text}'"
        assert message in capsys.readouterr().err
    parts = f"dataset.parts={{one: {{dataset: store, path: {path}}}}}"
    mixed = [*NANO, *LOOP[2:], f"run={tmp_path / 'run'}", "dataset=mixture", parts]
    for text in ("paraphrased", "constant"):
        assert command("train", *mixed, f"text={text}") == 1
    assert command("train", *words, "text=episode") == 0
    with pytest.raises(
        ValueError, match="text=none: expected a dataset with the option `text`, got"
    ):
        check_texts("none", [open_folder(path=path)], {"_target_": "mylab.load"})
