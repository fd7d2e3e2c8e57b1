"""Sines and cosines of an observation: which numbers are read, and in what precision."""

import math

import torch

from decisionllm.tokenizers.fourier_features import COUNT, FASTEST, SLOWEST, FourierFeatures


class Seen(torch.nn.Module):
    """In place of the layers: what they would read."""

    def forward(self, x):
        return x


def read(x):
    waves = FourierFeatures(x.shape[-1], 8)
    waves.layers = Seen()
    return waves(x)


def test_each_number_is_beside_its_own_waves():
    x = torch.tensor([[0.5, -2.0]])
    ratio = (FASTEST / SLOWEST) ** (1 / (COUNT - 1))
    phases = [number * SLOWEST * ratio**k for number in (0.5, -2.0) for k in range(COUNT)]
    expected = [0.5, -2.0, *map(math.sin, phases), *map(math.cos, phases)]
    torch.testing.assert_close(read(x)[0], torch.tensor(expected), atol=1e-5, rtol=0)


def test_phases_are_exact_where_the_rest_has_16_bits():
    x = torch.full((1, 4), 2.003)
    with torch.autocast("cpu", torch.bfloat16):
        embedded = read(x)
    torch.testing.assert_close(embedded, read(x), atol=0, rtol=0)
