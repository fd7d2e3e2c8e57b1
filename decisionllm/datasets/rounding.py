"""The rounding of observations to float32, the type of a store."""

import numpy as np

# Rounding by a smaller share of a number's range is no fault.
VISIBLE = 1e-4


class Rounding:
    """Running range and largest rounding error of the columns of rows.

    Seconds since 1970 are rounded to 128 s: the times of one day become 675 different ones.
    """

    def __init__(self) -> None:
        self.low = np.array(np.inf)
        self.high = np.array(-np.inf)
        self.error = np.zeros(())

    def add(self, rows: np.ndarray) -> None:
        """Add a block of rows (n, S) in their original type."""
        if np.can_cast(rows.dtype, np.float32) or not len(rows):
            return
        # Numbers beyond float32 and infinite ones are refused where rows are checked.
        with np.errstate(over="ignore", invalid="ignore"):
            error = np.abs(rows - rows.astype(np.float32))
        self.error = np.maximum(self.error, error.max(0))
        self.low = np.minimum(self.low, rows.min(0))
        self.high = np.maximum(self.high, rows.max(0))

    def faults(self) -> list[str]:
        """Return the fault of numbers of an observation that rounding changes visibly; see
        `data_quality.list_faults`.
        """
        if np.all(self.error == 0):
            return []
        width = self.high - self.low
        visible = np.flatnonzero((self.error > VISIBLE * width) & (width > 0))
        if not len(visible):
            return []
        share = (self.error[visible] / width[visible]).max()
        return [
            f"observation {visible.tolist()}: rounded by up to {share:.2g} of its range in float32, so "
            "that different numbers become equal; subtract an offset, such as the first time"
        ]
