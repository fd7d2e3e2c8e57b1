"""Work that is done again and again beside the requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def repeat_work(seconds: float, work: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Wait so many seconds and do the work, again and again until the end of the block."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            await work()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
