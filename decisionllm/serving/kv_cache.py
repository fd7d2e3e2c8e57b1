"""Decisions for campaigns that come back: each keeps its keys and values in a row of one session, as long as there is room.

A row is used only if it holds the very past that is asked about, so that to lose it, or to find another's in it, changes nothing.
"""

from collections import Counter, OrderedDict
from functools import lru_cache

import numpy as np

from decisionllm.policy.policy import Session
from decisionllm.tokenizers import text

ROUND = 32  # tokens: room for texts grows by so many at once


class Cache:
    """room: bytes that keys, values and pasts may take; rows: the most that are of use; horizon: steps that an episode may have."""

    def __init__(self, policy, *, room, rows, horizon):
        self.policy, self.room, self.most, self.horizon = policy, room, rows, horizon
        tokenizer = policy.model.backbone.tokenizer
        self.length = lru_cache(10_000)(lambda task: text.encode(tokenizer, [task])[0].shape[1])  # tokens
        self.counts = Counter()
        self._begin(0)

    def _begin(self, text_room):
        """Make rows with room for texts of so many tokens; none of them is taken."""
        each = Session(self.policy, [""], self.horizon, text_room=text_room).allocate().nbytes
        self.rows = min(self.room // each, self.most)
        self.session = None
        if self.rows:
            self.session = Session(self.policy, [""] * self.rows, self.horizon, text_room=text_room).allocate()
        self.bytes, self.taken, self.free = self.rows * each, OrderedDict(), list(range(self.rows))

    def decide(self, keys, histories):
        """N histories, each of the episode that its key names, no key twice -> actions (N, A), and the returns asked for (N,)."""
        longest = max(self.length(h.task) for h in histories)
        if self.session is not None and longest > self.session.text_room:
            self._begin(-(-longest // ROUND) * ROUND)
        if self.session is None:
            return tuple(np.concatenate(x) for x in zip(*(self.policy.act_with_returns([h]) for h in histories), strict=True))
        starts = range(0, len(keys), self.rows)
        made = [self._decide(keys[i : i + self.rows], histories[i : i + self.rows]) for i in starts]
        return tuple(np.concatenate(parts) for parts in zip(*made, strict=True))

    def _decide(self, keys, histories):
        session, C = self.session, self.policy.model.spec.num_actions
        try:
            rows = self._rows(keys, histories)
            seen, brought = np.stack([h.observations[-1] for h in histories]), [h.rewards[-1:].sum() for h in histories]
            allowed = [np.ones(C, bool) if h.action_masks is None else h.action_masks[-1] for h in histories]
            session.observe(seen, np.array(brought), np.stack(allowed) if C else None, rows)
            return session.decide(rows), session.told[rows]
        except BaseException:
            for key in keys:
                self.forget(key)
            raise

    def _rows(self, keys, histories):
        """Rows that know the pasts of these episodes: their own, or those of whoever was not asked about for longest."""
        session = self.session
        held = [key in self.taken and self._holds(self.taken[key], h) for key, h in zip(keys, histories, strict=True)]
        for key in (key for key, holds in zip(keys, held, strict=True) if holds):
            self.taken.move_to_end(key)
        for key, history in ((k, h) for k, h, holds in zip(keys, histories, held, strict=True) if not holds):
            self.forget(key)
            if not self.free:
                self.forget(next(iter(self.taken)))
                self.counts["evictions"] += 1
            self.taken[key] = self.free.pop()
            session.restore([history], [self.taken[key]])
        self.counts["hits"] += sum(held)
        self.counts["misses"] += len(held) - sum(held)
        rows = np.array([self.taken[key] for key in keys])
        for row, history in zip(rows, histories, strict=True):
            if session.now[row] < len(history.actions):  # what was done is known only when it was answered
                session.record_action(history.actions[-1:], [row])
        return rows

    def _holds(self, row, history):
        """Whether a row holds this past, but for what the last step brought, and perhaps what was done there."""
        s, t = self.session, len(history.actions)
        n, target = s.now[row], self.policy.resolve_targets([history.target_return])[0]
        return bool(
            t
            and n in (t - 1, t)
            and s.start[row] >= 0
            and s.tasks[row] == history.task
            and (s.targets[row] == target or (np.isnan(target) and s.open[row]))
            and np.array_equal(s.observations[row, :t], history.observations[:t].astype(np.float32))
            and np.array_equal(s.actions[row, :n], history.actions[:n].astype(np.float32))
            and np.array_equal(s.rewards[row, : t - 1], history.rewards[: t - 1])
        )

    def forget(self, key):
        """Give up what is remembered of an episode, if anything is."""
        if key in self.taken:
            self.free.append(self.taken.pop(key))
