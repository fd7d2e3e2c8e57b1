"""Advantage-weighted action loss: the value of each observation, and clip(exp(advantage / temperature)) as the weight of its action.

The value is an expectile of the returns-to-go of the log, read from the hidden state that predicts the action; neither the action nor the
return is an input of it. Source: MARWIL (Wang et al., NeurIPS 2018), AWR (arXiv 1910.00177); the expectile of IQL (arXiv 2110.06169).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

MAX_WEIGHT = 20.0  # of exp(advantage / temperature)
RATE = 0.1  # of a training step in the running deviation and mean weight
LEAST = 0.02  # deviation of the advantages, in deviations of the returns: where a return is certain, only errors of the value are left


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """Squared errors target - prediction (...), weighted by the expectile where above 0 and by 1 - expectile elsewhere: (...)."""
    return torch.where(errors > 0, expectile, 1 - expectile) * errors.square()


class AdvantageWeights(nn.Module):
    """The value of each step, and the weights of its action.

    The deviation of the advantages and the mean weight, which keeps the meaning of the learning rate, are running means over the training
    steps before: so the weights do not depend on how a batch is divided.

    Args:
        width: D, of hidden states.
        horizon: steps; the value is level + slope x (1 - timestep / horizon), of undiscounted returns-to-go.
        temperature: in standard deviations of the advantages; smaller: nearer to the best actions of the log.
        expectile: of the value.

    Raises:
        ValueError: the temperature is not above 0, or the expectile not within 0 .. 1.
    """

    def __init__(self, width: int, horizon: int, *, temperature: float, expectile: float) -> None:
        super().__init__()
        if not (temperature > 0 and 0 < expectile < 1):
            raise ValueError("model.advantage_weighting: expected a temperature above 0, or 0 for none, and "
                             f"model.max_return_expectile within 0 .. 1, got {temperature} and {expectile}")  # fmt: skip
        self.horizon, self.temperature, self.expectile = horizon, temperature, expectile
        self.out = nn.Linear(width, 2)
        # the deviation in the model's units of returns
        self.deviation, self.mean_weight = nn.Buffer(torch.ones(())), nn.Buffer(torch.ones(()))
        self.sums: Tensor | None = None  # since the last update

    def value(self, hidden: Tensor, timesteps: Tensor) -> Tensor:
        """Returns-to-go in the model's units (B, T), in float32, of hidden states (B, T, D) at these timesteps (B, T)."""
        with torch.autocast(hidden.device.type, enabled=False):
            level, slope = self.out(hidden.float()).unbind(-1)
        expected: Tensor = level + slope * (1 - timesteps / self.horizon)
        return expected

    def forward(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Weights of the actions (B, T), whose mean over steps is about 1, of advantages in the model's units (B, T). mask: (B, T) targets."""
        advantages = advantages.detach()
        weights = (advantages / (self.temperature * self.deviation.clamp(min=LEAST))).exp().clamp(max=MAX_WEIGHT)
        if self.training:
            known, of_them = advantages[mask].double(), weights[mask].double()
            sums = torch.stack([mask.sum(), known.sum(), known.square().sum(), of_them.sum()])
            self.sums = sums if self.sums is None else self.sums + sums
        return weights / self.mean_weight

    @torch.no_grad()
    def update(self, total: Callable[[Tensor], Tensor]) -> None:
        """Update the running means by the batch of this training step. total: sum over all processes."""
        if self.sums is None:  # of an embodiment that this step did not train
            return
        count, first, second, weight = total(self.sums)
        count, self.sums = count.clamp(min=1), None
        self.deviation.lerp_((second / count - (first / count) ** 2).clamp(min=0).sqrt().float(), RATE)
        self.mean_weight.lerp_((weight / count).float(), RATE)
