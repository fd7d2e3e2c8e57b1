"""Calls that come at about the same time, executed together by one thread, with a bounded queue and
a bounded wait.
"""

import asyncio
import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from decisionllm.bidding.server.tracing import Timing

# turns of the event loop without a new call after which a batch starts; a request on its way takes
# two or three
QUIET_TURNS = 8
PAUSE = 0.05  # seconds after an error that is not one of the work
logger = logging.getLogger("decisionllm.bidding.server")
Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """The queue has its most calls."""


class Call(NamedTuple, Generic[Item, Result]):
    item: Item
    result: asyncio.Future[Result]
    timing: Timing


class Deadlines:
    """Futures that fail with TimeoutError at their time.

    All of them share one timer of the event loop: one for each call costs as much as the call.
    """

    def __init__(self) -> None:
        # (time of the loop, a number that no two have, future), the first to end at the front
        self.waiting: list[tuple[float, int, asyncio.Future[Any]]] = []
        self.numbers = count()
        self.timer: asyncio.TimerHandle | None = None
        # when the timer does; it is left as it is while the futures before it are done, so that it
        # is seldom set
        self.rings = math.inf

    def add(self, future: asyncio.Future[Any], due: float) -> None:
        """Let a future fail at this time of the event loop, unless it is done by then."""
        self._forget_done()
        heapq.heappush(self.waiting, (due, next(self.numbers), future))
        if due < self.rings:
            self.set_timer()

    def _forget_done(self) -> None:
        while self.waiting and self.waiting[0][2].done():
            heapq.heappop(self.waiting)

    def set_timer(self) -> None:
        """Set the timer of the event loop that runs now for the first future."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None
        self.rings = math.inf
        if self.waiting:
            self.rings = self.waiting[0][0]
            self.timer = asyncio.get_running_loop().call_at(self.rings, self._ring)

    def _ring(self) -> None:
        now = asyncio.get_running_loop().time()
        while self.waiting and self.waiting[0][0] <= now:
            _, _, future = heapq.heappop(self.waiting)
            if not future.done():
                future.set_exception(TimeoutError())
        self._forget_done()
        self.set_timer()


class Batcher(Generic[Item, Result]):
    """Executes calls that come at about the same time in one batch, in a thread of its own.

    `await batcher(item)` returns `work([item, ...])[i]`; a resulting exception is raised.

    Args:
        work: list of items -> list of results or exceptions.
        size: most items of a batch.
        queue: most calls that wait; beyond it a call raises QueueFullError at once.
        wait: most seconds that a batch waits for further calls; it starts sooner if none come.
            Cancelled calls are dropped.
        on_batch: called with the size of each batch.
    """

    def __init__(
        self,
        work: Callable[[list[Item]], Sequence[Result | Exception]],
        *,
        size: int,
        queue: int,
        wait: float = 0.0,
        on_batch: Callable[[int], object] = lambda n: None,
    ) -> None:
        self.work = work
        self.size = size
        self.queue = queue
        self.wait = wait
        self.on_batch = on_batch
        self.waiting: deque[Call[Item, Result]] = deque()
        self.working: float | None = None  # time of the first call of the batch at work
        self.arrived = asyncio.Event()
        self.deadlines = Deadlines()
        self.thread = ThreadPoolExecutor(1)

    async def __call__(
        self, item: Item, timing: Timing | None = None, *, due: float = math.inf
    ) -> Result:
        """The result of the work on an item.

        Args:
            timing: is given the times of the call.
            due: time of the event loop.

        Raises:
            TimeoutError: there was none when it was due.
        """
        if len(self.waiting) >= self.queue:
            raise QueueFullError
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if due < math.inf:
            self.deadlines.add(future, due)
        self.waiting.append(Call(item, future, timing or Timing()))
        self.arrived.set()
        return await future

    @property
    def age(self) -> float:
        """Seconds since the oldest call that has no result."""
        oldest = self.working
        with suppress(IndexError):  # another thread may ask while the queue runs empty
            oldest = oldest or self.waiting[0].timing.called
        return 0.0 if oldest is None else time.monotonic() - oldest

    async def run(self) -> NoReturn:
        """Work until cancelled. An error of any step is logged and raised to the calls of its
        batch; the next batch is taken.
        """
        # both belong to the event loop that runs now
        self.arrived = asyncio.Event()
        self.deadlines.set_timer()
        if self.waiting:
            self.arrived.set()
        while True:
            taken: list[Call[Item, Result]] = []
            try:
                await self.arrived.wait()
                await self._gather()
                taken = self._take()
                results = await self._results(taken) if taken else []
                self.working = None
                self._answer(taken, results)
            except Exception as error:
                logger.exception("a batch of %d calls", len(taken))
                self.working = None
                self._answer(taken, [error] * len(taken))
                # a fault that stays would leave no time for anything else in the event loop
                await asyncio.sleep(PAUSE)

    async def _gather(self) -> None:
        """Wait for further calls while they come, at most `wait` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.wait
        quiet = 0  # turns without a new call
        before = 0
        while quiet < QUIET_TURNS and len(self.waiting) < self.size and loop.time() < end:
            quiet += 1
            if len(self.waiting) > before:
                quiet = 0
            before = len(self.waiting)
            await asyncio.sleep(0)  # a timer would fire late on a busy machine

    def _take(self) -> list[Call[Item, Result]]:
        """Take the next calls from the queue, leaving out cancelled ones."""
        taken = [self.waiting.popleft() for _ in range(min(self.size, len(self.waiting)))]
        if not self.waiting:
            self.arrived.clear()
        return [call for call in taken if not call.result.done()]

    async def _results(self, taken: list[Call[Item, Result]]) -> Sequence[Result | Exception]:
        """A result or an exception of each call."""
        self.working = taken[0].timing.called
        now = time.monotonic()
        for call in taken:
            call.timing.began = now
        self.on_batch(len(taken))
        items = [call.item for call in taken]
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self.thread, self.work, items)
        except Exception as error:  # the model or the disk failed; the caller reports it
            return [error] * len(taken)
        finally:
            now = time.monotonic()
            for call in taken:
                call.timing.ended = now
        if len(results) != len(taken):
            raise RuntimeError(f"work: expected {len(taken)} results, got {len(results)}")
        return results

    def _answer(
        self, taken: list[Call[Item, Result]], results: Sequence[Result | Exception]
    ) -> None:
        for call, result in zip(taken, results, strict=True):
            if call.result.done():
                continue
            if isinstance(result, Exception):
                call.result.set_exception(result)
            else:
                call.result.set_result(result)
