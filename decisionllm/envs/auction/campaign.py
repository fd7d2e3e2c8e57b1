"""N advertising campaigns under way: what each has seen and spent, and the numbers that a bidder is shown of it.

One place for the log converter, the market, the replay and the server, so that a feature means the same wherever it is computed.
"""

import numpy as np

STEPS = 48  # of a delivery period, half an hour each
STATE = (
    "time left", "budget left", "bid", "bid, last 3", "market price", "value", "conversion", "won",
    "market price, last 3", "value, last 3", "conversion, last 3", "won, last 3",
    "value now", "volume now", "volume, last 3", "volume, all",
)  # fmt: skip
CONTEXT = ("log budget", "target cpa", "spend / target cpa", "conversions", "value exposed")
MEANS = ("bid", "market_price", "value", "conversion", "won")  # of a step, over its opportunities


class Campaigns:
    """N campaigns of one period, step by step: `observe` before the bids of a step, `record` after its auctions.

    budgets: (N,) currency; target_cpa: (N,) currency a conversion. features: `repaired`; `original` averages steps 0, 1, 2 wherever
    the last three are meant, as the original's policies do when they run.
    Source: AuctionNet (arXiv 2412.10798), `train_data_generator.py` for the sixteen numbers and their order.
    """

    def __init__(self, budgets, target_cpa, *, steps=STEPS, features="repaired"):
        if features not in ("repaired", "original"):
            raise ValueError(f"features: expected repaired or original, got {features!r}")
        self.budgets, self.target_cpa = np.array(budgets, np.float64), np.array(target_cpa, np.float64)
        for name, given in (("budgets", self.budgets), ("target_cpa", self.target_cpa)):
            if given.ndim != 1 or not (np.isfinite(given).all() and (given > 0).all()):
                raise ValueError(f"{name}: expected one number above 0 a campaign, got {given.tolist()}")
        N = len(self.budgets)
        self.steps, self.features, self.now = steps, features, 0
        self.remaining, self.spend = self.budgets.copy(), np.zeros(N)
        self.conversions, self.exposed_value = np.zeros(N), np.zeros(N)
        self.means = np.zeros((steps, len(MEANS), N))
        self.volumes = np.zeros((steps, N))

    def observe(self, value, volume, *, features=None):
        """What is shown before a step: mean value and number of its opportunities, (N,) each -> (N, 16) float64, in the order of STATE.

        features: other than the campaigns' own, for one who shares their market and was trained on the others.
        """
        t, N = self.now, len(self.budgets)
        shown = np.zeros((N, len(STATE)))
        past, recent = self.means[:t], self.means[max(t - 3, 0) : t]
        shown[:, 0] = (self.steps - t) / self.steps
        shown[:, 1] = self.remaining / self.budgets
        if t:
            last = self.means[: min(t, 3)] if (features or self.features) == "original" else recent
            shown[:, [2, 4, 5, 6, 7]] = past.mean(0).T
            shown[:, [3, 8, 9, 10, 11]] = last.mean(0).T
        shown[:, 12], shown[:, 13] = value, volume
        shown[:, 14], shown[:, 15] = self.volumes[max(t - 3, 0) : t].sum(0), self.volumes[:t].sum(0)
        return shown

    def context(self):
        """What the sixteen numbers leave out: (N, 5) float64, in the order of CONTEXT."""
        return np.stack(
            [np.log(self.budgets), self.target_cpa, self.spend / self.target_cpa, self.conversions, self.exposed_value], 1
        )

    def guarded(self, multipliers):
        """A guard of the limit: who has paid more for a conversion than is allowed bids the limit at most, until it holds again. (N,)

        A won opportunity costs at most multiplier x value, so what is bought under the guard costs no more than allowed, by the values.
        """
        over = self.spend > self.target_cpa * np.maximum(self.conversions, self.exposed_value)
        return np.where(over, np.minimum(multipliers, self.target_cpa), multipliers)

    def record(self, *, bid, market_price, value, conversion, won, volume, spend, conversions, exposed_value):
        """What the step brought, (N,) each: means over its opportunities, its number of opportunities, and totals.

        bid, market_price: currency; value: predicted conversion probability; conversion, won: shares of the opportunities; spend: currency;
        conversions: counted; exposed_value: sum of the values of what was shown.
        """
        self.means[self.now] = np.stack(
            [np.broadcast_to(x, self.budgets.shape) for x in (bid, market_price, value, conversion, won)]
        )
        self.volumes[self.now] = volume
        self.remaining = self.remaining - spend
        self.spend = self.spend + spend
        self.conversions = self.conversions + conversions
        self.exposed_value = self.exposed_value + exposed_value
        self.now += 1


def score(conversions, spend, target_cpa):
    """Conversions, with a penalty where they cost more than allowed: conversions x min(1, (target / CPA)^2). Any shapes that broadcast.

    Source: AuctionNet, `getScore_neurips`; its 1e-10 guards are left out, no conversions score 0.
    """
    conversions, spend = np.asarray(conversions, np.float64), np.asarray(spend, np.float64)
    allowed = np.divide(
        target_cpa * conversions, spend, out=np.full(np.broadcast(conversions, spend).shape, np.inf), where=spend > 0
    )
    return conversions * np.minimum(1, allowed) ** 2


def offered(values):
    """What `Campaigns.observe` is shown of a step's opportunities: their values (n,) -> mean value and number.

    The sum is taken in the order of the opportunities, as the market takes it, so that both come to the same bits.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise ValueError(f"pValues: expected one number an opportunity, got shape {values.shape}")
    return _total(values) / max(len(values), 1), len(values)


def summary(values, bids, auction, impressions, market_prices):
    """A step of one advertiser, opportunity by opportunity, as AuctionNet tells it -> what `Campaigns.record` is told.

    values, bids, market_prices: (n,), market_prices and bids in currency; auction: (n, 3), whether a slot was won, which, and its price;
    impressions: (n, 2), whether it was shown, and whether it converted. Only what was shown is paid for.
    """
    value, n = offered(values)
    given = {"historyBid": (bids, ()), "historyAuctionResult": (auction, (3,)), "historyImpressionResult": (impressions, (2,)),
             "historyLeastWinningCost": (market_prices, ())}  # fmt: skip
    arrays = []
    for name, (array, more) in given.items():
        array = np.asarray(array, np.float64)
        arrays.append(array if n else array.reshape(0, *more))
        if arrays[-1].shape != (n, *more) or not np.isfinite(array).all():
            raise ValueError(
                f"{name}: expected finite numbers of shape {(n, *more)}, one row an opportunity, got {array.shape}"
            )
    bids, auction, impressions, market_prices = arrays
    won, price, exposed, converted = auction[:, 0], auction[:, 2], impressions[:, 0], impressions[:, 1]
    conversions, share = _total(converted), max(n, 1)
    return {
        "bid": _total(bids) / share, "market_price": np.ascontiguousarray(market_prices).sum() / share, "value": value,
        "conversion": conversions / share, "won": _total(won) / share, "volume": n, "spend": _total(price * exposed),
        "conversions": conversions, "exposed_value": _total(np.asarray(values, np.float64) * exposed),
    }  # fmt: skip


def _total(x):
    """The sum in the order of the rows, however they lie in memory."""
    return np.cumsum(x)[-1] if len(x) else 0.0
