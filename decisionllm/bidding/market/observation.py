"""The observation, the reward and the task text of an auction policy.

One saved specification serves the log readers, the market, the replay, the server, the journal and
AuctionNet's simulator.
"""

from bisect import bisect
from dataclasses import asdict, dataclass, fields

import numpy as np

from decisionllm.bidding.market.campaigns import CONTEXT, STATE, STEPS, Campaigns, Numbers, score
from decisionllm.checks import check_one_of
from decisionllm.schema import Json

MIN_REMAINING = 0.1  # currency: an advertiser with less left no longer bids
OBSERVATIONS = {
    "auctionnet": STATE,
    # nothing that depends on own past bids
    "minimal": ("time left", "budget left", "value now", "volume now", "volume, all"),
}
CONTEXT_FEATURES = {  # columns of Campaigns.context()
    "none": slice(0, 0),
    "budget_and_cpa": slice(0, 2),
    "progress": slice(0, 5),
    "outcomes": slice(3, 5),
}
REWARDS = ("conversions", "expected_value", "score")
# budgets of AuctionNet's 48 advertisers by thirds, in currency
SIZES = ("small", "medium", "large")
SIZE_EDGES = (2500, 3500)
TEXTS = ("none", "constant", "informative", "paraphrased", "shuffled", "served")


@dataclass(frozen=True)
class ObservationSpec:
    """Specification of the observation, the reward and the task text of a campaign.

    Args:
        observation: `auctionnet`, AuctionNet's sixteen state numbers; `minimal`, the five of them
            that do not depend on own past bids.
        context_features: appended to them: `none`; `budget_and_cpa`, log budget and target CPA;
            `progress`, also spend / target CPA, conversions and exposed value so far; `outcomes`,
            these two alone, so that nothing but a text says budget and limit.
        reward: `conversions`, as counted; `expected_value`, the sum of the predicted conversion
            probabilities of exposed ads, with less noise; `score`, the increase of AuctionNet's
            score of the expected conversions, so that exceeding the target CPA is penalised.
        text: `none`; `constant`, the objective without numbers; `informative`, also budget, target
            CPA and category; `paraphrased`, trained on informative texts in many wordings, of which
            the informative one is the first; `shuffled`, trained on informative texts of other
            advertisers; `served`, of dataset=journal, the texts that its campaigns were served with.

    Raises:
        ValueError: an unknown value of an option.
    """

    observation: str = "auctionnet"
    context_features: str = "none"
    reward: str = "conversions"
    text: str = "none"

    def __post_init__(self) -> None:
        check_one_of("observation", self.observation, OBSERVATIONS)
        check_one_of("context_features", self.context_features, CONTEXT_FEATURES)
        check_one_of("reward", self.reward, REWARDS)
        check_one_of("text", self.text, TEXTS)

    @classmethod
    def from_info(cls, info: Json) -> "ObservationSpec":
        """The specification saved in a dataset's info (run.json, `dataset`).

        Raises:
            ValueError: the run was not trained on an auction dataset.
        """
        names = [field.name for field in fields(cls)]
        lacking = [name for name in names if name not in info]
        if lacking:
            got = f"one of {info.get('name')!r}, whose info lacks {', '.join(lacking)}"
            raise ValueError(f"expected a run of an auction dataset, got {got}")
        return cls(**{name: info[name] for name in names})

    def info(self) -> dict[str, str]:
        """The four options as saved in a dataset's info."""
        return asdict(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the S numbers of an observation."""
        appended = CONTEXT_FEATURES[self.context_features]
        return (*OBSERVATIONS[self.observation], *CONTEXT[appended])

    @property
    def size(self) -> int:
        """S, the numbers of an observation."""
        return len(self.names)

    def features(self, states: np.ndarray, context: np.ndarray) -> np.ndarray:
        """States and context -> observations (..., S) float64.

        states: (..., 16) in the order of STATE; context: (..., 5) in the order of CONTEXT.
        """
        columns = [STATE.index(name) for name in OBSERVATIONS[self.observation]]
        appended = CONTEXT_FEATURES[self.context_features]
        return np.concatenate([states[..., columns], context[..., appended]], -1)

    def observe(self, campaigns: Campaigns, value: Numbers, volume: Numbers) -> np.ndarray:
        """Observations (N, S) before a step of opportunities of this mean value and number."""
        return self.features(campaigns.observe(value, volume), campaigns.context())

    def total_reward(self, campaigns: Campaigns) -> np.ndarray:
        """Return so far, (N,) in reward units."""
        if self.reward == "score":
            return score(campaigns.exposed_value, campaigns.spend, campaigns.target_cpa)
        if self.reward == "conversions":
            return campaigns.conversions
        return campaigns.exposed_value

    def task(self, budget: float, target_cpa: float, category: int) -> str:
        """The task text of one campaign. budget: currency; target_cpa: currency a conversion.

        Raises:
            ValueError: text=served, whose texts are given with each campaign.
        """
        if self.text == "served":
            raise ValueError(
                "text=served: this policy has no text template; give each campaign its text"
            )
        if self.text == "none":
            return ""
        if self.text == "constant":
            return task_text()
        return task_text(budget, target_cpa, category)


def task_text(
    budget: float | None = None,
    target_cpa: float | None = None,
    category: int | None = None,
) -> str:
    """The task in words; without numbers, the objective that all advertisers share."""
    goal = f"Bid for impressions over one day of {STEPS} steps. Get as many conversions as you can"
    if budget is None or target_cpa is None or category is None:
        return f"Auction. {goal} within a budget, at a cost limit for each."
    facts = task_facts(budget, target_cpa, category)
    amount = f"a {facts['size']} budget of {budget:g}"
    limit = f"a {facts['limit']} cost limit of {target_cpa:g} for each"
    advertiser = f"advertiser of category {int(category)}"
    return f"Auction, {advertiser}. {goal} within {amount}, at {limit}."


def task_facts(budget: float, target_cpa: float, category: int) -> Json:
    """The facts of one campaign for `wordings`.

    Size and limit are by the thirds of AuctionNet's 48 advertisers.
    """
    limits = ("strict", "moderate", "loose")
    return {
        "library": "bidding",
        "category": int(category),
        "budget": float(budget),
        "cpa": float(target_cpa),
        "steps": STEPS,
        "size": SIZES[bisect(SIZE_EDGES, budget)],
        "limit": limits[bisect((85, 105), target_cpa)],
    }
