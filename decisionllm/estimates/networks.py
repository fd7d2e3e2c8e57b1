"""Small networks that several estimators fit, and what they read of a log."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from decisionllm.datasets import running_statistics
from decisionllm.models.fitting import minimise
from decisionllm.models.value_planner import TEXTS, codes
from decisionllm.protocols import Logged


class Members(nn.Module):
    """M networks of the same shape with two hidden layers, computed together.

    Args:
        count: M.
        inputs: I, numbers read.
        outputs: O, numbers predicted.
        width: of the hidden layers.
        seed: of the weights.
    """

    def __init__(self, count: int, inputs: int, outputs: int, *, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = [inputs, width, width, outputs]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for before, after in zip(sizes[:-1], sizes[1:], strict=True):
            bound = before**-0.5
            weight = torch.rand(count, before, after, generator=generator) * 2 - 1
            self.weights.append(nn.Parameter(weight * bound))
            self.biases.append(nn.Parameter(torch.zeros(count, 1, after)))

    def forward(self, x: Tensor) -> Tensor:
        """(M, B, I), or (B, I) for all members alike -> (M, B, O)."""
        if x.ndim == 2:
            x = x.expand(len(self.weights[0]), -1, -1)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if i < last:
                x = F.silu(x)
        return x


@dataclass(frozen=True)
class Units:
    """Inputs of a network from a log: standardised observations and actions, the share of
    the horizon that has passed, and numbers that stand for the task text.

    A discrete action is one number for each choice.
    """

    observation_mean: np.ndarray  # (S,)
    observation_scale: np.ndarray  # (S,)
    action_mean: np.ndarray  # (A,)
    action_scale: np.ndarray  # (A,)
    num_actions: int  # C, 0: continuous
    horizon: int  # steps
    reads_text: bool

    @classmethod
    def from_log(cls, log: Logged) -> "Units":
        """Fit the units to the episodes that estimators are fitted to."""
        rows = fitting_rows(log)
        observations = log.observations[rows].astype(np.float64)
        actions = log.actions[rows].astype(np.float64)
        observation_mean = observations.mean(0)
        action_mean = actions.mean(0)
        return cls(
            observation_mean=observation_mean,
            observation_scale=running_statistics.standard_scale(
                observation_mean, observations.std(0)
            ),
            action_mean=action_mean,
            action_scale=running_statistics.standard_scale(action_mean, actions.std(0)),
            num_actions=log.spec.num_actions,
            horizon=int(log.lengths.max()),
            reads_text=has_shared_texts(log),
        )

    def encode_observations(self, observations: np.ndarray, timesteps: np.ndarray) -> Tensor:
        """Encode observations (m, S) and steps (m,) as inputs (m, S+1)."""
        standardised = (observations - self.observation_mean) / self.observation_scale
        passed = 2 * timesteps[:, None] / self.horizon - 1
        return torch.from_numpy(np.concatenate([standardised, passed], 1)).float()

    def states(self, observations: np.ndarray, timesteps: np.ndarray, tasks: list[str]) -> Tensor:
        """Encode the same and m task texts, if they are read, as inputs (m, I)."""
        observed = self.encode_observations(observations, timesteps)
        if not self.reads_text:
            return observed
        return torch.cat([observed, codes(tasks)], 1)

    def actions(self, actions: np.ndarray) -> Tensor:
        """Encode raw actions (m, A) as inputs (m, A), or (m, C) of discrete ones."""
        if self.num_actions:
            index = torch.from_numpy(actions[:, 0].astype(np.int64))
            return F.one_hot(index, self.num_actions).float()
        return torch.from_numpy((actions - self.action_mean) / self.action_scale).float()

    def inputs(
        self, observations: np.ndarray, timesteps: np.ndarray, tasks: list[str], actions: np.ndarray
    ) -> Tensor:
        """Encode states and actions of m steps, (m, I)."""
        return torch.cat([self.states(observations, timesteps, tasks), self.actions(actions)], 1)


def fitting_rows(log: Logged) -> np.ndarray:
    """Return the steps (m,) of the episodes that are not held out."""
    return np.flatnonzero(~log.held_out[log.episode])


def recorded_rows(log: Logged) -> np.ndarray:
    """Return the steps (m,) of the episodes that are not held out and have an action."""
    rows = fitting_rows(log)
    recorded: np.ndarray = rows[log.recorded[rows]]
    return recorded


def task_texts(log: Logged, rows: np.ndarray) -> list[str]:
    """Return the task text of each of these steps (m,)."""
    return [log.tasks[e] for e in log.episode[rows]]


def has_shared_texts(log: Logged) -> bool:
    """Return whether the log has several task texts and every held-out one occurs in the other
    episodes too. A text that is nowhere else says nothing to a network.
    """
    pairs = list(zip(log.tasks, log.held_out, strict=True))
    judged = {task for task, held_out in pairs if held_out}
    fitted_to = {task for task, held_out in pairs if not held_out}
    return 1 < len(fitted_to) <= TEXTS and judged <= fitted_to


def optimise(
    net: Members,
    loss: Callable[[int, Tensor], Tensor],
    *,
    rows: int,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    title: str,
) -> None:
    """Minimise a loss by Adam; the rate falls to zero along a cosine.

    Args:
        net: the networks.
        loss: of the number of a step, and rows that are drawn for each member (M, B).
        rows: there are so many.
        steps: updates.
        batch_size: B.
        lr: peak learning rate.
        seed: of the draws.
        title: of the progress that is shown.
    """
    generator = torch.Generator().manual_seed(seed)
    size = len(net.weights[0]), batch_size

    def drawn_loss(step: int) -> Tensor:
        return loss(step, torch.randint(rows, size, generator=generator))

    minimise(net, drawn_loss, steps, title, lr=lr, schedule=CosineAnnealingLR)
