"""An observation with an entity schema -> one vector, by attention from the agent's own numbers to
the entities that are present, or one token for each of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decisionllm.schema import EntityBlock
from decisionllm.tokenizers.mlp import mlp

# (kind, width, count) of the parts of an observation; a list of lists where it was JSON
EntitySchema = Sequence[Sequence[Any]]
HEADS = 4


def entity_width(width: int) -> int:
    """Width of an entity's encoding, for a backbone of this width."""
    return min(width, 64) // HEADS * HEADS


def entity_columns(entity_schema: EntitySchema) -> list[EntityBlock]:
    """Return the blocks of an observation with their columns."""
    first = 0
    blocks = []
    for kind, width, count in entity_schema:
        blocks.append(EntityBlock(kind, first, width, count))
        first += width * count
    return blocks


def entity_blocks(entity_schema: EntitySchema) -> list[EntityBlock]:
    """Return the blocks of entities, without the agent's own."""
    return [block for block in entity_columns(entity_schema) if not block.is_own]


def vector_columns(entity_schema: Sequence[tuple[str, int, int]], types: int = 1) -> list[int]:
    """The columns where each (x, y) begins, of an observation that is pairs of numbers.

    Other numbers are the presence of an entity, which is first, and the one-hot of several types of
    agent, which is last in the own block.

    Raises:
        ValueError: the numbers of a block do not come in pairs.
    """
    columns: list[int] = []
    for kind, first, width, count in entity_columns(entity_schema):
        begin, end = 1, width
        if kind == "own":
            begin = 0
            if types > 1:
                end -= types
        if (end - begin) % 2:
            raise ValueError(
                f"meta, plane: expected pairs of numbers in the {kind} block, got {end - begin}"
            )
        for entity in range(count):
            columns += range(first + entity * width + begin, first + entity * width + end, 2)
    return columns


class EntityMaps(nn.Module):
    """The maps of the agent's own numbers, the first, and of each kind of entity.

    All entities of a kind share a map. A cell of a grid adds the learned embedding of its place. An
    observation without own numbers has a learned vector in place of their encoding.

    Args:
        entity_schema: blocks (kind, width, count) of an observation, see `schema.EntityBlock`.
        width: D.
        make_map: number of inputs -> the map of a kind.
        hide: an entity of a step is absent with this probability in training; 1: always, also
            when it acts.
    """

    def __init__(
        self,
        entity_schema: EntitySchema,
        width: int,
        make_map: Callable[[int], nn.Module],
        *,
        hide: float = 0.0,
    ) -> None:
        super().__init__()
        self.hide = hide
        self.own_blocks = [block for block in entity_columns(entity_schema) if block.is_own]
        self.entity_blocks = entity_blocks(entity_schema)
        own_size = sum(block.width * block.num_entities for block in self.own_blocks)
        self.maps = nn.ModuleList()
        self.maps.append(make_map(own_size) if own_size else _LearnedVector(width))
        for block in self.entity_blocks:
            encode = make_map(block.width)
            if block.is_grid:
                encode = _PlacedMap(encode, block.num_entities, width)
            self.maps.append(encode)

    def own_numbers(self, observations: Tensor) -> Tensor:
        """Return the own numbers of observations (..., S), which `maps[0]` reads."""
        if len(self.own_blocks) == 1:
            return observations[..., self.own_blocks[0].columns]
        numbers = [observations[..., block.columns] for block in self.own_blocks]
        return torch.cat([observations[..., :0], *numbers], -1)

    def encode_entities(self, observations: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Encode the entities of observations (..., S), block by block.

        Returns:
            Encodings (..., count, D), and which are present (..., count) bool.
        """
        encodings = []
        present = []
        for encode, block in zip(self.maps[1:], self.entity_blocks, strict=True):
            part = observations[..., block.columns].unflatten(-1, (block.num_entities, block.width))
            encodings.append(encode(part))
            first = part[..., 0]
            here = first > 0.5 if block.has_flag else torch.ones_like(first).bool()
            if self.hide and (self.training or self.hide == 1):
                here = here & (torch.rand(here.shape, device=here.device) >= self.hide)
            present.append(here)
        return encodings, present


class EntityEncoder(EntityMaps):
    """Encodes observations with an entity schema, (..., S) -> (..., D), in the model's units.

    The own numbers and each kind of entity have one map, shared by all entities of the kind. The
    entities that are present are pooled by attention whose query is the encoding of the own
    numbers. The result does not depend on the order of entities of a kind, but for the cells of a
    grid.

    Args:
        entity_schema: see `EntityMaps`.
        width: D, width of the backbone.
        embedding: of a `TrajectoryTokenizer`; the map of each kind is linear or has two layers.
        layers: attention layers among the entities and the own numbers before the pooling.
        hide: see `EntityMaps`.
    """

    def __init__(
        self,
        entity_schema: Sequence[tuple[str, int, int]],
        width: int,
        *,
        embedding: str = "linear",
        layers: int = 0,
        hide: float = 0.0,
    ) -> None:
        D = entity_width(width)

        def make_map(size: int) -> nn.Module:
            # drawn before the first layer: the weights of published models depend on it
            deeper: list[nn.Module] = []
            if embedding != "linear":
                deeper = [nn.GELU(), nn.Linear(D, D)]
            return nn.Sequential(nn.Linear(size, D), *deeper)

        super().__init__(entity_schema, D, make_map, hide=hide)
        self.layers = nn.ModuleList(_Layer(D) for _ in range(layers + 1))
        self.out = nn.Linear(D, width)

    def entities(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """The own numbers and the entities of observations (..., S).

        Returns:
            encodings (..., 1 + K, inner), and which are present (..., 1 + K) bool.
        """
        own = self.maps[0](self.own_numbers(observations)[..., None, :])
        encodings, present = self.encode_entities(observations)
        always = torch.ones_like(own[..., 0], dtype=torch.bool)
        return torch.cat([own, *encodings], -2), torch.cat([always, *present], -1)

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


class EntityEmbedding(EntityMaps):
    """Embeds the own numbers of observations, and each entity as a token of its own, in the model's
    units.

    Args:
        entity_schema: see `EntityMaps`; with entities.
        width: D, width of the backbone.
        embedding: the map of each kind is `linear`, or has two layers.
        hide: see `EntityMaps`.
    """

    def __init__(
        self,
        entity_schema: Sequence[tuple[str, int, int]],
        width: int,
        *,
        embedding: str = "linear",
        hide: float = 0.0,
    ) -> None:
        hidden = [] if embedding == "linear" else [width]
        super().__init__(entity_schema, width, lambda size: mlp(size, *hidden, width), hide=hide)

    def forward(self, observations: Tensor) -> Tensor:
        """The own numbers of observations (..., S) -> (..., D)."""
        own: Tensor = self.maps[0](self.own_numbers(observations))
        return own

    def entities(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entities of observations (B, T, S), those of a row together, step by step.

        Returns:
            Tokens (B, E, D), the step of each (B, E), and whether it is there or padding (B, E)
            bool; E: the most of a row.
        """
        encodings, flags = self.encode_entities(observations)
        each = torch.cat(flags, -1)  # (B, T, K)
        present = each.flatten(1)
        most = int(present.sum(1).max())
        order = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # (B, E)
        tokens = torch.cat(encodings, -2).flatten(1, 2)  # (B, T K, D)
        index = order[..., None].expand(-1, -1, tokens.shape[-1])
        return tokens.gather(1, index), order // each.shape[2], present.gather(1, order)


class _PlacedMap(nn.Module):
    """Adds the learned embedding of its place to the encoding of each of n cells, (..., n, w) ->
    (..., n, D).
    """

    def __init__(self, encode: nn.Module, cells: int, width: int) -> None:
        super().__init__()
        self.encode = encode
        self.places = nn.Embedding(cells, width)

    def forward(self, cells: Tensor) -> Tensor:
        encoded: Tensor = self.encode(cells)
        return encoded + self.places.weight.to(encoded.dtype)


class _LearnedVector(nn.Module):
    """A learned vector (D,) where there are no numbers, (..., 0) -> (..., D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(width))

    def forward(self, nothing: Tensor) -> Tensor:
        return self.vector.expand(*nothing.shape[:-1], -1)


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
        key = split_heads(keys)
        value = split_heads(values)
        query = split_heads(self.query(self.before(x)))
        scores = query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
        # The own numbers are always present, so that no row is empty
        weights = scores.masked_fill(~present[:, None, None], float("-inf")).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mix(self.after(x))
        return mixed


def split_heads(x: Tensor) -> Tensor:
    """(n, K, D) -> (n, HEADS, K, D / HEADS)"""
    split: Tensor = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return split
