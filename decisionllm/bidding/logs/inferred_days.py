"""Replayable days that are inferred from a trajectory log, which holds no single opportunity.

The log says the mean price of each step, and the share of its opportunities that each of 48
advertisers won with bids of its own height. Both together say how prices spread: of an opportunity

    price = the step's mean price x a ratio,    value = the advertiser's mean value x a number,

where the ratio has the same distribution in all steps, and the number is normal with mean 1, cut at
0. Chances of ratios are found by non-negative least squares on the shares that were won. Only the
spread of values is left, since a wider one looks like a wider spread of prices: that one is taken
with which the mean ratio is nearest to 1, as it has to be.

The curves of such a day are those of `days.Day`. It has no opportunities, so that a teacher can
learn from it and no policy can be replayed on it.

A teacher learns a few days by heart. What advertisers value and what a market asks for are found
apart here: so each day is also made with the prices and volumes of other days.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear
from scipy.special import ndtr

from decisionllm.bidding.logs.auctionnet_log import Log
from decisionllm.bidding.logs.replay_days import GRID, Day
from decisionllm.bidding.market.campaigns import STATE, STEPS
from decisionllm.bidding.market.observation import MIN_REMAINING

ADVERTISERS = 48
RATIOS = np.geomspace(0.25, 4, 57)  # of a price to its step's mean, 5 % apart
SPREADS = np.arange(0.2, 0.65, 0.05)  # of values, in means: standard deviations that are tried
MOST_OTHERS = 6  # days whose prices a day is made with, besides its own; a file of a day takes 8 MB
SURE = 1000.0  # weight of the equation that chances sum to 1; a step's mean weight is 1


@dataclass(frozen=True)
class PriceModel:
    """Distribution of prices and values within a step.

    Attributes:
        spread: standard deviation of an advertiser's values, in means.
        ratios: (R,) of a price to its step's mean.
        chances: (R,) of each ratio, a sum of 1.
    """

    spread: float
    ratios: np.ndarray
    chances: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.chances @ self.ratios)


def infer_days(log: Log, *, prices: str) -> Iterator[Day]:
    """The days of a log, and then each with the prices and volumes of others of them.

    A day with those of the k-th period after its own is numbered k x 1000 + its period; with more
    digits where a period has four or more.

    Args:
        log: K advertisers' days; all advertisers of each period.
        prices: name of the market, for results.

    Raises:
        ValueError: a period lacks an advertiser, or no step says at what bid what share was won.
    """
    price_model = fit_prices(log)
    days = list(build_logged_days(log, price_model, prices=prices))
    yield from days
    first = 10 ** max(3, len(str(max(day.period for day in days))))
    for k in range(1, min(len(days), MOST_OTHERS + 1)):
        for i, day in enumerate(days):
            market = days[(i + k) % len(days)]
            yield build_inferred_day(
                k * first + day.period,
                market.mean_price,
                day.mean_value,
                market.volume,
                price_model,
                prices=prices,
            )


def build_logged_days(log: Log, price_model: PriceModel, *, prices: str) -> Iterator[Day]:
    """The days of a log as they were; arguments and errors as in `infer_days`."""
    price = step_means(log, "market price")
    for period in np.unique(log.period).tolist():
        rows = np.flatnonzero(log.period == period)
        if not np.array_equal(log.advertiser[rows], np.arange(ADVERTISERS)):
            raise ValueError(
                f"period {period}: expected each of the advertisers 0 .. {ADVERTISERS - 1},"
                f" got {len(rows)} of them"
            )
        of_step = np.maximum(price[rows[0]], 0)  # a difference of means, so that 0 may be below it
        of_step[-1] = of_step[-2]  # which no state follows
        states = log.states[rows]
        value = states[:, :, STATE.index("value now")].T
        volume = states[0, :, STATE.index("volume now")].astype(int)
        yield build_inferred_day(period, of_step, value, volume, price_model, prices=prices)


def step_means(log: Log, name: str) -> np.ndarray:
    """A mean over the opportunities of each step, (K, T), from the log's means of all steps before;
    NaN for the last step, which no state follows.
    """
    before = np.arange(STEPS) * log.states[:, :, STATE.index(name)]
    return np.diff(before, axis=1, append=np.nan)


def fit_prices(log: Log) -> PriceModel:
    """Fit the distribution of prices and values in the log; arguments and errors as in
    `infer_days`.
    """
    bid, won, volume = select_counted_steps(log)
    if not len(bid):
        raise ValueError("expected steps with bids, prices and shares of won auctions, got none")
    candidates = [fit_chances(bid, won, volume, spread) for spread in SPREADS]
    return min(candidates, key=lambda prices: abs(prices.mean - 1))


def select_counted_steps(log: Log) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select the n steps whose bids all counted.

    Returns:
        The mean bid in mean prices, the share of the opportunities that was won, and the number of
        opportunities, (n,) each.
    """
    value = log.states[:, :, STATE.index("value now")]
    price = step_means(log, "market price")
    won = step_means(log, "won")
    bid = log.multiplier * value
    # In the step in which a budget ends some bids are taken back; of the last step no share is known.
    after = np.append(log.remaining[:, 1:], np.zeros((len(log.period), 1)), 1)
    counted = (after >= MIN_REMAINING) & (bid > 0) & (price > 0)
    volume = log.states[:, :, STATE.index("volume now")]
    return bid[counted] / price[counted], won[counted], volume[counted]


def fit_chances(bid: np.ndarray, won: np.ndarray, volume: np.ndarray, spread: float) -> PriceModel:
    """The chances of RATIOS with which the shares that were won are explained best, if values have
    this spread; other arguments: see `select_counted_steps`.
    """
    # the share that a bid wins at each ratio is linear in its chance
    shares, _ = upper_tail(RATIOS / bid[:, None], spread)  # (n, R)
    weight = np.sqrt(volume / volume.mean())
    equations = np.column_stack([weight[:, None] * shares, weight * won])
    equations = np.append(equations, np.full((1, len(RATIOS) + 1), SURE), 0)
    few = np.asarray(np.linalg.qr(equations, "r"))  # with the same solution
    chances = lsq_linear(few[:, :-1], few[:, -1], (0, np.inf)).x
    possible = chances > 1e-4
    return PriceModel(spread, RATIOS[possible], chances[possible] / chances[possible].sum())


def upper_tail(least: np.ndarray, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """The chance that a value of mean 1 is at least `least`, and its mean where it is, times that
    chance. Values are normal; least: above 0, so that those cut at 0 do not count.
    """
    z = (least - 1) / spread
    share = ndtr(-z)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return share, share + spread * density


def build_inferred_day(
    period: int,
    price: np.ndarray,
    value: np.ndarray,
    volume: np.ndarray,
    price_model: PriceModel,
    *,
    prices: str,
) -> Day:
    """A day by the means of its steps: price (T,), value (T, N); volume: (T,) opportunities."""
    cost, worth, won = expected_curves(price, value, volume, price_model)
    return Day(
        period=period,
        prices=prices,
        total=0,
        volume=volume,
        market_price=np.repeat(price, volume),
        mean_value=value,
        cost=cost,
        value=worth,
        won=won,
        values=np.zeros((0, ADVERTISERS)),
        sigmas=np.zeros((0, ADVERTISERS), np.float32),
    )


def expected_curves(
    price: np.ndarray, value: np.ndarray, volume: np.ndarray, price_model: PriceModel
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the expected cost, value and wins of each multiplier of GRID in each step, see `Day`.

    price: (T,) mean of each step; value: (T, N) means; volume: (T,) opportunities.
    """
    # the least value, in means, with which each multiplier wins at each price: (T, N, G, R)
    levels = price[:, None] * price_model.ratios  # (T, R)
    bids = np.maximum(value, 1e-12)[:, :, None] * GRID  # (T, N, G)
    share, mean = upper_tail(levels[:, None, None] / bids[..., None], price_model.spread)
    opportunities = volume[:, None, None]
    won = opportunities * (share @ price_model.chances)
    worth = opportunities * value[:, :, None] * (mean @ price_model.chances)
    cost = opportunities * np.einsum("tngr,tr->tng", share, levels * price_model.chances)
    return cost.astype(np.float32), worth.astype(np.float32), won.astype(np.float32)
