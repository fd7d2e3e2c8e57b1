"""Random numbers of torch from a seed, and the seeds of environments."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# Seeds that every generator takes: numpy's RandomState those below 2**32, some of C and Java those
# below 2**31
SEED_LIMIT = 2**31
STARTS = 1_000_000  # between the first starts of two seeds


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Draw from this seed within the block; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def derive_seeds(seed: int, count: int, *, first: int = 0, end: int = SEED_LIMIT) -> np.ndarray:
    """Return the seeds of `count` environments, distinct numbers below `end`.

    They are first + STARTS * seed + 0, 1, ...; where these reach `end`, as many numbers in a row
    from a random place at or above `first`, which is drawn from the seed.

    Args:
        seed: of all of them, 0 or more, of any size.
        count: how many.
        first: the least number that may be returned.
        end: numbers from here on are not returned.

    Returns:
        (count,) int64.

    Raises:
        ValueError: the seed is below 0.
    """
    if seed < 0:
        raise ValueError(f"seed: expected 0 or more, got {seed}")
    start = first + STARTS * seed
    if start + count > end:
        rng = np.random.default_rng(seed)
        start = int(rng.integers(first, end - count))
    return start + np.arange(count)
