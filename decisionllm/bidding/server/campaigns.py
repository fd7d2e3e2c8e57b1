"""Campaigns of one policy: results -> features -> policy -> guard rails -> answer, with a journal
of every tick.

A tick awaits its decision and its write, so that `service` serves concurrent requests. A campaign
that is not in memory is replayed from the journal.
"""

import json
import logging
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from decisionllm.bidding.journal.campaign_history import SETTINGS, Campaign
from decisionllm.bidding.journal.journal import DamagedRowError, Journal
from decisionllm.bidding.journal.rows import (
    Entry,
    end_by_tick,
    end_campaign,
    insert_campaign,
    insert_tick,
    move_campaigns,
)
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.kv_cache import Cache, Decision, DecisionRequest, decide
from decisionllm.bidding.server.plausibility import TrainingUnits, find_implausible
from decisionllm.policy.policy import Policy
from decisionllm.schema import Json

logger = logging.getLogger("decisionllm.bidding.server")
PACE = (0.5, 2.0)  # smallest and largest change of the multiplier by linear pacing
Decide = Callable[[DecisionRequest], Awaitable[Decision | Exception]]
Begin = Callable[[Sequence[Json], ObservationSpec], dict[str, Campaign]]
Write = Callable[[list[Entry]], Awaitable[bool]]  # whether the first entry was new


class RequestError(ValueError):
    """A request that cannot be served. status: of HTTP; field: the one at fault; expected: the tick
    index that is expected.
    """

    def __init__(
        self, status: int, field: str, message: str, *, expected: int | None = None
    ) -> None:
        super().__init__(f"{field}: {message}")
        self.status = status
        self.field = field
        self.message = message
        self.expected = expected


class OtherModelError(RequestError):
    """A tick of a campaign that another model answers."""

    def __init__(self, model: str | None, here: str) -> None:
        super().__init__(409, "id", f"the campaign is answered by model {model}, this is {here}")
        self.model = model


@dataclass
class PendingTick:
    """A valid tick that is not answered yet."""

    campaign: Campaign  # advanced by the request
    request: Json
    text: str  # the request in JSON, as the journal keeps it
    answer: str | None = None  # JSON; set from the start if the same request was answered before

    @property
    def last(self) -> bool:
        return self.request["coming"] is None

    @property
    def needs_decision(self) -> bool:
        return not self.last and self.campaign.can_bid


class CampaignManager:
    """Campaigns of one policy, kept in memory and in a journal.

    Args:
        policy: deterministic (decode mode or mean), so that a restart gives the same answers.
        observation: the specification the policy was trained with.
        journal: by default one in memory.
        name: of the model, part of every answer; the journal keeps it with each campaign.
        cache_bytes: memory for keys and values; 0: every window is read in full and alone, so that
            answers equal Policy.act to the last bit; otherwise within rounding.
        max_campaigns: in memory; others are replayed from the journal.
        horizon: most steps of a campaign; None: the policy's.
        pacing: see `guard_multiplier`.

    Raises:
        ValueError: a policy that samples, or a horizon above the longest training episode.
    """

    def __init__(
        self,
        policy: Policy,
        observation: ObservationSpec,
        journal: Journal | None = None,
        *,
        name: str = "",
        cache_bytes: int = 0,
        max_campaigns: int = 10_000,
        horizon: int | None = None,
        pacing: float | None = None,
    ) -> None:
        if policy.decode == "sample":
            raise ValueError(
                "decode: expected mode or mean, got sample: a sampled answer would be another one "
                "after a restart"
            )
        model = policy.model
        self.policy = policy
        self.observation = observation
        self.journal = journal or Journal()
        self.name = name
        self.horizon = horizon or model.spec.horizon
        self.pacing = pacing
        self.max_campaigns = max_campaigns
        policy.check_horizon(self.horizon)
        self.cache = None
        if cache_bytes and model.team is None and model.backbone.layout is not None:
            self.cache = Cache(policy, room=cache_bytes, rows=max_campaigns, horizon=self.horizon)
        self.decide = partial(decide, policy, self.cache)
        self.campaigns: OrderedDict[str, Campaign] = OrderedDict()  # least recently used first
        self.training_units = TrainingUnits(policy, observation)
        # ("bid", ""), ("guard", name), ("fallback", reason), ("unlike training", number), ...
        self.counts: Counter[tuple[str, str]] = Counter()
        # currency of the steps with a result: spent, an equal share of the budget
        self.spend = {"reported": 0.0, "even": 0.0}

    def check_open(self, *, move: bool = False, beside: Collection[str] = ()) -> None:
        """Check that this model may answer the open campaigns of the journal, and can.

        Args:
            move: campaigns that began with another model go on with this one.
            beside: names of models of this server, which answer their campaigns themselves.

        Raises:
            ValueError: a campaign began with another model, or has more steps than `horizon`.
        """
        open_models = self.journal.open_models()
        longest = max((steps for _, _, steps in open_models), default=0)
        if longest > self.horizon:
            raise ValueError(
                f"horizon: expected at least {longest}, the steps of an open campaign in"
                f" {self.journal.path}, got {self.horizon}; raise it, or end that campaign first"
            )
        foreign = [row for row in open_models if row[0] not in (self.name, *beside)]
        others = [f"{count} of {model}" for model, count, _ in foreign]
        if others and not move:
            raise ValueError(
                f"model: expected {self.name}, got open campaigns of another model in"
                f" {self.journal.path}: {', '.join(others)}; serve that run, take another journal,"
                " or let them go on with this model by move_campaigns=true"
            )
        for model, count, _ in foreign:
            self.journal.write([move_campaigns(self.name, model)])
            logger.warning("%d campaigns of %s go on with %s", count, model, self.name)

    # -- requests, which wait for decisions and writes --

    async def open_async(
        self, settings: Json, key: str | None, write: Write, *, id: str | None = None
    ) -> Json:
        """Open a campaign, or find the one with this key. Returns what the journal has of it.

        Args:
            id: of a new campaign, from `new_id`.
        """
        record = self.journal.find_by_key(key) if key else None
        if record is None:
            record = await self._write_new(id or new_id(), settings, key, write)
        check_same_settings(record, settings)
        return record

    async def _write_new(self, id: str, settings: Json, key: str | None, write: Write) -> Json:
        """A campaign that is written now, or the one that another process has just opened with its
        key.
        """
        complete = self.check(settings)
        complete["text"] = Campaign.begin(complete, self.observation).task
        is_new = await write([insert_campaign(id, key, complete, self.name)])
        record = self.journal.campaign(id) if is_new else self.journal.find_by_key(key or "")
        assert record is not None, "it was just written"
        if is_new:  # so that its first tick waits for no replay
            self.remember(self._begin_campaign(record))
        return record

    async def tick_async(self, id: str, request: Json, decide: Decide, write: Write) -> str:
        """Answer a tick. Returns JSON."""
        while True:
            pending = self.admit(id, request)
            if pending.answer is not None:
                self.counts["repeated", ""] += 1
                return pending.answer
            decision = None
            if pending.needs_decision:
                decision = await decide(DecisionRequest(id, pending.campaign.history()))
            answer = self.answer(pending, decision)
            if await write(self.entries(pending)):
                self.commit(pending)
                return answer
            # another process has answered this tick: replay it from the journal
            self.campaigns.pop(id, None)

    async def close_async(self, id: str, write: Write) -> None:
        if self.journal.campaign(id) is None:
            raise RequestError(404, "id", "no such campaign")
        await write([end_campaign(id, "closed")])
        self.campaigns.pop(id, None)

    # -- the steps of a tick --

    def check(self, settings: Json) -> Json:
        """Check the settings of a new campaign. Returns all SETTINGS, None where not given."""
        settings = dict.fromkeys(SETTINGS) | settings
        horizon = settings["horizon"]
        text = settings["text"]
        if horizon > self.horizon:
            message = (
                f"expected at most {self.horizon} steps, the most this policy supports,"
                f" got {horizon}"
            )
            raise RequestError(422, "horizon", message)
        if text and self.observation.text == "none":
            message = "expected none: this policy was trained without task texts"
            raise RequestError(422, "text", message)
        if text is None and self.observation.text == "served":
            message = "expected the task text of this campaign, got none"
            raise RequestError(422, "text", message)
        if settings["target_return"] is not None and not self.policy.return_conditioned:
            message = "expected none: this policy conditions on no return"
            raise RequestError(422, "target_return", message)
        return settings

    def admit(self, id: str, request: Json) -> PendingTick:
        """Check a request: it is the next tick of its campaign, or one that was answered and is
        repeated.
        """
        index = request["index"]
        text = json.dumps(request, sort_keys=True)
        campaign = self.replay(id) if self.is_behind(id, index) else self.campaigns[id]
        if index < campaign.step:
            before = self.journal.tick(id, index)
            if before and before[0] == text:
                return PendingTick(campaign, request, *before)
            message = f"step {index} was answered to another request"
            raise RequestError(409, "index", message, expected=campaign.step)
        self._check_next(campaign, request)
        advanced = campaign.advance(request["result"], request["coming"])
        return PendingTick(advanced, request, text)

    def _check_next(self, campaign: Campaign, request: Json) -> None:
        """Check that a request is the next tick of an open campaign of this model."""
        index = request["index"]
        horizon = campaign.settings["horizon"]
        if campaign.ended:
            raise RequestError(409, "id", "the campaign has ended")
        if campaign.model != self.name:
            raise OtherModelError(campaign.model, self.name)
        if horizon > self.horizon:  # another server, which allows more steps, has opened it
            message = f"the campaign has {horizon} steps, this server allows {self.horizon}"
            raise RequestError(409, "id", message)
        if index != campaign.step:
            message = f"expected {campaign.step}, got {index}"
            raise RequestError(409, "index", message, expected=campaign.step)
        if index == 0 and request["result"] is not None:
            raise RequestError(422, "result", "expected none before the first step")
        if index > 0 and request["result"] is None:
            message = f"expected the result of step {index - 1}, got none"
            raise RequestError(422, "result", message)
        if index >= horizon and request["coming"] is not None:
            raise RequestError(422, "coming", f"expected none: the campaign has {horizon} steps")

    def is_behind(self, id: str, index: int) -> bool:
        """Return whether a campaign is not in memory, or not as far as the journal: another process
        answered its last ticks, or it was another model's.
        """
        campaign = self.campaigns.get(id)
        if campaign is None or campaign.model != self.name:
            return True
        return campaign.step != index and campaign.step != self.journal.count_ticks(id)

    def answer(self, pending: PendingTick, decision: Decision | Exception | None) -> str:
        """The answer in JSON: from the decision, or by linear pacing where it failed or is late."""
        campaign = pending.campaign
        coming = pending.request["coming"]
        multiplier, togo, fallback = self._propose_multiplier(pending, decision)
        guards: list[str] = []
        if coming is not None:
            multiplier, guards = guard_multiplier(multiplier, campaign, coming, self.pacing)
        max_bid = campaign.remaining
        if campaign.settings["bid_cap"] is not None:
            max_bid = min(max_bid, campaign.settings["bid_cap"])
        totals = campaign.totals
        answer = {
            "index": pending.request["index"],
            "multiplier": multiplier,
            "return_to_go": togo,
            "guards": guards,
            "fallback": fallback,
            "remaining": campaign.remaining,
            "spend": float(totals.spend[0]),
            "conversions": float(totals.conversions[0]),
            "max_bid": max(max_bid, 0.0),
            "model": self.name,
        }
        pending.answer = json.dumps(answer)
        return pending.answer

    def _propose_multiplier(
        self, pending: PendingTick, decision: Decision | Exception | None
    ) -> tuple[float, float | None, str | None]:
        """The multiplier before the guard rails, the return-to-go that it was conditioned on, and
        why linear pacing chose it, None where the policy did.
        """
        if not pending.needs_decision:
            return 0.0, None, None
        if isinstance(decision, tuple) and np.isfinite(decision[0]).all():
            action, togo = decision
            return float(action[0]), togo, None
        multiplier = min(linear_pacing(pending.campaign), self.policy.model.spec.high[0])
        fallback = "deadline" if isinstance(decision, TimeoutError) else "model"
        return multiplier, None, fallback

    def entries(self, pending: PendingTick) -> list[Entry]:
        """The entries that must be in the journal before the answer is sent.

        If its first entry is not new, another process was faster.
        """
        id = pending.campaign.id
        index = pending.request["index"]
        entries = [insert_tick(id, index, pending.text, pending.answer or "", self.name)]
        if pending.last:
            entries.append(end_by_tick(entries[0]))
        return entries

    def commit(self, pending: PendingTick) -> None:
        """The answer is in the journal: count it, and go on from there."""
        answer = json.loads(pending.answer or "")
        campaign = pending.campaign
        self.counts["model", self.name] += 1
        for name in answer["guards"]:
            self.counts["guard", name] += 1
        if answer["fallback"]:
            self.counts["fallback", answer["fallback"]] += 1
        result = pending.request["result"]
        if result:
            self.spend["reported"] += result["spend"]
            self.spend["even"] += campaign.settings["budget"] / campaign.settings["horizon"]
            self._report_implausible(campaign, result)
        if pending.needs_decision:
            self._report_unlike_training(campaign)
        if pending.last:
            self.campaigns.pop(campaign.id, None)
            return
        self.counts["no bid" if answer["multiplier"] == 0 else "bid", ""] += 1
        self.remember(campaign.record_action(answer["multiplier"]))

    def _report_implausible(self, campaign: Campaign, result: Json) -> None:
        """Count and log what is implausible about a result. campaign: after this result."""
        for reason in find_implausible(campaign, result):
            self.counts["implausible result", reason] += 1
            logger.warning(
                "campaign %s, result of step %d: %s (%s); is it in the units of the budget?",
                campaign.id,
                campaign.step - 1,
                reason,
                ", ".join(f"{name} {result[name]:g}" for name in ("spend", "won", "conversions")),
            )

    def _report_unlike_training(self, campaign: Campaign) -> None:
        """Count the numbers of the current observation that are far from the training log; log
        those of a campaign's first step.
        """
        unlike = self.training_units.find_unlike(campaign.observations[campaign.step])
        for name, deviations in unlike.items():
            self.counts["unlike training", name] += 1
            if campaign.step == 0:
                logger.warning(
                    "campaign %s: %s is %.0f standard deviations from the mean of the training "
                    "log, so that the multiplier is a guess; are budget, target_cpa, value and "
                    "volume in the units of that log?",
                    campaign.id,
                    name,
                    deviations,
                )

    def remember(self, campaign: Campaign) -> None:
        """Keep a campaign in memory, and no more than max_campaigns."""
        self.campaigns[campaign.id] = campaign
        self.campaigns.move_to_end(campaign.id)
        while len(self.campaigns) > self.max_campaigns:
            self.campaigns.popitem(last=False)

    def remember_open(self, campaign: Campaign) -> None:
        """Keep a campaign in memory unless it has ended."""
        if not campaign.ended:
            self.remember(campaign)

    def load_open(self, begin: Begin | None = None) -> None:
        """Replay this model's open campaigns, the newest ones, at most max_campaigns: no tick then
        waits for a replay.

        Args:
            begin: campaigns of the journal -> the states from which their replay goes on, by id;
                the others are replayed from their first tick.
        """
        records = self.journal.open_campaigns(self.max_campaigns, self.name)
        begun = {} if begin is None else begin(records, self.observation)
        for record in reversed(records):
            # the journal logged the damage; the others are served
            with suppress(DamagedRowError):
                campaign = begun.pop(record["id"], None) or self._begin_campaign(record)
                self.remember_open(self._replay_from(record, campaign))

    def replay(
        self, id: str, changed: Mapping[str, object] = {}, *, until: int | None = None
    ) -> Campaign:
        """Replay a campaign from its state in memory, and keep it there while it is open."""
        campaign = self.replay_from_journal(id, self.campaigns.get(id), changed, until=until)
        self.remember_open(campaign)
        return campaign

    def replay_from_journal(
        self,
        id: str,
        campaign: Campaign | None = None,
        changed: Mapping[str, object] = {},
        *,
        until: int | None = None,
    ) -> Campaign:
        """A campaign from its ticks in the journal. It changes nothing here and may run in any
        thread.

        Args:
            id: of the campaign.
            campaign: the state from which the replay goes on; None: before the first tick.
            changed: settings in place of the journal's.
            until: the step before which the replay ends; None: after the last tick.

        Raises:
            RequestError: there is no such campaign.
        """
        record = self.journal.campaign(id)
        if record is None:
            raise RequestError(404, "id", "no such campaign")
        return self._replay_from(
            record, campaign or self._begin_campaign(record, changed), until=until
        )

    def _replay_from(
        self, record: Json, campaign: Campaign, *, until: int | None = None
    ) -> Campaign:
        """A campaign of the journal after its ticks from this state on. See `replay_from_journal`."""
        ticks = self.journal.ticks(record["id"], campaign.step)
        if until is not None:
            ticks = ticks[: until - campaign.step]
        for tick in ticks:
            campaign = campaign.advance(tick["request"]["result"], tick["request"]["coming"])
            campaign = campaign.record_action(tick["answer"]["multiplier"])
        self.counts["rebuilt", ""] += 1
        if (campaign.ended, campaign.model) == (record["ended"], record["model"]):
            return campaign
        return replace(campaign, ended=record["ended"], model=record["model"])

    def _begin_campaign(self, record: Json, changed: Mapping[str, object] = {}) -> Campaign:
        """A campaign of the journal before its first tick. changed: settings in place of its own."""
        settings = {name: record[name] for name in SETTINGS} | {**changed}
        return Campaign.begin(settings, self.observation, id=record["id"], model=record["model"])


def new_id() -> str:
    return secrets.token_hex(8)


def check_same_settings(record: Json, settings: Json) -> None:
    """Raise a RequestError if a campaign was opened with other settings than these; without a text
    it has one of its own.
    """
    for name, value in settings.items():
        own_text = name == "text" and value is None
        if record[name] != value and not own_text:
            message = f"campaign {record['id']} was opened with this key and other settings"
            raise RequestError(409, "key", message)


def guard_multiplier(
    multiplier: float, campaign: Campaign, coming: dict[str, float], pacing: float | None = None
) -> tuple[float, list[str]]:
    """The multiplier within its limits, and the names of the limits that lowered it.

    Multiplier x mean value is at most the bid cap and the remaining budget. `pacing=20` also caps a
    step's worst-case spend at 20 x remaining budget / remaining steps.
    """
    if not campaign.can_bid:
        return 0.0, ["budget spent"]
    value = coming["value"]
    left = max(campaign.remaining, 0.0)
    limits = {}
    if campaign.settings["bid_cap"] is not None:
        limits["bid cap"] = campaign.settings["bid_cap"]
    limits["remaining"] = left
    if pacing is not None:
        even_share = left / (campaign.settings["horizon"] - campaign.step)
        limits["pacing"] = pacing * even_share / max(coming["volume"], 1)
    guards = []
    if multiplier < 0:
        multiplier = 0.0
        guards.append("negative")
    for name, limit in limits.items():
        if multiplier * value > limit:
            multiplier = limit / value
            if multiplier * value > limit:  # by rounding
                multiplier = math.nextafter(multiplier, 0)
            guards.append(name)
    return multiplier, guards


def linear_pacing(campaign: Campaign) -> float:
    """A multiplier without a policy: the last one, changed towards spending an equal share of the
    remaining budget in each remaining step; target_cpa at the first step. Capped at target_cpa
    while the realised CPA exceeds it."""
    limit = campaign.settings["target_cpa"]
    t = campaign.step
    if t == 0:
        return float(limit)
    even_share = campaign.remaining / (campaign.settings["horizon"] - t)
    slowest, fastest = PACE
    change = fastest
    if campaign.last_spend > 0:
        change = min(max(even_share / campaign.last_spend, slowest), fastest)
    last = float(campaign.actions[t - 1, 0]) or limit
    return float(campaign.totals.cap_multipliers(np.array([last * change]))[0])
