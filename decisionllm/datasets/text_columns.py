"""The task texts of a file of columns: which column holds them, and the text of each episode."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from decisionllm.checks import unknown_name_message
from decisionllm.files import explain_errors

# names that other libraries and logs give to a column of task texts, in lower case
TEXT_NAMES = (
    "command",
    "commands",
    "goal_text",
    "instruction",
    "instructions",
    "lang_instruction",
    "language",
    "language_instruction",
    "language_instructions",
    "mission",
    "missions",
    "natural_language_instruction",
    "prompt",
    "prompts",
    "task",
    "task_description",
    "task_descriptions",
    "task_text",
    "task_texts",
    "tasks",
    "text",
    "texts",
)
# names of a column that says which entry of a table of texts belongs to a row or an episode
INDEX_NAMES = ("task_index", "task_indices", "task_id", "task_ids")
BLOCK = 1 << 16  # texts that are read at a time

Column = Any  # with `shape` and `dtype`, rows by a slice


def is_text(column: Column) -> bool:
    """Return whether a column holds texts: of numpy, or strings of HDF5."""
    dtype = getattr(column, "dtype", None)
    if dtype is None:
        return False
    return dtype.kind in "US" or h5py.check_string_dtype(dtype) is not None


def has_text_name(key: str) -> bool:
    """Return whether a column is called as texts are: `tasks`, or `infos/task` in a group."""
    return last_name(key) in TEXT_NAMES


def last_name(key: str) -> str:
    """Return the name of a column without its groups, in lower case."""
    return key.rpartition("/")[2].lower()


def choose_column(path: Path, columns: Mapping[str, Column], task_from: str) -> str:
    """Return the name of the column of task texts; empty if there is none.

    Args:
        path: of the file, for messages.
        columns: all columns of the file.
        task_from: the option: a column; empty: the column that has one of `TEXT_NAMES` and holds
            texts.

    Raises:
        ValueError: there is no such column, or several could be meant, or it holds no texts.
    """
    if task_from:
        if task_from not in columns:
            raise ValueError(
                f"dataset.task_from: {path}: {unknown_name_message('column', task_from, columns)}"
            )
        if not is_text(columns[task_from]):
            raise no_texts_error(path, task_from, columns[task_from])
        return task_from
    named = [key for key in columns if has_text_name(key)]
    for key in named:
        if is_object(columns[key]):
            raise no_texts_error(path, key, columns[key])
    readable = [key for key in named if is_text(columns[key])]
    if len(readable) > 1:
        raise ValueError(
            f"{path}: expected one column of task texts, got {', '.join(readable)}; "
            f"dataset.task_from=NAME names the one to read"
        )
    return readable[0] if readable else ""


def is_object(column: Column) -> bool:
    """Return whether a column holds Python objects that are no strings of HDF5."""
    dtype = getattr(column, "dtype", None)
    return dtype is not None and dtype.kind == "O" and not is_text(column)


def no_texts_error(path: Path, key: str, column: Column) -> ValueError:
    """Return the error for a column that should hold texts."""
    kind = "Python objects, which are not unpickled" if is_object(column) else f"{column.dtype}"
    return ValueError(
        f"{path}: expected {key} as texts, got {kind}; save it as numpy.array(texts, dtype=str), "
        "or take text=none"
    )


def index_column(columns: Mapping[str, Column], key: str) -> str:
    """Return the name of the column of indices into the table of texts `key`; empty if none."""
    names = [*INDEX_NAMES, f"{last_name(key)}_index", f"{last_name(key)}_id"]
    for name in columns:
        dtype = getattr(columns[name], "dtype", None)
        if last_name(name) in names and dtype is not None and dtype.kind in "iu":
            return name
    return ""


def read_episode_texts(
    path: Path, columns: Mapping[str, Column], key: str, offsets: np.ndarray
) -> list[str]:
    """Return the text of each episode (E,).

    Args:
        path: of the file, for messages.
        columns: all columns of the file, opened to be read from their first row.
        key: the column of texts: one for the file, for each episode, or for each row; or a table
            of texts beside a column `task_index` of rows or episodes.
        offsets: (E+1,) where episodes begin and end.

    Raises:
        ValueError: there are more or fewer texts, a text changes within an episode, or is not
            UTF-8.
    """
    column = columns[key]
    n, E = int(offsets[-1]), len(offsets) - 1
    size = int(np.prod(column.shape))
    if size == n:
        return [str(text) for text in read_episode_values(path, column, key, offsets)]
    texts = to_texts(path, key, column, slice(0, size)).astype(object)
    index = index_column(columns, key)
    if index:
        numbers = read_episode_values(path, columns[index], index, offsets).astype(np.int64)
        # as many texts as episodes are a table if one number stands beside several of them
        is_table = size != E or len({*zip(numbers, texts, strict=True)}) > len({*numbers})
        wrong = np.flatnonzero((numbers < 0) | (numbers >= size))
        if is_table and len(wrong):
            raise ValueError(
                f"{path}: expected {index} within 0 .. {size - 1}, the texts of {key}, got "
                f"{numbers[wrong[0]]} in episode {wrong[0]}"
            )
        if is_table:
            texts = texts[numbers]
    elif size == 1:
        texts = texts.repeat(E)
    check_size(path, key, len(texts), offsets)
    return [str(text) for text in texts]


def read_episode_values(path: Path, column: Column, key: str, offsets: np.ndarray) -> np.ndarray:
    """Return the value of a column in each episode (E,): a column of rows must not change within
    an episode.
    """
    n, E = int(offsets[-1]), len(offsets) - 1
    size = int(np.prod(column.shape))
    if size == E:
        return to_texts(path, key, column, slice(0, size)).astype(object)
    check_size(path, key, size, offsets, of_rows=True)
    values = np.empty(E, object)  # at the first row of each episode
    for start in range(0, n, BLOCK):
        rows = np.arange(start, min(start + BLOCK, n))
        block = to_texts(path, key, column, slice(start, len(rows) + start)).astype(object)
        episodes = np.searchsorted(offsets, rows, side="right") - 1
        is_first = rows == offsets[episodes]
        values[episodes[is_first]] = block[is_first]
        changed = np.flatnonzero(block != values[episodes])
        if len(changed):
            i = changed[0]
            e = episodes[i]
            raise ValueError(
                f"{path}: expected one value of {key} in an episode, got {values[e]!r} and then "
                f"{block[i]!r} in row {rows[i]}, step {rows[i] - offsets[e]} of episode {e}; end the "
                "episode there, or take text=none"
            )
    return values


def check_size(
    path: Path, key: str, size: int, offsets: np.ndarray, *, of_rows: bool = False
) -> None:
    """Raise a ValueError unless a column has a value for each episode, or row if it may."""
    n, E = int(offsets[-1]), len(offsets) - 1
    if size != (n if of_rows else E):
        raise ValueError(
            f"{path}: expected {key} with a value for each of {n:,} rows or {E:,} episodes, got "
            f"{size:,}; bring it to one of these lengths, or take text=none"
        )


def to_texts(path: Path, key: str, column: Column, rows: slice) -> np.ndarray:
    """Return rows of a column, texts as str and numbers as they are: (m,)."""
    with explain_errors(
        f"{path}: expected {key} as texts in UTF-8",
        UnicodeDecodeError,
        fix="encode it again, or take text=none",
    ):
        if isinstance(column, h5py.Dataset):
            strings = column.asstr("utf-8") if is_text(column) else column
            values = np.asarray(strings[rows] if column.shape else strings[()])
        else:
            values = np.asarray(column[rows])
        if values.dtype.kind == "S":
            values = np.char.decode(values, "utf-8")
        return values.reshape(-1)
