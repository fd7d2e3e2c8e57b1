"""A learned model: the policy is rolled out in networks that predict observations and rewards."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from decisionllm.estimates.networks import (
    Members,
    Units,
    fitting_rows,
    optimise,
    positive,
    step_tasks,
)
from decisionllm.eval.report import interval
from decisionllm.protocols import Candidate, Estimate, Estimator, Logged
from decisionllm.registry import register


@register("estimator", "model")
class LearnedModel(Estimator):
    """Mean return of rollouts in a learned model, from the first observations of held-out episodes.

    An ensemble predicts the change of the observation, the reward, and whether the episode ends
    before its horizon. A rollout follows the mean of the members; predicted observations stay
    within the range of the log.

    Args:
        log: the episodes.
        discount: of a step, within 0 .. 1.
        seed: of weights and batches.
        steps: of training.
        members: networks whose mean is followed.
        width: of their hidden layers.
        batch_size: steps of the log in an update.
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
        lr: float = 1e-3,
    ) -> None:
        if log.action_masks is not None:
            what = "actions without masks, which no model of observations predicts"
            raise ValueError(f"estimators=model: expected {what}; leave this estimator out")
        if min(steps, members, width, batch_size) < 1:
            raise ValueError("model: expected steps, members, width and batch_size from 1")
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
        tasks = step_tasks(log)
        named = [tasks[row] for row in rows]
        states = self.units.states(log.observations[rows], log.timesteps[rows], named)
        inputs = torch.cat([states, self.units.actions(log.actions[rows])], 1)
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
        found = np.zeros(len(episodes))
        going = np.ones(len(episodes))  # the probability that the episode has not ended
        rewards = None
        for t in range(self.horizon):
            actions = player.act(observations, rewards)
            observations, rewards, ended = self.advance(observations, t, tasks, actions)
            found += self.discount**t * going * rewards
            going *= 1 - ended
        return found

    @torch.no_grad()
    def advance(
        self, observations: np.ndarray, t: int, tasks: list[str], actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One imagined step of N episodes, raw units.

        Args:
            observations: (N, S).
            t: the step.
            tasks: N texts.
            actions: (N, A).

        Returns:
            The next observations (N, S), rewards (N,), and the probability that the episode ends
            with this step (N,).
        """
        steps = np.full(len(observations), t)
        states = self.units.states(observations, steps, tasks)
        out = self.net(torch.cat([states, self.units.actions(actions)], 1)).double()
        change = out[..., :-2].mean(0).numpy() * self.change_scale + self.change_mean
        after = np.clip(observations + change, self.low, self.high).astype(np.float32)
        rewards = out[..., -2].mean(0).numpy() * self.reward_scale + self.reward_mean
        return after, rewards, out[..., -1].sigmoid().mean(0).numpy()
