"""The model's layout of an observation: the same numbers for any number of entities."""

from collections.abc import Mapping

import numpy as np

from decisionllm.schema import Json
from decisionllm.tokenizers.entities import EntitySchema, entity_columns

Schema = tuple[tuple[str, int, int], ...]  # Spec.entity_schema


def to_entity_layout(
    observations: np.ndarray,
    blocks: EntitySchema,
    entity_schema: Schema,
    *,
    agent_type: int | np.ndarray = 0,
    types: int = 1,
) -> np.ndarray:
    """Arrange raw observations in the layout of a model.

    Args:
        observations: (..., R).
        blocks: of the raw observation, see `log_meta`.
        entity_schema: Spec.entity_schema; entities that the observation does not have are zeros.
        agent_type: index of the agents' type, one or (...,).
        types: number of types; the own block ends with a one-hot of the type where there are
            several.

    Returns:
        (..., S) float32.
    """
    lead = observations.shape[:-1]
    size = sum(width * count for _, width, count in entity_schema)
    packed = np.zeros((*lead, size), np.float32)
    slots_of_kind = {}  # views of `made`, one for each kind: (..., count, width)
    for kind, first, width, count in entity_columns(entity_schema):
        slots_of_kind[kind] = packed[..., first : first + width * count].reshape(
            *lead, count, width
        )
    used = dict.fromkeys(slots_of_kind, 0)  # numbers of the own block, entities of the other kinds
    for kind, first, width, count in entity_columns(blocks):
        values = observations[..., first : first + width * count]
        if kind == "own":
            slots_of_kind[kind][..., 0, used[kind] : used[kind] + width * count] = values
            used[kind] += width * count
        elif kind:
            entities = values.reshape(*lead, count, width)
            slots = slice(used[kind], used[kind] + count)
            slots_of_kind[kind][..., slots, 0] = entities.any(-1)  # whether it is present
            slots_of_kind[kind][..., slots, 1:] = entities
            used[kind] += count
    if types > 1:
        slots_of_kind["own"][..., 0, -types:] = np.eye(types, dtype=np.float32)[agent_type]
    return packed


def rows_to_entity_layout(
    kinds: np.ndarray,
    flat: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    types: Mapping[str, Json],
    schema: Schema,
) -> np.ndarray:
    """Apply `to_entity_layout` to n rows of several types and lengths.

    Args:
        kinds: (n,) type, as an index.
        flat: raw observations, end to end.
        starts, lengths: (n,) where each row's is in `flat`, and its numbers.
        types: meta["types"], each with blocks, see `fill_in_blocks`.
        schema: Spec.entity_schema.

    Returns:
        (n, S) float32.
    """
    size = sum(width * count for _, width, count in schema)
    packed = np.zeros((len(kinds), size), np.float32)
    for number, agent_type in enumerate(types.values()):
        for length_text, blocks in agent_type["observations"].items():
            length = int(length_text)
            rows = np.flatnonzero((kinds == number) & (lengths == length))
            if not len(rows):
                continue
            raw = np.lib.stride_tricks.sliding_window_view(flat, length)[starts[rows]]
            packed[rows] = to_entity_layout(
                raw, blocks, schema, agent_type=number, types=len(types)
            )
    return packed


def fill_in_blocks(types: Mapping[str, Json], lengths: Mapping[str, int]) -> dict[str, Json]:
    """Return meta["types"], where a type without blocks has one `own` block of `lengths[name]`
    numbers.
    """
    described = {}
    for name, agent_type in types.items():
        observations = agent_type.get("observations")
        if not observations:
            observations = {}
            if name in lengths:
                observations = {str(lengths[name]): [["own", lengths[name], 1]]}
        described[name] = agent_type | {"observations": observations}
    return described


def build_entity_schema(meta: Json, capacity: int = 6) -> Schema:
    """Build Spec.entity_schema of a log whose types all have blocks: the own block, then `capacity`
    entities of each kind, or as many as an observation has, if these are more.

    Raises:
        ValueError: blocks that do not have as many numbers as the observation, or entities of one
            kind with different numbers.
    """
    own = 1
    widths: dict[str, int] = {}  # numbers of an entity, by kind
    most: dict[str, int] = {}  # entities, by kind
    for name, agent_type in meta["types"].items():
        for length, blocks in agent_type["observations"].items():
            _check_blocks(name, length, blocks, widths)
            counts: dict[str, int] = {}
            for kind, width, count in blocks:
                size = width * count if kind == "own" else count
                counts[kind] = counts.get(kind, 0) + size
            own = max(own, counts.get("own", 0))
            for kind in widths:
                if kind in counts:
                    most[kind] = max(most.get(kind, capacity), counts[kind])
    types = len(meta["types"])
    if types > 1:
        own += types
    # an entity begins with its presence
    entities = [(kind, width + 1, most[kind]) for kind, width in widths.items()]
    return (("own", own, 1), *entities)


def _check_blocks(name: str, length: str, blocks: EntitySchema, widths: dict[str, int]) -> None:
    """Check the blocks of observations of a type; add the width of each new kind to `widths`."""
    for kind, width, _ in blocks:
        if kind in ("", "own"):
            continue
        expected = widths.setdefault(kind, width)
        if expected != width:
            raise ValueError(
                f"type {name}: expected {kind} entities of {expected} numbers as elsewhere, got "
                f"{width}"
            )
    if sum(width * count for _, width, count in blocks) != int(length):
        raise ValueError(
            f"type {name}: expected blocks of {length} numbers in all, as observed, got {blocks}"
        )
