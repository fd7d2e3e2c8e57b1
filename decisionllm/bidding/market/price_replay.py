"""One period against fixed market prices: any number of campaigns at once, each as if it were
alone.

A campaign that bids its multiplier times the value wins where price / value is no higher than the
multiplier. Opportunities are sorted by that ratio once; a bisection then finds how many are won,
and only these are read. Source of the rules: AuctionNet (arXiv 2412.10798), `offline_eval`. It
draws conversions again after each round in which it withdraws wins; the draws have no influence on
the withdrawals, so one draw gives the same distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from decisionllm.bidding.logs.replay_days import Day
from decisionllm.schema import Json


@dataclass(frozen=True)
class PricedPeriod:
    """The opportunities of a period and their prices, for N advertisers."""

    volume: np.ndarray  # (T,) opportunities of a step
    value: np.ndarray  # (T, N) means over them
    market_price: np.ndarray  # (T,) mean over them, currency
    # T times: prices (n,); values, their deviations, order by price / value, (N, n) each
    steps: Sequence[tuple[np.ndarray, ...]]

    def count_won(self, step: int, advertisers: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Number of opportunities won: advertisers (M,) int, multipliers (M,) -> (M,) int."""
        prices, values, _, order = self.steps[step]
        low = np.zeros(len(advertisers), int)
        high = np.full(len(advertisers), len(prices))
        while (low < high).any():
            unsettled = low < high
            middle = np.minimum((low + high) // 2, len(prices) - 1)
            at = order[advertisers, middle]
            # in float64, since a price may be this very bid
            wins = multipliers * values[advertisers, at] >= prices[at]
            low = np.where(unsettled & wins, middle + 1, low)
            high = np.where(unsettled & ~wins, middle, high)
        return low

    def step(
        self,
        step: int,
        advertisers: np.ndarray,
        multipliers: np.ndarray,
        remaining: np.ndarray,
        *,
        keys: np.ndarray,
    ) -> Json:
        """Let M campaigns bid in a step.

        A win costs the market price and is exposed; it converts with a probability drawn from
        N(value, deviation), cut to [0, 1]. A campaign that cannot pay keeps wins in random order as
        long as its budget lasts. An opportunity converts for all multipliers that win it or for
        none.

        Args:
            step: number of the step.
            advertisers: (M,) int.
            multipliers: (M,) currency per conversion.
            remaining: (M,) currency.
            keys: (M, k) int, seeds of a campaign's draws beside the step.

        Returns:
            The arguments of `Campaigns.record`, (M,) each.
        """
        prices, values, sigmas, order = self.steps[step]
        n = max(self.volume[step], 1)
        multipliers = np.maximum(multipliers, 0.0)
        won = self.count_won(step, advertisers, multipliers)
        # lost: the value of the wins that were not kept
        spend, conversions, exposed_value, lost = np.zeros((4, len(won)))
        for m in np.flatnonzero(won):
            i = advertisers[m]
            bought = order[i, : won[m]]
            rng = np.random.default_rng([*keys[m], step])
            u, z = rng.random((len(bought), 2)).T
            price, value = prices[bought], values[i, bought]
            spend[m] = price.sum()
            exposed_value[m] = value.sum()
            if spend[m] > remaining[m]:
                shuffled = rng.permutation(len(bought))
                paid = np.cumsum(price[shuffled])
                won[m] = np.searchsorted(paid, remaining[m], side="right")
                affordable = shuffled[: won[m]]
                bought = bought[affordable]
                value = value[affordable]
                u = u[affordable]
                z = z[affordable]
                spend[m] = paid[won[m] - 1] if won[m] else 0
                lost[m] = exposed_value[m] - value.sum()
                exposed_value[m] = value.sum()
            sigma = sigmas[i, bought]
            near = np.flatnonzero(u < value + 9 * sigma)  # ndtri of a float64 is below 9
            chance = np.minimum(value[near] + sigma[near] * ndtri(z[near]), 1)
            conversions[m] = (u[near] < chance).sum()
        value = self.value[step, advertisers]
        return {
            "bid": multipliers * (value - lost / n),
            "market_price": self.market_price[step],
            "value": value,
            "conversion": conversions / n,
            "won": won / n,
            "volume": self.volume[step],
            "spend": spend,
            "conversions": conversions,
            "exposed_value": exposed_value,
        }


def price_period(day: Day) -> PricedPeriod:
    """The opportunities of a day at its prices, sorted."""
    steps = []
    for (values, sigmas), prices in zip(
        day.traffic(), day.split_by_step(day.market_price), strict=True
    ):
        values = np.ascontiguousarray(values.T)
        with np.errstate(divide="ignore"):
            order = np.argsort(prices / values, axis=1)
        order = order.astype(np.min_scalar_type(max(len(prices), 1)))
        steps.append((prices, values, sigmas.T.astype(np.float32, order="C"), order))
    return PricedPeriod(
        volume=day.volume, value=day.mean_value, market_price=day.mean_price, steps=steps
    )
