"""Your own data: episodes made in Python, arrays in D4RL's layout, or a data store that exists already."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets.store import Store, open_store, write
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec

KEYS = ("observations", "actions", "rewards", "terminals")


@register("dataset", "arrays", text="${text}")
def load(
    *, path: str, name: str = "", task: str = "", text: str = "none", horizon: int = 0, num_actions: int = 0,
    low: Sequence[float] = [], high: Sequence[float] = [],
) -> Source:  # fmt: skip
    """The episodes of an .npz or HDF5 file in D4RL's layout, see `split`.

    Args:
        path: the file.
        name: of the dataset in results; empty: that of the file.
        task: the text of every episode, read with text=constant.
        text: `none`, or `constant` where there is a task.
        horizon: refuse longer episodes; 0: the longest one.
        num_actions: C of discrete actions; 0: the largest index plus 1 where actions are integers, else they are continuous.
        low: (A,) least action, raw units; empty: of the data.
        high: (A,) greatest action, raw units; empty: of the data.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a key is missing, a shape does not fit, a number is not finite, or the file is damaged.

    Source: D4RL, https://github.com/Farama-Foundation/D4RL/wiki/Tasks, `OfflineEnv.get_dataset`.
    """
    words, file = constant_text("dataset", text, task), Path(path).expanduser()
    columns = read_columns(file, {"observations": 0, "actions": 0, "next_observations": 0})
    if not num_actions and columns["actions"].dtype.kind in "iu":
        num_actions = int(columns["actions"].max()) + 1
    episodes = split(columns, task=words)
    spec = spec_of(episodes, horizon, num_actions, low, high)
    return Source(spec, episodes, {"name": name or file.stem, "text": text, "file": str(file)})


@register("dataset", "store")
def open_folder(*, path: str) -> Store:
    """A data store that `from_episodes` or `store.write` made, as it is; the folder must stay. path: the folder."""
    return open_store(Path(path).expanduser())


def files(*, path: str, **options: Any) -> list[Path]:
    """The files that these options read: a store is checked by its own card."""
    return [file] if (file := Path(path).expanduser()).is_file() else []


def from_episodes(episodes: Iterable[Episode], path: str | Path, *, name: str, spec: Spec | None = None) -> dict[str, Any]:
    """Write episodes to a data store, all or nothing, to train on.

    Args:
        episodes: of equal observation and action sizes, raw units. With a spec they are written as they come.
        path: the folder to write; one that exists is replaced.
        name: of the dataset in results.
        spec: sizes, action space and horizon; None: continuous actions within the data's bounds, horizon of the longest episode.

    Returns:
        The config node of the data: `config["dataset"]` of `train`, or `dataset=store dataset.path=...` on the command line.

    Raises:
        ValueError: there is no episode, or one does not fit the others or the spec.
    """
    if spec is None:
        spec = spec_of(episodes := list(episodes))
    store = write(Path(path).expanduser(), Source(spec, episodes, {"name": name}))
    return {"_target_": f"{__name__}.open_folder", "path": str(store.path.absolute())}


def split(columns: Mapping[str, np.ndarray], *, task: str = "") -> list[Episode]:
    """D4RL's columns, n rows of all episodes end to end, as episodes of the text `task`.

    An episode ends with a row where `terminals` (it terminated) or the optional `timeouts` (it was truncated) is set, and with
    the last row. Its final observation is known where the optional `next_observations` are there.
    """
    n, terminals = len(columns["rewards"]), np.asarray(columns["terminals"], bool)
    last = np.flatnonzero(terminals | np.asarray(columns.get("timeouts", np.zeros(n)), bool) | (np.arange(n) == n - 1))
    rows = [slice(a, b + 1) for a, b in zip([0, *last[:-1] + 1], last, strict=True)]
    parts = {key: np.asarray(columns[key], np.float32).reshape(n, -1) for key in ("observations", "actions")}
    final = columns.get("next_observations")
    return [
        Episode(
            parts["observations"][r], parts["actions"][r], np.asarray(columns["rewards"][r], np.float32), group=e, task=task,
            terminated=bool(terminals[end]), truncated=not terminals[end],
            final_observation=None if final is None else np.asarray(final[end], np.float32),
        )
        for e, (r, end) in enumerate(zip(rows, last, strict=True))
    ]  # fmt: skip


def constant_text(group: str, text: str, task: str) -> str:
    """The task text of every episode, of the option `text`: the given task, or none."""
    one_of(f"{group}.text", text, ("none", "constant"))
    if text == "constant" and not task:
        raise ValueError(f"{group}.task: text=constant needs a text, got none; give {group}.task=...")
    return task if text == "constant" else ""


def spec_of(
    episodes: Sequence[Episode], horizon: int = 0, num_actions: int = 0, low: Sequence[float] = (), high: Sequence[float] = ()
) -> Spec:
    """The spec of these episodes; the horizon and bounds of continuous actions that are not given are those of the data."""
    if not episodes:
        raise ValueError("episodes: expected at least one, got none")
    S, A = episodes[0].observations.shape[1], episodes[0].actions.shape[1]
    actions = np.concatenate([e.actions for e in episodes if e.actions.shape[1] == A])
    if not num_actions:
        low, high = low or actions.min(0).tolist(), high or actions.max(0).tolist()
    return Spec(S, A, horizon or max(len(e.rewards) for e in episodes), tuple(low), tuple(high), num_actions)


def read_columns(path: Path, widths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The checked columns of an .npz or HDF5 file in D4RL's layout. widths: numbers in a row of each further key, 0: any."""
    import h5py

    widths = {"rewards": 1, "terminals": 1, "timeouts": 1, **widths}
    kind = "npz" if path.suffix == ".npz" else "HDF5"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected an .npz or HDF5 file in D4RL's layout, found none")
    try:
        with path.open("rb") as raw, np.load(raw) if kind == "npz" else h5py.File(path) as file:
            found = list(file)
            columns = {key: file[key][()] for key in (*KEYS, *widths) if key in file}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a readable {kind} file, perhaps truncated ({error}); fetch it again") from error
    if lacking := [key for key in KEYS if key not in columns]:
        raise ValueError(f"{path}: expected D4RL's keys, {', '.join(lacking)} not among {', '.join(found)}")
    sizes = {key: len(np.atleast_1d(column)) for key, column in columns.items()}
    if len(set(sizes.values())) > 1 or not sizes["rewards"]:
        raise ValueError(f"{path}: expected columns of one length, at least 1, got {sizes}")
    for key, x in columns.items():
        numbers = int(np.prod(x.shape[1:]))
        if x.ndim not in (1, 2) or x.dtype.kind not in "biuf" or not numbers or numbers != (widths[key] or numbers):
            raise ValueError(f"{path}: expected {key} of {widths[key] or 'some'} columns, got shape {x.shape}, {x.dtype}")
        if not (finite := np.isfinite(x)).all():
            raise ValueError(f"{path}: expected finite {key}, got {x[~finite][0]} in row {np.argwhere(~finite)[0, 0]}")
    return columns | {key: columns[key].reshape(-1) for key in ("rewards", "terminals", "timeouts") if key in columns}
