"""A period of the advertising market, 48 bidders, about 500,000 opportunities: ours against the
same rules written out plainly.

Both have our traffic, the reference roster and AuctionNet's draws; only the auctions differ. The
plain way sorts and draws for every cell, and again for all whenever bids are withdrawn. It is not
AuctionNet's own code, which needs 26 to 39 CPU seconds a period, 28 on an idle core, and 2.57 GB
for its `main_test.py`: measured once on another machine, so no ratio to them is claimed. The gates
hold every count equal, and the memory of a period under 2 GB.
"""

import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from benchmarks import measure
from decisionllm.bidding.market.advertisers import PUBLISHED
from decisionllm.bidding.market.auctions import Outcome
from decisionllm.bidding.market.bidders import roster
from decisionllm.bidding.market.market import Market, MarketStep
from decisionllm.bidding.market.traffic import opportunities
from tests.bidding.auctionnet_draws import auctionnet_settle

COUNTS = ("won", "exposed", "conversions", "done")


def plain(
    bids: Any, values: Any, sigmas: Any, noise: Any, remaining: Any, *, seed: Any
) -> tuple[np.ndarray, Outcome]:
    """The rules of `settle` with AuctionNet's draws, for all n x N cells."""
    reserve = PUBLISHED["reserve"]
    exposure = PUBLISHED["exposure"]
    bids = np.maximum(bids, 0)
    n, N = values.shape
    K, rounds = len(exposure), 0
    low = ndtr(-2 * noise[:, 0])
    high = ndtr(2 * noise[:, 1])
    while True:
        rounds += 1
        order = np.argsort(-bids, axis=1)
        by_rank = np.take_along_axis(bids, order, 1)
        slot = np.zeros((n, N), int)
        price = np.zeros((n, N))
        np.put_along_axis(slot, order[:, :K], np.arange(1, K + 1), 1)
        np.put_along_axis(price, order[:, :K], np.maximum(by_rank[:, 1 : K + 1], reserve), 1)
        exposed = np.random.default_rng(1).binomial(1, np.array([0, *exposure])[slot])
        for k in range(2, K + 1):
            hidden = ((slot == k - 1) & (exposed == 0)).any(1)
            exposed[(slot == k) & hidden[:, None]] = 0
        real = values + sigmas * ndtri(low + np.random.default_rng(1).random((n, N)) * (high - low))
        converted = np.random.default_rng(1).binomial(1, np.clip(real, 0, 1)) * exposed
        market_price = np.maximum(by_rank[:, K], reserve)
        unsold = price == reserve
        for x in (slot, price, exposed, converted):
            x[unsold] = 0
        owed = (price * exposed).sum(0)
        share = np.maximum((owed - remaining) / (owed + 1e-4), 0)
        if not share.any():
            break
        for i in np.flatnonzero(share):
            for k in range(1, K + 1):
                mine = np.flatnonzero(slot[:, i] == k)
                if len(mine):
                    taken = np.random.default_rng(1).choice(
                        mine, int(np.ceil(len(mine) * share[i])), replace=False
                    )
                    bids[taken, i] = 0
    holder = order[:, :K]
    sold, cost, seen, bought = (
        np.take_along_axis(x, holder, 1) for x in (slot > 0, price, exposed > 0, converted > 0)
    )
    return bids, Outcome(N, holder, sold, cost, seen, bought, market_price, rounds)


def period(total: int, settle: Any = auctionnet_settle) -> MarketStep:
    return Market(roster(), traffic=partial(opportunities, total=total), settle=settle).play(7)


def gates(*, total: int = 500_000) -> dict[str, Any]:
    """The same slots, exposures and conversions in every step, and the peak memory of ours."""
    tracemalloc.start()
    ours = period(total)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    peer = period(total, settle=plain)
    wrong = sum(np.count_nonzero(vars(ours)[name] != vars(peer)[name]) for name in COUNTS)
    spend = np.abs(ours.spend - peer.spend).max()
    return (
        measure.gate("counts that differ", wrong, 0)
        | measure.gate("spend", spend, 1e-4)
        | measure.gate("peak memory, GB", peak / 1e9, 2)
    )


def cases(*, total: int = 500_000) -> Any:
    yield measure.Case(
        "reference roster",
        lambda: period(total),
        lambda: period(total, settle=plain),
        unit="ms/period",
        target=3,
        limit=6000,
    )


if __name__ == "__main__":
    measure.main("lab.auction_period", out=Path(__file__).parent / "rows" / "peers.jsonl")
