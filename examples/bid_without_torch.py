"""An exported bidder plays one day on onnxruntime alone: python examples/bid_without_torch.py
runs/auction/nano-0/onnx

First export a run: decisionllm export run=runs/auction/nano-0. Neither torch nor transformers is
imported here. A step is called as AuctionNet's simulator calls its agents: values of the coming
opportunities in, a bid for each out, the results with the next step.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.bidding.server.auctionnet_strategy import DecisionLLMBiddingStrategy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", help="folder that `decisionllm export` wrote")
    parser.add_argument("--budget", type=float, default=2900.0, help="currency, of the day")
    parser.add_argument("--target-cpa", type=float, default=100.0, help="currency per conversion")
    parser.add_argument("--opportunities", type=int, default=480_000, help="of the day")
    options = parser.parse_args()
    about = json.loads((Path(options.policy) / "policy.json").read_text(encoding="utf-8"))
    print(f"policy {about['run']}, trained on {about['dataset']['name']}")

    strategy = DecisionLLMBiddingStrategy(
        options.budget, "ours", options.target_cpa, category=0, run=options.policy
    )
    rng, n = np.random.default_rng(0), options.opportunities // STEPS
    # values, bids, slots, impressions, market prices
    history: list[list[np.ndarray]] = [[], [], [], [], []]
    spend = conversions = 0.0
    for step in range(STEPS):
        values = rng.lognormal(-7.8, 0.5, n).clip(max=1)  # predicted conversion probabilities
        # lowest winning bids, currency
        sigmas, prices = 0.1 * values, 100 * values * rng.lognormal(0, 0.6, n)
        bids = strategy.bidding(step, values, sigmas, *history)

        won = bids >= prices
        won &= np.cumsum(prices * won) <= strategy.remaining_budget
        converted = won & (rng.random(n) < values)
        slots = np.stack([won, won, prices * won], 1)  # whether a slot was won, which, its price
        impressions = np.stack([won, converted], 1)  # every ad that won is exposed
        strategy.remaining_budget -= float((prices * won).sum())
        spend, conversions = spend + float((prices * won).sum()), conversions + int(converted.sum())
        for each, made in zip(
            history, (np.stack([values, sigmas], 1), bids, slots, impressions, prices), strict=True
        ):
            each.append(made)
        if step % 8 == 7:
            print(
                f"step {step + 1:2d}: multiplier {bids.sum() / values.sum():6.1f}, spent "
                f"{spend:7.1f}, {conversions:.0f} conversions"
            )
    cost = (
        f"{spend / conversions:.0f} each (target {options.target_cpa:.0f})"
        if conversions
        else "none"
    )
    print(f"{spend:.0f} of {options.budget:.0f} spent, {conversions:.0f} conversions, {cost}")


if __name__ == "__main__":
    main()
