"""The share of a policy's actions that are far from the logged actions at similar states."""

import numpy as np
from scipy.spatial import cKDTree

from decisionllm.estimates.networks import Units, recorded_rows
from decisionllm.protocols import Logged

NEIGHBOURS = 20  # logged steps that count as near a state
USUAL = 0.95  # share of the logged actions that count as like those of their neighbours
MOST = 20_000  # rows of the log that are searched, and a tenth of them looked up


class Support:
    """The logged actions near each state.

    The distance of an action is that to the nearest action of the 20 logged steps with the nearest
    observation and time, in deviations of the logged actions. An action is far if it is farther
    than 95 % of the held-out logged actions themselves are from theirs; a discrete one if none of
    the 20 steps took it.

    Args:
        log: the episodes; states of held-out ones are looked up in the others.
        seed: of the rows, where there are more than are searched.
    """

    def __init__(self, log: Logged, seed: int) -> None:
        self.units = Units.from_log(log)
        rng = np.random.default_rng(seed)
        log_rows = sample_rows(recorded_rows(log), MOST, rng)
        held_out_rows = np.flatnonzero(log.held_out[log.episode] & log.recorded)
        self.rows = sample_rows(held_out_rows, MOST // 10, rng)
        tree = cKDTree(self.encode_rows(log, log_rows))
        _, near = tree.query(self.encode_rows(log, self.rows), k=min(NEIGHBOURS, len(log_rows)))
        near = near.reshape(len(self.rows), -1)
        self.taken = self.units.actions(log.actions[log_rows]).numpy()[near]  # (m, k, A)
        self.usual = 0.0
        if not log.spec.num_actions:
            self.usual = float(np.quantile(self.distance(log.actions), USUAL))

    def encode_rows(self, log: Logged, rows: np.ndarray) -> np.ndarray:
        """Standardised observations and time of these rows (m, S+1)."""
        return self.units.encode_observations(log.observations[rows], log.timesteps[rows]).numpy()

    def distance(self, actions: np.ndarray) -> np.ndarray:
        """Distance (m,) of actions (n, A) at the looked-up steps, in deviations."""
        actions_of_rows = self.units.actions(actions[self.rows]).numpy()
        squared_distances = np.square(self.taken - actions_of_rows[:, None]).sum(-1)
        return np.asarray(np.sqrt(squared_distances.min(1)))

    def far_share(self, actions: np.ndarray) -> float:
        """Return the share of actions (n, A) that are far from the log's at similar states."""
        return float((self.distance(actions) > self.usual).mean())


def sample_rows(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Return these rows, or at most `most` of them at random, in their order."""
    if len(rows) <= most:
        return rows
    return np.sort(rng.choice(rows, most, replace=False))
