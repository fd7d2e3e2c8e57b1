"""A desk under traffic: concurrent ticks share a forward and a write to the disk, deadlines are kept, and nothing is answered twice."""

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass

import numpy as np

from decisionllm.envs.auction import journal as journals
from decisionllm.schema import History
from decisionllm.serving.batcher import Batcher, Full
from decisionllm.serving.campaigns import Refused


@dataclass
class Flight:
    """A tick on its way."""

    text: str
    index: int
    task: asyncio.Task


class Service:
    """One event loop, which alone changes the desk; a thread for the model, another for the journal.

    size: most decisions of one forward; queue: most requests that wait for one; wait: seconds that they may be held back for others;
    deadline: seconds from a request to its answer. A tick whose decision is late gets the fallback, a stateless request a 503.
    `run` must be running.
    """

    def __init__(self, policy, desk=None, *, size=64, queue=256, wait=0.002, deadline=1.0, watch=lambda n: None):
        self.policy, self.desk, self.deadline, self.counts = policy, desk, deadline, Counter()
        decide = desk.decide if desk else self._alone
        self.model = Batcher(decide, size=size, queue=queue, wait=wait, watch=watch)
        self.pen = Batcher(self._write, size=size, queue=queue)
        self.flights = {}

    @contextlib.asynccontextmanager
    async def run(self):
        tasks = [asyncio.create_task(batcher.run()) for batcher in (self.model, self.pen)]
        try:
            yield self
        finally:
            while self.flights:  # who was taken in is answered
                await asyncio.wait([flight.task for flight in self.flights.values()])
            for task in tasks:
                task.cancel()
            for batcher in (self.model, self.pen):
                batcher.thread.shutdown(wait=False)

    async def act(self, history, deadline=None):
        """A History -> (action (A,), the return asked for): what Policy.act answers, to the last bit."""
        late = asyncio.get_running_loop().time() + min(deadline or self.deadline, self.deadline)
        try:
            async with asyncio.timeout_at(late):
                return await self._busy(self.model((None, history)))
        except TimeoutError:
            raise Refused(503, "deadline", "the decision was late; ask again", retry=1) from None

    async def open(self, facts, key=None):
        """Facts of a campaign -> what the journal says of it. Two with the same key are one."""
        before = key and await asyncio.to_thread(self.desk.journal.keyed, key)
        if not before:
            id, entry = self.desk.opening(facts, key)
            new = await self._written([entry])
            before = await asyncio.to_thread(self.desk.journal.campaign if new else self.desk.journal.keyed, id if new else key)
        if any(before[name] != value for name, value in facts.items() if name != "text" or value is not None):
            raise Refused(409, "key", "a campaign was opened with this key and other facts", id=before["id"])
        return before

    async def tick(self, id, request, deadline=None):
        """The answer to a tick, in JSON. request: index, key, result, coming. It is worked out and written even if the caller leaves."""
        text, flight = json.dumps(request, sort_keys=True), self.flights.get(id)
        if flight is None:
            late = asyncio.get_running_loop().time() + min(deadline or self.deadline, self.deadline)
            flight = self.flights[id] = Flight(text, request["index"], asyncio.create_task(self._tick(id, request, late)))
            flight.task.add_done_callback(lambda task: (self.flights.pop(id), task.cancelled() or task.exception()))
        elif flight.text != text:
            raise Refused(409, "index", f"step {flight.index} is just being answered", expected=flight.index)
        return await asyncio.shield(flight.task)

    async def _tick(self, id, request, late):
        pending = self.desk.admit(id, request)
        if pending.answer is not None:
            self.counts["repeated"] += 1
            return pending.answer
        decided, reason = None, "model"
        if pending.return_conditioned:
            try:
                async with asyncio.timeout_at(late):
                    decided = await self._busy(self.model((id, pending.campaign.history())))
            except TimeoutError:
                reason = "deadline"
            except Refused:
                raise
            except Exception:  # whatever a model can raise; the desk has logged it
                reason = "model"
        self.desk.settle(pending, decided, reason)
        if await self._written(self.desk.entries(pending)):
            self.desk.commit(pending)
            return pending.answer
        self.desk.campaigns.pop(id, None)  # another process was asked the same
        return await self._tick(id, request, late)

    async def close(self, id):
        """End a campaign -> what the journal says of it."""
        if flight := self.flights.get(id):
            await asyncio.wait([flight.task])
        known = await asyncio.to_thread(self.desk.journal.campaign, id)
        if known is None:
            raise Refused(404, "id", "no such campaign")
        await self._written([journals.ended(id, "closed")])
        self.desk.campaigns.pop(id, None)
        return await asyncio.to_thread(self.desk.journal.campaign, id)

    async def _written(self, entries):
        """Whether the first of these entries was new; all are on the disk."""
        try:
            return await self._busy(self.pen(entries))
        except Refused:
            raise
        except Exception as error:  # a full disk, a file that went away
            self.counts["journal failed"] += 1
            raise Refused(503, "journal", "the answer could not be kept, so it is not given; ask again", retry=1) from error

    async def _busy(self, call):
        try:
            return await call
        except Full:
            self.counts["busy"] += 1
            raise Refused(503, "queue", "too many requests are waiting; ask again", retry=1) from None

    def _write(self, batches):
        """Entries of several ticks in one transaction -> of each, whether its first one was new."""
        new = self.desk.journal.write([entry for entries in batches for entry in entries])
        starts = np.cumsum([0, *map(len, batches[:-1])])
        return [new[i] for i in starts]

    def _alone(self, asked):
        """Decide where there is no desk: each by itself."""
        made = []
        for _, history in asked:
            try:
                action, togo = (x[0] for x in self.policy.act_with_returns([history]))
                made.append((action, float(togo) if self.policy.return_conditioned else None))
            except Exception as error:
                made.append(error)
        return made


def history(policy, asked):
    """What a stateless request says -> History. asked: observations, actions, rewards, target_return, text, action_masks."""
    spec = policy.model.spec
    t = len(asked["observations"]) - 1
    rows = {"observations": (t + 1, spec.observation_dim), "actions": (t, spec.action_dim), "rewards": (t,)}
    if asked["action_masks"] is not None:
        rows["action_masks"] = t + 1, spec.num_actions
    if t >= spec.horizon and policy.model.tokenizer.timesteps is not None:
        raise Refused(422, "observations", f"expected at most {spec.horizon} steps, got {t + 1}")
    if asked["action_masks"] is not None and not spec.num_actions:
        raise Refused(422, "action_masks", "expected none: this policy's actions are continuous")
    arrays = {}
    for name, shape in rows.items():
        kind = {"action_masks": bool, "rewards": np.float64}.get(name, np.float32)
        try:
            array = np.array(asked[name], kind)
        except ValueError:  # rows of different lengths
            array = np.zeros(0)
        arrays[name] = array if asked[name] else np.zeros((0, *shape[1:]), kind)
        if arrays[name].shape != shape:
            raise Refused(422, name, f"expected {' x '.join(map(str, shape))} numbers, to go with {t + 1} observations")
    if asked["action_masks"] is not None and not arrays["action_masks"].any(1).all():
        raise Refused(422, "action_masks", "expected an allowed action in every step")
    return History(**arrays, target_return=asked["target_return"], task=asked["text"])
