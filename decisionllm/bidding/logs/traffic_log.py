"""Traffic logs of AuctionNet: a row for each opportunity and advertiser.

A file is streamed, and only the sums of each advertiser's step are kept. pyarrow on one thread adds
rows in their order, so that a log gives the same bits everywhere; polars (streaming) does not.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.bidding.logs.auctionnet_columns import (
    CAMPAIGN_KEY,
    COLUMN_BY_FIELD,
    FIXED_COLUMNS,
    TRAFFIC,
    Columns,
    read_blocks,
)
from decisionllm.bidding.logs.auctionnet_log import (
    WHICH_CAMPAIGN,
    Log,
    read_constants,
    refuse_rises,
    sort_whole_days,
)
from decisionllm.bidding.market.campaigns import STATE, STEPS, Campaigns
from decisionllm.schema import raise_for_first, row_changes

if TYPE_CHECKING:
    import pyarrow as pa

# summed over the opportunities of a step
SUMMED_COLUMNS = ("bid", "leastWinningCost", "pValue", "conversionAction", "xi")


def read_traffic(file: Path) -> Log:
    """A traffic file: sums over each advertiser's step, then the state numbers of Campaigns.

    A step's spend is the fall of the logged budget, in the last step its costs. Steps where the two
    differ are counted as repairs.
    """
    sums, repairs = sum_traffic(file)
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


def sum_traffic(file: Path) -> tuple[Columns, dict[str, int]]:
    """Sum a traffic file over each (period, advertiser, step). Returns columns, and repairs.

    `cost` is the price of a slot, exposed or not: the payment is cost x exposed. A row without one
    of its numbers, as in the public periods 9, 13 and 27, is left out. pvIndex only shows rows that
    repeat: it restarts with every step in the simulator's own files, and not in the public ones.
    """
    import pyarrow as pa

    keys = [*CAMPAIGN_KEY, "timeStepIndex", *FIXED_COLUMNS, "remainingBudget", "isEnd"]
    parts = []
    left_out = [np.empty((0, 4))]  # period, advertiser, row and number of the column that lacks
    for row, columns in read_blocks(file, TRAFFIC, missing=True):
        is_missing = np.isnan(list(columns.values()))  # (columns, n)
        rows = np.flatnonzero(is_missing.any(0))
        if len(rows):
            campaigns = [columns[name][rows] for name in CAMPAIGN_KEY]
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
    again = ~row_changes(*campaign_step)[1:]
    what = WHICH_CAMPAIGN + "expected one value in step {:g}, got {:g} and {:g}"
    for name in keys[3:]:
        column = sums[name]
        wrong = again & (column[1:] != column[:-1])
        raise_for_first(f"{file}, {name}: ", wrong, what, *campaign_step, column, column[1:])


def refuse_repeated_rows(file: Path, sums: Columns) -> None:
    """Raise a ValueError if a step of a campaign has more rows than its pvIndex has values: some
    opportunity is there twice, and so are its costs and conversions.
    """
    first, last, rows = sums["first_index"], sums["last_index"], sums["volume"]
    what = WHICH_CAMPAIGN + "expected one row for each pvIndex of step {:g}, got {:g} rows"
    what += " with pvIndex {:g} to {:g}; remove the rows that repeat"
    step = [sums[name] for name in (*CAMPAIGN_KEY, "timeStepIndex")]
    raise_for_first(f"{file}: ", rows > last - first + 1, what, *step, rows, first, last)


def refuse_empty_campaigns(file: Path, sums: Columns, incomplete: np.ndarray) -> None:
    """Raise a ValueError if every row of a campaign lacks a number.

    incomplete: (n, 4) period, advertiser, row, and number of the column, of the rows that lack one.
    """
    names = [name for name, check in TRAFFIC.items() if check]
    complete_campaigns = set(zip(*(sums[name].tolist() for name in CAMPAIGN_KEY), strict=True))
    _, first = np.unique(incomplete[:, :2], axis=0, return_index=True)
    for period, advertiser, row, column in incomplete[first].tolist():
        has_keys = np.isfinite([period, advertiser]).all()
        if has_keys and (period, advertiser) not in complete_campaigns:
            every = WHICH_CAMPAIGN.format(period, advertiser).rstrip(": ")
            what = f"expected a number, got none; so it is in every row of {every}"
            raise ValueError(f"{file}, row {row:.0f}, {names[int(column)]}: {what}")
