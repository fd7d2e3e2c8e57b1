"""One campaign with its history: the observations, multipliers and rewards of its steps, as a
policy conditions on them.

The server, AuctionNet's simulator and the journal's reader all advance this record, so that
training reads what was served.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from decisionllm.bidding.market.campaigns import Campaigns
from decisionllm.bidding.market.observation import MIN_REMAINING, ObservationSpec
from decisionllm.schema import History, Json

SETTINGS = (
    "name",
    "budget",
    "target_cpa",
    "category",
    "horizon",
    "text",
    "target_return",
    "bid_cap",
)


@dataclass(frozen=True)
class Campaign:
    """State of one campaign. `advance` and `record_action` return the next state; the states of a
    campaign share their arrays.

    Attributes:
        settings: SETTINGS by name; budget in currency, target_cpa in currency per conversion,
            horizon in steps.
        totals: budget, spend and results so far, of this campaign alone.
        observations: (H, S) float32, the first `step` of them, and the current one once `advance`
            observed it.
        actions: (H, 1) float32 multipliers as they were answered.
        rewards: (H,) reward of each step whose result is known.
        step: the step to be decided next.
        earned: return so far, reward units.
        last_spend: currency, of the last step.
        ended: how the campaign ended; None: it is open.
        model: that answers it, in a journal.
    """

    id: str
    settings: Json
    spec: ObservationSpec
    totals: Campaigns
    task: str
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    step: int = 0
    earned: float = 0.0
    last_spend: float = 0.0
    ended: str | None = None
    model: str | None = None

    @classmethod
    def begin(
        cls, settings: Json, spec: ObservationSpec, *, id: str = "", model: str | None = None
    ) -> Self:
        """A campaign before its first step. A text of None is made by the text template of the
        specification.

        Raises:
            ValueError: no text is given, and text=served has no template.
        """
        budget = settings["budget"]
        target_cpa = settings["target_cpa"]
        H = settings["horizon"]
        task = settings["text"]
        if task is None:
            task = spec.task(budget, target_cpa, settings["category"])
        return cls(
            id=id,
            settings=settings,
            spec=spec,
            totals=Campaigns([budget], [target_cpa], steps=H),
            task=task,
            observations=np.zeros((H, spec.size), np.float32),
            actions=np.zeros((H, 1), np.float32),
            rewards=np.zeros(H),
            model=model,
        )

    def advance(
        self,
        result: Json | None,
        coming: dict[str, float] | None,
        remaining: float | None = None,
    ) -> Self:
        """Record the result of the last step, then observe the coming one.

        Args:
            result: as `Campaigns.record` takes it; None before the first step.
            coming: {"value", "volume"}, mean value and number of the coming opportunities; None: no
                step follows.
            remaining: currency left as the simulator reports it; a difference that the results do
                not explain counts as spend.
        """
        totals = copy(self.totals)
        earned, last_spend = self.earned, self.last_spend
        if result is not None:
            totals.record(**result)
            last_spend = result["spend"]
        if remaining is not None:
            unexplained = totals.remaining - remaining
            counts = np.abs(unexplained) > 1e-6 * totals.budgets  # else it is rounding
            totals.spend = totals.spend + np.where(counts, unexplained, 0)
            totals.remaining = np.array([remaining], np.float64)
        if result is not None:
            earned = float(self.spec.total_reward(totals)[0])
            self.rewards[self.step - 1] = earned - self.earned
        if coming is not None:
            observed = self.spec.observe(totals, coming["value"], coming["volume"])
            self.observations[self.step] = observed[0]
        return replace(self, totals=totals, earned=earned, last_spend=last_spend)

    def record_action(self, multiplier: float) -> Self:
        """Record the multiplier answered for this step; after the last step there is none."""
        if self.step < len(self.actions):
            self.actions[self.step] = multiplier
        return replace(self, step=self.step + 1)

    def history(self) -> History:
        """The steps so far, as a policy conditions on them."""
        t = self.step
        return History(
            self.observations[: t + 1],
            self.actions[:t],
            self.rewards[:t],
            self.settings["target_return"],
            self.task,
        )

    def state(self) -> np.ndarray:
        """The state of the campaign after its ticks so far, as float64 numbers, without loss.

        Steps that are decided later do not change what it reads, so that any thread may call it.
        """
        totals = self.totals
        sums = totals.remaining, totals.spend, totals.conversions, totals.exposed_value
        head = [self.step, totals.now, *(x[0] for x in sums), self.earned, self.last_spend]
        arrays = [x.ravel() for x in self._arrays(self.step, totals.now)]
        return np.concatenate([head, *arrays], dtype=np.float64)

    def _arrays(self, step: int, now: int) -> list[np.ndarray]:
        """The arrays before this step, with the results of the first `now` ones, not copied."""
        return [
            self.observations[:step],
            self.actions[:step],
            self.rewards[: max(step - 1, 0)],
            self.totals.means[:now],
            self.totals.volumes[:now],
        ]

    def restore_state(self, numbers: np.ndarray) -> Self:
        """A campaign before its first step, with the `state` of a later step.

        Raises:
            ValueError: the numbers are of another campaign or specification.
        """
        t, now = (int(x) for x in numbers[:2])
        remaining, spend, conversions, exposed, earned, last_spend = numbers[2:8]
        totals = copy(self.totals)
        slots = self._arrays(t, now)
        sizes = [slot.size for slot in slots]
        if t > len(self.actions) or len(numbers) != 8 + sum(sizes):
            raise ValueError(f"expected {8 + sum(sizes)} numbers, got {len(numbers)}")
        start = 8
        for slot, size in zip(slots, sizes, strict=True):
            slot[...] = numbers[start : start + size].reshape(slot.shape)
            start += size
        totals.now = now
        totals.remaining = np.array([remaining])
        totals.spend = np.array([spend])
        totals.conversions = np.array([conversions])
        totals.exposed_value = np.array([exposed])
        return replace(
            self, totals=totals, step=t, earned=float(earned), last_spend=float(last_spend)
        )

    @property
    def remaining(self) -> float:
        """Currency left."""
        return float(self.totals.remaining[0])

    @property
    def can_bid(self) -> bool:
        return self.remaining >= MIN_REMAINING
