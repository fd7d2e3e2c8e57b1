"""One step without a text, decided by a recorded list of operations: the same kernels and bits, without Python between them."""

import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from decisionllm.models.decision_llm import DecisionLLM
from decisionllm.schema import Batch

RUNS = 4  # torch optimises the list in its first runs
Decide = Callable[..., tuple[Tensor, Tensor]]  # of `columns`


def decided(model: DecisionLLM, batch: Batch, null: Tensor | None, decode: str) -> tuple[Tensor, Tensor]:
    """The action (1, A) of one row of one step, and the return-to-go that it is conditioned on (1,), both in raw units.

    null: one False; the return-to-go is then the predicted maximum. None: it is the batch's.
    """
    returns = batch.returns_to_go if null is None else model.predict_max_return(model.read(batch, null))
    steps: Any = SimpleNamespace(**vars(batch) | {"returns_to_go": returns})  # a record checks its shapes, which are no numbers
    return model.choose(model.read(steps)[:, 0], None, decode=decode), returns[:, 0]  # while operations are recorded


@torch.no_grad()
def recorded(model: DecisionLLM, batch: Batch, decode: str) -> dict[bool, Decide]:
    """`decided`, by whether the return is given: `columns` -> action and return-to-go.

    Empty where the operations depend on the numbers read, or the bits are not the same.

    Args:
        model: whose weights stay where they are from now on.
        batch: one row of one step, without a text.
        decode: of the action, see `DecisionLLM.choose`; a drawn one cannot be recorded.
    """
    fixed = model.team is None and not model.spec.entity_schema and model.backbone.layout is not None
    if not fixed or decode == "sample" or batch.action_masks is not None or batch.observations.is_cuda:
        return {}
    memo: dict[int, Any] = {id(x): nn.Parameter(x.detach(), requires_grad=False) for x in model.parameters()}
    memo[id(model.backbone.tokenizer)] = model.backbone.tokenizer
    frozen = deepcopy(model, memo)  # of the same memory, without gradients
    found: dict[bool, Decide] = {}
    for given in (True,) if model.max_return is None else (True, False):
        null = None if given else torch.zeros(1, dtype=torch.bool)

        def decide(returns: Tensor, observations: Tensor, actions: Tensor, timesteps: Tensor, null: Any = null) -> Any:
            each = {"returns_to_go": returns, "observations": observations, "actions": actions, "timesteps": timesteps}
            steps: Any = SimpleNamespace(**vars(batch) | each)
            return decided(frozen, steps, null, decode)

        drawn = [replace(batch, observations=torch.randn_like(batch.observations)) for _ in range(RUNS)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch prefers compilers, which change the bits
                shapes_fixed = make_fx(lambda *given: decide(*given))(*columns(batch))
                listed = torch.jit.trace(shapes_fixed.eval(), columns(batch), check_trace=False)
                found[given] = torch.jit.freeze(listed)
            for other in drawn:
                pairs = zip(found[given](*columns(other)), decided(model, other, null, decode), strict=True)
                if not all(torch.equal(got, wanted) for got, wanted in pairs):
                    return {}
        except Exception as error:  # whatever a tracer can raise
            logging.getLogger(__name__).warning("one step is read without a recorded list of operations: %s", error)
            return {}
    return found


def columns(batch: Batch) -> tuple[Tensor, ...]:
    return batch.returns_to_go, batch.observations, batch.actions, batch.timesteps
