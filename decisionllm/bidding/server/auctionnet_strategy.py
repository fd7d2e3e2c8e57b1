"""A trained policy as a bidder of AuctionNet's simulator: its constructor and its `bidding(...)`.

Source of the interface: AuctionNet (arXiv 2412.10798), `BaseBiddingStrategy`.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.bidding.journal.campaign_history import Campaign
from decisionllm.bidding.market.campaigns import (
    HISTORIES,
    STEPS,
    summarize_opportunities,
    summarize_step,
)
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.policy.exported_policy import ExportedPolicy
from decisionllm.schema import Json

if TYPE_CHECKING:
    from decisionllm.policy.policy import Policy

Arrays = list[np.ndarray]


class BiddingStrategy:
    """AuctionNet's interface of a bidder; a subclass has `_bids(timeStepIndex, pValues, history)`.

    budget, remaining_budget: currency, of the period; cpa: currency per conversion; category: of
    the advertiser. They may be set before a period; the simulator lowers `remaining_budget`.
    """

    remaining_budget: float
    campaign: Any  # of the period that was begun

    def __init__(self, budget: float, name: str, cpa: float, category: int) -> None:
        self.budget = budget
        self.name = name
        self.cpa = cpa
        self.category = category
        self.reset()

    def reset(self) -> None:
        """Begin a period with the whole budget."""
        self.remaining_budget = self.budget
        self.campaign = None

    def bidding(
        self,
        timeStepIndex: int,
        pValues: np.ndarray,
        pValueSigmas: np.ndarray,
        historyPValueInfo: Arrays,
        historyBid: Arrays,
        historyAuctionResult: Arrays,
        historyImpressionResult: Arrays,
        historyLeastWinningCost: Arrays,
    ) -> np.ndarray:
        """Bids (n,) in currency for the opportunities of a step.

        Args:
            pValues: (n,) predicted conversion probabilities.
            historyPValueInfo: (n, 2) values and deviations of each step before this one.
            historyBid: (n,) bids of each; the other histories: slots (n, 3), impressions (n, 2) and
                market prices (n,), see campaign.summarize_step.
        """
        histories = (
            historyPValueInfo,
            historyBid,
            historyAuctionResult,
            historyImpressionResult,
            historyLeastWinningCost,
        )
        return self._bids(timeStepIndex, pValues, dict(zip(HISTORIES, histories, strict=True)))

    def _bids(
        self, timeStepIndex: int, pValues: np.ndarray, history: dict[str, Arrays]
    ) -> np.ndarray:
        raise NotImplementedError

    def _settings(self) -> Json:
        return {
            "budget": float(self.budget),
            "target_cpa": float(self.cpa),
            "category": int(self.category),
        }


class DecisionLLMBiddingStrategy(BiddingStrategy):
    """Bids multiplier x value for one advertiser, one period after the other; `remaining_budget`
    overrides the results.

    Args:
        run: a run directory of an auction, the folder that `decisionllm export` wrote of one (then
            torch is not needed), or a policy that was loaded; by default the directory in
            DECISIONLLM_RUN.
        target_return: instead of the run's own, in raw reward units.
        text: the task text; by default from the run's text template, which a run trained with
            text=served does not have.

    Raises:
        ValueError: no run, a run of another dataset, or no text for a run trained with text=served.
    """

    def __init__(
        self,
        budget: float = 100,
        name: str = "DecisionLLM",
        cpa: float = 2,
        category: int = 1,
        *,
        run: "str | Path | Policy | None" = None,
        target_return: float | None = None,
        text: str | None = None,
    ) -> None:
        super().__init__(budget, name, cpa, category)
        run = run or os.environ.get("DECISIONLLM_RUN")
        if not run:
            raise ValueError(
                "run: expected a run directory, got none; give run=..., or set DECISIONLLM_RUN"
            )
        self.policy = load_policy(run) if isinstance(run, str | Path) else run
        self.spec = ObservationSpec.from_info(self.policy.info["dataset"])
        self.target_return = target_return
        self.text = text
        if text is None:
            self.spec.task(budget, cpa, category)  # raises if there is no template

    def _bids(
        self, timeStepIndex: int, pValues: np.ndarray, history: dict[str, Arrays]
    ) -> np.ndarray:
        for name, steps in history.items():
            if len(steps) != timeStepIndex:
                raise ValueError(
                    f"{name}: expected {timeStepIndex} steps before step {timeStepIndex}, got "
                    f"{len(steps)}"
                )
        if self.campaign is None or timeStepIndex < self.campaign.step:
            settings = self._settings() | {
                "horizon": STEPS,
                "target_return": self.target_return,
                "text": self.text,
            }
            self.campaign = Campaign.begin(settings, self.spec)
            self.session = self.policy.begin([self.campaign.task], STEPS, self.target_return)
        # steps without a call: the bids that were made, as in a log
        for step in range(self.campaign.step, timeStepIndex):
            values = step_values(history, step)
            self._observe(step, values, history)
            self._record(np.sum(history["historyBid"][step]) / (np.sum(values) or 1))
        self._observe(timeStepIndex, pValues, history, self.remaining_budget)
        multiplier = self.session.decide()
        self._record(multiplier)
        bidder = max(float(multiplier[0, 0]), 0.0) if self.campaign.can_bid else 0.0
        return np.asarray(pValues, np.float64) * bidder

    def _observe(
        self,
        step: int,
        values: np.ndarray,
        history: dict[str, Arrays],
        remaining: float | None = None,
    ) -> None:
        """Advance the campaign by the last result and the coming step, and the policy's session by
        reward and observation.
        """
        _, *results = history.values()
        last, (value, volume) = step - 1, summarize_opportunities(values)
        result = (
            summarize_step(step_values(history, last), *(steps[last] for steps in results))
            if step
            else None
        )
        self.campaign = self.campaign.advance(result, {"value": value, "volume": volume}, remaining)
        self.session.observe(
            self.campaign.observations[step : step + 1],
            self.campaign.rewards[max(last, 0) : max(step, 1)],
        )

    def _record(self, multiplier: ArrayLike) -> None:
        self.session.record_action(np.asarray(multiplier))
        self.campaign = self.campaign.record_action(np.ravel(multiplier)[0])


def load_policy(run: str | Path) -> "Policy | ExportedPolicy":
    """The policy of a run or of an exported folder."""
    if (Path(run) / "policy.onnx").is_file():
        return ExportedPolicy(run)
    from decisionllm.policy import loading  # with torch

    return loading.load_policy(run)


def step_values(history: dict[str, Arrays], step: int) -> np.ndarray:
    """Return the predicted conversion probabilities of a step, (n,)."""
    return np.asarray(history["historyPValueInfo"][step], np.float64).reshape(-1, 2)[:, 0]


class DecisionLLMRemoteStrategy(BiddingStrategy):
    """The same bidder with its policy behind a server: one campaign per period, one request per
    step.

    Spend is taken from the results, since only they are sent. The simulator must call it in every
    step.

    Args:
        url: of the server, such as http://127.0.0.1:8080.
        token: by default the one in DECISIONLLM_TOKEN.
        timeout: seconds.
        more: further settings of a campaign, such as bid_cap.
    """

    def __init__(
        self,
        budget: float = 100,
        name: str = "DecisionLLM",
        cpa: float = 2,
        category: int = 1,
        *,
        url: str,
        token: str | None = None,
        timeout: float = 5.0,
        **more: object,
    ) -> None:
        import httpx  # pip install -e '.[serve]'

        super().__init__(budget, name, cpa, category)
        token = token or os.environ.get("DECISIONLLM_TOKEN")
        self.more = more
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=timeout)

    def _bids(
        self, timeStepIndex: int, pValues: np.ndarray, history: dict[str, Arrays]
    ) -> np.ndarray:
        if self.campaign is None:
            self.campaign = self._post(
                "/v1/campaigns", self._settings() | {"name": self.name} | self.more
            )["id"]
        last = {
            name: [np.asarray(step, np.float64).tolist() for step in steps[-1:]]
            for name, steps in history.items()
        }
        step = {
            "campaign": self.campaign,
            "timeStepIndex": int(timeStepIndex),
            "pValues": np.asarray(pValues).tolist(),
        }
        return np.array(self._post("/v1/bid", step | last)["bids"])

    def _post(self, path: str, body: Json) -> Json:
        answer = self.client.post(path, json=body)
        if answer.is_error:
            raise ValueError(f"{self.client.base_url}{path}: {answer.status_code} {answer.text}")
        return dict(answer.json())
