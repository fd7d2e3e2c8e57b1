"""A log of many agents on disk: meta.json, steps.parquet and agents.parquet."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.datasets.rounding import Rounding
from decisionllm.files import atomic, explain_errors, new_path
from decisionllm.schema import Json
from decisionllm.teams.formats.log_meta import check_meta, merge_meta
from decisionllm.teams.formats.team_log import MISSING, NAMES, REQUIRED, TABLES, Log

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
ROWS = 200_000  # in a row group
LISTS = ("state", "observation", "action_values", "available")  # a list of numbers in each row


def write(folder: str | Path, logs: Log | Iterable[Log]) -> None:
    """Write a log as meta.json, steps.parquet and agents.parquet, all or nothing.

    Args:
        folder: must not exist.
        logs: a Log, or its parts one after the other, with the same columns, each group in one
            part. Each part is sorted by group, step and agent and written as it comes, in zstd; see
            `merge_meta`.

    Raises:
        FileExistsError: the folder exists.
    """
    import pyarrow as pa  # pip install -e '.[marl]'
    from pyarrow import parquet

    with atomic(new_path(folder)) as partial, ExitStack() as stack:
        partial.mkdir()
        writers: dict[str, parquet.ParquetWriter] = {}
        meta: Json = {}
        for log in [logs] if isinstance(logs, Log) else logs:
            meta = merge_meta(meta, log.meta)
            for table, columns in log.tables.items():
                keys = ["group", "step", "team"]
                if table == "agents":
                    keys.append("agent")
                order = log.sort_rows(table, *keys).numbers
                names = [name for name in columns if not name.endswith("_offsets")]
                arrow_table = pa.table({name: _to_arrow(log, table, name, order) for name in names})
                if table not in writers:
                    file = partial / f"{table}.parquet"
                    writer = parquet.ParquetWriter(file, arrow_table.schema, compression="zstd")
                    writers[table] = stack.enter_context(writer)
                writers[table].write_table(arrow_table, row_group_size=ROWS)
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
    with explain_errors(
        f"{folder}/meta.json: expected JSON that describes a log", OSError, ValueError
    ):
        meta: Json = json.loads((folder / "meta.json").read_text(encoding="utf-8-sig"))
    if not isinstance(meta, dict):
        raise ValueError(f"{folder}/meta.json: expected {{KEY: VALUE}}, got {meta!r}")
    if meta.get("format") != FORMAT:
        raise ValueError(f"{folder}/meta.json: expected format {FORMAT}, got {meta.get('format')}")
    check_meta(str(folder), meta)
    return meta


def read(folder: str | Path) -> Log:
    """Read a log that `write` wrote, or another program in the same format.

    Rows may be in any order; further columns are ignored.
    """
    folder = Path(folder).expanduser()
    meta = read_meta(folder)
    steps, _ = _read_table(folder / "steps.parquet", "steps", meta)
    agents, faults = _read_table(folder / "agents.parquet", "agents", meta)
    if faults:
        meta["faults"] = [*meta.get("faults", []), *faults]
    return Log(meta, steps, agents, str(folder))


def _read_table(file: Path, table: str, meta: Json) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the columns of a table, and the faults of its observations."""
    import pyarrow as pa
    from pyarrow import parquet

    message = f"{file}: not a readable Parquet file, perhaps cut"
    with explain_errors(message, pa.ArrowException, OSError, fix="write or fetch it again"):
        names = [name for name in parquet.read_schema(file).names if name in TABLES[table]]
        columns = parquet.read_table(file, columns=names)
    table_columns: dict[str, np.ndarray] = {}
    faults: list[str] = []
    for name in names:
        kind = pa.from_numpy_dtype(np.dtype(TABLES[table][name]))
        column = columns[name].combine_chunks()
        if name in LISTS:
            message = f"{file}, {name}: expected lists of {kind}, got {column.type}"
            # pyarrow casts views to lists with wrong offsets
            is_view = pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type)
            if is_view or name in REQUIRED[table] and pa.types.is_null(column.type):
                raise ValueError(message)
            with explain_errors(message, pa.ArrowException):
                table_columns |= _read_lists(name, column.cast(pa.large_list(kind)))
            if name == "observation" and column.type.value_type == pa.float64():
                faults += _find_rounding_faults(column)
        else:
            names_in_meta = list(meta[NAMES[name]]) if NAMES.get(name) in meta else []
            table_columns[name] = _read_numbers(file, name, column, kind, names_in_meta)
    return table_columns, faults


def _read_numbers(
    file: Path, name: str, column: "pa.Array", kind: "pa.DataType", names_in_meta: list[str]
) -> np.ndarray:
    """A column of Arrow as numbers of an Arrow type; names become indices into `names_in_meta`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    expected = "names" if name in NAMES else kind
    with explain_errors(
        f"{file}, {name}: expected {expected}, got {column.type}", pa.ArrowException
    ):
        if name in NAMES:
            column = pc.index_in(column.cast(pa.string()), pa.array(names_in_meta, pa.string()))
        column = column.cast(kind)
    if name in MISSING:
        column = pc.fill_null(column, pa.scalar(MISSING[name], kind))
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))) + 1
        expected = f"a number of {kind}, got none"
        if name in NAMES:
            expected = f"one of {', '.join(names_in_meta)}, as meta.json says"
        raise ValueError(f"{file}, row {row}, {name}: expected {expected}")
    numbers: np.ndarray = column.to_numpy(zero_copy_only=False)
    return numbers


def _find_rounding_faults(column: "pa.Array") -> list[str]:
    """Find what lists of float64 lose as float32; lists of each length are a layout."""
    import pyarrow.compute as pc

    widths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    begins = np.cumsum(widths) - widths
    faults = []
    for width in np.unique(widths):
        rounding = Rounding()
        starts = begins[widths == width]
        for block in np.array_split(starts, len(starts) // ROWS + 1):
            rounding.add(flat[block[:, None] + np.arange(width)])
        faults += rounding.faults()
    return faults


def _read_lists(name: str, column: "pa.Array") -> dict[str, np.ndarray]:
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
