"""The records that rooms hand to each other, with their shapes, checked once where they are made.

Letters: B batch, T window length in steps, S observation size, A action size, C number of discrete actions, n steps of an
episode, t steps so far, L text tokens, U different texts of a batch.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cache

import numpy as np
import torch


def shaped(shape, *, optional=False):
    """A field that must be an array of this shape, one letter a dimension; letters agree within a record."""
    return field(**({"default": None} if optional else {}), metadata={"shape": shape.split()})


def _check(record):
    sizes = {}
    for name, letters, optional in _shapes(type(record)):
        value = getattr(record, name)
        if value is None and optional:
            continue
        got = getattr(value, "shape", None)
        expected = [sizes[letter] + more if letter in sizes else None for letter, more in letters]
        if got is None or len(got) != len(expected) or any(e not in (None, g) for e, g in zip(expected, got, strict=True)):
            words = (letter + "+1" * more for letter, more in letters)
            wanted = ", ".join(w if e is None else f"{w}={e}" for e, w in zip(expected, words, strict=True))
            came = type(value).__name__ if got is None else tuple(got)
            raise ValueError(f"{type(record).__name__}.{name}: expected shape ({wanted}), got {came}")
        sizes.update((letter, size - more) for (letter, more), size in zip(letters, got, strict=True))
        _check_finite(f"{type(record).__name__}.{name}", value)


@cache
def _shapes(record_type):
    """(name, ((letter, 1 if one more is meant), ...), optional) of each array of a record."""
    letters = lambda shape: [(s.removesuffix("+1"), s.endswith("+1")) for s in shape]  # noqa: E731
    return [(f.name, letters(f.metadata["shape"]), f.default is None) for f in fields(record_type) if "shape" in f.metadata]


def _check_finite(name, value):
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
        row = np.argwhere(~np.isfinite(value))[0]
        raise ValueError(f"{name}: expected finite numbers, got {value[tuple(row)]} at {row.tolist()}")


@dataclass(frozen=True)
class Spec:
    """What the data knows and nobody types: sizes, the action space, the longest episode.

    low, high: (A,) bounds of a continuous action, in raw units. num_actions: C, or 0 for continuous actions; a discrete
    action is stored as one float that holds its index (A = 1).
    """

    observation_dim: int
    action_dim: int
    horizon: int  # steps
    low: tuple = ()
    high: tuple = ()
    num_actions: int = 0
    layout: tuple = ()  # an observation block by block, (kind, width, count): own numbers, then entities of a kind, each of
    # which begins with 1 if it is there and is zeros if not; (): one vector with no inner order

    def __post_init__(self):
        object.__setattr__(self, "layout", tuple((str(kind), int(width), int(count)) for kind, width, count in self.layout))
        if self.layout and sum(width * count for _, width, count in self.layout) != self.observation_dim:
            raise ValueError(
                f"Spec.layout: expected blocks of {self.observation_dim} numbers in all, the size of an observation, got {self.layout}"
            )
        if self.num_actions and self.action_dim != 1:
            raise ValueError(f"Spec.action_dim: a discrete action is one index, got {self.action_dim} numbers")
        if not self.num_actions and not (len(self.low) == len(self.high) == self.action_dim):
            raise ValueError(
                f"Spec.low, high: expected {self.action_dim} bounds each, got {len(self.low)} and {len(self.high)}"
            )
        if not self.num_actions and not (np.isfinite([*self.low, *self.high]).all() and np.less(self.low, self.high).all()):
            raise ValueError(f"Spec.low, high: expected finite bounds, low < high, got {self.low} and {self.high}")


@dataclass(frozen=True)
class Episode:
    """One agent from start to end, raw units: row t is what was seen, what was done there, and what that brought."""

    observations: np.ndarray = shaped("n S")
    actions: np.ndarray = shaped("n A")
    rewards: np.ndarray = shaped("n")
    terminated: bool = False  # by the task
    truncated: bool = True  # by the clock or the budget
    task: str = ""  # the text of the task
    group: int = 0  # episodes of one world share it; a split never parts a group
    action_masks: np.ndarray | None = shaped("n C", optional=True)  # True where a discrete action was allowed
    acted: np.ndarray | None = shaped("n", optional=True)  # False where the action is not to be imitated; None: all are
    final_observation: np.ndarray | None = shaped("S", optional=True)  # what was seen after the last action, if it is known
    agent: int | None = None  # which of its group it is: the same throughout the group, and nothing across groups
    start: int | None = None  # the step of its world at which it appeared
    later: float | None = None  # what the team was paid after it was gone, raw reward units; a part of every return-to-go

    def __post_init__(self):
        if len(np.atleast_1d(self.rewards)) == 0:
            raise ValueError("Episode: expected at least one step, got none")
        _check(self)


@dataclass(frozen=True)
class History:
    """What a policy is told: everything seen so far, now included, what was done and got before, and the return asked for."""

    observations: np.ndarray = shaped("t+1 S")
    actions: np.ndarray = shaped("t A")
    rewards: np.ndarray = shaped("t")
    target_return: float | None = None  # raw reward units for the whole episode; None: the run's own
    task: str = ""
    action_masks: np.ndarray | None = shaped("t+1 C", optional=True)

    def __post_init__(self):
        _check(self)


@dataclass(frozen=True)
class Window:
    """Up to T steps of B episodes, padded with zeros on the right. Timesteps count from 0 within the episode."""

    observations: np.ndarray = shaped("B T S")
    actions: np.ndarray = shaped("B T A")
    returns_to_go: np.ndarray = shaped("B T")  # raw reward units
    timesteps: np.ndarray = shaped("B T")
    mask: np.ndarray = shaped("B T")  # True where real
    episodes: np.ndarray = shaped("B")  # which episode each row was cut from
    action_masks: np.ndarray | None = shaped("B T C", optional=True)
    rewards: np.ndarray | None = shaped("B T", optional=True)  # of a log
    acted: np.ndarray | None = shaped("B T", optional=True)  # of a log
    team: np.ndarray | None = shaped("B", optional=True)  # which rows are read together: 0, 0, 0, 1, 1, .. in their order
    identity: np.ndarray | None = shaped("B", optional=True)  # who each is in its team
    told: np.ndarray | None = shaped("B", optional=True)  # which of its sampler's texts each row's team is told

    def __post_init__(self):
        _check(self)

    @property
    def imitated(self):
        """(B, T), True where the loss counts."""
        return self.mask if self.acted is None else self.acted


@dataclass(frozen=True)
class Batch:
    """A Window as tensors, with the U different texts of its rows, padded on the right."""

    observations: torch.Tensor = shaped("B T S")
    actions: torch.Tensor = shaped("B T A")
    returns_to_go: torch.Tensor = shaped("B T")
    timesteps: torch.Tensor = shaped("B T")
    mask: torch.Tensor = shaped("B T")
    text_ids: torch.Tensor = shaped("U L")  # L = 0: no text
    text_mask: torch.Tensor = shaped("U L")
    text_index: torch.Tensor = shaped("B")  # which text each row has
    action_masks: torch.Tensor | None = shaped("B T C", optional=True)
    rewards: torch.Tensor | None = shaped("B T", optional=True)
    acted: torch.Tensor | None = shaped("B T", optional=True)
    team: torch.Tensor | None = shaped("B", optional=True)
    identity: torch.Tensor | None = shaped("B", optional=True)

    def __post_init__(self):
        _check(self)

    imitated = Window.imitated

    def until(self, step):
        """The same without the steps from this one on."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["shape"][:2] == ["B", "T"]}
        return replace(self, **{name: x if x is None else x[:, :step] for name, x in named.items()})

    def to(self, device):
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: x if x is None else x.to(device, non_blocking=True) for name, x in moved.items()})


@dataclass(frozen=True)
class Report:
    """One line of results.jsonl: what was evaluated, how, and what came out."""

    dataset: str
    policy: str
    protocol: str
    text: str
    seed: int
    target_return: float | None  # raw reward units; None for a policy that is asked for nothing
    headline: bool  # the one target fixed before the run
    n: int  # episodes
    mean_return: float  # raw reward units; `return` in the row
    score: float  # mean, in the env's score
    low: float  # 95 % bootstrap interval of the mean over the n episodes
    high: float
    seconds: float
    extra: dict = field(default_factory=dict)  # versions, fingerprint, commit: whatever belongs to this row

    def row(self):
        """The line of results.jsonl, as a dict."""
        names = {f.name: "return" if f.name == "mean_return" else f.name for f in fields(self) if f.name != "extra"}
        return {name: getattr(self, field) for field, name in names.items()} | self.extra
