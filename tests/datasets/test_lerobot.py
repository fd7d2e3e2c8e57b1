"""LeRobotDataset v3 as LeRobot's own package wrote it (tests/fixtures/lerobot/write.py): seven episodes
of two tasks in several files.
"""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from decisionllm.datasets.lerobot import files, load
from tests.conftest import LOOP, NANO, TESTS, command

FOLDER = TESTS / "fixtures" / "lerobot" / "reach"
TASKS = ("Reach the red cube.", "Öffne die Schublade.")
LENGTHS = (3, 2, 4, 3, 2, 5, 3)
SUCCEEDED = (True, False, True, True, False, True, True)


def read(path=FOLDER, **options):
    source = load(path=str(path), **options)
    return source, list(source.episodes)


@pytest.fixture
def copied(tmp_path):
    """A copy of the dataset to change."""
    return shutil.copytree(FOLDER, tmp_path / "reach")


def rewrite(folder, change):
    """Change the table of each data file."""
    for file in folder.glob("data/*/*.parquet"):
        parquet.write_table(change(parquet.read_table(file)), file)


def edit_info(folder, change):
    file = folder / "meta" / "info.json"
    info = json.loads(file.read_text(encoding="utf-8"))
    change(info)
    file.write_text(json.dumps(info), encoding="utf-8")


def test_every_number_that_lerobot_wrote_is_read():
    source, episodes = read()
    assert len(list(FOLDER.glob("data/*/*.parquet"))) > 1  # several files, and episodes in each
    assert [len(e.rewards) for e in episodes] == [*LENGTHS]
    for e, episode in enumerate(episodes):
        t = np.arange(LENGTHS[e], dtype=np.float32)
        e_column = np.full_like(t, e)
        observations = np.stack([10 * e_column + t, e_column, t], axis=1)
        assert np.array_equal(episode.observations, observations)
        assert np.array_equal(episode.actions, np.stack([e_column / 10, -t / 10], axis=1))
        assert np.array_equal(episode.rewards, e_column + t / 4)
        assert episode.task == TASKS[e % 2] and episode.group == e
        assert (episode.terminated, episode.truncated) == (SUCCEEDED[e], not SUCCEEDED[e])
    assert source.info["name"] == "reach" and source.info["text"] == "episode"
    assert source.info["observation_parts"] == [["environment_state", 1], ["state", 2]]
    assert (source.spec.observation_dim, source.spec.action_dim, source.spec.horizon) == (3, 2, 5)
    assert "faults" not in source.info and source.info["unread"] == ["next.done"]


def test_columns_are_chosen_by_name():
    source, episodes = read(
        observations=["observation.state"], rewards="none", terminals="next.done"
    )
    assert source.info["observation_parts"] == [["observation", 2]]
    assert source.info["unread"] == ["observation.environment_state", "next.reward"]
    for e, episode in enumerate(episodes):
        success = [0] * (LENGTHS[e] - 1) + [float(SUCCEEDED[e])]
        assert episode.rewards.tolist() == success and episode.terminated
    source, episodes = read(rewards="none", success="none")
    assert not any(e.rewards.any() for e in episodes) and all(e.terminated for e in episodes)
    assert "train with model.condition_on=none" in source.info["faults"][0]


def test_texts_are_left_out_or_replaced():
    source, episodes = read(text="none")
    assert {e.task for e in episodes} == {""} and source.info["text"] == "none"
    source, episodes = read(text="constant", task="Go.")
    assert {e.task for e in episodes} == {"Go."} and source.info["text"] == "constant"


def test_texts_are_read_whatever_the_name_of_their_index(copied):
    file = copied / "meta" / "tasks.parquet"
    table = parquet.read_table(file)
    names = ["task" if name != "task_index" else name for name in table.column_names]
    parquet.write_table(table.rename_columns(names).replace_schema_metadata(None), file)
    assert [e.task for e in read(copied)[1]] == [TASKS[e % 2] for e in range(7)]


def test_images_and_videos_are_named_and_not_read(copied):
    def add(info):
        info["features"]["observation.images.top"] = {"dtype": "video", "shape": [3, 8, 8]}

    edit_info(copied, add)
    assert read(copied)[0].info["unread"] == ["next.done", "observation.images.top (video)"]
    with pytest.raises(
        ValueError, match="observation.images.top as numbers, got video, which is no"
    ):
        read(copied, observations=["observation.images.top"])
    rewrite(copied, lambda table: table.drop_columns(["observation.state"]))
    rewrite(copied, lambda table: table.drop_columns(["observation.environment_state"]))
    with pytest.raises(
        ValueError, match=r"columns of numbers that begin with observation\., got .*"
    ):
        read(copied)


def test_a_done_before_the_end_is_a_fault(copied):
    def end_early(table):
        i = table.column_names.index("next.done")
        return table.set_column(i, "next.done", pa.array([True] * len(table)))

    rewrite(copied, end_early)
    faults = read(copied, terminals="next.done")[0].info["faults"]
    assert faults[0].startswith("7 episodes, the first is 0, go on after a step that ended them")


def test_a_task_that_changes_within_an_episode_is_refused(copied):
    def change_last(table):
        i = table.column_names.index("task_index")
        tasks = table["task_index"].to_pylist()
        return table.set_column(i, "task_index", pa.array([*tasks[:-1], 1 - tasks[-1]]))

    rewrite(copied, change_last)
    with pytest.raises(ValueError, match="expected one task text throughout the episode, got 'Öff"):
        read(copied)
    assert len(read(copied, text="none")[1]) == 7


def test_an_incomplete_download_is_refused(copied):
    last = sorted(copied.glob("data/*/*.parquet"))[-1]
    table = parquet.read_table(last)
    parquet.write_table(table[:-1], last)
    with pytest.raises(
        ValueError, match="expected 3 steps of episode 6, got 2; the data are incom"
    ):
        read(copied)
    last.unlink()
    with pytest.raises(
        ValueError, match="steps of episode ., got 0; the data are incomplete, fetch"
    ):
        read(copied)


def test_another_version_or_folder_is_refused(copied, tmp_path):
    edit_info(copied, lambda info: info.update(codebase_version="v2.1"))
    with pytest.raises(ValueError, match="version 3, got v2.1; convert it by python -m lerobot"):
        files(path=str(copied))
    with pytest.raises(
        FileNotFoundError, match="expected a LeRobotDataset, with meta/info.json, fou"
    ):
        load(path=str(tmp_path))


def test_a_repository_is_found_in_lerobots_folder_or_its_download_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    shutil.copytree(FOLDER, tmp_path / "mine" / "reach")
    source = load(repo_id="mine/reach")
    assert source.info["name"] == "mine/reach" and len(list(source.episodes)) == 7
    with pytest.raises(FileNotFoundError, match="`hf download mine/other --repo-type dataset"):
        load(repo_id="mine/other")


def test_a_policy_is_trained_on_it_and_evaluation_says_what_it_needs(tmp_path, capsys):
    loop = [word for word in LOOP if not word.startswith("dataset")]
    run = f"run={tmp_path / 'run'}"
    data = ("dataset=lerobot", f"dataset.path={FOLDER}", "text=episode", "data.held_out=0.3")
    assert not command("train", *data, "head=gaussian", run, *NANO, *loop)
    assert "data: reach, " in capsys.readouterr().out
    assert command("evaluate", run, "episodes=2")
    printed = capsys.readouterr().err
    assert "env=none, there is no environment to roll out in; give one, such as" in printed
