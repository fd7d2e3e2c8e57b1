"""Columns of a file that mark other ends of episodes than `terminals` and `timeouts` do.

A log may say where episodes end under a name that the reader does not read: flags (`dones`,
`is_last`, `is_first`), a number of each episode, a step counter that restarts, or the ends or
lengths of all episodes. If `terminals` mark fewer ends, episodes would be joined without a word.
The name of a column counts, and so does what it marks, since a name may be any.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS = 1 << 21  # rows of a column that are read at a time
CHANCE = 0.05  # a column that marks all ends by chance would do so less often
ADJACENT = 0.2  # share of the flags of ends that follow each other; a contact lasts for many rows

EPISODE = set(
    [
        "episode",
        "episodes",
        "ep",
        "eps",
        "traj",
        "trajs",
        "trajectory",
        "trajectories",
        "rollout",
        "rollouts",
        "demo",
        "demos",
    ]
)
END = set(
    [
        "done",
        "dones",
        "terminal",
        "terminals",
        "terminated",
        "terminate",
        "terminates",
        "termination",
        "terminations",
        "truncated",
        "truncate",
        "truncates",
        "truncation",
        "truncations",
        "timeout",
        "timeouts",
        "out",
        "outs",
        "limit",
        "last",
        "end",
        "ends",
        "ended",
        "ending",
        "endings",
        "eos",
        "eoe",
        "final",
        "reset",
        "resets",
        "over",
        "boundary",
        "boundaries",
    ]
)
START = set(["first", "start", "starts", "started", "begin", "begins", "beginning", "beginnings"])
NUMBER = set(
    [
        "id",
        "ids",
        "index",
        "indices",
        "idx",
        "num",
        "number",
        "numbers",
        "no",
        "name",
        "names",
        "key",
        "uuid",
    ]
)
COUNTER = set(["step", "steps", "timestep", "timesteps", "t", "counter", "elapsed", "time"])
STEP_TYPE = set(["step", "type"])
LENGTH = set(["length", "lengths", "len", "lens", "size", "sizes", "offset", "offsets", "ptr"])
FILLER = set(
    [
        "is",
        "the",
        "of",
        "a",
        "at",
        "by",
        "in",
        "info",
        "infos",
        "flag",
        "flags",
        "float",
        "bool",
        "not",
        "non",
        "time",
        "env",
        "data",
        "meta",
        "metadata",
        "game",
    ]
)


@dataclass(frozen=True)
class Marks:
    """A reading of a column as ends of episodes.

    Attributes:
        ends: (n - 1,) bool, whether an episode ends with each row; the last row always ends one.
        is_named: the name of the column says that it marks episodes.
        is_complete: it would mark every episode, as a number of the episode does.
        is_flag: each mark is a flag of its own.
    """

    ends: np.ndarray
    is_named: bool
    is_complete: bool = False
    is_flag: bool = False


def find_contradictions(columns: Mapping[str, Any], ends: np.ndarray) -> dict[str, Marks]:
    """Return the columns that mark other ends of episodes than `ends` (n,), with their marks.

    columns: arrays by name, each of which is read by slices of its rows, in their order.
    """
    contradictions: dict[str, Marks] = {}
    for name, column in columns.items():
        for marks in read_marks(name, column, len(ends)):
            if contradicts(marks, ends[:-1]):
                contradictions[name] = marks
                break
    return contradictions


def describe_contradiction(contradictions: Mapping[str, Marks], ends: np.ndarray) -> str:
    """Return an error message on the first of these columns, at least one; ends: (n,) bool."""
    name, marks = next(iter(contradictions.items()))
    ends = ends[:-1]
    extra = np.flatnonzero(marks.ends & ~ends)
    missing = np.flatnonzero(ends & ~marks.ends)
    got = f"row {extra[0]} by {name} alone" if len(extra) else f"row {missing[0]} by them alone"
    by_column = marks.ends if marks.is_complete else marks.ends | ends
    counts = f"{by_column.sum() + 1:,} episodes with it, {ends.sum() + 1:,} without"
    names = ",".join(contradictions)
    return (
        f"expected {name} to agree with terminals and timeouts on where episodes end, got an end "
        f"in {got} ({counts}); mark the last row of every episode in terminals or timeouts, or "
        f"give dataset.ignore=[{names}] if this says nothing of episodes"
    )


def contradicts(marks: Marks, ends: np.ndarray) -> bool:
    """Return whether marks are ends of episodes that are missing in `ends` (n - 1,).

    Marks under a name that says nothing are ends if they include all of `ends`, more often than by
    chance, or if all others come at one time limit.
    """
    extra = marks.ends & ~ends
    if marks.is_named:
        return bool(extra.any() or (marks.is_complete and (ends & ~marks.ends).any()))
    count = int(ends.sum())
    if not extra.any() or not count:
        return False
    if not (ends & ~marks.ends).any():
        return bool(marks.ends.mean() ** count < CHANCE)
    return marks.is_flag and _are_at_time_limit(extra, ends)


def _are_at_time_limit(extra: np.ndarray, ends: np.ndarray) -> bool:
    """Return whether episodes with these further ends (n - 1,) are never longer than those that a
    further end stops, which have one length.
    """
    stops = np.flatnonzero(extra | ends)
    lengths = np.diff([-1, *stops])
    longest = max(int(lengths.max()), len(ends) - int(stops[-1]))
    limited = lengths[extra[stops]]
    by_chance = (1 / longest) ** int(ends.sum())
    return len(limited) > 1 and bool((limited == longest).all()) and by_chance < CHANCE


def read_marks(name: str, column: Any, n: int) -> Iterator[Marks]:
    """Yield the readings of a column of a file of n rows as ends of episodes."""
    kind = column.dtype.kind
    rows = int(np.prod(column.shape))
    if n < 2 or not column.shape or column.shape[0] != rows:
        return
    if rows != n:
        if kind in "iu" and 0 < rows <= n + 1:
            yield from _read_offsets(name, np.asarray(column[0:rows]).reshape(-1), n)
        return
    if kind not in "biufSU":
        return
    yield from _read_rows(name, column, n)


@dataclass
class Rows:
    """Facts of a column (n,), collected block by block."""

    changes: np.ndarray  # (n,) bool, row i differs from row i - 1
    restarts: np.ndarray  # (n,) bool, row i is not one step of the counter more than row i - 1
    ones: np.ndarray  # (n,) bool
    twos: np.ndarray  # (n,) bool
    runs: list[np.ndarray]  # value of each run of equal rows
    is_whole: bool = True  # whole numbers, or texts
    is_flag: bool = True  # of 0 and 1
    is_step_type: bool = True  # of 0, 1 and 2
    is_counter: bool = True  # begins again with its first value


def _read_rows(name: str, column: Any, n: int) -> Iterator[Marks]:
    """Yield the readings of a column (n,) with a number, or a text, for each row."""
    rows = _collect_rows(column, n)
    if not (rows.is_whole or rows.is_counter):
        return
    if rows.is_whole and _has_words(name, NUMBER | EPISODE, EPISODE):
        yield Marks(rows.changes[1:], is_named=True, is_complete=True)
    elif rows.is_step_type and all(_has_words(name, STEP_TYPE, {word}) for word in STEP_TYPE):
        # 0: the first row, 1: in the middle, 2: the last row, of dm_env and RLDS
        yield Marks(rows.twos[:-1], is_named=True)
    elif rows.is_flag:
        yield from _read_flags(name, rows.ones)
    elif rows.is_counter:
        yield Marks(
            rows.restarts[1:], is_named=_has_words(name, COUNTER | EPISODE | NUMBER, COUNTER)
        )
    elif rows.changes.mean() <= 0.5 and _are_distinct(rows.runs):
        yield Marks(rows.changes[1:], is_named=False)


def _collect_rows(column: Any, n: int) -> Rows:
    """Return the facts of a column (n,); a column of other numbers is read up to its first."""
    changes, restarts, ones, twos = np.zeros((4, n), bool)
    rows = Rows(changes=changes, restarts=restarts, ones=ones, twos=twos, runs=[])
    is_text = column.dtype.kind in "SU"
    if is_text:
        rows.is_flag = rows.is_step_type = rows.is_counter = False
    first = step = 0.0  # of a counter
    last_row: np.ndarray | None = None
    for start in range(0, n, ROWS):
        x = np.asarray(column[start : min(start + ROWS, n)]).reshape(-1)
        block = slice(start, start + len(x))
        previous = np.concatenate([x[:1] if last_row is None else last_row, x[:-1]])
        last_row = x[-1:]
        rows.changes[block] = x != previous
        begins = rows.changes[block].copy()
        begins[0] |= start == 0
        rows.runs.append(x[begins])
        if is_text:
            continue
        rows.ones[block] = x == 1
        rows.twos[block] = x == 2
        rows.is_flag = rows.is_flag and bool(np.isin(x, (0, 1)).all())
        rows.is_step_type = rows.is_step_type and bool(np.isin(x, (0, 1, 2)).all())
        rows.is_whole = rows.is_whole and bool((x == np.rint(x)).all())
        if start == 0:
            first = float(x[0])
            step = float(x[1]) - first if len(x) > 1 else 1.0
        away = np.abs(x.astype(float) - previous.astype(float) - step)
        rows.restarts[block] = ~(away <= 0.01 * abs(step))
        rows.restarts[0] = True
        again = np.abs(x[rows.restarts[block]] - first)
        rows.is_counter = rows.is_counter and step > 0 and bool((again < step / 2).all())
        if not (rows.is_whole or rows.is_counter):
            break
    return rows


def _read_flags(name: str, ones: np.ndarray) -> Iterator[Marks]:
    """Yield the readings of flags (n,): of last rows, of all others, or of first rows."""
    if ones.all() or not ones.any():
        return
    says_end = _has_words(name, END | EPISODE | COUNTER, END)
    says_start = _has_words(name, START | EPISODE | COUNTER, START)
    last = ones if ones.mean() <= 0.5 else ~ones
    if says_end or (not says_start and _are_apart(last)):
        yield Marks(last[:-1], is_named=says_end, is_flag=True)
    if ones[0] and (says_start or _are_apart(ones)):
        yield Marks(ones[1:], is_named=says_start, is_flag=True)


def _read_offsets(name: str, values: np.ndarray, n: int) -> Iterator[Marks]:
    """Yield the readings of integers (k,) as ends, starts or lengths of the episodes of n rows."""
    values = values.astype(np.int64)
    if (values < 0).any() or (values > n).any():
        return
    says_length = _has_words(name, LENGTH | EPISODE | COUNTER, LENGTH)
    says_offset = _has_words(name, END | START | LENGTH | EPISODE | NUMBER, END | START | LENGTH)
    bounds = []
    if len(values) > 1 and (np.diff(values) > 0).all():
        last = int(values[-1])
        if last in (n, n - 1) or values[0] == 0:
            # the row after each end, or, counted from 0, each last row
            after = values + 1 if last == n - 1 and values[0] != 0 else values
            bounds.append((after, says_offset))
    if values.sum() == n and (values > 0).all():
        bounds.append((np.cumsum(values), says_length))
    for after, is_named in bounds:
        ends = np.zeros(n + 1, bool)
        ends[after] = True
        yield Marks(ends[1:n], is_named=is_named, is_complete=is_named)


def _are_apart(flags: np.ndarray) -> bool:
    """Return whether few of these flags (n,) follow each other."""
    return bool((flags[1:] & flags[:-1]).sum() <= ADJACENT * flags.sum())


def _are_distinct(runs: Sequence[np.ndarray]) -> bool:
    """Return whether no value of these runs of equal rows comes back."""
    values = np.concatenate(runs)
    return len(np.unique(values)) == len(values)


def _has_words(name: str, words: set[str], required: set[str]) -> bool:
    """Return whether a name has no word but these, and one of those that are required."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    parts = set(re.findall("[a-z]+", spaced))
    return bool(parts & required) and parts <= words | FILLER
