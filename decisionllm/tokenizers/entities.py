"""An observation with an entity schema -> one vector: attention from the agent's own block to the entities that are present."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

HEADS = 4


def inner(width: int) -> int:
    """Width of an entity's encoding, for a backbone of this width."""
    return min(width, 64) // HEADS * HEADS


def blocks(entity_schema: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int, int]]:
    """(kind, first, width, count) of each block of an observation: columns first .. first + width * count."""
    first, found = 0, []
    for kind, width, count in entity_schema:
        found.append((kind, first, width, count))
        first += width * count
    return found


def vectors(entity_schema: Sequence[tuple[str, int, int]], types: int = 1) -> list[int]:
    """Where each (x, y) begins in an observation that is pairs throughout, but for presence and a one-hot of several types of agent.

    Raises:
        ValueError: the numbers of a block do not come in pairs.
    """
    found = []
    for kind, first, width, count in blocks(entity_schema):
        begin, end = (0, width - types * (types > 1)) if kind == "own" else (1, width)
        if (end - begin) % 2:
            raise ValueError(f"meta, plane: expected pairs of numbers in the {kind} block, got {end - begin}")
        found += [first + i * width + j for i in range(count) for j in range(begin, end, 2)]
    return found


class EntityEncoder(nn.Module):
    """Encodes observations with an entity schema, (..., S) -> (..., D), in the model's units.

    The own block and each kind of entity have one map, shared by all entities of the kind. The entities that are present are
    pooled by attention whose query is the own block. The result does not depend on the order of entities of a kind.

    Args:
        entity_schema: blocks (kind, width, count) of an observation, see `schema.Spec`; the first is (`own`, width, 1).
        width: D, width of the backbone.
        embedding: `linear` or `mlp`, the map of each kind.
        layers: attention layers among the entities and the own block before the pooling.

    Raises:
        ValueError: the schema does not begin with the own block.
    """

    def __init__(
        self, entity_schema: Sequence[tuple[str, int, int]], width: int, *, embedding: str = "linear", layers: int = 0
    ) -> None:
        super().__init__()
        if entity_schema[0][0] != "own" or entity_schema[0][2] != 1 or any(kind == "own" for kind, *_ in entity_schema[1:]):
            raise ValueError(f"Spec.entity_schema: expected the one block own first, with count 1, got {entity_schema}")
        self.blocks, self.maps, D = blocks(entity_schema), nn.ModuleList(), inner(width)
        for _, size, _ in entity_schema:
            deeper: list[nn.Module] = [nn.GELU(), nn.Linear(D, D)] if embedding == "mlp" else []
            self.maps.append(nn.Sequential(nn.Linear(size, D), *deeper))
        self.layers = nn.ModuleList(_Layer(D) for _ in range(layers + 1))
        self.out = nn.Linear(D, width)

    def entities(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """(..., S) -> encodings (..., 1 + K, inner) of the own block and the entities, and which are present (..., 1 + K) bool."""
        parts, present = [], []
        for i, (each, (_, first, width, count)) in enumerate(zip(self.maps, self.blocks, strict=True)):
            part = observations[..., first : first + width * count].unflatten(-1, (count, width))
            parts.append(each(part))
            present.append(part[..., 0] > 0.5 if i else torch.ones_like(part[..., 0], dtype=torch.bool))
        return torch.cat(parts, -2), torch.cat(present, -1)

    def forward(self, observations: Tensor) -> Tensor:
        x, present = self.entities(observations.flatten(0, -2))
        used = present.any(0)
        x, present = x[:, used], present[:, used]  # slots that are empty throughout the batch cost nothing
        *among, pooling = self.layers
        for layer in among:
            x = layer(x, present, x)
        pooled: Tensor = self.out(pooling(x[:, :1], present, x)[:, 0]).unflatten(0, observations.shape[:-1])
        return pooled


class _Layer(nn.Module):
    """Attention to the entities that are present, then an MLP, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, present: Tensor, entities: Tensor) -> Any:
        """Queries (n, Q, D), present (n, K) bool, entities (n, K, D) -> (n, Q, D)."""
        pair = self.key_value(self.before(entities)).chunk(2, -1)
        key, value, query = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (*pair, self.query(self.before(x))))
        scores = query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
        weights = scores.masked_fill(~present[:, None, None], float("-inf")).softmax(-1)  # the own block is always present
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.mix(self.after(x))
