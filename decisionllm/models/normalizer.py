"""Conversion between raw units and the model's units, fitted once from the training steps and saved
with the weights.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from decisionllm.datasets import running_statistics
from decisionllm.datasets.action_range import action_units
from decisionllm.datasets.running_statistics import RunningStatistics
from decisionllm.schema import Spec
from decisionllm.tokenizers.entities import entity_blocks


class Normalizer(nn.Module):
    """Units of a model: standardised observations and returns-to-go, continuous actions within -1
    .. 1 between their bounds, or those of the log if these are far wider, see `fit_actions`.

    A return beyond the range of training is read as the nearest within it. A constant column keeps
    its unit. All entities of a kind share their units, fitted to those that are present; the flag
    of presence stays 0 or 1, and an absent entity stays zeros. One-hot columns have fixed units,
    see `one_hot_scale`, and discrete actions stay as they are.

    Args:
        spec: of the data.
        hidden: numbers of an observation that are 0 in the model's units, whatever they are.
    """

    def __init__(self, spec: Spec, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        S, A = spec.observation_dim, spec.action_dim
        self.hidden = list(hidden)
        self.discrete = bool(spec.num_actions)
        self.blocks = entity_blocks(spec.entity_schema)
        self.categorical = spec.categorical
        self.observation_mean = nn.Buffer(torch.zeros(S))
        self.observation_scale = nn.Buffer(torch.ones(S))
        self.return_mean = nn.Buffer(torch.zeros(()))
        self.return_scale = nn.Buffer(torch.ones(()))
        self.return_range = nn.Buffer(torch.tensor([-torch.inf, torch.inf]))
        # Change of an observation in a step.
        self.change_mean = nn.Buffer(torch.zeros(S))
        self.change_scale = nn.Buffer(torch.ones(S))
        # -1 and 1 of an action
        self.low = nn.Buffer(torch.tensor(spec.low or [0.0] * A))
        self.high = nn.Buffer(torch.tensor(spec.high or [1.0] * A))

    @torch.no_grad()
    def fit(self, blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fit to all training steps in one pass.

        Args:
            blocks: observations (n, S) and returns-to-go (n,), raw units.
        """
        whole = RunningStatistics()
        togo = RunningStatistics()
        kinds = [RunningStatistics() for _ in self.blocks]  # of the entities that are present
        for observations, returns_to_go in blocks:
            whole.add(observations)
            togo.add(returns_to_go)
            for block, kind in zip(self.blocks, kinds, strict=True):
                each = observations[:, block.columns].reshape(-1, block.width)
                kind.add(each[each[:, 0] > 0.5] if block.has_flag else each)
        _standardize(self.observation_mean, self.observation_scale, whole)
        for block, kind in zip(self.blocks, kinds, strict=True):
            mean = self.observation_mean[block.columns].view(block.num_entities, block.width)
            scale = self.observation_scale[block.columns].view(block.num_entities, block.width)
            _standardize(mean, scale, kind)
            if block.has_flag:  # it stays
                mean[:, 0] = 0.0
                scale[:, 0] = 1.0
        for first, columns in self.categorical:
            self.observation_mean[first : first + columns] = 0.0
            self.observation_scale[first : first + columns] = one_hot_scale(columns)
        _standardize(self.return_mean, self.return_scale, togo)
        self.return_range.copy_(torch.tensor([float(togo.low), float(togo.high)]))

    @torch.no_grad()
    def widen(self, returns_to_go: np.ndarray) -> None:
        """Keep the units, which the weights have learned, and extend the range of returns to these
        as well, (n,) raw units."""
        self.return_range[0].clamp_(max=float(returns_to_go.min()))
        self.return_range[1].clamp_(min=float(returns_to_go.max()))

    @torch.no_grad()
    def fit_actions(self, spec: Spec, actions: RunningStatistics) -> None:
        """Fit to the recorded actions of a log, raw units: bounds that are far wider than these are
        not the unit.
        """
        if self.discrete:
            return
        low, high = action_units(spec, actions)
        self.low.copy_(torch.as_tensor(low))
        self.high.copy_(torch.as_tensor(high))

    @torch.no_grad()
    def fit_changes(self, blocks: Iterable[np.ndarray]) -> None:
        """Fit to blocks of changes of the observation from one step to the next (m, S), raw
        units.
        """
        changes = RunningStatistics()
        for change in blocks:
            changes.add(change)
        _standardize(self.change_mean, self.change_scale, changes)

    def observations(self, x: Tensor) -> Tensor:
        """Convert raw observations (..., S) to the model's units."""
        units = (x - self.observation_mean) / self.observation_scale
        if self.hidden:
            units[..., self.hidden] = 0
        parts = []
        end = 0
        for block in self.blocks:
            if not block.has_flag:
                continue
            parts.append(units[..., end : block.first])
            each = units[..., block.columns].unflatten(-1, (block.num_entities, block.width))
            parts.append((each * (each[..., :1] > 0.5)).flatten(-2))
            end = block.columns.stop
        return torch.cat([*parts, units[..., end:]], -1) if parts else units

    def raw_observations(self, x: Tensor) -> Tensor:
        """Convert observations (..., S) in the model's units to raw units."""
        return x * self.observation_scale + self.observation_mean

    def returns_to_go(self, x: Tensor) -> Tensor:
        """Convert raw returns-to-go (...) to the model's units."""
        return (x.clamp(*self.return_range) - self.return_mean) / self.return_scale

    def raw_returns_to_go(self, x: Tensor) -> Tensor:
        """Convert returns-to-go (...) to raw units, within the range of training."""
        return (x * self.return_scale + self.return_mean).clamp(*self.return_range)

    def actions(self, x: Tensor) -> Tensor:
        """Convert raw actions (..., A) to the model's units."""
        if self.discrete:
            return x
        width = self.high - self.low
        # the one value of a number that never changes is -1
        width = torch.where(width > 0, width, torch.ones_like(width))
        return (x - self.low) / width * 2 - 1

    def raw_actions(self, x: Tensor) -> Tensor:
        """Convert actions (..., A) in the model's units to raw units, within their bounds."""
        if self.discrete:
            return x
        return (x.clamp(-1, 1) + 1) / 2 * (self.high - self.low) + self.low


def one_hot_scale(columns: int) -> float:
    """Return the unit of the columns of a one-hot group: their standard deviation if all categories
    are equally frequent. Units fitted to the data would make a rare category a large number. A
    single column is a flag, one of two categories.
    """
    categories = max(columns, 2)
    return float(np.sqrt(categories - 1) / categories)


def _standardize(mean: Tensor, scale: Tensor, data: RunningStatistics) -> None:
    """Fill mean and scale (...) by the moments of the data."""
    mean.copy_(torch.as_tensor(data.mean))
    scale.copy_(torch.as_tensor(running_statistics.standard_scale(data.mean, data.deviation)))
