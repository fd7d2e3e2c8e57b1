"""The episodes of a store that policies are estimated from, and means over the held-out ones."""

import numpy as np

from decisionllm.datasets.store import Store
from decisionllm.eval.intervals import over_episodes
from decisionllm.protocols import Estimate, Logged

FEWEST_GROUPS = 5  # resamples of fewer hold the true mean too rarely


def build_logged(store: Store, fitting: np.ndarray, held_out: np.ndarray) -> Logged:
    """Select episodes of a store; those that estimators are fitted to come first.

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
    rows = store.list_rows(episodes)
    rewards = np.asarray(store.rewards[rows], np.float64)
    if np.ptp(rewards) == 0:
        raise ValueError(
            f"{name}: expected rewards that tell policies apart, got {rewards[0]:g} at each of "
            f"{len(rewards):,} steps"
        )
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
        action_masks=take_rows(store.action_masks, rows),
        action_log_prob=take_rows(store.action_log_prob, rows),
        groups=np.asarray(store.group[episodes]),
    )


def take_rows(values: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    """Take rows of a column; None if there is no column."""
    return None if values is None else np.asarray(values[rows])


def resampling_units(log: Logged) -> np.ndarray:
    """Return the unit that an interval resamples of each of the h held-out episodes, (h,) int: its
    group, or, if there are few groups, the episode.
    """
    groups = log.held_out_groups
    is_few = len(np.unique(groups)) < FEWEST_GROUPS
    return np.arange(len(groups)) if is_few else groups


def estimate_mean(values: np.ndarray, log: Logged) -> Estimate:
    """Estimate the mean of one value for each held-out episode (h,), with its interval."""
    low, high = over_episodes(values, resampling_units(log))
    return Estimate(float(values.mean()), low, high)
