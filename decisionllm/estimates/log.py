"""The part of a data store that policies are judged from, and a mean over its held-out episodes."""

import numpy as np

from decisionllm.datasets.store import Store
from decisionllm.eval.intervals import over_episodes
from decisionllm.protocols import Estimate, Logged

FEWEST_GROUPS = 5  # resamples of fewer hold the true mean too rarely


def logged(store: Store, fitting: np.ndarray, held_out: np.ndarray) -> Logged:
    """These episodes of a store, the ones to fit estimators to first.

    Args:
        store: of the log.
        fitting: (e,) int.
        held_out: (h,) int, none of them in `fitting`.

    Raises:
        ValueError: the log has no rewards that differ, or its episodes are members of teams.
    """
    name = store.info["name"]
    if store.agent is not None:
        raise ValueError(f"{name}: expected episodes of single agents, got those of teams")
    episodes = np.concatenate([fitting, held_out])
    rows = store.rows_of(episodes)
    rewards = np.asarray(store.rewards[rows], np.float64)
    if np.ptp(rewards) == 0:
        got = f"{rewards[0]:g} at each of {len(rewards):,} steps"
        raise ValueError(f"{name}: expected rewards that tell policies apart, got {got}")
    recorded = np.ones(len(rows), bool)
    if store.action_weight is not None:
        recorded = store.action_weight[rows] > 0
    return Logged(
        spec=store.spec,
        observations=np.asarray(store.observations[rows]),
        actions=np.asarray(store.actions[rows]),
        rewards=rewards,
        offsets=np.concatenate([[0], np.cumsum(store.lengths[episodes])]),
        terminated=np.asarray(store.terminated[episodes]),
        held_out=np.arange(len(episodes)) >= len(fitting),
        tasks=[store.tasks[i] for i in store.task[episodes]],
        recorded=recorded,
        action_masks=column(store.action_masks, rows),
        action_log_prob=column(store.action_log_prob, rows),
        groups=np.asarray(store.group[episodes]),
    )


def column(values: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    """These rows of a column; None where there is none."""
    return None if values is None else np.asarray(values[rows])


def resampled(log: Logged) -> np.ndarray:
    """What an interval resamples, (h,) int of the h held-out episodes: those of a group together,
    or, where groups are few, each by itself.
    """
    groups = log.held_out_groups
    is_few = len(np.unique(groups)) < FEWEST_GROUPS
    return np.arange(len(groups)) if is_few else groups


def mean_of(values: np.ndarray, log: Logged) -> Estimate:
    """The mean of one value for each held-out episode (h,), with its interval."""
    low, high = over_episodes(values, resampled(log))
    return Estimate(float(values.mean()), low, high)
