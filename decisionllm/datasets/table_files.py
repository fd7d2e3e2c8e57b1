"""Tables in Parquet and Arrow files, as Hugging Face `datasets` and LeRobot write them: their columns,
and their rows in blocks.

Source: https://huggingface.co/docs/datasets/about_arrow.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.checks import unknown_name_message
from decisionllm.datasets.row_blocks import Columns
from decisionllm.files import AGAIN, explain_errors
from decisionllm.schema import raise_for_first

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1 << 14  # that are read at a time
ROW = "row of the file"  # stands for a column: the number of the row that a step comes from
INSTALL = "Parquet and Arrow files need pyarrow: pip install -e '.[parquet]'"


def require_pyarrow() -> None:
    """Raise an ImportError that says how to install pyarrow where it is missing."""
    with explain_errors(INSTALL, ImportError, raised=ImportError):
        import pyarrow  # noqa: F401


def read_types(file: Path) -> dict[str, "pa.DataType"]:
    """Return the Arrow type of each column of a file."""
    from pyarrow import parquet

    read_schema = _read_arrow_schema if file.suffix == ".arrow" else parquet.read_schema
    with explain_damage(file):
        schema = read_schema(file)
    return {field.name: _storage_type(field.type) for field in schema}


def read_blocks(files: Sequence[Path], names: Sequence[str]) -> Iterator[Columns]:
    """Yield blocks of rows of columns, file by file.

    A column is (n,) or, where it holds lists, (n, width) with nested lists laid out end to end; a
    number that is missing is NaN. If `ROW` is among the names, a row of the files has lists of
    steps, which become rows, beside values that hold for all of them.

    Raises:
        ValueError: a file is damaged or lacks a column, or its lists differ in length.
    """
    has_lists_of_steps = ROW in names
    names = [name for name in dict.fromkeys(names) if name != ROW]
    first_row = 0
    for file in files:
        types = read_types(file)
        for name in names:
            if name not in types:
                raise ValueError(f"{file}: {unknown_name_message('column', name, types)}")
        with explain_damage(file):
            for batch in _read_batches(file, names):
                if has_lists_of_steps:
                    yield _lay_out_steps(file, batch, names, first_row)
                elif batch.num_rows:
                    yield {name: _to_numpy(file, name, batch.column(name)) for name in names}
                first_row += batch.num_rows


def _read_batches(file: Path, names: list[str]) -> Iterator["pa.RecordBatch"]:
    """Yield the rows of a file in blocks, with these columns or more."""
    if file.suffix == ".arrow":
        yield from _read_arrow(file).to_batches(max_chunksize=ROWS)
        return
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        yield from table.iter_batches(batch_size=ROWS, columns=names, use_threads=False)


def _read_arrow(file: Path) -> "pa.Table":
    """Map an Arrow file into memory: a stream, as `datasets` writes it, or one for random access."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def _read_arrow_schema(file: Path) -> "pa.Schema":
    return _read_arrow(file).schema


def explain_damage(file: Path) -> AbstractContextManager[None]:
    """Name the file in an error of reading it."""
    import pyarrow as pa

    what = f"{file}: not a readable Parquet or Arrow file, perhaps truncated"
    return explain_errors(what, pa.ArrowException, OSError, fix=AGAIN)


def _storage_type(kind: "pa.DataType") -> "pa.DataType":
    """Return the type that is stored, of an extension such as Array2D of `datasets`."""
    return getattr(kind, "storage_type", kind)


def is_text(kind: "pa.DataType") -> bool:
    """Return whether a column of this type holds texts."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: "pa.DataType") -> bool:
    """Return whether a column of this type holds lists."""
    import pyarrow as pa

    is_any_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_any_list or pa.types.is_fixed_size_list(kind))


def is_number(kind: "pa.DataType") -> bool:
    """Return whether a column of this type holds numbers or flags, or lists of them."""
    import pyarrow as pa

    while is_list(kind):
        kind = kind.value_type
    is_any_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
    return bool(is_any_number or pa.types.is_boolean(kind))


def _to_numpy(file: Path, name: str, column: "pa.Array") -> np.ndarray:
    """Return a block of a column as an array, see `read_blocks`."""
    import pyarrow.compute as pc

    column = getattr(column, "storage", column)
    n = len(column)
    if not is_list(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    while is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            other = lengths[lengths != lengths[0]][0]
            raise ValueError(
                f"{file}: expected lists of one length in {name}, got {lengths[0]} and {other} "
                "numbers; pad them, or choose another column"
            )
        column = column.flatten()
    return np.asarray(column.to_numpy(zero_copy_only=False).reshape(n, -1))


def _lay_out_steps(
    file: Path, batch: "pa.RecordBatch", names: Sequence[str], first_row: int
) -> Columns:
    """Return a block of rows whose lists have one entry for each step, see `read_blocks`."""
    import pyarrow.compute as pc

    columns: Columns = {}
    lengths = np.zeros(0, int)  # steps of each row
    for name in names:
        column = getattr(batch.column(name), "storage", batch.column(name))
        if not is_list(column.type):
            continue
        steps = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        if not columns:
            lengths = steps
        rows = first_row + np.arange(len(steps))
        message = (
            f"expected as many steps in {name} as in other columns, got {{}} and {{}} in row {{}}"
        )
        raise_for_first(f"{file}: ", steps != lengths, message, steps, lengths, rows)
        columns[name] = _to_numpy(file, name, column.flatten())
    if not columns:
        raise ValueError(f"{file}: expected columns with a list of steps in each row, got none")
    for name in names:
        if name not in columns:
            columns[name] = np.repeat(_to_numpy(file, name, batch.column(name)), lengths)
    columns[ROW] = np.repeat(first_row + np.arange(len(lengths)), lengths)
    return columns
