"""A campaign's life without a network: results -> features -> policy -> guard rails -> answer, each tick in the journal before it leaves.

`Desk.tick` does it all, for one who has the policy in the process. A server takes the same steps one by one: `admit`, `decide`,
`settle`, `write`, `commit`. A campaign that is not in memory is rebuilt from the journal, by the function that made it.
"""

import json
import logging
import math
import secrets
from collections import Counter, OrderedDict
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from decisionllm.envs.auction import journal as journals
from decisionllm.envs.auction.campaign import STEPS, Campaigns
from decisionllm.envs.auction.observation import MIN_REMAINING
from decisionllm.schema import History
from decisionllm.serving.kv_cache import Cache

FACTS = (
    "name",
    "budget",
    "target_cpa",
    "category",
    "horizon",
    "text",
    "target_return",
    "bid_cap",
)  # what is said of a campaign
log = logging.getLogger(__name__)
STEADY = (0.5, 2.0)  # how far a fallback may move from the last multiplier


class Refused(ValueError):
    """A request that cannot be served: an HTTP status, the field at fault, what was expected, and what else to tell."""

    def __init__(self, status, field, message, **more):
        super().__init__(f"{field}: {message}")
        self.status, self.field, self.message, self.more = status, field, message, more


@dataclass
class Campaign:
    """A campaign as it stands. It is never changed: `told` makes the next one, and their arrays have their past in common."""

    id: str
    facts: dict  # FACTS
    world: Campaigns  # of this one alone
    task: str
    observations: np.ndarray  # (H, S), of which `step` are of the past
    actions: np.ndarray  # (H, 1) multipliers as they were answered
    rewards: np.ndarray  # (H,) what steps brought
    step: int = 0  # that is to be asked about next
    earned: float = 0.0  # the return so far
    paid: float = 0.0  # currency, in the last step
    ended: str | None = None  # how

    def told(self, request, spec):
        """After what the last step brought, and before what is coming, as a request says: the next Campaign, its step not yet decided."""
        after = replace(self, world=copy(self.world))
        if request["result"] is not None:
            after.world.record(**request["result"])
            after.earned = float(spec.total_reward(after.world)[0])
            after.rewards[self.step - 1], after.paid = after.earned - self.earned, request["result"]["spend"]
        if request["coming"] is not None:
            coming = request["coming"]
            after.observations[self.step] = spec.observe(after.world, coming["value"], coming["volume"])[0]
        return after

    def record_action(self, multiplier):
        """After this multiplier was answered. The answer to the last results is of no step."""
        if self.step < len(self.actions):
            self.actions[self.step] = multiplier
        return replace(self, step=self.step + 1)

    def history(self):
        t = self.step
        return History(self.observations[: t + 1], self.actions[:t], self.rewards[:t], self.facts["target_return"], self.task)

    @property
    def remaining(self):
        return float(self.world.remaining[0])  # currency


@dataclass
class Pending:
    """A tick that was admitted and is not yet answered."""

    campaign: Campaign  # told what the request says
    request: dict
    text: str  # of the request, as it will be written
    answer: str | None = None  # in JSON; there from the beginning if it was given before

    @property
    def return_conditioned(self):
        """Whether the policy is to be asked."""
        return self.answer is None and self.request["coming"] is not None and self.campaign.remaining >= MIN_REMAINING


class Desk:
    """Campaigns of one policy.

    observation: the ObservationSpec that the policy was trained with. journal: a Journal; by
    default one that is forgotten with the process. name: of the policy, told with each answer. cache: bytes for keys and values; 0: every window is read afresh and alone, so
    that answers are those of Policy.act to the last bit; otherwise within rounding. kept: campaigns in memory, the others are
    rebuilt. horizon: most steps of a campaign; None: the policy's. pacing: guard, see `guarded`.
    """

    def __init__(self, policy, observation, journal=None, *, name="", cache=0, kept=1000, horizon=None, pacing=None):
        if policy.decode == "sample":
            raise ValueError(
                "decode: expected mode or mean, got sample: an answer that is drawn would be another after a restart"
            )
        spec = policy.model.spec
        self.policy, self.observation, self.journal = policy, observation, journals.Journal() if journal is None else journal
        self.name, self.horizon, self.pacing, self.kept = name, horizon or spec.horizon, pacing, kept
        if policy.model.tokenizer.timesteps is not None and self.horizon > spec.horizon:
            raise ValueError(f"horizon: expected at most {spec.horizon}, the longest training episode, got {self.horizon}")
        single = policy.model.team is not None or policy.model.backbone.layout is None
        self.cache = None if single or not cache else Cache(policy, room=cache, rows=kept, horizon=self.horizon)
        self.campaigns = OrderedDict()  # id -> Campaign, those asked about last at the end
        self.counts = Counter()  # ("bids", ""), ("guard", name), ("fallback", reason), ...

    # for one who has the policy in the process

    def open(self, *, budget, target_cpa, category=0, horizon=STEPS, key=None, **more):
        """Begin a campaign -> its id. budget: currency; target_cpa: currency a conversion; horizon: steps; more: of FACTS."""
        id, entry = self.opening(
            {"budget": budget, "target_cpa": target_cpa, "category": category, "horizon": horizon} | more, key
        )
        (new,) = self.journal.write([entry])
        return id if new else self.journal.keyed(key)["id"]

    def tick(self, id, *, index, coming, result=None, key=""):
        """What to bid in step `index` -> the answer, a dict. coming: {"value", "volume"}, mean value and number of the opportunities,
        or None: the campaign ends; result: what the step before brought, as Campaigns.record takes it; key: of the request, see `admit`."""
        pending = self.admit(id, {"index": index, "key": key, "result": result, "coming": coming})
        if pending.answer is None:
            decided = None
            if pending.return_conditioned:
                (decided,) = self.decide([(id, pending.campaign.history())])
            self.settle(pending, decided)
            if not self.journal.write(self.entries(pending))[0]:
                self.campaigns.pop(id, None)
                return self.tick(id, index=index, coming=coming, result=result, key=key)
            self.commit(pending)
        return json.loads(pending.answer)

    def close(self, id):
        """End a campaign. Its ticks stay in the journal."""
        if self.journal.campaign(id) is None:
            raise Refused(404, "id", "no such campaign")
        self.campaigns.pop(id, None)
        self.journal.write([journals.ended(id, "closed")])
        if self.cache is not None:
            self.cache.forget(id)

    # the steps of a tick

    def opening(self, facts, key=None):
        """Facts of a campaign -> a new id, and the entry that opens it."""
        facts = dict.fromkeys(FACTS) | facts
        if unknown := set(facts) - set(FACTS):
            raise TypeError(f"expected {', '.join(FACTS)}, got {', '.join(sorted(unknown))}")
        if facts["horizon"] > self.horizon:
            raise Refused(
                422, "horizon", f"expected at most {self.horizon} steps, as this policy can see, got {facts['horizon']}"
            )
        if facts["text"] and self.observation.text == "none":
            raise Refused(422, "text", "expected none: this policy was trained without a text")
        if facts["target_return"] is not None and not self.policy.return_conditioned:
            raise Refused(422, "target_return", "expected none: this policy is not asked for a return")
        id = secrets.token_hex(8)
        return id, journals.opened(id, key, facts | {"text": self._fresh(id, facts).task})

    def admit(self, id, request):
        """The next tick of a campaign, or one that was answered: then the same answer if index, key and content are the same."""
        index, text = request["index"], json.dumps(request, sort_keys=True)
        campaign = self.campaigns.get(id)
        if campaign is None or (campaign.step != index and campaign.step != self.journal.steps(id)):  # or it went on elsewhere
            campaign = self._rebuilt(id)
        if index < campaign.step:
            before = self.journal.tick(id, index)
            if before[0] == text:
                return Pending(campaign, request, *before)
            raise Refused(409, "index", f"step {index} was answered to another request", expected=campaign.step)
        if campaign.ended:
            raise Refused(409, "id", "the campaign has ended")
        if index != campaign.step:
            raise Refused(409, "index", f"expected {campaign.step}, got {index}", expected=campaign.step)
        if (request["result"] is None) != (index == 0):
            wanted = "none before the first step" if index == 0 else f"what step {index - 1} brought"
            raise Refused(422, "result", f"expected {wanted}")
        if request["coming"] is not None and index >= campaign.facts["horizon"]:
            raise Refused(422, "coming", f"expected none: the campaign has {campaign.facts['horizon']} steps")
        return Pending(campaign.told(request, self.observation), request, text)

    def decide(self, asked):
        """[(key, History), ...] -> for each (action (A,), the return asked for, or None), or the error that it ended with. The key is the
        episode's, of which keys and values may be kept; None: the window is read afresh and alone, which is the truth."""
        made = [None] * len(asked)
        kept = [] if self.cache is None else [i for i, (key, _) in enumerate(asked) if key is not None]
        if kept:
            try:
                for i, *decided in zip(kept, *self.cache.decide(*zip(*(asked[i] for i in kept), strict=True)), strict=True):
                    made[i] = decided
            except Exception:  # of whatever kind: what fails together is tried alone
                log.exception("a batch of %d failed", len(kept))
        for i in (i for i, decided in enumerate(made) if decided is None):
            try:
                made[i] = [x[0] for x in self.policy.act_with_returns([asked[i][1]])]
            except Exception as error:
                log.exception("a decision failed")
                made[i] = error
        return [
            x if isinstance(x, Exception) else (x[0], float(x[1]) if self.policy.return_conditioned else None) for x in made
        ]

    def settle(self, pending, decided, reason="model"):
        """Write the answer: of what was decided, or, where that is an error or None, of a fallback for this reason."""
        campaign, coming = pending.campaign, pending.request["coming"]
        multiplier, togo, fallback, guards = 0.0, None, None, []
        if pending.return_conditioned:
            if decided is None or isinstance(decided, Exception) or not np.isfinite(decided[0]).all():
                multiplier, fallback = min(steady(campaign), self.policy.model.spec.high[0]), reason
            else:
                multiplier, togo = float(decided[0][0]), decided[1]
        if coming is not None:
            multiplier, guards = guarded(multiplier, campaign, coming, self.pacing)
        facts, world = campaign.facts, campaign.world
        caps = [x for x in (facts["bid_cap"], campaign.remaining) if x is not None]
        answer = {
            "index": pending.request["index"], "multiplier": multiplier, "return_to_go": togo, "guards": guards, "fallback": fallback,
            "remaining": campaign.remaining, "spend": float(world.spend[0]), "conversions": float(world.conversions[0]),
            "max_bid": max(min(caps), 0.0), "model": self.name,
        }  # fmt: skip
        pending.answer = json.dumps(answer)

    def entries(self, pending):
        """What the journal must have before the answer leaves; the first of them is new, or the answer was given elsewhere."""
        id, index = pending.campaign.id, pending.request["index"]
        last = [journals.ended(id, "over")] if pending.request["coming"] is None else []
        return [journals.ticked(id, index, pending.text, pending.answer), *last]

    def commit(self, pending):
        """The answer is written: the campaign goes on from there."""
        answer, id = json.loads(pending.answer), pending.campaign.id
        if pending.request["coming"] is not None:
            self.counts["no bid" if answer["multiplier"] == 0 else "bid", ""] += 1
        self.counts.update([("guard", name) for name in answer["guards"]])
        if answer["fallback"]:
            self.counts["fallback", answer["fallback"]] += 1
        if pending.request["coming"] is None:
            self.campaigns.pop(id, None)
        else:
            self._keep(pending.campaign.record_action(answer["multiplier"]))

    def _keep(self, campaign):
        self.campaigns[campaign.id] = campaign
        self.campaigns.move_to_end(campaign.id)
        while len(self.campaigns) > self.kept:
            self.campaigns.popitem(last=False)

    def _fresh(self, id, facts):
        """A campaign before its first step."""
        H, spec = facts["horizon"], self.policy.model.spec
        who = facts["budget"], facts["target_cpa"], facts["category"]
        task = facts["text"] if facts["text"] is not None else self.observation.task(*who)
        world = Campaigns([facts["budget"]], [facts["target_cpa"]], steps=H)
        room = np.zeros((H, spec.observation_dim), np.float32), np.zeros((H, 1), np.float32), np.zeros(H)
        return Campaign(id, facts, world, task, *room)

    def _rebuilt(self, id):
        """A campaign as its journal tells it."""
        known = self.journal.campaign(id)
        if known is None:
            raise Refused(404, "id", "no such campaign")
        campaign = self._fresh(id, {name: known[name] for name in FACTS})
        for tick in self.journal.ticks(id):
            campaign = campaign.told(tick["request"], self.observation).record_action(tick["answer"]["multiplier"])
        self.counts["rebuilt", ""] += 1
        if known["ended"]:
            return replace(campaign, ended=known["ended"])
        self._keep(campaign)
        return campaign


def guarded(multiplier, campaign, coming, pacing=None):
    """A multiplier that may leave, and what held it back: [] or names.

    A bid for an opportunity of the coming mean value is not above the campaign's bid cap, nor above what is left; and, with
    pacing, were every opportunity won at its bid, the step would cost at most so many even shares of what is left.
    """
    value, left = coming["value"], max(campaign.remaining, 0.0)
    shares = left / (campaign.facts["horizon"] - campaign.step)
    paced = pacing and pacing * shares / max(coming["volume"], 1)
    multiplier, held = (0.0, ["negative"]) if multiplier < 0 else (multiplier, [])
    for name, limit in (("bid cap", campaign.facts["bid_cap"]), ("remaining", left), ("pacing", paced)):
        if limit is not None and multiplier * value > limit:
            multiplier = limit / value
            if multiplier * value > limit:
                multiplier = math.nextafter(multiplier, 0)
            held.append(name)
    if left < MIN_REMAINING:
        multiplier, held = 0.0, ["budget spent"]
    return multiplier, held


def steady(campaign):
    """Linear pacing, for when there is no policy: the last multiplier, moved towards what would spend an even share of what is left in
    each step that is left; the limit on the first step. Who has paid too much bids the limit at most."""
    limit, t = campaign.facts["target_cpa"], campaign.step
    if t == 0:
        return float(limit)
    share = campaign.remaining / (campaign.facts["horizon"] - t)
    low, high = STEADY
    pace = min(max(share / campaign.paid, low), high) if campaign.paid > 0 else high
    last = float(campaign.actions[t - 1, 0]) or limit
    return float(campaign.world.guarded(np.array([last * pace]))[0])
