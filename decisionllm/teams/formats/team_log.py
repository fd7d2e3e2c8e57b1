"""A log of many agents in one world: its two tables, in memory and on disk as Parquet.

`steps` has a row for each (group, step, team): the world's clock, the team's reward, the end.
`agents` has a row for each (group, step, agent) that is present: no row, not present. There are two
tables because a team has rewards after an agent has left.

meta describes the log; `types` and `horizon` must be there:

- `name`; `task` and `reward_rule`, sentences; `world`: {id, version, arguments}
- `horizon`: most steps of a world
- `types`: {name: {role, num_actions or low and high, observations: {length: blocks},
  observation_parts: [[name, numbers], ...]}}
- `teams`: {type: team}
- `returns`: see `team.source`
- `shared_reward`: whether the reward of each agent is its team's
- `plane`: whether an observation is pairs of numbers throughout, each a vector in a plane (for
  `augment=symmetries`)
- further facts that a result must report

Blocks [[kind, width, count], ...] of an observation follow each other. Kind `own` is the agent
itself, "" is left out, any other kind is `count` entities of `width` numbers; an entity of zeros is
absent. A type without blocks has one `own` block.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.checks import is_numbers
from decisionllm.datasets.rounding import Rounding
from decisionllm.files import absent, atomic, explained
from decisionllm.schema import Json, refuse

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
ROWS = 200_000  # in a row group
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
LISTS = ("state", "observation", "action_values", "available")  # a list of numbers in each row
# Columns of names in a file, and in a Log of indices into this entry of meta
NAMES = {"agent_type": "types", "behaviour": "behaviours"}
ZERO = ("team", "agent_type")  # columns that are 0 where a log lacks them
BLOCKS = "{length: [[kind, width, count], ...]} of whole numbers"  # of observations, in messages
MISSING = {"action": -1, "reward": np.nan, "won": False}  # in place of null


@dataclass(frozen=True)
class Log:
    """Columns of the two tables, rows in any order, raw units; only the REQUIRED ones must be
    there.

    Attributes:
        meta: see above.
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
        _check_meta(self.path, self.meta)
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

    def sorted(self, table: str, *names: str) -> "TableRows":
        """The rows of a table, sorted by the first of these columns, then by the next one."""
        every = TableRows(self, table, np.arange(len(self.tables[table]["group"])))
        return every.chosen(np.lexsort([every[name] for name in reversed(names)]))


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

    def chosen(self, which: np.ndarray) -> "TableRows":
        """Some of these rows, by their places among them or by (n,) bool."""
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
        refuse(f"{where}: ", wrong, message, *values)


def _check_meta(where: str, meta: Json) -> None:
    """Raise a ValueError if the meta of a log lacks a key, or has a value of another type.

    where: the log, to begin a message with.
    """
    if not meta.get("types") or "horizon" not in meta:
        found = ", ".join(meta) or "nothing"
        raise ValueError(f"{where}: expected meta to have types and horizon, got {found}")
    _check_count(f"{where}, meta, horizon", meta["horizon"])
    for key in ("name", "task", "reward_rule"):
        _check_sentence(f"{where}, meta, {key}", meta.get(key, ""))
    types = meta["types"]
    if not isinstance(types, dict):
        raise ValueError(f"{where}, meta, types: expected {{NAME: DESCRIPTION}}, got {types!r}")
    for name, agent_type in types.items():
        _check_agent_type(f"{where}, meta, type {name}", agent_type)


def _check_agent_type(where: str, agent_type: object) -> None:
    """Raise a ValueError if the description of a type of agents cannot be."""
    if not isinstance(agent_type, dict):
        raise ValueError(f"{where}: expected {{KEY: VALUE}}, got {agent_type!r}")
    if "num_actions" in agent_type:
        _check_count(f"{where}, num_actions", agent_type["num_actions"])
    bounds = [agent_type[key] for key in ("low", "high") if key in agent_type]
    for bound in bounds:
        if not is_numbers(bound) or len(bound) != len(bounds[0]):
            wanted = "[NUMBER, ...] each, of one length"
            got = " and ".join(map(repr, bounds))
            raise ValueError(f"{where}, low, high: expected {wanted}, got {got}")
    observations = agent_type.get("observations") or {}
    if not isinstance(observations, dict):
        raise ValueError(f"{where}, observations: expected {BLOCKS}, got {observations!r}")
    for length, blocks in observations.items():
        if not _are_blocks(length, blocks):
            entry = {length: blocks}
            raise ValueError(f"{where}, observations: expected {BLOCKS}, got {entry!r}")
    _check_sentence(f"{where}, role", agent_type.get("role", ""))


def _are_blocks(length: object, blocks: object) -> bool:
    """Whether an entry of `observations` has the form of BLOCKS."""
    if not str(length).isdigit() or not isinstance(blocks, list | tuple):
        return False
    for block in blocks:
        if not isinstance(block, list | tuple) or len(block) != 3:
            return False
        kind, width, count = block
        if not isinstance(kind, str) or not isinstance(width, int) or not isinstance(count, int):
            return False
        if width < 1 or count < 0:
            return False
    return True


def _check_sentence(where: str, value: object) -> None:
    """Raise a ValueError unless a value of meta is text."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text, got {value!r}")


def _check_count(where: str, value: object) -> None:
    """Raise a ValueError unless a value of meta is a whole number above 0."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: expected a whole number above 0, got {value!r}")


def _check_names(what: str, table: str, columns: Iterable[str]) -> None:
    """Raise a ValueError if a table lacks a column or has an unknown one."""
    known = TABLES[table]
    lacking = [name for name in REQUIRED[table] if name not in columns]
    unknown = sorted(name for name in columns if name.removesuffix("_offsets") not in known)
    if lacking or unknown:
        wrong = f"lacking {', '.join(lacking) or 'none'}, unknown {', '.join(unknown) or 'none'}"
        raise ValueError(f"{what}: expected columns {', '.join(known)}; {wrong}")


def _check_whole(what: str, dtype: str, column: np.ndarray, most: int | None) -> None:
    """Raise a ValueError if a column of whole numbers holds others, or some beyond its type.

    Args:
        what: the column, to begin a message with.
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
    refuse(
        f"{what}, row ",
        wrong,
        f"{{}}: expected a whole number within {low} .. {high}, got {{}}",
        np.arange(1, len(column) + 1),
        column,
    )


# Limits of the actions of a type, and which of several is the widest
LIMITS = {"num_actions": np.max, "low": np.min, "high": np.max}


def common_meta(known: Json, more: Json) -> Json:
    """The meta of some parts of a log and a further one: the longest horizon, the widest limits.

    Args:
        known: meta of the parts so far; {}: none.
        more: meta of the further one.
    """
    if not known:
        return more
    types = {name: dict(each) for name, each in known["types"].items()}
    for name, each in types.items():
        for key in LIMITS.keys() & each:
            each[key] = LIMITS[key]([each[key], more["types"][name][key]], 0).tolist()
    shared = known.get("shared_reward", False) and more.get("shared_reward", False)
    horizon = max(known["horizon"], more["horizon"])
    return more | {"types": types, "horizon": horizon, "shared_reward": shared}


def joined(logs: Sequence[Log]) -> Log:
    """Parts of a log as one log."""
    meta = reduce(common_meta, [log.meta for log in logs])
    steps = stacked([log.steps for log in logs])
    agents = stacked([log.agents for log in logs])
    return Log(meta, steps, agents, logs[0].path)


def stacked(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The columns of several parts of a table as one."""
    found = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        if name.endswith("_offsets"):
            sizes = np.concatenate([np.diff(column) for column in columns])
            found[name] = np.append(0, np.cumsum(sizes))
        else:
            found[name] = np.concatenate(columns)
    return found


def write(folder: str | Path, logs: Log | Iterable[Log]) -> None:
    """Write a log as meta.json, steps.parquet and agents.parquet, all or nothing.

    Args:
        folder: must not exist.
        logs: a Log, or its parts one after the other, with the same columns, each group in one
            part. Each part is sorted by group, step and agent and written as it comes, in zstd; see
            `common_meta`.

    Raises:
        FileExistsError: the folder exists.
    """
    import pyarrow as pa  # pip install decisionllm[marl]
    from pyarrow import parquet

    with atomic(absent(folder)) as partial, ExitStack() as stack:
        partial.mkdir()
        writers: dict[str, parquet.ParquetWriter] = {}
        meta: Json = {}
        for log in [logs] if isinstance(logs, Log) else logs:
            meta = common_meta(meta, log.meta)
            for table, columns in log.tables.items():
                keys = ["group", "step", "team"]
                if table == "agents":
                    keys.append("agent")
                order = log.sorted(table, *keys).numbers
                names = [name for name in columns if not name.endswith("_offsets")]
                made = pa.table({name: _to_arrow(log, table, name, order) for name in names})
                if table not in writers:
                    file = partial / f"{table}.parquet"
                    writer = parquet.ParquetWriter(file, made.schema, compression="zstd")
                    writers[table] = stack.enter_context(writer)
                writers[table].write_table(made, row_group_size=ROWS)
        if not meta:
            raise ValueError(f"{folder}: expected a log to write, got none")
        text = json.dumps({"format": FORMAT} | meta, indent=1, ensure_ascii=False)
        (partial / "meta.json").write_text(text, encoding="utf-8")


def _to_arrow(log: Log, table: str, name: str, order: np.ndarray) -> "pa.Array":
    """A column in this order as Arrow's, with nulls where an action or a reward is missing."""
    import pyarrow as pa

    columns = log.tables[table]
    column = columns[name].astype(TABLES[table][name])
    if f"{name}_offsets" in columns:
        lists = pa.LargeListArray.from_arrays(columns[f"{name}_offsets"], column)
        return lists.take(pa.array(order))
    column = column[order]
    if column.ndim == 2:
        n, width = column.shape
        return pa.LargeListArray.from_arrays(np.arange(n + 1) * width, column.reshape(-1))
    if name in NAMES:
        return pa.DictionaryArray.from_arrays(column, list(log.meta[NAMES[name]]))
    missing = None
    if name == "action":
        missing = column == MISSING[name]
    elif name == "reward":
        missing = np.isnan(column)
    return pa.array(column, mask=missing)


def read_meta(folder: Path) -> Json:
    """meta.json of a log that `write` wrote."""
    with explained(f"{folder}/meta.json: expected JSON that describes a log", OSError, ValueError):
        meta: Json = json.loads((folder / "meta.json").read_text(encoding="utf-8-sig"))
    if not isinstance(meta, dict):
        raise ValueError(f"{folder}/meta.json: expected {{KEY: VALUE}}, got {meta!r}")
    if meta.get("format") != FORMAT:
        raise ValueError(f"{folder}/meta.json: expected format {FORMAT}, got {meta.get('format')}")
    _check_meta(str(folder), meta)
    return meta


def read(folder: str | Path) -> Log:
    """Read a log that `write` wrote, or another program in the same format.

    Rows may be in any order; further columns are ignored.
    """
    folder = Path(folder).expanduser()
    meta = read_meta(folder)
    steps, _ = _read(folder / "steps.parquet", "steps", meta)
    agents, faults = _read(folder / "agents.parquet", "agents", meta)
    if faults:
        meta["faults"] = [*meta.get("faults", []), *faults]
    return Log(meta, steps, agents, str(folder))


def _read(file: Path, table: str, meta: Json) -> tuple[dict[str, np.ndarray], list[str]]:
    """The columns of a table, and the faults of its observations."""
    import pyarrow as pa
    from pyarrow import parquet

    remedy = "write or fetch it again"
    what = f"{file}: not a readable Parquet file, perhaps cut"
    with explained(what, pa.ArrowException, OSError, remedy=remedy):
        names = [name for name in parquet.read_schema(file).names if name in TABLES[table]]
        columns = parquet.read_table(file, columns=names)
    found: dict[str, np.ndarray] = {}
    faults: list[str] = []
    for name in names:
        kind = pa.from_numpy_dtype(np.dtype(TABLES[table][name]))
        column = columns[name].combine_chunks()
        if name in LISTS:
            what = f"{file}, {name}: expected lists of {kind}, got {column.type}"
            # pyarrow casts views to lists with wrong offsets
            is_view = pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type)
            if is_view or name in REQUIRED[table] and pa.types.is_null(column.type):
                raise ValueError(what)
            with explained(what, pa.ArrowException):
                found |= _lists(name, column.cast(pa.large_list(kind)))
            if name == "observation" and column.type.value_type == pa.float64():
                faults += _rounding_faults(column)
        else:
            words = list(meta[NAMES[name]]) if NAMES.get(name) in meta else []
            found[name] = _numbers(file, name, column, kind, words)
    return found, faults


def _numbers(
    file: Path, name: str, column: "pa.Array", kind: "pa.DataType", words: list[str]
) -> np.ndarray:
    """A column of Arrow as numbers of an Arrow type; names become indices into `words`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = "names" if name in NAMES else kind
    what = f"{file}, {name}: expected {wanted}, got {column.type}"
    with explained(what, pa.ArrowException):
        if name in NAMES:
            column = pc.index_in(column.cast(pa.string()), pa.array(words, pa.string()))
        column = column.cast(kind)
    if name in MISSING:
        column = pc.fill_null(column, pa.scalar(MISSING[name], kind))
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))) + 1
        wanted = f"a number of {kind}, got none"
        if name in NAMES:
            wanted = f"one of {', '.join(words)}, as meta.json says"
        raise ValueError(f"{file}, row {row}, {name}: expected {wanted}")
    numbers: np.ndarray = column.to_numpy(zero_copy_only=False)
    return numbers


def _rounding_faults(column: "pa.Array") -> list[str]:
    """The faults of Arrow's lists of float64 as float32; lists of each length are a layout."""
    import pyarrow.compute as pc

    widths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    begins = np.cumsum(widths) - widths
    faults = []
    for width in np.unique(widths):
        rounding = Rounding()
        same = begins[widths == width]
        for block in np.array_split(same, len(same) // ROWS + 1):
            rounding.add(flat[block[:, None] + np.arange(width)])
        faults += rounding.faults()
    return faults


def _lists(name: str, column: "pa.Array") -> dict[str, np.ndarray]:
    """Arrow's lists as (n, width), padded if lengths differ, or end to end with their offsets."""
    import pyarrow.compute as pc

    widths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if len(widths) and (widths == widths[0]).all():
        return {name: flat.reshape(len(widths), -1)}
    if name not in ("available", "action_values"):
        return {name: flat, f"{name}_offsets": np.concatenate([[0], np.cumsum(widths)])}
    # Types with fewer actions have shorter lists, actions that were not recorded have none
    blank = False if flat.dtype == bool else np.nan
    widest = widths.max(initial=0)
    padded = np.full((len(widths), widest), blank, flat.dtype)
    padded[np.arange(widest) < widths[:, None]] = flat
    return {name: padded}
