"""Bidders for the market, rules and trained policies; each plays many advertisers at once: `act(states, seats)` -> bid multipliers.

states are (M, 16) as `Campaigns` shows them, seats what is told beside (auction.Seats); the answer is (M,), or (n, M) bids in currency of
a bidder that does not bid in proportion to value. A bidder that remembers has `reset`, called before each period; one with an attribute
`features` is shown these. Source of all but Constant and TargetCPA: AuctionNet (arXiv 2412.10798), `simul_bidding_env/strategy`.
"""

from dataclasses import dataclass

import numpy as np

from decisionllm.config import one_of
from decisionllm.envs.auction.campaign import STEPS
from decisionllm.envs.auction.market import DATA, PUBLISHED, industries


@dataclass(frozen=True)
class Constant:
    """The same multiplier for everyone at every step."""

    multiplier: float  # currency a conversion

    def act(self, states, seats):
        return np.full(len(states), self.multiplier)


class TargetCPA:
    """Bids what a conversion may cost."""

    def act(self, states, seats):
        return seats.target_cpa


class PID:
    """A pacer: raises its multiplier when the last step's spend, kept up, would leave budget over, and lowers it otherwise.

    memory: the `original` remembers, at its first adjustment, a budget from before the period, and so always begins 15, 18.
    """

    def __init__(self, *, memory="original"):
        if memory not in ("original", "repaired"):
            raise ValueError(f"memory: expected original or repaired, got {memory!r}")
        self.memory = memory

    def reset(self):
        self.multipliers = None

    def act(self, states, seats):
        if self.multipliers is None:
            self.multipliers = np.full(len(states), 15.0)
        else:
            spent = np.where(self.memory == "original" and seats.step == 1, 0, self.before - seats.remaining)
            pace = spent * (STEPS - seats.step) / np.maximum(seats.remaining, 1e-12)  # 1 ends with the period
            self.multipliers = self.multipliers * np.where(pace < 0.7, 1.2, np.where(pace > 1.1, 0.7, 1))
        self.before = seats.remaining
        return self.multipliers


class Abid:
    """Bids target CPA x value^2 / mean value: more than in proportion where the value is above the mean. -> (n, M) bids"""

    def act(self, states, seats):
        mean = seats.values.mean(0)
        return seats.values**2 * np.divide(seats.target_cpa, mean, out=np.zeros_like(mean), where=mean > 0)


@dataclass(frozen=True)
class Table:
    """What the market would ask: for each category and step, how much a conversion costs at most if so much is to be spent from here on.

    Rows first[c, t] to first[c, t + 1] belong to category c at step t; their costs rise.
    """

    cost: np.ndarray  # (rows,) currency that one advertiser spends from this step on
    ratio: np.ndarray  # (rows,) currency a conversion, the bid multiplier that spends it
    first: np.ndarray  # (categories, STEPS + 1) int


@dataclass(frozen=True)
class OnlineLP:
    """Looks up which multiplier would have spent what is left, in the log of another period; never above 1.5 x target CPA."""

    table: Table

    def act(self, states, seats):
        made = np.array(seats.target_cpa)  # where the log could not have taken the whole budget
        for i, (category, remaining) in enumerate(zip(seats.categories, seats.remaining, strict=True)):
            start, end = self.table.first[category, seats.step : seats.step + 2]
            row = start + np.searchsorted(self.table.cost[start:end], remaining, side="right")
            if row < end:
                made[i] = self.table.ratio[row]
        return np.minimum(made, 1.5 * seats.target_cpa)


def online_lp_table(values, market_prices, *, categories=None, limit=6000.0, spacing=10.0, seed=0):
    """A period's table for OnlineLP, from an array a step of values (n, N) and market prices (n,); two iterables of 48.

    A category's opportunities are sampled down to those of one advertiser, sorted by price / (value + 1e-4) and bought in this order,
    as far as `limit`; one row is kept for each `spacing` of cost, both currency. Without the 1e-4, a fifth of a mean
    value, ratios would be higher; the published rule has it.
    """
    rng, steps = np.random.default_rng(seed), []
    for value, price in zip(values, market_prices, strict=True):
        if len(price) != len(value):
            raise ValueError(f"market_prices: expected {len(value)} in step {len(steps)}, one an opportunity, got {len(price)}")
        N = value.shape[1]
        industry = industries(N) if categories is None else np.asarray(categories)
        sampled = rng.random(value.shape) < 1 / np.bincount(industry)[industry]
        row, who = np.nonzero(sampled & (value > 0) & (price[:, None] > PUBLISHED["reserve"]))
        steps.append((industry[who], price[row], price[row] / (value[row, who] + 1e-4)))
    if len(steps) != STEPS:
        raise ValueError(f"values: expected {STEPS} steps, got {len(steps)}")
    step = np.repeat(np.arange(STEPS), [len(price) for _, price, _ in steps])
    category, price, ratio = (np.concatenate(x) for x in zip(*steps, strict=True))
    cost, kept, first = [], [], [[0]]
    for c in range(category.max() + 1):
        own = np.flatnonzero(category == c)
        own = own[np.argsort(ratio[own])]
        when, what, at_ratio = step[own], price[own], ratio[own]
        for t in range(STEPS):
            still = when >= t
            when, what, at_ratio = when[still], what[still], at_ratio[still]
            paid = np.cumsum(what)
            paid = paid[: np.searchsorted(paid, limit)]
            at = np.searchsorted(paid, np.arange(spacing, limit, spacing))
            at = np.unique(at[at < len(paid)])
            cost.append(paid[at])
            kept.append(at_ratio[at])
            first[-1].append(first[-1][-1] + len(at))
        first.append([first[-1][-1]])
    return Table(np.concatenate(cost), np.concatenate(kept), np.array(first[:-1]))


class Policy:
    """A trained network of AuctionNet's: `name` is one of BC, IQL, CQL, TD3_BC, MOPO, COMBO. float32, as it was trained.

    features: what it is to be shown; all were published with `original`.
    """

    def __init__(self, name, *, features="original"):
        with np.load(DATA / "policies.npz") as file:
            names = sorted({key.partition("/")[0] for key in file if "/" in key})
            one_of("policy", name, names)
            depth = sum(key.startswith(f"{name}/") for key in file) // 2
            self.layers = [(file[f"{name}/{i}/weight"].T, file[f"{name}/{i}/bias"]) for i in range(depth)]
            self.low, self.high = file["volumes"].T  # of the last three numbers, in the training data
        self.name, self.features = name, features

    def act(self, states, seats=None):
        x = np.array(states, np.float64)
        x[:, 13:] = (x[:, 13:] - self.low) / (self.high - self.low)
        x = x.astype(np.float32)
        for i, (weight, bias) in enumerate(self.layers):
            x = x @ weight + bias
            if i < 2:
                x = np.maximum(x, 0)
        made = x[:, 0].astype(np.float64)
        if self.name in ("MOPO", "COMBO"):
            return 300 * np.tanh(made)
        return np.maximum(made, 0) if self.name in ("BC", "IQL") else made


def roster(name="reference", *, features="original", memory="original"):
    """The bidders of the 48 published advertisers: pairs of positions and their bidder, for Market.

    `reference` is AuctionNet's own market but for BCQ, whose weights are not to be had and which bids 95; what else was replaced is told in
    `auctionnet/README.md`. features, memory: of the policies and of PID.
    """
    if name != "reference":
        raise ValueError(f"roster: expected reference, got {name!r}")
    return _seated(_kinds(), features=features, memory=memory)


def mixture(name, period, *, seed=0):
    """Who bids in a period of a generated log: pairs of positions and their bidder, for Market.

    `reference`: the published seats, where an advertiser always bids alike. `dealt`: the same 48 bidders, dealt to other advertisers in
    each period, so that a bidder is seen with many budgets and limits. `held`: as dealt, but every second advertiser holds
    one multiplier all day, drawn evenly in its logarithm from 0.4 to 2 x the mean target CPA.
    """
    if name not in ("reference", "dealt", "held"):
        raise ValueError(f"behaviour: expected reference, dealt or held, got {name!r}")
    kinds, rng = _kinds(), np.random.default_rng((seed, period))
    if name == "reference":
        return _seated(kinds)
    seats = _seated([kinds[i] for i in rng.permutation(len(kinds))])
    if name == "held":
        mean = np.mean(PUBLISHED["target_cpa"])
        others = rng.permutation(len(kinds))[: len(kinds) // 2]
        seats += [([i], Constant(float(mean * np.exp(rng.uniform(np.log(0.4), np.log(2)))))) for i in others]
    return seats


def _kinds():
    return [kind for category in range(PUBLISHED["categories"]) for kind in PUBLISHED["roster"][category % 2]]


def _seated(kinds, *, features="original", memory="original"):
    with np.load(DATA / "online_lp.npz") as file:
        own, following = (Table(file["cost"], file["ratio"], first) for first in file["first"])
    rules = {"PID": PID(memory=memory), "BCQ": Constant(95.0)}
    rules |= {"OnlineLP, own table": OnlineLP(own), "OnlineLP, next table": OnlineLP(following)}
    bidders = {kind: rules.get(kind) or Policy(kind, features=features) for kind in dict.fromkeys(kinds)}
    return [([i for i, other in enumerate(kinds) if other == kind], bidder) for kind, bidder in bidders.items()]
