"""Fitted Q evaluation: the value of a policy's first actions, by its Bellman equation on the log.

Q(s, t, a) is fitted to r + discount Q(s', t + 1, a'), where a' is the policy's own action at the
next logged history. It is computed once for each step, so that a policy with a memory is judged as
it would have acted there. d3rlpy's FQE asks the policy again at each update and gives it one
observation, which a sequence policy cannot act on.
Source: Le, Voloshin and Yue, Batch Policy Learning under Constraints (arXiv 1903.08738),
algorithm 3. Beside it, the first Q is the return-to-go of the log: few steps then move it to the
policy, where from zero it would take as many as an episode is long. Q(s', t + 1, a') is held within
the least and the largest return-to-go of the log.
"""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
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


class FittedQ(Estimator):
    """Mean Q of the policy's first actions in held-out episodes.

    The return ends with the episode, also with a truncated one, as for days of fixed length.

    Args:
        log: the episodes.
        discount: of a step, within 0 .. 1.
        seed: of weights and batches.
        steps: updates for each policy.
        members: networks whose mean is Q.
        width: of their hidden layers.
        batch_size: transitions of an update.
        sync_every: updates after which the targets are those of the newest Q.
        lr: peak learning rate.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        log: Logged,
        discount: float,
        seed: int,
        *,
        steps: int = 3000,
        members: int = 2,
        width: int = 64,
        batch_size: int = 256,
        sync_every: int = 50,
        lr: float = 1e-3,
    ) -> None:
        if min(steps, members, width, batch_size, sync_every) < 1:
            raise ValueError("fqe: expected steps, members, width and the others from 1")
        self.log = log
        self.discount = discount
        self.sync_every = sync_every
        self.training: Json = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed}
        self.units = Units.from_log(log)
        self.first = log.offsets[:-1][log.held_out]  # rows of the first steps

        # the m transitions that Q is fitted to
        rows = recorded_rows(log)
        self.after, ends = next_rows(rows, log.offsets[1:])
        self.goes_on = torch.from_numpy(~ends).float()
        self.inputs = self.read(rows, log.actions)

        # units of Q: returns of the log around their mean
        togo = discounted_returns(log.rewards, log.offsets, discount)[rows]
        self.shift = float(togo.mean())
        self.scale = float(running_statistics.standard_scale(togo.mean(), togo.std()))
        self.least = float(togo.min()) / self.scale
        self.most = float(togo.max()) / self.scale
        self.rewards = torch.from_numpy(log.rewards[rows]).float() / self.scale

        # the Q of the log itself
        self.start = Members(members, self.inputs.shape[1], 1, width=width, seed=seed)
        scaled = torch.from_numpy((togo - self.shift) / self.scale).float()
        self._fit(self.start, lambda step, drawn: scaled[drawn], "fqe: returns of the log")

    def read(self, rows: np.ndarray, actions: np.ndarray) -> Tensor:
        """Encode the states and the actions, of (n, A), at these rows, (m, I)."""
        log = self.log
        tasks = task_texts(log, rows)
        return self.units.inputs(log.observations[rows], log.timesteps[rows], tasks, actions[rows])

    def _fit(self, net: Members, target_at: Callable[[int, Tensor], Tensor], title: str) -> None:
        """Fit Q to `target_at`: (number of a step, transitions (M, B)) -> (M, B)."""

        def loss(step: int, drawn: Tensor) -> Tensor:
            predicted = net(self.inputs[drawn])[..., 0]
            return F.mse_loss(predicted, target_at(step, drawn))

        optimise(net, loss, rows=len(self.inputs), title=title, **self.training)

    def estimate(self, candidate: Candidate) -> Estimate:
        return estimate_mean(self.values(candidate), self.log)

    def values(self, candidate: Candidate) -> np.ndarray:
        """Q of the policy's first action in each held-out episode, raw reward units."""
        net = self.fit(candidate)
        with torch.no_grad():
            values = net(self.read(self.first, candidate.actions))[..., 0].mean(0)
        return np.asarray(values.double().numpy() * self.scale + self.shift)

    def fit(self, candidate: Candidate) -> Members:
        """Fit networks whose mean is the Q of a policy, in units of `scale` around `shift`."""
        following = self.read(self.after, candidate.actions)
        net = deepcopy(self.start)
        target = deepcopy(net).requires_grad_(False)
        # Q is stored without the mean return: r / scale + discount (Q' + shift) - shift
        shift = self.shift / self.scale

        def bellman_target(step: int, drawn: Tensor) -> Tensor:
            if step % self.sync_every == 0:
                target.load_state_dict(net.state_dict())
            next_q = target(following[drawn])[..., 0]
            # Where the log has no such action a network may say anything, and the next target
            # would build on it: no return beyond those of the log is believed.
            bounded_q = (next_q + shift).clamp(self.least, self.most)
            aim: Tensor = (
                self.rewards[drawn] + self.discount * self.goes_on[drawn] * bounded_q - shift
            )
            return aim

        self._fit(net, bellman_target, f"fqe: {candidate.name}")
        return net


def discounted_returns(rewards: np.ndarray, offsets: np.ndarray, discount: float) -> np.ndarray:
    """Return the discounted sum of the rewards of each step and those after it, (n,) float64.

    Rewards [1, 2, 4] with discount 0.5 give [3, 4, 4].
    """
    returns = np.array(rewards, np.float64)
    ends = offsets[1:]
    lengths = np.diff(offsets)
    for before_end in range(2, int(lengths.max()) + 1):
        rows = ends[lengths >= before_end] - before_end
        returns[rows] += discount * returns[rows + 1]
    return returns
