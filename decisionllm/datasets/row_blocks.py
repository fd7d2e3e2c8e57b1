"""Columns that are read in blocks of rows."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from decisionllm.schema import refuse

Columns = dict[str, np.ndarray]  # by name, (n, ...) each


def ending(blocks: Iterable[Columns], ends: Callable[[Columns], np.ndarray]) -> Iterator[Columns]:
    """The rows of these blocks in blocks that end with a row where `ends` (n,) is true.

    Rows after the last such row are the last block.
    """
    left: Columns = {}  # rows whose end has not come yet
    for block in blocks:
        if left:
            block = {name: np.concatenate([left[name], x]) for name, x in block.items()}
        found = np.flatnonzero(ends(block))
        n = int(found[-1]) + 1 if len(found) else 0  # rows up to the last end
        if n:
            yield {name: x[:n] for name, x in block.items()}
        left = {name: x[n:] for name, x in block.items()}
    if any(map(len, left.values())):
        yield left


def flags(place: str, column: np.ndarray, start: int = 0) -> np.ndarray:
    """A column of flags (n, ...) as bool.

    Args:
        place: the file and the column, how a message begins.
        column: of 0 and 1 in any type.
        start: number of the first row in the file.

    Raises:
        ValueError: another value, as where columns are swapped or a number is missing (NaN).
    """
    wrong = (column != 0) & (column != 1)
    row = start + np.indices(column.shape)[0]
    refuse(f"{place}: ", wrong, "expected 0 or 1, got {} in row {}", column, row)
    return np.asarray(column != 0)
