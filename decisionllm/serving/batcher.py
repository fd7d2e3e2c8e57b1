"""Calls that come at about the same time, executed together by one thread, with a bounded queue and
a bounded wait.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

# turns of the event loop without a new call after which a batch starts; a request on its way takes
# two or three
QUIET = 8


class QueueFullError(Exception):
    """The queue has its most calls."""


class Batcher:
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
        work: Callable[[list[Any]], list[Any]],
        *,
        size: int,
        queue: int,
        wait: float = 0.0,
        on_batch: Callable[[int], object] = lambda n: None,
    ) -> None:
        self.work, self.size, self.queue, self.wait, self.on_batch = (
            work,
            size,
            queue,
            wait,
            on_batch,
        )
        # with the time of the call
        self.waiting: deque[tuple[Any, asyncio.Future[Any], float]] = deque()
        self.working: float | None = None  # time of the first call of the batch at work
        self.arrived, self.thread = asyncio.Event(), ThreadPoolExecutor(1)

    async def __call__(self, item: Any) -> Any:
        if len(self.waiting) >= self.queue:
            raise QueueFullError
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append((item, future, time.monotonic()))
        self.arrived.set()
        return await future

    @property
    def age(self) -> float:
        """Seconds since the oldest call that has no result."""
        times = (
            [self.working] if self.working else [called for *_, called in list(self.waiting)[:1]]
        )
        return time.monotonic() - times[0] if times else 0.0

    async def run(self) -> NoReturn:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self.arrived.wait()
            end, quiet, before = loop.time() + self.wait, 0, 0
            while quiet < QUIET and len(self.waiting) < self.size and loop.time() < end:
                quiet, before = (0 if len(self.waiting) > before else quiet + 1), len(self.waiting)
                await asyncio.sleep(0)  # a timer would fire late on a busy machine
            taken = [self.waiting.popleft() for _ in range(min(self.size, len(self.waiting)))]
            taken = [call for call in taken if not call[1].done()]
            if not self.waiting:
                self.arrived.clear()
            if not taken:
                continue
            self.on_batch(len(taken))
            self.working = taken[0][2]
            try:
                results = await loop.run_in_executor(
                    self.thread, self.work, [item for item, *_ in taken]
                )
            except Exception as error:
                results = [error] * len(taken)
            self.working = None
            for (_, future, _), result in zip(taken, results, strict=True):
                if not future.done():
                    (future.set_exception if isinstance(result, Exception) else future.set_result)(
                        result
                    )
