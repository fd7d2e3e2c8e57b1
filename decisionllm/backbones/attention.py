"""Softmax attention of rows to the keys and values of their texts, which are never copied for each
row, and to their own.

Letters: U texts, L their tokens, B rows, n new tokens, M own keys of a row, H query heads, G key
heads, d head width, m = H / G * n queries of a row for each key head. A grid has `lines` lines of
`width` places, see `Grid`.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from decisionllm.backbones.hf_types import Saved
from decisionllm.backbones.layouts import drop

# places for each row in a grid; with more of them, most of a product would be thrown away
SPARSE = 2


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Compute softmax attention: (B, H, n, d), (B, G, M, d) twice, bias (B or 1, 1, n, M) -> (B, H,
    n, d).
    """
    if q.is_cuda:
        return attend_fused(q, k, v, bias, dropout)
    # On a CPU plain products are as fast in float32, and three times faster in bfloat16.
    queries = _queries(q, k.shape[1])
    weights = _weights(queries @ k.transpose(-1, -2), bias, dropout, q.shape[1])
    mixed: Tensor = weights.to(v.dtype) @ v
    return mixed.view(q.shape)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Compute `attend` in one kernel of torch.

    With `enable_gqa` an H100 takes 0.38 to 0.80 of the time that repeated key heads take, and four
    fifths of the memory, with a mask too (torch 2.11).
    """
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bias.to(q.dtype),
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )


class TextAttention:
    """Attention of B rows to their texts and, after these, to their own keys and values.

    Args:
        keys: per block (U, G, L, d), of the texts.
        values: the same.
        text_index: (B,) the text of each row.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], text_index: Tensor
    ) -> None:
        self.keys = keys
        self.values = values
        self.text_index = text_index

    def attend(
        self, i: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float
    ) -> Tensor:
        """Compute the function `attend` in block i: own keys and values (B, G, M, d), bias (B or 1,
        1, n, L+M) -> (B, H, n, d).
        """
        K, V = self.keys[i], self.values[i]
        if self._groups_rows(q, K):
            used, grid = self._grid
            return grid.attend(q, K[used], V[used], k, v, bias, dropout)
        return attend(
            q,
            torch.cat([self._repeat_for_rows(K), k], 2),
            torch.cat([self._repeat_for_rows(V), v], 2),
            bias,
            dropout,
        )

    def _groups_rows(self, q: Tensor, K: Tensor) -> bool:
        """Return True if all rows of a text are multiplied with its keys at once; else a block
        copies the text for each row, for itself.

        The rule is two text tokens or more for each query of a row and key head: L >= 2 m. Grouping
        sorts queries and scores, m (d + L) numbers a row, in place of keys and values, 2 L d
        numbers. So it wins where a text is long and few tokens are new, as in every decision and in
        training on short windows, by up to 3, and loses up to a half on long windows after short
        texts. It does not matter how many rows have a text: with one row for each text there is
        nothing to sort, and the text is still not copied.

        The fused kernel of a GPU takes all keys of a row as one tensor, so there texts are always
        copied.
        """
        m = q.shape[1] // K.shape[1] * q.shape[2]
        return not q.is_cuda and 2 * m <= K.shape[2]

    def _repeat_for_rows(self, x: Tensor) -> Tensor:
        """Return the keys or values of the text of each row (B, G, L, d), of those of texts (U, G,
        L, d).
        """
        if len(x) == 1:
            return x.expand(len(self.text_index), -1, -1, -1)
        return take(x, self.text_index)

    @cached_property
    def _grid(self) -> tuple[slice | Tensor, "Grid"]:
        """The texts that are multiplied, and the rows sorted by them."""
        used, line = self.text_index.unique(return_inverse=True)
        first, end = int(used[0]), int(used[-1]) + 1
        # Neighbouring texts are a view. If at least half of them are used, multiplying with the
        # others too costs less than a copy.
        if end - first <= 2 * len(used):
            return slice(first, end), Grid(self.text_index - first, end - first)
        return used, Grid(line, len(used))


class Grid:
    """Rows sorted by text into the places of a grid, so that one product serves all rows of a text.

    Every line of the grid belongs to one text. Rows 0 .. 3 with the texts a, b, a, a make

        a | 0 2 3          line 0, 3 places
        b | 1 . .          line 1, 2 places are empty

    A number for each place, (lines * width, ...), is then (lines, G, width * m, ...) with the heads
    before the places: a batch of matrices, one for each text and key head. Empty places hold some
    row, whose products nobody takes.

    As many lines as texts need no copy of their keys and values. If one text has many more rows
    than the mean, almost all places of the other lines would be empty: then a line is as wide as
    the mean, rounded up, and a text with more rows has several lines. These are at most twice as
    many as the texts, and with them the copies of a text; never as many as the rows.

    Args:
        text_index: (B,) the text of each row.
        U: texts.
    """

    def __init__(self, text_index: Tensor, U: int) -> None:
        B, device = len(text_index), text_index.device
        each = torch.arange(B, device=device)
        counts = torch.bincount(text_index, minlength=U)  # (U,) rows of each text
        before = counts.cumsum(0) - counts  # (U,) rows of the texts before it
        order = text_index.argsort(stable=True)
        nth = torch.empty_like(order)
        nth[order] = each - before[text_index[order]]  # (B,) rows of its text before it

        self.width, lines = int(counts.max()), torch.ones_like(counts)  # (U,) lines of each text
        self.text: Tensor | None = None  # (lines,) the text of each line; None: line i is of text i
        if U * self.width > SPARSE * B:
            self.width = -(-B // U)
            lines = -(-counts // self.width)
            self.text = torch.repeat_interleave(torch.arange(U, device=device), lines)
        first = lines.cumsum(0) - lines  # (U,) the first line of each text

        self.place = (first[text_index] + nth // self.width) * self.width + nth % self.width  # (B,)
        places = int(lines.sum()) * self.width
        self.row = torch.zeros(places, dtype=torch.long, device=device)  # (places,)
        self.row[self.place] = each
        self.in_order = torch.equal(self.row, each)  # nothing to sort, no place is empty

    def attend(
        self, q: Tensor, K: Tensor, V: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float
    ) -> Tensor:
        """Compute the function `attend`, with keys and values of the texts (U, G, L, d) before
        those of the rows (B, G, M, d).
        """
        G, L = K.shape[1:3]
        if self.text is not None:
            K, V = take(K, self.text), take(V, self.text)
        queries = _queries(q, G)
        m = queries.shape[2]
        to_text = self.rows(self.lines(queries) @ K.transpose(-1, -2), m)  # (B, G, m, L)
        to_own = queries @ k.transpose(-1, -2)  # (B, G, m, M)
        weights = _weights(torch.cat([to_text, to_own], -1), bias, dropout, q.shape[1]).to(v.dtype)
        of_text = self.rows(self.lines(weights[..., :L]) @ V, m)  # (B, G, m, d)
        of_own = weights[..., L:] @ v
        return (of_own + of_text).reshape(q.shape)

    def lines(self, x: Tensor) -> Tensor:
        """Lay out rows (B, G, m, x) as lines (lines, G, width m, x)."""
        placed = x if self.in_order else take(x, self.row)
        return rearrange(placed, "(l w) g m x -> l g (w m) x", w=self.width)

    def rows(self, x: Tensor, m: int) -> Tensor:
        """Invert `lines`."""
        placed = rearrange(x, "l g (w m) x -> (l w) g m x", m=m)
        return placed if self.in_order else take(placed, self.place)


def _queries(q: Tensor, G: int) -> Tensor:
    """Return the scaled queries of all heads that share a key head: (B, H, n, d) -> (B, G, m, d)."""
    B, H, n, d = q.shape
    scaled: Tensor = q * d**-0.5
    return scaled.reshape(B, G, H // G * n, d)


def _weights(scores: Tensor, bias: Tensor, dropout: float, heads: int) -> Tensor:
    """Return the softmax and dropout of scores (B, G, m, M) of H heads with a bias (B or 1, 1, n,
    M): (B, G, m, M), float32 or wider.
    """
    # as transformers does; bfloat16 takes twice as long
    exact = torch.promote_types(scores.dtype, torch.float32)
    # not len(), which would fix the number of rows in an exported program
    B, G, m, M = scores.shape
    weights = (scores.view(B, heads, G * m // heads, M) + bias).softmax(-1, dtype=exact)
    if dropout:
        weights = drop(weights, dropout)
    return weights.view(scores.shape)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] of the first dimension."""
    taken: Tensor = _Rows.apply(x, index)  # type: ignore[no-untyped-call]  # of torch
    return taken


class _Size(Saved):
    size: torch.Size


class _Rows(torch.autograd.Function):
    """x[index] of the first dimension.

    Torch's own gradient of it takes ten times as long on a CPU.
    """

    @staticmethod
    def forward(ctx: _Size, x: Tensor, index: Tensor) -> Tensor:
        ctx.size = x.shape
        ctx.save_for_backward(index)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: _Size, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        flat = gradient.new_zeros(ctx.size[0], ctx.size[1:].numel())
        return flat.index_add_(0, index, gradient.flatten(1)).view(ctx.size), None
