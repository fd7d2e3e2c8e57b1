"""Decisions of many campaigns: each campaign keeps its keys and values in one row of a session, as
long as there is room.

A row is used only if it holds exactly the past of the request, so that evicting or reusing rows
changes no answer.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from decisionllm.policy.policy import Policy
from decisionllm.policy.session import Session
from decisionllm.schema import History

TEXT_ROOM_STEP = 32  # tokens: text room grows in multiples of it
# action (A,), and the return-to-go it was conditioned on
Decision = tuple[np.ndarray, float | None]
log = logging.getLogger(__name__)


class DecisionRequest(NamedTuple):
    # of the campaign whose keys and values may be cached; None: read the whole window alone
    key: str | None
    history: History


class Cache:
    """Keys and values of up to `rows` episodes.

    Args:
        room: bytes for keys, values and pasts.
        rows: most rows that are of use.
        horizon: most steps of an episode.
    """

    def __init__(self, policy: Policy, *, room: int, rows: int, horizon: int) -> None:
        self.policy = policy
        self.room = room
        self.max_rows = rows
        self.horizon = horizon
        self.counts: Counter[str] = Counter()  # hits, misses, evictions
        self._allocate(0)

    def _allocate(self, text_room: int) -> None:
        """Make free rows with room for texts of so many tokens."""
        row_bytes = self._allocate_session(1, text_room).nbytes
        self.rows = min(self.room // row_bytes, self.max_rows)
        self.bytes = self.rows * row_bytes
        self.free = list(range(self.rows))
        self.session: Session | None = None
        if self.rows:
            self.session = self._allocate_session(self.rows, text_room)
        # key -> row, least recently used first
        self.taken: OrderedDict[Hashable, int] = OrderedDict()

    def _allocate_session(self, rows: int, text_room: int) -> Session:
        return Session(self.policy, [""] * rows, self.horizon, text_room=text_room).allocate()

    def decide(
        self, keys: Sequence[Hashable], histories: Sequence[History]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decide for N episodes, each key once.

        Returns actions (N, A) and the returns-to-go they were conditioned on (N,).
        """
        texts = [history.task for history in histories if history.task]
        # no decision continues another one
        if self.policy.window == 1 and not texts:
            return self.policy.act_with_returns(histories)
        if texts:
            self._make_room(texts)
        parts = []
        if self.session is None:
            for history in histories:
                parts.append(self.policy.act_with_returns([history]))
        else:
            for first in range(0, len(keys), self.rows):
                chunk = slice(first, first + self.rows)
                parts.append(self._decide(self.session, keys[chunk], histories[chunk]))
        actions, returns = zip(*parts, strict=True)
        return np.concatenate(actions), np.concatenate(returns)

    def _make_room(self, tasks: Sequence[str]) -> None:
        """Allocate anew, and forget all rows, if one of these texts is longer than the room."""
        ids, _ = self.policy.model.backbone.encode(tasks)
        longest = ids.shape[1]
        if self.session is not None and longest > self.session.text_room:
            self._allocate(-(-longest // TEXT_ROOM_STEP) * TEXT_ROOM_STEP)

    def _decide(
        self, session: Session, keys: Sequence[Hashable], histories: Sequence[History]
    ) -> tuple[np.ndarray, np.ndarray]:
        try:
            rows = self._assign_rows(session, keys, histories)
            observations = np.stack([history.observations[-1] for history in histories])
            rewards = np.array([history.rewards[-1:].sum() for history in histories])
            session.observe(observations, rewards, self._stack_masks(histories), rows)
            return session.decide(rows), session.conditioned_on[rows]
        except BaseException:
            for key in keys:
                self.forget(key)
            raise

    def _stack_masks(self, histories: Sequence[History]) -> np.ndarray | None:
        """The actions (N, C) that are allowed now; None of continuous ones."""
        count = self.policy.model.spec.num_actions
        if not count:
            return None
        masks = np.ones((len(histories), count), bool)
        for mask, history in zip(masks, histories, strict=True):
            if history.action_masks is not None:
                mask[:] = history.action_masks[-1]
        return masks

    def _assign_rows(
        self, session: Session, keys: Sequence[Hashable], histories: Sequence[History]
    ) -> np.ndarray:
        """Return the rows (N,) that hold the pasts of these episodes: their own, or the least
        recently used ones, restored.
        """
        misses = []
        targets = self.policy.resolve_targets([history.target_return for history in histories])
        for key, history, target in zip(keys, histories, targets, strict=True):
            row = self.taken.get(key)
            if row is not None and self._holds(session, row, history, target):
                self.taken.move_to_end(key)
            else:
                misses.append((key, history))
        for key, history in misses:
            self.forget(key)
            if not self.free:
                self.forget(next(iter(self.taken)))
                self.counts["evictions"] += 1
            self.taken[key] = self.free.pop()
            session.restore([history], [self.taken[key]])
        self.counts["hits"] += len(keys) - len(misses)
        self.counts["misses"] += len(misses)
        rows = np.array([self.taken[key] for key in keys])
        for row, history in zip(rows, histories, strict=True):
            # the action that was answered, after the guard rails
            if session.now[row] < len(history.actions):
                session.record_action(history.actions[-1:], [row])
        return rows

    def _holds(self, session: Session, row: int, history: History, target: float) -> bool:
        """Return whether a row holds this past, except for the last reward and possibly the last
        action. target: the history's target return; NaN: the predicted maximum.
        """
        t = len(history.actions)
        n = session.now[row]
        if t == 0 or n not in (t - 1, t) or session.start[row] < 0:
            return False
        if session.tasks[row] != history.task:
            return False
        held_target = session.targets[row]
        if held_target != target and not (np.isnan(held_target) and np.isnan(target)):
            return False
        pairs = (
            (session.observations[row, :t], history.observations[:t].astype(np.float32)),
            (session.actions[row, :n], history.actions[:n].astype(np.float32)),
            (session.rewards[row, : t - 1], history.rewards[: t - 1]),
        )
        return all(np.array_equal(held, requested) for held, requested in pairs)

    def forget(self, key: Hashable) -> None:
        """Free the row of an episode, if it has one."""
        if key in self.taken:
            self.free.append(self.taken.pop(key))


def decide(
    policy: Policy, cache: Cache | None, requests: Sequence[DecisionRequest]
) -> list[Decision | Exception]:
    """Decide for requests with a key in one cached batch, for others, and for those of a batch that
    failed, one by one.

    Returns the decision of each request, or the exception it raised.
    """
    decisions: dict[int, Decision | Exception] = {}
    if cache is not None:
        decisions |= _decide_together(policy, cache, requests)
    for i, (_, history) in enumerate(requests):
        if i not in decisions:
            decisions[i] = _decide_alone(policy, history)
    return [decisions[i] for i in range(len(requests))]


def _decide_together(
    policy: Policy, cache: Cache, requests: Sequence[DecisionRequest]
) -> dict[int, Decision]:
    """The decisions of the requests with a key, by their places; {} where they failed."""
    places = [i for i, (key, _) in enumerate(requests) if key is not None]
    if not places:
        return {}
    keys, histories = zip(*(requests[i] for i in places), strict=True)
    try:
        actions, returns = cache.decide(keys, histories)
    except Exception:
        log.exception("a batch of %d decisions failed; deciding them one by one", len(places))
        return {}
    return dict(zip(places, _decisions(policy, actions, returns), strict=True))


def _decide_alone(policy: Policy, history: History) -> Decision | Exception:
    """The decision of one request, or the exception it raised."""
    try:
        actions, returns = policy.act_with_returns([history])
        (decision,) = _decisions(policy, actions, returns)
        return decision
    except Exception as error:
        log.exception("a decision failed")
        return error


def _decisions(policy: Policy, actions: np.ndarray, returns: np.ndarray) -> list[Decision]:
    """Actions (N, A) and returns-to-go (N,) as decisions."""
    conditioned_on: list[float | None] = [None] * len(actions)
    if policy.return_conditioned:
        conditioned_on = returns.tolist()
    return list(zip(actions, conditioned_on, strict=True))
