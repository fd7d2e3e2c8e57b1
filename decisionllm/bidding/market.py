"""The advertising market: opportunities to show an ad, bids of N advertisers, slots, prices,
conversions; one period at a time.

A period is a day of 48 steps. All opportunities of a step are auctioned at once; an advertiser bids
its multiplier times the value (predicted conversion probability) of each. Letters: T steps, N
advertisers, M of them, n opportunities of a step, K slots. Facts and constants: AuctionNet (arXiv
2412.10798), `simul_bidding_env`; `auctionnet/README.md` lists the files that ship here.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from decisionllm.bidding.campaign import STEPS, Campaigns
from decisionllm.bidding.observation import MIN_REMAINING
from decisionllm.schema import Json, Seed

DATA = Path(__file__).parent / "published"
PUBLISHED: Json = json.loads((DATA / "constants.json").read_text(encoding="utf-8"))
CATEGORIES: int = PUBLISHED["categories"]
BUDGETS = np.array(PUBLISHED["budgets"], float)  # of the 48 published advertisers, currency
TARGET_CPA = np.array(PUBLISHED["target_cpa"], float)  # theirs, currency per conversion
MEAN_VALUE = 0.0005  # conversions an exposure
# the values and their standard deviations of each step, (n, N) each
Traffic = Iterable[tuple[np.ndarray, np.ndarray]]
Positions = Sequence[int] | np.ndarray | slice
ALL = slice(None)


def industries(advertisers: int) -> np.ndarray:
    """The industry of each advertiser, (N,) int, six blocks of neighbours: 48 -> 0 eight
    times ...
    """
    return np.arange(advertisers) * CATEGORIES // advertisers


def opportunities(
    period: int,
    *,
    total: int = PUBLISHED["opportunities"],
    advertisers: int = 48,
    scale: float = 1.0,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The published traffic of a period. It depends on these four numbers alone.

    Args:
        period: its number, from 0.
        total: approximate number of opportunities of the period.
        advertisers: N.
        scale: factor of the mean value; 12 comes near AuctionNet's dense regime.

    Returns:
        For each of 48 steps the values and their standard deviations, (n, N) float64 each.

    Raises:
        ValueError: a number out of range.

    Source: AuctionNet, `NeurIPSPvGen`.
    """
    if period < 0 or total < 1 or advertisers < 1:
        raise ValueError(
            "opportunities: expected a period from 0, total and advertisers from 1,"
            f" got {period}, {total}, {advertisers}"
        )
    clock = np.array(PUBLISHED["clock"])
    flow = clock * _blocks(period, 4, 0.6, 1.4)
    counts = np.floor(total * (flow * (clock.sum() / flow.sum()))).astype(int)
    mean = scale * MEAN_VALUE * _value_factors(period, advertisers)  # (N, T)

    rng = np.random.default_rng(period)
    spread = _clip_to_unit(rng.normal(0.5, 0.1, advertisers))[:, None]
    spread = _clip_to_unit(rng.normal(spread, 0.2 * spread, (advertisers, STEPS))) * mean
    # standard deviation of a value, as a share of it
    doubt = np.abs(np.random.default_rng(period).normal(0.15, 0.06, advertisers))
    doubt = np.where(doubt > 0.3, 0.2, doubt)

    rng = np.random.default_rng(period)
    for t, n in enumerate(counts):
        values = rng.standard_normal((n, advertisers))
        values *= spread[:, t]
        values += mean[:, t]
        np.clip(values, 0, 1, out=values)
        sigmas = np.random.default_rng(120000 * period + t).standard_normal((n, advertisers))
        sigmas *= doubt / 2
        sigmas += doubt
        np.minimum(np.abs(sigmas, out=sigmas), 0.3, out=sigmas)
        sigmas *= values
        yield values, sigmas


def _value_factors(period: int, advertisers: int) -> np.ndarray:
    """How the mean value of each advertiser varies over a period: (N, T)."""
    category = industries(advertisers)
    # 1 - 0.7 is not 0.3 to the last bit; AuctionNet has 1 - 0.7
    low, high = 1 - 0.7, 1 + 0.7
    of_category = [_blocks(11111 * period + k, 8, low, high) for k in range(CATEGORIES)]
    factors: np.ndarray = np.stack(of_category)[category]
    for i in range(1, advertisers):
        if category[i] == category[i - 1]:  # the first of a category is the category
            factors[i] *= _blocks(11111 * period + i, 8, 0.5, 1.5)
    return factors


def scaled_traffic(period: int, total: int) -> Traffic:
    """The published traffic with fewer opportunities, each worth more.

    So budgets and target CPAs keep their meaning.
    """
    return opportunities(int(period), total=total, scale=PUBLISHED["opportunities"] / total)


def _blocks(seed: int, width: int, low: float, high: float) -> np.ndarray:
    """Uniform draws, each repeated for `width` steps: (T,)"""
    return np.repeat(np.random.default_rng(seed).uniform(low, high, STEPS // width), width)


def _clip_to_unit(x: np.ndarray) -> np.ndarray:
    """Numbers within 0 .. 1: a negative one becomes 0.1."""
    return np.where(x < 0, 0.1, np.minimum(x, 1))


def noise(period: int, advertisers: int = 48) -> np.ndarray:
    """Bounds of the value errors, (N, 2) float64: an error, in standard deviations, is normal and
    cut to [-2 v1, 2 v2].

    Periods 0-29 of the 48 published advertisers are AuctionNet's table; all others are uniform in
    [0, 1), seeded by the period.
    """
    table = np.load(DATA / "noise.npy")
    if advertisers == table.shape[1] and 0 <= period < len(table):
        return np.asarray(table[period])
    return np.random.default_rng([1019, period]).random((advertisers, 2))


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
        """`count` of these rows, each at most once."""
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


@dataclass(frozen=True)
class BidderContext:
    """Facts that a bidder receives beside the state numbers of its M advertisers."""

    step: int
    categories: np.ndarray  # (M,) int
    budgets: np.ndarray  # (M,) currency
    target_cpa: np.ndarray  # (M,) currency per conversion
    remaining: np.ndarray  # (M,) currency
    conversions: np.ndarray  # (M,) so far

    @classmethod
    def from_campaigns(
        cls, campaigns: Campaigns, categories: np.ndarray, positions: Positions = ALL
    ) -> "BidderContext":
        """That of the advertisers at these positions of N campaigns. categories: (N,) int."""
        return cls(
            step=campaigns.now,
            categories=categories[positions],
            budgets=campaigns.budgets[positions],
            target_cpa=campaigns.target_cpa[positions],
            remaining=campaigns.remaining[positions],
            conversions=campaigns.conversions[positions],
        )


class Bidder(Protocol):
    """Bids for M advertisers at once. Subclass it and write `act`; the other members have defaults.

    Attributes:
        name: in results.
        features: the state numbers it receives, see `Campaigns.observe`.
    """

    name: str = "bidder"
    features: str = "repaired"

    def reset(self) -> None:
        """Begin a period."""
        return None

    def act(self, states: np.ndarray, context: BidderContext) -> np.ndarray:
        """States (M, 16) -> bid multipliers (M,), currency per conversion."""
        ...


# positions and their bidder; a later pair takes a position from an earlier one
Roster = Sequence[tuple[int | Sequence[int] | np.ndarray, Bidder]]


@dataclass(frozen=True)
class MarketStep:
    """One step of N advertisers.

    `Market.play` returns the same fields with T in front; its market_prices is a list of T arrays.
    """

    states: np.ndarray  # (N, 16) before the step
    remaining: np.ndarray  # (N,) currency, before the step
    done: np.ndarray  # (N,) bool: too little was left before it, or it is the last
    # (N,) bid multiplier as the bidder chose it; 0 where too little was left
    chosen_multipliers: np.ndarray
    # (N,) sum of bids / sum of values after bids were withdrawn: the action of AuctionNet's logs
    multipliers: np.ndarray
    volume: int | np.ndarray  # opportunities
    means: np.ndarray  # (5, N) over the opportunities, in the order of campaign.MEANS
    won: np.ndarray  # (N,) slots held, exposed or not
    exposed: np.ndarray  # (N,) ads exposed
    conversions: np.ndarray  # (N,)
    spend: np.ndarray  # (N,) currency
    exposed_value: np.ndarray  # (N,) sum of the values of exposed ads
    market_prices: np.ndarray | list[np.ndarray]  # (n,) currency


class Market:
    """One period of N advertisers, step by step.

    `step()` lets the roster bid; `step(multipliers, positions)` sets the multipliers of these
    positions for this step.

    Args:
        roster: positions and their bidders.
        budgets: (N,) currency; by default those of the 48 published advertisers.
        target_cpa: (N,) currency per conversion.
        budget_factor: multiplies the budgets, one number or (N,).
        traffic: period -> 48 times (values, sigmas), like `opportunities`. Other sizes:
            `traffic=partial(opportunities, total=5000, advertisers=3)`.
        settle: runs the auctions of a step, like `settle`.
        seed: seeds the draws, which depend on seed, period and step alone.

    Raises:
        ValueError: sizes that do not agree, or traffic that is not finite or has fewer than 48
            steps.
    """

    def __init__(
        self,
        roster: Roster = (),
        *,
        budgets: ArrayLike = BUDGETS,
        target_cpa: ArrayLike = TARGET_CPA,
        budget_factor: float | np.ndarray = 1.0,
        traffic: Callable[[int], Traffic] = opportunities,
        settle: Callable[..., tuple[np.ndarray, Outcome]] = settle,
        seed: int = 0,
    ) -> None:
        self.budgets = np.array(budgets, np.float64) * budget_factor
        self.target_cpa = np.array(target_cpa, np.float64)
        N = len(self.budgets)
        if self.target_cpa.shape != (N,):
            raise ValueError(
                f"target_cpa: expected one an advertiser, {N} as budgets has,"
                f" got shape {self.target_cpa.shape}"
            )
        self.categories = industries(N)
        self.roster = [(np.atleast_1d(positions), bidder) for positions, bidder in roster]
        self.traffic = traffic
        self.settle = settle
        self.seed = seed

    def reset(self, period: int) -> np.ndarray:
        """Begin a period. Returns the states before its first step, (N, 16)."""
        self.period = period
        self.campaigns = Campaigns(self.budgets, self.target_cpa)
        for _, bidder in self.roster:
            bidder.reset()
        self._errors = noise(period, len(self.budgets))
        self._traffic = iter(self.traffic(period))
        self._next()
        return self.observe()

    def _next(self) -> None:
        """Receive the opportunities of the next step."""
        now = self.campaigns.now
        N = len(self.budgets)
        step = next(self._traffic, None)
        if step is None:
            raise ValueError(f"traffic: expected {STEPS} steps, period {self.period} has {now}")
        self.values, self.sigmas = step
        if self.values.shape[1] != N:
            got = f"got {self.values.shape[1]} in step {now}"
            raise ValueError(f"traffic: expected values for {N} advertisers, {got}")
        self._states: dict[str, np.ndarray] = {}
        self.mean_value = self.values.sum(0) / max(len(self.values), 1)  # (N,)
        if not np.isfinite(self.mean_value).all():
            where = f"step {now} of period {self.period}"
            raise ValueError(f"traffic: expected finite values, got others in {where}")

    @property
    def ended(self) -> bool:
        return self.campaigns.now == STEPS

    def observe(self, features: str = "repaired") -> np.ndarray:
        """(N, 16) float64, the states before the next step."""
        if features not in self._states:
            volume = len(self.values)
            states = self.campaigns.observe(self.mean_value, volume, features=features)
            self._states[features] = states
        return self._states[features]

    def context(self, positions: Positions = ALL) -> BidderContext:
        """Facts that the bidder of these positions receives beside the states."""
        return BidderContext.from_campaigns(self.campaigns, self.categories, positions)

    def choose(self, multipliers: np.ndarray | None, positions: Positions) -> np.ndarray:
        """(N,) multipliers: the given ones, the roster's elsewhere; 0 where too little is left."""
        c = self.campaigns
        all_multipliers = np.full(len(self.budgets), np.nan)
        is_set = np.zeros(len(self.budgets), bool)
        is_set[positions] = multipliers is not None
        for own, bidder in self.roster:
            if not is_set[own].all():
                all_multipliers[own] = bidder.act(
                    self.observe(bidder.features)[own], self.context(own)
                )
        if multipliers is not None:
            all_multipliers[positions] = multipliers
        if not np.isfinite(all_multipliers).all():
            i = int(np.argmin(np.isfinite(all_multipliers)))
            raise ValueError(
                f"step {c.now}: expected a multiplier for every advertiser, got"
                f" {all_multipliers[i]} for {i}; give one, or put a bidder in its position in the"
                " roster"
            )
        all_multipliers[c.remaining < MIN_REMAINING] = 0
        return all_multipliers

    def step(self, multipliers: np.ndarray | None = None, positions: Positions = ALL) -> MarketStep:
        """Bid, run the auctions, record.

        multipliers: (M,) of these positions; the roster bids for the rest.
        """
        if self.ended:
            raise ValueError("step: the period is over; reset the market to begin one")
        c = self.campaigns
        values = self.values
        volume = len(values)
        states = self.observe()
        remaining = c.remaining
        last = c.now == STEPS - 1
        chosen_multipliers = self.choose(multipliers, positions)
        bids, outcome = self.settle(
            values * chosen_multipliers,
            values,
            self.sigmas,
            self._translate_errors,
            remaining,
            seed=[self.seed, self.period, c.now],
        )
        n = max(volume, 1)
        total = bids.sum(0)
        offered = self.mean_value * n
        won = outcome.sum_by_advertiser(outcome.sold)
        conversions = outcome.sum_by_advertiser(outcome.converted)
        bought = np.take_along_axis(values, outcome.holder, 1)  # (n, K)
        totals = {
            "spend": outcome.sum_by_advertiser(outcome.exposed, outcome.cost),
            "conversions": conversions,
            "exposed_value": outcome.sum_by_advertiser(outcome.exposed, bought),
        }
        c.record(
            bid=total / n,
            market_price=outcome.market_price.sum() / n,
            value=self.mean_value,
            conversion=conversions / n,
            won=won / n,
            volume=volume,
            **totals,
        )
        if not last:
            self._next()
        return MarketStep(
            states=states,
            remaining=remaining,
            done=last | (remaining < MIN_REMAINING),
            chosen_multipliers=chosen_multipliers,
            multipliers=np.divide(total, offered, out=np.zeros_like(total), where=offered > 0),
            volume=volume,
            means=c.means[c.now - 1],
            won=won,
            exposed=outcome.sum_by_advertiser(outcome.exposed),
            market_prices=outcome.market_price,
            **totals,
        )

    def play(self, period: int) -> MarketStep:
        """A whole period of the roster, with T in front of every field."""
        self.reset(period)
        steps = [self.step() for _ in range(STEPS)]
        columns: Json = {}
        for field in fields(MarketStep):
            columns[field.name] = [vars(step)[field.name] for step in steps]
            if field.name != "market_prices":
                columns[field.name] = np.stack(columns[field.name])
        return MarketStep(**columns)
