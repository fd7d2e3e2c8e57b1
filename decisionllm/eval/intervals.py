"""95 % intervals of mean scores: over the episodes of one run, and over runs."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


def over_episodes(values: ArrayLike, clusters: np.ndarray | None = None) -> tuple[float, float]:
    """Return the bootstrap interval of a mean: (low, high). Percentile method, 10,000 resamples.

    Args:
        values: (N,) of each episode.
        clusters: (N,) integers; episodes with the same one repeat one case, so they are resampled
            together. None: no episode repeats another.
    """
    each = np.asarray(values, np.float64)
    cluster = np.arange(len(each))
    if clusters is not None:
        _, cluster = np.unique(clusters, return_inverse=True)
    totals = np.bincount(cluster, each)
    sizes = np.bincount(cluster)
    if np.ptp(totals / sizes) == 0:
        return float(each.mean()), float(each.mean())
    rng = np.random.default_rng(0)
    result = stats.bootstrap(
        (totals, sizes),
        weighted_mean,
        n_resamples=10_000,
        batch=1_000,
        method="percentile",
        paired=True,
        rng=rng,
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def weighted_mean(totals: np.ndarray, sizes: np.ndarray, axis: int) -> np.ndarray:
    """Return the mean over the episodes of clusters, by their totals and sizes."""
    mean: np.ndarray = totals.sum(axis) / sizes.sum(axis)
    return mean


def over_runs(values: ArrayLike) -> tuple[float, float]:
    """Return Student's t interval of a mean over at least two runs or pairs of runs: (low, high).

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
