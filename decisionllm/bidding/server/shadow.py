"""A second policy beside the one that answers: it decides on the same ticks after they are
answered, and its bids are kept.

It works in a thread of its own while no tick waits. Its decisions lie in a file beside the journal,
so that neither its faults nor its writes reach an answer.
"""

import json
import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.sqlite_files import open_sidecar
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.campaigns import CampaignManager, PendingTick
from decisionllm.bidding.server.kv_cache import Decision, DecisionRequest
from decisionllm.files import explain_errors
from decisionllm.policy.policy import Policy
from decisionllm.schema import Json

logger = logging.getLogger("decisionllm.bidding.server")
TABLE = (
    "CREATE TABLE IF NOT EXISTS decisions (campaign TEXT NOT NULL, step INTEGER NOT NULL, model "
    "TEXT NOT NULL, answer TEXT NOT NULL,"
    " PRIMARY KEY (campaign, step, model)) WITHOUT ROWID"
)
WAIT = 10.0  # seconds for the lock that other processes hold
PAUSE = 0.005  # seconds that an answer has to leave, and between two looks whether others wait


class Shadow:
    """Decides on answered ticks with another policy. The actions that it conditions on are those
    that were answered.

    Args:
        policy: deterministic, see `CampaignManager`.
        observation: the specification this policy was trained with.
        journal: of the server.
        answering: the specification of the answering policy.
        name: of this model.
        max_queue: most ticks that wait; further ones are dropped and counted.
        options: of CampaignManager.

    Raises:
        ValueError: the file of decisions cannot be written, or see `CampaignManager`.
    """

    def __init__(
        self,
        policy: Policy,
        observation: ObservationSpec,
        journal: Journal,
        answering: ObservationSpec,
        *,
        name: str,
        max_queue: int = 256,
        **options: Any,
    ) -> None:
        self.manager = CampaignManager(policy, observation, journal, name=name, **options)
        self.name, self.max_queue = name, max_queue
        other_text = observation.text not in (answering.text, "served")
        other_target = observation.reward != answering.reward or not policy.return_conditioned
        # settings that are not those of the journal, but the default
        self.changed = dict.fromkeys(["text"] * other_text + ["target_return"] * other_target)
        self.counts: Counter[str] = Counter()  # decided, dropped, failed, higher
        # called with the difference of two multipliers as a share of the larger one
        self.on_difference: Callable[[float], object] = lambda share: None
        # id, request, multiplier of the answer
        self.waiting: deque[tuple[str, Json, float]] = deque()
        self.busy: Callable[[], bool] = lambda: False
        self.arrived = threading.Event()
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        path = journal.sidecar_path("shadow")
        with explain_errors(
            f"shadow: expected a file to write, or one of an earlier shadow, got {path}",
            sqlite3.Error,
        ):
            self.file = open_sidecar(path, TABLE, wait=WAIT)

    def offer(self, id: str, request: Json, answer: str) -> None:
        """A tick was answered: decide on it when there is time for it."""
        if request["coming"] is None:
            return
        if len(self.waiting) >= self.max_queue:
            self.counts["dropped"] += 1
        else:
            self.waiting.append((id, request, json.loads(answer)["multiplier"]))
            self.arrived.set()

    @contextmanager
    def run(self, busy: Callable[[], bool]) -> Iterator[None]:
        """Work until the end of the block. busy: () -> whether a tick waits for its answer."""
        self.busy = busy
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            self.arrived.set()
            thread.join()
            self.counts["dropped"] += len(self.waiting)
            with self.lock:
                self.file.close()

    def decisions(self, id: str) -> dict[int, Json]:
        """The answers that this model would have given to the ticks of a campaign, by step."""
        query = "SELECT step, answer FROM decisions WHERE campaign = ? AND model = ?"
        try:
            with self.lock:
                return {
                    step: json.loads(answer)
                    for step, answer in self.file.execute(query, (id, self.name))
                }
        except sqlite3.Error as error:  # the campaign is shown without them
            logger.error("shadow: %s", error)
            return {}

    def _work(self) -> None:
        while not self.stopped.is_set():
            self.arrived.wait()
            time.sleep(PAUSE)
            self.arrived.clear()
            while self.waiting and not self.busy() and not self.stopped.is_set():
                id, request, multiplier = self.waiting.popleft()
                try:
                    self._decide(id, request, multiplier)
                except Exception:
                    self.counts["failed"] += 1
                    self.manager.campaigns.pop(id, None)
                    logger.exception("shadow: step %d of campaign %s", request["index"], id)
            if self.waiting:
                self.arrived.set()

    def _decide(self, id: str, request: Json, multiplier: float) -> None:
        campaign = self.manager.campaigns.get(id)
        index = request["index"]
        if campaign is not None and campaign.step > index:  # the tick was repeated
            return
        if campaign is None or campaign.step != index:
            campaign = self.manager.replay(id, self.changed, until=index)
        pending = PendingTick(campaign.advance(request["result"], request["coming"]), request, "")
        decided: Sequence[Decision | Exception | None] = [None]
        if pending.needs_decision:
            decided = self.manager.decide([DecisionRequest(id, pending.campaign.history())])
        answer = json.loads(self.manager.answer(pending, decided[0]))
        if answer["fallback"]:
            self.counts["failed"] += 1
            return
        with self.lock:
            decision = {name: answer[name] for name in ("multiplier", "return_to_go", "guards")}
            self.file.execute(
                "INSERT OR IGNORE INTO decisions VALUES (?, ?, ?, ?)",
                (id, index, self.name, json.dumps(decision)),
            )
        self.manager.remember(pending.campaign.record_action(multiplier))
        self.counts["decided"] += 1
        self.counts["higher"] += answer["multiplier"] > multiplier
        self.on_difference(
            abs(answer["multiplier"] - multiplier) / (max(answer["multiplier"], multiplier) or 1.0)
        )
