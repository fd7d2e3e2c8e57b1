"""Trace the decision of a single step without a text: the same kernels and bits, without Python
between them.
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
Decide = Callable[..., tuple[Tensor, Tensor]]  # of `step_columns`


def decide_step(
    model: SequenceModel, batch: Batch, null: Tensor | None, decode: str, *numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the action (1, A) of one row of one step, and the return-to-go that it is conditioned
    on (1,), both in raw units.

    null: one False; the return-to-go is then the predicted maximum. None: it is given.
    numbers: of `COLUMNS`, in place of the batch's.
    """
    # not a Batch, which checks its shapes: they are no numbers while operations are recorded
    steps: Any = SimpleNamespace(**vars(batch) | dict(zip(COLUMNS, numbers, strict=True)))
    if null is not None:
        steps.returns_to_go = model.predict_return(model.read(steps, null))
    return model.choose(model.read(steps)[:, 0], None, decode=decode), steps.returns_to_go[:, 0]


@torch.no_grad()
def trace_step(model: SequenceModel, batch: Batch, decode: str) -> dict[bool, Decide]:
    """Trace `decide_step`: {whether the return is given: `step_columns` -> action, return-to-go}.

    Empty where the operations depend on the numbers read, or the bits are not the same.

    Args:
        model: whose weights stay where they are from now on.
        batch: one row of one step, without a text.
        decode: of the action, see `SequenceModel.choose`; a drawn one cannot be recorded.
    """
    if not _is_fixed(model, batch, decode):
        return {}
    frozen = _copy_without_gradients(model)
    traces: dict[bool, Decide] = {}
    for return_given in model.return_inputs:
        null = None if return_given else torch.zeros(1, dtype=torch.bool)
        others = [_randomize_observations(batch) for _ in range(RUNS)]
        try:
            trace = _record_operations(partial(decide_step, frozen, batch, null, decode), batch)
            for other in others:
                got = trace(*step_columns(other))
                expected = decide_step(model, other, null, decode, *step_columns(other))
                if not all(map(torch.equal, got, expected)):
                    return {}
        except Exception as error:  # whatever a tracer can raise
            message = "one step is read without a recorded list of operations: %s"
            logging.getLogger(__name__).warning(message, error)
            return {}
        traces[return_given] = trace
    return traces


def _is_fixed(model: SequenceModel, batch: Batch, decode: str) -> bool:
    """Return whether the operations do not depend on the numbers that are read.

    Of discrete actions they do: each is checked to be an index, and a history may have masks.
    """
    if model.team is not None or model.spec.entity_schema or model.backbone.layout is None:
        return False
    if model.spec.num_actions:
        return False
    return decode != "sample" and batch.action_masks is None and not batch.observations.is_cuda


def _copy_without_gradients(model: SequenceModel) -> SequenceModel:
    """Copy a model; the weights share memory and have no gradients."""
    memo: dict[int, object] = {}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach(), requires_grad=False)
    return deepcopy(model, memo)


def _randomize_observations(batch: Batch) -> Batch:
    """Return the batch with random observations."""
    return replace(batch, observations=torch.randn_like(batch.observations))


def _record_operations(decide: Decide, batch: Batch) -> Decide:
    """Record the operations of a function while it reads this batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers compilers, which change the bits
        shapes_fixed = make_fx(decide)(*step_columns(batch))
        trace = torch.jit.trace(shapes_fixed.eval(), step_columns(batch), check_trace=False)
        frozen: Decide = torch.jit.freeze(trace)
        return frozen


def step_columns(batch: Batch) -> tuple[Tensor, ...]:
    """Return the inputs of a trace, the `COLUMNS` of a batch."""
    return tuple(getattr(batch, name) for name in COLUMNS)
