"""A policy's own action at each step of a log, given the logged history."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decisionllm.datasets.windows import Steps, cut_windows, rollout_returns_to_go, window_start
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Logged

WINDOWS = 256  # of a forward pass


class PolicyActions(NamedTuple):
    """The actions of a policy at the n steps of a log."""

    actions: np.ndarray  # (n, A) raw units
    log_prob: np.ndarray  # (n,) of the logged actions; of continuous ones, of their raw units


@torch.inference_mode()
def policy_actions(policy: Policy, log: Logged) -> PolicyActions:
    """Return the actions that `Policy.act` chooses at each logged history.

    Decisions whose windows begin at the same step share one forward pass: a hidden state does not
    depend on later steps.

    Args:
        policy: reads single episodes, not teams.
        log: the steps; its rewards are subtracted from the policy's target return.
    """
    steps, predicted = condition_steps(policy, log)
    episode = log.episode
    starts = window_start(log.timesteps, policy.window, policy.stride)
    windows, window_of = np.unique(np.stack([episode, starts]), axis=1, return_inverse=True)
    window_of = window_of.ravel()  # (n,) the window of each decision
    actions = np.zeros_like(log.actions)
    log_prob = np.zeros(len(log.rewards))
    for first, rows in batch_decisions(window_of, windows.shape[1]):
        batch_windows = windows[:, first : first + WINDOWS]
        hidden = hidden_states(policy, log, steps, batch_windows, predicted)  # (W, T, D)
        place_in_window = log.timesteps[rows] - starts[rows]
        hidden_of_rows = hidden[
            torch.from_numpy(window_of[rows] - first), torch.from_numpy(place_in_window)
        ]
        masks = None if log.action_masks is None else log.action_masks[rows]
        tasks = [log.tasks[e] for e in episode[rows]]
        actions[rows] = policy.decider.act(
            hidden_of_rows, policy.on_device(masks), log.observations[rows], tasks, policy.generator
        )
        log_prob[rows] = log_probability(policy, hidden_of_rows, log, rows)
    return PolicyActions(actions, log_prob)


def condition_steps(policy: Policy, log: Logged) -> tuple[Steps, bool]:
    """Return the steps of a log with the returns-to-go of a rollout, and whether these are
    predicted instead.
    """
    policy.check_horizon(int(log.lengths.max()))
    targets = policy.resolve_targets([None] * len(log.tasks))
    predicted = bool(np.isnan(targets).any())
    togo = rollout_returns_to_go(
        log.rewards, np.nan_to_num(targets), log.offsets, return_horizon=policy.return_horizon
    )
    steps = Steps(
        observations=log.observations,
        actions=log.actions,
        returns_to_go=togo.astype(np.float32),
        first=log.offsets[:-1],
        end=log.offsets[1:],
        action_masks=log.action_masks,
    )
    return steps, predicted


def batch_decisions(window_of: np.ndarray, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first window of each batch, and the rows whose decisions read a window of the
    batch.
    """
    order = np.argsort(window_of, kind="stable")
    bounds = np.searchsorted(window_of[order], np.arange(0, count + WINDOWS, WINDOWS))
    for i, first in enumerate(range(0, count, WINDOWS)):
        yield first, order[bounds[i] : bounds[i + 1]]


def hidden_states(
    policy: Policy, log: Logged, steps: Steps, windows: np.ndarray, predicted: bool
) -> Tensor:
    """Return hidden states at the observations of these windows, (W, T, D).

    Args:
        policy: whose model reads.
        log: has the task texts.
        steps: of the log.
        windows: (2, W) the episode and the first step of each.
        predicted: condition on the predicted maximum return.
    """
    episodes, starts = windows
    longest = min(policy.window, int((log.lengths[episodes] - starts).max()))
    window = cut_windows(steps, episodes, starts, longest)
    batch = policy.to_batch(window, [log.tasks[e] for e in episodes])
    return policy.model.read(policy.with_predicted(batch) if predicted else batch)


def log_probability(policy: Policy, hidden: Tensor, log: Logged, rows: np.ndarray) -> np.ndarray:
    """Log-probability, or log-density in raw units, of the logged actions of these rows (m,)."""
    model = policy.model
    masks = None if log.action_masks is None else policy.on_device(log.action_masks[rows])
    observations = torch.from_numpy(log.observations[rows]).to(policy.device)
    actions = torch.from_numpy(log.actions[rows]).to(policy.device)
    distribution = model.distribution(
        hidden[:, None], None if masks is None else masks[:, None], observations[:, None]
    )
    units = model.normalizer.actions(actions)
    log_prob = distribution.log_prob(units[:, None])[:, 0].double().cpu().numpy()
    if not log.spec.num_actions:
        # a density in the model's units, -1 .. 1, is one of raw units times their half range
        half_range = (model.normalizer.high - model.normalizer.low) / 2
        half_range = half_range[half_range > 0]  # a number that never changes has no density
        log_prob = log_prob - float(half_range.double().log().sum())
    return np.asarray(log_prob)
