"""Rows of tokens without their padding, as the maps of a block read them.

The norms, maps and feed-forward of a block read each token for itself: there padding costs as much
as anything real. Attention needs the rows.
"""

from typing import Protocol

import torch
from torch import Tensor

from decisionllm.backbones.attention import take


class TokenLayout(Protocol):
    """The layout of the tokens of B rows between the attentions of the blocks.

    Letters: B rows, n tokens, n' of them at output positions, H heads, d head width.

    Attributes:
        outputs: the slice of `pack`ed tokens that is needed of the last block.
    """

    outputs: slice

    def pack(self, x: Tensor) -> Tensor:
        """Lay out the tokens of rows (B or 1, n, D)."""

    def rows(self, x: Tensor) -> Tensor:
        """Return the heads of all tokens as rows, (B, H, n, d)."""

    def output_rows(self, x: Tensor) -> Tensor:
        """Return the heads of the tokens at the output positions as rows, (B, H, n', d)."""

    def pack_outputs(self, x: Tensor) -> Tensor:
        """Lay out what attention returns for the output positions (B, n', D)."""

    def unpack_outputs(self, x: Tensor) -> Tensor:
        """Return the states at the output positions as rows, (B, n', D)."""


class Rows:
    """Tokens that lie as rows, with their padding."""

    def __init__(self, output_positions: slice) -> None:
        self.outputs = output_positions

    def pack(self, x: Tensor) -> Tensor:
        return x

    rows = output_rows = pack_outputs = unpack_outputs = pack


class PackedTokens:
    """The real tokens of all rows side by side, (1, N, ...); those at output positions are first.

    Args:
        real: (B, n) bool, False: padding, whose keys nothing attends to and whose states nobody
            reads.
        output_positions: of the n tokens; real in each row.
    """

    def __init__(self, real: Tensor, output_positions: slice) -> None:
        self.shape = real.shape
        at_output = torch.zeros_like(real)
        at_output[:, output_positions] = True
        first = at_output.flatten().nonzero()[:, 0]
        others = (real & ~at_output).flatten().nonzero()[:, 0]
        self.outputs = slice(0, len(first))
        self.order = torch.cat([first, others])  # (N,) among the B n
        # (B n,) among the N; padding repeats the first token
        self.place = torch.zeros(real.numel(), dtype=torch.long, device=real.device)
        self.place[self.order] = torch.arange(len(self.order), device=real.device)

    def pack(self, x: Tensor) -> Tensor:
        rows = x.expand(self.shape[0], *x.shape[1:])
        return take(rows.flatten(0, 1), self.order)[None]

    def rows(self, x: Tensor) -> Tensor:
        tokens = take(x[0].transpose(0, 1), self.place)  # (1, H, N, d) -> (B n, H, d)
        return tokens.view(*self.shape, *tokens.shape[1:]).transpose(1, 2)

    def output_rows(self, x: Tensor) -> Tensor:
        tokens = x[0].transpose(0, 1)
        return tokens.reshape(self.shape[0], -1, *tokens.shape[1:]).transpose(1, 2)

    def pack_outputs(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[None]

    def unpack_outputs(self, x: Tensor) -> Tensor:
        return x.view(self.shape[0], -1, x.shape[-1])
