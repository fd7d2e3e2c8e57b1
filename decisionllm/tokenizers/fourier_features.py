"""Numbers beside their sines and cosines, so that a network learns what changes within a small part
of their range."""

import math

import torch
from torch import Tensor, nn

from decisionllm.tokenizers.mlp import mlp

COUNT = 16  # waves of each number
# radians a unit, the slowest and the fastest; a unit is a deviation of the number in the data.
# Faster ones fit a log better, but a policy of them comes to rest in more places.
SLOWEST, FASTEST = 0.3, 6.0


def append_fourier_features(numbers: Tensor, phases: Tensor) -> Tensor:
    """Numbers (..., n) with the sines and cosines of phases (..., k): (..., n + 2 k)."""
    return torch.cat([numbers, phases.sin(), phases.cos()], -1)


class FourierFeatures(nn.Module):
    """Embeds numbers and their waves by two layers.

    A network of plain numbers learns what is smooth in them long before what is not, such as on
    which side of a wall a ball is. Source: Tancik et al., arXiv 2006.10739.

    Args:
        size: S, how many numbers.
        width: D, of the result.
    """

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        # constants, which no checkpoint holds
        frequencies = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), COUNT)
        self.frequencies = nn.Buffer(frequencies, persistent=False)
        self.layers = mlp(size * (1 + 2 * COUNT), width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., S) in the model's units -> (..., D)."""
        # a product of each number alone, not a matrix product, which autocast would round
        phases = (x[..., None] * self.frequencies).flatten(-2)
        embedded: Tensor = self.layers(append_fourier_features(x, phases))
        return embedded
