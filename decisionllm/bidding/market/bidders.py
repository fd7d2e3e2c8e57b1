"""Bidders of the market: rules and AuctionNet's trained policies.

Source of all but Constant and TargetCPA: AuctionNet (arXiv 2412.10798),
`simul_bidding_env/strategy`.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from decisionllm.bidding.market.advertisers import CATEGORIES, DATA, PUBLISHED, TARGET_CPA
from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.bidding.market.market import Bidder, BidderContext, Roster
from decisionllm.checks import check_one_of

BEHAVIOURS = ("reference", "shuffled_bidders", "constant_bidders")


@dataclass(frozen=True)
class Constant(Bidder):
    """The same multiplier at every step, for all advertisers or one each."""

    multiplier: float | np.ndarray  # currency per conversion, or (M,)
    name = "Constant"

    def act(self, states: np.ndarray, context: BidderContext) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.multiplier, np.float64), len(states))


class TargetCPA(Bidder):
    """Bids the target CPA."""

    name = "target CPA"

    def act(self, states: np.ndarray, context: BidderContext) -> np.ndarray:
        return context.target_cpa


class PID(Bidder):
    """Raises its multiplier when the last step's spend, kept up, would leave budget unspent, and
    lowers it when it would overspend.

    It counts no spend at its first adjustment, as AuctionNet's: the multipliers begin with 15, 18.
    """

    name = "PID"

    def reset(self) -> None:
        self.multipliers: np.ndarray | None = None
        self.before = np.zeros(0)  # remaining budgets at the last step

    def act(self, states: np.ndarray, context: BidderContext) -> np.ndarray:
        if self.multipliers is None:
            self.multipliers = np.full(len(states), 15.0)
        else:
            spent = np.zeros(len(states))
            if context.step > 1:
                spent = self.before - context.remaining
            # 1 ends with the period
            pace = spent * (STEPS - context.step) / np.maximum(context.remaining, 1e-12)
            factor = np.select([pace < 0.7, pace > 1.1], [1.2, 0.7], 1)
            self.multipliers = self.multipliers * factor
        self.before = context.remaining
        return self.multipliers


@dataclass(frozen=True)
class OnlineLP(Bidder):
    """Bids the multiplier that would have spent the remaining budget in another period's log, at
    most 1.5 x target CPA.

    Rows first[c, t] to first[c, t + 1] of the table belong to category c at step t; their costs
    rise.
    """

    cost: np.ndarray  # (rows,) currency that one advertiser spends from this step on
    ratio: np.ndarray  # (rows,) currency per conversion, the bid multiplier that spends it
    first: np.ndarray  # (categories, STEPS + 1) int
    name = "OnlineLP"

    def act(self, states: np.ndarray, context: BidderContext) -> np.ndarray:
        # the target CPA, unless the log could have taken the whole budget
        multipliers = np.array(context.target_cpa)
        campaigns = zip(context.categories, context.remaining, strict=True)
        for i, (category, remaining) in enumerate(campaigns):
            start, end = self.first[category, context.step : context.step + 2]
            row = start + np.searchsorted(self.cost[start:end], remaining, side="right")
            if row < end:
                multipliers[i] = self.ratio[row]
        return np.asarray(np.minimum(multipliers, 1.5 * context.target_cpa))


class TrainedBidder(Bidder):
    """A trained network of AuctionNet: BC, IQL, CQL, TD3_BC, MOPO or COMBO, in float32."""

    features = "original"

    def __init__(self, name: str) -> None:
        with np.load(DATA / "policies.npz") as file:
            names = {key.partition("/")[0] for key in file if "/" in key}
            check_one_of("policy", name, sorted(names))
            depth = sum(key.startswith(f"{name}/") for key in file) // 2
            self.layers = []
            for i in range(depth):
                layer = file[f"{name}/{i}/weight"].T, file[f"{name}/{i}/bias"]
                self.layers.append(layer)
            self.low, self.high = file["volumes"].T  # ranges of the last three numbers in training
        self.name = name

    def act(self, states: np.ndarray, context: BidderContext | None = None) -> np.ndarray:
        x = np.array(states, np.float64)
        x[:, 13:] = (x[:, 13:] - self.low) / (self.high - self.low)
        x = x.astype(np.float32)
        for i, (weight, bias) in enumerate(self.layers):
            x = x @ weight + bias
            if i < 2:
                x = np.maximum(x, 0)
        multipliers = x[:, 0].astype(np.float64)
        if self.name in ("MOPO", "COMBO"):
            return 300 * np.tanh(multipliers)
        if self.name in ("BC", "IQL"):
            return np.maximum(multipliers, 0)
        return multipliers


def roster() -> Roster:
    """The bidders of AuctionNet's 48 advertisers, see `published/README.md`.

    BCQ, whose weights are not published, bids 95.
    """
    return behaviour_roster("reference", 0)


def behaviour_roster(behaviour: str, period: int, *, seed: int = 0) -> Roster:
    """The bidders of a period of a generated log.

    Args:
        behaviour: `reference`, the published positions, where an advertiser has the same bidder in
            every period; `shuffled_bidders`, the same 48 bidders in other positions in each period,
            so that a bidder occurs with many budgets and target CPAs; `constant_bidders`, the same,
            and every second advertiser keeps one multiplier all day, log-uniform in 0.4 .. 2 x the
            mean target CPA.
        period: number of the period.
        seed: draws positions and multipliers.
    """
    check_one_of("behaviour", behaviour, BEHAVIOURS)
    kinds: list[str] = []  # the bidder in each of the 48 positions
    for category in range(CATEGORIES):
        kinds += PUBLISHED["roster"][category % 2]
    if behaviour == "reference":
        return _seat_bidders(kinds)
    rng = np.random.default_rng((seed, period))
    pairs = _seat_bidders([kinds[i] for i in rng.permutation(len(kinds))])
    if behaviour == "constant_bidders":
        mean = np.mean(TARGET_CPA)
        for i in rng.permutation(len(kinds))[: len(kinds) // 2]:
            factor = np.exp(rng.uniform(np.log(0.4), np.log(2)))
            pairs.append(([i], Constant(float(mean * factor))))
    return pairs


def _seat_bidders(kinds: list[str]) -> list[tuple[list[int], Bidder]]:
    """Positions and bidders, where position i has a bidder of the kind kinds[i]."""
    own, following = _load_online_lp()
    rules: dict[str, Bidder] = {
        "OnlineLP, own table": own,
        "OnlineLP, next table": following,
        "PID": PID(),
        "BCQ": Constant(95.0),
    }
    pairs = []
    for kind in dict.fromkeys(kinds):
        positions = [i for i, other in enumerate(kinds) if other == kind]
        pairs.append((positions, rules.get(kind) or TrainedBidder(kind)))
    return pairs


@cache
def _load_online_lp() -> list[OnlineLP]:
    """The published OnlineLP with its own table and with the next one; they have no state."""
    with np.load(DATA / "online_lp.npz") as file:
        cost, ratio = file["cost"], file["ratio"]
        return [OnlineLP(cost, ratio, first) for first in file["first"]]
