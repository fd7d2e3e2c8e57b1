"""The parts of Gymnasium spaces: their names, their sizes, the order of their columns, their texts.

Parts of a Dict are sorted by key, at every level; parts of a Tuple keep their order. An environment
keeps the keys of its Dict in the order in which they were given, while Minari restores them sorted.
Without one rule a policy would read the numbers of an environment in another order than those of
its data.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from decisionllm.files import explain_errors

AnySpace = Space[Any]
NamedPart = Sequence[str | int]  # its name, and how many numbers of an observation it has
VECTOR = "observation"  # name of the one part of an observation that has no names


def is_text(space: AnySpace) -> bool:
    """Return whether a space is one of texts, such as `spaces.Text` or MiniGrid's MissionSpace."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def has_numbers(space: AnySpace) -> bool:
    """Return whether a space has a part that is no text."""
    return not all(is_text(part) for _, part in list_leaves(space))


def text_parts(space: AnySpace) -> list[str]:
    """Return the names of the parts of an observation that are texts."""
    return [name for name, part in list_leaves(space) if name and is_text(part)]


def text_values(values: Any, space: AnySpace, name: str = "") -> dict[str, Any]:
    """Return the texts of an observation, or of stacked ones, by the names of `text_parts`."""
    if is_text(space):
        return {name: values}
    texts: dict[str, Any] = {}
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in list_entries(space):
            texts |= text_values(values[key], part, join_name(name, key))
    return texts


def replace_texts(space: AnySpace, texts: Sequence[str]) -> AnySpace:
    """Return a space whose parts that are texts are a `spaces.Text` of just these texts' lengths
    and letters, which can be written to a file.
    """
    letters = frozenset("".join(texts)) or frozenset("a")
    longest = max(map(len, texts), default=0)
    text = spaces.Text(max(longest, 1), min_length=0, charset=letters)
    return replace_leaves(space, lambda name, part: text if is_text(part) else part)


def observation_parts(space: AnySpace) -> list[tuple[str, int]]:
    """Return the layout that `flatten` gives to an observation.

    Args:
        space: see `flatten`.

    Returns:
        (name, numbers) of each part, in the order of the columns. Names of nested parts are joined
        by a dot, those of a Tuple are 0, 1, ...; an observation that is neither Dict nor Tuple is
        one part, `observation`.

    Raises:
        ValueError: a part of the space is of another kind, or all of them are texts.
    """
    numbers = [(name, part) for name, part in list_leaves(space) if not is_text(part)]
    if not numbers:
        raise ValueError(f"observation space: expected numbers beside texts, got {space}")
    return [(name or VECTOR, count_numbers(part, name)) for name, part in numbers]


def observation_bounds(space: AnySpace) -> tuple[list[float], list[float]]:
    """Return the least and the greatest value of each column that `flatten` gives, (S,) each."""
    lows: list[float] = []
    highs: list[float] = []
    for name, part, _ in list_leaf_columns(space):
        if isinstance(part, spaces.Box):
            lows += part.low.ravel().tolist()
            highs += part.high.ravel().tolist()
        else:  # one-hot or bits
            size = count_numbers(part, name)
            lows += [0.0] * size
            highs += [1.0] * size
    return lows, highs


def check_observation_parts(
    parts: Sequence[NamedPart], observation_dim: int
) -> list[list[str | int]]:
    """Return the parts that a user states for a log, as the info of a dataset holds them: [[name,
    numbers], ...].

    Args:
        parts: (name, numbers) of each part, in the order of the columns.
        observation_dim: S of the log.

    Raises:
        ValueError: a name comes twice, or the numbers do not add up to S.
    """
    with explain_errors(
        f"observation_parts: expected (name, numbers) of each part, got {parts!r}",
        ValueError,
        TypeError,
    ):
        stated: list[tuple[str, int]] = [(str(name), int(size)) for name, size in parts]
    names = [name for name, _ in stated]
    total = sum(size for _, size in stated)
    if total != observation_dim or len(set(names)) < len(names):
        raise ValueError(
            "observation_parts: expected names that differ, and sizes that add up to "
            f"{observation_dim}, the numbers of an observation; got {describe_parts(stated)}, {total} in all"
        )
    return [list(part) for part in stated]


def describe_parts(parts: Sequence[NamedPart]) -> str:
    """Return a layout for a message: "goal 1, pos 2"."""
    return ", ".join(f"{name} {size}" for name, size in parts)


def replace_leaves(
    space: AnySpace, replace: Callable[[str, AnySpace], AnySpace], name: str = ""
) -> AnySpace:
    """Return a space in which `replace(name, space)` replaces each part that has no parts itself."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return replace(name, space)
    parts = {}
    for key, part in list_entries(space):
        parts[key] = replace_leaves(part, replace, join_name(name, key))
    return spaces.Dict(parts) if isinstance(space, spaces.Dict) else spaces.Tuple(parts.values())


def join_name(name: str, key: Any) -> str:
    """Return the name of the part `key` within the part `name`."""
    return f"{name}.{key}" if name else str(key)


def list_leaves(space: AnySpace, name: str = "") -> list[tuple[str, AnySpace]]:
    """Return (name, space) of the parts that have no parts themselves, in the order of their columns."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [(name, space)]
    leaves = []
    for key, part in list_entries(space):
        leaves += list_leaves(part, join_name(name, key))
    if not leaves:
        raise ValueError(
            f"{_describe_place(name)}: expected a {type(space).__name__} with parts, got none"
        )
    return leaves


def list_leaf_columns(space: AnySpace) -> list[tuple[str, AnySpace, int]]:
    """Return (name, space, first column) of the parts with numbers, in the order of their columns."""
    leaves = []
    first = 0
    for name, part in list_leaves(space):
        if not is_text(part):
            leaves.append((name, part, first))
            first += count_numbers(part, name)
    return leaves


def list_entries(space: AnySpace) -> list[tuple[Any, AnySpace]]:
    """Return (key, space) of the parts of a Dict or Tuple, in the order of their columns."""
    if isinstance(space, spaces.Tuple):
        return list(enumerate(space.spaces))
    assert isinstance(space, spaces.Dict)
    # By the text of the key, since a dataset's card has nothing else.
    return sorted(space.spaces.items(), key=lambda item: str(item[0]))


def count_numbers(space: AnySpace, name: str) -> int:
    """Return the count of numbers of a part in a row; a ValueError if it has no layout."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return int(value_counts(space).sum())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return prod(space.shape)
    expected = "a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of them"
    raise ValueError(f"{_describe_place(name)}: expected {expected}, got {space}")


def value_counts(space: spaces.Discrete | spaces.MultiDiscrete) -> np.ndarray:
    """Return the number of values of each part, (parts,)."""
    return np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).astype(np.int64)


def _describe_place(name: str) -> str:
    """Name a part of an observation space, to begin a message with."""
    return f"observation space, part {name}" if name else "observation space"


def describe_space(space: AnySpace) -> str:
    """Describe a space for a message, without the bounds of each number."""
    return f"{type(space).__name__} of shape {space.shape}"
