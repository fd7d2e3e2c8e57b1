"""Numbers in a text become tokens of their own: `[NUM]`, whose embedding is a function of the value."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")  # not the 2 of Maze2D
OCTAVES = range(-2, 7)  # of the Fourier features: wavelengths 8 pi .. pi / 32 of the sign-log value


def token(value: float) -> int:
    """A number as a token id, which is negative: -1 minus the bits of its float32."""
    return -1 - int(np.float32(value).view(np.uint32))


def values(ids: Tensor) -> Tensor:
    """The numbers of token ids, float32; 0 where an id is a word."""
    return (-1 - ids).clamp(min=0).to(torch.int32).view(torch.float32)


def insert(ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str) -> list[int]:
    """Token ids with a `[NUM]` behind the last digit of each number.

    Args:
        ids: of the words and digits of a text.
        offsets: first character of each token and the one after its last.
        text: the text.
    """
    found, numbers = [], list(NUMBER.finditer(text))
    for i, (_, end) in zip(ids, offsets, strict=True):
        found.append(i)
        while numbers and numbers[0].end() <= end:
            found.append(token(float(numbers.pop(0)[0].replace(",", ""))))
    return found


class NumberEmbedding(nn.Module):
    """Values (...) -> embeddings (..., D): Fourier features of sign(x) log(1 + |x|), a linear map, LayerNorm.

    Args:
        width: D of the backbone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wavenumbers = nn.Buffer(2.0 ** torch.tensor([*OCTAVES]), persistent=False)
        self.out = nn.Sequential(nn.Linear(2 * len(OCTAVES) + 1, width), nn.LayerNorm(width))

    def forward(self, values: Tensor) -> Any:
        x = (values.sign() * values.abs().log1p())[..., None]
        phases = x * self.wavenumbers
        return self.out(torch.cat([x, phases.sin(), phases.cos()], -1))
