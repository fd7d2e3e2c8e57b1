"""Columns that are read in blocks of rows."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from decisionllm.schema import raise_for_first

Columns = dict[str, np.ndarray]  # by name, (n, ...) each


def regroup_blocks(
    blocks: Iterable[Columns], ends: Callable[[Columns], np.ndarray]
) -> Iterator[Columns]:
    """Regroup blocks of rows, so that each ends with a row where `ends` (n,) is true.

    Rows after the last such row are the last block.
    """
    remainder: Columns = {}  # rows behind the last end
    for block in blocks:
        if remainder:
            block = {name: np.concatenate([remainder[name], x]) for name, x in block.items()}
        last_rows = np.flatnonzero(ends(block))
        n = int(last_rows[-1]) + 1 if len(last_rows) else 0  # rows up to the last end
        if n:
            yield {name: x[:n] for name, x in block.items()}
        remainder = {name: x[n:] for name, x in block.items()}
    if any(map(len, remainder.values())):
        yield remainder


def to_flags(place: str, column: np.ndarray, start: int = 0) -> np.ndarray:
    """Convert a column of flags (n, ...) to bool.

    Args:
        place: the file and the column, to begin a message with.
        column: of 0 and 1 in any type.
        start: number of the first row in the file.

    Raises:
        ValueError: another value, as where columns are swapped or a number is missing (NaN).
    """
    is_no_flag = (column != 0) & (column != 1)
    row = start + np.indices(column.shape)[0]
    raise_for_first(f"{place}: ", is_no_flag, "expected 0 or 1, got {} in row {}", column, row)
    return np.asarray(column != 0)
