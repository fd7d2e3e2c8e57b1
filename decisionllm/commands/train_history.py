"""The losses and scores that a training has logged: they select the best weights and show a stall."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from decisionllm.eval.eval_callback import PATIENCE, first_stall


@dataclass
class History:
    """The logged losses and scores, which select the best weights and show a stall.

    Attributes:
        lowest_loss: the lowest held-out loss.
        scores: the score of each rollout.
        losses: the held-out loss at each rollout, or that of training without held-out data.
    """

    lowest_loss: float = math.inf
    scores: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add(self, values: Mapping[str, float]) -> None:
        """Add a log line."""
        self.lowest_loss = min(self.lowest_loss, values.get("held_out_nll", math.inf))
        if "score" in values:
            self.losses.append(values.get("held_out_nll", values["nll"]))
            self.scores.append(values["score"])

    def is_best(self, values: Mapping[str, float], keep_best: str) -> bool:
        """Return whether a new log line has the lowest held-out loss, or the highest score.

        keep_best: the option log.keep_best.
        """
        if keep_best == "loss":
            return values.get("held_out_nll", math.inf) < self.lowest_loss
        if keep_best == "score" and "score" in values:
            return values["score"] > max(self.scores, default=-math.inf)
        return False

    def has_stalled(self) -> bool:
        """Return whether the last rollout is the first after which the loss has fallen and the
        score has not risen for LOOKS rollouts.
        """
        return first_stall(self.losses, self.scores) == len(self.scores)

    def stall_warning(self) -> str:
        """Return the warning for a run that has stalled."""
        before, after = self.losses[-1 - PATIENCE], self.losses[-1]
        highest = max(self.scores[:-PATIENCE])
        return (
            f"warning: in the last {PATIENCE} rollouts the loss fell from {before:.4f} to {after:.4f}, "
            f"and the score did not rise above {highest:.1f}; log.keep_best=score keeps the weights "
            "of the highest score"
        )
