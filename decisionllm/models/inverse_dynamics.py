"""Inverse dynamics: the missing actions of a log, filled in by a model of the action between two
observations that is trained on the recorded ones.

Source: Zheng et al., Semi-Supervised Offline Reinforcement Learning with Action-Free Trajectories,
ICML 2023 (arXiv 2210.06518). Their filled-in actions all count as recorded ones; here each has a
weight, by how certain the model is of it.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from decisionllm.datasets import running_statistics
from decisionllm.datasets.action_range import measure_recorded_actions
from decisionllm.datasets.store import Store, get_columns
from decisionllm.datasets.windows import Steps
from decisionllm.models.fitting import minimise
from decisionllm.models.heads import BinsHead, DiscreteHead
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Distribution
from decisionllm.randomness import temporary_seed
from decisionllm.schema import Spec
from decisionllm.tokenizers.mlp import mlp

Number = TypeVar("Number", float, Tensor)

WIDTH = 256  # of the hidden layers
BATCH = 512  # steps of a log in a training step
EVERY = 50  # training steps between two measurements of the held-out loss
ROWS = 1 << 14  # that are filled in at a time
# of n steps: observations, changes and rewards (n, 2 S + 1), actions (n, A), masks (n, C)
Inputs = tuple[Tensor, Tensor, Tensor | None]


class InverseDynamics(nn.Module):
    """Distribution over the action between two observations that brought this reward: categories,
    or bins of each dimension.

    Args:
        spec: of the data.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        size = 2 * spec.observation_dim + 1
        self.units = Normalizer(spec)
        self.norm = nn.BatchNorm1d(size, affine=False, momentum=None, eps=1e-12)
        layers = mlp(size, WIDTH, WIDTH, activation=nn.SiLU)
        self.body = nn.Sequential(*layers, nn.SiLU())
        if spec.num_actions:
            self.head: DiscreteHead | BinsHead = DiscreteHead(WIDTH, spec)
            self.uniform = -math.log(spec.num_actions)  # log-density of any action alike
        else:
            self.head = BinsHead(WIDTH, spec)
            self.uniform = -spec.action_dim * math.log(2)
        self.trust = 1.0

    def forward(self, steps: Tensor, masks: Tensor | None) -> Distribution:
        """Return a distribution over actions (1, n, A), in the model's units."""
        if masks is not None:
            masks = masks[None]
        distribution: Distribution = self.head(self.body(self.norm(steps))[None], masks)
        return distribution

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the mean negative log-likelihood of the recorded actions."""
        steps, actions, masks = inputs
        likelihood: Tensor = self(steps, masks).log_prob(self.units.actions(actions)[None])
        return -likelihood.mean()

    def certainty(self, log_prob: Number) -> Number:
        """Rescale log-probabilities: 0 where an action is no likelier than any other, 1 where it is
        certain."""
        return (log_prob - self.uniform) / (-self.head.loss_floor - self.uniform)

    def fit(
        self,
        read: Callable[[np.ndarray], Inputs],
        rows: np.ndarray,
        updates: int,
        seed: int,
    ) -> None:
        """Fit to these rows of a log, up to the lowest loss on the last tenth, which is later
        episodes."""
        rng = np.random.default_rng(seed)
        split = len(rows) - len(rows) // 10
        train, held_out = rows[:split], rows[split:][:ROWS]
        best = self.state_dict()
        lowest = math.inf
        self._fit_norm(read(rng.permutation(train)[:ROWS])[0])

        def loss(step: int) -> Tensor:
            nonlocal best, lowest
            if len(held_out) and step % EVERY == EVERY - 1:
                with torch.no_grad():
                    now = float(self.loss(read(held_out)))
                if now < lowest:
                    best = deepcopy(self.state_dict())
                    lowest = now
            return self.loss(read(rng.choice(train, BATCH)))

        minimise(self, loss, updates, "inverse dynamics")
        if lowest < math.inf:
            self.load_state_dict(best)
            steps, _, masks = read(held_out)
            claimed = float(self.fill(steps, masks)[1].mean())
            self.trust = min(max(1 - claimed + self.certainty(-lowest), 0.0), 1.0)

    def _fit_norm(self, steps: Tensor) -> None:
        """Standardise by these steps; a column that is constant in them keeps its unit, since it
        may have other values where actions are missing.
        """
        self.norm(steps)
        self.norm.eval()
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert variance is not None
        varies = torch.from_numpy(
            running_statistics.is_varying(mean.numpy(), variance.sqrt().numpy())
        )
        variance[~varies] = 1.0

    @torch.no_grad()
    def fill(self, steps: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Fill in actions (n, A), raw units, and weights (n,).

        A weight is the certainty, less if the model was too certain of held-out actions.
        """
        distribution = self(steps, masks)
        certainty = self.certainty(distribution.log_prob(distribution.mode)[0]).clamp(0, 1)
        return self.units.raw_actions(distribution.mean[0]), self.trust * certainty


def fill(
    store: Store, steps: Steps, episodes: np.ndarray, seed: int, *, updates: int = 1000
) -> Steps:
    """Fill in the missing actions of a log, each with a weight.

    Actions without a next observation stay missing.

    Args:
        store: of the log.
        steps: of the store, see `windows.load_steps`.
        episodes: whose recorded actions are trained on.
        seed: of weights and batches.
        updates: training steps.

    Raises:
        ValueError: no recorded action among the episodes has a next observation.
    """
    if store.action_weight is None or steps.loss_mask is None:
        return steps
    if (store.action_weight > 0).all():
        return steps
    rows = store.list_rows(episodes)
    rows = rows[steps.loss_mask[rows] & store.has_next_observation[rows]]
    if not len(rows):
        raise ValueError(
            "fill_actions: expected recorded actions with a next observation to learn from, got none"
        )
    with temporary_seed(seed):
        model = InverseDynamics(store.spec)
        model.units.fit_actions(store.spec, measure_recorded_actions(get_columns(store)))
        model.fit(partial(inputs, store), rows, updates, seed)
    actions = np.array(store.actions)
    weight = np.array(store.action_weight)
    missing = np.flatnonzero((weight == 0) & store.has_next_observation)
    for part in np.split(missing, range(ROWS, len(missing), ROWS)):
        columns, _, masks = inputs(store, part)
        filled, certainty = model.fill(columns, masks)
        actions[part] = filled.numpy()
        weight[part] = certainty.numpy()
    trained_on = weight > 0
    if store.loss_mask is not None:
        trained_on = trained_on & store.loss_mask
    return replace(steps, actions=actions, action_weight=weight, loss_mask=trained_on)


def inputs(store: Store, rows: np.ndarray) -> Inputs:
    """Return the inputs and targets of these rows of a store."""
    seen = store.observations[rows]
    change = store.next_observations(rows) - seen
    masks = None
    if store.action_masks is not None:
        masks = torch.from_numpy(store.action_masks[rows])
    columns = np.concatenate([seen, change, store.rewards[rows, None]], 1)
    return torch.from_numpy(columns), torch.from_numpy(store.actions[rows]), masks
