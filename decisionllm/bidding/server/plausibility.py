"""Signs that a campaign or a result is in other units than the policy's training log.

They are counted and logged. An answer does not depend on them, since a real day may look so too.
"""

import numpy as np

from decisionllm.bidding.journal.campaign_history import Campaign
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.policy.policy import Policy
from decisionllm.schema import Json

MAX_DEVIATIONS = 5.0  # from the mean of the training log, in its standard deviations


class TrainingUnits:
    """Means and standard deviations of the observations that a policy was trained on.

    Args:
        policy: of auctions.
        spec: of its observations.
    """

    def __init__(self, policy: Policy, spec: ObservationSpec) -> None:
        normalizer = policy.model.normalizer
        self.names = spec.names
        self.mean = normalizer.observation_mean.cpu().double().numpy()
        self.scale = normalizer.observation_scale.cpu().double().numpy()
        self.is_read = np.ones(len(self.mean), bool)
        self.is_read[list(normalizer.hidden)] = False

    def find_unlike(self, observation: np.ndarray) -> dict[str, float]:
        """Return the numbers of an observation (S,) that are far from the training log: their
        standard deviations from its mean, by name.
        """
        deviations = (observation - self.mean) / self.scale
        unlike = np.flatnonzero((np.abs(deviations) > MAX_DEVIATIONS) & self.is_read)
        return {self.names[i]: float(deviations[i]) for i in unlike}


def find_implausible(campaign: Campaign, result: Json) -> list[str]:
    """Return what is implausible about the result of a step.

    campaign: after this result.
    """
    reasons = []
    if result["won"] == 0 and result["spend"] > 0:
        reasons.append("spend without a win")
    if result["conversions"] > result["volume"]:
        reasons.append("more conversions than opportunities")
    tolerance = 1e-6 * campaign.settings["budget"]  # rounding
    if campaign.remaining < -tolerance <= campaign.remaining + result["spend"]:
        reasons.append("spend beyond the budget")
    return reasons
