"""Traffic of a market: the opportunities of a period, their values and the errors of these values.

Letters: T steps, N advertisers, n opportunities of a step.
Source: AuctionNet (arXiv 2412.10798), `simul_bidding_env`.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from decisionllm.bidding.market.advertisers import CATEGORIES, DATA, PUBLISHED, industries
from decisionllm.bidding.market.campaigns import STEPS

MEAN_VALUE = 0.0005  # conversions an exposure
# the values and their standard deviations of each step, (n, N) each
Traffic = Iterable[tuple[np.ndarray, np.ndarray]]


def opportunities(
    period: int,
    *,
    total: int = PUBLISHED["opportunities"],
    advertisers: int = 48,
    scale: float = 1.0,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The published traffic of a period. It depends on these four numbers alone.

    Args:
        period: its number, from 0.
        total: approximate number of opportunities of the period.
        advertisers: N.
        scale: factor of the mean value; 12 comes near AuctionNet's dense regime.

    Returns:
        For each of 48 steps the values and their standard deviations, (n, N) float64 each.

    Raises:
        ValueError: a number out of range.

    Source: AuctionNet, `NeurIPSPvGen`.
    """
    if period < 0 or total < 1 or advertisers < 1:
        raise ValueError(
            "opportunities: expected a period from 0, total and advertisers from 1,"
            f" got {period}, {total}, {advertisers}"
        )
    clock = np.array(PUBLISHED["clock"])
    flow = clock * _blocks(period, 4, 0.6, 1.4)
    counts = np.floor(total * (flow * (clock.sum() / flow.sum()))).astype(int)
    mean = scale * MEAN_VALUE * _value_factors(period, advertisers)  # (N, T)

    rng = np.random.default_rng(period)
    spread = _clip_to_unit(rng.normal(0.5, 0.1, advertisers))[:, None]
    spread = _clip_to_unit(rng.normal(spread, 0.2 * spread, (advertisers, STEPS))) * mean
    # standard deviation of a value, as a share of it
    doubt = np.abs(np.random.default_rng(period).normal(0.15, 0.06, advertisers))
    doubt = np.where(doubt > 0.3, 0.2, doubt)

    rng = np.random.default_rng(period)
    for t, n in enumerate(counts):
        values = rng.standard_normal((n, advertisers))
        values *= spread[:, t]
        values += mean[:, t]
        np.clip(values, 0, 1, out=values)
        sigmas = np.random.default_rng(120000 * period + t).standard_normal((n, advertisers))
        sigmas *= doubt / 2
        sigmas += doubt
        np.minimum(np.abs(sigmas, out=sigmas), 0.3, out=sigmas)
        sigmas *= values
        yield values, sigmas


def scaled_traffic(period: int, total: int) -> Traffic:
    """The published traffic with fewer opportunities, each worth more.

    So budgets and target CPAs keep their meaning.
    """
    return opportunities(int(period), total=total, scale=PUBLISHED["opportunities"] / total)


def noise(period: int, advertisers: int = 48) -> np.ndarray:
    """Bounds of the value errors, (N, 2) float64: an error, in standard deviations, is normal and
    cut to [-2 v1, 2 v2].

    Periods 0-29 of the 48 published advertisers are AuctionNet's table; all others are uniform in
    [0, 1), seeded by the period.
    """
    table = np.load(DATA / "noise.npy")
    if advertisers == table.shape[1] and 0 <= period < len(table):
        return np.asarray(table[period])
    return np.random.default_rng([1019, period]).random((advertisers, 2))


def _value_factors(period: int, advertisers: int) -> np.ndarray:
    """Return the factors by which the mean value of each advertiser varies over a period, (N, T)."""
    category = industries(advertisers)
    # 1 - 0.7 is not 0.3 to the last bit; AuctionNet has 1 - 0.7
    low, high = 1 - 0.7, 1 + 0.7
    of_category = [_blocks(11111 * period + k, 8, low, high) for k in range(CATEGORIES)]
    factors: np.ndarray = np.stack(of_category)[category]
    for i in range(1, advertisers):
        if category[i] == category[i - 1]:  # the first of a category is the category
            factors[i] *= _blocks(11111 * period + i, 8, 0.5, 1.5)
    return factors


def _blocks(seed: int, width: int, low: float, high: float) -> np.ndarray:
    """Uniform draws, each repeated for `width` steps: (T,)"""
    return np.repeat(np.random.default_rng(seed).uniform(low, high, STEPS // width), width)


def _clip_to_unit(x: np.ndarray) -> np.ndarray:
    """Numbers within 0 .. 1: a negative one becomes 0.1."""
    return np.where(x < 0, 0.1, np.minimum(x, 1))
