"""Observations and actions of Gymnasium spaces as rows of numbers: one layout for data,
environments and exports.

An observation is laid out by the names of its parts: the keys of a Dict are sorted, at every level.
An environment keeps the keys of its Dict in the order in which they were given, while Minari
restores them sorted. Without one rule the numbers that a policy reads in an environment would be
those of its data in another order.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import ArrayLike, DTypeLike

from decisionllm.files import explained
from decisionllm.schema import Json, refuse

AnySpace = Space[Any]
ActionSpace = spaces.Box | spaces.Discrete | spaces.MultiDiscrete
NamedPart = Sequence[str | int]  # its name, and how many numbers of an observation it has
MOST_ACTIONS = 4096  # combinations of a MultiDiscrete; a head has a logit for each

VECTOR = "observation"  # name of the one part of an observation that is not a Dict


def flatten(values: Any, space: AnySpace, *, dtype: DTypeLike | None = np.float32) -> np.ndarray:
    """Observations of n steps as rows.

    Args:
        values: the observations, stacked (see `stack`): an array with n in front, or a dict of such
            arrays.
        space: their space: Box, Discrete, or Dict of these, also nested.
        dtype: of the rows; None: that of the values, for a writer that reports what is rounded.

    Returns:
        (n, S). A Dict is laid out key by key in the order of the sorted keys, a Discrete is
        one-hot.

    Raises:
        ValueError: the space is of another kind, or a Discrete does not have a value.
    """
    if isinstance(space, spaces.Box):
        return np.asarray(values, dtype).reshape(len(values), -1)
    if isinstance(space, spaces.Discrete):
        one_hot = np.eye(int(space.n), dtype=np.float32)
        return np.asarray(one_hot[_indices(values, space)[:, 0]])
    columns = [flatten(values[key], part, dtype=dtype) for key, part in _sorted(space)]
    return np.concatenate(columns, axis=1)


def _indices(values: Any, space: spaces.Discrete | spaces.MultiDiscrete) -> np.ndarray:
    """Values of a space, stacked, counted from 0: (n, parts) int.

    Raises:
        ValueError: a value is not one of the space.
    """
    given = np.asarray(values)
    index = (given - space.start).reshape(len(given), -1)
    outside = (index < 0) | (index >= action_parts(space)) | (index != np.rint(index))
    message = f"expected a value of {space}, got {{}} in row {{}}"
    refuse("", outside.any(axis=1), message, given, np.arange(len(given)))
    return index.astype(int)


def unflatten(rows: np.ndarray, space: AnySpace) -> Any:
    """Rows (n, S) as stacked observations of a space, of its types: the inverse of `flatten`."""
    if isinstance(space, spaces.Box):
        return _of_box(rows, space)
    if isinstance(space, spaces.Discrete):
        return rows.argmax(axis=1) + space.start
    values: Json = {}
    first = 0
    for key, part in _sorted(space):
        size = sum(numbers for _, numbers in observation_parts(part))
        values[key] = unflatten(rows[:, first : first + size], part)
        first += size
    return values


def _of_box(rows: np.ndarray, space: spaces.Box) -> np.ndarray:
    """Rows (n, numbers) as stacked values of a Box, of its shape and type.

    A float32 number may lie beyond a bound of float64 by its rounding alone. It is the bound then.
    A number whose bounds are equal has this one value.
    """
    values = rows.reshape(len(rows), *space.shape)
    values = np.where(space.low == space.high, space.low, values).astype(values.dtype)
    clipped = np.clip(values.astype(np.float64), space.low, space.high)
    return as_dtype(np.where(clipped.astype(np.float32) == values, clipped, values), space.dtype)


def as_dtype(values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Numbers of a policy in the type of a Box, whole ones as the nearest.

    numpy alone would cut them, and a policy that is nearly right would be off by one.
    """
    if np.issubdtype(dtype, np.integer):
        values = np.rint(values)
    # A negative number has no value of an unsigned type; `fits` finds it
    with np.errstate(invalid="ignore"):
        return np.asarray(values.astype(dtype))


def fits(rows: np.ndarray, space: AnySpace) -> bool:
    """Whether every row (n, S) is an observation of the space, from which `flatten` makes the same
    row."""
    values = unflatten(rows, space)
    return _within(values, space) and np.array_equal(flatten(values, space), rows)


def _within(values: Any, space: AnySpace) -> bool:
    """Whether stacked observations lie within the bounds of every Box of their space."""
    if isinstance(space, spaces.Box):
        return bool(np.all((values >= space.low) & (values <= space.high)))
    if isinstance(space, spaces.Dict):
        return all(_within(values[key], part) for key, part in space.spaces.items())
    return True


def observation_parts(space: AnySpace) -> list[tuple[str, int]]:
    """The layout that `flatten` gives to an observation.

    Args:
        space: Box, Discrete, or Dict of these, also nested.

    Returns:
        (name, numbers) of each part, in the order of the columns. Names of nested Dicts are joined
        by a dot; an observation that is no Dict is one part, `observation`.

    Raises:
        ValueError: the space is of another kind.
    """
    if isinstance(space, spaces.Box):
        return [(VECTOR, int(np.prod(space.shape)))]
    if isinstance(space, spaces.Discrete):
        return [(VECTOR, int(space.n))]
    parts: list[tuple[str, int]] = []
    for key, inner in _sorted(space):
        nested = isinstance(inner, spaces.Dict)
        for name, size in observation_parts(inner):
            parts.append((f"{key}.{name}" if nested else str(key), size))
    return parts


def _sorted(space: AnySpace) -> list[tuple[str, AnySpace]]:
    """(key, space) of the parts of a Dict, in the order of their columns; a ValueError for another
    space."""
    if not isinstance(space, spaces.Dict):
        wanted = "a Box, a Discrete or a Dict of them"
        raise ValueError(f"observation space: expected {wanted}, got {space}")
    # By the text of the key, since a dataset's card has nothing else.
    return sorted(space.spaces.items(), key=lambda item: str(item[0]))


def stack(observations: Sequence[Any]) -> Any:
    """n observations as one: arrays with n in front, dicts of them for dicts."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stack([observation[key] for observation in observations]) for key in first}
    return np.stack(observations)


def stated_parts(parts: Sequence[NamedPart], observation_dim: int) -> list[list[str | int]]:
    """The parts that a user states for a log, as the info of a dataset holds them: [[name,
    numbers], ...].

    Args:
        parts: (name, numbers) of each part, in the order of the columns.
        observation_dim: S of the log.

    Raises:
        ValueError: a name comes twice, or the numbers do not add up to S.
    """
    with explained(
        f"observation_parts: expected (name, numbers) of each part, got {parts!r}",
        ValueError,
        TypeError,
    ):
        stated: list[tuple[str, int]] = [(str(name), int(size)) for name, size in parts]
    names = [name for name, _ in stated]
    total = sum(size for _, size in stated)
    if total != observation_dim or len(set(names)) < len(names):
        wanted = f"names that differ, and sizes that add up to {observation_dim}"
        found = f"{in_words(stated)}, {total} in all"
        what = f"expected {wanted}, the numbers of an observation; got {found}"
        raise ValueError(f"observation_parts: {what}")
    return [list(part) for part in stated]


def in_words(parts: Sequence[NamedPart]) -> str:
    """A layout for a message: "goal 1, pos 2"."""
    return ", ".join(f"{name} {size}" for name, size in parts)


def action_spec(space: AnySpace, least: ArrayLike = -np.inf, most: ArrayLike = np.inf) -> Json:
    """The action fields of a Spec. A Box without finite bounds takes the least and the most of the
    data."""
    if isinstance(space, spaces.Box):
        low = space.low.reshape(-1).astype(float)
        high = space.high.reshape(-1).astype(float)
        low = np.where(np.isfinite(low), low, least)
        high = np.where(np.isfinite(high), high, most)
        return {"action_dim": len(low), "low": tuple(low.tolist()), "high": tuple(high.tolist())}
    return {"action_dim": 1, "num_actions": prod(action_parts(space))}


def action_parts(space: AnySpace) -> list[int]:
    """The number of values of each part of a discrete action: [n] of a Discrete, the sizes of a
    MultiDiscrete, [] of a Box.

    Raises:
        ValueError: the space is of another kind, or a MultiDiscrete has more than `MOST_ACTIONS`
            combinations.
    """
    if isinstance(space, spaces.Box):
        return []
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if not isinstance(space, spaces.MultiDiscrete):
        wanted = "a Box, a Discrete or a MultiDiscrete"
        raise ValueError(f"action space: expected {wanted}, got {space}")
    sizes = [int(size) for size in space.nvec.reshape(-1)]
    if prod(sizes) > MOST_ACTIONS:
        wanted = f"at most {MOST_ACTIONS} combinations, each of which is one discrete action"
        found = f"{prod(sizes)}; give it fewer parts or values"
        raise ValueError(f"action space {space}: expected {wanted}, got {found}")
    return sizes


def encode_actions(actions: Any, space: AnySpace) -> np.ndarray:
    """Actions of a space, stacked, as rows of a policy: (n, A) float32; a discrete action is one
    index, counted from 0.

    An action of a MultiDiscrete is the index of its combination, `np.ravel_multi_index`, the last
    part counting fastest.
    """
    if isinstance(space, spaces.MultiDiscrete):
        parts = _indices(actions, space).T  # one row a part
        index = np.ravel_multi_index(tuple(parts), tuple(action_parts(space)))
        return np.asarray(index, np.float32)[:, None]
    rows = np.asarray(actions, np.float32).reshape(len(actions), -1)
    if isinstance(space, spaces.Discrete):
        rows = rows - np.float32(space.start)
    return rows


def decode_actions(rows: np.ndarray, space: ActionSpace) -> np.ndarray:
    """Rows of a policy (n, A) as actions of a space, stacked, of its type: the inverse of
    `encode_actions`."""
    if isinstance(space, spaces.Box):
        return _of_box(rows, space)
    index = rows[:, 0].astype(np.int64)
    if isinstance(space, spaces.Discrete):
        return np.asarray(index + space.start)
    parts = np.unravel_index(index, tuple(action_parts(space)))
    values = np.stack(parts, axis=1).reshape(len(rows), *space.nvec.shape)
    return np.asarray(values + space.start, space.dtype)


def fits_actions(rows: np.ndarray, space: ActionSpace) -> bool:
    """Whether every row (n, A) is an action of the space, from which `encode_actions` makes the
    same row."""
    actions = decode_actions(rows, space)
    return _within(actions, space) and np.array_equal(encode_actions(actions, space), rows)


def stated_action_parts(parts: Sequence[int], num_actions: int) -> list[int]:
    """The sizes that a user states for the parts of a discrete action; a ValueError unless their
    product is `num_actions`."""
    sizes = [int(size) for size in parts]
    if prod(sizes) != num_actions:
        wanted = f"sizes whose product is {num_actions}, the discrete actions"
        raise ValueError(f"action_parts: expected {wanted}, got {sizes}")
    return sizes
