"""Bid shading in a first-price variant of our market: the same campaigns with and without it.

`python -m lab.shading` plays days of the market of 48 bidders with one slot an opportunity,
sold at the winner's own bid. One campaign is ours, at one of six positions, with a bidder that
chooses its multipliers, `target CPA` or `PID`. Like the server it bids at most target CPA x value.
The 47 others bid as ever. Three arms have the same days and draws:

- none: our bids are not shaded.
- outcome: they are, by notices that say won or lost.
- price: they are, by notices that also say the least price that would have won.

What is learned begins with the campaign and is used from the next step on. Prints for each budget,
bidder and arm the means over campaigns, and the differences to `none` with their 95 % bootstrap
intervals over campaigns; `--out` appends a row each. Conversions are counted by their expectation,
the value of the ads shown, so that they have no noise. The score is AuctionNet's, of these. Surplus
is target CPA x conversions - cost, as a share of the budget.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.bidding.market.advertisers import PUBLISHED
from decisionllm.bidding.market.auctions import Outcome, settle
from decisionllm.bidding.market.bidders import PID, TargetCPA, roster
from decisionllm.bidding.market.campaigns import STEPS, score
from decisionllm.bidding.market.market import Bidder, Market, Roster
from decisionllm.bidding.market.traffic import scaled_traffic
from decisionllm.bidding.market.win_curve import WinCurve, count_auctions, fit_win_curve
from decisionllm.eval.intervals import over_episodes

ARMS = ("none", "outcome", "price")
POSITIONS = (0, 8, 16, 24, 32, 40)  # one of each category
ONE_SLOT = (1.0,)  # always shown


class FirstPrice:
    """Runs the auctions of a step at first prices, and shades the bids of one advertiser.

    Args:
        position: of the advertiser.
        target_cpa: its own, currency per conversion.
        arm: one of ARMS.
    """

    def __init__(self, position: int, target_cpa: float, arm: str) -> None:
        self.position = position
        self.target_cpa = target_cpa
        self.arm = arm
        self.curve: WinCurve | None = None
        self.prices = np.zeros(0)  # (n,) bids so far, the next two beside them
        self.won = np.zeros(0, bool)
        self.least = np.zeros(0)

    def __call__(
        self,
        bids: np.ndarray,
        values: np.ndarray,
        sigmas: np.ndarray,
        noise: np.ndarray,
        remaining: np.ndarray,
        *,
        seed: Any,
    ) -> tuple[np.ndarray, Outcome]:
        """See `settle`."""
        own = self.position
        bids = np.maximum(bids, 0.0)
        worth = bids[:, own].copy()
        most = np.minimum(worth, self.target_cpa * values[:, own])
        bids[:, own] = most
        if self.curve is not None:
            floor = PUBLISHED["reserve"]
            pairs = zip(worth, most, strict=True)
            bids[:, own] = [self.curve.best_bid(w, most=m, floor=floor) for w, m in pairs]
        kept, outcome = settle(
            bids,
            values,
            sigmas,
            noise,
            remaining,
            exposure=ONE_SLOT,
            seed=seed,
            first_price=True,
        )
        if self.arm != "none":
            self.learn(kept, outcome)
        return kept, outcome

    def learn(self, bids: np.ndarray, outcome: Outcome) -> None:
        """Take the notices of a step: bids (n, N) that remained."""
        own = self.position
        won = (outcome.holder[:, 0] == own) & outcome.sold[:, 0]
        others = np.delete(bids, own, axis=1).max(1)
        least = np.maximum(others, PUBLISHED["reserve"])
        if self.arm == "outcome":
            least = np.full(len(won), np.nan)
        sent = bids[:, own] > 0
        self.prices = np.append(self.prices, bids[sent, own])
        self.won = np.append(self.won, won[sent])
        self.least = np.append(self.least, least[sent])
        self.curve = None
        if len(self.prices):
            self.curve = fit_win_curve(count_auctions(self.prices, self.won, self.least))


@dataclass(frozen=True)
class Campaign:
    """One campaign to be played."""

    period: int
    position: int
    seed: int
    budget_factor: float  # of the published budget


@dataclass(frozen=True)
class Played:
    """Return the totals of a campaign at its end."""

    score: float
    conversions: float  # expected
    spend: float  # share of the budget
    surplus: float  # share of the budget


@cache
def rivals() -> Roster:
    """The bidders of the other positions, read once; a market resets them."""
    return roster()


def play(bidder: Bidder, arm: str, campaign: Campaign, total: int) -> Played:
    """A day with this bidder in this campaign. total: opportunities of the day."""
    position = campaign.position
    target_cpa = float(PUBLISHED["target_cpa"][position])
    factors = np.ones(len(PUBLISHED["budgets"]))
    factors[position] = campaign.budget_factor
    market = Market(
        rivals(),
        budget_factor=factors,
        traffic=partial(scaled_traffic, total=total),
        settle=FirstPrice(position, target_cpa, arm),
        seed=campaign.seed,
    )
    market.reset(campaign.period)
    bidder.reset()
    spend = 0.0
    conversions = 0.0
    for _ in range(STEPS):
        state = market.observe(bidder.features)[[position]]
        multiplier = bidder.act(state, market.context([position]))
        step = market.step(np.asarray(multiplier), [position])
        spend += float(step.spend[position])
        conversions += float(step.exposed_value[position])
    budget = float(market.budgets[position])
    return Played(
        score=float(score(conversions, spend, target_cpa)),
        conversions=conversions,
        spend=spend / budget,
        surplus=(target_cpa * conversions - spend) / budget,
    )


def compare(
    budgets: Sequence[float],
    periods: Sequence[int],
    seeds: Sequence[int],
    total: int,
    positions: Sequence[int] = POSITIONS,
) -> Iterator[dict[str, Any]]:
    """A row for each budget, bidder and arm."""
    bidders: list[Bidder] = [TargetCPA(), PID()]
    for budget, bidder in product(budgets, bidders):
        campaigns = [Campaign(*each, budget) for each in product(periods, positions, seeds)]
        # the market's seeds repeat a campaign of a day
        case = np.repeat(np.arange(len(campaigns) // len(seeds)), len(seeds))
        plain: dict[str, np.ndarray] = {}
        for arm in ARMS:
            played = [asdict(play(bidder, arm, campaign, total)) for campaign in campaigns]
            found = {name: np.array([one[name] for one in played]) for name in played[0]}
            row: dict[str, Any] = {"budget": budget, "bidder": bidder.name, "arm": arm}
            row["n"] = len(campaigns)
            for name, values in found.items():
                row[name] = round(float(values.mean()), 4)
                if plain:
                    low, high = over_episodes(values - plain[name], case)
                    row[f"{name}_gain"] = [round(low, 4), round(high, 4)]
            plain = plain or found
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--periods", type=int, nargs="+", default=[7, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--total", type=int, default=3_000, help="opportunities of a day")
    parser.add_argument("--out", type=Path, help="rows are appended to it, as to shading.jsonl")
    arguments = parser.parse_args()
    known = {"periods": arguments.periods, "seeds": arguments.seeds, "total": arguments.total}
    for row in compare(arguments.budgets, arguments.periods, arguments.seeds, arguments.total):
        print(json.dumps(row), flush=True)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known | row) + "\n")


if __name__ == "__main__":
    main()
