"""Datasets of LeRobot, version 3: episodes in Parquet files, each with the text of its task; images
and videos are not read.

Source: https://huggingface.co/docs/lerobot/lerobot-dataset-v3.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decisionllm.checks import unknown_name_message
from decisionllm.datasets.arrays import OWN_TEXTS
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.hf_hub import find_folder
from decisionllm.datasets.step_tables import PREFIX, StepTable, build_source
from decisionllm.datasets.table_files import (
    explain_damage,
    is_number,
    read_types,
    require_pyarrow,
)
from decisionllm.files import AGAIN, explain_errors
from decisionllm.protocols import Source
from decisionllm.schema import Json

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = "v3."  # begins the versions that are read
CONVERT = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=OWNER/NAME"
INFO = Path("meta", "info.json")
TASKS = Path("meta", "tasks.parquet")
PATTERNS = ("meta/*", "data/*")  # of a repository that are downloaded
# names that recordings give to a column, the first that is there
REWARDS = ("next.reward", "reward")
SUCCESS = ("next.success", "success")
TERMINALS = ("next.done", "done")
INDEX = ("timestamp", "frame_index", "episode_index", "index", "task_index")  # LeRobot's own


def load(
    *,
    path: str = "",
    repo_id: str = "",
    revision: str = "main",
    name: str = "",
    observations: Sequence[str] = [],
    rewards: str = "",
    success: str = "",
    terminals: str = "",
    task: str = "",
    text: str = "auto",
    horizon: int = 0,
    num_actions: int = 0,
    low: Sequence[float] = [],
    high: Sequence[float] = [],
    clip: bool = False,
) -> Source:
    """Read a LeRobotDataset of version 3, without its images and videos.

    Args:
        path: its folder.
        repo_id: of a dataset on the Hugging Face Hub, in place of `path`: LeRobot's own copy in
            $HF_LEROBOT_HOME if there is one, else a download.
        revision: branch, tag or commit of `repo_id`.
        name: of the dataset in results; empty: that of the repository or folder.
        observations: columns that make an observation, in this order; empty: all of numbers that
            begin with `observation.`, sorted.
        rewards: column of the reward; empty: `next.reward` or `reward`; `none`: that of `success`.
        success: column of flags, whether the task is done; empty: `next.success` or `success`;
            `none`: none. Without a reward, the last step of an episode with such a row is rewarded
            by 1.
        terminals: column of flags, whether the task ended the episode; empty: that of `success`, or
            else `next.done` or `done`; `none`: a time limit ended all.
        task: the text of every episode, read with text=constant.
        text: `auto` or `episode`: the task of the episode; `none`: no texts; `constant`: `task`.
        horizon: refuse longer episodes; 0: the longest one.
        num_actions: C of discrete actions; 0: the largest index plus 1 where actions are integers
            without bounds, else they are continuous.
        low: (A,) least action, raw units; empty: of the data.
        high: (A,) greatest action, raw units; empty: of the data.
        clip: clip actions to low and high; they are an error otherwise.

    Raises:
        FileNotFoundError: there is no such folder, or the Hub cannot be reached.
        ValueError: another version, a column is missing or of another type, the task changes within
            an episode, or files are damaged or incomplete.
    """
    require_pyarrow()
    root = find_root(path, repo_id, revision)
    features = read_features(root)
    data_files = list_data_files(root)
    types = read_types(data_files[0])
    numbers = [column for column, kind in types.items() if is_number(kind)]
    if not observations:
        observations = find_observations(root, features, numbers)
    for column in (*observations, "action"):
        if column not in numbers:
            raise ValueError(describe_missing_column(root, column, features, numbers))
    success = find_column("success", success, SUCCESS, types)
    own_terminals = () if success and not terminals else TERMINALS
    reads_tasks = text in OWN_TEXTS
    table = StepTable(
        files=data_files,
        observations=list(observations),
        actions="action",
        episode="episode_index",
        rewards=find_column("rewards", rewards, REWARDS, types),
        success=success,
        terminals=find_column("terminals", terminals, own_terminals, types),
        step="frame_index",
        task="task_index" if reads_tasks else "",
        texts=read_tasks(root) if reads_tasks else None,
        lengths=read_lengths(root),
    )
    info: Json = {"name": name or repo_id or root.name, "file": str(root)}
    unread = list_unread(features, [*table.columns, *INDEX])
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


def find_root(path: str, repo_id: str, revision: str) -> Path:
    """Return the folder of a dataset."""
    hub = os.environ.get("HF_HOME", "~/.cache/huggingface")
    home = Path(os.environ.get("HF_LEROBOT_HOME", f"{hub}/lerobot")).expanduser()
    if repo_id and not path and (home / repo_id / INFO).is_file():
        return home / repo_id
    return find_folder(path, repo_id, revision, PATTERNS)


def read_features(root: Path) -> dict[str, Json]:
    """Return the features of a dataset by name, as meta/info.json describes them.

    Raises:
        FileNotFoundError: the folder is no LeRobotDataset.
        ValueError: the file is damaged, or the dataset has another version.
    """
    file = root / INFO
    if not file.is_file():
        raise FileNotFoundError(
            f"{root}: expected a LeRobotDataset, with {INFO}, found none; dataset=huggingface reads "
            "other Parquet files"
        )
    with explain_errors(f"{file}: expected LeRobot's JSON", ValueError, KeyError, fix=AGAIN):
        info = json.loads(file.read_text(encoding="utf-8"))
        version, features = info["codebase_version"], info["features"]
    if not version.startswith(VERSION):
        raise ValueError(
            f"{root}: expected a LeRobotDataset of version 3, got {version}; convert it by {CONVERT}"
        )
    return dict(features)


def list_data_files(root: Path) -> list[Path]:
    """Return the files of the steps in their order."""
    data_files = sorted(root.glob("data/*/*.parquet"))
    if not data_files:
        raise FileNotFoundError(f"{root}: expected data/chunk-000/*.parquet, found none; {AGAIN}")
    return data_files


def find_observations(
    root: Path, features: Mapping[str, Json], numbers: Sequence[str]
) -> list[str]:
    """Return the columns that make an observation by default; arrays of three dimensions, such as
    depth images, are none.
    """
    observations = []
    for column in sorted(numbers):
        is_image = len(features.get(column, {}).get("shape", ())) > 2
        if column.startswith(PREFIX) and not is_image:
            observations.append(column)
    if not observations:
        raise ValueError(
            f"{root}: expected columns of numbers that begin with {PREFIX}, got "
            f"{describe_features(features)}; dataset.observations=[NAME] names others, images and "
            "videos are not read"
        )
    return observations


def describe_missing_column(
    root: Path, column: str, features: Mapping[str, Json], numbers: Sequence[str]
) -> str:
    """Return the message for a column that is not there, or holds no numbers."""
    if column in features:
        kind = features[column].get("dtype")
        return f"{root}: expected {column} as numbers, got {kind}, which is not read"
    return f"{root}: {unknown_name_message('column of numbers', column, numbers)}"


def describe_features(features: Mapping[str, Json]) -> str:
    """Return the features for a message: "action (float32), top (video)"."""
    return ", ".join(f"{name} ({feature.get('dtype')})" for name, feature in features.items())


def find_column(option: str, name: str, defaults: Sequence[str], types: Mapping[str, Any]) -> str:
    """Return the column of an option: the one that it names, or else the first default; "": none."""
    if name == "none":
        return ""
    if name and name not in types:
        raise ValueError(f"dataset.{option}: {unknown_name_message('column', name, types)}")
    return name or next((column for column in defaults if column in types), "")


def list_unread(features: Mapping[str, Json], read: Sequence[str]) -> list[str]:
    """Return the features that are not read; images, videos and texts with their type."""
    unread = []
    for name, feature in features.items():
        kind = feature.get("dtype")
        if name not in read:
            unread.append(f"{name} ({kind})" if kind in ("image", "video", "string") else name)
    return unread


def read_tasks(root: Path) -> dict[int, str]:
    """Return the text of each task by its index. The texts are an index of pandas, whose column has
    the name `task` or, from older versions, none.
    """
    table = _read_table(root / TASKS)
    texts = [name for name in table.column_names if name != "task_index"]
    if "task_index" not in table.column_names or len(texts) != 1:
        raise ValueError(
            f"{root / TASKS}: expected task_index and a column of texts, got "
            f"{', '.join(table.column_names)}; {AGAIN}, or take text=none"
        )
    indices = table["task_index"].to_pylist()
    return dict(zip(indices, table[texts[0]].to_pylist(), strict=True))


def read_lengths(root: Path) -> dict[int, int]:
    """Return the number of steps of each episode, as meta/episodes says."""
    lengths: dict[int, int] = {}
    for file in sorted(root.glob("meta/episodes/*/*.parquet")):
        table = _read_table(file, ["episode_index", "length"])
        columns = table["episode_index"].to_pylist(), table["length"].to_pylist()
        lengths |= dict(zip(*columns, strict=True))
    if not lengths:
        raise FileNotFoundError(
            f"{root}: expected meta/episodes/chunk-000/*.parquet, found none; {AGAIN}"
        )
    return lengths


def _read_table(file: Path, columns: list[str] | None = None) -> "pa.Table":
    """Return columns of a Parquet file; None: all."""
    from pyarrow import parquet

    with explain_damage(file):
        return parquet.read_table(file, columns=columns)


def files(
    *, path: str = "", repo_id: str = "", revision: str = "main", **options: object
) -> list[Path]:
    """Return the files that `load` reads with these options."""
    root = find_root(path, repo_id, revision)
    read_features(root)  # refuses another folder or version by its name
    meta = [root / INFO, root / TASKS, *sorted(root.glob("meta/episodes/*/*.parquet"))]
    return [*filter(Path.is_file, meta), *list_data_files(root)]


# Version 2: text=none reads no texts.
READER = DatasetReader(version=2, files=files)
