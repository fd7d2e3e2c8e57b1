"""Symmetries of BabyAI's worlds: what a demonstration would have been in the mirrored world, and in
one whose objects have other colours and types.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decisionllm.domains.babyai.levels import LEFT, NUM_ACTIONS, RIGHT
from decisionllm.domains.babyai.missions import mirror
from decisionllm.domains.babyai.observation import DOOR, is_object, mirror_view

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
    """Each demonstration, then the same in the mirrored world, in one group."""
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
    demonstrations: Iterable[Demonstration], copies: int, seed: int
) -> Iterator[Demonstration]:
    """Each demonstration, then copies in worlds whose objects have other colours and types, in one
    group.

    Colours are permuted at random. So are the types key, ball and box where no door is seen or
    named, since only a key opens one.
    """
    rng = np.random.default_rng((seed, 1))
    for demonstration in demonstrations:
        yield demonstration
        for _ in range(copies):
            colors = rng.permutation(len(COLORS))
            types = np.append(0, 1 + rng.permutation(len(TYPES) - 1))
            yield rename_demonstration(demonstration, colors, types)


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
