"""The models of one server: which one opens a campaign, which one answers it, and how another one
takes over while the server runs.

A campaign keeps the model that the journal names for it. Each model has a campaign manager of its
own over the shared journal.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

import numpy as np

from decisionllm.bidding.journal.campaign_history import Campaign
from decisionllm.bidding.journal.journal import DamagedRowError
from decisionllm.bidding.journal.rows import move_campaign
from decisionllm.bidding.server.campaigns import CampaignManager, Write
from decisionllm.bidding.server.kv_cache import Cache, Decision, DecisionRequest, decide
from decisionllm.policy.policy import Policy
from decisionllm.schema import Json

logger = logging.getLogger("decisionllm.bidding.server")
CHECKED_CAMPAIGNS = 16  # campaigns whose last tick a new model decides before it takes over
MOVE_BATCH = 500  # campaigns of one transaction, so that ticks find room between two
Choice = dict[str, float]  # share of the new campaigns by model, 1 in total
DecideAll = Callable[[list[DecisionRequest]], list[Decision | Exception]]


@dataclass(frozen=True)
class Model:
    """A loaded policy.

    Attributes:
        name: RUN@DIGEST, part of every answer.
        run: its run directory, in the folder of models where it was loaded from there.
        manager: of its campaigns; None: the policy only acts on histories.
        info: the answer of /v1/model.
    """

    name: str
    run: str
    policy: Policy
    manager: CampaignManager | None = None
    info: Json = field(default_factory=dict)

    @property
    def decide(self) -> DecideAll:
        if self.manager is not None:
            return self.manager.decide
        return partial(decide, self.policy, None)

    @property
    def campaigns(self) -> CampaignManager:
        assert self.manager is not None, "this model has no campaigns"
        return self.manager


class Models:
    """Loaded models and the choice among them. The event loop alone changes it.

    Attributes:
        loaded: by name; never empty.
        choice: which models open new campaigns.
        before: the choice before the last change; None: there is none to go back to.
        cache_counts: of the prefix caches of models that were unloaded.
        is_coming: whether a model that is not loaded will be, since another replica serves it.
    """

    def __init__(self, first: Model) -> None:
        self.is_coming: Callable[[str | None], bool] = lambda name: False
        self.loaded = {first.name: first}
        self.choice: Choice = {first.name: 1.0}
        self.before: Choice | None = None
        self.cache_counts: Counter[str] = Counter()

    @property
    def current(self) -> Model:
        """The model with the largest share of new campaigns."""
        name = max(self.choice, key=lambda name: self.choice[name])
        return self.loaded[name]

    @property
    def managers(self) -> list[CampaignManager]:
        return [model.manager for model in self.loaded.values() if model.manager is not None]

    def add(self, model: Model) -> None:
        """Load a model beside the others. All count into the same numbers."""
        current_manager = self.current.manager
        if model.manager is not None and current_manager is not None:
            model.manager.counts = current_manager.counts
            model.manager.spend = current_manager.spend
        self.loaded[model.name] = model

    def add_new(self, models: Mapping[str, Model]) -> None:
        """Load those of the models that are not loaded."""
        for name, model in models.items():
            if name not in self.loaded:
                self.add(model)

    def choose(self, choice: Choice, before: Choice | None) -> None:
        """Let these models open campaigns from now on."""
        if choice != self.choice:
            logger.warning("new campaigns are answered by %s", describe_choice(choice))
        self.choice = choice
        self.before = before

    def prune(self, needed: Iterable[str | None]) -> None:
        """Forget models that neither open campaigns nor may again, and are not needed."""
        retained = {*self.choice, *(self.before or {}), *needed}
        for name in self.loaded.keys() - retained:
            logger.warning("model %s has no campaign left and is unloaded", name)
            manager = self.loaded.pop(name).manager
            if manager is not None and manager.cache is not None:
                self.cache_counts += manager.cache.counts

    @property
    def caches(self) -> list[Cache]:
        return [manager.cache for manager in self.managers if manager.cache is not None]

    # -- campaigns --

    def assign(self, id: str) -> Model:
        """The model that a new campaign of this id begins with."""
        return self.loaded[assign_model(id, self.choice)]

    def find_in_memory(self, id: str) -> Model | None:
        """The model that answers a campaign, if it has it in memory."""
        for model in self.loaded.values():
            campaign = model.campaigns.campaigns.get(id)
            if campaign is not None and campaign.model == model.name:
                return model
        return None

    def campaigns_in_memory(self) -> list[Campaign]:
        """The campaigns in memory, each as the model has it that answers it."""
        campaigns = []
        for model in self.loaded.values():
            for campaign in model.campaigns.campaigns.values():
                if campaign.model == model.name:
                    campaigns.append(campaign)
        return campaigns

    def find_answering(self, id: str) -> Model:
        """The model that the journal names for a campaign; the current one if that is not loaded,
        which then says so. It reads the journal.

        Raises:
            DamagedRowError: the campaign's row is damaged.
        """
        record = self.current.campaigns.journal.campaign(id)
        if record is None:
            return self.current
        return self.loaded.get(record["model"], self.current)

    def forget(self, id: str) -> None:
        """Take a campaign out of memory."""
        for manager in self.managers:
            manager.campaigns.pop(id, None)

    async def move_to_choice(self, write: Write) -> int:
        """Let the chosen models answer the open campaigns of all others.

        Args:
            write: to the journal.

        Returns:
            The number of campaigns that were moved.
        """
        count = 0
        for name in self.loaded.keys() - self.choice.keys():
            manager = self.loaded[name].campaigns
            journal = manager.journal
            # another process may open campaigns with the old model meanwhile: until there are none
            while ids := await asyncio.to_thread(journal.open_ids, MOVE_BATCH, name):
                targets = {id: self.assign(id) for id in ids}
                await write([move_campaign(id, to.name, name) for id, to in targets.items()])
                # states stay in memory, so that the next ticks are not replayed: both observe the same
                for id, to in targets.items():
                    campaign = manager.campaigns.pop(id, None)
                    if campaign is not None:
                        to.campaigns.remember(replace(campaign, model=to.name))
                count += len(ids)
        return count


def assign_model(id: str, choice: Choice) -> str:
    """The model of a campaign: the same for the same id and choice, on any machine."""
    digest = blake2b(id.encode(), digest_size=8).digest()
    at = int.from_bytes(digest, "big") / 2**64
    for name, share in choice.items():
        at -= share
        if at < 0:
            return name
    return name  # the shares sum to 1 within rounding


def set_share(choice: Choice, name: str, share: float) -> Choice:
    """The choice after a model takes this share and the others keep their proportions."""
    if choice.get(name) == share:  # to the last bit, whatever rounding the others would have
        return choice
    others = {other: part for other, part in choice.items() if other != name}
    rest = sum(others.values())
    if share >= 1 or not rest:
        return {name: 1.0}
    scaled = {other: part / rest * (1 - share) for other, part in others.items()}
    return scaled | {name: share}


def describe_choice(choice: Choice) -> str:
    return ", ".join(f"{name} ({share:.0%})" for name, share in choice.items())


def check_new_model(model: Model, serving: Model) -> int:
    """Check a model before it takes over: it observes what the serving one does, has enough steps,
    and its decisions on the last ticks of the journal are finite. It warms the policy up.

    Returns:
        The number of ticks that it decided.

    Raises:
        ValueError: the model cannot take over.
    """
    new, old = model.campaigns, serving.campaigns
    if new.observation != old.observation:
        raise ValueError(
            f"expected a run that observes {old.observation.info()},"
            f" got one of {new.observation.info()}"
        )
    longest = max((steps for _, _, steps in old.journal.open_models()), default=0)
    if new.horizon < max(longest, old.horizon):
        raise ValueError(f"expected a run of at least {old.horizon} steps, got {new.horizon}")
    model.policy.warm_up()
    requests = last_requests(new)
    for request, decision in zip(requests, model.decide(requests), strict=True):
        if isinstance(decision, Exception):
            raise ValueError(f"it fails at campaign {request.key}: {decision}")
        action, _ = decision
        if not np.isfinite(action).all():
            raise ValueError(f"its multiplier for campaign {request.key} is not finite")
    return len(requests)


def last_requests(manager: CampaignManager) -> list[DecisionRequest]:
    """The decisions of the last answered ticks of the newest campaigns, asked again."""
    requests: list[DecisionRequest] = []
    rows, _ = manager.journal.list_latest(CHECKED_CAMPAIGNS)
    for record, answer in rows:
        if answer is None:
            continue
        step = answer["index"]
        try:
            campaign = manager.replay_from_journal(record["id"], until=step)
            tick, *_ = manager.journal.ticks(record["id"], step)  # more may have come meanwhile
        except DamagedRowError:
            continue
        request = tick["request"]
        if request["coming"] is not None:
            advanced = campaign.advance(request["result"], request["coming"])
            requests.append(DecisionRequest(record["id"], advanced.history()))
    return requests
