"""A learned model: the policy is rolled out in networks that predict observations and rewards."""

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn import functional as F

from decisionllm.datasets import running_statistics
from decisionllm.datasets.store import next_rows
from decisionllm.estimates.logged_episodes import estimate_mean
from decisionllm.estimates.networks import (
    Members,
    Units,
    optimise,
    recorded_rows,
    task_texts,
)
from decisionllm.protocols import Candidate, Estimate, Estimator, Logged
from decisionllm.schema import Json

CHUNK = 16384  # rows of a forward pass


class LearnedModel(Estimator):
    """Mean return of rollouts in a learned model, from the first observations of held-out episodes.

    An ensemble predicts the change of the observation, the reward, and whether the episode ends
    before its horizon. To the mean of the members a rollout adds what it missed at one of the
    nearest logged steps, drawn at random: along means alone, what the log cannot predict, such as
    the worth of the next opportunities, would be the same for all. Predicted observations stay
    within the range of the log.

    Args:
        log: the episodes.
        discount: of a step, within 0 .. 1.
        seed: of weights and batches.
        steps: of training.
        members: networks whose mean is followed.
        width: of their hidden layers.
        batch_size: steps of the log in an update.
        neighbours: nearest logged steps that what was missed is drawn from; 0: follow the mean.
        lr: peak learning rate.

    Raises:
        ValueError: the log has no step that is followed by another, or discrete actions that some
            states forbid.
    """

    def __init__(
        self,
        log: Logged,
        discount: float,
        seed: int,
        *,
        steps: int = 4000,
        members: int = 3,
        width: int = 128,
        batch_size: int = 256,
        neighbours: int = 10,
        lr: float = 1e-3,
    ) -> None:
        if log.action_masks is not None:
            raise ValueError(
                "estimators=model: expected actions without masks, which no model of "
                "observations predicts; leave this estimator out"
            )
        if min(steps, members, width, batch_size, neighbours + 1) < 1:
            raise ValueError(
                "model: expected steps, members, width and batch_size from 1, neighbours from 0"
            )
        self.log = log
        self.discount = discount
        self.seed = seed
        self.units = Units.from_log(log)
        rows = recorded_rows(log)  # (m,)
        self.neighbours = min(neighbours, len(rows))
        after, is_last = next_rows(rows, log.offsets[1:])
        follows = ~is_last  # a step of the same episode
        if not follows.any():
            raise ValueError("estimators=model: expected episodes of two steps or more, got none")

        # what the networks read, and predict
        observations = log.observations[rows]
        tasks = task_texts(log, rows)
        inputs = self.units.inputs(observations, log.timesteps[rows], tasks, log.actions[rows])
        changes = log.observations[after] - observations
        rewards = log.rewards[rows]
        # ended by the task or a budget, not by the horizon
        ends = ~follows & (log.timesteps[rows] + 1 < self.units.horizon)
        self.low = observations.min(0)
        self.high = observations.max(0)
        self.change_mean = changes[follows].mean(0).astype(np.float64)
        self.change_scale = running_statistics.standard_scale(
            self.change_mean, changes[follows].std(0).astype(np.float64)
        )
        self.reward_mean = float(rewards.mean())
        self.reward_scale = float(running_statistics.standard_scale(rewards.mean(), rewards.std()))
        targets = np.column_stack(
            [
                (changes - self.change_mean) / self.change_scale,
                (rewards - self.reward_mean) / self.reward_scale,
                ends,
            ]
        )  # (m, S+2)
        self.net = Members(members, inputs.shape[1], targets.shape[1], width=width, seed=seed)
        options = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed}
        self._fit(inputs, torch.from_numpy(targets).float(), torch.from_numpy(follows), options)

        # what they missed at each step of the log
        self.nearest = cKDTree(inputs.numpy())
        change, reward, end = self.predict(inputs)
        # what follows a last step is not known, so that nothing was missed there
        self.missed_change = np.where(follows[:, None], changes - change, 0.0)  # (m, S)
        self.missed_reward = rewards - reward  # (m,)
        self.missed_end = ends - end  # (m,)

    def _fit(self, inputs: Tensor, targets: Tensor, follows: Tensor, options: Json) -> None:
        """Fit the members to the log.

        Args:
            inputs: (m, I).
            targets: (m, S+2) change, reward, and whether the episode ends.
            follows: (m,) bool, steps that are followed by another one.
            options: of `optimise`.
        """

        def loss(step: int, drawn: Tensor) -> Tensor:
            out = self.net(inputs[drawn])
            target = targets[drawn]
            errors = (out[..., :-2] - target[..., :-2]).square().mean(-1)
            of_change = (errors * follows[drawn]).mean()
            of_reward = F.mse_loss(out[..., -2], target[..., -2])
            of_end = F.binary_cross_entropy_with_logits(out[..., -1], target[..., -1])
            total: Tensor = of_change + of_reward + of_end
            return total

        optimise(self.net, loss, rows=len(inputs), title="model: of the log", **options)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the mean of the members: changes (m, S) and rewards (m,), raw units, and the
        probability that the episode ends (m,).
        """
        parts = [self.net(part).double() for part in inputs.split(CHUNK)]
        out = torch.cat(parts, 1)
        mean = out.mean(0).numpy()
        change = mean[:, :-2] * self.change_scale + self.change_mean
        reward = mean[:, -2] * self.reward_scale + self.reward_mean
        return change, reward, out[..., -1].sigmoid().mean(0).numpy()

    def estimate(self, candidate: Candidate) -> Estimate:
        return estimate_mean(self.returns(candidate), self.log)

    def returns(self, candidate: Candidate) -> np.ndarray:
        """Return the imagined return of each held-out episode, raw reward units."""
        log = self.log
        episodes = np.flatnonzero(log.held_out)
        tasks = [log.tasks[e] for e in episodes.tolist()]
        observations = log.observations[log.offsets[episodes]]
        player = candidate.begin(tasks)
        rng = np.random.default_rng(self.seed)
        returns = np.zeros(len(episodes))
        going = np.ones(len(episodes))  # the probability that the episode has not ended
        rewards = None
        for t in range(self.units.horizon):
            actions = player.act(observations, rewards)
            observations, rewards, ended = self.advance(observations, t, tasks, actions, rng)
            returns += self.discount**t * going * rewards
            going *= 1 - ended
        return returns

    def advance(
        self,
        observations: np.ndarray,
        t: int,
        tasks: list[str],
        actions: np.ndarray,
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One imagined step of N episodes, raw units.

        Args:
            observations: (N, S).
            t: the step.
            tasks: N texts.
            actions: (N, A).
            rng: of the neighbours.

        Returns:
            The next observations (N, S), rewards (N,), and the probability that the episode ends
            with this step (N,).
        """
        timesteps = np.full(len(observations), t)
        inputs = self.units.inputs(observations, timesteps, tasks, actions)
        change, rewards, ended = self.predict(inputs)
        if self.neighbours:
            _, near = self.nearest.query(inputs.numpy(), k=self.neighbours)
            near = near.reshape(len(inputs), -1)
            drawn = near[np.arange(len(near)), rng.integers(near.shape[1], size=len(near))]
            change = change + self.missed_change[drawn]
            rewards = rewards + self.missed_reward[drawn]
            ended = np.clip(ended + self.missed_end[drawn], 0, 1)
        after = np.clip(observations + change, self.low, self.high).astype(np.float32)
        return after, rewards, ended
