"""Auctions of a step: bids of N advertisers for n opportunities, K slots, prices and conversions.

Source: AuctionNet (arXiv 2412.10798), `simul_bidding_env`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from decisionllm.bidding.market.advertisers import PUBLISHED
from decisionllm.schema import Seed


@dataclass(frozen=True)
class Outcome:
    """Results of n auctions of K slots, best slot first."""

    advertisers: int
    holder: np.ndarray  # (n, K) int: the advertiser that holds the slot, if the slot is sold
    sold: np.ndarray  # (n, K) bool
    cost: np.ndarray  # (n, K) currency: price of the slot, paid if the ad is exposed
    exposed: np.ndarray  # (n, K) bool: sold and exposed
    converted: np.ndarray  # (n, K) bool: exposed and converted
    market_price: np.ndarray  # (n,) currency: the least bid that would have won a slot
    rounds: int  # 1 + how often bids were withdrawn

    def sum_by_advertiser(self, where: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum over slots: (n, K) bool, and weights (n, K) -> (N,) float64."""
        if weights is not None:
            weights = weights[where]
        sums = np.bincount(self.holder[where], weights, self.advertisers)
        return np.asarray(sums, np.float64)


class Draws:
    """The random numbers of a step's auctions: a uniform a slot, independent of its holder."""

    def __init__(self, n: int, slots: int, seed: Seed) -> None:
        self.rng = np.random.default_rng(seed)
        self.uniforms = self.rng.random((3, n, slots))  # for exposure, value error, conversion

    def exposure(self, rows: np.ndarray, holder: np.ndarray) -> np.ndarray:
        """Uniforms (m, K) of the slots of opportunities. rows: (m,); holder: (m, K) advertisers."""
        return np.asarray(self.uniforms[0, rows])

    def draw_withdrawals(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Draw `count` of these rows, each at most once."""
        return np.asarray(self.rng.choice(rows, count, replace=False))

    def conversion(
        self,
        values: np.ndarray,
        sigmas: np.ndarray,
        noise: np.ndarray,
        cells: tuple[np.ndarray, ...],
        holder: np.ndarray,
    ) -> np.ndarray:
        """Uniforms (2, m) of the value errors and conversions of slots.

        cells: their rows and slots; holder: their holders; all (m,).
        """
        return np.asarray(self.uniforms[1:, cells[0], cells[1]])


def settle(
    bids: np.ndarray,
    values: np.ndarray,
    sigmas: np.ndarray,
    noise: np.ndarray,
    remaining: np.ndarray,
    *,
    reserve: float = PUBLISHED["reserve"],
    exposure: Sequence[float] = tuple(PUBLISHED["exposure"]),
    seed: Seed = 0,
    draws: type[Draws] = Draws,
    first_price: bool = False,
) -> tuple[np.ndarray, Outcome]:
    """Run the auctions of a step.

    While an advertiser owes more than it has left, withdraw bids of it at random and run them
    again.

    The K highest bids get the slots, each at the next bid or the reserve. A slot whose price is the
    reserve is not sold. Slot k is exposed with probability `exposure[k]` if the slot above it is:
    1, 0.8, 0.6 means 1, 0.8, 0.48. An exposed ad converts with probability value + sigma z, with z
    from the cut normal of `noise`.

    Args:
        bids: (n, N) currency; negative ones count as 0.
        values: (n, N) predicted conversion probabilities.
        sigmas: (n, N) their standard deviations.
        noise: (N, 2), see `noise`.
        remaining: (N,) currency.
        reserve: least price, currency.
        exposure: (K,) probabilities.
        seed: seeds the draws.
        draws: the random numbers.
        first_price: each slot is sold at its holder's own bid; the market price is the lowest of
            them.

    Returns:
        The bids that remained (n, N), and the outcome.

    Raises:
        ValueError: arrays of different shapes.
    """
    n, N = np.shape(values)
    shapes = (
        ("bids", bids, (n, N)),
        ("sigmas", sigmas, (n, N)),
        ("noise", noise, (N, 2)),
        ("remaining", remaining, (N,)),
    )
    for name, x, shape in shapes:
        if np.shape(x) != shape:
            raise ValueError(f"{name}: expected {shape} as values are {(n, N)}, got {np.shape(x)}")
    bids = np.maximum(bids, 0.0)  # a copy
    chances = np.asarray(exposure, np.float64)
    K = len(chances)
    drawn = draws(n, K, seed)
    holder = np.empty((n, K), np.intp)
    price = np.empty((n, K))
    visible = np.empty((n, K), bool)
    rows = np.arange(n)  # the auctions to be run again
    rounds = 1
    while True:
        holder[rows], price[rows] = _rank_bids(bids[rows], K)
        if first_price:
            price[rows] = np.take_along_axis(bids[rows], holder[rows], 1)
        shown = _bernoulli(drawn.exposure(rows, holder[rows]), chances)
        visible[rows] = np.logical_and.accumulate(shown, 1)
        cost = np.maximum(price, reserve)
        sold = cost > reserve
        exposed = visible & sold
        owed = np.bincount(holder[exposed], cost[exposed], N)
        rows = _withdraw_unpaid(bids, np.where(sold, holder, -1), owed, remaining, drawn)
        if not len(rows):
            break
        rounds += 1

    cells = np.nonzero(exposed)
    owner = holder[cells]  # (m,)
    opportunity = cells[0], owner
    errors, u = drawn.conversion(values, sigmas, noise, cells, owner)
    chance = realised_value(errors, values[opportunity], sigmas[opportunity], noise[owner])
    converted = np.zeros((n, K), bool)
    converted[cells] = _bernoulli(u, chance)
    market_price = cost[:, -1].copy()
    return bids, Outcome(
        advertisers=N,
        holder=holder,
        sold=sold,
        cost=cost,
        exposed=exposed,
        converted=converted,
        market_price=market_price,
        rounds=rounds,
    )


def realised_value(
    u: np.ndarray,
    value: np.ndarray,
    sigma: np.ndarray,
    noise: np.ndarray,
) -> np.ndarray:
    """Conversion probabilities value + sigma z, z by the inverse distribution function from u.

    All (m,), noise (m, 2).
    """
    low = ndtr(-2 * noise[..., 0])
    high = ndtr(2 * noise[..., 1])
    z = ndtri(low + u * (high - low))
    return np.asarray(np.clip(value + sigma * z, 0, 1))


def _withdraw_unpaid(
    bids: np.ndarray, winner: np.ndarray, owed: np.ndarray, remaining: np.ndarray, drawn: Draws
) -> np.ndarray:
    """Set winning bids at random to 0, the share of an advertiser's that it can't pay.

    Args:
        bids: (n, N) currency, changed in place.
        winner: (n, K) of each slot; -1: not sold.
        owed, remaining: (N,) currency.
        drawn: the random numbers.

    Returns:
        The auctions (r,) that have lost a bid, each once.
    """
    touched = [np.empty(0, np.intp)]
    for i in np.flatnonzero(owed > remaining):
        share = (owed[i] - remaining[i]) / (owed[i] + 1e-4)
        for slot in winner.T:
            won = np.flatnonzero(slot == i)
            if len(won):
                lost = drawn.draw_withdrawals(won, math.ceil(len(won) * share))
                bids[lost, i] = 0
                touched.append(lost)
    return np.unique(np.concatenate(touched))


def _rank_bids(bids: np.ndarray, K: int) -> tuple[np.ndarray, np.ndarray]:
    """The K highest bidders and the bid below each: (n, N) -> (n, K) int, (n, K).

    Equal bids keep the order of the advertisers.
    """
    left = bids.copy()
    rows = np.arange(len(bids))
    holder = np.empty((len(bids), K + 1), np.intp)
    bid = np.empty((len(bids), K + 1))
    for k in range(K + 1):
        holder[:, k] = left.argmax(1)
        bid[:, k] = left[rows, holder[:, k]]
        left[rows, holder[:, k]] = -1
    return holder[:, :K], bid[:, 1:]


def _bernoulli(u: np.ndarray, p: np.ndarray) -> np.ndarray:
    """NumPy's binomial(1, p) for the uniform u."""
    return np.where(p > 0.5, u <= p, u > 1 - p)
