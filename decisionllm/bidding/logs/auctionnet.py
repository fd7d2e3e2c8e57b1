"""AuctionNet's logs: read traffic and trajectory logs, write trajectory logs.

A trajectory log has a row for each advertiser's step, with the state as the text of a tuple, or in
Parquet as a list. The header decides which of the two a file is.
Source: AuctionNet (arXiv 2412.10798), its data description and `train_data_generator.py`.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from decisionllm.bidding.logs.auctionnet_columns import (
    COLUMN_BY_FIELD,
    FILE_SUFFIXES,
    TRAJECTORIES,
    detect_kind,
    open_text,
    read_columns,
)
from decisionllm.bidding.logs.auctionnet_log import (
    Log,
    concatenate_logs,
    format_periods,
    log_files,
    parse_periods,
    read_constants,
    refuse_rises,
    sort_whole_days,
)
from decisionllm.bidding.logs.traffic_log import read_traffic
from decisionllm.bidding.market.campaigns import STATE, STEPS
from decisionllm.files import MAP_FILES, atomic, new_path


def read(path: str | Path, *, periods: str = "") -> Log:
    """Read these files.

    Args:
        path: a file, a folder or a pattern. A period must be in one file, and complete.
        periods: such as `0-6` or `7,8`; empty: all.

    Raises:
        FileNotFoundError: no log at `path`.
        ValueError: a file is not a complete log, or a period is missing or in two files; names
            file, row and column.
    """
    selected = parse_periods(periods)
    logs = []
    seen: dict[int, Path] = {}  # {period: its file}
    files = log_files(path)
    for file, log in zip(files, MAP_FILES.get()(read_file, files), strict=True):
        for period in np.unique(log.period).tolist():
            if period in seen:
                where = f"period {period} is in {seen[period]} too"
                raise ValueError(f"{file}: {where}; leave one of the two out of dataset.path")
            seen[period] = file
        logs.append(log)
    missing_periods = sorted(set(selected) - set(seen))
    if missing_periods:
        missing = f"no period {format_periods(missing_periods)}, only {format_periods(list(seen))}"
        raise ValueError(f"dataset.periods: {path} has {missing}")
    log = concatenate_logs(logs)
    order = np.lexsort((log.advertiser, log.period))
    if selected:
        order = order[np.isin(log.period[order], selected)]
    return log.rows(order)


def read_file(file: Path) -> Log:
    """The log of one file; its header decides which of the two schemas it has."""
    kind = detect_kind(file, "traffic log", "trajectory log")
    return read_traffic(file) if kind == "traffic log" else read_trajectories(file)


def read_trajectories(file: Path) -> Log:
    """A trajectory file. Spend follows from the remaining budget, conversions from the rewards."""
    columns = read_columns(file, TRAJECTORIES, missing=False)
    order = sort_whole_days(file, columns, numbered=True)
    days = {}  # (K, T, ...) each
    for name, column in columns.items():
        days[name] = column[order].reshape(-1, STEPS, *column.shape[1:])
    states = days["state"]
    remaining = days["budget"][:, :1] * states[:, :, STATE.index("budget left")]
    fixed = read_constants(file, days, COLUMN_BY_FIELD | {"spend": "realAllCost"})
    refuse_rises(file, days, remaining)
    return Log(
        **fixed,
        states=states,
        multiplier=days["action"],
        conversions=days["reward"],
        exposed_value=days["reward_continuous"],
        remaining=remaining,
        done=days["done"] > 0,
        repairs={},
    )


def trajectory_columns(log: Log) -> dict[str, Sequence[object]]:
    """The columns of a trajectory log, numbers as in plain text: {name: list of K x 48}."""
    states = [str(tuple(row)) for row in log.states.reshape(-1, len(STATE)).tolist()]
    done = log.done.ravel()
    after = np.array([*states[1:], None], object)
    after[done] = None

    def spread(x: np.ndarray) -> list[float]:
        """Broadcast (K, 1), (T,) or (K, T) to a list of K x T numbers."""
        return np.broadcast_to(x, log.done.shape).astype(float).ravel().tolist()

    columns: dict[str, Sequence[object]] = {}
    for field, name in COLUMN_BY_FIELD.items():
        columns[name] = spread(vars(log)[field][:, None])
    return columns | {
        "realAllCost": spread(log.spend[:, None]),
        "realAllConversion": spread(log.conversions.sum(1)[:, None]),
        "timeStepIndex": spread(np.arange(STEPS)),
        "state": states,
        "action": spread(log.multiplier),
        "reward": spread(log.conversions),
        "reward_continuous": spread(log.exposed_value),
        "done": done.astype(int).tolist(),
        "next_state": after.tolist(),
    }


def write(path: str | Path, log: Log) -> None:
    """Write a trajectory log, all or nothing: .csv, .csv.gz or .parquet, by the path's name."""
    import pyarrow as pa
    from pyarrow import parquet

    path = new_path(path)
    if not path.name.endswith(FILE_SUFFIXES):
        raise ValueError(f"{path}: expected a path that ends with {', '.join(FILE_SUFFIXES)}")
    columns = trajectory_columns(log)
    with atomic(path) as partial:
        if path.name.endswith(".parquet"):
            parquet.write_table(pa.table(columns), partial)
            return
        with open_text(partial, "wt", "utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(columns)
            rows.writerows(zip(*columns.values(), strict=True))
