"""Conditioning on the model's own prediction of the largest return that the log shows from an
observation on.

Source: Reinformer (arXiv 2405.08740).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decisionllm.models.objectives.advantage import check_expectile, expectile_loss
from decisionllm.models.objectives.likelihood import action_losses, masked_mean
from decisionllm.protocols import ActionModel, Objective

if TYPE_CHECKING:
    from decisionllm.schema import Batch, Spec


class MaxReturn(nn.Module, Objective):
    """Every other row of a batch has the null return token in place of its returns, and the return
    is predicted from it.

    `nll`: of the actions, see `Likelihood`. `max_return`: asymmetric squared error of the predicted
    return-to-go, in the model's units, on the rows with the null return token.

    Args:
        width: D, of hidden states.
        spec: of the data.
        expectile: of the returns-to-go that is predicted, within 0 .. 1; near 1: the maximum.

    Raises:
        ValueError: the expectile is not within 0 .. 1.
    """

    condition_on = "return_to_go"
    predicts_return = True

    def __init__(self, width: int, spec: Spec, *, expectile: float = 0.99) -> None:
        super().__init__()
        check_expectile(expectile)
        self.expectile = expectile
        self.out = nn.Linear(width, 1)

    def return_given(self, batch: Batch) -> Tensor:
        rows = torch.arange(len(batch.mask), device=batch.mask.device)
        return rows % 2 == 0

    def loss(self, model: ActionModel, batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
        if len(batch.mask) < 2 and self.training:
            # every second row predicts its return: a single one never does
            raise ValueError(
                "objective=max_return: expected at least 2 rows of optim.batch_size for each process "
                "and optim.accumulate, got 1"
            )
        errors = model.normalizer.returns_to_go(batch.returns_to_go) - self.predict_return(hidden)
        null_return = batch.mask & ~self.return_given(batch)[:, None]
        return {
            "nll": masked_mean(action_losses(model, batch, hidden), batch.loss_mask),
            "max_return": masked_mean(expectile_loss(errors, self.expectile), null_return),
        }

    def predict_return(self, hidden: Tensor) -> Tensor:
        predicted: Tensor = self.out(hidden)[..., 0]
        return predicted
