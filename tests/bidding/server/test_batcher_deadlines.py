"""Calls of a batcher that are late: one timer ends each at its own time, and the others go on."""

import asyncio
import threading

import pytest

from decisionllm.bidding.server.batcher import Batcher, Deadlines
from tests.conftest import PATIENCE


def test_each_future_fails_at_its_own_time_whatever_the_order():
    async def main():
        loop = asyncio.get_running_loop()
        deadlines = Deadlines()
        now = loop.time()
        never, second, first, done, past = (loop.create_future() for _ in range(5))
        deadlines.add(never, now + 1000)
        deadlines.add(second, now + 0.02)
        deadlines.add(done, now + 0.005)
        deadlines.add(first, now + 0.01)  # the timer of the others rings later
        deadlines.add(past, now - 1)
        done.set_result(7)
        ended = []
        for name, future in (("second", second), ("first", first), ("past", past)):
            future.add_done_callback(lambda _, name=name: ended.append(name))
        await asyncio.wait([second, first, past], timeout=PATIENCE)
        assert ended == ["past", "first", "second"]
        assert all(isinstance(each.exception(), TimeoutError) for each in (past, first, second))
        assert done.result() == 7 and not never.done()
        assert len(deadlines.waiting) == 1, "ended futures are forgotten"

    asyncio.run(main())


def test_a_late_call_ends_while_its_batch_is_at_work_and_the_next_is_answered():
    gate = threading.Event()
    taken = []

    def work(items):
        taken.append(items)
        gate.wait(PATIENCE)
        return items

    async def main():
        loop = asyncio.get_running_loop()
        batcher = Batcher(work, size=2, queue=9)
        run = asyncio.create_task(batcher.run())
        at_work = asyncio.create_task(batcher(1))
        while not taken:
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await batcher(2, due=loop.time() + 0.01)
        gate.set()
        assert await at_work == 1
        assert await batcher(3, due=loop.time() + PATIENCE) == 3
        run.cancel()

    asyncio.run(main())
    assert [2] not in taken, "nobody waits for it any more"
