"""Importance sampling: logged returns, weighted by how much more likely the policy acts so."""

import numpy as np

from decisionllm.estimates.logged_episodes import resampling_units
from decisionllm.protocols import Candidate, Estimate, Estimator, Logged

RESAMPLES = 2000  # of the bootstrap
FEWEST = 10.0  # episodes that the weights are worth, below which the estimate says so


class Importance(Estimator):
    """Per-decision weighted importance sampling on the held-out episodes.

    The reward of step t has the weight of the actions up to t, and the weights of a step are
    divided by their sum over the episodes. An episode that has ended keeps its last weight and
    receives nothing more.
    Source: Precup, Sutton and Singh, Eligibility Traces for Off-Policy Policy Evaluation
    (ICML 2000), section 4.

    Args:
        log: the episodes, with propensities.
        discount: of a step, within 0 .. 1.
        seed: of the bootstrap.

    Raises:
        ValueError: the log has no propensities, or lacks actions.
    """

    def __init__(self, log: Logged, discount: float, seed: int) -> None:
        if log.action_log_prob is None:
            raise ValueError(
                "estimators=importance: expected a log with propensities (action_log_prob "
                "of its episodes), got none; leave this estimator out"
            )
        if not log.recorded.all():
            missing = int((~log.recorded).sum())
            raise ValueError(
                f"estimators=importance: expected the action of every step, {missing} are missing"
            )
        self.log = log
        self.log_prob: np.ndarray = log.action_log_prob
        self.discount = discount
        self.seed = seed

    def estimate(self, candidate: Candidate) -> Estimate:
        if candidate.log_prob is None:
            raise ValueError(
                f"estimators=importance: {candidate.name} draws its actions from no distribution "
                "that is known; give act.decode=sample, or leave this estimator out"
            )
        weights, rewards = self.weights(candidate.log_prob)
        value = float(self_normalised(weights, rewards, np.ones((1, len(weights))))[0])
        # resamples as how often each group of episodes is drawn
        _, group = np.unique(resampling_units(self.log), return_inverse=True)
        G = int(group.max()) + 1
        rng = np.random.default_rng(self.seed)
        counts = rng.multinomial(G, np.full(G, 1 / G), size=RESAMPLES)
        means = self_normalised(weights, rewards, counts[:, group])
        low, high = np.quantile(means, [0.025, 0.975])
        E = len(weights)
        worth = effective_episodes(weights[:, -1])
        note = f"weights worth {worth:.1f} of {E} episodes" if worth < FEWEST else ""
        return Estimate(value, float(low), float(high), note)

    def weights(self, log_prob: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights (E, T) and discounted rewards (E, T) of the held-out episodes.

        The weights of a step are divided by the largest of them, so that products of many steps
        stay within the range of numbers; a ratio of sums doesn't change.

        log_prob: (n,) of the logged actions under the policy.
        """
        log = self.log
        episodes = np.flatnonzero(log.held_out)
        T = int(log.lengths[episodes].max())
        ratio = np.zeros((len(episodes), T))
        rewards = np.zeros((len(episodes), T))
        for i, e in enumerate(episodes):
            rows = slice(log.offsets[e], log.offsets[e + 1])
            n = log.lengths[e]
            ratio[i, :n] = log_prob[rows] - self.log_prob[rows]
            rewards[i, :n] = log.rewards[rows]
        total = np.cumsum(ratio, 1)
        largest = total.max(0)
        # where no episode could come from the policy, the largest is -inf and all weights are 0
        weights = np.exp(total - np.where(np.isfinite(largest), largest, 0))
        return weights, rewards * self.discount ** np.arange(T)


def self_normalised(weights: np.ndarray, rewards: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the weighted mean reward of each step, summed over the steps, for each resample.

    Args:
        weights: (E, T).
        rewards: (E, T).
        counts: (R, E) how often each episode is in a resample.

    Returns:
        (R,). A step whose drawn episodes all have weight 0 adds nothing.
    """
    received = counts @ (weights * rewards)  # (R, T)
    normaliser = counts @ weights
    means = np.divide(received, normaliser, out=np.zeros_like(received), where=normaliser > 0)
    return np.asarray(means.sum(1))


def effective_episodes(weights: np.ndarray) -> float:
    """Return the number of equally weighted episodes that weights (E,) are worth, (sum w)^2 /
    sum w^2; 0 if no weight is above 0.
    """
    if not weights.any():
        return 0.0
    return float(weights.sum() ** 2 / np.square(weights).sum())
