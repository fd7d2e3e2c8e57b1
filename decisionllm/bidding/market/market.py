"""The advertising market: N advertisers bid in one period, step by step.

A period is a day of 48 steps. All opportunities of a step are auctioned at once; an advertiser bids
its multiplier times the value (predicted conversion probability) of each. Letters: T steps, N
advertisers, M of them, n opportunities of a step, K slots. Facts and constants: AuctionNet (arXiv
2412.10798), `simul_bidding_env`; `published/README.md` lists the files that ship here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.bidding.market.advertisers import BUDGETS, TARGET_CPA, industries
from decisionllm.bidding.market.auctions import Outcome, settle
from decisionllm.bidding.market.campaigns import STEPS, Campaigns
from decisionllm.bidding.market.observation import MIN_REMAINING
from decisionllm.bidding.market.traffic import Traffic, noise, opportunities
from decisionllm.schema import Json

Positions = Sequence[int] | np.ndarray | slice
ALL = slice(None)


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
        """Return the context of the advertisers at these positions of N campaigns.

        categories: (N,) int.
        """
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
        self._error_bounds = noise(period, len(self.budgets))
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
        """Return the states before the next step, (N, 16) float64."""
        if features not in self._states:
            volume = len(self.values)
            states = self.campaigns.observe(self.mean_value, volume, features=features)
            self._states[features] = states
        return self._states[features]

    def context(self, positions: Positions = ALL) -> BidderContext:
        """Facts that the bidder of these positions receives beside the states."""
        return BidderContext.from_campaigns(self.campaigns, self.categories, positions)

    def choose(self, multipliers: np.ndarray | None, positions: Positions) -> np.ndarray:
        """Choose the multipliers (N,): the ones passed, the roster's elsewhere; 0 where the budget
        is used up.
        """
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
            self._error_bounds,
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
