"""Observations and actions of Gymnasium spaces as rows of numbers: one layout for data,
environments and exports.

An observation is laid out by the names of its parts: the keys of a Dict are sorted, at every level;
the parts of a Tuple keep their order and are named by it.
An environment keeps the keys of its Dict in the order in which they were given, while Minari
restores them sorted. Without one rule the numbers that a policy reads in an environment would be
those of its data in another order.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import ArrayLike, DTypeLike

from decisionllm.files import explained
from decisionllm.schema import GRID_PREFIX, OWN_KIND, Json, are_numbers, one_hot_groups, refuse

AnySpace = Space[Any]
ActionSpace = spaces.Box | spaces.Discrete | spaces.MultiDiscrete
NamedPart = Sequence[str | int]  # its name, and how many numbers of an observation it has
Declaration = Mapping[str, Any] | Sequence[str] | None  # see `as_categorical`
MOST_ACTIONS = 4096  # combinations of a MultiDiscrete; a head has a logit for each
MOST_VALUES = 64  # of a number whose values are counted by the bounds of its Box

VECTOR = "observation"  # name of the one part of an observation that has no names


class CategoricalBox(spaces.MultiDiscrete):
    """An integer Box whose numbers are categories: one-hot in a row, values of the Box's type
    outside of it.

    A number counts from the low of the Box, or from 0 where the Box has no lower bound.

    Args:
        box: the space of an environment or a dataset.
        sizes: number of values of each number, in the shape of the Box.
    """

    def __init__(self, box: spaces.Box, sizes: np.ndarray) -> None:
        # A Box of integers without a lower bound has the least number of its type as one
        least = np.iinfo(np.dtype(box.dtype).name).min
        has_no_low = (box.low == least) & (_num_values(box) > MOST_VALUES)
        super().__init__(sizes, start=np.where(has_no_low, 0, box.low))
        self.box = box

    def __repr__(self) -> str:
        return f"CategoricalBox of shape {self.shape}"


def flatten(values: Any, space: AnySpace, *, dtype: DTypeLike | None = np.float32) -> np.ndarray:
    """Observations of n steps as rows. Parts that are texts have no numbers, see `text_parts`.

    Args:
        values: the observations, stacked (see `stack`): an array with n in front, or a dict or tuple
            of such arrays.
        space: their space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict or Tuple of these,
            also nested.
        dtype: of the rows; None: that of the values, for a writer that reports what is rounded.

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
        named = _named_values(values, space)
        columns = []
        for key, part in _entries(space):
            if has_numbers(part):
                columns.append(_flatten_part(named[key], part, _joined_name(name, key), dtype))
        return np.concatenate(columns, axis=1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _one_hot(values, space, name or VECTOR)
    observation_parts(space)  # refuses other spaces
    array = _numbers(values, space)
    if isinstance(space, spaces.MultiBinary):
        message = f"expected 0 or 1 in {space}, got {{}}"
        refuse("", ~np.isin(array, (0, 1)), message, array)
    return np.asarray(array, dtype).reshape(len(array), -1)


def flatten_one(observation: Any, space: AnySpace) -> np.ndarray:
    """The observation of one step as a row (S,) float32, a copy; see `flatten`."""
    return np.array(flatten(_stacked_once(observation, space), space)[0])


def _stacked_once(observation: Any, space: AnySpace) -> Any:
    """One observation with an axis of 1 in front, as `stack` makes it."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if isinstance(observation, np.ndarray) and isinstance(space, spaces.Tuple):
            observation = tuple(observation)
        named = _named_values(observation, space)
        parts = {key: _stacked_once(named[key], part) for key, part in _entries(space)}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    if isinstance(observation, Mapping):
        got = f"a dict of {', '.join(map(str, observation)) or 'nothing'}"
        raise ValueError(f"expected numbers of {_in_short(space)}, got {got}")
    return np.asarray(observation)[None]


def _named_values(values: Any, space: AnySpace) -> Any:
    """The parts of a value of a Dict or Tuple by their keys; stacked values of a Tuple may be one
    array (n, parts).

    Raises:
        ValueError: it is of another kind, or has other keys.
    """
    keys = [key for key, _ in _entries(space)]
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


def _numbers(values: Any, space: AnySpace) -> np.ndarray:
    """Stacked values of a space without parts, (n, ...).

    Raises:
        ValueError: they are no numbers, or have another shape than the space, dimensions of 1
            aside.
    """
    array = np.asarray(values)
    if not are_numbers(array.dtype):
        raise ValueError(f"expected numbers of {_in_short(space)}, got {array.dtype}")
    shape = array.shape[1:]
    if [size for size in shape if size != 1] != [size for size in space.shape or () if size != 1]:
        raise ValueError(f"expected numbers of {_in_short(space)}, got shape {shape}")
    return array


def _in_short(space: AnySpace) -> str:
    """A space for a message, without the bounds of each number."""
    return f"{type(space).__name__} of shape {space.shape}"


def _one_hot(values: Any, space: spaces.Discrete | spaces.MultiDiscrete, name: str) -> np.ndarray:
    """Values of a space, stacked, with a one for the value of each part: (n, S) float32."""
    index = _indices(values, space, name)
    sizes = _sizes(space)
    first = np.cumsum(sizes) - sizes  # the first column of each part
    rows = np.zeros((len(index), int(sizes.sum())), np.float32)
    np.put_along_axis(rows, index + first, 1, axis=1)
    return rows


def _sizes(space: spaces.Discrete | spaces.MultiDiscrete) -> np.ndarray:
    """(parts,) number of values of each part."""
    return np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).astype(np.int64)


def _indices(values: Any, space: spaces.Discrete | spaces.MultiDiscrete, name: str) -> np.ndarray:
    """Values of a space, stacked, counted from 0: (n, parts) int.

    Raises:
        ValueError: a value is not one of the space. name: of the values, for the message.
    """
    array = _numbers(values, space)
    array = array.reshape(len(array), *(space.shape or ()))
    index = (array - space.start).reshape(len(array), -1)
    outside = (index < 0) | (index >= _sizes(space)) | (index != np.rint(index))
    if isinstance(space, spaces.Discrete):
        message = f"expected a value of {space}, got {{}} in row {{}}"
        refuse("", outside.any(axis=1), message, array, np.arange(len(array)))
    elif outside.any():
        raise ValueError(_describe_outside(array, outside, space, name))
    return index.astype(int)


def _describe_outside(
    array: np.ndarray, outside: np.ndarray, space: spaces.MultiDiscrete, name: str
) -> str:
    """The message about the first number that is not one of a space.

    Args:
        array: (n, ...) values of the space.
        outside: (n, parts) whether each number is not one of the space.
        space: the space.
        name: of the values.
    """
    row, number = np.argwhere(outside)[0].tolist()
    value = array.reshape(len(array), -1)[row, number].item()
    least = int(np.ravel(space.start)[number])
    end = least + int(_sizes(space)[number])
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
    """Rows (n, S) as stacked observations of a space, of its types: the inverse of `flatten`.

    text: of the parts that are texts.
    """
    if is_text(space):
        return np.full(len(rows), text, object)
    if isinstance(space, spaces.Box):
        return _of_box(rows, space)
    if isinstance(space, spaces.Discrete):
        return rows.argmax(axis=1) + space.start
    if isinstance(space, spaces.MultiDiscrete):
        blocks = np.split(rows, np.cumsum(_sizes(space))[:-1], axis=1)
        index = np.stack([block.argmax(axis=1) for block in blocks], axis=1)
        dtype = space.box.dtype if isinstance(space, CategoricalBox) else space.dtype
        return np.asarray(index.reshape(len(rows), *space.shape) + space.start, dtype)
    if isinstance(space, spaces.MultiBinary):
        return np.asarray(rows.reshape(len(rows), *space.shape) > 0.5, space.dtype)
    values: Json = {}
    first = 0
    for key, part in _entries(space):
        size = sum(_size(leaf, name) for name, leaf in _leaves(part) if not is_text(leaf))
        values[key] = unflatten(rows[:, first : first + size], part, text=text)
        first += size
    return values if isinstance(space, spaces.Dict) else tuple(values.values())


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
    if isinstance(space, CategoricalBox):
        return _within(values, space.box)
    if isinstance(space, spaces.Box):
        return bool(np.all((values >= space.low) & (values <= space.high)))
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(_within(values[key], part) for key, part in _entries(space))
    return True


def observation_parts(space: AnySpace) -> list[tuple[str, int]]:
    """The layout that `flatten` gives to an observation.

    Args:
        space: see `flatten`.

    Returns:
        (name, numbers) of each part, in the order of the columns. Names of nested parts are joined
        by a dot, those of a Tuple are 0, 1, ...; an observation that is neither Dict nor Tuple is
        one part, `observation`.

    Raises:
        ValueError: a part of the space is of another kind, or all of them are texts.
    """
    numbers = [(name, part) for name, part in _leaves(space) if not is_text(part)]
    if not numbers:
        raise ValueError(f"observation space: expected numbers beside texts, got {space}")
    return [(name or VECTOR, _size(part, name)) for name, part in numbers]


def is_text(space: AnySpace) -> bool:
    """Return whether a space is one of texts, such as `spaces.Text` or MiniGrid's MissionSpace."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def has_numbers(space: AnySpace) -> bool:
    """Return whether a space has a part that is no text."""
    return not all(is_text(part) for _, part in _leaves(space))


def text_parts(space: AnySpace) -> list[str]:
    """Return the names of the parts of an observation that are texts, as `observation_parts` names
    the others.
    """
    return [name for name, part in _leaves(space) if name and is_text(part)]


def text_values(values: Any, space: AnySpace, name: str = "") -> dict[str, Any]:
    """Return the texts of an observation, or of stacked ones, by the names of `text_parts`."""
    if is_text(space):
        return {name: values}
    texts: dict[str, Any] = {}
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in _entries(space):
            texts |= text_values(values[key], part, _joined_name(name, key))
    return texts


def replace_texts(space: AnySpace, texts: Sequence[str]) -> AnySpace:
    """Return a space whose parts that are texts are a `spaces.Text` of just these texts' lengths
    and letters, which can be written to a file.
    """
    letters = frozenset("".join(texts)) or frozenset("a")
    longest = max(map(len, texts), default=0)
    text = spaces.Text(max(longest, 1), min_length=0, charset=letters)
    return _replace_parts(space, lambda name, part: text if is_text(part) else part)


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
    parts = {name or VECTOR: part for name, part in _leaves(space)}
    boxes: dict[str, AnySpace] = {}
    for name, sizes in _declared_sizes(categorical, option).items():
        if name not in parts:
            near = get_close_matches(name, parts, 3, 0.5) or list(parts)[:10]
            what = "a name of a part of the observation"
            raise ValueError(f"{option}: expected {what}, such as {', '.join(near)}, got {name}")
        boxes[name] = _declare(parts[name], sizes, name, option)
    return _replace_parts(space, lambda name, part: boxes.get(name or VECTOR, part))


def _declared_sizes(categorical: Any, option: str, name: str = "") -> dict[str, Any]:
    """The sizes of `as_categorical` by the names of the parts."""
    if isinstance(categorical, Mapping):
        sizes: dict[str, Any] = {}
        for key, value in categorical.items():
            part = _joined_name(name, key)
            if isinstance(value, Mapping):
                sizes |= _declared_sizes(value, option, part)
            else:
                sizes[part] = value
        return sizes
    if not isinstance(categorical, list | tuple):
        expected = f"{option}={{NAME: SIZES}} or {option}=[NAME]"
        raise ValueError(f"{option}: expected {expected}, got {categorical!r}")
    return dict.fromkeys(map(str, categorical))


def _declare(space: AnySpace, sizes: Any, name: str, option: str) -> CategoricalBox:
    """The part of this name as a `CategoricalBox`; see `as_categorical`."""
    place = f"{option}.{name}"
    is_integer = space.dtype is not None and np.issubdtype(space.dtype, np.integer)
    if not isinstance(space, spaces.Box) or not is_integer or 0 in space.shape:
        got = type(space).__name__
        fix = "leave it out"
        if isinstance(space, spaces.Box):
            got = f"{_in_short(space)} and type {space.dtype}"
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            fix = "leave it out, since it is one-hot already"
        raise ValueError(f"{place}: expected a Box of integers, got {got}; {fix}")
    num_values = _num_values(space)
    if sizes is None:
        if max(num_values.flat, default=1) > MOST_VALUES:
            got = f"{space.low.min()} .. {space.high.max()}"
            fix = f"give the number of values, such as {option}={{{name}: 8}}, or a list of them"
            expected = f"bounds with at most {MOST_VALUES} values between them"
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
    """The count of integers between the bounds of each number, of the shape of a Box, as int of
    Python: one of 64 bits holds no difference of 64 bits.
    """
    return np.asarray(box.high.astype(object) - box.low.astype(object) + 1, object)


def original_space(space: AnySpace) -> AnySpace:
    """Return a space with the Box in place of each `CategoricalBox`."""
    return _replace_parts(
        space, lambda name, part: part.box if isinstance(part, CategoricalBox) else part
    )


def categorical_sizes(space: AnySpace) -> dict[str, Any]:
    """Return the sizes of the declared parts of a space by name, in the shortest form that
    `as_categorical` takes.
    """
    sizes = {}
    for name, part in _leaves(space):
        if isinstance(part, CategoricalBox):
            sizes[name or VECTOR] = _shortest_sizes(part.nvec)
    return sizes


def _shortest_sizes(sizes: np.ndarray) -> Any:
    """Sizes of a part as one number or as a list along the last axis, where these say the same."""
    if (sizes == sizes.flat[0]).all():
        return int(sizes.flat[0])
    along_last = sizes.reshape(-1, sizes.shape[-1])[0]
    return (along_last if (sizes == along_last).all() else sizes).tolist()


def categorical_columns(space: AnySpace) -> tuple[tuple[int, int], ...]:
    """Return (first column, columns) of each one-hot number of the declared parts, as
    `Spec.categorical` holds them.
    """
    groups: list[tuple[int, int]] = []
    for _, part, first in _placed_leaves(space):
        if isinstance(part, CategoricalBox):
            groups += one_hot_groups(_sizes(part).tolist(), first)
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
    for name, part, first in _placed_leaves(as_categorical(space, categorical)):
        if not isinstance(part, CategoricalBox) or len(part.shape) < 3:
            continue
        cells = part.nvec.reshape(-1, part.shape[-1])
        if (cells == cells[0]).all():
            grids.append((name or VECTOR, first, len(cells), int(cells[0].sum())))
    return grids


def _placed_leaves(space: AnySpace) -> list[tuple[str, AnySpace, int]]:
    """(name, space, first column) of the parts with numbers, in the order of their columns."""
    leaves = []
    first = 0
    for name, part in _leaves(space):
        if not is_text(part):
            leaves.append((name, part, first))
            first += _size(part, name)
    return leaves


def _replace_parts(
    space: AnySpace, replace: Callable[[str, AnySpace], AnySpace], name: str = ""
) -> AnySpace:
    """A space with another one in place of each part that has no parts itself. replace: takes its
    name and space.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return replace(name, space)
    parts = {}
    for key, part in _entries(space):
        parts[key] = _replace_parts(part, replace, _joined_name(name, key))
    return spaces.Dict(parts) if isinstance(space, spaces.Dict) else spaces.Tuple(parts.values())


def _joined_name(name: str, key: Any) -> str:
    """The name of a part that has this key in the part of this name."""
    return f"{name}.{key}" if name else str(key)


def _leaves(space: AnySpace, name: str = "") -> list[tuple[str, AnySpace]]:
    """(name, space) of the parts that have no parts themselves, in the order of their columns."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [(name, space)]
    leaves = []
    for key, part in _entries(space):
        leaves += _leaves(part, _joined_name(name, key))
    if not leaves:
        raise ValueError(f"{_place(name)}: expected a {type(space).__name__} with parts, got none")
    return leaves


def _size(space: AnySpace, name: str) -> int:
    """How many numbers of a row hold a part; a ValueError if it has no layout."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return int(_sizes(space).sum())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return prod(space.shape)
    expected = "a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of them"
    raise ValueError(f"{_place(name)}: expected {expected}, got {space}")


def _place(name: str) -> str:
    """A part of an observation space, to begin a message with."""
    return f"observation space, part {name}" if name else "observation space"


def _entries(space: AnySpace) -> list[tuple[Any, AnySpace]]:
    """(key, space) of the parts of a Dict or Tuple, in the order of their columns."""
    if isinstance(space, spaces.Tuple):
        return list(enumerate(space.spaces))
    assert isinstance(space, spaces.Dict)
    # By the text of the key, since a dataset's card has nothing else.
    return sorted(space.spaces.items(), key=lambda item: str(item[0]))


def stack(observations: Sequence[Any]) -> Any:
    """n observations as one: arrays with n in front; dicts of them for dicts, tuples of them for
    tuples, but an array (n, parts) for tuples of numbers."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stack([observation[key] for observation in observations]) for key in first}
    if isinstance(first, tuple) and any(isinstance(part, dict) or np.ndim(part) for part in first):
        return tuple(stack(parts) for parts in zip(*observations, strict=True))
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
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        wanted = "a Box, a Discrete or a MultiDiscrete"
        raise ValueError(f"action space: expected {wanted}, got {space}")
    sizes: list[int] = _sizes(space).tolist()
    if isinstance(space, spaces.MultiDiscrete) and prod(sizes) > MOST_ACTIONS:
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
        parts = _indices(actions, space, "action").T  # one row a part
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
