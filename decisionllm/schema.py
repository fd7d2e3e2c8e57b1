"""The records that the parts of the package exchange, with shapes that are checked where a record
is made.

Letters: B batch, T window length in steps, S observation size, A action size, C number of discrete
actions, n steps of an episode, t steps so far, L text tokens, U distinct texts of a batch.

`StepColumns` is the field table: a new optional per-step field is one line there, and reaches the
store, windows and batches.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch  # an exported policy acts without it

Array = TypeVar("Array", np.ndarray, "torch.Tensor")
# returns to aim for: one for all episodes, or (N,); None: the policy's own
Targets = float | Sequence[float] | np.ndarray | None
MOST_ACTIONS = 1 << 24  # of a discrete action, whose index a store keeps as float32
Seed = int | Sequence[int] | np.random.SeedSequence  # as numpy's generators take it
Json = dict[str, Any]  # keys with values, as a JSON or YAML file holds them
Letters = list[tuple[str, bool]]  # (letter, whether one more) of each dimension
OWN_KIND = "own"  # of the blocks of an observation, see `EntityBlock`
GRID_PREFIX = "grid:"


def array_field(
    shape: str, *, optional: bool = False, dtype: type | None = None, kw_only: bool = False
) -> Any:
    """A field that must be an array of this shape, one letter a dimension; letters agree within a
    record. dtype: in a store.
    """
    metadata = {"shape": shape.split(), "dtype": dtype}
    default = None if optional else MISSING
    return field(default=default, kw_only=kw_only, metadata=metadata)


def column_field(shape: str, dtype: type, *, optional: bool = False, kw_only: bool = False) -> Any:
    """A field with one row a step: the class's leading dimensions come before this shape."""
    return array_field(f"* {shape}", dtype=dtype, optional=optional, kw_only=kw_only)


def stored_field(dtype: type, default: object) -> Any:
    """A field with one value an episode."""
    return field(default=default, kw_only=True, metadata={"dtype": dtype})


def to_arrays(record: Episode | History) -> None:
    """Replace the columns of a record by numpy arrays: a user may give lists, tensors or tables.

    A value without dimensions stays, which `check_record` refuses.
    """
    kind: type = type(record)
    for name, _, _ in _array_fields(kind):
        value = vars(record)[name]
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            got = f"{type(value).__name__} ({error})"
            raise ValueError(f"{kind.__name__}.{name}: expected an array, got {got}") from error
        if array.ndim:
            object.__setattr__(record, name, array)


def check_record(record: StepColumns[Array] | History) -> None:
    """Raise a ValueError if an array of a record has another shape than its field says, is not of
    numbers, or has a number that is not finite.
    """
    kind: type = type(record)
    sizes: dict[str, int] = {}  # by letter
    for name, letters, optional in _array_fields(kind):
        value = vars(record)[name]
        if value is None and optional:
            continue
        own_sizes = _match_shape(value, letters, sizes)
        if own_sizes is None:
            expected = ", ".join(_describe_dimension(*letter, sizes) for letter in letters)
            shape = getattr(value, "shape", None)
            got = type(value).__name__ if shape is None else tuple(shape)
            raise ValueError(f"{kind.__name__}.{name}: expected shape ({expected}), got {got}")
        sizes |= own_sizes
        if not isinstance(value, np.ndarray):
            continue
        if not is_numeric(value.dtype):
            raise ValueError(f"{kind.__name__}.{name}: expected numbers, got {value.dtype}")
        if value.dtype.kind != "f":
            continue
        finite = np.isfinite(value)
        if not finite.all():
            at = np.argwhere(~finite)[0]
            got = f"{value[tuple(at)]} at {at.tolist()}"
            raise ValueError(f"{kind.__name__}.{name}: expected finite numbers, got {got}")


def _match_shape(value: object, letters: Letters, sizes: dict[str, int]) -> dict[str, int] | None:
    """Return the size of each letter in a value's shape; None if it does not fit `sizes`."""
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) != len(letters):
        return None
    own_sizes: dict[str, int] = {}
    for (letter, more), size in zip(letters, shape, strict=True):
        own_sizes.setdefault(letter, size - more)
        expected = sizes.get(letter, own_sizes[letter])
        if size - more != expected:
            return None
    return own_sizes


def _describe_dimension(letter: str, more: bool, sizes: dict[str, int]) -> str:
    """Return a dimension for a message, such as `t+1=5`."""
    name = letter + "+1" * more
    return f"{name}={sizes[letter] + more}" if letter in sizes else name


def raise_for_first(place: str, wrong: np.ndarray, message: str, *values: object) -> None:
    """Raise a ValueError about the first wrong entry, if there is one.

    Args:
        place: how the message begins.
        wrong: which entries are, of any shape.
        message: with braces for the `values` of the entry.
        values: arrays, each with an entry for each of `wrong`.
    """
    if not wrong.any():
        return
    first = tuple(np.argwhere(wrong)[0])
    entries = []
    for array in values:
        value = np.asarray(array)[first]
        entries.append(value.tolist() if isinstance(value, np.ndarray) else value)
    raise ValueError(place + message.format(*entries))


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this type hold real numbers or bool, and no texts or Python objects."""
    return dtype.kind in "biuf"


def to_number(place: str, value: object, dtype: type) -> bool | int | float:
    """Return a number as `dtype` holds it.

    Raises:
        ValueError: an array, no number, or one that `dtype` does not hold. place: how the message
            begins.
    """
    array = np.asarray(value)
    if array.ndim == 0 and is_numeric(array.dtype):
        with np.errstate(invalid="ignore", over="ignore"):  # is found by the comparison
            held: np.ndarray = array.astype(dtype)
        fits = np.isfinite(held) if dtype is np.float32 else held == array
        if fits:
            number: bool | int | float = held.item()
            return number
    got = f"an array of shape {array.shape}" if array.ndim else repr(value)
    raise ValueError(f"{place}: expected one {np.dtype(dtype)}, got {got}")


def row_changes(*columns: np.ndarray) -> np.ndarray:
    """Return (n,) bool, True where a row differs from the row before it in one of these columns
    (n,); the first row does.
    """
    return np.append(True, np.any([np.diff(x) != 0 for x in columns], 0))


@cache
def _array_fields(record: type) -> list[tuple[str, Letters, bool]]:
    """Return (name, dimensions, whether it is optional) of each array of a record."""
    array_fields = []
    lead = record.lead if issubclass(record, StepColumns) else []
    for each in fields(record):
        if "shape" not in each.metadata:
            continue
        dimensions: list[str] = []
        for part in each.metadata["shape"]:
            dimensions += lead if part == "*" else [part]
        letters = [(name.removesuffix("+1"), name.endswith("+1")) for name in dimensions]
        array_fields.append((each.name, letters, each.default is None))
    return array_fields


class EntityBlock(NamedTuple):
    """A block of an observation with an entity schema: `num_entities` entities of `width` numbers.

    The kind says how they are read. `own`: numbers of the agent itself. `grid:NAME`: cells that are
    always there and whose place matters. Any other kind: entities in any order, each of which
    begins with a flag, 1 if it is there, and is zeros if not.
    """

    kind: str
    first: int  # column
    width: int
    num_entities: int

    @property
    def columns(self) -> slice:
        """The columns of the block in an observation."""
        return slice(self.first, self.first + self.width * self.num_entities)

    @property
    def is_own(self) -> bool:
        """True if the numbers are the agent's own, and no entities."""
        return self.kind == OWN_KIND

    @property
    def is_grid(self) -> bool:
        """True if the entities are the cells of a grid."""
        return self.kind.startswith(GRID_PREFIX)

    @property
    def has_flag(self) -> bool:
        """True if each entity begins with the flag of its presence."""
        return not (self.is_own or self.is_grid)


def one_hot_groups(sizes: Sequence[int], first: int = 0) -> tuple[tuple[int, int], ...]:
    """Return (first column, columns) of one-hot groups of these sizes from a column on, as
    `Spec.categorical` holds them.
    """
    ends = first + np.cumsum(sizes, dtype=int)
    return tuple((int(end) - int(size), int(size)) for end, size in zip(ends, sizes, strict=True))


@dataclass(frozen=True)
class Spec:
    """Sizes and action space of a dataset, which its reader finds out.

    Attributes:
        observation_dim: S, numbers of an observation.
        action_dim: A, numbers of an action; 1 of a discrete one, which is stored as one float that
            holds its index.
        horizon: most steps of an episode.
        low: (A,) least continuous action, raw units; one number stands for all A, and an array such
            as `action_space.low` becomes a tuple.
        high: (A,) greatest continuous action.
        num_actions: C, number of discrete actions; 0: actions are continuous.
        entity_schema: an observation block by block, (kind, width, count), see `EntityBlock`; ():
            one vector with no inner order.
        categorical: (first column, columns) of each one-hot group of an observation, whose units a
            model does not fit to the data; a single column is a flag.
    """

    observation_dim: int
    action_dim: int
    horizon: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    num_actions: int = 0
    entity_schema: tuple[tuple[str, int, int], ...] = ()
    categorical: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        blocks = tuple(
            (str(kind), int(width), int(count)) for kind, width, count in self.entity_schema
        )
        object.__setattr__(self, "entity_schema", blocks)
        groups = tuple((int(first), int(columns)) for first, columns in self.categorical)
        object.__setattr__(self, "categorical", groups)
        for name in ("observation_dim", "action_dim", "horizon", "num_actions"):
            number = to_number(f"Spec.{name}", vars(self)[name], np.int64)
            object.__setattr__(self, name, number)
        for name in ("low", "high"):
            object.__setattr__(self, name, self._bounds(name))
        if blocks and sum(width * count for _, width, count in blocks) != self.observation_dim:
            raise ValueError(
                f"Spec.entity_schema: expected blocks of {self.observation_dim} numbers in all, "
                f"the size of an observation, got {blocks}"
            )
        self._check_categorical()
        if min(self.observation_dim, self.action_dim, self.horizon) < 1:
            names = "Spec.observation_dim, action_dim, horizon"
            got = f"{self.observation_dim}, {self.action_dim} and {self.horizon}"
            raise ValueError(f"{names}: expected sizes and a horizon above 0, got {got}")
        if self.num_actions < 0:
            raise ValueError(
                "Spec.num_actions: expected a number of discrete actions, or 0 for continuous ones, "
                f"got {self.num_actions}"
            )
        if self.num_actions > MOST_ACTIONS:
            raise ValueError(
                f"Spec.num_actions: expected at most {MOST_ACTIONS:,} discrete actions, whose indices "
                f"float32 holds, got {self.num_actions:,}; give low and high if the integers of the "
                "log are amounts"
            )
        if not self.num_actions:
            self._check_bounds()
        elif self.action_dim != 1:
            raise ValueError(
                f"Spec.action_dim: a discrete action is one index, got {self.action_dim} numbers; "
                "continuous actions are floating-point numbers"
            )

    def _check_categorical(self) -> None:
        """Raise a ValueError unless the groups of categorical columns follow one another within an
        observation.
        """
        end = 0
        for first, columns in self.categorical:
            if first < end or columns < 1 or first + columns > self.observation_dim:
                raise ValueError(
                    "Spec.categorical: expected (first column, columns) of groups that follow one "
                    f"another within {self.observation_dim} numbers, the size of an observation, "
                    f"got {reprlib.repr(self.categorical)}"
                )
            end = first + columns

    def _bounds(self, name: str) -> tuple[float, ...]:
        """The bounds of this name as plain numbers, which JSON can hold."""
        bounds = vars(self)[name]
        array = np.asarray(bounds)
        if array.ndim > 1 or not is_numeric(array.dtype):
            raise ValueError(
                f"Spec.{name}: expected a number for each number of an action, "
                f"got shape {array.shape}, {array.dtype}"
            )
        if array.ndim == 0:
            return (array.item(),) * self.action_dim
        # One by one: in an array, the 0 of (0, 0.5) would become 0.0, and the fingerprint another.
        return tuple(np.asarray(bound).item() for bound in bounds)

    def _check_bounds(self) -> None:
        """Raise a ValueError unless the bounds of continuous actions are finite and in order."""
        if not len(self.low) == len(self.high) == self.action_dim:
            got = f"{len(self.low)} and {len(self.high)}"
            raise ValueError(f"Spec.low, high: expected {self.action_dim} bounds each, got {got}")
        finite = np.isfinite([*self.low, *self.high]).all()
        if not finite or not np.less(self.low, self.high).all():
            raise ValueError(
                f"Spec.low, high: expected finite bounds, low < high, got {self.low} and {self.high}; "
                "give those of the action space, by dataset.low and dataset.high of a file; of a "
                "number that never changes, bounds on both sides of it"
            )

    @classmethod
    def of(cls, saved: Json) -> Spec:
        """The spec that JSON holds, whose lists are tuples here."""
        lists = {key: tuple(value) for key, value in saved.items() if isinstance(value, list)}
        return cls(**saved | lists)


@dataclass(frozen=True)
class StepColumns(Generic[Array]):
    """The columns with one row a step that episodes, stores, windows and batches have in common.

    Raw units. `Episode` explains them.
    """

    lead: ClassVar[list[str]] = ["n"]
    observations: Array = column_field("S", np.float32)
    actions: Array = column_field("A", np.float32)
    rewards: Array | None = column_field("", np.float32, optional=True, kw_only=True)
    action_masks: Array | None = column_field("C", np.bool_, optional=True, kw_only=True)
    loss_mask: Array | None = column_field("", np.bool_, optional=True, kw_only=True)
    action_weight: Array | None = column_field("", np.float32, optional=True, kw_only=True)
    action_log_prob: Array | None = column_field("", np.float32, optional=True, kw_only=True)


STEP_FIELDS = {f.name: f.metadata["dtype"] for f in fields(StepColumns)}  # name -> dtype in a store
# Windows hold no rewards: a model reads them as returns-to-go.
OPTIONAL_STEP_FIELDS = tuple(
    f.name for f in fields(StepColumns) if f.default is None and f.name != "rewards"
)


@dataclass(frozen=True)
class Episode(StepColumns[np.ndarray]):
    """One agent from start to end, raw units.

    Row t: the observation, the action taken there and the reward it brought.

    Attributes:
        observations: (n, S) before each action.
        actions: (n, A); of a discrete action its index, (n, 1). A row of NaN is missing in the log.
        rewards: (n,) each brought by the action of its row.
        action_masks: (n, C) True where a discrete action is allowed; None: all are.
        loss_mask: (n,) False where the action is no training target; None: all are.
        action_weight: (n,) loss weight of the action, 0 to 1; None: 1; 0: the log lacks the action.
        action_log_prob: (n,) propensity: log-probability of the action under what chose it, or
            log-density in raw units; None: unknown.
        terminated: the task ended the episode.
        truncated: a time limit or a budget ended it.
        task: the text of the task.
        group: number of the world; episodes of one world share it, and a split never parts a group.
        final_observation: (S,) after the last action; None: the log lacks it.
        agent: number in its group, the same throughout the group; None: a single agent.
        start: the step of its world at which the agent appeared.
        return_after_exit: reward of the team after the agent left; part of every return-to-go.
        part: number of the dataset in a mixture.
        outcome: facts of a rollout beside the rewards; not stored.
    """

    rewards: np.ndarray = column_field("", np.float32)
    terminated: bool = stored_field(np.bool_, False)
    truncated: bool = stored_field(np.bool_, True)
    task: str = stored_field(np.int32, "")  # a store keeps its index
    group: int = stored_field(np.int64, 0)
    final_observation: np.ndarray | None = array_field(
        "S", optional=True, dtype=np.float32, kw_only=True
    )
    agent: int | None = stored_field(np.int32, None)
    start: int | None = stored_field(np.int32, None)
    return_after_exit: float | None = stored_field(np.float32, None)
    part: int | None = stored_field(np.int32, None)
    outcome: Json = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        to_arrays(self)
        if len(np.atleast_1d(self.rewards)) == 0:
            raise ValueError("Episode: expected at least one step, got none")
        if not isinstance(self.task, str):
            raise ValueError(f"Episode.task: expected str, got {self.task!r}")
        for name, dtype in EPISODE_NUMBERS.items():
            value = vars(self)[name]
            required = name in ("terminated", "truncated", "group")
            if required or value is not None:
                object.__setattr__(self, name, to_number(f"Episode.{name}", value, dtype))
        actions = np.asarray(self.actions)
        if actions.ndim == 2 and actions.dtype.kind == "f":
            self._leave_out(np.isnan(actions).all(1))
        check_record(self)

    @property
    def recorded_actions(self) -> np.ndarray:
        """(m, A) the actions that the log has, without those that are missing."""
        if self.action_weight is None:
            return self.actions
        return np.asarray(self.actions[self.action_weight > 0])

    def _leave_out(self, missing: np.ndarray) -> None:
        """Take the missing actions (n,) out of the loss, and put zeros in their place."""
        if not missing.any():
            return
        weight = self.action_weight
        if weight is None:
            weight = np.ones(len(missing), np.float32)
        weight = np.where(missing, 0, weight).astype(np.float32)
        actions = np.where(missing[:, None], 0, self.actions)
        object.__setattr__(self, "actions", actions)
        object.__setattr__(self, "action_weight", weight)


# name -> dtype in a store
EPISODE_FIELDS = {
    f.name: f.metadata["dtype"] for f in fields(Episode) if f.name not in STEP_FIELDS and f.metadata
}
EPISODE_NUMBERS = {
    name: dtype
    for name, dtype in EPISODE_FIELDS.items()
    if name not in ("task", "final_observation")
}


@dataclass(frozen=True)
class History:
    """The input of a policy: all observations up to now, the actions and rewards before, and the
    target return.

    Attributes:
        observations: (t + 1, S) from the start of the episode to now, raw units.
        actions: (t, A) that were taken; of a discrete action its index, (t, 1).
        rewards: (t,) that they brought.
        target_return: of the whole episode, raw reward units; None: the run's own.
        task: the text of the task.
        action_masks: (t + 1, C) True where a discrete action is allowed; None: all are.
    """

    observations: np.ndarray = array_field("t+1 S")
    actions: np.ndarray = array_field("t A")
    rewards: np.ndarray = array_field("t")
    target_return: float | None = None
    task: str = ""
    action_masks: np.ndarray | None = array_field("t+1 C", optional=True, kw_only=True)

    def __post_init__(self) -> None:
        to_arrays(self)
        check_record(self)


@dataclass(frozen=True)
class WindowColumns(StepColumns[Array]):
    """Up to T steps of B episodes, padded with zeros on the right: what windows and batches have in
    common.
    """

    lead: ClassVar[list[str]] = ["B", "T"]
    returns_to_go: Array = array_field("B T")  # raw reward units
    timesteps: Array = array_field("B T")  # from 0 within the episode
    mask: Array = array_field("B T")  # True where real
    loss_mask: Array = column_field("", np.bool_, optional=True, kw_only=True)  # left out: the mask
    # rows read together: 0, 0, 0, 1, 1, .. in their order
    team: Array | None = array_field("B", optional=True, kw_only=True)
    # number of each row in its team
    identity: Array | None = array_field("B", optional=True, kw_only=True)

    def __post_init__(self) -> None:
        check_record(self)
        if self.loss_mask is None:
            object.__setattr__(self, "loss_mask", self.mask)


@dataclass(frozen=True)
class Window(WindowColumns[np.ndarray]):
    """Windows as arrays."""

    episodes: np.ndarray = array_field("B")  # which episode each row was cut from
    # which of the sampler's texts
    text_index: np.ndarray | None = array_field("B", optional=True, kw_only=True)


@dataclass(frozen=True)
class Batch(WindowColumns["torch.Tensor"]):
    """A Window as tensors, with the U distinct texts of its rows, padded on the right."""

    text_ids: torch.Tensor = array_field("U L")  # L = 0: no text
    text_mask: torch.Tensor = array_field("U L")
    text_index: torch.Tensor = array_field("B")  # the text of each row

    def to(self, device: torch.device | str) -> Self:
        """The batch on this device."""
        moved: Json = {}
        for name, tensor in vars(self).items():
            if tensor is not None:
                moved[name] = tensor.to(device, non_blocking=True)
        return replace(self, **moved)


@dataclass(frozen=True)
class Report:
    """One line of results.jsonl: what was evaluated, how, and what came out."""

    world: str  # that it was evaluated in; results of one world are one table
    dataset: str  # that it was trained on; of a scripted player, the world
    policy: str
    protocol: str
    text: str
    seed: int
    # raw reward units; None for a policy that is not return-conditioned
    target_return: float | None
    headline: bool  # the one target fixed before the run
    n: int  # episodes
    mean_return: float  # raw reward units; `return` in the row
    score: float  # mean, in the env's score
    low: float  # 95 % bootstrap interval of the mean over the n episodes
    high: float
    seconds: float
    # the options that identify the run, see `result_groups.identifying_options`; {} for a scripted
    # player; None: not recorded
    options: Json | None = None
    # versions, fingerprint, commit: whatever belongs to this row
    extra: Json = field(default_factory=dict)

    def row(self) -> Json:
        """The line of results.jsonl, as a dict."""
        row = {}
        for name, value in vars(self).items():
            if name == "extra" or (name == "options" and value is None):
                continue
            row["return" if name == "mean_return" else name] = value
        return row | self.extra
