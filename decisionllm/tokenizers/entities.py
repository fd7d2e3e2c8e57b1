"""An observation with an entity schema -> one vector, by attention from the agent's own block to the
entities that are present, or one token for each of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decisionllm.tokenizers.mlp import mlp

# (kind, width, count) of the parts of an observation; a list of lists where it was JSON
EntitySchema = Sequence[Sequence[Any]]
HEADS = 4


def inner(width: int) -> int:
    """Width of an entity's encoding, for a backbone of this width."""
    return min(width, 64) // HEADS * HEADS


def entity_columns(entity_schema: EntitySchema) -> list[tuple[str, int, int, int]]:
    """(kind, first, width, count) of each part of an observation, which is the columns first ..
    first + width * count.
    """
    first = 0
    found = []
    for kind, width, count in entity_schema:
        found.append((kind, first, width, count))
        first += width * count
    return found


def vectors(entity_schema: Sequence[tuple[str, int, int]], types: int = 1) -> list[int]:
    """The columns where each (x, y) begins, of an observation that is pairs of numbers.

    Other numbers are the presence of an entity, which is first, and the one-hot of several types of
    agent, which is last in the own block.

    Raises:
        ValueError: the numbers of a block do not come in pairs.
    """
    found: list[int] = []
    for kind, first, width, count in entity_columns(entity_schema):
        begin, end = 1, width
        if kind == "own":
            begin = 0
            if types > 1:
                end -= types
        if (end - begin) % 2:
            wanted = f"expected pairs of numbers in the {kind} block"
            raise ValueError(f"meta, plane: {wanted}, got {end - begin}")
        for entity in range(count):
            found += range(first + entity * width + begin, first + entity * width + end, 2)
    return found


class EntityEncoder(nn.Module):
    """Encodes observations with an entity schema, (..., S) -> (..., D), in the model's units.

    The own block and each kind of entity have one map, shared by all entities of the kind. The
    entities that are present are pooled by attention whose query is the own block. The result does
    not depend on the order of entities of a kind.

    Args:
        entity_schema: blocks (kind, width, count) of an observation, see `schema.Spec`; the first
            is (`own`, width, 1).
        width: D, width of the backbone.
        embedding: of a `TrajectoryTokenizer`; the map of each kind is linear or has two layers.
        layers: attention layers among the entities and the own block before the pooling.

    Raises:
        ValueError: the schema does not begin with the own block.
    """

    def __init__(
        self,
        entity_schema: Sequence[tuple[str, int, int]],
        width: int,
        *,
        embedding: str = "linear",
        layers: int = 0,
    ) -> None:
        super().__init__()
        check_own_block(entity_schema)
        self.columns = entity_columns(entity_schema)
        self.maps = nn.ModuleList()
        D = inner(width)
        for _, size, _ in entity_schema:
            # drawn before the first layer: the weights of published models depend on it
            deeper: list[nn.Module] = []
            if embedding != "linear":
                deeper = [nn.GELU(), nn.Linear(D, D)]
            self.maps.append(nn.Sequential(nn.Linear(size, D), *deeper))
        self.layers = nn.ModuleList(_Layer(D) for _ in range(layers + 1))
        self.out = nn.Linear(D, width)

    def entities(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """The own block and the entities of observations (..., S).

        Returns:
            encodings (..., 1 + K, inner), and which are present (..., 1 + K) bool.
        """
        encodings = []
        present = []
        for encode, (kind, first, width, count) in zip(self.maps, self.columns, strict=True):
            flat = observations[..., first : first + width * count]
            part = flat.unflatten(-1, (count, width))
            encodings.append(encode(part))
            if kind == "own":
                present.append(torch.ones_like(part[..., 0], dtype=torch.bool))
            else:
                present.append(part[..., 0] > 0.5)
        return torch.cat(encodings, -2), torch.cat(present, -1)

    def forward(self, observations: Tensor) -> Tensor:
        x, present = self.entities(observations.flatten(0, -2))
        used = present.any(0)  # slots that are empty throughout the batch cost nothing
        x = x[:, used]
        present = present[:, used]
        *among, pooling = self.layers
        for layer in among:
            x = layer(x, present, x)
        own = pooling(x[:, :1], present, x)[:, 0]
        pooled: Tensor = self.out(own).unflatten(0, observations.shape[:-1])
        return pooled


class EntityEmbedding(nn.Module):
    """Embeds the own block of observations, and each entity as a token of its own, in the model's
    units.

    Args:
        entity_schema: see `EntityEncoder`.
        width: D, width of the backbone.
        embedding: the map of each kind is `linear`, or has two layers.

    Raises:
        ValueError: the schema does not begin with the own block.
    """

    def __init__(
        self,
        entity_schema: Sequence[tuple[str, int, int]],
        width: int,
        *,
        embedding: str = "linear",
    ) -> None:
        super().__init__()
        check_own_block(entity_schema)
        self.columns = entity_columns(entity_schema)
        self.maps = nn.ModuleList()
        for _, size, _ in entity_schema:
            hidden = [] if embedding == "linear" else [width]
            self.maps.append(mlp(size, *hidden, width))

    def forward(self, observations: Tensor) -> Tensor:
        """The own blocks of observations (..., S) -> (..., D)."""
        _, first, width, _ = self.columns[0]
        own: Tensor = self.maps[0](observations[..., first : first + width])
        return own

    def entities(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entities of observations (B, T, S), those of a row together, step by step.

        Returns:
            Tokens (B, E, D), the step of each (B, E), and whether it is there or padding (B, E)
            bool; E: the most of a row.
        """
        slots = []
        flags = []
        for _, first, width, count in self.columns[1:]:
            flat = observations[..., first : first + width * count]
            slots.append(flat.unflatten(-1, (count, width)))
            flags.append(slots[-1][..., 0] > 0.5)
        each = torch.cat(flags, -1)  # (B, T, K)
        present = each.flatten(1)
        most = int(present.sum(1).max())
        order = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # (B, E)
        embedded = [encode(part) for encode, part in zip(self.maps[1:], slots, strict=True)]
        tokens = torch.cat(embedded, -2).flatten(1, 2)  # (B, T K, D)
        index = order[..., None].expand(-1, -1, tokens.shape[-1])
        return tokens.gather(1, index), order // each.shape[2], present.gather(1, order)


def check_own_block(entity_schema: Sequence[tuple[str, int, int]]) -> None:
    """Raise a ValueError unless a schema begins with its one own block."""
    kinds = [kind for kind, _, _ in entity_schema]
    if kinds[0] != "own" or kinds.count("own") > 1 or entity_schema[0][2] != 1:
        raise ValueError(
            "Spec.entity_schema: expected the one block own first, with count 1, got "
            f"{entity_schema}"
        )


class _Layer(nn.Module):
    """Attention to the entities that are present, then an MLP, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.after = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mix = mlp(width, 2 * width, width)

    def forward(self, x: Tensor, present: Tensor, entities: Tensor) -> Tensor:
        """Queries (n, Q, D), present (n, K) bool, entities (n, K, D) -> (n, Q, D)."""
        keys, values = self.key_value(self.before(entities)).chunk(2, -1)
        key = heads(keys)
        value = heads(values)
        query = heads(self.query(self.before(x)))
        scores = query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
        # The own block is always present, so that no row is empty
        weights = scores.masked_fill(~present[:, None, None], float("-inf")).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mix(self.after(x))
        return mixed


def heads(x: Tensor) -> Tensor:
    """(n, K, D) -> (n, HEADS, K, D / HEADS)"""
    split: Tensor = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return split
