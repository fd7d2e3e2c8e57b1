"""A token bucket: so many requests a second, and a burst after a pause."""

import math
import time
from collections.abc import Callable


class TokenBucket:
    """Counts what one client asks for.

    Args:
        rate: requests a second; infinity: no limit.
        burst: most requests at once, after a pause.
        clock: () -> seconds.
    """

    def __init__(
        self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self.burst = burst
        self.clock = clock
        self.left = burst
        self.at = clock()

    def take(self) -> float:
        """Count a request if there is room. Returns 0, or the seconds until there is."""
        self._fill()
        if self.left >= 1:
            self.left -= 1
            return 0.0
        return (1 - self.left) / self.rate

    def charge(self, count: int) -> None:
        """Count what a request turns out to hold beyond itself; later requests wait for it."""
        self._fill()
        self.left -= count

    def _fill(self) -> None:
        if math.isinf(self.rate):
            self.left = math.inf
            return
        now = self.clock()
        self.left = min(self.left + (now - self.at) * self.rate, self.burst)
        self.at = now
