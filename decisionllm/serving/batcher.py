"""Calls that come at about the same time, done together by one thread: at most so many wait, and none waits for company for long."""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

QUIET = 8  # turns of the loop in which nobody joins, after which nobody is waited for: a request on its way takes two or three


class Full(Exception):
    """As many are waiting as may wait."""


class Batcher:
    """`await batcher(item)` is `work([item, ...])[i]`, called in a thread of its own; a result that is an exception is raised.

    size: most items of a call; queue: most that wait for one, beyond which Full is raised at once; wait: seconds that a call may be held
    back for others to join it. It goes sooner when nobody joins, and while one call runs the next one fills anyway. Who gives up
    waiting, or is cancelled, is not worked for. watch(n): told the size of each call.
    """

    def __init__(self, work, *, size, queue, wait=0.0, watch=lambda n: None):
        self.work, self.size, self.queue, self.wait, self.watch = work, size, queue, wait, watch
        self.waiting, self.arrived = deque(), asyncio.Event()
        self.thread = ThreadPoolExecutor(1)

    async def __call__(self, item):
        if len(self.waiting) >= self.queue:
            raise Full
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((item, future))
        self.arrived.set()
        return await future

    async def run(self):
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self.arrived.wait()
            end, quiet, before = loop.time() + self.wait, 0, 0
            while quiet < QUIET and len(self.waiting) < self.size and loop.time() < end:
                quiet, before = (0 if len(self.waiting) > before else quiet + 1), len(self.waiting)
                await asyncio.sleep(0)  # not a time, which ends late where the machine is busy
            taken = [self.waiting.popleft() for _ in range(min(self.size, len(self.waiting)))]
            taken = [(item, future) for item, future in taken if not future.done()]
            if not self.waiting:
                self.arrived.clear()
            if not taken:
                continue
            self.watch(len(taken))
            try:
                made = await loop.run_in_executor(self.thread, self.work, [item for item, _ in taken])
            except Exception as error:
                made = [error] * len(taken)
            for (_, future), result in zip(taken, made, strict=True):
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
