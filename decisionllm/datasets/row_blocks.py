"""Columns that are read in blocks of rows."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

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
