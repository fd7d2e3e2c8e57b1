"""Behaviour cloning: the negative log-likelihood of the actions of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decisionllm.protocols import ActionModel, Objective

if TYPE_CHECKING:
    from decisionllm.schema import Batch, Spec


class Likelihood(nn.Module, Objective):
    """`nll`: mean negative log-likelihood of the actions with loss_mask, times their action_weight,
    in nats.
    """

    def __init__(self, width: int, spec: Spec) -> None:
        super().__init__()

    def loss(self, model: ActionModel, batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
        return {"nll": masked_mean(action_losses(model, batch, hidden), batch.loss_mask)}


def action_losses(model: ActionModel, batch: Batch, hidden: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats of each action, times its action_weight: hidden
    states (B, T, D) -> (B, T).
    """
    distribution = model.distribution(hidden, batch.action_masks, batch.observations)
    losses = -distribution.log_prob(model.normalizer.actions(batch.actions))
    if batch.action_weight is not None:
        losses = batch.action_weight * losses
    return losses


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of values (B, T) where mask (B, T) is True; padding has no weight, whatever
    it holds, even NaN.
    """
    assert mask is not None
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)
