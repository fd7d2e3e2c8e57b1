"""N campaigns simulated together.

Each runs against fixed market prices, or in a market of its own whose other bidders react.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import tee

import numpy as np

from decisionllm.bidding.logs import replay_days as days
from decisionllm.bidding.logs.replay_days import Day
from decisionllm.bidding.market.bidders import roster
from decisionllm.bidding.market.campaigns import MEANS
from decisionllm.bidding.market.market import Market
from decisionllm.bidding.market.observation import MIN_REMAINING
from decisionllm.bidding.market.price_replay import PricedPeriod, price_period
from decisionllm.bidding.market.traffic import scaled_traffic

TOTALS = ("spend", "conversions", "exposed_value")  # sums over a step
RESULTS = (*MEANS, *TOTALS, "volume")
Results = dict[str, np.ndarray]  # the arguments of `Campaigns.record`, (N,) each


@dataclass(frozen=True)
class Entries:
    """N campaigns to simulate, one a row."""

    period: np.ndarray  # (N,) int
    advertiser: np.ndarray  # (N,) int: its position among the 48
    budget_factor: np.ndarray  # (N,) of the published budget
    repeat: np.ndarray  # (N,) int: number of the repetition, with other draws


class PriceReplay:
    """Every campaign by itself against fixed market prices.

    Args:
        entries: the campaigns.
        path: a folder of replay days, see `days`; empty: days of our own market.
        total: opportunities of a period.
        seed: seeds the draws.
    """

    def __init__(self, entries: Entries, *, path: str, total: int, seed: int) -> None:
        period = entries.period
        self.advertiser = entries.advertiser
        seeds = np.full_like(period, seed)
        self.keys = np.stack([seeds, period, entries.advertiser, entries.repeat], 1)  # (N, 4)
        self.days: list[tuple[PricedPeriod, np.ndarray]] = []  # and the rows of its campaigns
        for number in np.unique(period):
            day = load_priced_period(int(number), path, total)
            self.days.append((day, np.flatnonzero(period == number)))

    def next_opportunities(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean value and number of a step's opportunities: (N,) each."""
        value, volume = np.zeros((2, len(self.advertiser)))
        for day, rows in self.days:
            value[rows] = day.value[step, self.advertiser[rows]]
            volume[rows] = day.volume[step]
        return value, volume

    def step(self, step: int, multipliers: np.ndarray, remaining: np.ndarray) -> Results:
        """Bid multipliers and remaining budgets (N,) -> results of the N campaigns."""
        results = {name: np.zeros(len(remaining)) for name in RESULTS}
        for day, rows in self.days:
            campaigns = self.advertiser[rows], multipliers[rows], remaining[rows]
            made = day.step(step, *campaigns, keys=self.keys[rows])
            for name in RESULTS:
                results[name][rows] = made[name]
        return results


class MarketSimulation:
    """N markets of 48 in lock-step, with one campaign in each. A market stops when its campaign has
    no budget left.

    Arguments and methods are those of PriceReplay.
    """

    def __init__(self, entries: Entries, *, total: int, seed: int) -> None:
        self.advertiser = entries.advertiser
        periods, counts = np.unique(entries.period, return_counts=True)
        streams = {}  # {period: an iterator over its traffic for each market}
        for period, count in zip(periods, counts, strict=True):
            streams[period] = iter(tee(scaled_traffic(period, total), count))
        self.markets = []  # and the row of its campaign
        for k, (period, i) in enumerate(zip(entries.period, entries.advertiser, strict=True)):
            factor = np.ones(48)
            factor[i] = entries.budget_factor[k]
            traffic = {int(period): next(streams[period])}
            draws = np.random.SeedSequence([seed, entries.repeat[k], i])
            market = Market(
                roster(),
                budget_factor=factor,
                traffic=traffic.__getitem__,
                seed=int(draws.generate_state(1)[0]),
            )
            market.reset(int(period))
            self.markets.append((market, k))

    def next_opportunities(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        value, volume = np.zeros((2, len(self.advertiser)))
        for market, k in self.markets:
            value[k] = market.mean_value[self.advertiser[k]]
            volume[k] = len(market.values)
        return value, volume

    def step(self, step: int, multipliers: np.ndarray, remaining: np.ndarray) -> Results:
        results = {name: np.zeros(len(remaining)) for name in RESULTS}
        self.markets = [pair for pair in self.markets if remaining[pair[1]] >= MIN_REMAINING]
        for market, k in self.markets:
            i = self.advertiser[k]
            made = market.step(multipliers[[k]], [i])
            results["volume"][k] = made.volume
            for name, mean in zip(MEANS, made.means[:, i], strict=True):
                results[name][k] = mean
            for name in TOTALS:
                results[name][k] = vars(made)[name][i]
        return results


@lru_cache(64)  # some 10 MB each
def load_day(period: int, path: str, total: int) -> Day:
    """A day of a folder of replay days, or of our own market."""
    if path:
        return days.read_day(days.find_day_files(path, [period])[period])
    return days.play_day(period, roster, total=total)


@lru_cache(4)  # some 300 MB each
def load_priced_period(period: int, path: str, total: int) -> PricedPeriod:
    """The opportunities of a day at its prices."""
    return price_period(load_day(period, path, total))
