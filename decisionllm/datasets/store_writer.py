"""The writing of stores: episodes are checked and go to disk as they come."""

import errno
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from decisionllm.datasets import action_range, autoreset
from decisionllm.datasets.reward_range import RewardDigits
from decisionllm.datasets.rounding import Rounding
from decisionllm.datasets.row_blocks import Columns
from decisionllm.datasets.store import FORMAT, Store, hash_store, open_store
from decisionllm.files import atomic, explain_errors
from decisionllm.protocols import Source
from decisionllm.schema import EPISODE_FIELDS, STEP_FIELDS, Episode, Json, Spec, raise_for_first

HEADER = 128  # bytes, of each .npy file
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_store(path: str | Path, source: Source) -> Store:
    """Write a Source to a folder, all or nothing, and open it. Episodes go to disk as they come.

    Raises:
        FileExistsError: the path is a file, or a folder that holds something else than a store.
        ValueError: no episode, or one that does not fit the spec; it is named with its step and
            number.
        OSError: the disk is full; what was there before is kept.
    """
    try:
        return _write(Path(path), source)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(
            f"{path}: the store could not be written ({error.strerror}); nothing of it is left. "
            "Make room, or choose another folder (cache_dir=...)"
        ) from error


def _write(path: Path, source: Source) -> Store:
    is_other_folder = path.is_dir() and any(path.iterdir()) and not (path / "card.json").is_file()
    if path.is_file() or is_other_folder:
        raise FileExistsError(
            f"{path}: expected a new folder, or a store to replace; choose another path"
        )
    name = source.info.get("name", path)
    with explain_errors(
        f"{name}: expected info and facts that JSON can hold",
        TypeError,
        ValueError,
        fix="x.item() is the number of a numpy scalar, x.tolist() the list of an array",
    ):
        json.dumps([source.info, source.facts])
    with atomic(path) as partial:
        partial.mkdir()
        with ExitStack() as stack:
            writer = StoreWriter(partial, stack)
            for e, episode in enumerate(source.episodes):
                _check_fits(f"episode {e}", episode, source.spec)
                writer.append(episode)
        if not writer.steps:
            raise ValueError(f"{name}: expected at least one episode, got none")
        arrays = {}
        shapes = {}
        for column in sorted(writer.files):
            array = np.load(partial / f"{column}.npy", mmap_mode="r")
            arrays[column] = array
            shapes[column] = [str(array.dtype), list(array.shape)]
        if "action_weight" in arrays and not arrays["action_weight"].any():
            raise ValueError(
                f"{name}: expected the recorded action of some steps, all of them are missing "
                "(NaN); record some to learn from"
            )
        spec = asdict(source.spec)
        tasks = list(writer.tasks)
        info = source.info
        faults = [
            *writer.rounding.faults(),
            *action_range.describe_faults(source.spec, arrays),
            *writer.digits.faults(arrays["rewards"]),
            *autoreset.describe_faults(
                arrays["observations"],
                arrays["offsets"],
                arrays.get("final_observation"),
                arrays["rewards"],
            ),
        ]
        # a transformed log repeats faults of its data; those of a mixture are in the info of its parts
        reported = info.get("faults", [])
        new_faults = [fault for fault in faults if fault not in reported]
        if new_faults and "parts" not in info:
            info = info | {"faults": [*reported, *new_faults]}
        card: Json = {
            "format": FORMAT,
            "spec": spec,
            "tasks": tasks,
            "info": info,
            "facts": source.facts,
            "arrays": shapes,
            "fingerprint": hash_store(spec, tasks, arrays),
        }
        (partial / "card.json").write_text(
            json.dumps(card, indent=1, ensure_ascii=False), encoding="utf-8"
        )
    return open_store(path)


class StoreWriter:
    """Writes the files of a store, one for each column.

    Args:
        folder: of the store.
        stack: closes the files.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.files: dict[str, ColumnFile] = {}
        self.tasks: dict[str, int] = {}  # index of each text
        self.episodes = 0
        self.steps = 0
        self.rounding = Rounding()  # of the observations
        self.digits = RewardDigits()
        self._open_column("offsets", np.int64).append(np.zeros(1))

    def append(self, episode: Episode) -> None:
        """Append an episode.

        Raises:
            ValueError: the episode has other columns than the first one.
        """
        rows = self._rows_by_column(episode)
        for name in rows.keys() - self.files.keys():
            # The first episode with a missing action may come late: all actions before are recorded.
            if name == "action_weight":
                self._open_column(name, STEP_FIELDS[name]).append(np.ones(self.steps))
            elif self.episodes == 0:
                self._open_column(name, (STEP_FIELDS | EPISODE_FIELDS)[name])
        unequal = rows.keys() ^ self.files.keys()
        if unequal:
            name = min(unequal)
            incomplete = 0 if name in rows else self.episodes
            raise ValueError(f"episode {incomplete}: expected {name} in every episode or in none")
        self.rounding.add(rows["observations"])
        name = f"episode {self.episodes}"
        self.digits.add(name, rows["rewards"], float(episode.return_after_exit or 0))
        for name, values in rows.items():
            self.files[name].append(values)
        self.episodes += 1
        self.steps += len(episode.rewards)

    def _rows_by_column(self, episode: Episode) -> Columns:
        """Return the rows that an episode adds to each column."""
        values = vars(episode) | {"task": self.tasks.setdefault(episode.task, len(self.tasks))}
        rows = {name: np.asarray(values[name]) for name in STEP_FIELDS if values[name] is not None}
        for name in EPISODE_FIELDS:
            if values[name] is not None:
                rows[name] = np.asarray(values[name])[None]
        if "action_weight" in self.files:
            rows.setdefault("action_weight", np.ones(len(episode.rewards), np.float32))
        rows["offsets"] = np.array([self.steps + len(episode.rewards)])
        return rows

    def _open_column(self, name: str, dtype: DTypeLike) -> "ColumnFile":
        column = ColumnFile(self.folder / f"{name}.npy", dtype)
        self.stack.callback(column.close)
        self.files[name] = column
        return column


class ColumnFile:
    """An .npy file that is written row by row; its number of rows is known at the end.

    Args:
        path: of the file.
        dtype: of its rows.
    """

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.shape: tuple[int, ...] = (0,)
        self.file = path.open("wb", buffering=1 << 18)
        self.file.write(bytes(HEADER))

    def append(self, rows: np.ndarray) -> None:
        """Append rows (n, ...) of any dtype, in the shape of the first ones."""
        self.shape = (self.shape[0] + len(rows), *rows.shape[1:])
        self.file.write(np.ascontiguousarray(rows, self.dtype).data)

    def close(self) -> None:
        """Write the header, which has a fixed size."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        with self.file:
            self.file.seek(0)
            np.lib.format.write_array_header_1_0(self.file, header)


def _check_fits(name: str, episode: Episode, spec: Spec) -> None:
    """Raise a ValueError for an episode that does not fit the spec."""
    check_episode(name, episode)
    _check_columns(name, episode)
    num_steps = len(episode.rewards)
    S = episode.observations.shape[1]
    A = episode.actions.shape[1]
    if (spec.observation_dim, spec.action_dim) != (S, A):
        raise ValueError(
            f"{name}: expected observations of {spec.observation_dim} and actions of "
            f"{spec.action_dim} numbers, got {S} and {A}"
        )
    if num_steps > spec.horizon:
        raise ValueError(
            f"{name}: expected at most {spec.horizon} steps (the horizon), got {num_steps}; cut the "
            "log or raise the horizon"
        )
    _check_actions(f"{name}, step ", episode, spec)
    masks = episode.action_masks
    C = spec.num_actions
    if C and masks is not None:
        if masks.shape[1] != C:
            raise ValueError(f"{name}: expected action masks of {C} actions, got {masks.shape[1]}")
        allowed = np.take_along_axis(masks, episode.actions.astype(int), 1)[:, 0]
        is_wrong = ~allowed & _is_recorded(episode)
        message = "{}: the mask forbids the recorded action {:.0f}"
        raise_for_first(
            f"{name}, step ", is_wrong, message, np.arange(num_steps), episode.actions[:, 0]
        )


def _is_recorded(episode: Episode) -> np.ndarray:
    """Return which actions of an episode are recorded, (n,) bool."""
    if episode.action_weight is None:
        return np.ones(len(episode.rewards), bool)
    return np.asarray(episode.action_weight > 0)


def _check_actions(place: str, episode: Episode, spec: Spec) -> None:
    """Raise a ValueError for a recorded action, or its log-probability, that cannot be.

    place: how a message begins.
    """
    actions = episode.actions
    steps = np.arange(len(actions))
    log_prob = episode.action_log_prob
    if spec.num_actions and log_prob is not None:
        message = (
            "{}: expected the logarithm of a probability as action_log_prob, at most 0, got {}; "
            "np.log makes it of a probability"
        )
        raise_for_first(place, log_prob > 1e-4, message, steps, log_prob)
    if spec.num_actions:
        outside = (actions != np.rint(actions)) | (actions < 0) | (actions >= spec.num_actions)
        space = f"an index below {spec.num_actions}"
        fix = ""
    else:
        slack = action_range.bound_tolerance(spec.low, spec.high)
        outside = (actions < np.subtract(spec.low, slack)) | (actions > np.add(spec.high, slack))
        space = f"within {list(spec.low)} .. {list(spec.high)}"
        fix = (
            "; clip them (dataset.clip=true, or np.clip) or widen the bounds (dataset.low and "
            "dataset.high, or Spec)"
        )
    message = f"{{}}: expected an action {space}, got {{}}{fix}"
    raise_for_first(place, outside.any(1) & _is_recorded(episode), message, steps, actions)


def check_episode(name: str, episode: object) -> None:
    """Raise a ValueError unless this is an `Episode`. name: of it, for messages."""
    if not isinstance(episode, Episode):
        raise ValueError(
            f"{name}: expected an Episode, got {type(episode).__name__}; make it by "
            "decisionllm.Episode(observations, actions, rewards)"
        )


def _check_columns(name: str, episode: Episode) -> None:
    """Raise a ValueError for masks that are not bool, numbers beyond float32, which a store has, or
    weights beyond 0 .. 1.
    """
    for column, dtype in (STEP_FIELDS | {"final_observation": np.float32}).items():
        values = vars(episode)[column]
        if values is None:
            continue
        if dtype is np.bool_ and values.dtype != bool:
            raise ValueError(f"{name}: expected {column} of true and false, got {values.dtype}")
        if values.dtype.kind == "f" and values.dtype != np.float32:
            with np.errstate(over="ignore"):
                is_infinite = ~np.isfinite(values.astype(np.float32))
            raise_for_first(
                f"{name}: ", is_infinite, f"expected {column} within float32, got {{}}", values
            )
    weights = episode.action_weight
    if weights is not None:
        outside = (weights < 0) | (weights > 1)
        raise_for_first(
            f"{name}: ", outside, "expected action_weight within 0 .. 1, got {}", weights
        )
