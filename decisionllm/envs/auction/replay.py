"""One period against market prices that do not answer: any number of campaigns at once, each as if it were alone.

Who bids its multiplier times the value wins where price / value is no higher than the multiplier. Sorted by that ratio, once, the
opportunities that any multiplier wins stand first: finding them is a bisection, and only they are looked at.
Source of the rules: AuctionNet (arXiv 2412.10798), `offline_eval`. It draws conversions again after each of its rounds of
taking back wins; what was drawn has no say in what is taken back, so drawing once is the same distribution.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri


@dataclass(frozen=True)
class Offers:
    """A period's opportunities as N advertisers may buy them."""

    period: int
    volume: np.ndarray  # (T,) opportunities of a step
    value: np.ndarray  # (T, N) means over them
    market_price: np.ndarray  # (T,) mean over them, currency
    steps: list  # of T: prices (n,), values (N, n), their standard deviations (N, n), and each advertiser's order by price / value (N, n)

    def won(self, step, advertisers, multipliers):
        """How many opportunities are bought: advertisers (M,) int, multipliers (M,) -> (M,) int"""
        prices, values, _, order = self.steps[step]
        low, high = np.zeros(len(advertisers), int), np.full(len(advertisers), len(prices))
        while (open := low < high).any():
            middle = np.minimum((low + high) // 2, len(prices) - 1)
            at = order[advertisers, middle]
            wins = multipliers * values[advertisers, at] >= prices[at]  # float64: a price may be what this very bid once was
            low, high = np.where(open & wins, middle + 1, low), np.where(open & ~wins, middle, high)
        return low

    def step(self, step, advertisers, multipliers, remaining, *, keys):
        """M campaigns buy: what `Campaigns.record` is told, (M,) each.

        A win costs the market price and is shown; its real value is N(value, deviation) cut to [0, 1], the chance of a conversion.
        Who cannot pay keeps wins in a random order as far as the money goes. keys: (M, k) int, what a campaign's draws
        depend on beside the step. An opportunity converts for all multipliers that buy it or for none.
        """
        n, (prices, values, sigmas, order) = max(self.volume[step], 1), self.steps[step]
        multipliers = np.maximum(multipliers, 0.0)
        won = self.won(step, advertisers, multipliers)
        spend, conversions, exposed_value, lost = np.zeros((4, len(won)))
        for m in np.flatnonzero(won):
            i = advertisers[m]
            bought = order[i, : won[m]]
            rng = np.random.default_rng([*keys[m], step])
            u, z = rng.random((len(bought), 2)).T
            price, value = prices[bought], values[i, bought]
            spend[m], exposed_value[m] = price.sum(), value.sum()
            if spend[m] > remaining[m]:
                shuffled = rng.permutation(len(bought))
                paid = np.cumsum(price[shuffled])
                won[m] = np.searchsorted(paid, remaining[m], side="right")
                kept = shuffled[: won[m]]
                bought, value, u, z = bought[kept], value[kept], u[kept], z[kept]
                spend[m], lost[m] = paid[won[m] - 1] if won[m] else 0, exposed_value[m] - value.sum()
                exposed_value[m] = value.sum()
            sigma = sigmas[i, bought]
            near = np.flatnonzero(u < value + 9 * sigma)  # ndtri of a float64 is below 9
            conversions[m] = (u[near] < np.minimum(value[near] + sigma[near] * ndtri(z[near]), 1)).sum()
        value, price = self.value[step, advertisers], self.market_price[step]
        return {
            "bid": multipliers * (value - lost / n), "market_price": price, "value": value, "conversion": conversions / n,
            "won": won / n, "volume": self.volume[step], "spend": spend, "conversions": conversions,
            "exposed_value": exposed_value,
        }  # fmt: skip


def offers(period, traffic, market_prices):
    """Offers of a period: traffic, an iterable of a step's values and deviations (n, N); market_prices, of its prices (n,)."""
    volume, value, market_price, steps = [], [], [], []
    for (values, sigmas), prices in zip(traffic, market_prices, strict=True):
        if len(prices) != len(values):
            raise ValueError(
                f"expected {len(values)} market prices in step {len(volume)} of period {period}, got {len(prices)}"
            )
        n = max(len(values), 1)
        volume.append(len(values))
        value.append(values.sum(0) / n)
        market_price.append(prices.sum() / n)
        values = np.ascontiguousarray(values.T)
        with np.errstate(divide="ignore"):
            order = np.argsort(prices / values, axis=1).astype(np.min_scalar_type(n))
        steps.append((np.asarray(prices, np.float64), values, sigmas.T.astype(np.float32, order="C"), order))
    return Offers(period, np.array(volume), np.stack(value), np.array(market_price), steps)
