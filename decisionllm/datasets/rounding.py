"""What observations lose when they become float32, as a store keeps them."""

import numpy as np

# A share of a number's range that a model can see; rounding by less is no fault.
VISIBLE = 1e-4


class Rounding:
    """Range and largest rounding of the columns of rows that come in blocks.

    Seconds since 1970 are rounded to 128 s: the times of one day become 675 different ones.
    """

    def __init__(self) -> None:
        self.low = np.array(np.inf)
        self.high = np.array(-np.inf)
        self.error = np.zeros(())

    def add(self, rows: np.ndarray) -> None:
        """A further block (n, S), in the type that it has before; float32 loses nothing."""
        if np.can_cast(rows.dtype, np.float32) or not len(rows):
            return
        # Numbers beyond float32 and infinite ones are refused where rows are checked.
        with np.errstate(over="ignore", invalid="ignore"):
            lost = np.abs(rows - rows.astype(np.float32))
        self.error = np.maximum(self.error, lost.max(0))
        self.low = np.minimum(self.low, rows.min(0))
        self.high = np.maximum(self.high, rows.max(0))

    def faults(self) -> list[str]:
        """The fault of numbers of an observation that rounding changes visibly; see
        `faults.reported`.
        """
        if np.all(self.error == 0):
            return []
        size = self.high - self.low
        seen = np.flatnonzero((self.error > VISIBLE * size) & (size > 0))
        if not len(seen):
            return []
        share = (self.error[seen] / size[seen]).max()
        return [
            f"observation {seen.tolist()}: rounded by up to {share:.2g} of its range in float32, so "
            "that different numbers become equal; subtract an offset, such as the first time"
        ]
