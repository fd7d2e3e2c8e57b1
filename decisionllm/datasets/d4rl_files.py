"""The columns of .npz and HDF5 files in D4RL's layout, checked and read in blocks of rows.

Source: D4RL, https://github.com/Farama-Foundation/D4RL/wiki/Tasks.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import h5py
import numpy as np

from decisionllm.datasets.episode_markers import describe_contradiction, find_contradictions
from decisionllm.datasets.row_blocks import Columns, regroup_blocks, to_flags
from decisionllm.datasets.text_columns import is_text
from decisionllm.files import AGAIN, explain_errors
from decisionllm.schema import Json, is_numeric

BLOCK = 1 << 21  # numbers of a column that are read at a time
KEYS = ("observations", "actions", "rewards", "terminals")
OTHER_NAMES = {  # {key of D4RL: its names in other libraries}
    "observations": ("obs", "observation", "states"),
    "actions": ("action", "acts"),
    "rewards": ("reward", "rews"),
    "terminals": ("terminal", "terminations", "termination", "terminated", "dones", "done"),
    "timeouts": ("timeout", "truncations", "truncation", "truncated"),
    "next_observations": ("next_obs", "next_observation", "next_states"),
}
ENDS = ("terminals", "timeouts")  # flags of the last row of an episode
AMBIGUOUS_ENDS = ("dones", "done")  # may be set by the task or by a time limit
HDF5_SUFFIXES = (".hdf5", ".h5", ".hdf")


def read_blocks(path: Path, widths: Mapping[str, int]) -> Iterator[Columns]:
    """Yield blocks of rows of the checked columns of an .npz or HDF5 file in D4RL's layout.

    Args:
        path: the file.
        widths: numbers in a row of each further key, 0: any.
    """
    widths = {"rewards": 1, "terminals": 1, "timeouts": 1, **widths}
    keys = list(dict.fromkeys([*KEYS, *widths]))
    expected = f"{path}: expected an .npz or HDF5 file in D4RL's layout"
    if not path.is_file():
        raise FileNotFoundError(f"{expected}, found none")
    if not (path.suffix in (".npz", *HDF5_SUFFIXES) or h5py.is_hdf5(path)):
        raise ValueError(
            f"{expected}, got another format; np.savez makes one of the columns of a table, see "
            "docs/data.md"
        )
    with ExitStack() as stack:
        with _explain_damage(path):
            all_keys, columns = _open_columns(stack, path, keys)
        _check_keys(path, all_keys, keys)
        n = _check_shapes(path, columns, widths)
        rows = max(BLOCK // max(_count_numbers(x) for x in columns.values()), 1)
        for start in range(0, n, rows):
            with _explain_damage(path):
                block = {key: column[start : start + rows] for key, column in columns.items()}
            yield _check_block(path, block, start)


def _check_block(path: Path, block: Columns, start: int) -> Columns:
    """Return a block of rows that begins at row `start` of a file, all numbers finite: ends as bool
    (n,), rewards (n,).
    """
    checked = {}
    for key, x in block.items():
        _check_finite(path, key, x, start)
        if key in ENDS:
            checked[key] = to_flags(f"{path}: {key}", x.reshape(-1), start)
        elif key == "rewards":
            checked[key] = x.reshape(-1)
        else:
            checked[key] = x
    return checked


def _explain_damage(path: Path) -> AbstractContextManager[None]:
    """Name the file in an error of reading it."""
    kind = "npz" if path.suffix == ".npz" else "HDF5"
    what = f"{path}: not a readable {kind} file, perhaps truncated"
    errors = (OSError, ValueError, EOFError, BadZipFile, zlib.error)
    return explain_errors(what, *errors, fix=AGAIN)


def _open_columns(
    stack: ExitStack,
    path: Path,
    keys: Sequence[str],
) -> tuple[list[str], Json]:
    """Return all keys of a file, and its columns of `keys`, each read where it is indexed by a slice."""
    if path.suffix == ".npz":
        archive = stack.enter_context(ZipFile(path))
        arrays = [name for name in archive.namelist() if name.endswith(".npy")]
        all_keys = [name.removesuffix(".npy") for name in arrays]
        return all_keys, {key: NpzColumn(archive, key) for key in keys if key in all_keys}

    file = stack.enter_context(h5py.File(path))
    # `in` finds nested keys too, and links; `get` gives None for a link that is broken
    columns = {key: file.get(key) for key in keys if key in file}
    return list(file), columns


def open_all_columns(stack: ExitStack, path: Path) -> Json:
    """Return all columns of a file by name, nested ones as `group/name`, as `_open_columns` does."""
    if path.suffix == ".npz":
        keys, _ = _open_columns(stack, path, [])
        columns: Json = dict.fromkeys(keys)
        for key in keys:
            with suppress(ValueError):  # a type that this version of numpy cannot read
                columns |= _open_columns(stack, path, [key])[1]
        return columns
    file = stack.enter_context(h5py.File(path))
    columns = {}

    def add(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            columns[name] = item

    file.visititems(add)
    return columns


def _count_numbers(column: np.ndarray | h5py.Dataset) -> int:
    """Return the count of numbers in one row of a column."""
    return int(np.prod(column.shape[1:]))


def _check_keys(path: Path, keys: Sequence[str], read: Sequence[str]) -> None:
    """Raise a ValueError if a required key is missing, or an optional one has the name of another
    library.

    Args:
        path: of the file.
        keys: all keys of the file.
        read: the keys that are read, required and optional.
    """
    renamed = {}
    for key in read:
        others = [other for other in OTHER_NAMES.get(key, ()) if other in keys]
        if key not in keys and others:
            renamed[key] = others[0]
    required = [key for key in KEYS if key not in keys]
    missing = [key for key in read if key in renamed or key in required]
    if not missing:
        return
    pairs = []
    for key, other in renamed.items():
        either = (
            " (timeouts where a time limit ended the episode)" if other in AMBIGUOUS_ENDS else ""
        )
        pairs.append(f"{other}: {key}{either}")
    fix = ""
    if pairs:
        fix = f"; rename {', '.join(pairs)}"
    elif missing == ["terminals"] and "timeouts" in keys:
        fix = "; add terminals, all false if only time limits end the episodes"
    raise ValueError(
        f"{path}: expected D4RL's keys, {', '.join(missing)} not among "
        f"{', '.join(keys) or 'none'}{fix}"
    )


def _check_shapes(
    path: Path, columns: Mapping[str, np.ndarray | h5py.Dataset], widths: Mapping[str, int]
) -> int:
    """Return the number of rows of all columns.

    Args:
        path: of the file.
        columns: with shape and dtype.
        widths: as in `read_blocks`.

    Raises:
        ValueError: columns differ in length or have no row, or one has another shape or type, or
            is a group, a broken link or an empty dataset of HDF5.
    """
    for key, column in columns.items():
        _check_is_array(path, key, column)
    sizes = {key: (*column.shape, 1)[0] for key, column in columns.items()}
    if len(set(sizes.values())) > 1 or not sizes["rewards"]:
        raise ValueError(f"{path}: expected columns of one length, at least 1, got {sizes}")
    for key, column in columns.items():
        _check_width(path, key, column, widths[key])
    if "next_observations" in columns:
        width = _count_numbers(columns["observations"])
        _check_width(path, "next_observations", columns["next_observations"], width)
    return int(sizes["rewards"])


def _check_width(path: Path, key: str, column: np.ndarray | h5py.Dataset, width: int) -> None:
    """Raise a ValueError unless a column has rows of `width` numbers; 0: of one or more."""
    is_table = len(column.shape) in (1, 2) and is_numeric(column.dtype)
    numbers = _count_numbers(column)
    fits = numbers == width if width else numbers > 0
    if not (is_table and fits):
        raise ValueError(
            f"{path}: expected {key} of {width or 'some'} columns, got shape {column.shape}, "
            f"{column.dtype}"
        )


def _check_is_array(path: Path, key: str, column: object) -> None:
    """Raise a ValueError for a key of an HDF5 file that holds no array."""
    if isinstance(column, h5py.Group):
        raise ValueError(
            f"{path}: expected {key} as one array, got a group of {', '.join(column)}; np.hstack "
            "makes one of its parts"
        )
    if getattr(column, "shape", None) is None:
        raise ValueError(
            f"{path}: expected {key} as an array, got a broken link or an empty dataset; write its "
            "rows there"
        )


def _check_finite(path: Path, key: str, x: np.ndarray, start: int) -> None:
    """Raise a ValueError unless the rows of a column are finite in float32, as a store holds them.

    Args:
        path: of the file.
        key: of the column.
        x: (n, ...) rows.
        start: number of the first row in the file.
    """
    # A float64 beyond the range of float32 becomes infinite, and is refused below
    with np.errstate(over="ignore"):
        finite = np.isfinite(x.astype(np.float32))
    if key == "actions" and x.dtype.kind == "f":
        missing = np.isnan(x).reshape(len(x), -1).all(1)  # a row of NaN: the log lacks the action
        finite[missing] = True
    if not finite.all():
        row = start + np.argwhere(~finite)[0, 0]
        wrong = x[~finite][0]
        kind = " (float32)" if np.isfinite(wrong) else ""
        fix = ""
        if key == "actions" and np.isnan(wrong):
            fix = "; an action that was not recorded is NaN in all its numbers"
        raise ValueError(f"{path}: expected finite {key}{kind}, got {wrong} in row {row}{fix}")


class NpzColumn:
    """A column of an .npz file whose rows are read in their order."""

    def __init__(self, file: ZipFile, key: str) -> None:
        self.file = file.open(f"{key}.npy")
        header = np.lib.format.read_array_header_2_0
        if np.lib.format.read_magic(self.file) == (1, 0):
            header = np.lib.format.read_array_header_1_0
        self.shape, self.by_columns, self.dtype = header(self.file)

    def __getitem__(self, rows: slice) -> np.ndarray:
        if not self.shape:
            return self._read_rows(())
        if self.by_columns:
            return self.all_rows[rows]
        return self._read_rows((min(rows.stop, self.shape[0]) - rows.start, *self.shape[1:]))

    @cached_property
    def all_rows(self) -> np.ndarray:
        """All rows, of an array in Fortran order."""
        return self._read_rows(self.shape[::-1]).T

    def _read_rows(self, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape)) * self.dtype.itemsize
        return np.frombuffer(self.file.read(size), self.dtype).reshape(shape)


def episode_ends(columns: Columns) -> np.ndarray:
    """Return which rows of D4RL's columns end an episode, (n,) bool."""
    ended = [columns[key].astype(bool) for key in ENDS if key in columns]
    return np.asarray(np.any(ended, axis=0))


def read_episode_ends(columns: Json) -> np.ndarray:
    """Return which rows of a file end an episode, (n,) bool. columns: see `open_all_columns`."""
    n = columns["terminals"].shape[0]
    ended = np.zeros(n, bool)
    for key in ENDS:
        for start in range(0, n if key in columns else 0, BLOCK):
            rows = slice(start, min(start + BLOCK, n))
            ended[rows] |= columns[key][rows].reshape(-1) != 0
    return ended


def check_ends(path: Path, blocks: Iterable[Columns]) -> None:
    """Raise a ValueError unless some row of a file ends an episode; read up to the first such row.

    Without this check, all rows would be one episode, of which nothing can be held out.
    """
    rows = 0
    for block in blocks:
        if episode_ends(block).any():
            return
        rows += len(block["rewards"])
    raise ValueError(
        f"{path}: expected a row where terminals or timeouts is set, got {rows:,} rows without; mark "
        "the last row of each episode, also of a single one; dataset.horizon cuts nothing"
    )


def check_other_columns(path: Path, ignore: Sequence[str]) -> None:
    """Raise a ValueError if a column that is not read marks other ends of episodes.

    Args:
        path: of a file whose columns were checked.
        ignore: names of columns that say nothing of episodes.
    """
    with ExitStack() as stack, _explain_damage(path):
        columns = open_all_columns(stack, path)
        ended = read_episode_ends(columns)
        read = {*KEYS, *ENDS, "next_observations", *ignore}
        arrays = {}
        for name, column in columns.items():
            if name not in read and getattr(column, "shape", None):
                arrays[name] = column
        contradictions = find_contradictions(arrays, ended)
    missing = [name for name in ignore if name not in columns]
    if missing:
        raise ValueError(
            f"dataset.ignore: expected names among {', '.join(columns)}, got {', '.join(missing)}"
        )
    if contradictions:
        raise ValueError(f"{path}: {describe_contradiction(contradictions, ended)}")


def describe_next_observations(blocks: Iterable[Columns]) -> list[str]:
    """Return the fault of `next_observations` that are not the observations of the next rows, as of
    shuffled rows; read the whole file where it has them.
    """
    steps = wrong = 0
    for block in regroup_blocks(blocks, episode_ends):
        if "next_observations" not in block:
            return []
        inside = ~episode_ends(block)[:-1]
        n = len(inside)
        following = block["observations"].reshape(n + 1, -1)[1:]
        stated = block["next_observations"].reshape(n + 1, -1)[:-1]
        same = np.isclose(stated, following).all(1)
        steps += int(inside.sum())
        wrong += int((inside & ~same).sum())
    if not wrong:
        return []
    return [
        f"next_observations: {wrong:,} of {steps:,} are not the observation of the next row, "
        "although the episode goes on"
    ]


def list_unread(path: Path, read: Sequence[str]) -> list[str]:
    """Return the names of the columns of a file that are not among those that are read."""
    with ExitStack() as stack:
        columns = open_all_columns(stack, path)
        unread = [key for key in columns if key not in read]
        return [f"{key} (text)" if is_text(columns[key]) else key for key in unread]
