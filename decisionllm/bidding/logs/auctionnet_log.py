"""One record of advertisers' days, into which all of AuctionNet's logs are read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from glob import glob
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.bidding.logs.auctionnet_columns import (
    CAMPAIGN_COLUMNS,
    CAMPAIGN_KEY,
    COUNT,
    FILE_SUFFIXES,
    Columns,
)
from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.checks import parse_ranges
from decisionllm.schema import raise_for_first, row_changes

WHICH_CAMPAIGN = "period {:g}, advertiser {:g}: "  # in messages


@dataclass(frozen=True)
class Log:
    """K advertisers' days of T = 48 steps, by period and advertiser. Units as in campaign."""

    period: np.ndarray  # (K,) int
    advertiser: np.ndarray  # (K,) int
    category: np.ndarray  # (K,) int
    budget: np.ndarray  # (K,)
    target_cpa: np.ndarray  # (K,)
    states: np.ndarray  # (K, T, 16), in the order of STATE
    multiplier: np.ndarray  # (K, T)
    conversions: np.ndarray  # (K, T), counted
    exposed_value: np.ndarray  # (K, T)
    remaining: np.ndarray  # (K, T), before the step
    spend: np.ndarray  # (K,), of the day
    done: np.ndarray  # (K, T) bool: every step that began without budget, and the last
    repairs: dict[str, int]  # {what: how often}

    def rows(self, index: np.ndarray) -> "Log":
        """These days of the log."""
        columns = {name: x[index] for name, x in vars(self).items() if name != "repairs"}
        return replace(self, **columns)


def concatenate_logs(logs: Sequence[Log]) -> Log:
    """One log of all these days."""
    names = [f.name for f in fields(Log) if f.name != "repairs"]
    columns = {name: np.concatenate([vars(log)[name] for log in logs]) for name in names}
    repairs: Counter[str] = Counter()
    for log in logs:
        repairs.update(log.repairs)
    return Log(**columns, repairs=dict(sorted(repairs.items())))


def log_files(path: str | Path) -> list[Path]:
    """The files of a path: a file, a folder or a pattern."""
    location = Path(path).expanduser()
    files = [location] if location.is_file() else [Path(name) for name in glob(str(location))]
    if location.is_dir():
        files = [file for file in location.iterdir() if file.name.endswith(FILE_SUFFIXES)]
    if not files:
        suffixes = ", ".join(FILE_SUFFIXES)
        raise FileNotFoundError(
            f"{path}: no log there; expected a file, a folder or a pattern of {suffixes}"
        )
    return sorted(files)


def format_periods(periods: ArrayLike) -> str:
    """Format period numbers: [0, 1, 2, 5] -> "0-2,5", which `parse_periods` reads."""
    numbers = np.unique(periods)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    parts = []
    for run in runs:
        parts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


def parse_periods(periods: str) -> list[int]:
    """Parse period numbers: "0-2,5" -> [0, 1, 2, 5]; empty: none, which stands for all."""
    return sorted(parse_ranges("dataset.periods", periods, nothing="all"))


def sort_whole_days(
    file: Path, columns: Columns, *, numbered: bool, remark: str = ""
) -> np.ndarray:
    """The order of rows by period and advertiser, whose steps must stand as 0, 1, .. 47.

    numbered: these are rows of the file, which messages may number.
    """
    if not len(columns["timeStepIndex"]):
        raise ValueError(f"{file}: expected rows with all their numbers, got none{remark}")
    order = np.lexsort([columns[name] for name in reversed(CAMPAIGN_KEY)])
    period, advertiser, step = (columns[name][order] for name in (*CAMPAIGN_KEY, "timeStepIndex"))
    first = np.flatnonzero(row_changes(period, advertiser))
    sizes = np.diff(np.append(first, len(step)))
    expected = np.arange(len(step)) - np.repeat(first, sizes)
    what = ", row {4}" if numbered else ""
    what += ", timeStepIndex: period {0:g}, advertiser {1:g}: expected step {2}, got {3:g}" + remark
    raise_for_first(
        str(file), step != expected, what, period, advertiser, expected, step, order + 1
    )
    what = f"period {{:g}}, advertiser {{:g}} has {{}} steps, expected {STEPS}{remark}"
    what += "; the log is cut short"
    raise_for_first(f"{file}: ", sizes != STEPS, what, period[first], advertiser[first], sizes)
    return order


def read_constants(file: Path, days: Columns, names: dict[str, str]) -> Columns:
    """The values of columns (K, T) that must not change over a day: {field of Log: (K,)}.

    Counts are int. names: {field of Log: column}.
    """
    what = WHICH_CAMPAIGN + "expected one value for the day, got {:g} and, in step {:g}, {:g}"
    step = days["timeStepIndex"]
    value_by_field = {}
    for field, name in names.items():
        column = days[name]
        first = np.broadcast_to(column[:, :1], column.shape)
        values = days[CAMPAIGN_KEY[0]], days[CAMPAIGN_KEY[1]], first, step, column
        raise_for_first(f"{file}, {name}: ", column != first, what, *values)
        kind = int if CAMPAIGN_COLUMNS.get(name) is COUNT else float
        value_by_field[field] = column[:, 0].astype(kind)
    return value_by_field


def refuse_rises(file: Path, days: Columns, remaining: np.ndarray) -> None:
    """Raise a ValueError if a remaining budget (K, T) grows over a day."""
    step = days["timeStepIndex"]
    rises = np.diff(remaining, axis=1) > 1e-6 * days["budget"][:, 1:]
    what = WHICH_CAMPAIGN + "expected a remaining budget that never grows"
    what += ", got {:g} before step {:g} and {:g} before step {:g}"
    values = remaining, step, remaining[:, 1:], step[:, 1:]
    raise_for_first(f"{file}: ", rises, what, days[CAMPAIGN_KEY[0]], days[CAMPAIGN_KEY[1]], *values)
