"""N advertising campaigns in progress: their history, spend and conversions, and the state numbers
computed from them.

The log reader, the market, the replay and the server all use this class, so that a feature has one
definition.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.schema import Json

Numbers = np.ndarray | Sequence[float] | float  # one for each campaign, or the same for all
STEPS = 48  # in a delivery period, half an hour each
STATE = (
    "time left",
    "budget left",
    "bid",
    "bid, last 3",
    "market price",
    "value",
    "conversion",
    "won",
    "market price, last 3",
    "value, last 3",
    "conversion, last 3",
    "won, last 3",
    "value now",
    "volume now",
    "volume, last 3",
    "volume, all",
)
CONTEXT = ("log budget", "target cpa", "spend / target cpa", "conversions", "value exposed")
# AuctionNet's arguments of a bidder, of each step before this one
HISTORIES = (
    "historyPValueInfo",
    "historyBid",
    "historyAuctionResult",
    "historyImpressionResult",
    "historyLeastWinningCost",
)
# means over the opportunities of a step
MEANS = ("bid", "market_price", "value", "conversion", "won")


class Campaigns:
    """N campaigns of one period, step by step: `observe` before the bids of a step, `record` after
    its auctions.

    Args:
        budgets: (N,) currency for the whole period.
        target_cpa: (N,) currency per conversion.
        steps: number of steps of the period.

    Raises:
        ValueError: a budget or a target CPA is not above 0.

    Source: AuctionNet (arXiv 2412.10798), `train_data_generator.py` for the sixteen state numbers
    and their order.
    """

    def __init__(self, budgets: Numbers, target_cpa: Numbers, *, steps: int = STEPS) -> None:
        self.budgets = np.array(budgets, np.float64)
        self.target_cpa = np.array(target_cpa, np.float64)
        for name, numbers in (("budgets", self.budgets), ("target_cpa", self.target_cpa)):
            if numbers.ndim != 1 or not np.isfinite(numbers).all() or (numbers <= 0).any():
                got = f"got {numbers.tolist()}"
                raise ValueError(f"{name}: expected one number above 0 a campaign, {got}")
        N = len(self.budgets)
        self.steps = steps
        self.now = 0
        self.remaining = self.budgets.copy()
        self.spend = np.zeros(N)
        self.conversions = np.zeros(N)
        self.exposed_value = np.zeros(N)
        self.means = np.zeros((steps, len(MEANS), N))
        self.volumes = np.zeros((steps, N))

    def observe(self, value: Numbers, volume: Numbers, *, features: str = "repaired") -> np.ndarray:
        """State numbers before a step.

        Args:
            value: (N,) mean value (predicted conversion probability) of the step's opportunities.
            volume: (N,) number of these opportunities.
            features: `repaired`; `original` averages steps 0, 1, 2 where the last three are meant,
                as AuctionNet's policies do when they bid.

        Returns:
            (N, 16) float64 in the order of STATE.
        """
        t = self.now
        last = slice(max(t - 3, 0), t)
        states = np.zeros((len(self.budgets), len(STATE)))
        states[:, 0] = (self.steps - t) / self.steps
        states[:, 1] = self.remaining / self.budgets
        if t:
            averaged = slice(min(t, 3)) if features == "original" else last
            states[:, [2, 4, 5, 6, 7]] = self.means[:t].mean(0).T
            states[:, [3, 8, 9, 10, 11]] = self.means[averaged].mean(0).T
        states[:, 12] = value
        states[:, 13] = volume
        states[:, 14] = self.volumes[last].sum(0)
        states[:, 15] = self.volumes[:t].sum(0)
        return states

    def context(self) -> np.ndarray:
        """Facts that the state numbers leave out, see `context_numbers`: (N, 5)."""
        progress = self.spend, self.conversions, self.exposed_value
        return context_numbers(self.budgets, self.target_cpa, *progress)

    def cap_multipliers(self, multipliers: np.ndarray) -> np.ndarray:
        """Multipliers (N,), capped at target_cpa while the realised CPA exceeds it.

        A won opportunity costs at most multiplier x value, so purchases under the cap keep the
        expected CPA within its target.
        """
        conversions = np.maximum(self.conversions, self.exposed_value)
        over = self.spend > self.target_cpa * conversions
        return np.where(over, np.minimum(multipliers, self.target_cpa), multipliers)

    def record(
        self,
        *,
        bid: Numbers,
        market_price: Numbers,
        value: Numbers,
        conversion: Numbers,
        won: Numbers,
        volume: Numbers,
        spend: Numbers,
        conversions: Numbers,
        exposed_value: Numbers,
    ) -> None:
        """Add the results of a step.

        Args:
            bid: (N,) mean bid, currency.
            market_price: (N,) mean of the least winning bids, currency.
            value: (N,) mean predicted conversion probability.
            conversion: (N,) conversions per opportunity.
            won: (N,) share of the opportunities that were won.
            volume: (N,) number of opportunities.
            spend: (N,) currency.
            conversions: (N,) counted.
            exposed_value: (N,) sum of the values of the exposed ads.
        """
        for k, mean in enumerate((bid, market_price, value, conversion, won)):
            self.means[self.now, k] = mean
        self.volumes[self.now] = volume
        self.remaining = self.remaining - spend
        self.spend = self.spend + spend
        self.conversions = self.conversions + conversions
        self.exposed_value = self.exposed_value + exposed_value
        self.now += 1


def context_numbers(
    budget: np.ndarray,
    target_cpa: np.ndarray,
    spend: np.ndarray,
    conversions: np.ndarray,
    exposed_value: np.ndarray,
) -> np.ndarray:
    """Return (..., 5) float64 in the order of CONTEXT, from arrays whose shapes broadcast."""
    numbers = np.log(budget), target_cpa, spend / target_cpa, conversions, exposed_value
    context = np.empty((*np.broadcast(*numbers).shape, len(numbers)))
    for i, each in enumerate(numbers):
        context[..., i] = each
    return context


def score(conversions: Numbers, spend: Numbers, target_cpa: Numbers) -> np.ndarray:
    """AuctionNet's score: conversions x min(1, (target CPA / CPA)^2). Any shapes that broadcast.

    Source: AuctionNet, `getScore_neurips`, without its 1e-10 terms: no conversions score 0.
    """
    conversions = np.asarray(conversions, np.float64)
    spend = np.asarray(spend, np.float64)
    unlimited = np.full(np.broadcast(conversions, spend).shape, np.inf)
    ratio = np.divide(target_cpa * conversions, spend, out=unlimited, where=spend > 0)
    return np.asarray(conversions * np.minimum(1, ratio) ** 2)


def summarize_opportunities(values: ArrayLike) -> tuple[float, int]:
    """Mean value and number of a step's opportunities, as `Campaigns.observe` takes them: values
    (n,).

    The sum runs in the order of the opportunities, as in the market, so that both give the same
    bits.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise ValueError(f"pValues: expected one number an opportunity, got shape {values.shape}")
    return _sum_rows(values) / max(len(values), 1), len(values)


def summarize_step(
    values: ArrayLike,
    bids: ArrayLike,
    auction: ArrayLike,
    impressions: ArrayLike,
    market_prices: ArrayLike,
) -> Json:
    """A step of one advertiser, given by opportunity as AuctionNet reports it -> arguments of
    `Campaigns.record`.

    Args:
        values: (n,) predicted conversion probabilities.
        bids: (n,) currency.
        auction: (n, 3) whether a slot was won, which slot, its price in currency.
        impressions: (n, 2) whether the ad was exposed, whether it converted. Only exposed ads are
            paid for.
        market_prices: (n,) least winning bids, currency.

    Raises:
        ValueError: an array has another shape, or a number that is not finite.
    """
    value, n = summarize_opportunities(values)
    _, bid_name, auction_name, impressions_name, price_name = HISTORIES
    bids = _check_finite(bid_name, bids, (n,))
    auction = _check_finite(auction_name, auction, (n, 3))
    impressions = _check_finite(impressions_name, impressions, (n, 2))
    market_prices = _check_finite(price_name, market_prices, (n,))
    won, price = auction[:, 0], auction[:, 2]
    exposed = impressions[:, 0]
    converted = impressions[:, 1]
    conversions = _sum_rows(converted)
    share = max(n, 1)
    return {
        "bid": _sum_rows(bids) / share,
        "market_price": np.ascontiguousarray(market_prices).sum() / share,
        "value": value,
        "conversion": conversions / share,
        "won": _sum_rows(won) / share,
        "volume": n,
        "spend": _sum_rows(price * exposed),
        "conversions": conversions,
        "exposed_value": _sum_rows(np.asarray(values, np.float64) * exposed),
    }


def _check_finite(name: str, numbers: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape; an empty one may have any. A ValueError otherwise."""
    array = np.asarray(numbers, np.float64)
    got = array.shape
    if not shape[0]:
        array = array.reshape(shape)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(
            f"{name}: expected finite numbers of shape {shape}, one row an opportunity, got {got}"
        )
    return array


def _sum_rows(x: np.ndarray) -> float:
    """The sum in the order of the rows, independent of the memory layout."""
    return np.cumsum(x)[-1] if len(x) else 0.0
