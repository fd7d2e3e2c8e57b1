"""From hidden states to actions: by the head's distribution, or by plans that end in a value."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decisionllm.models.sequence import SequenceModel
from decisionllm.protocols import Decider


class Direct(Decider):
    """Takes the action that the distribution of the head names.

    Args:
        model: the trained model.
        decode: `mode`, `mean`, `sample` or `unclipped`, see `SequenceModel.choose`.
        device: of the model.
    """

    def __init__(self, model: SequenceModel, decode: str, device: str) -> None:
        self.model = model
        self.decode = decode
        self.device = device

    def act(
        self,
        hidden: Tensor,
        masks: Tensor | None,
        observations: np.ndarray,
        tasks: Sequence[str],
        generator: torch.Generator | None,
    ) -> np.ndarray:
        current = torch.from_numpy(np.asarray(observations, np.float32)).to(self.device)
        actions = self.model.choose(hidden, masks, current, decode=self.decode, generator=generator)
        return actions.cpu().numpy()


class ValuePlan(Decider):
    """Takes the candidate action whose imagined rewards and value after them are highest.

    Where no plan has the least value, or its end is unlike the data, another decider acts: far from
    any reward a value is less certain than what a policy has learned.

    Args:
        otherwise: decides without a plan.
        horizon: steps to imagine, for which the candidate is held.
        least_value: of a plan that is followed, within 0 .. 1.
    """

    def __init__(self, otherwise: Direct, horizon: int, least_value: float) -> None:
        assert otherwise.model.planner is not None
        self.otherwise = otherwise
        self.model = otherwise.model
        self.planner = otherwise.model.planner
        self.horizon = horizon
        self.least_value = least_value
        # (C, A)
        self.candidates = self.model.normalizer.raw_actions(self.planner.candidates).cpu().numpy()

    def act(
        self,
        hidden: Tensor,
        masks: Tensor | None,
        observations: np.ndarray,
        tasks: Sequence[str],
        generator: torch.Generator | None,
    ) -> np.ndarray:
        current = torch.from_numpy(np.asarray(observations, np.float32)).to(self.otherwise.device)
        states = self.planner.states(self.model.normalizer.observations(current), tasks)
        values = self.planner.plan(states, self.horizon)  # (N, C); -1: not to be used
        if masks is not None:
            values = torch.where(masks, values, -1.0)
        best, choice = (x.cpu().numpy() for x in values.max(1))
        own = self.otherwise.act(hidden, masks, observations, tasks, generator)
        return np.where(best[:, None] < self.least_value, own, self.candidates[choice])
