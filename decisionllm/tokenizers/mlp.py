"""A small network of linear maps."""

from itertools import pairwise

from torch import nn


def mlp(*sizes: int, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear maps from each of these sizes to the next, an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])
