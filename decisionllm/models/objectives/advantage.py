"""Advantage weighting: each action counts by clip(exp(advantage / temperature)).

The advantage is the return-to-go of the log minus the value of the observation, an expectile of the
returns-to-go, which is read from the hidden state that predicts the action; neither the action nor
the return is an input of it.
Source: MARWIL (Wang et al., NeurIPS 2018), AWR (arXiv 1910.00177); the expectile of IQL (arXiv
    2110.06169).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decisionllm.models.objectives.likelihood import action_losses, masked_mean
from decisionllm.protocols import ActionModel, Objective

if TYPE_CHECKING:
    from decisionllm.schema import Batch, Spec

MAX_WEIGHT = 20.0  # of exp(advantage / temperature)
RATE = 0.1  # of a training step in the running deviation and mean weight
# deviation of the advantages, in deviations of the returns: where a return is certain, only errors
# of the value are left
LEAST = 0.02


class AdvantageWeighted(nn.Module, Objective):
    """`nll`: of the actions, each times the weight of its advantage. `value`: asymmetric squared
    error of the value.

    The deviation of the advantages and the mean weight, which keeps the meaning of the learning
    rate, are running means over the training steps before: so the weights do not depend on how a
    batch is divided.

    Args:
        width: D, of hidden states.
        spec: of the data; the value is level + slope x (1 - timestep / horizon), of undiscounted
            returns-to-go.
        temperature: of the weights, in standard deviations of the advantages; smaller: nearer to the best actions
            of the log.
        expectile: of the value: 0.5: the mean, near 1: the best returns.

    Raises:
        ValueError: the temperature is not above 0, or the expectile not within 0 .. 1.
    """

    # Where the return is an input, all actions of an input have one advantage.
    condition_on = "none"

    def __init__(
        self, width: int, spec: Spec, *, temperature: float = 1.0, expectile: float = 0.5
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"objective.temperature: expected above 0, got {temperature}")
        check_expectile(expectile)
        self.horizon = spec.horizon
        self.temperature = temperature
        self.expectile = expectile
        self.out = nn.Linear(width, 2)
        # of the advantages, in the model's units of returns
        self.deviation = nn.Buffer(torch.ones(()))
        self.mean_weight = nn.Buffer(torch.ones(()))
        self.sums: Tensor | None = None  # over the steps since the last update

    def loss(self, model: ActionModel, batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
        assert batch.loss_mask is not None
        returns_to_go = model.normalizer.returns_to_go(batch.returns_to_go)
        advantages = returns_to_go - self.value(hidden, batch.timesteps)
        losses = action_losses(model, batch, hidden) * self.weights(advantages, batch.loss_mask)
        return {
            "nll": masked_mean(losses, batch.loss_mask),
            "value": masked_mean(expectile_loss(advantages, self.expectile), batch.loss_mask),
        }

    def value(self, hidden: Tensor, timesteps: Tensor) -> Tensor:
        """Predict returns-to-go in the model's units (B, T), in float32, of hidden states (B, T, D)
        at these timesteps (B, T).
        """
        with torch.autocast(hidden.device.type, enabled=False):
            level, slope = self.out(hidden.float()).unbind(-1)
        expected: Tensor = level + slope * (1 - timesteps / self.horizon)
        return expected

    def weights(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the weights of the actions (B, T), about 1 on average, of advantages in the
        model's units (B, T). mask: (B, T) targets.
        """
        advantages = advantages.detach()
        scale = self.temperature * self.deviation.clamp(min=LEAST)
        weights = (advantages / scale).exp().clamp(max=MAX_WEIGHT)
        if self.training:
            self._add(advantages[mask].double(), weights[mask].double())
        return weights / self.mean_weight

    def _add(self, advantages: Tensor, weights: Tensor) -> None:
        """Add the targets of a micro-batch (n,) to the sums of this training step."""
        count = torch.tensor(len(advantages), dtype=torch.double, device=advantages.device)
        sums = torch.stack([count, advantages.sum(), advantages.square().sum(), weights.sum()])
        self.sums = sums if self.sums is None else self.sums + sums

    @torch.no_grad()
    def after_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """Update the running means by the batch of this training step."""
        if self.sums is None:  # another embodiment was trained in this step
            return
        count, first, second, weight = total(self.sums)
        self.sums = None
        count = count.clamp(min=1)
        variance = (second / count - (first / count) ** 2).clamp(min=0)
        self.deviation.lerp_(variance.sqrt().float(), RATE)
        self.mean_weight.lerp_((weight / count).float(), RATE)


def check_expectile(expectile: float) -> None:
    """Refuse an expectile that is not within 0 .. 1."""
    if not 0 < expectile < 1:
        raise ValueError(f"objective.expectile: expected within 0 .. 1, got {expectile}")


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """Return squared errors target - prediction (...), weighted by the expectile where above 0 and
    by 1 - expectile elsewhere: (...).
    """
    return torch.where(errors > 0, expectile, 1 - expectile) * errors.square()
