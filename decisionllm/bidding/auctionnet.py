"""AuctionNet's files in and out: traffic and trajectory logs, plain, gzipped or Parquet, read into
one record.

A traffic log has a row for each opportunity and advertiser; it is streamed, and only the sums of
each advertiser's step are kept. A trajectory log has a row for each advertiser's step, with the
state as the text of a tuple, or in Parquet as a list. The header decides which of the two a file is; columns are found by
their names. Rows are counted from 1, below the header. pyarrow on one thread adds rows in their
order, so that a log gives the same bits everywhere; polars (streaming) does not.
Source: AuctionNet (arXiv 2412.10798), its data description and `train_data_generator.py`.
"""

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.bidding.campaign import STATE, STEPS, Campaigns
from decisionllm.checks import ranges
from decisionllm.files import EACH, absent, atomic, explained
from decisionllm.schema import Json, differs, refuse

if TYPE_CHECKING:
    import pyarrow as pa

CAMPAIGN = ("deliveryPeriodIndex", "advertiserNumber")
# the same in all rows of an advertiser's day
FIXED = ("advertiserCategoryIndex", "budget", "CPAConstraint")
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
# summed over the opportunities of a step
SUMMED_COLUMNS = ("bid", "leastWinningCost", "pValue", "conversionAction", "xi")
WHICH_CAMPAIGN = "period {:g}, advertiser {:g}: "  # in messages
Columns = dict[str, np.ndarray]


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
    """[0, 1, 2, 5] -> "0-2,5", which `parse_periods` reads."""
    numbers = np.unique(periods)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    parts = []
    for run in runs:
        parts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


def parse_periods(periods: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]; empty: none, which stands for all."""
    return sorted(ranges("dataset.periods", periods, nothing="all"))


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
    for file, log in zip(files, EACH.get()(read_file, files), strict=True):
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


@contextmanager
def explain_read_errors(file: Path) -> Iterator[None]:
    """Give an error of reading the file, and the row and column if pyarrow names them."""
    import pyarrow as pa  # pip install decisionllm[auction]

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


def open_text(file: Path, mode: str, encoding: str) -> TextIO:
    """Open a CSV file, plain or gzipped."""
    opener: Callable[..., TextIO] = gzip.open if file.name.endswith(".gz") else open
    return opener(file, mode, encoding=encoding, newline="")


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
            with explained(what, pa.ArrowException, remedy="write the column so"):
                columns[name] = column.cast(kind)
        yield columns


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
        refuse(place, is_missing, f"{{}}, {name}: expected a number, got none", numbers)
    wrong = ~(allowed(column) & np.isfinite(column) | is_missing)
    refuse(place, wrong, f"{{}}, {name}: expected {expected}, got {{:g}}", numbers, column)


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
    refuse(f"{file}, row ", wrong, message, numbers, column)
    return rows


def parse_tuples(texts: "pa.Array") -> "pa.Array":
    """Return texts of tuples, "(1.0, ...)" or "(np.float64(1.0), ...)", as lists of float64, with null
    in place of what is no number.
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


def sort_whole_days(
    file: Path, columns: Columns, *, numbered: bool, remark: str = ""
) -> np.ndarray:
    """The order of rows by period and advertiser, whose steps must stand as 0, 1, .. 47.

    numbered: these are rows of the file, which messages may number.
    """
    if not len(columns["timeStepIndex"]):
        raise ValueError(f"{file}: expected rows with all their numbers, got none{remark}")
    order = np.lexsort([columns[name] for name in reversed(CAMPAIGN)])
    period, advertiser, step = (columns[name][order] for name in (*CAMPAIGN, "timeStepIndex"))
    first = np.flatnonzero(differs(period, advertiser))
    sizes = np.diff(np.append(first, len(step)))
    expected = np.arange(len(step)) - np.repeat(first, sizes)
    what = ", row {4}" if numbered else ""
    what += ", timeStepIndex: period {0:g}, advertiser {1:g}: expected step {2}, got {3:g}" + remark
    refuse(str(file), step != expected, what, period, advertiser, expected, step, order + 1)
    what = f"period {{:g}}, advertiser {{:g}} has {{}} steps, expected {STEPS}{remark}"
    what += "; the log is cut short"
    refuse(f"{file}: ", sizes != STEPS, what, period[first], advertiser[first], sizes)
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
        values = days[CAMPAIGN[0]], days[CAMPAIGN[1]], first, step, column
        refuse(f"{file}, {name}: ", column != first, what, *values)
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
    refuse(f"{file}: ", rises, what, days[CAMPAIGN[0]], days[CAMPAIGN[1]], *values)


def read_traffic(file: Path) -> Log:
    """A traffic file: sums over each advertiser's step, then the state numbers of Campaigns.

    A step's spend is the fall of the logged budget, in the last step its costs. Steps where the two
    differ are counted as repairs.
    """
    sums, repairs = summed(file)
    remark = "".join(f" ({what}: {n})" for what, n in repairs.items())
    order = sort_whole_days(file, sums, numbered=False, remark=remark)
    days = {name: column[order].reshape(-1, STEPS) for name, column in sums.items()}
    remaining = days["remainingBudget"]
    volume = days["volume"]
    spend = days["spend"]
    fixed = read_constants(file, days, COLUMN_BY_FIELD)
    refuse_rises(file, days, remaining)
    fell = np.append(-np.diff(remaining, axis=1), spend[:, -1:], 1)
    differ = np.abs(fell - spend) > 1e-6 * fixed["budget"][:, None]
    if differ.any():
        repairs["steps whose costs are not what the budget fell by"] = int(differ.sum())
    campaigns = Campaigns(fixed["budget"], fixed["target_cpa"])
    states = np.empty((*remaining.shape, len(STATE)))
    for t in range(STEPS):
        mean = {name: days[name][:, t] / volume[:, t] for name in SUMMED_COLUMNS}
        states[:, t] = campaigns.observe(mean["pValue"], volume[:, t])
        campaigns.record(
            bid=mean["bid"],
            market_price=mean["leastWinningCost"],
            value=mean["pValue"],
            conversion=mean["conversionAction"],
            won=mean["xi"],
            volume=volume[:, t],
            spend=fell[:, t],
            conversions=days["conversionAction"][:, t],
            exposed_value=days["exposed_value"][:, t],
        )
    bid, value = days["bid"], days["pValue"]
    last = np.arange(STEPS) == STEPS - 1
    return Log(
        **fixed,
        states=states,
        multiplier=np.divide(bid, value, out=np.zeros_like(bid), where=value > 0),
        conversions=days["conversionAction"],
        exposed_value=days["exposed_value"],
        remaining=remaining,
        spend=spend.sum(1),
        done=(days["isEnd"] > 0) | last,
        repairs=repairs,
    )


def summed(file: Path) -> tuple[Columns, dict[str, int]]:
    """Sum a traffic file over each (period, advertiser, step). Returns columns, and repairs.

    `cost` is the price of a slot, exposed or not: the payment is cost x exposed. A row without one
    of its numbers, as in the public periods 9, 13 and 27, is left out. pvIndex only shows rows that
    repeat: it restarts with every step in the simulator's own files, and not in the public ones.
    """
    import pyarrow as pa

    keys = [*CAMPAIGN, "timeStepIndex", *FIXED, "remainingBudget", "isEnd"]
    parts = []
    left_out = [np.empty((0, 4))]  # period, advertiser, row and number of the column that lacks
    for row, columns in read_blocks(file, TRAFFIC, missing=True):
        is_missing = np.isnan(list(columns.values()))  # (columns, n)
        rows = np.flatnonzero(is_missing.any(0))
        if len(rows):
            campaigns = [columns[name][rows] for name in CAMPAIGN]
            first_missing = is_missing[:, rows].argmax(0)
            left_out.append(np.stack([*campaigns, row + rows, first_missing], 1))
            columns = {name: np.delete(column, rows) for name, column in columns.items()}
        exposed = columns["isExposed"]
        columns["spend"] = columns["cost"] * exposed
        columns["exposed_value"] = columns["pValue"] * exposed
        columns["volume"] = np.ones(len(exposed))
        columns["first_index"] = columns["last_index"] = columns.pop("pvIndex")
        parts.append(sum_groups(pa.table(columns), keys))
    table = sum_groups(pa.concat_tables(parts), keys).sort_by([(key, "ascending") for key in keys])
    sums = {name: table[name].to_numpy() for name in table.column_names}
    incomplete = np.concatenate(left_out)
    refuse_empty_campaigns(file, sums, incomplete)
    refuse_changing_keys(file, sums, keys)
    refuse_repeated_rows(file, sums)
    if not len(incomplete):
        return sums, {}
    return sums, {"rows without a number, left out": len(incomplete)}


def sum_groups(table: "pa.Table", keys: list[str]) -> "pa.Table":
    """The rows of a table, summed over those with the same keys, with the range of their pvIndex."""
    functions = dict.fromkeys([*SUMMED_COLUMNS, "spend", "exposed_value", "volume"], "sum")
    functions |= {"first_index": "min", "last_index": "max"}
    sums = table.group_by(keys, use_threads=False).aggregate(list(functions.items()))
    plain = {f"{name}_{function}": name for name, function in functions.items()}
    return sums.rename_columns([plain.get(name, name) for name in sums.column_names])


def refuse_changing_keys(file: Path, sums: Columns, keys: list[str]) -> None:
    """Raise a ValueError if a step of a campaign has two values of a key after the first three."""
    campaign_step = [sums[name] for name in keys[:3]]
    again = ~differs(*campaign_step)[1:]
    what = WHICH_CAMPAIGN + "expected one value in step {:g}, got {:g} and {:g}"
    for name in keys[3:]:
        column = sums[name]
        wrong = again & (column[1:] != column[:-1])
        refuse(f"{file}, {name}: ", wrong, what, *campaign_step, column, column[1:])


def refuse_repeated_rows(file: Path, sums: Columns) -> None:
    """Raise a ValueError if a step of a campaign has more rows than its pvIndex has values: some
    opportunity is there twice, and so are its costs and conversions.
    """
    first, last, rows = sums["first_index"], sums["last_index"], sums["volume"]
    what = WHICH_CAMPAIGN + "expected one row for each pvIndex of step {:g}, got {:g} rows"
    what += " with pvIndex {:g} to {:g}; remove the rows that repeat"
    step = [sums[name] for name in (*CAMPAIGN, "timeStepIndex")]
    refuse(f"{file}: ", rows > last - first + 1, what, *step, rows, first, last)


def refuse_empty_campaigns(file: Path, sums: Columns, incomplete: np.ndarray) -> None:
    """Raise a ValueError if every row of a campaign lacks a number.

    incomplete: (n, 4) period, advertiser, row, and number of the column, of the rows that lack one.
    """
    names = [name for name, check in TRAFFIC.items() if check]
    complete_campaigns = set(zip(*(sums[name].tolist() for name in CAMPAIGN), strict=True))
    _, first = np.unique(incomplete[:, :2], axis=0, return_index=True)
    for period, advertiser, row, column in incomplete[first].tolist():
        has_keys = np.isfinite([period, advertiser]).all()
        if has_keys and (period, advertiser) not in complete_campaigns:
            every = WHICH_CAMPAIGN.format(period, advertiser).rstrip(": ")
            what = f"expected a number, got none; so it is in every row of {every}"
            raise ValueError(f"{file}, row {row:.0f}, {names[int(column)]}: {what}")


def trajectory_columns(log: Log) -> dict[str, Sequence[object]]:
    """The columns of a trajectory log, numbers as in plain text: {name: list of K x 48}."""
    states = [str(tuple(row)) for row in log.states.reshape(-1, len(STATE)).tolist()]
    done = log.done.ravel()
    after = np.array([*states[1:], None], object)
    after[done] = None

    def spread(x: np.ndarray) -> list[float]:
        """(K, 1), (T,) or (K, T) -> K x T numbers."""
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

    path = absent(path)
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
