"""AuctionNet's own random numbers for `settle`, auctions without budgets, and the outcome with a
column an advertiser.
"""

from functools import lru_cache, partial
from types import SimpleNamespace

import numpy as np

from decisionllm.bidding.market.auctions import Draws, realised_value, settle


class AuctionNetDraws(Draws):
    """AuctionNet's fixed sequence, default_rng(1): read from its start for exposure, value errors
    and conversions alike.
    """

    def __init__(self, n, slots, seed):
        self.slots = slots

    def exposure(self, rows, holder):
        """Uniforms in the order of the advertisers of each row."""
        at = self.slots * rows[:, None] + holder.argsort(1).argsort(1)
        return fixed_uniforms(int(at.max(initial=0)).bit_length())[at]

    def draw_withdrawals(self, rows, count):
        return np.random.default_rng(1).choice(rows, count, replace=False)

    def conversion(self, values, sigmas, noise, cells, holder):
        """The value error takes the cell's own uniform, the conversion that of the cell's place
        among those with a realised value above 0, because binomial takes none where p is 0."""
        fixed = fixed_uniforms(values.size.bit_length())
        possible = values > 2.001 * noise[:, 0] * sigmas  # z is at least -2 v1
        doubtful = np.nonzero(~possible & (sigmas > 0))
        cell = np.ravel_multi_index(doubtful, values.shape)
        possible[doubtful] = (
            realised_value(fixed[cell], values[doubtful], sigmas[doubtful], noise[doubtful[1]]) > 0
        )
        place = np.cumsum(possible, dtype=np.int32)
        cell = np.ravel_multi_index((cells[0], holder), values.shape)
        return np.stack([fixed[cell], fixed[np.maximum(place[cell] - 1, 0)]])


@lru_cache(4)
def fixed_uniforms(bits):
    """The first 2^bits numbers of default_rng(1).random"""
    return np.random.default_rng(1).random(1 << bits)


auctionnet_settle = partial(settle, draws=AuctionNetDraws)


def auction(bids, values, sigmas, noise, **rules):
    """Auctions without budgets, as a `dense` outcome. rules: of `settle`."""
    return dense(
        settle(bids, values, sigmas, noise, np.full(np.shape(bids)[1], np.inf), **rules)[1]
    )


def dense(outcome):
    """won, exposed, converted (n, N) bool, slot (n, N) int (1 is the best, 0 none), price (n, N)
    currency; and the outcome itself.
    """

    def spread(what, where):
        made = np.zeros((len(outcome.holder), outcome.advertisers), what.dtype)
        row, slot = np.nonzero(where)
        made[row, outcome.holder[row, slot]] = what[row, slot]
        return made

    o, K = outcome, outcome.sold.shape[1]
    return SimpleNamespace(
        won=spread(o.sold, o.sold),
        slot=spread(np.broadcast_to(np.arange(1, K + 1), o.sold.shape), o.sold),
        price=spread(o.cost, o.sold),
        exposed=spread(o.exposed, o.exposed),
        converted=spread(o.converted, o.converted),
        market_price=o.market_price,
        rounds=o.rounds,
        outcome=o,
    )
