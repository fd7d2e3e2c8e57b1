"""95 % intervals of mean scores: over the episodes of one run, and over runs."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


def over_episodes(values: ArrayLike, clusters: np.ndarray | None = None) -> tuple[float, float]:
    """The bootstrap interval of a mean: (low, high). Percentile method, 10,000 resamples.

    Args:
        values: (N,) of each episode.
        clusters: (N,) integers; episodes with the same one repeat one case, such as a campaign of a
            day, so they are resampled together, as their mean. None: no episode repeats another.
    """
    each = np.asarray(values, np.float64)
    if clusters is not None:
        _, cluster = np.unique(clusters, return_inverse=True)
        each = np.bincount(cluster, each) / np.bincount(cluster)
    if np.ptp(each) == 0:
        return float(each[0]), float(each[0])
    rng = np.random.default_rng(0)
    found = stats.bootstrap((each,), np.mean, n_resamples=10_000, method="percentile", rng=rng)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def over_runs(values: ArrayLike) -> tuple[float, float]:
    """Student's t interval of a mean over at least two runs or pairs of runs: (low, high).

    A bootstrap of three values is their least and largest, and holds the true mean in three cases
    of four.
    """
    each = np.asarray(values, np.float64)
    mean = float(each.mean())
    error = float(stats.sem(each))
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(0.95, len(each) - 1, loc=mean, scale=error)
    return float(low), float(high)
