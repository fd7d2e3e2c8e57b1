"""Count, mean, variance and range of rows that come in blocks."""

import numpy as np


class Moments:
    """Count, mean, variance and range of the columns of blocks of rows.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.variance = 0, np.zeros(()), np.zeros(())
        self.low, self.high = np.array(np.inf), np.array(-np.inf)

    def add(self, rows: np.ndarray) -> None:
        """A further block (n, ...), which may be empty."""
        if not len(rows):
            return
        variance, share = rows.var(0, dtype=np.float64), len(rows) / (self.count + len(rows))
        apart = rows.mean(0, dtype=np.float64) - self.mean
        self.mean = self.mean + share * apart
        self.variance = (1 - share) * self.variance + share * variance + share * (1 - share) * apart**2
        self.low, self.high = np.minimum(self.low, rows.min(0)), np.maximum(self.high, rows.max(0))
        self.count += len(rows)

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviations, the shape of a row."""
        return np.sqrt(self.variance)
