"""A trained policy as a bidder of AuctionNet's simulator: its constructor, its `bidding(...)`, no server and none of its code.

Source of the interface: AuctionNet (arXiv 2412.10798), `BaseBiddingStrategy`.
"""

import os

import numpy as np

from decisionllm.envs.auction.campaign import STEPS, Campaigns, offered, summary
from decisionllm.envs.auction.observation import MIN_REMAINING, ObservationSpec
from decisionllm.policy import checkpoint


class Bidder:
    """What AuctionNet's simulator sees of a bidder, whoever decides for it, in `_bids(timeStepIndex, pValues, history)`.

    budget, remaining_budget: currency, of the period; cpa: currency a conversion; category: the advertiser's. They may be set anew before
    a period; `remaining_budget` is what the simulator lowers.
    """

    def __init__(self, budget, name, cpa, category):
        self.budget, self.name, self.cpa, self.category = budget, name, cpa, category
        self.reset()

    def reset(self):
        """Begin a period, with the whole budget."""
        self.remaining_budget, self.campaign = self.budget, None

    def bidding(
        self, timeStepIndex, pValues, pValueSigmas, historyPValueInfo, historyBid, historyAuctionResult,
        historyImpressionResult, historyLeastWinningCost,
    ):  # fmt: skip
        """What to bid for the opportunities of a step: pValues (n,) -> (n,) currency. The histories hold an array for each step before it:
        values and deviations (n, 2), bids (n,), slots (n, 3), impressions (n, 2), market prices (n,); see campaign.summary."""
        history = {
            "historyPValueInfo": historyPValueInfo, "historyBid": historyBid, "historyAuctionResult": historyAuctionResult,
            "historyImpressionResult": historyImpressionResult, "historyLeastWinningCost": historyLeastWinningCost,
        }  # fmt: skip
        return self._bids(timeStepIndex, pValues, history)


class DecisionLLMBiddingStrategy(Bidder):
    """Bids for one advertiser, a period after the other: multiplier x value for each opportunity.

    What `remaining_budget` says is believed.
    run: a run directory of an auction, or what checkpoint.load makes of one; by default the directory that the environment variable
    DECISIONLLM_RUN names. target_return: other than the run's own, in its raw reward units.
    """

    def __init__(self, budget=100, name="DecisionLLM", cpa=2, category=1, *, run=None, target_return=None):
        super().__init__(budget, name, cpa, category)
        run = run or os.environ.get("DECISIONLLM_RUN")
        if not run:
            raise ValueError("run: expected a run directory, got none; give run=..., or set DECISIONLLM_RUN")
        self.policy, _, facts = run if isinstance(run, tuple) else checkpoint.load(run)
        self.spec, self.target_return = ObservationSpec.of(facts["dataset"]), target_return

    def _bids(self, timeStepIndex, pValues, history):
        for name, steps in history.items():
            if len(steps) != timeStepIndex:
                raise ValueError(f"{name}: expected {timeStepIndex} steps before step {timeStepIndex}, got {len(steps)}")
        if self.campaign is None or timeStepIndex < self.session.now[0]:
            self._begin()
        for step in range(self.campaign.now, timeStepIndex):
            told, bids, *results = (steps[step] for steps in history.values())
            values = np.asarray(told, np.float64).reshape(-1, 2)[:, 0]
            if self.session.now[0] == step:  # nobody asked us then: what was bid is what was done, as in a log
                self._see(values)
                self.session.record_action(np.sum(bids) / (np.sum(values) or 1))
            self.campaign.record(**summary(values, bids, *results))
        self._believe()
        self._see(pValues)
        multiplier = self.session.decide()
        self.session.record_action(multiplier)
        bidder = max(float(multiplier[0, 0]), 0.0) if self.remaining_budget >= MIN_REMAINING else 0.0
        return np.asarray(pValues, np.float64) * bidder

    def _begin(self):
        self.campaign = Campaigns([self.budget], [self.cpa])
        task = self.spec.task(self.budget, self.cpa, self.category)
        self.session = self.policy.begin([task], STEPS, self.target_return)
        self.earned = 0.0

    def _see(self, values):
        """Show the policy what is known before a step, and what the last one brought."""
        c, before = self.campaign, self.earned
        self.earned = self.spec.total_reward(c)
        seen = self.spec.observe(c, *offered(values))
        self.session.observe(seen, self.earned - before)

    def _believe(self):
        """What the simulator says is left, is left. Where the results do not explain it, the difference was spent too."""
        c = self.campaign
        unexplained = c.remaining - self.remaining_budget
        c.spend = c.spend + np.where(np.abs(unexplained) > 1e-6 * c.budgets, unexplained, 0)
        c.remaining = np.array([self.remaining_budget], np.float64)


class DecisionLLMRemoteStrategy(Bidder):
    """The same bidder, whose policy is behind a server: a campaign a period, a request a step.

    url: of the server, such as http://127.0.0.1:8080; token: its token, by default what DECISIONLLM_TOKEN says. more: of a campaign, such as
    bid_cap. What was spent is what the results say, since they are all that is sent. The simulator must ask before every step.
    """

    def __init__(self, budget=100, name="DecisionLLM", cpa=2, category=1, *, url, token=None, timeout=5.0, **more):
        import httpx  # pip install decisionllm[serve]

        super().__init__(budget, name, cpa, category)
        token, self.more = token or os.environ.get("DECISIONLLM_TOKEN"), more
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=timeout)

    def _bids(self, timeStepIndex, pValues, history):
        """An answer that is no bid is a ValueError that says what the server said."""
        if self.campaign is None:
            facts = {"budget": float(self.budget), "target_cpa": float(self.cpa), "category": int(self.category)}
            self.campaign = self._ask("/v1/campaigns", facts | {"name": self.name} | self.more)["id"]
        last = {name: [np.asarray(step, np.float64).tolist() for step in steps[-1:]] for name, steps in history.items()}
        asked = {"campaign": self.campaign, "timeStepIndex": int(timeStepIndex), "pValues": np.asarray(pValues).tolist()}
        return np.array(self._ask("/v1/bid", asked | last)["bids"])

    def _ask(self, path, body):
        answer = self.client.post(path, json=body)
        if answer.is_error:
            raise ValueError(f"{self.client.base_url}{path}: {answer.status_code} {answer.text}")
        return answer.json()
