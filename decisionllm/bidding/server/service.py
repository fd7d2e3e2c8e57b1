"""A campaign manager under concurrent requests: ticks share a forward and a write to the disk, and
deadlines are kept.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Self

from decisionllm.bidding.journal.journal import DamagedRowError, Journal, JournalBusyError
from decisionllm.bidding.journal.rows import Entry
from decisionllm.bidding.server import logs
from decisionllm.bidding.server.batcher import Batcher, QueueFullError
from decisionllm.bidding.server.campaigns import (
    Begin,
    CampaignManager,
    OtherModelError,
    RequestError,
    new_id,
)
from decisionllm.bidding.server.kv_cache import Decision, DecisionRequest
from decisionllm.bidding.server.models import Choice, DecideAll, Model, Models
from decisionllm.bidding.server.reservations import Reservations
from decisionllm.bidding.server.shadow import Shadow
from decisionllm.bidding.server.tracing import NoTraces, TickTrace, Timing, Traces
from decisionllm.schema import History, Json

logger = logging.getLogger("decisionllm.bidding.server")
LEAST_WAIT = 0.25  # seconds that a write has at least: linear pacing answers after the deadline
NO_TRACE = NoTraces()
COMMIT = 0.1  # seconds for the write itself, once the journal is free


@dataclass(frozen=True)
class WriteRequest:
    entries: list[Entry]
    until: float  # time.monotonic() at which it gives up waiting for the journal


@dataclass
class InFlightTick:
    request: Json
    task: asyncio.Task[str]


class Service:
    """Answers requests at the same time: the event loop owns the campaign managers, one thread runs
    the models, one writes the journal.

    Use it within `async with service.run()`, which reads the whole journal at its start and closes
    it at its end.

    Args:
        models: that decide.
        max_batch_size: most decisions of one forward.
        max_queue: most requests that wait for one.
        batch_wait: seconds that a request may wait for others.
        deadline: seconds from a request to its answer. A late tick is answered by linear pacing, a
            late history by a 503, and so is a tick that the journal does not take in time.
        on_batch: called with the size of each batch of decisions.
        log: json, text or none, see `logs.write_logs`; while the service runs.
        log_sample: see `logs.write_logs`, as the next one.
        log_slow: seconds.
        shadow: decides on answered ticks without answering.
        begin: see `CampaignManager.load_open`.
        traces: of ticks; None: there are none.
    """

    def __init__(
        self,
        models: Models,
        *,
        max_batch_size: int = 64,
        max_queue: int = 256,
        batch_wait: float = 0.002,
        deadline: float = 1.0,
        on_batch: Callable[[int], object] = lambda n: None,
        log: str = "none",
        log_sample: float = 1.0,
        log_slow: float = logs.SLOW,
        shadow: Shadow | None = None,
        begin: Begin | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.models = models
        self.deadline = deadline
        self.shadow = shadow
        self.written_logs = partial(logs.write_logs, log, sample=log_sample, slow=log_slow)
        self.begin = begin
        self.traces = traces or NO_TRACE
        self.counts: Counter[str] = Counter()
        self.model = Batcher(
            decide_all, size=max_batch_size, queue=max_queue, wait=batch_wait, on_batch=on_batch
        )
        self.journal_writer = Batcher(self._write, size=max_batch_size, queue=max_queue)
        # Ticks that come many in a request take half of the queue: the others find room.
        self.many = asyncio.Semaphore(max(max_queue // 2, 1))
        self.in_flight: dict[str, InFlightTick] = {}
        self.fault: Exception | None = None  # the last error of the journal; None after a write
        self.reservations: Reservations | None = None  # of the exchange, whose faults /readyz tells

    @property
    def manager(self) -> CampaignManager | None:
        """The manager of the model that opens most campaigns; None: there are no campaigns."""
        return self.models.current.manager

    @property
    def journal(self) -> Journal:
        """The journal, which all models share."""
        return self.models.current.campaigns.journal

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Self]:
        with self.written_logs():
            if self.manager:
                await self._read_journal()
            self.loop = asyncio.get_running_loop()
            batchers = (self.model, self.journal_writer)
            tasks = [asyncio.create_task(batcher.run()) for batcher in batchers]
            try:
                with contextlib.ExitStack() as stack:
                    if self.shadow is not None:
                        stack.enter_context(self.shadow.run(self.busy))
                    yield self
            finally:
                logs.log_event("stopping", ticks=len(self.in_flight))
                while self.in_flight:  # accepted ticks are answered
                    await asyncio.wait([tick.task for tick in self.in_flight.values()])
                for task in tasks:
                    task.cancel()
                for batcher in batchers:
                    batcher.thread.shutdown(wait=False)
                if self.manager:
                    await asyncio.to_thread(self.journal.close)
                logs.log_event("stopped")

    async def _read_journal(self) -> None:
        """Check the file of the journal, and replay the open campaigns of all models."""
        try:
            await asyncio.to_thread(self.journal.check_pages)
            for manager in self.models.managers:
                await asyncio.to_thread(manager.load_open, self.begin)
        except sqlite3.Error as error:
            self.report_failure(error)

    async def act(self, history: History, due: float | None = None) -> Decision:
        """The action (A,) and return-to-go that Policy.act_with_returns gives for this history, to
        the last bit.
        """
        request = DecisionRequest(None, history)
        decision = await self._run_decision(due or self.due(), self.models.current.decide, request)
        if isinstance(decision, TimeoutError):
            raise RequestError(503, "deadline", "the decision was late; try again")
        if isinstance(decision, Exception):
            raise decision
        return decision

    async def open(self, settings: Json, key: str | None = None) -> Json:
        """Open a campaign, or find the one with this key. Returns what the journal has of it."""
        id = new_id()
        model = self.models.assign(id)
        record = await model.campaigns.open_async(settings, key, self._write_now, id=id)
        logs.note_campaign(record["id"])
        logs.note_model(record["model"])
        return record

    async def tick(self, id: str, request: Json, due: float | None = None) -> str:
        """The answer to a tick in JSON, decided before the loop's time `due`. It is computed and
        written even if the caller disconnects."""
        logs.note_campaign(id)
        tick = self.in_flight.get(id)
        if tick is None:
            task = asyncio.create_task(self._answer_tick(id, request, due or self.due()))
            tick = self.in_flight[id] = InFlightTick(request, task)
            task.add_done_callback(lambda task: self._finish_tick(id, request, task))
        elif tick.request != request:
            step = tick.request["index"]
            raise RequestError(409, "index", f"step {step} is being answered", expected=step)
        answer = await asyncio.shield(tick.task)
        logs.note_model(json.loads(answer)["model"])
        return answer

    async def _answer_tick(self, id: str, request: Json, due: float) -> str:
        with self.traces.tick(id, request["index"]) as trace:
            write = partial(self._write_entries, due, trace=trace)
            while True:
                model = await self._find_model(id)
                manager = model.campaigns
                await self._catch_up(manager, id, request["index"])
                decide = partial(self._run_decision, due, model.decide, trace=trace)
                try:
                    return await manager.tick_async(id, request, decide, write)
                except OtherModelError as error:
                    # moved to another model of this server while the tick was decided
                    manager.campaigns.pop(id, None)
                    if error.model not in self.models.loaded:
                        raise await self._missing_model_error(error) from error

    async def _missing_model_error(self, error: OtherModelError) -> RequestError:
        """The answer to a tick of a model that is not loaded."""
        if await asyncio.to_thread(self.models.is_coming, error.model):
            return RequestError(503, "model", f"model {error.model} is being loaded; try again")
        return error

    async def _find_model(self, id: str) -> Model:
        """The model that answers a campaign."""
        if len(self.models.loaded) == 1:
            return self.models.current
        model = self.models.find_in_memory(id)
        if model is not None:
            return model
        return await asyncio.to_thread(self.models.find_answering, id)

    async def _catch_up(self, manager: CampaignManager, id: str, index: int) -> None:
        """Replay a campaign that is not as far as the journal, in a thread: in the event loop it
        would delay all requests.
        """
        if manager.is_behind(id, index):
            campaign = manager.campaigns.get(id)
            manager.remember_open(
                await asyncio.to_thread(manager.replay_from_journal, id, campaign)
            )

    def _finish_tick(self, id: str, request: Json, task: asyncio.Task[str]) -> None:
        del self.in_flight[id]
        if not (task.cancelled() or task.exception()) and self.shadow is not None:
            self.shadow.offer(id, request, task.result())

    def busy(self) -> bool:
        """Return whether a request waits for its answer."""
        return bool(self.in_flight) or self.model.age > 0

    async def close(self, id: str) -> None:
        tick = self.in_flight.get(id)
        if tick is not None:
            await asyncio.wait([tick.task])
        manager = self.models.current.campaigns
        await manager.close_async(id, self._write_now)
        self.models.forget(id)

    async def change(self, choice: Choice, before: Choice | None, *, move: bool) -> int:
        """Let other loaded models open campaigns from now on.

        Args:
            before: the choice that a rollback goes back to.
            move: open campaigns of models that are not chosen go on with the chosen models.

        Returns:
            The number of campaigns that were moved.
        """
        self.models.choose(choice, before)
        count = 0
        if move:
            count = await self.models.move_to_choice(self._write_now)
        open_models = await asyncio.to_thread(self.journal.open_models)
        self.models.prune([name for name, _, _ in open_models])
        return count

    def due(self, deadline_ms: int | None = None) -> float:
        """The loop's time at which a request that comes now is late. deadline_ms: if shorter than
        the service's own.
        """
        seconds = self.deadline
        if deadline_ms:
            seconds = min(deadline_ms / 1000, seconds)
        return asyncio.get_running_loop().time() + seconds

    async def _run_decision(
        self,
        due: float,
        decide: DecideAll,
        request: DecisionRequest,
        trace: TickTrace = NO_TRACE,
    ) -> Decision | Exception:
        timing = Timing()
        try:
            decision: Decision = await self.model((decide, request), timing, due=due)
            return decision
        except QueueFullError:
            raise self._queue_full_error() from None
        except Exception as error:  # whatever a model can raise, and TimeoutError
            return error
        finally:
            trace.on_decided(timing)

    async def _write_now(self, entries: list[Entry]) -> bool:
        """Write entries within the deadline of a request that comes now."""
        return await self._write_entries(self.due(), entries)

    async def _write_entries(
        self, due: float, entries: list[Entry], trace: TickTrace = NO_TRACE
    ) -> bool:
        """Write entries to the disk before the loop's time `due`. Returns whether the first of them
        was new.
        """
        now = asyncio.get_running_loop().time()
        left = max(due - now, LEAST_WAIT)
        began = time.monotonic()
        request = WriteRequest(entries, began + left)
        try:
            new = bool(await self.journal_writer(request, due=now + left + COMMIT))
            if isinstance(self.fault, sqlite3.OperationalError):
                self.fault = None
            return new
        except QueueFullError:
            raise self._queue_full_error() from None
        except TimeoutError as error:
            # it may be written yet; a repeated request then has its answer
            raise self.report_failure(
                JournalBusyError("a write takes longer than the deadline")
            ) from error
        except Exception as error:  # a full disk, a file that was removed
            raise self.report_failure(error) from error
        finally:
            trace.on_written(began)

    def report_failure(self, error: Exception) -> RequestError:
        """Log and count that the journal could not be read or written.

        Returns the error of the request.
        """
        if isinstance(error, DamagedRowError):  # the others can be read
            return RequestError(503, "journal", str(error))
        self.counts["journal failed"] += 1
        if str(error) != str(self.fault):
            logger.error("journal %s: %s", self.journal.path, error)
        self.fault = error
        why = f" ({error})" if isinstance(error, JournalBusyError) else ""
        message = f"the answer could not be saved or read{why}, so it is not given; try again"
        return RequestError(503, "journal", message)

    async def check_journal(self) -> None:
        """Raise a RequestError while the journal is damaged, has no room, or takes no write."""
        if self.journal_writer.age > self.deadline:
            raise RequestError(503, "journal", "a write takes longer than the deadline")
        try:
            await asyncio.to_thread(self.journal.check_file)
        except sqlite3.Error as error:
            raise self.report_failure(error) from error
        # which may pass; a damaged file needs a person
        if isinstance(self.fault, sqlite3.OperationalError):
            try:
                await asyncio.to_thread(self.journal.check_room)
                self.fault = None
            except sqlite3.Error as error:
                raise self.report_failure(error) from error
        if self.fault:
            raise RequestError(503, "journal", "it cannot be read or written; see the server log")

    def _queue_full_error(self) -> RequestError:
        self.counts["busy"] += 1
        return RequestError(503, "queue", "too many requests are waiting; try again")

    def _write(self, requests: list[WriteRequest]) -> list[bool | Exception]:
        """Write the entries of several requests in one transaction, leaving out requests that gave
        up.

        Returns of each whether its first entry was new, or why it was not written.
        """
        results: dict[int, bool | Exception] = {}
        while len(results) < len(requests):
            waiting = [i for i in range(len(requests)) if i not in results]
            # the first to give up bounds the wait; the others try again without it
            first = min(waiting, key=lambda i: requests[i].until)
            wait = max(requests[first].until - time.monotonic(), 0.0)
            entries = list(chain.from_iterable(requests[i].entries for i in waiting))
            try:
                new = iter(self.journal.write(entries, wait=wait))
            except JournalBusyError as error:
                results[first] = error
                continue
            for i in waiting:
                results[i], *_ = islice(new, len(requests[i].entries))
        return [results[i] for i in range(len(requests))]


def decide_all(items: list[tuple[DecideAll, DecisionRequest]]) -> list[Decision | Exception]:
    """Decide for the requests of several models, those of each model together."""
    by_model: dict[DecideAll, list[int]] = {}
    for i, (decide, _) in enumerate(items):
        by_model.setdefault(decide, []).append(i)
    decisions: dict[int, Decision | Exception] = {}
    for decide, rows in by_model.items():
        decided = decide([items[i][1] for i in rows])
        decisions |= dict(zip(rows, decided, strict=True))
    return [decisions[i] for i in range(len(items))]
