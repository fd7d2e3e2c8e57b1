"""An observation block by block -> one vector: what the agent knows of itself looks at the entities that are there."""

import torch
from torch import nn

HEADS = 4


def inner(width):
    """How many numbers an entity is encoded in, for a backbone of this width."""
    return min(width, 64) // HEADS * HEADS


def blocks(entity_schema):
    """(kind, first, width, count) of each block of an observation: it is numbers first .. first + width * count."""
    first, found = 0, []
    for kind, width, count in entity_schema:
        found.append((kind, first, width, count))
        first += width * count
    return found


class EntityEncoder(nn.Module):
    """Observations in the model's units (..., S) -> (..., D), by a entity_schema as `schema.Spec` has it.

    The own block and each kind of entity have one map, `linear` or `mlp`, shared by all entities of the kind. The entities that
    are there, however many, are pooled by attention whose query is the own block; before that they may look at each other, and
    at the own block, in `layers` layers. The order of entities of a kind is not seen.
    """

    def __init__(self, entity_schema, width, *, embedding="linear", layers=0):
        super().__init__()
        if entity_schema[0][0] != "own" or entity_schema[0][2] != 1 or any(kind == "own" for kind, *_ in entity_schema[1:]):
            raise ValueError(f"Spec.entity_schema: expected the one block own first, with count 1, got {entity_schema}")
        self.blocks, self.maps, D = blocks(entity_schema), nn.ModuleList(), inner(width)
        for _, size, _ in entity_schema:
            deeper = [nn.GELU(), nn.Linear(D, D)] if embedding == "mlp" else []
            self.maps.append(nn.Sequential(nn.Linear(size, D), *deeper))
        self.layers = nn.ModuleList(_Layer(D) for _ in range(layers + 1))
        self.out = nn.Linear(D, width)

    def entities(self, observations):
        """Every block on its own: (..., S) -> encodings (..., 1 + K, inner), the own one first, and which are there (..., 1 + K)"""
        parts, there = [], []
        for i, (each, (_, first, width, count)) in enumerate(zip(self.maps, self.blocks, strict=True)):
            part = observations[..., first : first + width * count].unflatten(-1, (count, width))
            parts.append(each(part))
            there.append(part[..., 0] > 0.5 if i else torch.ones_like(part[..., 0], dtype=torch.bool))
        return torch.cat(parts, -2), torch.cat(there, -1)

    def forward(self, observations):
        x, there = self.entities(observations.flatten(0, -2))
        used = there.any(0)
        x, there = x[:, used], there[:, used]  # room that nobody in the batch takes costs nothing
        for layer in self.layers[:-1]:
            x = layer(x, there, x)
        return self.out(self.layers[-1](x[:, :1], there, x)[:, 0]).unflatten(0, observations.shape[:-1])


class _Layer(nn.Module):
    """Attention, then two maps, each added to what it read; what is not there is not seen."""

    def __init__(self, width):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, there, seen):
        """(n, Q, D), (n, K), (n, K, D) -> (n, Q, D)"""
        split = lambda part: part.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
        key, value = map(split, self.key_value(self.before(seen)).chunk(2, -1))
        scores = split(self.query(self.before(x))) @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
        weights = scores.masked_fill(~there[:, None, None], float("-inf")).softmax(-1)  # the own block is always there
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.mix(self.after(x))
