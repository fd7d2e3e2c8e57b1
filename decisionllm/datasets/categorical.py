"""Integer parts of observations that name categories, read one-hot; grids of cells among them."""

import reprlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from gymnasium import spaces

from decisionllm.datasets.space_parts import (
    VECTOR,
    AnySpace,
    describe_space,
    join_name,
    list_leaf_columns,
    list_leaves,
    observation_parts,
    replace_leaves,
    value_counts,
)
from decisionllm.schema import GRID_PREFIX, OWN_KIND, one_hot_groups

Declaration = Mapping[str, Any] | Sequence[str] | None  # see `as_categorical`
MAX_VALUES = 64  # of a number whose values are counted by the bounds of its Box


class CategoricalBox(spaces.MultiDiscrete):
    """An integer Box whose numbers are categories: one-hot in a row, values of the Box elsewhere.

    A number counts from the low of the Box, or from 0 where the Box has no lower bound.

    Args:
        box: the space of an environment or a dataset.
        sizes: number of values of each number, in the shape of the Box.
    """

    def __init__(self, box: spaces.Box, sizes: np.ndarray) -> None:
        # The lower bound of an integer Box without one is the least number of its type
        least = np.iinfo(np.dtype(box.dtype).name).min
        has_no_low = (box.low == least) & (_num_values(box) > MAX_VALUES)
        super().__init__(sizes, start=np.where(has_no_low, 0, box.low))
        self.box = box

    def __repr__(self) -> str:
        return f"CategoricalBox of shape {self.shape}"


def as_categorical(
    space: AnySpace, categorical: Declaration, option: str = "categorical"
) -> AnySpace:
    """Return a space whose declared integer Boxes are a `CategoricalBox`, which `flatten` makes
    one-hot.

    Args:
        space: of observations, see `flatten`.
        categorical: {name: sizes} of parts as `observation_parts` names them, also nested as
            {hand: {card: 4}}. Sizes are the number of values of each number: one for all, a list
            along the last axis, or None: those between the bounds of the Box. A list of names is
            None for each. Empty: the space as it is.
        option: that holds the declaration, to begin a message with.

    Raises:
        ValueError: there is no such part, it is no integer Box, or the sizes do not fit it.
    """
    if not categorical:
        return space
    parts = {name or VECTOR: part for name, part in list_leaves(space)}
    boxes: dict[str, AnySpace] = {}
    for name, sizes in _declared_sizes(categorical, option).items():
        if name not in parts:
            near = get_close_matches(name, parts, 3, 0.5) or list(parts)[:10]
            raise ValueError(
                f"{option}: expected a name of a part of the observation, such as "
                f"{', '.join(near)}, got {name}"
            )
        boxes[name] = _make_categorical(parts[name], sizes, name, option)
    return replace_leaves(space, lambda name, part: boxes.get(name or VECTOR, part))


def _declared_sizes(categorical: Any, option: str, name: str = "") -> dict[str, Any]:
    """Return the sizes of `as_categorical` by the names of the parts."""
    if isinstance(categorical, Mapping):
        sizes: dict[str, Any] = {}
        for key, value in categorical.items():
            part = join_name(name, key)
            if isinstance(value, Mapping):
                sizes |= _declared_sizes(value, option, part)
            else:
                sizes[part] = value
        return sizes
    if not isinstance(categorical, list | tuple):
        expected = f"{option}={{NAME: SIZES}} or {option}=[NAME]"
        raise ValueError(f"{option}: expected {expected}, got {categorical!r}")
    return dict.fromkeys(map(str, categorical))


def _make_categorical(space: AnySpace, sizes: Any, name: str, option: str) -> CategoricalBox:
    """Return a part as a `CategoricalBox`; see `as_categorical`."""
    place = f"{option}.{name}"
    is_integer = space.dtype is not None and np.issubdtype(space.dtype, np.integer)
    if not isinstance(space, spaces.Box) or not is_integer or 0 in space.shape:
        got = type(space).__name__
        fix = "leave it out"
        if isinstance(space, spaces.Box):
            got = f"{describe_space(space)} and type {space.dtype}"
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            fix = "leave it out, since it is one-hot already"
        raise ValueError(f"{place}: expected a Box of integers, got {got}; {fix}")
    num_values = _num_values(space)
    if sizes is None:
        if max(num_values.flat, default=1) > MAX_VALUES:
            got = f"{space.low.min()} .. {space.high.max()}"
            fix = f"give the number of values, such as {option}={{{name}: 8}}, or a list of them"
            expected = f"bounds with at most {MAX_VALUES} values between them"
            raise ValueError(f"{place}: expected {expected}, got {got}; {fix}")
        return CategoricalBox(space, num_values.astype(np.int64))
    try:
        array = np.asarray(sizes)
    except ValueError:
        array = np.zeros(0)  # lists of different lengths
    shapes = ((), space.shape[-1:], space.shape)
    if array.dtype.kind not in "iu" or array.shape not in shapes or (array < 1).any():
        expected = "a number of values above 0 for all numbers"
        if space.shape:
            expected += f", or a list of {space.shape[-1]}, one for each along the last axis"
        raise ValueError(f"{place}: expected {expected}, got {reprlib.repr(sizes)}")
    return CategoricalBox(space, np.broadcast_to(array, space.shape))


def _num_values(box: spaces.Box) -> np.ndarray:
    """Return the count of integers between the bounds of each number of a Box, as Python integers,
    since the difference of 64-bit bounds may exceed 64 bits.
    """
    return np.asarray(box.high.astype(object) - box.low.astype(object) + 1, object)


def original_space(space: AnySpace) -> AnySpace:
    """Return a space with the Box in place of each `CategoricalBox`."""
    return replace_leaves(
        space, lambda name, part: part.box if isinstance(part, CategoricalBox) else part
    )


def categorical_sizes(space: AnySpace) -> dict[str, Any]:
    """Return the sizes of the declared parts of a space by name, in the shortest form that
    `as_categorical` takes.
    """
    sizes = {}
    for name, part in list_leaves(space):
        if isinstance(part, CategoricalBox):
            sizes[name or VECTOR] = _shortest_sizes(part.nvec)
    return sizes


def _shortest_sizes(sizes: np.ndarray) -> Any:
    """Return the sizes of a part as one number, or as a list along the last axis, where possible."""
    if (sizes == sizes.flat[0]).all():
        return int(sizes.flat[0])
    along_last = sizes.reshape(-1, sizes.shape[-1])[0]
    return (along_last if (sizes == along_last).all() else sizes).tolist()


def categorical_columns(space: AnySpace) -> tuple[tuple[int, int], ...]:
    """Return (first column, columns) of each one-hot number of the declared parts, as
    `Spec.categorical` holds them.
    """
    groups: list[tuple[int, int]] = []
    for _, part, first in list_leaf_columns(space):
        if isinstance(part, CategoricalBox):
            groups += one_hot_groups(value_counts(part).tolist(), first)
    return tuple(groups)


def grid_schema(space: AnySpace) -> tuple[tuple[str, int, int], ...]:
    """Return the blocks of an observation with grids, as `Spec.entity_schema` holds them: the cells
    of each, and the numbers around them; empty without a grid. space: see `grid_parts`.
    """
    blocks: list[tuple[str, int, int]] = []
    grids = grid_parts(space)
    end = 0
    for name, first, cells, width in grids:
        blocks += [(OWN_KIND, first - end, 1), (f"{GRID_PREFIX}{name}", width, cells)]
        end = first + cells * width
    if grids:
        size = sum(numbers for _, numbers in observation_parts(space))
        blocks.append((OWN_KIND, size - end, 1))
    return tuple(block for block in blocks if block[1])


def grid_parts(space: AnySpace, categorical: Declaration = None) -> list[tuple[str, int, int, int]]:
    """Return the declared parts that are grids of equal cells: a Box of at least three dimensions,
    the last of which are the numbers of a cell.

    Args:
        space, categorical: see `as_categorical`.

    Returns:
        (name, first column, cells, columns of a cell) of each, in the order of the columns.
    """
    grids = []
    for name, part, first in list_leaf_columns(as_categorical(space, categorical)):
        if not isinstance(part, CategoricalBox) or len(part.shape) < 3:
            continue
        cells = part.nvec.reshape(-1, part.shape[-1])
        if (cells == cells[0]).all():
            grids.append((name or VECTOR, first, len(cells), int(cells[0].sum())))
    return grids
