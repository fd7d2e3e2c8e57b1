"""Datasets of Hugging Face `datasets`, in Parquet or Arrow files, whose columns the user names: one
row for each step, or for each episode.
"""

from collections.abc import Sequence
from pathlib import Path

from decisionllm.datasets.arrays import OWN_TEXTS
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.hf_hub import find_folder
from decisionllm.datasets.step_tables import StepTable, build_source
from decisionllm.datasets.table_files import ROW, is_number, read_types, require_pyarrow
from decisionllm.protocols import Source
from decisionllm.schema import Json

SUFFIXES = (".parquet", ".arrow")


def load(
    *,
    path: str = "",
    repo_id: str = "",
    revision: str = "main",
    pattern: str = "",
    name: str = "",
    observations: Sequence[str] = [],
    actions: str = "action",
    rewards: str = "",
    success: str = "",
    terminals: str = "",
    episode: str = "episode_index",
    step: str = "",
    task: str = "",
    task_from: str = "",
    text: str = "auto",
    horizon: int = 0,
    num_actions: int = 0,
    low: Sequence[float] = [],
    high: Sequence[float] = [],
    clip: bool = False,
) -> Source:
    """Read a dataset of Hugging Face `datasets`: Parquet files, or a folder of `save_to_disk`.

    A row is a step, and the rows of an episode follow one another; or a row is an episode, with lists
    of its steps.

    Args:
        path: a file, or a folder of Parquet or Arrow files.
        repo_id: of a dataset on the Hugging Face Hub, downloaded in place of `path`.
        revision: branch, tag or commit of `repo_id`.
        pattern: the files of the folder, such as `data/train-*.parquet`; empty: all of them.
        name: of the dataset in results; empty: that of the path or repository.
        observations: columns of numbers, or of lists of numbers, that make an observation.
        actions: column of the action; integers are discrete actions, unless low or high is given.
        rewards: column of the reward; empty: that of `success`.
        success: column of flags, whether the task is done; without a reward, the last step of an
            episode with such a row is rewarded by 1.
        terminals: column of flags, whether the task ended the episode; empty: that of `success`.
        episode: column whose value changes from one episode to the next; `none`: each row is an
            episode.
        step: column that has to go up within an episode; empty: not checked.
        task: the text of every episode, read with text=constant.
        task_from: column of task texts; empty: no texts are read.
        text: `auto`: the column of texts, if it is named; `none`: no texts; `constant`: the task;
            `episode`: the column of texts, which has to be named.
        horizon: refuse longer episodes; 0: the longest one.
        num_actions: C of discrete actions; 0: the largest index plus 1 where actions are integers
            without bounds, else they are continuous.
        low: (A,) least action, raw units; empty: of the data.
        high: (A,) greatest action, raw units; empty: of the data.
        clip: clip actions to low and high; they are an error otherwise.

    Raises:
        FileNotFoundError: there is no such folder, or the Hub cannot be reached.
        ValueError: a column is missing or holds something else, or a file is damaged.
    """
    require_pyarrow()
    root = find_folder(path, repo_id, revision, to_download(pattern))
    table_files = list_table_files(root, pattern)
    types = read_types(table_files[0])
    if not observations:
        numbers = [column for column, kind in types.items() if is_number(kind)]
        raise ValueError(
            "dataset.observations: expected the columns of an observation, got none; "
            f"{table_files[0]} has {', '.join(numbers)}"
        )
    table = StepTable(
        files=table_files,
        observations=list(observations),
        actions=actions,
        rewards=rewards,
        success=success,
        terminals=terminals,
        episode=ROW if episode == "none" else episode,
        step=step,
        task=task_from if text in OWN_TEXTS else "",
    )
    info: Json = {"name": name or repo_id or root.stem, "file": str(root)}
    unread = [column for column in types if column not in table.columns]
    if unread:
        info["unread"] = unread
    return build_source(
        table,
        info,
        text=text,
        task=task,
        horizon=horizon,
        num_actions=num_actions,
        low=low,
        high=high,
        clip=clip,
    )


def to_download(pattern: str) -> list[str]:
    """Return the files of a repository that are downloaded."""
    return [pattern] if pattern else [f"*{suffix}" for suffix in SUFFIXES]


def list_table_files(root: Path, pattern: str) -> list[Path]:
    """Return the Parquet and Arrow files of a folder in the order of their names; of a file itself."""
    if root.is_file():
        return [root]
    table_files = [file for file in root.glob(pattern or "**/*") if file.suffix in SUFFIXES]
    if not table_files:
        raise FileNotFoundError(
            f"{root}: expected Parquet or Arrow files, {pattern or '*.parquet or *.arrow'}, got none; "
            "dataset.pattern names them"
        )
    return sorted(table_files)


def files(
    *,
    path: str = "",
    repo_id: str = "",
    revision: str = "main",
    pattern: str = "",
    **options: object,
) -> list[Path]:
    """Return the files that `load` reads with these options."""
    root = find_folder(path, repo_id, revision, to_download(pattern))
    return list_table_files(root, pattern)


# Version 2: text=none reads no texts.
READER = DatasetReader(version=2, files=files)
