"""AuctionNet's logs: an episode is one advertiser's day of 48 steps, the action its bid multiplier, the reward its conversions.

Two official schemas are read. A traffic log has a row for each opportunity and advertiser; it is streamed, and nothing is kept
but the sums of each advertiser's step. A trajectory log has a row for each advertiser's step, with the sixteen state numbers as
the text of a tuple. An episode ends with the first step that began with the budget used up (`until=done`, that step included),
or with the day (`until=day`). What a step after the last one would have shown is in no log.
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

from decisionllm.datasets.store import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec
from decisionllm.worlds.campaign import FACTS, STATE, STEPS, Campaigns, score

SMALLEST = 0.1  # currency: with less left, an advertiser no longer bids
WHO = ("deliveryPeriodIndex", "advertiserNumber")
FIXED = ("advertiserCategoryIndex", "budget", "CPAConstraint")  # of an advertiser's whole day
KINDS = (".csv", ".csv.gz", ".parquet")
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


@register("dataset", "auction", text="${text}")
def load(
    *,
    path: str = "",
    periods: str = "",
    text: str = "none",
    facts: str = "none",
    returns: str = "conversions",
    features: str = "repaired",
    until: str = "done",
) -> Source:
    """Advertisers' days as episodes; the days of one period share their group.

    path: a file, a folder or a pattern: .csv, .csv.gz or .parquet, of either schema. periods: such as `0-6` or `7,8`; empty: all.
    text: `none`; `constant` says what is asked of everybody; `informative` also the advertiser's budget, limit and category;
    `shuffled` is `informative` with the texts dealt to other advertisers of the period.
    facts: `numbers` shows campaign.FACTS behind the sixteen state numbers.
    returns: what a step pays. `conversions`, as they were counted; `value`, those to be expected of what was shown, with less
    noise; `score`, what the step adds to the day's score of the expected conversions, so that the limit is felt. An
    evaluation always scores the conversions that were counted.
    features: see Campaigns; trajectory logs hold the repaired ones. until: see above.
    """
    for name, value, known in (
        ("text", text, ("none", "constant", "informative", "shuffled")),
        ("facts", facts, ("none", "numbers")),
        ("returns", returns, ("conversions", "value", "score")),
        ("features", features, ("repaired", "original")),
        ("until", until, ("done", "day")),
    ):
        if value not in known:
            raise ValueError(f"dataset.{name}: expected one of {', '.join(known)}, got {value!r}")
    log = read(path, periods=periods, features=features)
    shown, paid = observations(log, facts).astype(np.float32), rewards(log, returns).astype(np.float32)
    actions = log.multiplier[:, :, None].astype(np.float32)
    acted = (log.remaining >= SMALLEST) & (log.states[:, :, STATE.index("value now")] > 0)
    ends = np.where(log.done.any(1), log.done.argmax(1) + 1, STEPS) if until == "done" else np.full(len(log.period), STEPS)
    tasks = texts(log, text)

    def episode(k):
        n = ends[k]
        return Episode(shown[k, :n], actions[k, :n], paid[k, :n], task=tasks[k], group=int(log.period[k]), acted=acted[k, :n])

    high = max(float(actions[k, : ends[k]].max()) for k in range(len(ends))) or 1.0
    spec = Spec(observation_dim=shown.shape[2], action_dim=1, horizon=STEPS, low=(0.0,), high=(high,))
    table = [
        [int(p), int(a), int(c), float(b), float(t)]
        for p, a, c, b, t in zip(log.period, log.advertiser, log.category, log.budget, log.target_cpa, strict=True)
    ]
    info = {
        "name": f"auction@{stem(path)}-periods-{spelled(log.period)}", "env": "auction", "text": text, "facts": facts,
        "returns": returns, "features": features, "until": until, "path": path, "periods": spelled(log.period),
        "repairs": log.repairs, "campaigns": table,
    }  # fmt: skip
    return Source(spec, map(episode, range(len(ends))), info)


def generate(*, periods, features):
    """A Log of our own market: the place for it."""
    raise ValueError("dataset.path: give the log, a file, a folder or a pattern of AuctionNet's traffic or trajectory files")


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


def observations(log, facts="none"):
    """(K, T, 16), or (K, T, 21) with the facts, which are of what came before the step."""
    if facts == "none":
        return log.states
    before = lambda x: np.cumsum(x, 1) - x  # noqa: E731
    limit = log.target_cpa[:, None]
    spend = log.budget[:, None] - log.remaining
    columns = (np.log(log.budget)[:, None], limit, spend / limit, before(log.conversions), before(log.exposed_value))
    assert len(columns) == len(FACTS)
    return np.concatenate([log.states, np.stack(np.broadcast_arrays(*columns), 2)], 2)


def rewards(log, returns):
    """What each step pays: (K, T). See `load`."""
    if returns == "score":
        spend = np.append(log.budget[:, None] - log.remaining[:, 1:], log.spend[:, None], 1)  # after each step
        return np.diff(score(np.cumsum(log.exposed_value, 1), spend, log.target_cpa[:, None]), axis=1, prepend=0)
    return log.conversions if returns == "conversions" else log.exposed_value


def texts(log, text):
    """The task of each advertiser's day: a list of K texts."""
    if text == "none":
        return [""] * len(log.period)
    if text == "constant":
        return [task_text()] * len(log.period)
    told = [task_text(*campaign) for campaign in zip(log.budget, log.target_cpa, log.category, strict=True)]
    if text == "shuffled":
        for period in np.unique(log.period):
            rows = np.flatnonzero(log.period == period)
            dealt = [told[k] for k in np.random.default_rng(int(period)).permutation(rows)]
            for k, words in zip(rows, dealt, strict=True):
                told[k] = words
    return told


def task_text(budget=None, target_cpa=None, category=None):
    """The task in words. budget: currency; target_cpa: currency a conversion; without them, what is asked of everybody."""
    goal = f"Bid for impressions over one day of {STEPS} steps. Get as many conversions as you can within"
    if budget is None:
        return f"Auction. {goal} a budget, at a cost limit for each."
    size = "small" if budget < 2500 else "medium" if budget < 3500 else "large"  # thirds of AuctionNet's 48 advertisers
    limit = "strict" if target_cpa < 85 else "moderate" if target_cpa < 105 else "loose"
    return (
        f"Auction, advertiser of category {int(category)}. {goal} a {size} budget of {budget:g}, "
        f"at a {limit} cost limit of {target_cpa:g} for each."
    )


def files(*, path="", **options):
    """What `load` would read with these options."""
    if not path:
        return []
    given = Path(path).expanduser()
    if given.is_dir():
        found = [file for file in given.iterdir() if file.name.endswith(KINDS)]
    else:
        found = [given] if given.is_file() else [Path(name) for name in glob(str(given))]
    if not found:
        raise FileNotFoundError(f"{path}: no log there; expected .csv, .csv.gz or .parquet: a file, a folder or a pattern")
    return sorted(found)


def stem(path):
    """A short name for where a log came from: a file's own, or its folder's."""
    given = Path(path).expanduser()
    return given.name.split(".")[0] if given.is_file() else (given if given.is_dir() else given.parent).resolve().name


def spelled(periods):
    """[0, 1, 2, 5] -> "0-2,5", which `chosen` reads."""
    known = np.unique(periods)
    runs = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def chosen(periods):
    """ "0-2,5" -> [0, 1, 2, 5]; "" -> None, which stands for all."""
    ranges = [re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part) for part in str(periods).split(",")] if str(periods) else []
    if not all(ranges):
        raise ValueError(f"dataset.periods: expected such as 0-6 or 7,8, or nothing for all, got {periods!r}")
    return sorted({p for m in ranges if m for p in range(int(m[1]), int(m[2] or m[1]) + 1)}) or None


def read(path, *, periods="", features="repaired"):
    """A Log of the files there, or of our own market. A period must be in one file, and whole."""
    if not path:
        return generate(periods=periods, features=features)
    wanted, logs, seen = chosen(periods), [], {}
    for file in files(path=path):
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
    import pyarrow as pa
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
            pieces = parquet.ParquetFile(file).iter_batches(batch_size=1 << 17, columns=list(types))
        else:
            pieces = arrow_csv.open_csv(
                file,
                read_options=arrow_csv.ReadOptions(block_size=1 << 24),
                convert_options=arrow_csv.ConvertOptions(column_types=types, include_columns=list(types)),
            )
        for piece in pieces:
            columns = {name: piece.column(name).cast(type) for name, type in types.items()}
            numbers = {n: c if types[n] == pa.string() else c.to_numpy(zero_copy_only=False) for n, c in columns.items()}
            yield row, numbers
            row += piece.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        names = header(file)
        told = re.sub(r"In CSV column #(\d+)", lambda m: f"column {names[int(m[1])]}", str(error))
        raise ValueError(f"{file}, after row {row - 1}: not a readable log ({told}); mend it or fetch it again") from error
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
    return Log(
        period.astype(int), advertiser.astype(int), category.astype(int), budget, target_cpa, states, columns["action"],
        columns["reward"], columns["reward_continuous"], budget[:, None] * states[:, :, STATE.index("budget left")], spend,
        columns["done"] > 0, {},
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
            read_options=arrow_csv.ReadOptions(column_names=names),
            convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.float64())),
        )
        states = np.stack([table[name].to_numpy() for name in names], 1)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file}, state, rows {row} to {row + len(bare) - 1}: expected numbers ({error})") from error
    wrong = ~(states >= -1e-9) | np.isinf(states)
    if wrong.any():
        at = int(np.argmax(wrong.any(1)))
        raise ValueError(f"{file}, row {row + at}, state: expected {len(STATE)} numbers from 0, got {texts[at]}")
    return states


def whole_days(file, columns, *, numbered=True):
    """The order of rows by period and advertiser, whose steps must stand there as 0, 1, .. 47. numbered: a row is one of the file."""
    period, advertiser, step = (columns[name] for name in (*WHO, "timeStepIndex"))
    order = np.lexsort((advertiser, period))
    who = np.stack([period, advertiser], 1)[order]
    first = np.flatnonzero(np.append(True, (np.diff(who, axis=0) != 0).any(1)))
    lengths = np.diff(np.append(first, len(who)))
    expected = np.arange(len(who)) - np.repeat(first, lengths)
    if (step[order] != expected).any():
        at = int(np.argmax(step[order] != expected))
        place, whose = f", row {order[at] + 1}" if numbered else "", "period {:g}, advertiser {:g}".format(*who[at])
        raise ValueError(f"{file}{place}, timeStepIndex: {whose}: expected step {expected[at]}, got {step[order][at]:g}")
    if (lengths != STEPS).any() or not len(lengths):
        at = int(np.argmax(lengths != STEPS))
        whose = "period {:g}, advertiser {:g}".format(*who[first[at]])
        raise ValueError(f"{file}: {whose} has {lengths[at]} steps, expected {STEPS}; the log is cut short")
    return order


def constants(file, columns, names):
    """Columns (K, T) that are the same over an advertiser's day -> (K,) each."""
    for name in names:
        differs = columns[name] != columns[name][:, :1]
        if differs.any():
            k, t = np.argwhere(differs)[0]
            whose = "period {:g}, advertiser {:g}".format(*(columns[key][k, t] for key in WHO))
            raise ValueError(
                f"{file}, {name}: {whose}: expected one value for the day, got {columns[name][k, 0]:g} and, "
                f"in step {t}, {columns[name][k, t]:g}"
            )
    return [columns[name][:, 0] for name in names]


def of_traffic(file, features):
    """A Log of a traffic file: sums over each advertiser's step, then the state numbers as Campaigns shows them live.

    What a step cost is what the logged budget fell by, and in the last step its costs. Steps where the two differ are counted.
    """
    columns, repairs = summed(file)
    order = whole_days(file, columns, numbered=False)
    columns = {name: column[order].reshape(-1, STEPS) for name, column in columns.items()}
    period, advertiser, category, budget, target_cpa = constants(file, columns, (*WHO, *FIXED))
    remaining, volume, spend = columns["remainingBudget"], columns["volume"], columns["spend"]
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
        if not ((columns[WHO[0]] == period) & (columns[WHO[1]] == advertiser)).any():
            raise ValueError(
                f"{file}, row {row}, {name}: expected a number, got none; every row of period {period:g}, "
                f"advertiser {advertiser:g} lacks one"
            )
    again = np.all([np.diff(columns[name]) == 0 for name in keys[:3]], 0)
    if again.any():
        i = int(np.argmax(again))
        name = next(name for name in keys[3:] if columns[name][i] != columns[name][i + 1])
        raise ValueError(
            f"{file}, {name}: period {columns[WHO[0]][i]:g}, advertiser {columns[WHO[1]][i]:g}: expected one value in step "
            f"{columns['timeStepIndex'][i]:g}, got {columns[name][i]:g} and {columns[name][i + 1]:g}"
        )
    return columns, {"rows without a number, left out": left_out} if left_out else {}


def convert(log):
    """A Log as the fourteen columns of a trajectory log: {name: list of K x 48}. Source: `train_data_generator.py`."""
    day = lambda column: np.repeat(column, STEPS).tolist()  # noqa: E731
    states = [str(tuple(row)) for row in log.states.reshape(-1, len(STATE)).tolist()]
    done = log.done.reshape(-1)
    fixed = (log.period, log.advertiser, log.category, log.budget, log.target_cpa, log.spend, log.conversions.sum(1))
    columns = dict(zip(TRAJECTORIES, (day(column.astype(float)) for column in fixed[:5]), strict=False))
    return columns | {
        "realAllCost": day(log.spend), "realAllConversion": day(log.conversions.sum(1)),
        "timeStepIndex": np.tile(np.arange(STEPS, dtype=float), len(log.period)).tolist(), "state": states,
        "action": log.multiplier.reshape(-1).tolist(), "reward": log.conversions.reshape(-1).tolist(),
        "reward_continuous": log.exposed_value.reshape(-1).tolist(), "done": done.astype(int).tolist(),
        "next_state": [None if end else state for end, state in zip(done, [*states[1:], None], strict=True)],
    }  # fmt: skip


def save(path, store):
    """Write an auction's store as a trajectory log, all or nothing: .csv, .csv.gz or .parquet, by the path's name.

    The log is read again: a store has float32 and ends days early.
    """
    import pyarrow as pa
    from pyarrow import parquet

    path = Path(path).expanduser()
    if store.info.get("env") != "auction":
        raise ValueError(f"export=trajectories: expected an auction dataset, got {store.info['name']}")
    if not path.name.endswith(KINDS):
        raise ValueError(f"export=trajectories: expected a path that ends with {', '.join(KINDS)}, got {path}")
    if path.exists():
        raise FileExistsError(f"{path}: is there already; move it away, or choose another path")
    columns = convert(read(store.info["path"], periods=store.info["periods"]))
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
