"""The advertising market: opportunities to show an ad, N advertisers who bid for them, slots, prices, outcomes; one period at a time.

A period is a day of 48 steps. All opportunities of a step are auctioned at once; an advertiser bids its multiplier times the value
(predicted conversion probability) of each. Letters: T steps, N advertisers, n opportunities of a step, K slots.
Facts and constants: AuctionNet (arXiv 2412.10798), `simul_bidding_env`; what ships in `auctionnet/` is told in its README.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri

from decisionllm.envs.auction.campaign import STEPS, Campaigns, score

DATA = Path(__file__).parent / "auctionnet"
PUBLISHED = json.loads((DATA / "constants.json").read_text())
MEAN_VALUE = 0.0005  # conversions an exposure


def industries(advertisers):
    """The industry of each advertiser, six blocks of neighbours: 48 -> 0 eight times, 1 eight times, ...  (N,) int"""
    return np.arange(advertisers) * PUBLISHED["categories"] // advertisers


def opportunities(period, *, total=PUBLISHED["opportunities"], advertisers=48, scale=1.0):
    """The published traffic of a period: for each of 48 steps its values and their standard deviations, (n, N) float64 each.

    total: about how many opportunities the period has. scale: of the mean value; 12 comes near the dense regime.
    A period is wholly decided by its number and these sizes. Source: AuctionNet, `NeurIPSPvGen`.
    """
    if period < 0 or total < 1 or advertisers < 1:
        raise ValueError(
            f"opportunities: expected a period from 0, total and advertisers from 1, got {period}, {total}, {advertisers}"
        )
    clock, N = np.array(PUBLISHED["clock"]), advertisers
    flow = _blocks(period, 4, 0.6, 1.4)
    counts = np.floor(total * (clock * flow * (clock.sum() / (clock * flow).sum()))).astype(int)

    category = industries(N)
    # 1 - 0.7 is not 0.3 to the last bit, and the original's bits are wanted
    factors = np.stack([_blocks(11111 * period + k, 8, 1 - 0.7, 1 + 0.7) for k in range(PUBLISHED["categories"])])[category]
    for i in range(1, N):
        if category[i] == category[i - 1]:  # the first of a category is the category
            factors[i] *= _blocks(11111 * period + i, 8, 0.5, 1.5)
    mean = scale * MEAN_VALUE * factors  # (N, T)

    rng = np.random.default_rng(period)
    spread = _repair(rng.normal(0.5, 0.1, N), below=0.1, above=1)
    spread = _repair(rng.normal(spread[:, None], 0.2 * spread[:, None], (N, STEPS)), below=0.1, above=1) * mean
    doubt = np.abs(np.random.default_rng(period).normal(0.15, 0.06, N))  # standard deviation of a value, as a share of it
    doubt = np.where(doubt > 0.3, 0.2, doubt)

    rng = np.random.default_rng(period)
    for t, n in enumerate(counts):
        values = rng.standard_normal((n, N))
        values *= spread[:, t]
        values += mean[:, t]
        np.clip(values, 0, 1, out=values)
        sigmas = np.random.default_rng(120000 * period + t).standard_normal((n, N))
        sigmas *= doubt / 2
        sigmas += doubt
        np.minimum(np.abs(sigmas, out=sigmas), 0.3, out=sigmas)
        sigmas *= values
        yield values, sigmas


def _blocks(seed, width, low, high):
    """Uniform draws, each held for `width` steps: (T,)"""
    return np.repeat(np.random.default_rng(seed).uniform(low, high, STEPS // width), width)


def _repair(x, *, below, above):
    return np.where(x < 0, below, np.where(x > 1, above, x))


def noise(period, advertisers=48):
    """How far an exposure's real value may lie from its predicted one: (N, 2) float64, v1 and v2; the error, in standard deviations,
    is a normal one cut to [-2 v1, 2 v2].

    Periods 0-29 of the 48 published advertisers are AuctionNet's own table; all others are uniform in [0, 1) as those are, from a seed
    of our own, the period's number.
    """
    table = np.load(DATA / "noise.npy")
    if advertisers == table.shape[1] and 0 <= period < len(table):
        return table[period]
    return np.random.default_rng([1019, period]).random((advertisers, 2))


@dataclass(frozen=True)
class Outcome:
    """What n auctions of K slots brought, best slot first. The dense views have a column an advertiser and are made when asked for."""

    advertisers: int
    holder: np.ndarray  # (n, K) int: who holds the slot, where it is sold
    sold: np.ndarray  # (n, K) bool
    cost: np.ndarray  # (n, K) currency: the price of the slot, owed if it is shown
    shown: np.ndarray  # (n, K) bool: sold and exposed
    acted: np.ndarray  # (n, K) bool: shown and converted
    market_price: np.ndarray  # (n,) currency: the least bid that would have won a slot
    rounds: int  # 1 and how often bids were taken back

    def _dense(self, what, where):
        made = np.zeros((len(self.holder), self.advertisers), what.dtype)
        row, slot = np.nonzero(where)
        made[row, self.holder[row, slot]] = what[row, slot]
        return made

    @property
    def won(self):
        """(n, N) bool: holds a slot, shown or not"""
        return self._dense(self.sold, self.sold)

    @property
    def slot(self):
        """(n, N) int: 1 is the best, 0 is none"""
        return self._dense(np.broadcast_to(np.arange(1, self.sold.shape[1] + 1), self.sold.shape), self.sold)

    @property
    def price(self):
        """(n, N) currency; of slots that were not shown too"""
        return self._dense(self.cost, self.sold)

    @property
    def exposed(self):
        """(n, N) bool"""
        return self._dense(self.shown, self.shown)

    @property
    def converted(self):
        """(n, N) bool"""
        return self._dense(self.acted, self.acted)

    def per_advertiser(self, where, weights=None):
        """Sum over slots: (n, K) bool, and weights (n, K) -> (N,) float64"""
        weights = None if weights is None else weights[where]
        return np.bincount(self.holder[where], weights, self.advertisers).astype(np.float64)


def auction(bids, values, sigmas, noise, **rules):
    """One auction an opportunity, budgets aside: bids, values, sigmas (n, N), noise (N, 2) -> Outcome. Rules as in `settle`."""
    return settle(bids, values, sigmas, noise, np.full(np.shape(bids)[1], np.inf), **rules)[1]


def settle(
    bids, values, sigmas, noise, remaining, *, reserve=PUBLISHED["reserve"], exposure=tuple(PUBLISHED["exposure"]),
    streams="independent", seed=0,
):  # fmt: skip
    """Auction, and while somebody owes more than it has left, take back bids at random and auction again.

    bids (n, N), currency, negative ones count as 0; remaining (N,), currency -> the bids that were left (n, N), Outcome.
    The K highest bids get the slots, each at the next bid or the reserve. A slot whose price is the reserve is not sold. Slot k is exposed
    with probability `exposure[k]` where the slot above it was: 1, 0.8, 0.6 means 1, 0.8, 0.48. Who is shown converts with
    probability value + sigma z, z from the cut normal of `noise`.
    streams: `independent` draws from default_rng(seed); `original` reads AuctionNet's one fixed sequence, from its start for
    exposure, for z and for conversions alike.
    """
    if streams not in ("independent", "original"):
        raise ValueError(f"streams: expected independent or original, got {streams!r}")
    n, N = np.shape(values)
    for name, x, shape in (
        ("bids", bids, (n, N)), ("sigmas", sigmas, (n, N)), ("noise", noise, (N, 2)), ("remaining", remaining, (N,)),
    ):  # fmt: skip
        if np.shape(x) != shape:
            raise ValueError(f"{name}: expected {shape} as values are {(n, N)}, got {np.shape(x)}")
    bids = np.maximum(bids, 0.0)  # a copy
    K, rows, rounds = len(exposure), np.arange(n), 1
    original = streams == "original"
    rng = np.random.default_rng(seed)
    fixed = _fixed_uniforms((n * max(N, K)).bit_length()) if original else None
    chance = None if original else rng.random((3, n, K))  # of exposure, z, conversion: whoever holds the slot
    holder, price, shown = np.empty((n, K), np.intp), np.empty((n, K)), np.empty((n, K), bool)
    while True:
        holder[rows], price[rows] = _rank(bids[rows], K)
        # the original gives each row's ads their uniforms in the order of the advertisers
        u = fixed[K * rows[:, None] + holder[rows].argsort(1).argsort(1)] if original else chance[0, rows]
        shown[rows] = np.logical_and.accumulate(_bernoulli(u, np.asarray(exposure, np.float64)), 1)
        cost = np.maximum(price, reserve)
        sold = cost > reserve
        billed = shown & sold
        owed = np.bincount(holder[billed], cost[billed], N)
        short = np.flatnonzero(owed > remaining)
        if not len(short):
            break
        touched = []
        for i in short:
            share = (owed[i] - remaining[i]) / (owed[i] + 1e-4)
            for k in range(K):
                mine = np.flatnonzero(sold[:, k] & (holder[:, k] == i))
                if len(mine):
                    draw = np.random.default_rng(1) if original else rng
                    touched.append(draw.choice(mine, int(np.ceil(len(mine) * share)), replace=False))
                    bids[touched[-1], i] = 0
        rows, rounds = np.unique(np.concatenate(touched)), rounds + 1

    cells = np.nonzero(billed)
    at = cells[0], holder[cells]
    u = _aligned(fixed, values, sigmas, noise, at) if original else chance[1:, *cells]
    acted = np.zeros((n, K), bool)
    acted[cells] = _bernoulli(u[1], _real_value(u[0], values[at], sigmas[at], noise[at[1]]))
    return bids, Outcome(N, holder, sold, cost, billed, acted, cost[:, -1].copy(), rounds)


@dataclass(frozen=True)
class Seats:
    """What a bidder is told beside the sixteen numbers of the M advertisers it bids for."""

    step: int
    categories: np.ndarray  # (M,) int
    budgets: np.ndarray  # (M,) currency
    target_cpa: np.ndarray  # (M,) currency a conversion
    remaining: np.ndarray  # (M,) currency
    conversions: np.ndarray  # (M,) so far
    values: np.ndarray  # (n, M)


@dataclass(frozen=True)
class Step:
    """What a step was for N advertisers; a Period has the same names with T in front."""

    states: np.ndarray  # (N, 16) as observed before it
    remaining: np.ndarray  # (N,) currency, before it
    done: np.ndarray  # (N,) bool: too little was left before it, or it is the last
    asked: np.ndarray  # (N,) bid multiplier as the bidder chose it; 0 where too little was left
    multipliers: np.ndarray  # (N,) sum of bids / sum of values after bids were taken back: the action of AuctionNet's logs
    volume: int  # opportunities
    means: np.ndarray  # (5, N) over the opportunities, in the order of campaign.MEANS
    won: np.ndarray  # (N,) slots held, shown or not
    exposed: np.ndarray  # (N,) ads shown
    conversions: np.ndarray  # (N,)
    spend: np.ndarray  # (N,) currency
    exposed_value: np.ndarray  # (N,) sum of the values of what was shown
    market_prices: np.ndarray | None = None  # (n,) currency


@dataclass(frozen=True)
class Period:
    """A period of N advertisers as it went: fields as in Step, with T in front. `market_prices` is a list, an array a step."""

    period: int
    categories: np.ndarray  # (N,) int
    budgets: np.ndarray  # (N,) currency
    target_cpa: np.ndarray  # (N,) currency a conversion
    states: np.ndarray
    remaining: np.ndarray
    done: np.ndarray
    asked: np.ndarray
    multipliers: np.ndarray
    volume: np.ndarray
    means: np.ndarray
    won: np.ndarray
    exposed: np.ndarray
    conversions: np.ndarray
    spend: np.ndarray
    exposed_value: np.ndarray
    market_prices: list | None = None

    def score(self):
        """(N,) conversions, less where they cost more than the target"""
        return score(self.conversions.sum(0), self.spend.sum(0), self.target_cpa)


class Market:
    """One period of N advertisers, step by step.

    roster: pairs of positions and the bidder that plays them, where a later pair takes a position from an earlier one. `step()` lets it
    bid; `step(multipliers, positions)` puts somebody else in these positions for once.
    budgets, target_cpa, categories: (N,), by default the 48 published ones; budget_factor: a number, or one an advertiser.
    traffic: period -> 48 times (values, sigmas), like `opportunities`; noise: period, N -> (N, 2); settle: as the function. All may be
    anybody's, and so may sizes: `traffic=partial(opportunities, total=5000, advertisers=3)`.
    features: what `observe` shows. A bidder with an attribute of this name is shown that instead.
    seed: of the independent streams; a step's draws depend on seed, period and step alone.
    """

    def __init__(
        self, roster=(), *, budgets=PUBLISHED["budgets"], target_cpa=PUBLISHED["target_cpa"], categories=None, budget_factor=1.0,
        traffic: Callable[[int], Iterable] = opportunities, noise=noise, features="repaired", streams="independent", seed=0,
        reserve=PUBLISHED["reserve"], exposure=tuple(PUBLISHED["exposure"]), least_remaining=PUBLISHED["least_remaining"],
        settle=settle,
    ):  # fmt: skip
        self.budgets = np.array(budgets, np.float64) * budget_factor
        self.target_cpa = np.array(target_cpa, np.float64)
        N = len(self.budgets)
        self.categories = industries(N) if categories is None else np.array(categories)
        for name, given in (("target_cpa", self.target_cpa), ("categories", self.categories)):
            if given.shape != (N,):
                raise ValueError(f"{name}: expected one an advertiser, {N} as budgets has, got shape {given.shape}")
        self.roster = [(np.atleast_1d(positions), bidder) for positions, bidder in roster]
        self.traffic, self.noise, self.features, self.least_remaining = traffic, noise, features, least_remaining
        self.settle = partial(settle, streams=streams, reserve=reserve, exposure=exposure)
        self.seed = seed

    def reset(self, period):
        """Begin a period: what is observed before its first step, (N, 16)."""
        self.period = period
        self.campaigns = Campaigns(self.budgets, self.target_cpa, features=self.features)
        for _, bidder in self.roster:
            if hasattr(bidder, "reset"):
                bidder.reset()
        self._errors = self.noise(period, len(self.budgets))
        self._traffic = iter(self.traffic(period))
        self._next()
        return self.observe()

    def _next(self):
        now, N = self.campaigns.now, len(self.budgets)
        self.values, self.sigmas = next(self._traffic, (None, None))
        if self.values is None:
            raise ValueError(f"traffic: expected {STEPS} steps, period {self.period} has {now}")
        if self.values.shape[1] != N:
            raise ValueError(f"traffic: expected values for {N} advertisers, got {self.values.shape[1]} in step {now}")
        self._shown = {}
        self._value = self.values.sum(0) / max(len(self.values), 1)
        if not np.isfinite(self._value).all():
            raise ValueError(f"traffic: step {now} of period {self.period} holds values that are no numbers")

    @property
    def ended(self):
        return self.campaigns.now == STEPS

    def observe(self, features=None):
        """(N, 16) float64, the states before the step that is due"""
        features = features or self.features
        if features not in self._shown:
            self._shown[features] = self.campaigns.observe(self._value, len(self.values), features=features)
        return self._shown[features]

    def seats(self, positions=slice(None)):
        """What bidders are told beside the states, of these positions."""
        c = self.campaigns
        return Seats(
            c.now, self.categories[positions], c.budgets[positions], c.target_cpa[positions], c.remaining[positions],
            c.conversions[positions], self.values[:, positions],
        )  # fmt: skip

    def _bids(self, multipliers, positions):
        """-> multipliers (N,) as they were chosen, bids (n, N)"""
        N = len(self.budgets)
        asked, whole = np.full(N, np.nan), {}
        taken = set() if multipliers is None else set(np.arange(N)[positions].tolist())
        for own, bidder in self.roster:
            if taken.issuperset(own.tolist()):
                continue
            made = np.asarray(bidder.act(self.observe(getattr(bidder, "features", None))[own], self.seats(own)), np.float64)
            whole = {i: bids for i, bids in whole.items() if i not in own}
            if made.ndim == 2:
                whole |= dict(zip(own.tolist(), made.T, strict=True))
                made = made.sum(0) / np.maximum(self.values[:, own].sum(0), 1e-300)
            asked[own] = made
        if multipliers is not None:
            asked[positions] = multipliers
        if not np.isfinite(asked).all():
            i = int(np.argmin(np.isfinite(asked)))
            raise ValueError(
                f"step {self.campaigns.now}: expected a multiplier for every advertiser, got {asked[i]} for {i}; "
                "give one, or put a bidder in its position in the roster"
            )
        asked[self.campaigns.remaining < self.least_remaining] = 0
        bids = self.values * asked
        for i, column in whole.items():
            if i not in taken and asked[i]:
                bids[:, i] = column
        return asked, bids

    def step(self, multipliers=None, positions=slice(None)):
        """Bid, auction, settle, record: multipliers (M,) for these positions, the roster for the rest -> Step"""
        if self.ended:
            raise ValueError("step: the period is over; reset the market to begin one")
        c, values = self.campaigns, self.values
        states, remaining, last = self.observe(), c.remaining, c.now == STEPS - 1
        asked, bids = self._bids(multipliers, positions)
        seed = [self.seed, self.period, c.now]
        bids, outcome = self.settle(bids, values, self.sigmas, self._errors, remaining, seed=seed)
        n = max(len(values), 1)
        total, offered = bids.sum(0), self._value * n
        won, exposed = outcome.per_advertiser(outcome.sold), outcome.per_advertiser(outcome.shown)
        made = {
            "spend": outcome.per_advertiser(outcome.shown, outcome.cost),
            "conversions": outcome.per_advertiser(outcome.acted),
            "exposed_value": outcome.per_advertiser(outcome.shown, np.take_along_axis(values, outcome.holder, 1)),
        }
        c.record(
            bid=total / n, market_price=outcome.market_price.sum() / n, value=self._value, conversion=made["conversions"] / n,
            won=won / n, volume=len(values), **made,
        )  # fmt: skip
        if not last:
            self._next()
        return Step(
            states=states, remaining=remaining, done=last | (remaining < self.least_remaining), asked=asked,
            multipliers=np.divide(total, offered, out=np.zeros_like(total), where=offered > 0), volume=len(values),
            means=c.means[c.now - 1], won=won, exposed=exposed, market_prices=outcome.market_price, **made,
        )  # fmt: skip


def play(roster, period, *, market_prices=False, **options):
    """A whole period of a roster, with the options of Market -> Period. market_prices: keep that of every opportunity."""
    market = Market(roster, **options)
    market.reset(period)
    steps, prices = [], []
    while not market.ended:
        step = market.step()
        prices.append(step.market_prices)
        steps.append({name: x for name, x in vars(step).items() if name != "market_prices"})
        if not market_prices:
            prices.clear()
    stacked = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
    who = {"categories": market.categories, "budgets": market.budgets, "target_cpa": market.target_cpa}
    return Period(period, market_prices=prices if market_prices else None, **who, **stacked)


def _rank(bids, K):
    """Who bids most, and the bid below each: (n, N) -> (n, K) int, (n, K). Equal bids keep the order of the advertisers."""
    left, rows = bids.copy(), np.arange(len(bids))
    holder, bid = np.empty((len(bids), K + 1), np.intp), np.empty((len(bids), K + 1))
    for k in range(K + 1):
        holder[:, k] = left.argmax(1)
        bid[:, k] = left[rows, holder[:, k]]
        left[rows, holder[:, k]] = -1
    return holder[:, :K], bid[:, 1:]


def _bernoulli(u, p):
    """What NumPy's binomial(1, p) makes of its uniform."""
    return np.where(p > 0.5, u <= p, u > 1 - p)


def _real_value(u, value, sigma, noise):
    """The value of an exposure as it turns out: value + sigma z, z by inverse distribution function from u, all (m,), noise (m, 2)."""
    low, high = ndtr(-2 * noise[..., 0]), ndtr(2 * noise[..., 1])
    return np.clip(value + sigma * ndtri(low + u * (high - low)), 0, 1)


def _aligned(fixed, values, sigmas, noise, at):
    """The two uniforms that AuctionNet gives a cell: z takes the cell's own, the conversion that of the cell's place among those with a
    real value above 0, because binomial takes none where p is 0. -> (2, m)"""
    possible = values > 2.001 * noise[:, 0] * sigmas  # z is at least -2 v1
    doubtful = np.nonzero(~possible & (sigmas > 0))
    cell = np.ravel_multi_index(doubtful, values.shape)
    possible[doubtful] = _real_value(fixed[cell], values[doubtful], sigmas[doubtful], noise[doubtful[1]]) > 0
    place = np.cumsum(possible, dtype=np.int32)
    cell = np.ravel_multi_index(at, values.shape)
    return np.stack([fixed[cell], fixed[np.maximum(place[cell] - 1, 0)]])


@lru_cache(4)
def _fixed_uniforms(bits):
    """The first 2^bits numbers of default_rng(1).random"""
    return np.random.default_rng(1).random(1 << bits)
