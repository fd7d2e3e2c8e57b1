"""Episodes under way, with the keys and values of what a policy read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from decisionllm.backbones.cache import NONE, KVCache, SessionCache
from decisionllm.datasets.windows import Steps, collate, cut, window_start
from decisionllm.policy.buffer import ALL, EpisodeBuffer, Rows
from decisionllm.policy.reading import WindowReader
from decisionllm.schema import History, Targets

# ids and mask, where only steps are read
NO_TEXT = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)


@dataclass(frozen=True)
class Deciding:
    """The M rows of a session that decide now."""

    steps: Steps  # up to the current one
    rows: np.ndarray  # (M,) in the session
    start: np.ndarray  # (M,) the step where the window of each begins


class Session(EpisodeBuffer):
    """N episodes with a KV cache: of each distinct text once, and of the steps of each episode.

    Methods with `rows`, (M,) int, act on these episodes alone, so that episodes need not be in
    lock-step. A row can be given to another episode, see `restore`.

    Args:
        policy: that acts, see `Policy.begin`.
        tasks: N task texts.
        horizon: most steps of an episode.
        target_returns: one for all or (N,), raw reward units; None: the policy's own.
        text_room: tokens reserved for texts, for episodes that come later.
    """

    policy: WindowReader

    def __init__(
        self,
        policy: WindowReader,
        tasks: Sequence[str],
        horizon: int,
        target_returns: Targets = None,
        *,
        text_room: int = 0,
    ) -> None:
        super().__init__(policy, len(tasks), horizon, target_returns)
        self.tasks = list(tasks)
        # maximum return-to-go at each step, where predicted
        self.predicted_returns = np.zeros(self.rewards.shape, np.float32)
        # the return of each row's last decision
        self.conditioned_on = np.zeros(len(tasks), np.float32)
        ids, _ = policy.model.backbone.encode(sorted(set(self.tasks)))
        self.text_room = max(text_room, ids.shape[1])  # tokens
        # where the cached window begins; -1: nothing is cached, not even the text
        self.start = np.full(len(tasks), -1)
        self.last_read = np.full(len(tasks), -1)  # the last step that is cached
        # of tokens with returns given, and with the null return
        self.caches: dict[bool, SessionCache] = {}

    def restore(self, histories: Sequence[History], rows: Sequence[int] | None = None) -> Self:
        """Take over episodes that have begun; `observe` is next.

        Args:
            histories: their pasts; the last observation is not used.
            rows: replace these episodes, with other texts and target returns; None: the episodes
                that the session began with.

        Returns:
            The session.
        """
        if rows is None:
            rows = range(len(self.now))
        else:
            for row, history in zip(rows, histories, strict=True):
                self._clear(row, history)
        for row, history in zip(rows, histories, strict=True):
            self.restore_row(row, history)
        return self

    def _clear(self, row: int, history: History) -> None:
        """Free a row for another episode, with its text and target return."""
        self.tasks[row] = history.task
        self.start[row] = -1
        self.targets[row] = self.policy.resolve_targets([history.target_return])[0]
        self.observations[row] = 0
        self.actions[row] = 0
        self.rewards[row] = 0
        if self.masks is not None:
            self.masks[row] = True

    def histories(self, rows: Rows = ALL) -> list[History]:
        """The episodes up to the current observation, as records."""
        return [self._history(row) for row in self.numbers(rows)]

    def _history(self, row: int) -> History:
        t = self.now[row]
        target = None if np.isnan(self.targets[row]) else float(self.targets[row])
        masks = None if self.masks is None else self.masks[row, : t + 1]
        return History(
            observations=self.observations[row, : t + 1],
            actions=self.actions[row, :t],
            rewards=self.rewards[row, :t],
            target_return=target,
            task=self.tasks[row],
            action_masks=masks,
        )

    @torch.inference_mode()
    def decide(self, rows: Rows = ALL) -> np.ndarray:
        """Actions (M, A) for the current observations of these rows, raw units."""
        each = self.numbers(rows)
        hidden = self.read(rows)
        current = self.observations[each, self.now[each]]
        tasks = [self.tasks[i] for i in each]
        return self.policy.decider.act(
            hidden,
            self.policy.on_device(self.masks_at(each)),
            current,
            tasks,
            self.policy.generator,
        )

    @torch.inference_mode()
    def read(self, rows: Rows = ALL) -> Tensor:
        """Hidden states at the current observations of these rows (M, D)."""
        policy = self.policy
        each = self.numbers(rows)  # (M,)
        if policy.model.backbone.layout is None:  # an architecture without a cache
            hidden, self.conditioned_on[each] = policy.read(self.histories(each))
            return hidden
        now = self.now[each]
        start = window_start(now, policy.window, policy.stride)
        steps = self._steps(rows)
        deciding = Deciding(steps, each, start)
        # A window is read as a whole where it begins, where it moves on, and after steps without a
        # decision.
        moves = (start == now) | (start != self.start[each]) | (self.last_read[each] < now - 1)
        hidden = torch.empty(len(each), policy.model.backbone.width, device=policy.device)
        for whole in (True, False):
            part = np.flatnonzero(moves == whole)
            # Episodes that condition on the predicted return are read with the null return first.
            predicted = part[np.isnan(self.targets[each[part]])]
            if len(predicted):
                self._predict_returns(deciding, predicted, whole)
            if len(part):
                hidden[torch.from_numpy(part)] = self._extend(deciding, part, whole)
        self.start[each] = start
        self.last_read[each] = now
        self.conditioned_on[each] = steps.returns_to_go[steps.first + now]
        return hidden

    def _steps(self, rows: Rows) -> Steps:
        """The steps of these rows up to the current one, as the slicer reads them; views where all
        rows are meant.
        """
        now = self.now[rows]
        M, H = len(now), self.rewards.shape[1]
        first = np.arange(M) * H
        masks = None if self.masks is None else self.masks[rows].reshape(M * H, -1)
        return Steps(
            observations=self.observations[rows].reshape(M * H, -1),
            actions=self.actions[rows].reshape(M * H, -1),
            returns_to_go=np.nan_to_num(self.returns_to_go(rows)).ravel(),
            first=first,
            end=first + now + 1,
            action_masks=masks,
        )

    def _predict_returns(self, deciding: Deciding, part: np.ndarray, whole: bool) -> None:
        """Put the predicted maximum return in place of the return-to-go, at each step that is about
        to be read; see `_extend`.
        """
        hidden = self._extend(deciding, part, whole, return_given=False)
        predicted = self.policy.model.predict_return(hidden).cpu().numpy()  # (m, n)
        rows = deciding.rows[part]
        now = self.now[rows, None]
        step = now
        if whole:
            step = deciding.start[part, None] + np.arange(predicted.shape[1])
        real = step <= now  # later steps are padding
        row = np.nonzero(real)[0]
        self.predicted_returns[rows[row], step[real]] = predicted[real]
        # a view
        of_rows = deciding.steps.returns_to_go.reshape(-1, self.rewards.shape[1])
        of_rows[part] = self.predicted_returns[rows]

    def _extend(
        self, deciding: Deciding, part: np.ndarray, whole: bool, *, return_given: bool = True
    ) -> Tensor:
        """Read rows into the cache.

        Args:
            deciding: all rows that decide.
            part: (m,) which of them are read.
            whole: read the whole window, not only the last action, the current return and the
                current observation.
            return_given: whether the returns are read, or the null return.

        Returns:
            Hidden states of the current step (m, D); with the null return, of every step read (m,
            n, D).
        """
        model = self.policy.model
        device = self.policy.device
        k = model.tokenizer.tokens
        rows = deciding.rows[part]
        start = deciding.start[part]
        self._read_texts(rows[self.start[rows] < 0], return_given)
        begin = start if whole else self.now[rows] - 1
        counts = self.now[rows] - begin + 1
        window = cut(deciding.steps, part, begin, int(counts.max()))
        batch = collate(window, NO_TEXT, np.zeros(len(rows), int)).to(device)
        null = None if return_given else torch.zeros(len(rows), dtype=torch.bool, device=device)
        tokens = model.tokens(batch, null)[:, :-1]  # the last action is not yet chosen
        cached = np.zeros(len(rows), int)  # tokens that the cache holds
        if not whole:
            tokens = tokens[:, k - 1 :]  # from the last action on
            cached = (begin - start) * k + k - 1  # up to the last observation
        positions = model.tokenizer.output_positions
        last_alone = not whole or (return_given and (counts == counts[0]).all())
        if last_alone:
            positions = slice(-1, None)
        hidden = model.backbone.append(
            tokens,
            self.caches[return_given],
            torch.from_numpy(cached).to(device),
            torch.from_numpy(rows).to(device),
            output_positions=positions,
        ).float()
        if not return_given:
            return hidden
        if last_alone:
            return hidden[:, -1]
        return hidden[torch.arange(len(rows)), torch.from_numpy(counts - 1)]

    def _read_texts(self, rows: np.ndarray, return_given: bool) -> None:
        """Give these rows their texts in the cache, and read those that it lacks."""
        if return_given not in self.caches:
            self.caches[return_given] = self._empty_cache()
        if len(rows):
            index = torch.from_numpy(rows).to(self.policy.device)
            self.caches[return_given].set_texts(
                index, [self.tasks[i] for i in rows], self._read_distinct
            )

    def _read_distinct(self, tasks: Sequence[str]) -> KVCache:
        """Keys and values of these texts."""
        backbone = self.policy.model.backbone
        device = self.policy.device
        ids, mask = backbone.encode(tasks)
        return backbone.read_text(ids.to(device), mask.to(device))

    def _empty_cache(self) -> SessionCache:
        """A cache of all rows without a text, with room for the tokens of a window."""
        model = self.policy.model
        device = self.policy.device
        nothing = torch.zeros(1, 0, dtype=torch.bool, device=device)
        no_texts = model.backbone.read_text(nothing.long(), nothing).resized(0, self.text_room)
        text_index = torch.full((len(self.now),), NONE, device=device)
        return no_texts.with_room(text_index, model.tokenizer.tokens * self.policy.window)

    @torch.inference_mode()
    def allocate(self) -> Self:
        """Allocate the caches now, not at the first decision, with place for a text of each row.

        Returns the session.
        """
        if self.policy.model.backbone.layout is not None:
            for return_given in self.policy.model.return_inputs:
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
        rows = self.numbers(rows)
        super().select(rows)
        self.tasks = [self.tasks[i] for i in rows]
        self.predicted_returns = self.predicted_returns[rows]
        self.conditioned_on = self.conditioned_on[rows]
        self.start = self.start[rows]
        self.last_read = self.last_read[rows]
        index = torch.from_numpy(rows).to(self.policy.device)
        self.caches = {given: cache.rows(index) for given, cache in self.caches.items()}
