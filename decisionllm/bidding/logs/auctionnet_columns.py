"""Columns of AuctionNet's files: CSV, gzipped or Parquet, read block by block and checked.

The header decides which kind of file it is; columns are found by their names. Rows are counted from
1, below the header. Source: AuctionNet (arXiv 2412.10798), its data description.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from decisionllm.bidding.market.campaigns import STATE, STEPS
from decisionllm.files import explain_errors
from decisionllm.schema import Json, raise_for_first

if TYPE_CHECKING:
    import pyarrow as pa

CAMPAIGN_KEY = ("deliveryPeriodIndex", "advertiserNumber")
# the same in all rows of an advertiser's day
FIXED_COLUMNS = ("advertiserCategoryIndex", "budget", "CPAConstraint")
COLUMN_BY_FIELD = {  # {field of Log: column}
    "period": "deliveryPeriodIndex",
    "advertiser": "advertiserNumber",
    "category": "advertiserCategoryIndex",
    "budget": "budget",
    "target_cpa": "CPAConstraint",
}
FILE_SUFFIXES = (".csv", ".csv.gz", ".parquet")
# bytes of text read at once, about 100,000 rows; as many rows of Parquet as that would be
BLOCK = 1 << 24
# the words of a message, and the numbers that they allow
Check = tuple[str, Callable[[np.ndarray], np.ndarray]]
# a remaining budget may be a rounding error below 0
NUMBER: Check = ("a number from 0", lambda x: x >= -1e-9)
ABOVE_0: Check = ("a number above 0", lambda x: x > 0)
# float64 holds no other whole numbers: two longer ids would be one
COUNT: Check = (
    "a whole number from 0 to 2^53",
    lambda x: (x >= 0) & (x < 2**53) & (x == np.rint(x)),
)
STEP: Check = (
    f"a step from 0 to {STEPS - 1}",
    lambda x: (x >= 0) & (x < STEPS) & (x == np.rint(x)),
)
FLAG: Check = ("0 or 1", lambda x: (x == 0) | (x == 1))
Schema = dict[str, Check | str | None]  # "state"; None: the column is not read
CAMPAIGN_COLUMNS: Schema = {
    "deliveryPeriodIndex": COUNT,
    "advertiserNumber": COUNT,
    "advertiserCategoryIndex": COUNT,
    "budget": ABOVE_0,
    "CPAConstraint": ABOVE_0,
}
TRAFFIC: Schema = {
    **CAMPAIGN_COLUMNS,
    "timeStepIndex": STEP,
    "remainingBudget": NUMBER,
    "pvIndex": COUNT,
    "pValue": NUMBER,
    "pValueSigma": None,
    "bid": NUMBER,
    "xi": FLAG,
    "adSlot": None,
    "cost": NUMBER,
    "isExposed": FLAG,
    "conversionAction": FLAG,
    "leastWinningCost": NUMBER,
    "isEnd": FLAG,
}
TRAJECTORIES: Schema = {
    **CAMPAIGN_COLUMNS,
    "realAllCost": NUMBER,
    "realAllConversion": NUMBER,
    "timeStepIndex": STEP,
    "state": "state",
    "action": NUMBER,
    "reward": NUMBER,
    "reward_continuous": NUMBER,
    "done": FLAG,
    "next_state": None,
}
PRICES: Schema = {"timeStepIndex": STEP, "leastWinningCost": ABOVE_0}
SCHEMAS = {
    "traffic log": TRAFFIC,
    "trajectory log": TRAJECTORIES,
    "file of market prices": PRICES,
}
Columns = dict[str, np.ndarray]


def detect_kind(file: Path, *kinds: str) -> str:
    """Which of these kinds of SCHEMAS a file is: the one that has most of its columns.

    Raises:
        ValueError: the file lacks a column of that kind.
    """
    names = read_header(file)
    kind = max(kinds, key=lambda kind: len(SCHEMAS[kind].keys() & names))
    schema = SCHEMAS[kind]
    missing = [name for name in schema if name not in names]
    if missing:
        unknown = ", ".join(name for name in names if name not in schema) or "nothing"
        raise ValueError(
            f"{file}: expected the columns of a {kind}, {', '.join(missing)} not among them;"
            f" it has {unknown} besides the known ones"
        )
    return kind


def read_columns(file: Path, schema: Schema, *, missing: bool) -> Columns:
    """The whole columns of a file, see `read_blocks`."""
    blocks = [columns for _, columns in read_blocks(file, schema, missing=missing)]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def read_blocks(file: Path, schema: Schema, *, missing: bool) -> Iterator[tuple[int, Columns]]:
    """The checked rows of a file, block by block: number of the first row, and columns (n,)
    float64, of states (n, 16).

    missing: whether a number may be missing; it is NaN.
    """
    row = 1
    with explain_read_errors(file):
        for block in arrow_blocks(file, schema):
            numbers = row + np.arange(len(block["timeStepIndex"]))
            columns = {}
            for name, column in block.items():
                check = schema[name]
                if isinstance(check, tuple):
                    columns[name] = column.to_numpy(zero_copy_only=False)
                    check_column(file, name, check, numbers, columns[name], missing)
                else:
                    columns[name] = parse_states(file, column, numbers)
            yield row, columns
            row += len(numbers)
    if row == 1:
        raise ValueError(f"{file}: expected rows below the header, got none")


def arrow_blocks(file: Path, schema: Schema) -> Iterator[Json]:
    """The columns that the schema reads, block by block: pyarrow arrays of float64, states of
    string or of lists of float64.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    types = {name: pa.float64() for name, kind in schema.items() if kind}
    types |= {name: pa.string() for name, kind in schema.items() if kind == "state"}
    names = list(types)
    if file.name.endswith(".parquet"):
        count = max(BLOCK // 128, 1)
        blocks = parquet.ParquetFile(file).iter_batches(batch_size=count, columns=names)
    else:
        read = arrow_csv.ReadOptions(block_size=BLOCK, use_threads=False)
        convert = arrow_csv.ConvertOptions(column_types=types, include_columns=names)
        blocks = arrow_csv.open_csv(file, read_options=read, convert_options=convert)
    for block in blocks:
        columns = {}
        for name in names:
            column = block.column(name)
            kind = types[name]
            expected = "numbers"
            if schema[name] == "state":
                expected = f"lists of {len(STATE)} numbers, or texts of tuples"
                if is_list(column.type):
                    kind = pa.large_list(pa.float64())
            what = f"{file}, {name}: expected {expected}, got {column.type}"
            with explain_errors(what, pa.ArrowException, fix="write the column so"):
                columns[name] = column.cast(kind)
        yield columns


def read_header(file: Path) -> list[str]:
    """Names of the columns."""
    with explain_read_errors(file):
        if file.name.endswith(".parquet"):
            from pyarrow import parquet

            return list(parquet.read_schema(file).names)
        with open_text(file, "rt", "utf-8-sig") as text:
            names = next(csv.reader(text), [])
    if not names:
        raise ValueError(f"{file}: the file is empty; expected a header and rows")
    return names


def open_text(file: Path, mode: str, encoding: str) -> TextIO:
    """Open a CSV file, plain or gzipped."""
    opener: Callable[..., TextIO] = gzip.open if file.name.endswith(".gz") else open
    return opener(file, mode, encoding=encoding, newline="")


@contextmanager
def explain_read_errors(file: Path) -> Iterator[None]:
    """Give an error of reading the file, and the row and column if pyarrow names them."""
    import pyarrow as pa  # pip install -e '.[auction]'

    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        EOFError,
        UnicodeDecodeError,
        csv.Error,
        zlib.error,
    ) as error:
        place = ""
        problem: object = error
        match = re.search(r"(?:column #(\d+): .*)?Row #(\d+): (.*)", str(error), re.DOTALL)
        if match:
            column, row, problem = match.groups()
            place = f", row {int(row) - 1}"  # pyarrow counts the header too
            if column:
                place += f", {read_header(file)[int(column)]}"
        what = f"not a readable log ({problem}); mend it or fetch it"
        raise ValueError(f"{file}{place}: {what}") from error


def is_list(kind: "pa.DataType") -> bool:
    """Return whether an Arrow type is a list; pyarrow casts views of lists with wrong offsets."""
    import pyarrow as pa

    kinds = pa.types
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def check_column(
    file: Path,
    name: str,
    check: Check,
    numbers: np.ndarray,
    column: np.ndarray,
    missing: bool,
) -> None:
    """Raise a ValueError about the first wrong number of a column (n,) of rows of these numbers."""
    expected, allowed = check
    is_missing = np.isnan(column)
    place = f"{file}, row "
    if not missing:
        raise_for_first(place, is_missing, f"{{}}, {name}: expected a number, got none", numbers)
    wrong = ~(allowed(column) & np.isfinite(column) | is_missing)
    raise_for_first(place, wrong, f"{{}}, {name}: expected {expected}, got {{:g}}", numbers, column)


def parse_states(file: Path, column: "pa.Array", numbers: np.ndarray) -> np.ndarray:
    """Return the states (n, 16) float64 of a column of `arrow_blocks`, in rows of these numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = column if pa.types.is_large_list(column.type) else parse_tuples(column)
    sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    states = lists.flatten().to_numpy(zero_copy_only=False)
    right = sizes == len(STATE)
    rows: np.ndarray = states[np.repeat(right, sizes)].reshape(-1, len(STATE))
    wrong = ~right
    wrong[right] = ~((rows >= -1e-9) & np.isfinite(rows)).all(1)
    message = f"{{}}, state: expected {len(STATE)} numbers from 0, got {{}}"
    raise_for_first(f"{file}, row ", wrong, message, numbers, column)
    return rows


def parse_tuples(texts: "pa.Array") -> "pa.Array":
    """Return texts of tuples, "(1.0, ...)" or "(np.float64(1.0), ...)", as lists of float64, with
    null in place of each text that is no number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    bare = pc.fill_null(pc.replace_substring_regex(texts, r"np\.float\d*\(|[()\s]", ""), "")
    words = pc.split_pattern(bare, ",")
    flat = words.flatten()
    numeral = pc.match_substring_regex(flat, r"^-?\d+\.?\d*([eE][-+]?\d+)?$")
    ends = np.cumsum(words.value_lengths().to_numpy())
    numbers = pc.if_else(numeral, flat, None).cast("float64")
    return pa.LargeListArray.from_arrays(np.append(0, ends), numbers)
