"""Rewards that are too large for returns in float32, which models read."""

import numpy as np

# The square of a greater number is beyond float32: a loss or a variance of it would be infinite.
MAX_RETURN = float(np.sqrt(np.finfo(np.float32).max))
USUAL_QUANTILE = 0.75  # of the rewards that are not 0: the usual reward
SAMPLE = 100_000  # rewards that the usual one is taken from


class RewardDigits:
    """The largest rounding error of returns-to-go that are computed in float32.

    A reward of -1e16 between rewards of 1 leaves no trace of these in any return before it.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self.error = 0.0

    def add(self, name: str, rewards: np.ndarray, after_exit: float) -> None:
        """Add an episode.

        Args:
            name: of the episode, for messages.
            rewards: (n,).
            after_exit: reward of the team after the last step.

        Raises:
            ValueError: a return-to-go is too large.
        """
        rewards = rewards.astype(np.float64)
        exact = np.cumsum(rewards[::-1])[::-1] + after_exit
        largest = float(np.abs(exact).max())
        if not largest <= MAX_RETURN:
            raise ValueError(
                f"{name}: expected returns-to-go within {MAX_RETURN:.2g}, whose squares float32 can "
                f"hold, got {largest:.2g}; divide all rewards by one number, or replace a placeholder "
                "by a usual reward"
            )
        received = np.cumsum(rewards) - rewards
        computed = (exact[0] - received).astype(np.float32)
        self.largest = max(self.largest, float(np.abs(rewards).max()))
        self.error = max(self.error, float(np.abs(computed - exact).max()))

    def faults(self, rewards: np.ndarray) -> list[str]:
        """Return the fault of returns that are rounded by more than a usual reward; see
        `data_quality.list_faults`.

        rewards: (n,) of all episodes.
        """
        sizes = np.abs(rewards[:: max(len(rewards) // SAMPLE, 1)])
        sizes = sizes[sizes > 0]
        usual = float(np.quantile(sizes, USUAL_QUANTILE)) if len(sizes) else np.inf
        if self.error <= usual / 2:
            return []
        return [
            f"rewards of up to {self.largest:.2g}: float32 rounds returns-to-go by up to "
            f"{self.error:.2g}, which hides a usual reward of {usual:.2g}; replace a "
            "placeholder by a usual reward, or clip rewards"
        ]
