"""One step without a text, decided by a recorded list of operations: the same kernels and bits,
without Python between them.
"""

import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from decisionllm.models.sequence import SequenceModel
from decisionllm.schema import Batch

# of a batch: what differs between steps
COLUMNS = "returns_to_go", "observations", "actions", "timesteps"
RUNS = 4  # torch optimises the list in its first runs
Decide = Callable[..., tuple[Tensor, Tensor]]  # of `columns`


def decided(
    model: SequenceModel, batch: Batch, null: Tensor | None, decode: str, *numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """The action (1, A) of one row of one step, and the return-to-go that it is conditioned on
    (1,), both in raw units.

    null: one False; the return-to-go is then the predicted maximum. None: it is given.
    numbers: of `COLUMNS`, in place of the batch's.
    """
    # not a Batch, which checks its shapes: they are no numbers while operations are recorded
    steps: Any = SimpleNamespace(**vars(batch) | dict(zip(COLUMNS, numbers, strict=True)))
    if null is not None:
        steps.returns_to_go = model.predict_return(model.read(steps, null))
    return model.choose(model.read(steps)[:, 0], None, decode=decode), steps.returns_to_go[:, 0]


@torch.no_grad()
def recorded(model: SequenceModel, batch: Batch, decode: str) -> dict[bool, Decide]:
    """`decided`, by whether the return is given: `columns` -> action and return-to-go.

    Empty where the operations depend on the numbers read, or the bits are not the same.

    Args:
        model: whose weights stay where they are from now on.
        batch: one row of one step, without a text.
        decode: of the action, see `SequenceModel.choose`; a drawn one cannot be recorded.
    """
    fixed = (
        model.team is None and not model.spec.entity_schema and model.backbone.layout is not None
    )
    if (
        not fixed
        or decode == "sample"
        or batch.action_masks is not None
        or batch.observations.is_cuda
    ):
        return {}
    memo: dict[int, Any] = {
        id(x): nn.Parameter(x.detach(), requires_grad=False) for x in model.parameters()
    }
    memo[id(model.backbone.tokenizer)] = model.backbone.tokenizer
    frozen = deepcopy(model, memo)  # of the same memory, without gradients
    found: dict[bool, Decide] = {}
    for given in (True, False) if model.predicts_return else (True,):
        null = None if given else torch.zeros(1, dtype=torch.bool)
        drawn = [
            replace(batch, observations=torch.randn_like(batch.observations)) for _ in range(RUNS)
        ]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch prefers compilers, which change the bits
                shapes_fixed = make_fx(partial(decided, frozen, batch, null, decode))(
                    *columns(batch)
                )
                listed = torch.jit.trace(shapes_fixed.eval(), columns(batch), check_trace=False)
                found[given] = torch.jit.freeze(listed)
            for other in drawn:
                pairs = zip(
                    found[given](*columns(other)),
                    decided(model, other, null, decode, *columns(other)),
                    strict=True,
                )
                if not all(torch.equal(got, wanted) for got, wanted in pairs):
                    return {}
        except Exception as error:  # whatever a tracer can raise
            logging.getLogger(__name__).warning(
                "one step is read without a recorded list of operations: %s", error
            )
            return {}
    return found


def columns(batch: Batch) -> tuple[Tensor, ...]:
    """What a recorded list is given."""
    return tuple(getattr(batch, name) for name in COLUMNS)
