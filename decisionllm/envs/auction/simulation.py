"""N campaigns simulated together: each against fixed market prices, or each in a market of its own whose other bidders react."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import tee

import numpy as np

from decisionllm.envs.auction import days
from decisionllm.envs.auction.campaign import MEANS, STATE
from decisionllm.envs.auction.days import Day
from decisionllm.envs.auction.market import Market, Roster, scaled_traffic
from decisionllm.envs.auction.observation import MIN_REMAINING
from decisionllm.envs.auction.replay import PricedPeriod, price_period


@dataclass(frozen=True)
class Entries:
    """N campaigns to simulate, one a row."""

    period: np.ndarray  # (N,) int
    advertiser: np.ndarray  # (N,) int: its position among the 48
    budget_factor: np.ndarray  # (N,) of the published budget
    repeat: np.ndarray  # (N,) int: of the same campaign with other draws


class PriceReplay:
    """Every campaign by itself against fixed market prices.

    Args:
        entries: the campaigns.
        roster: makes the bidders of the market whose prices are replayed where `path` is empty.
        path: a folder of replay days, see `days`.
        total: opportunities of a period.
        seed: of the draws.
    """

    def __init__(self, entries: Entries, *, roster: Callable[[], Roster], path: str, total: int, seed: int) -> None:
        self.advertiser, period = entries.advertiser, entries.period
        self.keys = np.stack([np.full_like(period, seed), period, entries.advertiser, entries.repeat], 1)
        self.days = [(priced(int(p), path, total, roster), np.flatnonzero(period == p)) for p in np.unique(period)]

    def next_opportunities(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean value and number of a step's opportunities: (N,) each"""
        value, volume = np.zeros((2, len(self.advertiser)))
        for day, rows in self.days:
            value[rows], volume[rows] = day.value[step, self.advertiser[rows]], day.volume[step]
        return value, volume

    def step(self, step: int, multipliers: np.ndarray, remaining: np.ndarray) -> dict[str, np.ndarray]:
        """Bid multipliers and remaining budgets (N,) -> the arguments of `Campaigns.record`, (N,) each"""
        results: dict[str, np.ndarray] = {}
        for day, rows in self.days:
            made = day.step(step, self.advertiser[rows], multipliers[rows], remaining[rows], keys=self.keys[rows])
            for name, x in made.items():
                results.setdefault(name, np.zeros(len(remaining)))[rows] = x
        return results


class MarketSimulation:
    """N markets of 48 in lock-step, with one campaign in each. A market stops when its campaign has no budget left.

    Arguments and methods are those of PriceReplay; `path` is not used.
    """

    def __init__(self, entries: Entries, *, roster: Callable[[], Roster], path: str, total: int, seed: int) -> None:
        self.advertiser = entries.advertiser
        periods, counts = np.unique(entries.period, return_counts=True)
        streams = {p: iter(tee(scaled_traffic(p, total), n)) for p, n in zip(periods, counts, strict=True)}
        self.markets = []
        for k, (period, i) in enumerate(zip(entries.period, entries.advertiser, strict=True)):
            factor = np.ones(48)
            factor[i] = entries.budget_factor[k]
            market = Market(
                roster(), budget_factor=factor, traffic={int(period): next(streams[period])}.__getitem__,
                seed=int(np.random.SeedSequence([seed, entries.repeat[k], i]).generate_state(1)[0]),
            )  # fmt: skip
            market.reset(int(period))
            self.markets.append((market, k))

    def next_opportunities(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        value, volume = np.zeros((2, len(self.advertiser)))
        for market, k in self.markets:
            state = market.observe()[self.advertiser[k]]
            value[k], volume[k] = state[STATE.index("value now")], state[STATE.index("volume now")]
        return value, volume

    def step(self, step: int, multipliers: np.ndarray, remaining: np.ndarray) -> dict[str, np.ndarray]:
        totals = ("spend", "conversions", "exposed_value")
        results = {name: np.zeros(len(remaining)) for name in (*MEANS, *totals, "volume")}
        self.markets = [(market, k) for market, k in self.markets if remaining[k] >= MIN_REMAINING]
        for market, k in self.markets:
            i = self.advertiser[k]
            made = market.step(multipliers[[k]], [i])
            own = dict(zip(MEANS, made.means[:, i], strict=True)) | {name: vars(made)[name][i] for name in totals}
            for name, x in (own | {"volume": made.volume}).items():
                results[name][k] = x
        return results


@lru_cache(64)  # some 10 MB each
def found_day(period: int, path: str, total: int, roster: Callable[[], Roster]) -> Day:
    """A day of a folder of replay days, or of our own market."""
    return days.read(days.day_files(path, [period])[period]) if path else days.play(period, roster, total=total)


@lru_cache(4)  # some 300 MB each
def priced(period: int, path: str, total: int, roster: Callable[[], Roster]) -> PricedPeriod:
    """Its opportunities at its prices."""
    day = found_day(period, path, total, roster)
    return price_period(period, day.traffic(), day.by_step(day.market_price))
