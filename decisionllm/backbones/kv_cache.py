"""Keys and values that later tokens attend to: of texts, each once, and of the steps of each row
that refers to a text.

Letters: U texts, L their tokens, N rows, M tokens of steps, G key heads, d head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decisionllm.backbones.attention import TextAttention

NONE = -1  # in place of the text of a row that has none yet


class EncodedTexts(NamedTuple):
    """U texts as a backbone embeds them, see `Backbone.encode`.

    Attributes:
        ids: (U, L) token ids, padded on the right; where a text encoder or the lower blocks read
            texts, the rows of these tokens in a table of features, see `FeatureTable`.
        mask: (U, L) True where real.
    """

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class TextPrefix:
    """A prefix of rows: the keys and values of U texts, per layer (U, G, L, d)."""

    keys: list[Tensor]
    values: list[Tensor]
    text_mask: Tensor  # (U, L) True where real
    text_length: Tensor  # (U,) real tokens: the position of the first step

    def attention(self, text_index: Tensor) -> TextAttention | None:
        """Return the attention of rows to their texts (B,); None where texts have no tokens."""
        if not self.text_mask.shape[1]:
            return None
        return TextAttention(self.keys, self.values, text_index)

    def with_room(self, text_index: Tensor, tokens: int) -> "SessionCache":
        """Return a cache of N rows, each with one of these texts or `NONE` (N,), and with room for
        so many tokens of steps.
        """
        N = len(text_index)
        _, G, _, d = self.keys[0].shape
        keys = [x.new_zeros(N, G, tokens, d) for x in self.keys]
        values = [x.new_zeros(N, G, tokens, d) for x in self.values]
        return SessionCache(self, text_index, keys, values)

    def with_size(self, texts: int, tokens: int) -> "TextPrefix":
        """Return a copy with places for so many texts of so many tokens; what is new is empty."""
        U, L = self.text_mask.shape
        more, longer = texts - U, tokens - L
        added = (0, 0, 0, longer, 0, 0, 0, more)
        keys = [F.pad(x, added) for x in self.keys]
        values = [F.pad(x, added) for x in self.values]
        text_mask = F.pad(self.text_mask, (0, longer, 0, more))
        return TextPrefix(keys, values, text_mask, F.pad(self.text_length, (0, more)))

    def take(self, texts: Tensor) -> "TextPrefix":
        """Return a copy of these texts (n,)."""
        keys = [x[texts] for x in self.keys]
        values = [x[texts] for x in self.values]
        return TextPrefix(keys, values, self.text_mask[texts], self.text_length[texts])

    def replace(self, places: Tensor, texts: "TextPrefix") -> None:
        """Write other texts into these places (n,), in place; they may be shorter."""
        L = texts.text_mask.shape[1]
        for mine, new in ((self.keys, texts.keys), (self.values, texts.values)):
            for layer, new_layer in zip(mine, new, strict=True):
                layer[places, :, :L] = new_layer
        self.text_mask[places] = F.pad(texts.text_mask, (0, self.text_mask.shape[1] - L))
        self.text_length[places] = texts.text_length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for x in (*self.keys, *self.values))


@dataclass(frozen=True)
class Place:
    """The room of a cache for n new tokens of N of its rows."""

    rows: Tensor  # (N,)
    slots: Tensor  # (N, n) places among the keys of steps
    # the rows and the slots where they are neighbours with as many tokens: a view of the buffers
    together: tuple[slice, slice] | None
    end: int  # how many keys of steps are attended to


class SessionCache:
    """Keys and values of N rows: their texts, each once, and steps of each row, for which there is
    room.

    A text has a place among the texts as long as a row refers to it. A place that no row refers to
    keeps its text, which may come back, until another text needs a place. Places are added only if
    all are referred to, so there are at most as many as rows.

    Args:
        texts: which other caches may read too, so they are copied before the first change.
        text_index: (N,) the place of the text of each row, or `NONE`.
        keys: per layer (N, G, M, d), of steps.
        values: the same.
        places: of the texts of tasks that `set_texts` has read.
    """

    def __init__(
        self,
        texts: TextPrefix,
        text_index: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        places: dict[str, int] | None = None,
    ) -> None:
        self.texts = texts
        self.text_index = text_index
        self.keys = keys
        self.values = values
        self.places: dict[str, int] = places or {}
        self.own_texts = False  # True: no other cache reads them

    def set_texts(
        self, rows: Tensor, tasks: Sequence[str], read: Callable[[list[str]], TextPrefix]
    ) -> None:
        """Set the texts of these rows (n,) to those of n tasks.

        Args:
            rows: of the cache.
            tasks: their texts.
            read: called with the distinct tasks that the cache lacks, if any.
        """
        self.text_index[rows] = NONE  # what they had is free, if no other row has it
        new_tasks = [task for task in dict.fromkeys(tasks) if task not in self.places]
        if new_tasks:
            places_in_use = [self.places[task] for task in tasks if task in self.places]
            self._add_texts(new_tasks, read(new_tasks), in_use=places_in_use)
        places = [self.places[task] for task in tasks]
        self.text_index[rows] = torch.tensor(places, device=rows.device)

    def place(self, rows: Tensor, filled: Tensor, n: int, *, whole: bool) -> Place:
        """Return the room for n more tokens of these rows (N,), which have so many tokens of steps
        (N,).

        whole: attend to the whole room, most of which is then hidden, not only to what is filled.
        """
        slots = filled[:, None] + torch.arange(n, device=rows.device)
        used = int(filled.max()) + n
        first = int(rows[0])
        together = None
        if (filled == filled[0]).all() & (rows.diff() == 1).all():
            together = slice(first, first + len(rows)), slice(used - n, used)
        return Place(rows, slots, together, self.keys[0].shape[2] if whole else used)

    def write(self, i: int, place: Place, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values (N, G, n, d) of block i; returns all of these rows (N, G, M,
        d) each.
        """
        whole = []
        for buffer, new in ((self.keys[i], k), (self.values[i], v)):
            if place.together is None:
                buffer[place.rows[:, None], :, place.slots] = new.transpose(1, 2).to(buffer.dtype)
                whole.append(buffer[place.rows, :, : place.end])
            else:
                rows, slots = place.together
                buffer[rows, :, slots] = new
                whole.append(buffer[rows, :, : place.end])
        return whole[0], whole[1]

    def reserve(self, texts: int, tokens: int = 0) -> None:
        """Make room for at least so many texts of so many tokens."""
        U, L = self.texts.text_mask.shape
        if texts > U or tokens > L or not self.own_texts:
            self.texts = self.texts.with_size(max(texts, U), max(tokens, L))
            self.own_texts = True

    def rows(self, index: Tensor) -> "SessionCache":
        """Return the cache of these rows: a copy of their steps, and the same texts, or a copy of
        their own ones if these are few.
        """
        keys = [x[index] for x in self.keys]
        values = [x[index] for x in self.values]
        text_index = self.text_index[index]
        used = text_index[text_index != NONE].unique()
        U = len(self.texts.text_length)
        if 2 * len(used) > U:
            self.own_texts = False
            return SessionCache(self.texts, text_index, keys, values, dict(self.places))
        # the new place by the old one; the last is that of NONE
        moved = torch.full((U + 1,), NONE, device=index.device)
        moved[used] = torch.arange(len(used), device=index.device)
        new = moved.tolist()
        places = {task: new[place] for task, place in self.places.items() if new[place] != NONE}
        return SessionCache(self.texts.take(used), moved[text_index], keys, values, places)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.texts.nbytes + sum(x.nbytes for x in (*self.keys, *self.values))

    def _add_texts(self, tasks: Sequence[str], texts: TextPrefix, in_use: Sequence[int]) -> None:
        """Write the texts of these tasks into places that no row refers to and that are not in
        use.
        """
        U = len(self.texts.text_length)
        taken = {*self.text_index.tolist(), *in_use}
        free = [place for place in range(U) if place not in taken]
        needed = U + len(tasks) - len(free)
        room = U
        if needed > U:
            # Twice the places, so that a server that takes over campaigns one by one copies each
            # text a few times in all.
            room = max(needed, min(2 * U, len(self.text_index)))
        self.reserve(room, texts.text_mask.shape[1])
        places = [*free, *range(U, needed)][: len(tasks)]
        self.texts.replace(torch.tensor(places, device=self.text_index.device), texts)
        self.places = {task: place for task, place in self.places.items() if place not in places}
        self.places |= dict(zip(tasks, places, strict=True))
