"""Calls that come at about the same time, executed together by one thread, with a bounded queue and
a bounded wait.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, NamedTuple, NoReturn, TypeVar

from decisionllm.serving.tracing import Timing

# turns of the event loop without a new call after which a batch starts; a request on its way takes
# two or three
QUIET = 8
PAUSE = 0.05  # seconds after an error that is not one of the work
logger = logging.getLogger("decisionllm.serving")
Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """The queue has its most calls."""


class Call(NamedTuple, Generic[Item, Result]):
    item: Item
    result: asyncio.Future[Result]
    timing: Timing


class Batcher(Generic[Item, Result]):
    """`await batcher(item)` returns `work([item, ...])[i]`, called in a thread of its own; a
    resulting exception is raised.

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
        self.thread = ThreadPoolExecutor(1)

    async def __call__(self, item: Item, timing: Timing | None = None) -> Result:
        """The result of the work on an item. timing: is given the times of the call."""
        if len(self.waiting) >= self.queue:
            raise QueueFullError
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
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
        """Work until cancelled. An error of any step is logged and raised to the calls of its batch;
        the next batch is taken.
        """
        self.arrived = asyncio.Event()  # belongs to the event loop that runs now
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
        while quiet < QUIET and len(self.waiting) < self.size and loop.time() < end:
            quiet += 1
            if len(self.waiting) > before:
                quiet = 0
            before = len(self.waiting)
            await asyncio.sleep(0)  # a timer would fire late on a busy machine

    def _take(self) -> list[Call[Item, Result]]:
        """The next calls from the queue, without those that were cancelled."""
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
