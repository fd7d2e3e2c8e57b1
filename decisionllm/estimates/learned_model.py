"""A learned model: the policy is rolled out in networks that predict observations and rewards."""

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn import functional as F

from decisionllm.estimates.networks import (
    Members,
    Units,
    fitting_rows,
    optimise,
    positive,
)
from decisionllm.eval.report import interval
from decisionllm.protocols import Candidate, Estimate, Estimator, Logged
from decisionllm.registry import register

CHUNK = 16384  # rows of a forward pass


@register("estimator", "model")
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
            what = "actions without masks, which no model of observations predicts"
            raise ValueError(f"estimators=model: expected {what}; leave this estimator out")
        if min(steps, members, width, batch_size, neighbours + 1) < 1:
            raise ValueError(
                "model: expected steps, members, width and batch_size from 1, neighbours from 0"
            )
        self.log = log
        self.discount = discount
        self.units = Units.of(log)
        self.horizon = self.units.horizon
        rows = fitting_rows(log)
        self.rows = rows[log.recorded[rows]]
        last = np.zeros(len(log.rewards), bool)
        last[log.offsets[1:] - 1] = True
        followed = self.rows[~last[self.rows]]
        if not len(followed):
            raise ValueError("estimators=model: expected episodes of two steps or more, got none")
        changes = log.observations[followed + 1] - log.observations[followed]
        self.change_mean = changes.mean(0).astype(np.float64)
        self.change_scale = positive(changes.std(0).astype(np.float64))
        self.reward_mean = float(log.rewards[self.rows].mean())
        self.reward_scale = float(positive(log.rewards[self.rows].std()))
        seen = log.observations[self.rows]
        self.low, self.high = seen.min(0), seen.max(0)
        # ended by the task or a budget, not by the horizon
        early = last & (log.timesteps + 1 < self.horizon)
        size = self.units.state_size + self.units.action_size
        outputs = log.spec.observation_dim + 2
        self.net = Members(members, size, outputs, width=width, seed=seed)
        self._fit(last, early, steps, batch_size, lr, seed)
        self.seed = seed
        self.neighbours = min(neighbours, len(self.rows))
        inputs = self.inputs(self.rows)
        self.nearest = cKDTree(inputs.numpy())
        change, rewards, ends = self.predict(inputs)
        follows = ~last[self.rows]
        # what follows a last step is not known, so that nothing was missed there
        self.missed_change = np.zeros_like(change)  # (m, S)
        self.missed_change[follows] = changes - change[follows]
        self.missed_reward = log.rewards[self.rows] - rewards  # (m,)
        self.missed_end = early[self.rows] - ends  # (m,)

    def inputs(self, rows: np.ndarray) -> Tensor:
        """What the networks read of these rows of the log, (m, I)."""
        log = self.log
        tasks = [log.tasks[e] for e in log.episode[rows].tolist()]
        states = self.units.states(log.observations[rows], log.timesteps[rows], tasks)
        return torch.cat([states, self.units.actions(log.actions[rows])], 1)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mean of the members: changes (m, S) and rewards (m,), raw units, and the probability
        that the episode ends (m,).
        """
        parts = [self.net(part).double() for part in inputs.split(CHUNK)]
        out = torch.cat(parts, 1)
        mean = out.mean(0).numpy()
        change = mean[:, :-2] * self.change_scale + self.change_mean
        reward = mean[:, -2] * self.reward_scale + self.reward_mean
        return change, reward, out[..., -1].sigmoid().mean(0).numpy()

    def _fit(
        self,
        last: np.ndarray,
        early: np.ndarray,
        steps: int,
        batch_size: int,
        lr: float,
        seed: int,
    ) -> None:
        """Fit the members to the log.

        Args:
            last: (n,) bool, steps that no other one follows.
            early: (n,) bool, those of them before the horizon.
            steps, batch_size, lr, seed: of training.
        """
        log, rows = self.log, self.rows
        inputs = self.inputs(rows)
        after = np.where(last[rows], rows, rows + 1)
        change = log.observations[after] - log.observations[rows]
        wanted = torch.from_numpy((change - self.change_mean) / self.change_scale).float()
        follows = torch.from_numpy(~last[rows]).float()
        scaled = (log.rewards[rows] - self.reward_mean) / self.reward_scale
        rewards = torch.from_numpy(scaled).float()
        ended = torch.from_numpy(early[rows]).float()
        generator = torch.Generator().manual_seed(seed)
        size = len(self.net.weights[0]), batch_size

        def loss(step: int) -> Tensor:
            drawn = torch.randint(len(rows), size, generator=generator)  # (M, B)
            out = self.net(inputs[drawn])
            errors = (out[..., :-2] - wanted[drawn]).square().mean(-1)
            of_change = (errors * follows[drawn]).mean()
            of_reward = F.mse_loss(out[..., -2], rewards[drawn])
            of_end = F.binary_cross_entropy_with_logits(out[..., -1], ended[drawn])
            total: Tensor = of_change + of_reward + of_end
            return total

        optimise(self.net, loss, steps, lr=lr, title="model: of the log")

    def estimate(self, candidate: Candidate) -> Estimate:
        returns = self.returns(candidate)
        low, high = interval(returns)
        return Estimate(float(returns.mean()), low, high)

    def returns(self, candidate: Candidate) -> np.ndarray:
        """The imagined return of each held-out episode, raw reward units."""
        log = self.log
        episodes = np.flatnonzero(log.held_out)
        tasks = [log.tasks[e] for e in episodes.tolist()]
        observations = log.observations[log.offsets[episodes]]
        player = candidate.begin(tasks)
        rng = np.random.default_rng(self.seed)
        found = np.zeros(len(episodes))
        going = np.ones(len(episodes))  # the probability that the episode has not ended
        rewards = None
        for t in range(self.horizon):
            actions = player.act(observations, rewards)
            observations, rewards, ended = self.advance(observations, t, tasks, actions, rng)
            found += self.discount**t * going * rewards
            going *= 1 - ended
        return found

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
        steps = np.full(len(observations), t)
        states = self.units.states(observations, steps, tasks)
        inputs = torch.cat([states, self.units.actions(actions)], 1)
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
