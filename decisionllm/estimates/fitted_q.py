"""Fitted Q evaluation: the value of a policy's first actions, by its Bellman equation on the log.

Q(s, t, a) is fitted to r + discount Q(s', t + 1, a'), where a' is the policy's own action at the
next logged history. It is computed once for each step, so that a policy with a memory is judged as
it would have acted there. d3rlpy's FQE asks the policy again at each update and gives it one
observation, which a sequence policy cannot act on.
Source: Le, Voloshin and Yue, Batch Policy Learning under Constraints (arXiv 1903.08738),
algorithm 3. Beside it, the first Q is the return-to-go of the log: few steps then move it to the
policy, where from zero it would take as many as an episode is long.
"""

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from decisionllm.checks import one_of
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

CHUNK = 65536  # rows of a forward pass


@dataclass(frozen=True)
class Updates:
    """The transitions that Q is fitted to, (m, ...) each, in a network's units."""

    states: Tensor
    actions: Tensor
    rewards: Tensor  # in units of `FittedQ.scale`
    next_states: Tensor
    goes_on: Tensor  # 0 where the return ends with this step


@register("estimator", "fqe")
class FittedQ(Estimator):
    """Mean Q of the policy's first actions in held-out episodes.

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
        time_limits: `terminal`, the return ends with a truncated episode, as for days of fixed
            length; `bootstrap`, it would have gone on: the last step is left out.

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
        time_limits: str = "terminal",
    ) -> None:
        one_of("time_limits", time_limits, ("terminal", "bootstrap"))
        if time_limits == "bootstrap" and discount == 1:
            wanted = "discount below 1, where no return ends"
            raise ValueError(f"time_limits=bootstrap: expected {wanted}, got {discount:g}")
        if min(steps, members, width, batch_size, sync_every) < 1:
            raise ValueError("fqe: expected steps, members, width and the others from 1")
        self.log = log
        self.discount = discount
        self.seed = seed
        self.steps = steps
        self.batch_size = batch_size
        self.sync_every = sync_every
        self.lr = lr
        self.units = Units.of(log)
        states = self.units.states(log.observations, log.timesteps, step_tasks(log))
        last = log.offsets[1:] - 1
        after = np.arange(len(log.rewards)) + 1
        after[last] = last
        goes_on = np.ones(len(log.rewards))
        goes_on[last] = 0
        usable = log.recorded.copy()
        if time_limits == "bootstrap":
            usable[last] &= log.terminated
        rows = fitting_rows(log)
        self.rows = rows[usable[rows]]
        self.after = after[self.rows]
        togo = discounted_returns(log.rewards, log.offsets, discount)
        self.shift = float(togo[self.rows].mean())
        self.scale = float(positive(togo[self.rows].std()))
        self.updates = Updates(
            states=states[self.rows],
            actions=self.units.actions(log.actions[self.rows]),
            rewards=torch.from_numpy(log.rewards[self.rows]).float() / self.scale,
            next_states=states[self.after],
            goes_on=torch.from_numpy(goes_on[self.rows]).float(),
        )
        self.first = log.offsets[:-1][log.held_out]  # rows of the first steps
        self.first_states = states[self.first]
        size = self.units.state_size + self.units.action_size
        self.start = Members(members, size, 1, width=width, seed=seed)
        self._fit_start(torch.from_numpy((togo[self.rows] - self.shift) / self.scale).float())

    def _fit_start(self, togo: Tensor) -> None:
        """Fit the Q of the log: returns-to-go (m,), in the units of Q."""
        generator = torch.Generator().manual_seed(self.seed)
        data = self.updates

        def loss(step: int) -> Tensor:
            rows = self._draw(generator)
            found = self.start(torch.cat([data.states[rows], data.actions[rows]], -1))[..., 0]
            return F.mse_loss(found, togo[rows])

        optimise(self.start, loss, self.steps, lr=self.lr, title="fqe: returns of the log")

    def _draw(self, generator: torch.Generator) -> Tensor:
        """Rows of a batch for each member, (M, B)."""
        size = len(self.start.weights[0]), self.batch_size
        return torch.randint(len(self.rows), size, generator=generator)

    def estimate(self, candidate: Candidate) -> Estimate:
        values = self.values(candidate)
        low, high = interval(values)
        return Estimate(float(values.mean()), low, high)

    def values(self, candidate: Candidate) -> np.ndarray:
        """Q of the policy's first action in each held-out episode, raw reward units."""
        net = self.fit(candidate)
        chosen = self.units.actions(candidate.actions[self.first])
        with torch.no_grad():
            found = net(torch.cat([self.first_states, chosen], -1))[..., 0].mean(0)
        return np.asarray(found.double().numpy() * self.scale + self.shift)

    def fit(self, candidate: Candidate) -> Members:
        """The networks whose mean is the Q of a policy, in units of `scale` around `shift`."""
        data = self.updates
        next_actions = self.units.actions(candidate.actions[self.after])
        net = deepcopy(self.start)
        target = deepcopy(net).requires_grad_(False)
        generator = torch.Generator().manual_seed(self.seed)
        # Q is stored without the mean return: r / scale + discount (Q' + shift) - shift
        shift = self.shift / self.scale

        def loss(step: int) -> Tensor:
            if step % self.sync_every == 0:
                target.load_state_dict(net.state_dict())
            rows = self._draw(generator)
            then = target(torch.cat([data.next_states[rows], next_actions[rows]], -1))[..., 0]
            later = self.discount * data.goes_on[rows] * (then + shift)
            wanted = data.rewards[rows] + later - shift
            found = net(torch.cat([data.states[rows], data.actions[rows]], -1))[..., 0]
            return F.mse_loss(found, wanted)

        optimise(net, loss, self.steps, lr=self.lr, title=f"fqe: {candidate.name}")
        return net


def discounted_returns(rewards: np.ndarray, offsets: np.ndarray, discount: float) -> np.ndarray:
    """The discounted sum of the rewards of each step and those after it, (n,) float64.

    Rewards [1, 2, 4] with discount 0.5 give [3, 4, 4].
    """
    found = np.array(rewards, np.float64)
    ends = offsets[1:]
    lengths = np.diff(offsets)
    for before_end in range(2, int(lengths.max()) + 1):
        rows = ends[lengths >= before_end] - before_end
        found[rows] += discount * found[rows + 1]
    return found
