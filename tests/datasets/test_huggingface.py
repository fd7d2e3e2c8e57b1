"""Parquet and Arrow files with named columns, by hand."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from decisionllm.datasets import table_files
from decisionllm.datasets.huggingface import load
from tests.conftest import LOOP, NANO, command


def columns(**changed):
    """Five rows, episodes of two, two and one."""
    defaults = {
        "episode_index": [0, 0, 1, 1, 4],
        "t": [0, 1, 0, 1, 0],
        "state": pa.array([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], pa.list_(pa.float32(), 2)),
        "angle": [0.5, 1.5, 2.5, 3.5, 4.5],
        "action": [[0.1], [0.2], [-0.3], [0.4], [0.5]],
        "reward": [1.0, 2, 3, 4, 5],
        "done": [False, True, False, False, False],
        "prompt": ["Go left.", "Go left.", "Fahre.", "Fahre.", None],
    }
    return {key: column for key, column in (defaults | changed).items() if column is not None}


def put(file, **changed):
    file.parent.mkdir(exist_ok=True, parents=True)
    parquet.write_table(pa.table(columns(**changed)), file)
    return file


def read(path, **options):
    options = {"observations": ["state", "angle"], "rewards": "reward"} | options
    source = load(path=str(path), **options)
    return source, list(source.episodes)


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_named_columns_are_episodes(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "ROWS", rows)
    path = put(tmp_path / "mine.parquet")
    source, episodes = read(path, terminals="done", task_from="prompt", step="t")
    assert [e.observations.tolist() for e in episodes] == [
        [[0, 1, 0.5], [2, 3, 1.5]],
        [[4, 5, 2.5], [6, 7, 3.5]],
        [[8, 9, 4.5]],
    ]
    assert [np.round(e.actions, 6)[:, 0].tolist() for e in episodes] == [
        pytest.approx(actions) for actions in ([0.1, 0.2], [-0.3, 0.4], [0.5])
    ]
    assert [e.rewards.tolist() for e in episodes] == [[1, 2], [3, 4], [5]]
    assert [(e.terminated, e.truncated) for e in episodes] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert [e.task for e in episodes] == ["Go left.", "Fahre.", ""]
    assert {e.task for e in read(path, task_from="prompt", text="none")[1]} == {""}
    assert [e.group for e in episodes] == [0, 1, 2] and source.spec.horizon == 2
    assert source.info["observation_parts"] == [["state", 2], ["angle", 1]]
    assert source.info["name"] == "mine" and source.info["text"] == "episode"
    assert "unread" not in source.info and "faults" not in source.info


def test_files_of_a_folder_are_read_in_order_and_an_episode_may_cross_them(tmp_path):
    table = pa.table(columns())
    for i, part in enumerate((table[:1], table[1:3], table[3:])):
        folder = tmp_path / "mine" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        parquet.write_table(part, folder / f"train-{i:05d}-of-00003.parquet")
    put(tmp_path / "mine" / "data" / "test-00000-of-00001.parquet")
    _, episodes = read(tmp_path / "mine", pattern="data/train-*")
    assert [e.rewards.tolist() for e in episodes] == [[1, 2], [3, 4], [5]]
    with pytest.raises(ValueError, match="episode_index 0: expected the rows of an episode one af"):
        read(tmp_path / "mine")  # the test split repeats the episodes
    with pytest.raises(FileNotFoundError, match="expected Parquet or Arrow files, \\*.txt, got no"):
        read(tmp_path / "mine", pattern="*.txt")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_folder_of_save_to_disk_is_read(kind, tmp_path):
    table = pa.table(columns())
    writer = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[kind]
    with writer(str(tmp_path / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table)
    (tmp_path / "state.json").write_text("{}", encoding="utf-8")
    _, episodes = read(tmp_path)
    assert [e.rewards.tolist() for e in episodes] == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize("rows", [1, 100])
def test_a_row_may_be_an_episode_with_lists_of_its_steps(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "ROWS", rows)
    columns = {
        "observations": [[[0.0, 1], [2, 3], [4, 5]], [[6, 7]]],
        "actions": [[[0.1], [0.2], [0.3]], [[0.4]]],
        "rewards": [[1.0, 2, 3], [4]],
        "dones": [[False, False, True], [False]],
        "prompt": ["Go left.", "Go right."],
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    parquet.write_table(pa.table(columns), tmp_path / "b.parquet")
    names = {"observations": ["observations"], "actions": "actions", "rewards": "rewards"}
    options = names | {"terminals": "dones", "task_from": "prompt", "episode": "none"}
    _, episodes = read(tmp_path, **options)
    assert [e.rewards.tolist() for e in episodes] == [[1, 2, 3], [4]] * 2
    assert episodes[2].observations.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert [e.task for e in episodes] == ["Go left.", "Go right."] * 2
    assert [e.terminated for e in episodes] == [True, False] * 2
    columns["rewards"] = [[1.0, 2, 3], [4, 5]]
    parquet.write_table(pa.table(columns), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match="as many steps in rewards as in other .* 2 and 1 in row 3"
    ):
        read(tmp_path, **options)


def test_integers_are_discrete_actions_and_unread_columns_are_named(tmp_path):
    path = put(tmp_path / "mine.parquet", action=[0, 2, 1, 1, 0])
    source, episodes = read(path, observations=["state"])
    assert source.spec.num_actions == 3 and episodes[0].actions.tolist() == [[0], [2]]
    assert source.info["unread"] == ["t", "angle", "done", "prompt"]
    assert source.info["observation_parts"] == [["observation", 2]]


def test_without_a_reward_success_is_the_reward_of_the_last_step(tmp_path):
    path = put(tmp_path / "mine.parquet", reward=None, done=[False, True, True, False, False])
    source, episodes = read(path, rewards="", success="done")
    assert [e.rewards.tolist() for e in episodes] == [[0, 1], [0, 1], [0]]
    assert [e.terminated for e in episodes] == [True, False, False]
    assert "faults" not in source.info
    source, episodes = read(path, rewards="")
    assert [e.rewards.tolist() for e in episodes] == [[0, 0], [0, 0], [0]]
    assert "train with model.condition_on=none" in source.info["faults"][0]


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        (
            {},
            {"observations": []},
            "expected the columns of an observation, got none; .* state, angle",
        ),
        ({}, {"observations": ["sate"]}, "no column 'sate'; did you mean state"),
        ({}, {"observations": ["prompt"]}, "expected prompt as numbers, got string"),
        ({}, {"task_from": "angle", "text": "episode"}, "expected angle as texts, got double"),
        (
            {},
            {"text": "episode"},
            "dataset.task_from: expected a column of task texts with text=epi",
        ),
        (
            {"t": [0, 0, 0, 1, 0]},
            {"step": "t"},
            "episode_index 0: expected t to go up, got 0 after 0",
        ),
        (
            {"episode_index": [0, 1, 0, 1, 1]},
            {},
            "episode_index 0: expected the rows of an episode o",
        ),
        ({"reward": [1, None, 3, 4, 5]}, {}, "episode_index 0: .*rewards"),
        (
            {"done": [0, 2, 0, 0, 0]},
            {"terminals": "done"},
            "episode_index 0: done.*expected 0 or 1",
        ),
        ({"action": [[0.1], [0.2, 0.3], [0.1], [0.2], [0.5]]}, {}, "lists of one length in action"),
        (
            {"prompt": ["a", "b", "c", "c", "c"]},
            {"task_from": "prompt"},
            "expected one task text throughout the episode, got 'a' and then 'b'; .*text=none",
        ),
    ],
)
def test_what_cannot_be_read_is_named(changed, options, message, tmp_path):
    path = put(tmp_path / "mine.parquet", **changed)
    with pytest.raises(ValueError, match=message):
        read(path, **options)


def test_a_damaged_file_is_named(tmp_path):
    path = put(tmp_path / "mine.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="mine.parquet: not a readable Parquet .* fetch it again"):
        read(path)


def test_one_of_a_path_and_a_repository_is_needed():
    for options in ({}, {"path": "x", "repo_id": "me/x"}):
        with pytest.raises(
            ValueError, match="expected one of dataset.path=FOLDER and dataset.repo"
        ):
            load(**options)
    with pytest.raises(
        FileNotFoundError, match="dataset.path: expected a file or folder, nowhere "
    ):
        load(path="nowhere")


def test_without_a_network_the_download_is_named():
    message = (
        "dataset.repo_id: expected me/x, revision main, on .*cache .*; .*`hf download me/x --repo-"
    )
    with pytest.raises(FileNotFoundError, match=message):
        load(repo_id="me/x", observations=["state"])


def test_a_policy_is_trained_on_named_columns(tmp_path, capsys):
    path = put(tmp_path / "mine.parquet")
    options = (
        f"dataset.path={path}",
        "dataset.observations=[state,angle]",
        "dataset.rewards=reward",
    )
    run = f"run={tmp_path / 'run'}"
    assert not command(
        "train", "dataset=huggingface", *options, "dataset.task_from=prompt", run, *NANO, *LOOP[2:]
    )
    printed = capsys.readouterr().out
    assert "data: mine, 3 episodes" in printed or "data: mine, 2 episodes" in printed
    assert "not read of the log: t, done" in printed
