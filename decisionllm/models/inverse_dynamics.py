"""Missing actions of a log, filled in by a model of the action between two observations, trained on the recorded ones.

Source: Zheng et al., Semi-Supervised Offline Reinforcement Learning with Action-Free Trajectories, ICML 2023 (arXiv 2210.06518). Their
labels are all alike; here a filled-in action has a weight below 1, by how certain the model is.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import BLOCK, Steps
from decisionllm.models.heads import BinsHead, DiscreteHead
from decisionllm.models.imagined import fitted
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Distribution
from decisionllm.schema import Spec

BATCH = 512  # steps of a log in a training step
UNITS = 100_000  # steps that the units are fitted to


class InverseDynamics(nn.Module):
    """Distribution over the action that was taken between two observations: categories, or bins of each action dimension.

    Args:
        spec: of the data.
        inner: width of the hidden layers.
    """

    def __init__(self, spec: Spec, *, inner: int = 256) -> None:
        super().__init__()
        self.spec, S, A = spec, spec.observation_dim, spec.action_dim
        self.units, self.norm = Normalizer(spec), nn.BatchNorm1d(2 * S, affine=False, momentum=None, eps=1e-12)
        self.body = nn.Sequential(nn.Linear(2 * S, inner), nn.SiLU(), nn.Linear(inner, inner), nn.SiLU())
        self.head = DiscreteHead(inner, spec) if spec.num_actions else BinsHead(inner, spec)
        self.uniform = (
            -math.log(spec.num_actions) if spec.num_actions else -A * math.log(2)
        )  # log-density of a uniform distribution

    def forward(self, observations: Tensor, following: Tensor, masks: Tensor | None) -> Distribution:
        """(n, S), (n, S), raw units, and (n, C) or None -> a distribution over (1, n, A), in the model's units."""
        hidden = self.body(self.norm(torch.cat([observations, following - observations], -1)))
        found: Distribution = self.head(hidden[None], None if masks is None else masks[None])
        return found

    @torch.no_grad()
    def fill(self, observations: Tensor, following: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions (n, A), raw units, and their weights (n,): 0 where any action is as likely, 1 where the model is certain."""
        found = self(observations, following, masks)
        certain = (found.log_prob(found.mode) - self.uniform) / (-self.head.loss_floor - self.uniform)
        return self.units.raw_actions(found.mean[0]), certain[0].clamp(0, 1)


def fill(store: Store, steps: Steps, episodes: np.ndarray, *, seed: int, updates: int = 1000) -> Steps:
    """The steps of a log with its missing actions filled in, each with a weight; those without a next observation stay missing.

    Args:
        store: of the log.
        steps: of the store, see `windows.of_store`.
        episodes: whose recorded actions are trained on.
        seed: of weights and batches.
        updates: of training.

    Raises:
        ValueError: no recorded action among the episodes has a next observation.
    """
    if store.action_weight is None or (store.action_weight > 0).all():
        return steps
    assert steps.loss_mask is not None
    last = np.zeros(len(store.rewards), bool)
    last[store.offsets[1:] - 1] = store.final_observation is None
    rows = np.concatenate([np.arange(*store.offsets[e : e + 2]) for e in episodes])
    rows = rows[steps.loss_mask[rows] & ~last[rows]]
    if not len(rows):
        raise ValueError("data.fill_actions: expected recorded actions with a next observation to learn from, got none")

    def inputs(rows: np.ndarray) -> list[Tensor | None]:
        following = store.observations[np.minimum(rows + 1, len(last) - 1)]
        if store.final_observation is not None:
            e = np.searchsorted(store.offsets, rows, side="right") - 1
            following = np.where((rows + 1 == store.offsets[e + 1])[:, None], store.final_observation[e], following)
        columns = (store.observations[rows], following, None if store.action_masks is None else store.action_masks[rows])
        return [None if x is None else torch.from_numpy(x) for x in columns]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, rng = InverseDynamics(store.spec), np.random.default_rng(seed)
        observations, following, _ = inputs(np.sort(rng.permutation(rows)[:UNITS]))
        model.norm(torch.cat([observations, following - observations], -1))
        model.norm.eval()

        def loss(_: int) -> Tensor:
            drawn = rng.choice(rows, BATCH)
            actions = model.units.actions(torch.from_numpy(store.actions[drawn]))
            return -model(*inputs(drawn)).log_prob(actions[None]).mean()

        fitted(model, loss, updates)
    actions, weight = np.array(store.actions), np.array(store.action_weight)
    wanted = np.flatnonzero((weight == 0) & ~last)
    for part in np.split(wanted, range(BLOCK // 16, len(wanted), BLOCK // 16)):
        if len(part):
            actions[part], weight[part] = (x.numpy() for x in model.fill(*inputs(part)))
    allowed = np.repeat(True, len(weight)) if store.loss_mask is None else store.loss_mask
    return replace(steps, actions=actions, action_weight=weight, loss_mask=allowed & (weight > 0))
