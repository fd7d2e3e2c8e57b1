"""Train a bidder on days of our own market, then let it bid there through AuctionNet's interface:
python examples/bid_in_auctionnet.py

`DecisionLLMBiddingStrategy` has the constructor and the `bidding(...)` of AuctionNet's
`BaseBiddingStrategy`, so that AuctionNet's own simulator takes it as its player too. Here `Player`
calls it as that simulator does, in the market of this package.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np

from decisionllm import TrainConfig, choice, train
from decisionllm.bidding.market.auctions import Outcome, settle
from decisionllm.bidding.market.bidders import roster
from decisionllm.bidding.market.campaigns import STEPS, score
from decisionllm.bidding.market.market import Bidder, BidderContext, Market
from decisionllm.bidding.market.traffic import opportunities
from decisionllm.bidding.server.auctionnet_strategy import DecisionLLMBiddingStrategy
from decisionllm.config import DataOptions, LogOptions


class Player(Bidder):
    """One strategy at one position of the market.

    It receives what AuctionNet's simulator gives its agents.
    """

    name = "decisionllm"

    def __init__(self, strategy: DecisionLLMBiddingStrategy, position: int) -> None:
        self.strategy, self.position = strategy, position
        self.market: Market | None = None  # set once the market exists
        # values, bids, slots, impressions, market prices
        self.histories: list[list[np.ndarray]] = [[], [], [], [], []]

    def reset(self) -> None:
        self.strategy.reset()
        self.histories = [[], [], [], [], []]

    def act(self, states: np.ndarray, context: BidderContext) -> np.ndarray:
        assert self.market is not None
        values, sigmas = self.market.values[:, self.position], self.market.sigmas[:, self.position]
        self.strategy.remaining_budget = float(context.remaining[0])
        bids = self.strategy.bidding(context.step, values, sigmas, *self.histories)
        return np.array([bids.sum() / values.sum()])  # the market takes multipliers

    def settle(
        self, bids: np.ndarray, values: np.ndarray, sigmas: np.ndarray, *rest: Any, **more: Any
    ) -> tuple[np.ndarray, Outcome]:
        """Run the auctions of a step, and record this position's part of them."""
        bids, outcome = settle(bids, values, sigmas, *rest, **more)
        own = (outcome.holder == self.position) & outcome.sold  # (n, K)
        won, slot = own.any(1), np.where(own.any(1), own.argmax(1) + 1, 0)
        slots = np.stack([won, slot, (outcome.cost * own).sum(1)], 1)
        impressions = np.stack(
            [(outcome.exposed & own).any(1), (outcome.converted & own).any(1)], 1
        )
        made = np.stack([values, sigmas], 2)[:, self.position]
        for history, step in zip(
            self.histories,
            (made, bids[:, self.position], slots, impressions, outcome.market_price),
            strict=True,
        ):
            history.append(step)
        return bids, outcome


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--periods", default="0-6", help="days of the market to train on")
    parser.add_argument("--steps", type=int, default=800, help="of training")
    parser.add_argument(
        "--position", type=int, default=8, help="of the 48 advertisers, in the market"
    )
    parser.add_argument("--period", type=int, default=20, help="the day to bid on")
    parser.add_argument("--opportunities", type=int, default=500_000, help="of that day")
    parser.add_argument("--run", default="runs/auction/example")
    options = parser.parse_args()

    run = train(
        TrainConfig(
            dataset=choice(
                "dataset",
                "auction",
                periods=options.periods,
                observation="minimal",
                context_features="budget_and_cpa",
                reward="expected_value",
                relabel=8,
            ),
            env=choice("env", "auction"),
            backbone=choice("backbone", "nano"),
            head=choice("head", "gaussian"),
            tokenizer=choice("tokenizer", "trajectory", timesteps="none", embedding="mlp"),
            objective=choice("objective", "max_return"),
            data=DataOptions(held_out=0.0),
            log=LogOptions(tracker="none"),
            window=1,
            steps=options.steps,
            run=options.run,
        )
    )

    market = Market(roster(), traffic=partial(opportunities, total=options.opportunities))
    budget, target_cpa = market.budgets[options.position], market.target_cpa[options.position]
    category = int(market.categories[options.position])
    strategy = DecisionLLMBiddingStrategy(budget, "decisionllm", target_cpa, category, run=run)
    player = Player(strategy, options.position)
    player.market = market
    market.settle = player.settle
    # in place of the bidder that had the position
    market.roster = [*market.roster, (np.array([options.position]), player)]
    market.reset(options.period)
    for _ in range(STEPS):
        market.step()
    campaigns, i = market.campaigns, options.position
    reached = score(campaigns.conversions, campaigns.spend, campaigns.target_cpa)
    print(
        f"advertiser {i}: budget {budget:.0f}, spent {campaigns.spend[i]:.0f}, "
        f"{campaigns.conversions[i]:.0f} conversions, "
        f"score {reached[i]:.1f}; mean score of the 47 others {np.delete(reached, i).mean():.1f}"
    )


if __name__ == "__main__":
    main()
