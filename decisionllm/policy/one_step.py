"""One step without a text, read by a recorded list of operations: the same kernels and bits, without Python between them."""

import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from decisionllm.models.decision_llm import DecisionLLM
from decisionllm.schema import Batch

RUNS = 4  # torch optimises the list in its first runs
Read = Callable[..., Tensor]  # of `columns`


@torch.inference_mode()
def recorded(model: DecisionLLM, batch: Batch) -> dict[bool, Read]:
    """`DecisionLLM.read` of one row of one step, by whether the return is given: `columns` -> hidden states (1, 1, D).

    Empty where the operations depend on the numbers read, or the bits are not the same.

    Args:
        model: whose weights stay where they are from now on.
        batch: one row of one step, without a text.
    """
    if model.team is not None or model.spec.entity_schema or model.backbone.layout is None or batch.observations.is_cuda:
        return {}
    memo: dict[int, Any] = {id(x): nn.Parameter(x.detach(), requires_grad=False) for x in model.parameters()}
    memo[id(model.backbone.tokenizer)] = model.backbone.tokenizer
    frozen = deepcopy(model, memo)  # of the same memory, without gradients
    found: dict[bool, Read] = {}
    for given in (True,) if model.max_return is None else (True, False):
        null = None if given else torch.zeros(1, dtype=torch.bool)

        def read(returns: Tensor, observations: Tensor, actions: Tensor, timesteps: Tensor, null: Any = null) -> Tensor:
            each = {"returns_to_go": returns, "observations": observations, "actions": actions, "timesteps": timesteps}
            steps: Any = SimpleNamespace(**vars(batch) | each)  # a record checks its shapes, which are tensors here
            return frozen.read(steps, null)

        drawn = [replace(batch, observations=torch.randn_like(batch.observations)) for _ in range(RUNS)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch prefers compilers, which change the bits
                found[given] = torch.jit.trace(read, columns(batch), check_trace=False)
            if not all([torch.equal(found[given](*columns(other)), model.read(other, null)) for other in drawn]):
                return {}
        except RuntimeError as error:
            logging.getLogger(__name__).warning("one step is read without a recorded list of operations: %s", error)
            return {}
    return found


def columns(batch: Batch) -> tuple[Tensor, ...]:
    return batch.returns_to_go, batch.observations, batch.actions, batch.timesteps
