"""A log of many agents in one world: its two tables, in memory and on disk as Parquet.

`steps` has a row for each (group, step, team): the world's clock, the team's reward, the end.
`agents` has a row for each (group, step, agent) that is present: no row, not present. There are two
tables because a team has rewards after an agent has left.

meta describes the log, see `log_meta`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from decisionllm.schema import Json, raise_for_first
from decisionllm.teams.formats.log_meta import check_meta, merge_meta

# The columns of each table, with the dtype of their numbers
TABLES = {
    "steps": {
        "group": "int64",
        "step": "int32",
        "team": "int8",
        "reward": "float32",
        "terminated": "bool",
        "truncated": "bool",
        "won": "bool",
        "state": "float32",
    },
    "agents": {
        "group": "int64",
        "step": "int32",
        "agent": "int16",
        "agent_type": "int8",
        "team": "int8",
        "loss_mask": "bool",
        "observation": "float32",
        "action": "int32",
        "action_values": "float32",
        "available": "bool",
        "reward": "float32",
        "terminated": "bool",
        "behaviour": "int8",
    },
}

REQUIRED = {
    "steps": ("group", "step", "terminated", "truncated"),
    "agents": ("group", "step", "agent", "observation"),
}

# Columns of names in a file, and in a Log of indices into this entry of meta
NAMES = {"agent_type": "types", "behaviour": "behaviours"}

ZERO = ("team", "agent_type")  # columns that are 0 where a log lacks them

MISSING = {"action": -1, "reward": np.nan, "won": False}  # in place of null


@dataclass(frozen=True)
class Log:
    """Columns of the two tables, rows in any order, raw units; only the REQUIRED ones must be
    there.

    Attributes:
        meta: see `log_meta`.
        steps: (s,) each; state (s, O).
        agents: (n,) each; observation (n, O), or the rows end to end and `observation_offsets`
            (n+1,). agent_type, behaviour: indices into meta["types"] and meta["behaviours"];
            without the column 0, as team. action: -1 where it was not recorded. action_values: (n,
            A), nan in every number there. available: (n, C) bool. loss_mask: False where the action
            is no training target; without the column True where one was recorded.
        path: where it was read from.
    """

    meta: Json
    steps: dict[str, np.ndarray]
    agents: dict[str, np.ndarray]
    path: str = "log"

    def __post_init__(self) -> None:
        check_meta(self.path, self.meta)
        for table, columns in self.tables.items():
            _check_names(f"{self.path}, {table}", table, columns)
            if not len(columns["group"]):
                raise ValueError(f"{self.path}, {table}: expected at least one row, got none")
            for name in columns:
                self._check_column(table, name)

    def _check_column(self, table: str, name: str) -> None:
        """Raise a ValueError if a column has another length than its table, or another type."""
        where = f"{self.path}, {table}, {name}"
        columns = self.tables[table]
        column = columns[name]
        rows = len(columns["group"])
        if name.endswith("_offsets"):
            rows += 1
        has_offsets = f"{name}_offsets" in columns  # they say where each row begins
        if not has_offsets and len(column) != rows:
            raise ValueError(f"{where}: expected {rows} rows, got {len(column)}")
        dtype = TABLES[table].get(name, "")
        if dtype == "bool" and column.dtype != bool:
            raise ValueError(f"{where}: expected true and false, got {column.dtype}")
        most = None
        if NAMES.get(name) in self.meta:
            most = len(self.meta[NAMES[name]]) - 1
        _check_whole(where, dtype, column, most)

    @property
    def tables(self) -> dict[str, dict[str, np.ndarray]]:
        return {"steps": self.steps, "agents": self.agents}

    def sort_rows(self, table: str, *names: str) -> "TableRows":
        """Sort the rows of a table by the first of these columns, then by the next one."""
        rows = TableRows(self, table, np.arange(len(self.tables[table]["group"])))
        return rows.take(np.lexsort([rows[name] for name in reversed(names)]))


@dataclass(frozen=True)
class TableRows:
    """Rows of a table of a log, in any order.

    Attributes:
        log: that has the table.
        table: `steps` or `agents`.
        numbers: (n,) of the rows in the table.
    """

    log: Log
    table: str
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, name: str) -> bool:
        return name in self.log.tables[self.table]

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of these rows, (n, ...)."""
        if name not in self and name in ZERO:
            return np.zeros(len(self), np.int8)
        return np.asarray(self.log.tables[self.table][name][self.numbers])

    def take(self, which: np.ndarray) -> "TableRows":
        """Return some of these rows, by their indices among them or by (n,) bool."""
        return TableRows(self.log, self.table, self.numbers[which])

    def refuse(self, wrong: np.ndarray, message: str, *values: np.ndarray) -> None:
        """Raise a ValueError if one of these rows is wrong; it names the first one and its key.

        Args:
            wrong: (n,) bool.
            message: with `{}` for each of the values.
            values: (n, ...) each.
        """
        if not wrong.any():
            return
        first = np.argmax(wrong)
        names = ("group", "step", "agent" if self.table == "agents" else "team")
        key = ", ".join(f"{name} {self[name][first]}" for name in names if name in self)
        where = f"{self.log.path}, {self.table}, row {self.numbers[first] + 1} ({key})"
        raise_for_first(f"{where}: ", wrong, message, *values)


def _check_names(table_name: str, table: str, columns: Iterable[str]) -> None:
    """Raise a ValueError if a table lacks a column or has an unknown one."""
    columns_of_table = TABLES[table]
    missing = [name for name in REQUIRED[table] if name not in columns]
    unknown = sorted(
        name for name in columns if name.removesuffix("_offsets") not in columns_of_table
    )
    if missing or unknown:
        raise ValueError(
            f"{table_name}: expected columns {', '.join(columns_of_table)}; lacking "
            f"{', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}"
        )


def _check_whole(column_name: str, dtype: str, column: np.ndarray, most: int | None) -> None:
    """Raise a ValueError if a column of whole numbers holds others, or some beyond its type.

    Args:
        column_name: to begin a message with.
        dtype: of the column in a file.
        column: (n,).
        most: of an index into names of meta, which begins at 0; None: the column is no index.
    """
    if not dtype.startswith("int"):
        return
    if column.dtype == dtype and most is None:
        return
    limits = np.iinfo(dtype)
    low, high = limits.min, limits.max
    if most is not None:
        low, high = 0, min(most, limits.max)
    wrong = (column != np.rint(column)) | (column < low) | (column > high)
    raise_for_first(
        f"{column_name}, row ",
        wrong,
        f"{{}}: expected a whole number within {low} .. {high}, got {{}}",
        np.arange(1, len(column) + 1),
        column,
    )


def concat_logs(logs: Sequence[Log]) -> Log:
    """Join the parts of a log."""
    meta = reduce(merge_meta, [log.meta for log in logs])
    steps = concat_tables([log.steps for log in logs])
    agents = concat_tables([log.agents for log in logs])
    return Log(meta, steps, agents, logs[0].path)


def concat_tables(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join the columns of several parts of a table."""
    joined_columns = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        if name.endswith("_offsets"):
            sizes = np.concatenate([np.diff(column) for column in columns])
            joined_columns[name] = np.append(0, np.cumsum(sizes))
        else:
            joined_columns[name] = np.concatenate(columns)
    return joined_columns
