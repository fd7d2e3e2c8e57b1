"""A model of a team's world, learned from a log of it: how observations change by the actions of
all agents, and what an agent is rewarded for.

Letters: E worlds, N agents, O numbers of an observation, A of an action, R rows.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.datasets import running_statistics
from decisionllm.datasets.action_range import action_widths
from decisionllm.datasets.augment import TURNS
from decisionllm.models.fitting import minimise
from decisionllm.randomness import temporary_seed
from decisionllm.teams.joint_steps import JointSteps
from decisionllm.tokenizers.entities import EntitySchema, entity_columns
from decisionllm.tokenizers.fourier_features import append_fourier_features
from decisionllm.tokenizers.mlp import mlp

MEMBERS = 2  # of the ensemble
WORLDS = 512  # joint steps of a training step
REWARDED = 256  # of these, joint steps whose rewards are learned, which takes more time
WAVES = 32  # frequencies of the distance between two entities
INNER = 256  # width of the members
FREQUENCY = 3.0  # standard deviation of the frequencies, in units of the entities


silu_mlp = partial(mlp, activation=nn.SiLU)


class OffsetEncoder(nn.Module):
    """Encodes offsets (..., w) between two entities, (..., inner): numbers, sines and cosines."""

    def __init__(self, width: int, scale: float, inner: int) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.randn(width, WAVES) * FREQUENCY / scale)
        self.scale = scale
        self.encode = silu_mlp(width + 2 * WAVES, inner, inner)

    def forward(self, offsets: Tensor) -> Tensor:
        phases = offsets @ self.frequencies
        encoded: Tensor = self.encode(append_fourier_features(offsets / self.scale, phases))
        return encoded


class EntityReward(nn.Module):
    """The reward of an agent, from what it observes: a sum over the entities around it.

    An entity counts by the one that stands in the strongest relation to it, the agent itself or
    another entity: such as a landmark by the agent nearest to it.

    Args:
        observed: the parts of an observation, see `log_meta`. Entities are offsets from the agent.
        scales: (O,) deviations of the numbers of an observation.
        inner: width of the encodings.
    """

    def __init__(self, observed: EntitySchema, scales: Tensor, *, inner: int = 64) -> None:
        super().__init__()
        self.own: list[int] = []
        self.entities: list[tuple[int, int, int]] = []  # first column, width, count of each kind
        for kind, first, width, count in entity_columns(observed):
            if kind == "own":
                self.own += range(first, first + width * count)
            elif kind:
                self.entities.append((first, width, count))
        self.scales = scales
        self.to_self = nn.ModuleList()
        self.between = nn.ModuleList()  # of each ordered pair of kinds
        self.value = nn.ModuleList()
        for first, width, count in self.entities:
            scale = float(scales[first : first + width * count].mean())
            self.to_self.append(OffsetEncoder(width, scale, inner))
            for _, other_width, _ in self.entities:
                comparable = width == other_width
                self.between.append(
                    OffsetEncoder(width, scale, inner) if comparable else nn.Identity()
                )
            self.value.append(nn.Sequential(nn.SiLU(), silu_mlp(inner, inner, inner, 1)))
        self.of_own = silu_mlp(len(self.own), inner, inner, 1)

    def forward(self, observations: Tensor) -> Tensor:
        """(..., O) raw -> (...)."""
        total: Tensor = self.of_own(observations[..., self.own] / self.scales[self.own])[..., 0]
        groups = [
            observations[..., first : first + width * count].unflatten(-1, (count, width))
            for first, width, count in self.entities
        ]
        for i, entities in enumerate(groups):
            strongest: Tensor = self.to_self[i](entities)  # (..., count, inner)
            for j, others in enumerate(groups):
                if others.shape[-1] != entities.shape[-1]:
                    continue
                encode = self.between[i * len(groups) + j]
                related = encode(entities[..., :, None, :] - others[..., None, :, :])
                if i == j:
                    if entities.shape[-2] == 1:
                        continue
                    itself = torch.eye(entities.shape[-2], dtype=torch.bool)[..., None]
                    related = related.masked_fill(itself, float("-inf"))
                strongest = torch.maximum(strongest, related.amax(-2))
            total = total + self.value[i](strongest)[..., 0].sum(-1)
        return total


class TeamWorld(nn.Module):
    """Members of a model of the next observations, and of a model of the rewards.

    The change of an agent's observation is a function of the observations and actions of all, its
    own first. Its reward is one of what it observes next.

    Args:
        steps: of the log; `fit` trains on them.
        seed: of weights and batches.
    """

    def __init__(self, steps: JointSteps, *, seed: int = 0) -> None:
        super().__init__()
        self.steps = steps
        self.rng = np.random.default_rng(seed)
        N, size = steps.observations.shape[2:]
        A = steps.actions.shape[-1]
        self.observation_mean, self.observation_scale = fit_units(steps.observations)
        self.change_mean, self.change_scale = fit_units(np.diff(steps.observations, axis=1))
        # what follows is not known of the last step of a world
        rewards = steps.rewards[:, :-1]
        self.reward_mean = float(rewards.mean())
        self.reward_scale = float(running_statistics.standard_scale(rewards.mean(), rewards.std()))
        self.reward_low = float(rewards.min())
        self.reward_high = float(rewards.max())
        self.low = to_tensor(steps.low)
        self.high = to_tensor(steps.high)
        with temporary_seed(seed):
            inputs = N * (size + A)
            nets = (silu_mlp(inputs, INNER, INNER, size) for _ in range(MEMBERS))
            self.members = nn.ModuleList(nets)
            scales = self.observation_scale
            self.rewards = nn.ModuleList(EntityReward(steps.blocks, scales) for _ in range(MEMBERS))

    def standardise(self, observations: Tensor) -> Tensor:
        """Standardise raw observations (..., O)."""
        return (observations - self.observation_mean) / self.observation_scale

    def joint_inputs(self, observations: Tensor, actions: Tensor) -> Tensor:
        """(..., N, O) raw, (..., N, A) within -1 .. 1 -> (..., N, N (O + A)), each agent's own
        first.
        """
        inputs = torch.cat([self.standardise(observations), actions], -1)
        return own_first(inputs)

    def fit(self, updates: int) -> None:
        """Train on random joint steps; worlds in a plane are turned and mirrored at random."""
        observations = to_tensor(self.steps.observations)
        middle = (self.high + self.low) / 2
        half = to_tensor(action_widths(self.low.numpy(), self.high.numpy())) / 2
        actions = (to_tensor(self.steps.actions) - middle) / half
        rewards = (to_tensor(self.steps.rewards) - self.reward_mean) / self.reward_scale
        W, T = rewards.shape[:2]

        def loss(step: int) -> Tensor:
            total = torch.zeros(())
            for member, reward in zip(self.members, self.rewards, strict=True):
                world = torch.from_numpy(self.rng.integers(W, size=WORLDS))
                time = torch.from_numpy(self.rng.integers(T - 1, size=WORLDS))
                observed, following, acted = self.transform_plane(
                    observations[world, time], observations[world, time + 1], actions[world, time]
                )
                change = (following - observed - self.change_mean) / self.change_scale
                total = total + F.mse_loss(member(self.joint_inputs(observed, acted)), change)
                expected = reward(following[:REWARDED])
                target_rewards = rewards[world[:REWARDED], time[:REWARDED]]
                total = total + F.mse_loss(expected, target_rewards)
            return total

        minimise(self, loss, updates, "model of the world")

    def transform_plane(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Turn and mirror pairs of numbers (..., 2 V) at random, all alike, if the world is a
        plane.
        """
        if not self.steps.plane:
            return vectors
        turn = torch.from_numpy(TURNS[self.rng.integers(len(TURNS))])
        return tuple((pairs.unflatten(-1, (-1, 2)) @ turn).flatten(-2) for pairs in vectors)

    @torch.no_grad()
    def advance(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the next step by a member that is sampled at random.

        Args:
            observations: (E, N, O) raw.
            actions: (E, N, A) within -1 .. 1.

        Returns:
            Observations (E, N, O), and rewards (E, N), the least that a member expects, within
            those of the log.
        """
        member = self.members[int(self.rng.integers(MEMBERS))]
        change = member(self.joint_inputs(observations, actions))
        following = observations + change * self.change_scale + self.change_mean
        expected = torch.stack([reward(following) for reward in self.rewards]).amin(0)
        rewards = expected * self.reward_scale + self.reward_mean
        return following, rewards.clamp(self.reward_low, self.reward_high)

    def raw_actions(self, actions: Tensor) -> Tensor:
        """Convert actions within -1 .. 1 to raw units."""
        return (actions + 1) / 2 * (self.high - self.low) + self.low


def own_first(x: Tensor) -> Tensor:
    """(..., N, K) of the agents -> (..., N, N K): each agent's own part first, then those of the
    others in turn.
    """
    agents = torch.arange(x.shape[-2])
    turns = (agents[:, None] + agents) % len(agents)
    return x[..., turns, :].flatten(-2)


def to_tensor(array: np.ndarray) -> Tensor:
    """Convert an array to a float32 tensor."""
    return torch.from_numpy(np.asarray(array, np.float32))


def fit_units(columns: np.ndarray) -> tuple[nn.Buffer, nn.Buffer]:
    """Return mean and deviation of the columns of an array (..., O), (O,) each; the deviation of a
    constant column is 1.
    """
    rows = columns.reshape(-1, columns.shape[-1])
    mean = rows.mean(0)
    return nn.Buffer(to_tensor(mean)), nn.Buffer(
        to_tensor(running_statistics.standard_scale(mean, rows.std(0)))
    )
