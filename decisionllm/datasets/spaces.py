"""Observations of Gymnasium spaces as rows of numbers: one layout for data, environments and exports.

The columns of a row are in the order of the parts, see `space_parts`. Actions are in
`action_spaces`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike

from decisionllm.datasets.categorical import CategoricalBox
from decisionllm.datasets.space_parts import (
    VECTOR,
    AnySpace,
    count_numbers,
    describe_space,
    has_numbers,
    is_text,
    join_name,
    list_entries,
    list_leaves,
    observation_parts,
    value_counts,
)
from decisionllm.schema import Json, is_numeric, raise_for_first


def flatten(values: Any, space: AnySpace, *, dtype: DTypeLike | None = np.float32) -> np.ndarray:
    """Return observations of n steps as rows. Parts that are texts are left out.

    Args:
        values: the observations, stacked (see `stack`): an array with n in front, or a dict or tuple
            of such arrays.
        space: their space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict or Tuple of these,
            also nested.
        dtype: of the rows; None: that of the values, for a writer that reports rounding errors.

    Returns:
        (n, S). A Dict is laid out key by key in the order of the sorted keys, a Tuple in its own
        order. A Discrete is one-hot, a MultiDiscrete one-hot part by part.

    Raises:
        ValueError: the space is of another kind, or the values are not of the space.
    """
    return _flatten_part(values, space, "", dtype)


def _flatten_part(values: Any, space: AnySpace, name: str, dtype: DTypeLike | None) -> np.ndarray:
    """See `flatten`. name: of the part, for messages."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = _values_by_key(values, space)
        columns = []
        for key, part in list_entries(space):
            if has_numbers(part):
                columns.append(_flatten_part(named[key], part, join_name(name, key), dtype))
        return np.concatenate(columns, axis=1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _one_hot(values, space, name or VECTOR)
    observation_parts(space)  # refuses other spaces
    array = _to_numbers(values, space)
    if isinstance(space, spaces.MultiBinary):
        message = f"expected 0 or 1 in {space}, got {{}}"
        raise_for_first("", ~np.isin(array, (0, 1)), message, array)
    return np.asarray(array, dtype).reshape(len(array), -1)


def flatten_one(observation: Any, space: AnySpace) -> np.ndarray:
    """Return the observation of one step as a row (S,) float32, a copy; see `flatten`."""
    return np.array(flatten(_stack_one(observation, space), space)[0])


def _stack_one(observation: Any, space: AnySpace) -> Any:
    """Return one observation with an axis of 1 in front, as `stack` makes it."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if isinstance(observation, np.ndarray) and isinstance(space, spaces.Tuple):
            observation = tuple(observation)
        named = _values_by_key(observation, space)
        parts = {key: _stack_one(named[key], part) for key, part in list_entries(space)}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    if isinstance(observation, Mapping):
        got = f"a dict of {', '.join(map(str, observation)) or 'nothing'}"
        raise ValueError(f"expected numbers of {describe_space(space)}, got {got}")
    return np.asarray(observation)[None]


def _values_by_key(values: Any, space: AnySpace) -> Any:
    """Return the parts of a value of a Dict or Tuple by their keys; stacked values of a Tuple may be
    one array (n, parts).

    Raises:
        ValueError: it is of another kind, or has other keys.
    """
    keys = [key for key, _ in list_entries(space)]
    if isinstance(space, spaces.Tuple):
        columns = values
        if isinstance(values, np.ndarray) and values.ndim > 1:
            columns = tuple(np.moveaxis(values, 1, 0))
        if not isinstance(columns, list | tuple) or len(columns) != len(keys):
            size = f" of {len(columns)}" if isinstance(columns, list | tuple) else ""
            got = f"{type(values).__name__}{size}"
            raise ValueError(f"expected a tuple of {len(keys)} parts, got {got}")
        return columns
    if not isinstance(values, Mapping) or values.keys() != set(keys):
        got = type(values).__name__
        if isinstance(values, Mapping):
            got = f"a dict of {', '.join(sorted(map(str, values))) or 'nothing'}"
        raise ValueError(f"expected a dict of {', '.join(map(str, keys))}, got {got}")
    return values


def _to_numbers(values: Any, space: AnySpace) -> np.ndarray:
    """Return stacked values of a space without parts as an array (n, ...).

    Raises:
        ValueError: they are no numbers, or have another shape than the space, dimensions of 1
            aside.
    """
    array = np.asarray(values)
    if not is_numeric(array.dtype):
        raise ValueError(f"expected numbers of {describe_space(space)}, got {array.dtype}")
    shape = array.shape[1:]
    if [size for size in shape if size != 1] != [size for size in space.shape or () if size != 1]:
        raise ValueError(f"expected numbers of {describe_space(space)}, got shape {shape}")
    return array


def _one_hot(values: Any, space: spaces.Discrete | spaces.MultiDiscrete, name: str) -> np.ndarray:
    """Return stacked values of a space with a one for the value of each part: (n, S) float32."""
    index = to_indices(values, space, name)
    sizes = value_counts(space)
    first_columns = np.cumsum(sizes) - sizes
    rows = np.zeros((len(index), int(sizes.sum())), np.float32)
    np.put_along_axis(rows, index + first_columns, 1, axis=1)
    return rows


def to_indices(values: Any, space: spaces.Discrete | spaces.MultiDiscrete, name: str) -> np.ndarray:
    """Return stacked values of a space, counted from 0: (n, parts) int.

    Raises:
        ValueError: a value is not one of the space. name: of the values, for the message.
    """
    array = _to_numbers(values, space)
    array = array.reshape(len(array), *(space.shape or ()))
    index = (array - space.start).reshape(len(array), -1)
    outside = (index < 0) | (index >= value_counts(space)) | (index != np.rint(index))
    if isinstance(space, spaces.Discrete):
        message = f"expected a value of {space}, got {{}} in row {{}}"
        raise_for_first("", outside.any(axis=1), message, array, np.arange(len(array)))
    elif outside.any():
        raise ValueError(_describe_outside(array, outside, space, name))
    return index.astype(int)


def _describe_outside(
    array: np.ndarray, outside: np.ndarray, space: spaces.MultiDiscrete, name: str
) -> str:
    """Describe the first number that is not one of a space.

    Args:
        array: (n, ...) values of the space.
        outside: (n, parts) bool, the numbers that are not of the space.
        space: the space.
        name: of the values.
    """
    row, number = np.argwhere(outside)[0].tolist()
    value = array.reshape(len(array), -1)[row, number].item()
    least = int(np.ravel(space.start)[number])
    end = least + int(value_counts(space)[number])
    expected = "a whole number"
    if value >= end:
        expected = f"a value below {end}"
    elif value < least:
        expected = f"a value of at least {least}"
    place = [int(i) for i in np.unravel_index(number, space.shape)]
    got = f"{value} in row {row}" if len(array) > 1 else f"{value}"
    fix = "give it more values in the option categorical"
    message = f"expected {expected} in {name}{place or ''}, got {got}"
    return f"{message}; {fix}" if isinstance(space, CategoricalBox) else message


def unflatten(rows: np.ndarray, space: AnySpace, *, text: str = "") -> Any:
    """Return rows (n, S) as stacked observations of a space, in its types: the inverse of `flatten`.

    text: of the parts that are texts.
    """
    if is_text(space):
        return np.full(len(rows), text, object)
    if isinstance(space, spaces.Box):
        return to_box(rows, space)
    if isinstance(space, spaces.Discrete):
        return rows.argmax(axis=1) + space.start
    if isinstance(space, spaces.MultiDiscrete):
        blocks = np.split(rows, np.cumsum(value_counts(space))[:-1], axis=1)
        index = np.stack([block.argmax(axis=1) for block in blocks], axis=1)
        dtype = space.box.dtype if isinstance(space, CategoricalBox) else space.dtype
        return np.asarray(index.reshape(len(rows), *space.shape) + space.start, dtype)
    if isinstance(space, spaces.MultiBinary):
        return np.asarray(rows.reshape(len(rows), *space.shape) > 0.5, space.dtype)
    values: Json = {}
    first = 0
    for key, part in list_entries(space):
        size = sum(
            count_numbers(leaf, name) for name, leaf in list_leaves(part) if not is_text(leaf)
        )
        values[key] = unflatten(rows[:, first : first + size], part, text=text)
        first += size
    return values if isinstance(space, spaces.Dict) else tuple(values.values())


def to_box(rows: np.ndarray, space: spaces.Box) -> np.ndarray:
    """Return rows (n, numbers) as stacked values of a Box, in its shape and type.

    A float32 number that exceeds a bound of float64 by its rounding alone becomes the bound. A
    number whose bounds are equal has this one value.
    """
    values = rows.reshape(len(rows), *space.shape)
    values = np.where(space.low == space.high, space.low, values).astype(values.dtype)
    clipped = np.clip(values.astype(np.float64), space.low, space.high)
    return cast_to_dtype(
        np.where(clipped.astype(np.float32) == values, clipped, values), space.dtype
    )


def cast_to_dtype(values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return numbers of a policy in the type of a Box, rounded to the nearest integer.

    numpy alone would truncate them, and a policy that is nearly right would be off by one.
    """
    if np.issubdtype(dtype, np.integer):
        values = np.rint(values)
    # A negative number has no value of an unsigned type; `contains_observations` reports it
    with np.errstate(invalid="ignore"):
        return np.asarray(values.astype(dtype))


def contains_observations(rows: np.ndarray, space: AnySpace) -> bool:
    """Return whether every row (n, S) is an observation of the space, which `flatten` turns into the
    same row.
    """
    values = unflatten(rows, space)
    return is_within_bounds(values, space) and np.array_equal(flatten(values, space), rows)


def is_within_bounds(values: Any, space: AnySpace) -> bool:
    """Return whether stacked observations lie within the bounds of every Box of their space."""
    if isinstance(space, CategoricalBox):
        return is_within_bounds(values, space.box)
    if isinstance(space, spaces.Box):
        return bool(np.all((values >= space.low) & (values <= space.high)))
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(is_within_bounds(values[key], part) for key, part in list_entries(space))
    return True


def stack(observations: Sequence[Any]) -> Any:
    """Stack n observations: arrays with n in front; dicts of these for dicts, tuples of these for
    tuples, but an array (n, parts) for tuples of numbers.
    """
    first = observations[0]
    if isinstance(first, dict):
        return {key: stack([observation[key] for observation in observations]) for key in first}
    if isinstance(first, tuple) and any(isinstance(part, dict) or np.ndim(part) for part in first):
        return tuple(stack(parts) for parts in zip(*observations, strict=True))
    return np.stack(observations)
