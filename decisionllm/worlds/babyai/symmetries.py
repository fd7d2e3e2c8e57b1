"""Symmetries of BabyAI's worlds: what a demonstration would have been in the mirrored world, in one
whose objects have other colours and types, and in one with fewer objects.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decisionllm.worlds.babyai.levels import LEFT, NUM_ACTIONS, RIGHT
from decisionllm.worlds.babyai.missions import mirror, parse
from decisionllm.worlds.babyai.observation import (
    AGENT_X,
    AGENT_Y,
    DOOR,
    EMPTY,
    is_object,
    mirror_view,
)

# in the order of MiniGrid's numbers
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
TYPES = ("door", "key", "ball", "box")


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """An episode of n steps before its observations are encoded."""

    mission: str
    images: np.ndarray  # (n+1, 7, 7, 3) uint8
    directions: np.ndarray  # (n+1,) int
    actions: np.ndarray  # (n,) int
    rewards: np.ndarray  # (n,) 0 or 1
    group: int
    terminated: bool = True
    is_random: np.ndarray | None = None  # (n,) bool; None: no action is


def add_mirrored(demonstrations: Iterable[Demonstration]) -> Iterator[Demonstration]:
    """Yield each demonstration, then the same in the mirrored world, in one group."""
    for demonstration in demonstrations:
        yield demonstration
        yield mirror_demonstration(demonstration)


def mirror_demonstration(demonstration: Demonstration) -> Demonstration:
    """Return a demonstration in the world mirrored east to west: left and right are swapped in what
    is seen, done and said.
    """
    images, directions = mirror_view(demonstration.images, demonstration.directions)
    other = np.arange(NUM_ACTIONS)
    other[[LEFT, RIGHT]] = RIGHT, LEFT
    return replace(
        demonstration,
        mission=mirror(demonstration.mission),
        images=images,
        directions=directions,
        actions=other[demonstration.actions],
    )


def add_renamed(
    demonstrations: Iterable[Demonstration], copies: int, drop_objects: float, seed: int
) -> Iterator[Demonstration]:
    """Yield each demonstration, then copies in worlds whose objects have other colours and types, in one
    group.

    Colours are permuted at random. So are the types key, ball and box where no door is seen or
    named, since only a key opens one.

    Args:
        demonstrations: the originals.
        copies: of each.
        drop_objects: probability for the objects of one colour and type that the mission does not
            name to be missing in a copy, see `drop_unnamed_objects`.
        seed: of the copies.
    """
    rng = np.random.default_rng((seed, 1))
    for demonstration in demonstrations:
        yield demonstration
        for _ in range(copies):
            colors = rng.permutation(len(COLORS))
            types = np.append(0, 1 + rng.permutation(len(TYPES) - 1))
            copy = rename_demonstration(demonstration, colors, types)
            yield drop_unnamed_objects(copy, drop_objects, rng) if drop_objects else copy


def drop_unnamed_objects(
    demonstration: Demonstration, probability: float, rng: np.random.Generator
) -> Demonstration:
    """Return a demonstration in a world without some of the objects that its mission does not name.

    Keys, balls and boxes of one colour and type are all there or all missing. They stay if the
    mission may mean them, or if they are carried. What was done still succeeds: no path becomes
    longer where an object is missing.
    """
    kind, color, _ = np.moveaxis(demonstration.images, -1, 0)
    is_movable = is_object(kind) & (kind != DOOR)
    named = parse(demonstration.mission).descriptions
    images = demonstration.images.copy()
    for i, type_name in enumerate(TYPES):
        for j, color_name in enumerate(COLORS):
            these = is_movable & (kind == DOOR + i) & (color == j)
            is_named = any(each.may_mean(color_name, type_name) for each in named)
            is_carried = these[:, AGENT_X, AGENT_Y].any()
            if these.any() and not is_named and not is_carried and rng.random() < probability:
                images[these] = EMPTY, 0, 0
    return replace(demonstration, images=images)


def rename_demonstration(
    demonstration: Demonstration,
    colors: Sequence[int] | np.ndarray,
    types: Sequence[int] | np.ndarray,
) -> Demonstration:
    """Return a demonstration in a world whose objects have other colours and types.

    Args:
        demonstration: the original.
        colors: (6,) the new number of each of COLORS.
        types: (4,) the new number of each of TYPES; not used if a door is seen or named.
    """
    kind, color, state = np.moveaxis(demonstration.images, -1, 0)
    is_thing = is_object(kind)
    if (kind == DOOR).any() or "door" in demonstration.mission:
        types = np.arange(len(TYPES))
    new_kind = np.asarray(types)[np.where(is_thing, kind - DOOR, 0)] + DOOR
    new_color = np.asarray(colors)[np.where(is_thing, color, 0)]
    images = [np.where(is_thing, new_kind, kind), np.where(is_thing, new_color, color), state]
    words = {old: COLORS[new] for old, new in zip(COLORS, colors, strict=True)}
    words |= {old: TYPES[new] for old, new in zip(TYPES, types, strict=True)}
    pattern = rf"\b({'|'.join(words)})\b"
    mission = re.sub(pattern, lambda match: words[match[0]], demonstration.mission)
    return replace(
        demonstration,
        mission=mission,
        images=np.stack(images, axis=-1).astype(demonstration.images.dtype),
    )
