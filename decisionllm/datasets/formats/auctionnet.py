"""AuctionNet's files in and out: traffic and trajectory logs, plain, gzipped or Parquet, read into one record.

A traffic log has a row for each opportunity and advertiser; it is streamed, and only the sums of each advertiser's step are kept. A
trajectory log has a row for each advertiser's step, with the state as the text of a tuple. The header decides which of the two a file is;
columns are found by their names. Rows are counted from 1, below the header.
pyarrow on one thread adds rows in their order, so that a log gives the same bits everywhere; polars (streaming) does not.
Source: AuctionNet (arXiv 2412.10798), its data description and `train_data_generator.py`.
"""

import csv
import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.config import ranges
from decisionllm.envs.auction.campaign import STATE, STEPS, Campaigns
from decisionllm.files import EACH, absent, atomic
from decisionllm.schema import differs, refuse

CAMPAIGN = ("deliveryPeriodIndex", "advertiserNumber")
FIXED = ("advertiserCategoryIndex", "budget", "CPAConstraint")  # of an advertiser's whole day
DAY = dict(zip(("period", "advertiser", "category", "budget", "target_cpa"), (*CAMPAIGN, *FIXED), strict=True))  # fields of Log
KINDS = (".csv", ".csv.gz", ".parquet")
BLOCK = 1 << 24  # bytes of text read at once, about 100,000 rows; as many rows of Parquet as that would be
Check = tuple[str, Callable[[np.ndarray], np.ndarray]]  # what a message expects, and which numbers are that
NUMBER: Check = ("a number from 0", lambda x: x >= -1e-9)  # a remaining budget may be a rounding error below 0
ABOVE_0: Check = ("a number above 0", lambda x: x > 0)
COUNT: Check = ("a whole number from 0", lambda x: (x >= 0) & (x == np.rint(x)))
STEP: Check = (f"a step from 0 to {STEPS - 1}", lambda x: (x >= 0) & (x < STEPS) & (x == np.rint(x)))
FLAG: Check = ("0 or 1", lambda x: (x == 0) | (x == 1))
Schema = dict[str, Check | str | None]  # "text": of a state; None: a column that is not read
KNOWN: Schema = {**dict.fromkeys((*CAMPAIGN, FIXED[0]), COUNT), **dict.fromkeys(FIXED[1:], ABOVE_0)}
TRAFFIC: Schema = KNOWN | {
    "timeStepIndex": STEP, "remainingBudget": NUMBER, "pvIndex": None, "pValue": NUMBER, "pValueSigma": None, "bid": NUMBER,
    "xi": FLAG, "adSlot": None, "cost": NUMBER, "isExposed": FLAG, "conversionAction": FLAG, "leastWinningCost": NUMBER,
    "isEnd": FLAG,
}  # fmt: skip
TRAJECTORIES: Schema = KNOWN | {
    "realAllCost": NUMBER, "realAllConversion": NUMBER, "timeStepIndex": STEP, "state": "text", "action": NUMBER,
    "reward": NUMBER, "reward_continuous": NUMBER, "done": FLAG, "next_state": None,
}  # fmt: skip
ADDED = ("bid", "leastWinningCost", "pValue", "conversionAction", "xi")  # over the opportunities of a step
WHO = "period {:g}, advertiser {:g}: "  # in messages
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Log:
    """K advertisers' days of T = 48 steps, by period and advertiser. Currency, conversions, values as in campaign."""

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
        return replace(self, **{name: x[index] for name, x in vars(self).items() if name != "repairs"})


def concatenated(logs: Sequence[Log]) -> Log:
    """One log of all these days."""
    arrays = {f.name: np.concatenate([vars(log)[f.name] for log in logs]) for f in fields(Log) if f.name != "repairs"}
    counts = {what: sum(log.repairs.get(what, 0) for log in logs) for what in sorted({w for log in logs for w in log.repairs})}
    return Log(**arrays, repairs=counts)


def log_files(path: str | Path) -> list[Path]:
    """The files of a path: a file, a folder or a pattern."""
    given = Path(path).expanduser()
    found = [given] if given.is_file() else [Path(name) for name in glob(str(given))]
    if given.is_dir():
        found = [file for file in given.iterdir() if file.name.endswith(KINDS)]
    if not found:
        raise FileNotFoundError(f"{path}: no log there; expected a file, a folder or a pattern of {', '.join(KINDS)}")
    return sorted(found)


def format_periods(periods: Any) -> str:
    """[0, 1, 2, 5] -> "0-2,5", which `parse_periods` reads."""
    known = np.unique(periods)
    runs = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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
        ValueError: a file is not a complete log, or a period is missing or in two files; names file, row and column.
    """
    wanted, logs = parse_periods(periods), []
    seen: dict[int, Path] = {}
    files = log_files(path)
    for file, log in zip(files, EACH.get()(read_file, files), strict=True):
        for period in np.unique(log.period).tolist():
            if period in seen:
                raise ValueError(f"{file}: period {period} is in {seen[period]} too; leave one of the two out of dataset.path")
            seen[period] = file
        logs.append(log)
    if lacking := sorted(set(wanted) - set(seen)):
        raise ValueError(f"dataset.periods: {path} has no period {format_periods(lacking)}, only {format_periods(list(seen))}")
    log = concatenated(logs)
    order = np.lexsort((log.advertiser, log.period))
    return log.rows(order[np.isin(log.period[order], wanted or list(seen))])


def read_file(file: Path) -> Log:
    """The log of one file; its header decides which of the two schemas it has."""
    names = header(file)
    schema = max((TRAFFIC, TRAJECTORIES), key=lambda schema: len(schema.keys() & set(names)))
    if lacking := [name for name in schema if name not in names]:
        kind, unknown = "traffic" if schema is TRAFFIC else "trajectory", [name for name in names if name not in schema]
        found = f"it has {', '.join(unknown) or 'nothing'} besides the known ones"
        raise ValueError(f"{file}: expected the columns of a {kind} log, {', '.join(lacking)} not among them; {found}")
    return read_traffic(file) if schema is TRAFFIC else read_trajectories(file)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Give an error of reading the file, and the row and column if pyarrow names them."""
    import pyarrow as pa  # pip install decisionllm[auction]

    try:
        yield
    except (pa.ArrowInvalid, OSError, EOFError, UnicodeDecodeError) as error:
        found = re.search(r"(?:column #(\d+): .*)?Row #(\d+): (.*)", str(error), re.DOTALL)  # it counts the header too
        place = f", row {int(found[2]) - 1}" + (f", {header(file)[int(found[1])]}" if found[1] else "") if found else ""
        raise ValueError(f"{file}{place}: not a readable log ({found[3] if found else error}); mend it or fetch it") from error


def header(file: Path) -> list[str]:
    """Names of the columns."""
    with readable(file):
        if file.name.endswith(".parquet"):
            from pyarrow import parquet

            return list(parquet.read_schema(file).names)
        with (gzip.open if file.name.endswith(".gz") else open)(file, "rt", encoding="utf-8-sig", newline="") as text:
            if names := next(csv.reader(text), []):
                return names
    raise ValueError(f"{file}: the file is empty; expected a header and rows")


def batches(file: Path, schema: Schema, *, missing: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """The checked rows of a file, block by block: (number of its first row, {name: (n,) float64, or a pyarrow array of texts}).

    missing: whether a number may be missing; it is NaN.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    types, row = {name: pa.string() if kind == "text" else pa.float64() for name, kind in schema.items() if kind}, 1
    read = arrow_csv.ReadOptions(block_size=BLOCK, use_threads=False)
    convert = arrow_csv.ConvertOptions(column_types=types, include_columns=list(types))
    with readable(file):
        if file.name.endswith(".parquet"):
            blocks = parquet.ParquetFile(file).iter_batches(batch_size=max(BLOCK // 128, 1), columns=list(types))
        else:
            blocks = arrow_csv.open_csv(file, read_options=read, convert_options=convert)
        for block in blocks:
            columns = {name: block.column(name).cast(type) for name, type in types.items()}
            columns = {n: c if types[n] == pa.string() else c.to_numpy(zero_copy_only=False) for n, c in columns.items()}
            numbers = row + np.arange(block.num_rows)
            for name, (expected, allowed) in ((name, kind) for name, kind in schema.items() if isinstance(kind, tuple)):
                column, absent = columns[name], np.isnan(columns[name])
                refuse(f"{file}, row ", absent & (not missing), f"{{}}, {name}: expected a number, got none", numbers)
                wrong = ~(allowed(column) & np.isfinite(column) | absent)
                refuse(f"{file}, row ", wrong, f"{{}}, {name}: expected {expected}, got {{:g}}", numbers, column)
            yield row, columns
            row += block.num_rows
    if row == 1:
        raise ValueError(f"{file}: expected rows below the header, got none")


def read_trajectories(file: Path) -> Log:
    """A trajectory file. Spend follows from the remaining budget, conversions from the rewards."""
    read = batches(file, TRAJECTORIES, missing=False)
    blocks = [columns | {"state": parsed(file, row, columns["state"])} for row, columns in read]
    joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    order = whole_days(file, joined, numbered=True)
    days = {name: column[order].reshape(-1, STEPS, *column.shape[1:]) for name, column in joined.items()}
    states = days["state"]
    remaining = days["budget"][:, :1] * states[:, :, STATE.index("budget left")]
    fixed = constants(file, days, remaining, DAY | {"spend": "realAllCost"})
    return Log(
        **fixed, states=states, multiplier=days["action"], conversions=days["reward"], done=days["done"] > 0,
        exposed_value=days["reward_continuous"], remaining=remaining, repairs={},
    )  # fmt: skip


def parsed(file: Path, row: int, texts: Any) -> np.ndarray:
    """The texts of tuples -> (n, 16) float64. "(1.0, 0.5)" and "(np.float64(1.0), np.float64(0.5))" are the same."""
    import pyarrow.compute as pc

    bare = pc.fill_null(pc.replace_substring_regex(texts, r"np\.float\d*\(|[()\s]", ""), "")
    words = pc.split_pattern(bare, ",")
    sizes, flat = words.value_lengths().to_numpy(), words.flatten()
    numeral = pc.match_substring_regex(flat, r"^-?\d+\.?\d*([eE][-+]?\d+)?$")
    numbers: np.ndarray = pc.if_else(numeral, flat, None).cast("float64").to_numpy(zero_copy_only=False)
    wrong = np.logical_or.reduceat(~(numbers >= -1e-9), np.cumsum(sizes) - sizes) | (sizes != len(STATE))
    expected = f"expected {len(STATE)} numbers from 0"
    refuse(f"{file}, row ", wrong, f"{{}}, state: {expected}, got {{}}", row + np.arange(len(texts)), texts)
    return numbers.reshape(-1, len(STATE))


def whole_days(file: Path, columns: Columns, *, numbered: bool, remark: str = "") -> np.ndarray:
    """The order of rows by period and advertiser, whose steps must stand as 0, 1, .. 47. numbered: these are rows of the file."""
    if not len(columns["timeStepIndex"]):
        raise ValueError(f"{file}: expected rows with all their numbers, got none{remark}")
    order = np.lexsort([columns[name] for name in reversed(CAMPAIGN)])
    period, advertiser, step = (columns[name][order] for name in (*CAMPAIGN, "timeStepIndex"))
    first = np.flatnonzero(differs(period, advertiser))
    sizes = np.diff(np.append(first, len(step)))
    expected = np.arange(len(step)) - np.repeat(first, sizes)
    what = ", row {4}" * numbered + ", timeStepIndex: period {0:g}, advertiser {1:g}: expected step {2}, got {3:g}" + remark
    refuse(str(file), step != expected, what, period, advertiser, expected, step, order + 1)
    what = f"period {{:g}}, advertiser {{:g}} has {{}} steps, expected {STEPS}{remark}; the log is cut short"
    refuse(f"{file}: ", sizes != STEPS, what, period[first], advertiser[first], sizes)
    return order


def constants(file: Path, columns: Columns, remaining: np.ndarray, names: dict[str, str]) -> Columns:
    """Columns (K, T) that must not change over an advertiser's day -> (K,) each, by the fields that have these names; counts as int.

    A remaining budget (K, T) that grows over the day is refused too.
    """
    *campaign, step = (columns[name] for name in (*CAMPAIGN, "timeStepIndex"))
    what = WHO + "expected one value for the day, got {:g} and, in step {:g}, {:g}"
    for name in names.values():
        first = np.broadcast_to(columns[name][:, :1], step.shape)
        refuse(f"{file}, {name}: ", columns[name] != first, what, *campaign, first, step, columns[name])
    rises = np.diff(remaining, axis=1) > 1e-6 * columns["budget"][:, 1:]
    what = WHO + "expected a remaining budget that never grows, got {:g} before step {:g} and {:g} before step {:g}"
    refuse(f"{file}: ", rises, what, *campaign, remaining, step, remaining[:, 1:], step[:, 1:])
    return {field: columns[name][:, 0].astype(int if KNOWN.get(name) is COUNT else float) for field, name in names.items()}


def read_traffic(file: Path) -> Log:
    """A traffic file: sums over each advertiser's step, then the state numbers of Campaigns.

    A step's spend is the fall of the logged budget, in the last step its costs. Steps where the two differ are counted as repairs.
    """
    sums, repairs = summed(file)
    remark = "".join(f" ({what}: {n})" for what, n in repairs.items())
    order = whole_days(file, sums, numbered=False, remark=remark)
    days = {name: column[order].reshape(-1, STEPS) for name, column in sums.items()}
    remaining, volume, spend = days["remainingBudget"], days["volume"], days["spend"]
    fixed = constants(file, days, remaining, DAY)
    fell = np.append(-np.diff(remaining, axis=1), spend[:, -1:], 1)
    differ = np.abs(fell - spend) > 1e-6 * fixed["budget"][:, None]
    repairs |= {"steps whose costs are not what the budget fell by": int(differ.sum())} if differ.any() else {}
    campaigns = Campaigns(fixed["budget"], fixed["target_cpa"])
    states = np.empty((*remaining.shape, len(STATE)))
    for t in range(STEPS):
        mean = {name: days[name][:, t] / volume[:, t] for name in ADDED}
        states[:, t] = campaigns.observe(mean["pValue"], volume[:, t])
        campaigns.record(
            bid=mean["bid"], market_price=mean["leastWinningCost"], value=mean["pValue"], conversion=mean["conversionAction"],
            won=mean["xi"], volume=volume[:, t], spend=fell[:, t], conversions=days["conversionAction"][:, t],
            exposed_value=days["exposed_value"][:, t],
        )  # fmt: skip
    return Log(
        **fixed, states=states, remaining=remaining, spend=spend.sum(1), repairs=repairs, conversions=days["conversionAction"],
        multiplier=np.divide(days["bid"], days["pValue"], out=np.zeros_like(spend), where=days["pValue"] > 0),
        exposed_value=days["exposed_value"], done=(days["isEnd"] > 0) | (np.arange(STEPS) == STEPS - 1),
    )  # fmt: skip


def summed(file: Path) -> tuple[Columns, dict[str, int]]:
    """The rows of a traffic file, summed over each (period, advertiser, step): columns, and counts of repairs.

    `cost` is the price of a slot, exposed or not: the payment is cost x exposed. A row without one of its numbers, as in the public
    periods 9, 13 and 27, is left out. pvIndex is not used: it restarts with every step in the simulator's own files, and not in the
    public ones.
    """
    import pyarrow as pa

    keys, parts, left_out = [*CAMPAIGN, "timeStepIndex", *FIXED, "remainingBudget", "isEnd"], [], 0
    first: dict[tuple[float, float], tuple[int, str]] = {}  # of a campaign: its first row without a number, and which number

    def add_up(columns: Any) -> Any:
        sums = [(name, "sum") for name in (*ADDED, "spend", "exposed_value", "volume")]
        table = pa.table(columns).group_by(keys, use_threads=False).aggregate(sums)
        return table.rename_columns([name.removesuffix("_sum") for name in table.column_names])

    for row, columns in batches(file, TRAFFIC, missing=True):
        if (lacking := np.isnan(list(columns.values()))).any():
            rows = np.flatnonzero(lacking.any(0))
            left_out += len(rows)
            keyed = np.stack([columns[name][rows] for name in CAMPAIGN], 1)
            for (period, advertiser), i in zip(*np.unique(keyed, axis=0, return_index=True), strict=True):
                first.setdefault((period, advertiser), (row + rows[i], list(columns)[np.argmax(lacking[:, rows[i]])]))
            columns = {name: column[~lacking.any(0)] for name, column in columns.items()}
        paid, value = columns["cost"] * columns["isExposed"], columns["pValue"] * columns["isExposed"]
        parts.append(add_up(columns | {"spend": paid, "exposed_value": value, "volume": np.ones(len(paid))}))
    table = add_up(pa.concat_tables(parts)).sort_by([(key, "ascending") for key in keys])
    sums = {name: table[name].to_numpy() for name in table.column_names}
    for (period, advertiser), (row, name) in first.items():
        known = (sums[CAMPAIGN[0]] == period) & (sums[CAMPAIGN[1]] == advertiser)
        if not known.any() and np.isfinite([period, advertiser]).all():
            every = WHO.format(period, advertiser).rstrip(": ")
            raise ValueError(f"{file}, row {row}, {name}: expected a number, got none; so it is in every row of {every}")
    again = np.all([np.diff(sums[name]) == 0 for name in keys[:3]], 0)
    for name in keys[3:]:
        what, column = WHO + "expected one value in step {:g}, got {:g} and {:g}", sums[name]
        wrong = again & (column[1:] != column[:-1])
        refuse(f"{file}, {name}: ", wrong, what, *(sums[key] for key in keys[:3]), column, column[1:])
    return sums, {"rows without a number, left out": left_out} if left_out else {}


def convert(log: Log) -> dict[str, list[Any]]:
    """A log as the fourteen columns of a trajectory log, numbers as in plain text: {name: list of K x 48}."""
    days = (log.period, log.advertiser, log.category, log.budget, log.target_cpa, log.spend, log.conversions.sum(1))
    steps = (np.arange(STEPS), log.multiplier, log.conversions, log.exposed_value)
    numbers = [np.broadcast_to(x, log.done.shape).astype(float) for x in (*(day[:, None] for day in days), *steps)]
    flat = [column.reshape(-1).tolist() for column in (*numbers, log.done.astype(int))]
    states = [str(tuple(row)) for row in log.states.reshape(-1, len(STATE)).tolist()]
    after = [None if end else state for end, state in zip(flat[-1], [*states[1:], None], strict=True)]
    return dict(zip(TRAJECTORIES, (*flat[:8], states, *flat[8:], after), strict=True))


def write(path: str | Path, log: Log) -> None:
    """Write a log as a trajectory log, all or nothing: .csv, .csv.gz or .parquet, by the path's name."""
    import pyarrow as pa
    from pyarrow import parquet

    path = absent(path)
    if not path.name.endswith(KINDS):
        raise ValueError(f"{path}: expected a path that ends with {', '.join(KINDS)}")
    columns = convert(log)
    with atomic(path) as partial:
        if path.name.endswith(".parquet"):
            parquet.write_table(pa.table(columns), partial)
            return
        with (gzip.open if path.name.endswith(".gz") else open)(partial, "wt", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(columns)
            rows.writerows(zip(*columns.values(), strict=True))
