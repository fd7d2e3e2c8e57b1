"""AuctionNet's files in and out: traffic and trajectory logs, plain, gzipped or Parquet, read into one record.

A traffic log has a row for each opportunity and advertiser; it is streamed, and nothing is kept but the sums of each
advertiser's step. A trajectory log has a row for each advertiser's step, the state as the text of a tuple. The header says
which of the two a file is, and columns are found by their names. Rows are counted from 1, below the header.
Source: AuctionNet (arXiv 2412.10798), its data description and `train_data_generator.py`.
"""

import csv
import gzip
import os
import re
from dataclasses import dataclass, fields
from glob import glob
from pathlib import Path

import numpy as np

from decisionllm.config import ranges
from decisionllm.envs.auction.campaign import STATE, STEPS, Campaigns

WHO = ("deliveryPeriodIndex", "advertiserNumber")
FIXED = ("advertiserCategoryIndex", "budget", "CPAConstraint")  # of an advertiser's whole day
KINDS = (".csv", ".csv.gz", ".parquet")
BLOCK = 1 << 24  # bytes of text read at once, about 100,000 rows; as many rows of Parquet as that would be
# What a column may hold; "" is not read.
KNOWN = {"deliveryPeriodIndex": "count", "advertiserNumber": "count", "advertiserCategoryIndex": "count",
         "budget": "above 0", "CPAConstraint": "above 0"}  # fmt: skip
TRAFFIC = KNOWN | {
    "timeStepIndex": "step", "remainingBudget": "number", "pvIndex": "", "pValue": "number", "pValueSigma": "",
    "bid": "number", "xi": "flag", "adSlot": "", "cost": "number", "isExposed": "flag", "conversionAction": "flag",
    "leastWinningCost": "number", "isEnd": "flag",
}  # fmt: skip
TRAJECTORIES = KNOWN | {
    "realAllCost": "number", "realAllConversion": "number", "timeStepIndex": "step", "state": "text", "action": "number",
    "reward": "number", "reward_continuous": "number", "done": "flag", "next_state": "",
}  # fmt: skip
ADDED = ("bid", "leastWinningCost", "pValue", "conversionAction", "xi")  # over the opportunities of a step


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
    done: np.ndarray  # (K, T) bool: on every step that began with the budget used up, and on the last
    repairs: dict  # {what: how often}


def listed(path):
    """The files that a path stands for: a file, a folder or a pattern."""
    given = Path(path).expanduser()
    if given.is_dir():
        found = [file for file in given.iterdir() if file.name.endswith(KINDS)]
    else:
        found = [given] if given.is_file() else [Path(name) for name in glob(str(given))]
    if not found:
        raise FileNotFoundError(f"{path}: no log there; expected a file, a folder or a pattern of {', '.join(KINDS)}")
    return sorted(found)


def spelled(periods):
    """[0, 1, 2, 5] -> "0-2,5", which `chosen` reads."""
    known = np.unique(periods)
    runs = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def chosen(periods):
    """What `spelled` writes, as a list: "0-2,5" -> [0, 1, 2, 5]. Nothing written -> None, which stands for all."""
    return sorted(ranges("dataset.periods", periods, nothing="all")) or None


def read(path, *, periods="", features="repaired"):
    """A Log of the files there. A period must be in one file, and whole."""
    wanted, logs, seen = chosen(periods), [], {}
    for file in listed(path):
        log = read_file(file, features=features)
        for period in np.unique(log.period).tolist():
            if period in seen:
                raise ValueError(f"{file}: period {period} is in {seen[period]} too; leave one of the two out of dataset.path")
            seen[period] = file
        logs.append(log)
    lacking = sorted(set(wanted or ()) - set(seen))
    if lacking:
        raise ValueError(f"dataset.periods: {path} has no period {spelled(lacking)}, only {spelled(list(seen))}")
    arrays = {f.name: np.concatenate([getattr(log, f.name) for log in logs]) for f in fields(Log) if f.name != "repairs"}
    order = np.lexsort((arrays["advertiser"], arrays["period"]))
    rows = order[np.isin(arrays["period"][order], wanted or list(seen))]
    counts = {what: sum(log.repairs.get(what, 0) for log in logs) for what in sorted({w for log in logs for w in log.repairs})}
    return Log(**{name: array[rows] for name, array in arrays.items()}, repairs=counts)


def read_file(file, *, features="repaired"):
    """A Log of one file; its header says which of the two schemas it has."""
    names = header(file)
    schema = max((TRAFFIC, TRAJECTORIES), key=lambda schema: len(schema.keys() & set(names)))
    lacking = [name for name in schema if name not in names]
    if lacking:
        kind = "traffic" if schema is TRAFFIC else "trajectory"
        unknown = [name for name in names if name not in schema]
        raise ValueError(
            f"{file}: expected the columns of a {kind} log, {', '.join(lacking)} not among them; "
            f"it has {', '.join(unknown) or 'nothing'} besides the known ones"
        )
    if schema is TRAFFIC:
        return of_traffic(file, features)
    if features == "original":
        raise ValueError(f"{file}: features=original needs a traffic log; a trajectory log holds the repaired features")
    return of_trajectories(file)


def header(file):
    import pyarrow as pa  # pip install decisionllm[auction]
    from pyarrow import parquet

    try:
        if file.name.endswith(".parquet"):
            return parquet.read_schema(file).names
        with (gzip.open if file.name.endswith(".gz") else open)(file, "rt", encoding="utf-8-sig", newline="") as text:
            names = next(csv.reader(text), [])
    except (pa.ArrowInvalid, OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a readable log ({error}); fetch it again") from error
    if not names:
        raise ValueError(f"{file}: the file is empty; expected a header and rows")
    return names


def batches(file, schema):
    """What a file holds, piece by piece: (number of its first row, {name: (n,) float64, or a pyarrow array of texts})."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    types = {name: pa.string() if kind == "text" else pa.float64() for name, kind in schema.items() if kind}
    row = 1
    try:
        if file.name.endswith(".parquet"):
            pieces = parquet.ParquetFile(file).iter_batches(batch_size=max(BLOCK // 128, 1), columns=list(types))
        else:
            pieces = arrow_csv.open_csv(
                file,
                read_options=arrow_csv.ReadOptions(block_size=BLOCK, use_threads=False),
                convert_options=arrow_csv.ConvertOptions(column_types=types, include_columns=list(types)),
            )
        for piece in pieces:
            columns = {name: piece.column(name).cast(type) for name, type in types.items()}
            numbers = {n: c if types[n] == pa.string() else c.to_numpy(zero_copy_only=False) for n, c in columns.items()}
            yield row, numbers
            row += piece.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        found = re.search(r"(?:column #(\d+): .*)?Row #(\d+): (.*)", str(error), re.DOTALL)  # it counts the header too
        place = f", row {int(found[2]) - 1}" + (f", {header(file)[int(found[1])]}" if found[1] else "") if found else ""
        raise ValueError(f"{file}{place}: not a readable log ({found[3] if found else error}); mend it or fetch it") from error
    if row == 1:
        raise ValueError(f"{file}: expected rows below the header, got none")


def check(file, row, columns, schema):
    """Refuse numbers that no log can hold. A number that is not there passes: what it means is the caller's to say."""
    for name, column in columns.items():
        if schema[name] == "text":
            continue
        expected, allowed = {
            "number": ("a number from 0", lambda x: x >= -1e-9),  # what is left of a budget may be a rounding error
            "above 0": ("a number above 0", lambda x: x > 0),
            "count": ("a whole number from 0", lambda x: (x >= 0) & (x == np.rint(x))),
            "step": (f"a step from 0 to {STEPS - 1}", lambda x: (x >= 0) & (x < STEPS) & (x == np.rint(x))),
            "flag": ("0 or 1", lambda x: (x == 0) | (x == 1)),
        }[schema[name]]
        wrong = ~(allowed(column) & np.isfinite(column) | np.isnan(column))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"{file}, row {row + at}, {name}: expected {expected}, got {column[at]:g}")


def of_trajectories(file):
    """A Log of a trajectory file. The budget left says what was spent, the rewards what was won."""
    pieces = []
    for row, columns in batches(file, TRAJECTORIES):
        check(file, row, columns, TRAJECTORIES)
        for name, column in columns.items():
            if TRAJECTORIES[name] != "text" and np.isnan(column).any():
                raise ValueError(f"{file}, row {row + int(np.argmax(np.isnan(column)))}, {name}: expected a number, got none")
        pieces.append(columns | {"state": parsed(file, row, columns["state"])})
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    order = whole_days(file, columns, numbered=True)
    columns = {name: column[order].reshape(-1, STEPS, *column.shape[1:]) for name, column in columns.items()}
    period, advertiser, category, budget, target_cpa, spend = constants(file, columns, (*WHO, *FIXED, "realAllCost"))
    states = columns["state"]
    remaining = budget[:, None] * states[:, :, STATE.index("budget left")]
    falling(file, columns, remaining)
    return Log(
        period.astype(int), advertiser.astype(int), category.astype(int), budget, target_cpa, states, columns["action"],
        columns["reward"], columns["reward_continuous"], remaining, spend, columns["done"] > 0, {},
    )  # fmt: skip


def parsed(file, row, texts):
    """The texts of tuples -> (n, 16) float64. "(1.0, 0.5)" and "(np.float64(1.0), np.float64(0.5))" are the same."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv as arrow_csv

    bare = pc.fill_null(pc.replace_substring_regex(texts, r"np\.float\d*\(|[()\s]", ""), "")
    sizes = pc.count_substring(bare, ",").to_numpy() + 1
    if (sizes != len(STATE)).any():
        at = int(np.argmax(sizes != len(STATE)))
        raise ValueError(f"{file}, row {row + at}, state: expected {len(STATE)} numbers, got {texts[at]}")
    lines = pc.binary_join(pa.ListArray.from_arrays([0, len(bare)], bare), "\n")[0].as_py()
    names = [str(i) for i in range(len(STATE))]
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(lines.encode()),
            read_options=arrow_csv.ReadOptions(column_names=names, use_threads=False),
            convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.float64())),
        )
        states = np.stack([table[name].to_numpy() for name in names], 1)
    except pa.ArrowInvalid as error:
        found = re.search(r"Row #(\d+)", str(error))
        at = row + int(found[1]) - 1 if found else row
        raise ValueError(f"{file}, row {at}, state: expected {len(STATE)} numbers, got {texts[at - row]}") from error
    wrong = ~(states >= -1e-9) | np.isinf(states)
    if wrong.any():
        at = int(np.argmax(wrong.any(1)))
        raise ValueError(f"{file}, row {row + at}, state: expected {len(STATE)} numbers from 0, got {texts[at]}")
    return states


def whole_days(file, columns, *, numbered=True, remark=""):
    """The order of rows by period and advertiser, whose steps must stand there as 0, 1, .. 47. numbered: a row is one of the file."""
    if not len(columns["timeStepIndex"]):
        raise ValueError(f"{file}: expected rows with all their numbers, got none{remark}")
    period, advertiser, step = (columns[name] for name in (*WHO, "timeStepIndex"))
    order = np.lexsort((advertiser, period))
    who = np.stack([period, advertiser], 1)[order]
    first = np.flatnonzero(np.append(True, (np.diff(who, axis=0) != 0).any(1)))
    lengths = np.diff(np.append(first, len(who)))
    expected = np.arange(len(who)) - np.repeat(first, lengths)
    if (step[order] != expected).any():
        at = int(np.argmax(step[order] != expected))
        place = f", row {order[at] + 1}" if numbered else ""
        raise ValueError(
            f"{file}{place}, timeStepIndex: {named(*who[at])}: expected step {expected[at]}, got {step[order][at]:g}{remark}"
        )
    if (lengths != STEPS).any():
        at = int(np.argmax(lengths != STEPS))
        raise ValueError(
            f"{file}: {named(*who[first[at]])} has {lengths[at]} steps, expected {STEPS}{remark}; the log is cut short"
        )
    return order


def constants(file, columns, names):
    """Columns (K, T) that are the same over an advertiser's day -> (K,) each."""
    for name in names:
        differs = columns[name] != columns[name][:, :1]
        if differs.any():
            k, t = np.argwhere(differs)[0]
            raise ValueError(
                f"{file}, {name}: {named(*(columns[key][k, t] for key in WHO))}: expected one value for the day, "
                f"got {columns[name][k, 0]:g} and, in step {t}, {columns[name][k, t]:g}"
            )
    return [columns[name][:, 0] for name in names]


def named(period, advertiser):
    return f"period {period:g}, advertiser {advertiser:g}"


def falling(file, columns, remaining):
    """Refuse a budget (K, T) that grows over the day."""
    rises = np.diff(remaining, axis=1) > 1e-6 * columns["budget"][:, 1:]
    if rises.any():
        k, t = np.argwhere(rises)[0]
        raise ValueError(
            f"{file}: {named(*(columns[key][k, t] for key in WHO))}: expected a remaining budget that never grows, "
            f"got {remaining[k, t]:g} before step {t} and {remaining[k, t + 1]:g} before step {t + 1}"
        )


def of_traffic(file, features):
    """A Log of a traffic file: sums over each advertiser's step, then the state numbers as Campaigns shows them live.

    What a step cost is what the logged budget fell by, and in the last step its costs. Steps where the two differ are counted.
    """
    columns, repairs = summed(file)
    remark = "".join(f" ({what}: {n})" for what, n in repairs.items())
    order = whole_days(file, columns, numbered=False, remark=remark)
    columns = {name: column[order].reshape(-1, STEPS) for name, column in columns.items()}
    period, advertiser, category, budget, target_cpa = constants(file, columns, (*WHO, *FIXED))
    remaining, volume, spend = columns["remainingBudget"], columns["volume"], columns["spend"]
    falling(file, columns, remaining)
    fell = np.append(-np.diff(remaining, axis=1), spend[:, -1:], 1)
    differ = np.abs(fell - spend) > 1e-6 * budget[:, None]
    repairs |= {"steps whose costs are not what the budget fell by": int(differ.sum())} if differ.any() else {}
    campaigns = Campaigns(budget, target_cpa, features=features)
    states = np.empty((*remaining.shape, len(STATE)))
    for t in range(STEPS):
        mean = {name: columns[name][:, t] / volume[:, t] for name in ADDED}
        states[:, t] = campaigns.observe(mean["pValue"], volume[:, t])
        campaigns.record(
            bid=mean["bid"], market_price=mean["leastWinningCost"], value=mean["pValue"], conversion=mean["conversionAction"],
            won=mean["xi"], volume=volume[:, t], spend=fell[:, t], conversions=columns["conversionAction"][:, t],
            exposed_value=columns["exposed_value"][:, t],
        )  # fmt: skip
    multiplier = np.divide(columns["bid"], columns["pValue"], out=np.zeros_like(spend), where=columns["pValue"] > 0)
    done = (columns["isEnd"] > 0) | (np.arange(STEPS) == STEPS - 1)
    return Log(
        period.astype(int), advertiser.astype(int), category.astype(int), budget, target_cpa, states, multiplier,
        columns["conversionAction"], columns["exposed_value"], remaining, spend.sum(1), done, repairs,
    )  # fmt: skip


def summed(file):
    """The rows of a traffic file, added up over each (period, advertiser, step): columns, and what was repaired.

    `cost` is the price of a slot, also where nothing was shown: what was paid is cost x exposed. A row in which a number is
    missing, as in the public periods 9, 13 and 27, is left out. The numbers of opportunities (pvIndex) are not looked at: they
    begin again with every step in the simulator's own files, and do not in the public ones.
    """
    import pyarrow as pa

    keys, parts, left_out, first = [*WHO, "timeStepIndex", *FIXED, "remainingBudget", "isEnd"], [], 0, {}

    def add_up(columns):
        names = (*ADDED, "spend", "exposed_value", "volume")
        table = pa.table(columns).group_by(keys, use_threads=False).aggregate([(name, "sum") for name in names])
        return table.rename_columns([name.removesuffix("_sum") for name in table.column_names])

    for row, columns in batches(file, TRAFFIC):
        check(file, row, columns, TRAFFIC)
        if (lacking := np.isnan(list(columns.values()))).any():
            rows = np.flatnonzero(lacking.any(0))
            left_out += len(rows)
            who = np.stack([columns[name][rows] for name in WHO], 1)
            for (period, advertiser), i in zip(*np.unique(who, axis=0, return_index=True), strict=True):
                first.setdefault((period, advertiser), (row + rows[i], list(columns)[np.argmax(lacking[:, rows[i]])]))
            columns = {name: column[~lacking.any(0)] for name, column in columns.items()}
        paid, shown = columns["cost"] * columns["isExposed"], columns["pValue"] * columns["isExposed"]
        parts.append(add_up(columns | {"spend": paid, "exposed_value": shown, "volume": np.ones(len(paid))}))
    table = add_up(pa.concat_tables(parts)).sort_by([(key, "ascending") for key in keys])
    columns = {name: table[name].to_numpy() for name in table.column_names}
    for (period, advertiser), (row, name) in first.items():
        known = (columns[WHO[0]] == period) & (columns[WHO[1]] == advertiser)
        if not known.any() and np.isfinite([period, advertiser]).all():
            raise ValueError(
                f"{file}, row {row}, {name}: expected a number, got none; so it is in every row of {named(period, advertiser)}"
            )
    again = np.all([np.diff(columns[name]) == 0 for name in keys[:3]], 0)
    if again.any():
        i = int(np.argmax(again))
        name = next(name for name in keys[3:] if columns[name][i] != columns[name][i + 1])
        raise ValueError(
            f"{file}, {name}: {named(*(columns[key][i] for key in WHO))}: expected one value in step "
            f"{columns['timeStepIndex'][i]:g}, got {columns[name][i]:g} and {columns[name][i + 1]:g}"
        )
    return columns, {"rows without a number, left out": left_out} if left_out else {}


def convert(log):
    """A Log as the fourteen columns of a trajectory log, numbers as plain text has them: {name: list of K x 48}."""
    days = (log.period, log.advertiser, log.category, log.budget, log.target_cpa, log.spend, log.conversions.sum(1))
    steps = (np.arange(STEPS), log.multiplier, log.conversions, log.exposed_value)
    numbers = [np.broadcast_to(x, log.done.shape).astype(float) for x in (*(day[:, None] for day in days), *steps)]
    flat = [column.reshape(-1).tolist() for column in (*numbers, log.done.astype(int))]
    states = [str(tuple(row)) for row in log.states.reshape(-1, len(STATE)).tolist()]
    after = [None if end else state for end, state in zip(flat[-1], [*states[1:], None], strict=True)]
    return dict(zip(TRAJECTORIES, (*flat[:8], states, *flat[8:], after), strict=True))


def write(path, log):
    """Write a Log as a trajectory log, all or nothing: .csv, .csv.gz or .parquet, by the path's name."""
    import pyarrow as pa
    from pyarrow import parquet

    path = Path(path).expanduser()
    if not path.name.endswith(KINDS):
        raise ValueError(f"{path}: expected a path that ends with {', '.join(KINDS)}")
    if path.exists():
        raise FileExistsError(f"{path}: is there already; move it away, or choose another path")
    columns = convert(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        if path.name.endswith(".parquet"):
            parquet.write_table(pa.table(columns), partial)
        else:
            with (gzip.open if path.name.endswith(".gz") else open)(partial, "wt", encoding="utf-8", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(columns)
                rows.writerows(zip(*columns.values(), strict=True))
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
