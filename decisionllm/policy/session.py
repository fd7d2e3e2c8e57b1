"""Episodes under way, with the keys and values of what a policy read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from decisionllm.backbones.cache import NONE, KVCache, SessionCache
from decisionllm.datasets.windows import Steps, collate, cut, window_start
from decisionllm.policy.buffer import ALL, EpisodeBuffer, Rows
from decisionllm.schema import History

if TYPE_CHECKING:
    from decisionllm.policy.policy import Policy

NO_TEXT = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)  # ids and mask, where only steps are read


class Session(EpisodeBuffer):
    """N episodes with a KV cache: of each distinct text once, and of the steps of each episode.

    Methods with `rows`, (M,) int, act on these episodes alone, so that episodes need not be in lock-step. A row can be given to
    another episode, see `restore`.

    Args:
        policy: that acts.
        tasks: N task texts.
        horizon: most steps of an episode.
        target_returns: one for all or (N,), raw reward units; None: the policy's own.
        text_room: tokens reserved for texts, for episodes that come later.
    """

    policy: "Policy"

    def __init__(
        self, policy: "Policy", tasks: Sequence[str], horizon: int, target_returns: Any = None, *, text_room: int = 0
    ) -> None:
        super().__init__(policy, len(tasks), horizon, target_returns)
        self.tasks = list(tasks)
        self.predicted_returns = np.zeros(self.rewards.shape, np.float32)  # maximum return-to-go at each step, where predicted
        self.conditioned_on = np.zeros(len(tasks), np.float32)  # the return of each row's last decision
        self.text_room = max(text_room, policy.model.backbone.encode(sorted(set(self.tasks)))[0].shape[1])  # tokens
        self.start = np.full(len(tasks), -1)  # where the cached window begins; -1: nothing is cached, not even the text
        self.last_read = np.full(len(tasks), -1)  # the last step that is cached
        self.caches: dict[bool, SessionCache] = {}  # of tokens with returns given, and with the null return

    def restore(self, histories: Sequence[History], rows: Sequence[int] | None = None) -> Self:
        """Take over episodes that have begun; `observe` is next.

        Args:
            histories: their pasts; the last observation is not used.
            rows: replace these episodes, with other texts and target returns; None: the episodes that the session began with.

        Returns:
            The session.
        """
        for i, h in zip(range(len(self.now)) if rows is None else rows, histories, strict=True):
            if rows is not None:
                self.tasks[i], self.start[i] = h.task, -1
                self.targets[i] = self.policy.resolve_targets([h.target_return])[0]
                self.observations[i], self.actions[i], self.rewards[i] = 0, 0, 0
                if self.masks is not None:
                    self.masks[i] = True
            self.restore_row(i, h)
        return self

    def histories(self, rows: Rows = ALL) -> list[History]:
        """The episodes up to the current observation, as records."""
        return [
            History(
                self.observations[i, : t + 1], self.actions[i, :t], self.rewards[i, :t],
                None if np.isnan(self.targets[i]) else float(self.targets[i]), self.tasks[i],
                action_masks=None if self.masks is None else self.masks[i, : t + 1],
            )
            for i, t in zip(np.arange(len(self.now))[rows], self.now[rows], strict=True)
        ]  # fmt: skip

    @torch.inference_mode()
    def decide(self, rows: Rows = ALL) -> np.ndarray:
        """Actions (M, A) for the current observations of these rows, raw units."""
        each = np.arange(len(self.now))[rows]
        hidden = self.read(rows)
        current = self.observations[each, self.now[each]]
        return self.policy.decider.act(hidden, self.allowed(each), current, [self.tasks[i] for i in each])

    @torch.inference_mode()
    def read(self, rows: Rows = ALL) -> Tensor:
        """Hidden states at the current observations of these rows (M, D)."""
        policy, now, each = self.policy, self.now[rows], np.arange(len(self.now))[rows]
        if policy.model.backbone.layout is None:  # an architecture without a cache
            hidden, self.conditioned_on[rows] = policy.read(self.histories(rows))
            return hidden
        start = window_start(now, policy.window, policy.stride)
        N, H = len(now), self.rewards.shape[1]
        first, togo = np.arange(N) * H, np.nan_to_num(self.returns_to_go(rows))
        steps = Steps(
            observations=self.observations[rows].reshape(N * H, -1), actions=self.actions[rows].reshape(N * H, -1),
            returns_to_go=togo.ravel(), first=first, end=first + now + 1,
            action_masks=None if self.masks is None else self.masks[rows].reshape(N * H, -1),
        )  # fmt: skip
        hidden = torch.empty(N, policy.model.backbone.width, device=policy.device)
        gap = self.last_read[rows] < now - 1  # steps passed without a decision
        whole = (start != self.start[rows]) | (start == now) | gap
        for part, again in ((np.flatnonzero(whole), True), (np.flatnonzero(~whole), False)):
            predicted = part[np.isnan(self.targets[each[part]])]  # episodes that condition on their predicted maximum return
            if len(predicted):
                self._predict_returns(steps, predicted, each[predicted], start[predicted], again)
            if len(part):
                hidden[torch.from_numpy(part)] = self._extend(steps, part, each[part], start[part], again)
        self.start[rows], self.last_read[rows], self.conditioned_on[rows] = start, now, steps.returns_to_go[first + now]
        return hidden

    def _predict_returns(self, steps: Steps, part: np.ndarray, rows: np.ndarray, start: np.ndarray, again: bool) -> None:
        """Put the predicted maximum return in place of the return-to-go, at each step that is about to be read."""
        hidden = self._extend(steps, part, rows, start, again, return_given=False)
        predicted = self.policy.model.predict_return(hidden).cpu().numpy()
        now = self.now[rows, None]
        at = start[:, None] + np.arange(predicted.shape[1]) if again else now
        row, real = np.nonzero(at <= now)[0], at <= now  # later steps are padding
        self.predicted_returns[rows[row], at[real]] = predicted[real]
        steps.returns_to_go.reshape(-1, self.rewards.shape[1])[part] = self.predicted_returns[rows]  # of a view

    def _extend(
        self, steps: Steps, part: np.ndarray, rows: np.ndarray, start: np.ndarray, again: bool, return_given: bool = True
    ) -> Tensor:
        """Read these rows, which are this part of the steps, into the cache of windows that begin at `start`.

        again: read the whole window, not only the last action, the current return and the current observation. Returns hidden
        states of the current step (rows, D), or, with the null return, of every step read (rows, n, D).
        """
        model, device, k = self.policy.model, self.policy.device, self.policy.model.tokenizer.tokens
        self._read_texts(rows[self.start[rows] < 0], return_given)
        begin = start if again else self.now[rows] - 1
        counts = self.now[rows] - begin + 1
        batch = collate(cut(steps, part, begin, int(counts.max())), NO_TEXT, np.zeros(len(rows), int)).to(device)
        null = None if return_given else torch.zeros(len(rows), dtype=torch.bool, device=device)
        tokens = model.tokens(batch, null)[:, 0 if again else k - 1 : -1]  # the last action is not yet chosen
        cached = np.zeros(len(rows), int) if again else (begin - start) * k + k - 1  # tokens; the last one is an observation
        one = not again or (return_given and (counts == counts[0]).all())  # only the last observation is an output
        hidden = model.backbone.append(
            tokens, self.caches[return_given], torch.from_numpy(cached).to(device), torch.from_numpy(rows).to(device),
            output_positions=slice(-1, None) if one else model.tokenizer.output_positions,
        ).float()  # fmt: skip
        if not return_given:
            return hidden
        return hidden[:, -1] if one else hidden[torch.arange(len(rows)), torch.from_numpy(counts - 1)]

    def _read_texts(self, rows: np.ndarray, return_given: bool) -> None:
        """Give these rows their texts in the cache, and read those that it lacks."""
        if return_given not in self.caches:
            self.caches[return_given] = self._empty_cache()
        if len(rows):
            index = torch.from_numpy(rows).to(self.policy.device)
            self.caches[return_given].set_texts(index, [self.tasks[i] for i in rows], self._read_distinct)

    def _read_distinct(self, tasks: Sequence[str]) -> KVCache:
        """Keys and values of these texts."""
        backbone, device = self.policy.model.backbone, self.policy.device
        ids, mask = backbone.encode(tasks)
        return backbone.read_text(ids.to(device), mask.to(device))

    def _empty_cache(self) -> SessionCache:
        """A cache of all rows without a text, with room for the tokens of a window."""
        model, device = self.policy.model, self.policy.device
        nothing = torch.zeros(1, 0, dtype=torch.bool, device=device)
        no_texts = model.backbone.read_text(nothing.long(), nothing).resized(0, self.text_room)
        text_index = torch.full((len(self.now),), NONE, device=device)
        return no_texts.with_room(text_index, model.tokenizer.tokens * self.policy.window)

    @torch.inference_mode()
    def allocate(self) -> Self:
        """Allocate the caches now, not at the first decision, with place for a text of each row. Returns the session."""
        if self.policy.model.backbone.layout is not None:
            for return_given in (True, False) if self.policy.model.predicts_return else (True,):
                self._read_texts(np.zeros(0, int), return_given)
                self.caches[return_given].reserve(len(self.now))
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the episodes and the caches."""
        known = [part for part in vars(self).values() if isinstance(part, np.ndarray)]
        return sum(x.nbytes for x in known) + sum(cache.nbytes for cache in self.caches.values())

    def select(self, rows: Rows) -> None:
        """Continue with these episodes alone: (M,) int or (N,) bool."""
        rows = np.arange(len(self.now))[rows]
        super().select(rows)
        self.tasks = [self.tasks[i] for i in rows]
        self.predicted_returns, self.conditioned_on = self.predicted_returns[rows], self.conditioned_on[rows]
        self.start, self.last_read = self.start[rows], self.last_read[rows]
        index = torch.from_numpy(rows).to(self.policy.device)
        self.caches = {return_given: cache.rows(index) for return_given, cache in self.caches.items()}
