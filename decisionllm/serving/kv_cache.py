"""Decisions of many campaigns: each campaign keeps its keys and values in one row of a session, as
long as there is room.

A row is used only if it holds exactly the past of the request, so that evicting or reusing rows
changes no answer.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from decisionllm.policy.policy import Policy
from decisionllm.policy.session import Session
from decisionllm.schema import History

ROUND = 32  # tokens: text room grows in multiples of it
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
        self.policy, self.room, self.max_rows, self.horizon = policy, room, rows, horizon
        self.counts: Counter[str] = Counter()  # hits, misses, evictions
        self._allocate(0)

    def _allocate(self, text_room: int) -> None:
        """Make free rows with room for texts of so many tokens."""
        row_bytes = Session(self.policy, [""], self.horizon, text_room=text_room).allocate().nbytes
        self.rows = min(self.room // row_bytes, self.max_rows)
        self.session: Session | None = None
        if self.rows:
            self.session = Session(
                self.policy, [""] * self.rows, self.horizon, text_room=text_room
            ).allocate()
        self.bytes, self.free = self.rows * row_bytes, list(range(self.rows))
        # key -> row, least recently used first
        self.taken: OrderedDict[Hashable, int] = OrderedDict()

    def decide(
        self, keys: Sequence[Hashable], histories: Sequence[History]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decide for N episodes, each key once.

        Returns actions (N, A) and the returns-to-go they were conditioned on (N,).
        """
        # no decision continues another one
        if self.policy.window == 1 and not any(h.task for h in histories):
            return self.policy.act_with_returns(histories)
        longest = self.policy.model.backbone.encode([h.task for h in histories])[0].shape[1]
        if self.session is not None and longest > self.session.text_room:
            self._allocate(-(-longest // ROUND) * ROUND)
        parts: list[Any]
        if self.session is None:
            parts = [self.policy.act_with_returns([h]) for h in histories]
        else:
            chunks = [slice(i, i + self.rows) for i in range(0, len(keys), self.rows)]
            parts = [self._decide(self.session, keys[chunk], histories[chunk]) for chunk in chunks]
        actions, returns = zip(*parts, strict=True)
        return np.concatenate(actions), np.concatenate(returns)

    def _decide(
        self, session: Session, keys: Sequence[Hashable], histories: Sequence[History]
    ) -> Sequence[np.ndarray]:
        C = self.policy.model.spec.num_actions
        try:
            rows = self._rows(session, keys, histories)
            observations = np.stack([h.observations[-1] for h in histories])
            rewards = np.array([h.rewards[-1:].sum() for h in histories])
            masks = [
                np.ones(C, bool) if h.action_masks is None else h.action_masks[-1]
                for h in histories
            ]
            session.observe(observations, rewards, np.stack(masks) if C else None, rows)
            return session.decide(rows), session.conditioned_on[rows]
        except BaseException:
            for key in keys:
                self.forget(key)
            raise

    def _rows(
        self, session: Session, keys: Sequence[Hashable], histories: Sequence[History]
    ) -> np.ndarray:
        """(N,) rows that hold the pasts of these episodes: their own, or the least recently used
        ones, restored.
        """
        hits = [
            key in self.taken and self._holds(session, self.taken[key], h)
            for key, h in zip(keys, histories, strict=True)
        ]
        for key in (key for key, hit in zip(keys, hits, strict=True) if hit):
            self.taken.move_to_end(key)
        for key, history in (
            (k, h) for k, h, hit in zip(keys, histories, hits, strict=True) if not hit
        ):
            self.forget(key)
            if not self.free:
                self.forget(next(iter(self.taken)))
                self.counts["evictions"] += 1
            self.taken[key] = self.free.pop()
            session.restore([history], [self.taken[key]])
        self.counts["hits"] += sum(hits)
        self.counts["misses"] += len(hits) - sum(hits)
        rows = np.array([self.taken[key] for key in keys])
        for row, history in zip(rows, histories, strict=True):
            # the action that was answered, after the guard rails
            if session.now[row] < len(history.actions):
                session.record_action(history.actions[-1:], [row])
        return rows

    def _holds(self, session: Session, row: int, history: History) -> bool:
        """Whether a row holds this past, except for the last reward and possibly the last
        action.
        """
        s, t = session, len(history.actions)
        n, target = s.now[row], self.policy.resolve_targets([history.target_return])[0]
        return bool(
            t
            and n in (t - 1, t)
            and s.start[row] >= 0
            and s.tasks[row] == history.task
            # NaN: the predicted maximum
            and (s.targets[row] == target or (np.isnan(target) and np.isnan(s.targets[row])))
            and np.array_equal(s.observations[row, :t], history.observations[:t].astype(np.float32))
            and np.array_equal(s.actions[row, :n], history.actions[:n].astype(np.float32))
            and np.array_equal(s.rewards[row, : t - 1], history.rewards[: t - 1])
        )

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
    decided: dict[int, Any] = {}
    cached = [i for i, (key, _) in enumerate(requests) if key is not None]
    if cache is not None and cached:
        keys, histories = zip(*(requests[i] for i in cached), strict=True)
        try:
            decided = dict(
                zip(cached, zip(*cache.decide(keys, histories), strict=True), strict=True)
            )
        except Exception:
            log.exception("a batch of %d decisions failed; deciding them one by one", len(cached))
    for i, (_, history) in enumerate(requests):
        if i in decided:
            continue
        try:
            decided[i] = [x[0] for x in policy.act_with_returns([history])]
        except Exception as error:
            log.exception("a decision failed")
            decided[i] = error
    togo = float if policy.return_conditioned else lambda _: None
    return [
        x if isinstance(x, Exception) else (x[0], togo(x[1])) for _, x in sorted(decided.items())
    ]
