"""Episodes under way, with the keys and values of what a policy read."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from decisionllm.backbones.kv_cache import NONE, SessionCache, TextPrefix
from decisionllm.datasets.windows import Steps, collate, cut_windows, window_start
from decisionllm.policy.buffer import ALL, EpisodeBuffer, Rows, check_sizes
from decisionllm.policy.window_reader import WindowReader
from decisionllm.schema import History, Targets
from decisionllm.tokenizers.entity_tokens import EntityTokens

# ids and mask, where only steps are read
NO_TEXT = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)
LAST = slice(-1, None)  # the token of the current observation


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
        # (N, H) the return-to-go that each step conditions on: given, or the predicted maximum
        self.togo = np.zeros(self.rewards.shape, np.float32)
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
        check_sizes(self.policy.spec, histories)
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
        is_predicted = np.isnan(self.targets[each])
        conditioned = each[~is_predicted]
        self.togo[conditioned] = self.returns_to_go(conditioned)
        now = self.now[each]
        start = self._window_start(each)
        # A window is read as a whole where it begins, where it moves on, and after steps without a
        # decision.
        is_whole = (start == now) | (start != self.start[each]) | (self.last_read[each] < now - 1)
        # the cache keeps no entities, which the tokens of later steps would attend to
        is_whole |= policy.model.tokenizer.entities == "all"
        hidden = torch.empty(len(each), policy.model.backbone.width, device=policy.device)
        for whole in (True, False):
            part = is_whole == whole
            # Episodes that condition on the predicted return are read with the null return first.
            predicted = part & is_predicted
            if predicted.any():
                self._predict_returns(each[predicted], whole)
            if part.any():
                hidden[torch.from_numpy(part)] = self._read_current(each[part], whole)
        self.start[each] = start
        self.last_read[each] = now
        self.conditioned_on[each] = self.togo[each, now]
        return hidden

    def _window_start(self, rows: np.ndarray) -> np.ndarray:
        """The step where the window of each of these rows (m,) begins."""
        return window_start(self.now[rows], self.policy.window, self.policy.stride)

    def _predict_returns(self, rows: np.ndarray, whole: bool) -> None:
        """Predict the maximum return at each step of these rows (m,) that is about to be read, see
        `_extend`.
        """
        model = self.policy.model
        now = self.now[rows, None]
        if whole:
            first = self._window_start(rows)[:, None]
            outputs = model.tokenizer.output_positions
        else:
            first = now
            outputs = LAST
        hidden = self._extend(rows, whole, outputs, return_given=False)
        predicted = model.predict_return(hidden).cpu().numpy()  # (m, n)
        step = first + np.arange(predicted.shape[1])
        real = step <= now  # later steps are padding
        row = np.nonzero(real)[0]
        self.togo[rows[row], step[real]] = predicted[real]

    def _read_current(self, rows: np.ndarray, whole: bool) -> Tensor:
        """Hidden states at the current step of these rows (m, D), see `_extend`."""
        last = self.now[rows] - self._window_start(rows)  # of the steps of the window
        if not whole or (last == last[0]).all():
            return self._extend(rows, whole, LAST)[:, -1]
        hidden = self._extend(rows, whole, self.policy.model.tokenizer.output_positions)
        return hidden[torch.arange(len(rows)), torch.from_numpy(last)]

    def _extend(
        self, rows: np.ndarray, whole: bool, outputs: slice, *, return_given: bool = True
    ) -> Tensor:
        """Read rows into the cache.

        Args:
            rows: (m,) in the session.
            whole: read the whole window, not only the last action, the current return and the
                current observation.
            outputs: which of the tokens read have hidden states, n of them.
            return_given: whether the returns are read, or the null return.

        Returns:
            Hidden states (m, n, D).
        """
        model = self.policy.model
        device = self.policy.device
        self._read_texts(rows[self.start[rows] < 0], return_given)
        cached = np.zeros(len(rows), int)  # tokens that the cache holds
        if not whole:
            # of the steps before, whose last action is not yet read
            steps = self.now[rows] - self._window_start(rows)
            cached = steps * model.tokenizer.tokens - 1
        tokens, entities = self._tokens(rows, whole, return_given)
        hidden = model.backbone.append(
            tokens,
            self.caches[return_given],
            torch.from_numpy(cached).to(device),
            torch.from_numpy(rows).to(device),
            output_positions=outputs,
            entities=entities,
        )
        return hidden.float()

    def _tokens(
        self, rows: np.ndarray, whole: bool, return_given: bool
    ) -> tuple[Tensor, EntityTokens | None]:
        """Tokens that are to be read (m, n, D), up to the current observation, and the entities
        beside them; see `_extend`.
        """
        model = self.policy.model
        device = self.policy.device
        now = self.now[rows]
        begin = self._window_start(rows) if whole else now - 1
        window = cut_windows(self._steps(), rows, begin, int((now - begin).max()) + 1)
        batch = collate(window, NO_TEXT, np.zeros(len(rows), int)).to(device)
        null = None if return_given else torch.zeros(len(rows), dtype=torch.bool, device=device)
        tokens = model.tokens(batch, null)[:, :-1]  # the last action is not yet chosen
        if whole:
            return tokens, model.entity_tokens(batch.observations)
        tokens = tokens[:, model.tokenizer.tokens - 1 :]  # from the action of the step before on
        entities = model.entity_tokens(batch.observations[:, -1:])
        if entities is not None:  # the last token is the current observation
            entities = entities._replace(place=torch.full_like(entities.place, tokens.shape[1] - 1))
        return tokens, entities

    def _steps(self) -> Steps:
        """All episodes up to the current step, as the slicer reads them: views."""
        N, H = self.rewards.shape
        first = np.arange(N) * H
        return Steps(
            observations=self.observations.reshape(N * H, -1),
            actions=self.actions.reshape(N * H, -1),
            returns_to_go=self.togo.ravel(),
            first=first,
            end=first + self.now + 1,
        )

    def _read_texts(self, rows: np.ndarray, return_given: bool) -> None:
        """Give these rows their texts in the cache, and read those that it lacks."""
        if return_given not in self.caches:
            self.caches[return_given] = self._empty_cache()
        if len(rows):
            index = torch.from_numpy(rows).to(self.policy.device)
            self.caches[return_given].set_texts(
                index, [self.tasks[i] for i in rows], self._read_distinct
            )

    def _read_distinct(self, tasks: Sequence[str]) -> TextPrefix:
        """Keys and values of these texts."""
        return self.policy.model.backbone.read_texts(tasks)

    def _empty_cache(self) -> SessionCache:
        """A cache of all rows without a text, with room for the tokens of a window."""
        model = self.policy.model
        device = self.policy.device
        nothing = torch.zeros(1, 0, dtype=torch.bool, device=device)
        places = model.backbone.text_places(self.text_room)
        no_texts = model.backbone.read_text(nothing.long(), nothing).with_size(0, places)
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
        arrays = [part for part in vars(self).values() if isinstance(part, np.ndarray)]
        return sum(x.nbytes for x in arrays) + sum(cache.nbytes for cache in self.caches.values())

    def select(self, rows: Rows) -> None:
        """Continue with these episodes alone: (M,) int or (N,) bool."""
        rows = self.numbers(rows)
        super().select(rows)
        self.tasks = [self.tasks[i] for i in rows]
        self.togo = self.togo[rows]
        self.conditioned_on = self.conditioned_on[rows]
        self.start = self.start[rows]
        self.last_read = self.last_read[rows]
        index = torch.from_numpy(rows).to(self.policy.device)
        self.caches = {
            return_given: cache.rows(index) for return_given, cache in self.caches.items()
        }
