"""Running mean, variance and range of rows that come in blocks; the scale of a column."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike


class RunningStatistics:
    """Running count, mean, variance and range of the columns of rows.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = np.zeros(())
        self.variance = np.zeros(())
        self.low = np.array(np.inf)
        self.high = np.array(-np.inf)

    def add(self, rows: np.ndarray) -> None:
        """Add a block of rows (n, ...), which may be empty."""
        if not len(rows):
            return
        variance = rows.var(0, dtype=np.float64)
        share = len(rows) / (self.count + len(rows))
        delta = rows.mean(0, dtype=np.float64) - self.mean
        between = share * (1 - share) * delta**2
        self.mean = self.mean + share * delta
        self.variance = (1 - share) * self.variance + share * variance + between
        self.low = np.minimum(self.low, rows.min(0))
        self.high = np.maximum(self.high, rows.max(0))
        self.count += len(rows)

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviations, in the shape of a row."""
        return np.sqrt(self.variance)


def is_varying(mean: ArrayLike, deviation: ArrayLike) -> np.ndarray:
    """Return which columns vary by more than the rounding of float32: bool, in the shape of `mean`."""
    return np.asarray(np.asarray(deviation) > 1e-6 * (1 + np.abs(mean)))


def standard_scale(mean: ArrayLike, deviation: ArrayLike) -> np.ndarray:
    """Return what standardised columns are divided by: their deviation, or 1 for a constant column."""
    return np.where(is_varying(mean, deviation), deviation, 1.0)


def mean_and_covariance(blocks: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (k,) and covariance (k, k) of rows that come in blocks (n, k)."""
    count = 0
    offset = None  # the first row, which is subtracted so that squares stay exact
    total = np.zeros(())
    products = np.zeros(())
    for block in blocks:
        if offset is None:
            offset = block[0].astype(np.float64)
        x = block - offset
        count += len(x)
        total = total + x.sum(0)
        products = products + x.T @ x
    assert offset is not None, "a store has rows"
    return offset + total / count, products / count - np.outer(total, total) / count**2
