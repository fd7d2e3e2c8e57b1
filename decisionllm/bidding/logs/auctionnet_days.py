"""Replayable days of AuctionNet's traffic logs, of market prices of its published traffic, and days
inferred from its trajectory logs.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from decisionllm.bidding.logs import replay_days as days
from decisionllm.bidding.logs.auctionnet import read_trajectories
from decisionllm.bidding.logs.auctionnet_columns import (
    CAMPAIGN_KEY,
    NUMBER,
    PRICES,
    TRAFFIC,
    detect_kind,
    read_columns,
)
from decisionllm.bidding.logs.auctionnet_log import log_files
from decisionllm.bidding.logs.inferred_days import infer_days
from decisionllm.bidding.market.advertisers import PUBLISHED
from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.bidding.market.traffic import scaled_traffic
from decisionllm.schema import row_changes


def read_days(path: str | Path, *, prices: str) -> Iterator[days.Day]:
    """The replayable days of traffic logs, or of files of market prices of the published traffic,
    `..._7.parquet` for period 7; of trajectory logs the days that are inferred from each file.

    A price file has the columns timeStepIndex and leastWinningCost, a row an opportunity, in order.
    Of a traffic log all rows of a file are held at once. An opportunity that lacks a number or one
    of the 48 advertisers is left out.

    Args:
        path: a file, a folder or a pattern.
        prices: name of the market that made the prices, for results.

    Raises:
        FileNotFoundError: no log at `path`.
        ValueError: a file is none of these.
    """
    for file in log_files(path):
        kind = detect_kind(file, *READERS)
        try:
            yield from READERS[kind](file, prices)
        except ValueError as error:
            if str(error).startswith(str(file)):
                raise
            raise ValueError(f"{file}: {error}") from error


def read_price_days(file: Path, prices: str) -> Iterator[days.Day]:
    """The published traffic of the one period that the file's name ends with, at its prices."""
    match = re.search(r"(\d+)\.\w+(\.gz)?$", file.name)
    if not match:
        raise ValueError(
            "expected a name that ends with the period's number, such as lwc_period_7.parquet"
        )
    columns = read_columns(file, PRICES, missing=False)
    step = columns["timeStepIndex"]
    price = columns["leastWinningCost"]
    if (np.diff(step) < 0).any():
        raise ValueError("timeStepIndex: expected steps in order")
    period = int(match[1])
    total = PUBLISHED["opportunities"]
    market_prices = np.split(price, np.searchsorted(step, np.arange(1, STEPS)))
    traffic = scaled_traffic(period, total)
    yield days.build_day(period, traffic, market_prices, prices=prices, total=total)


def read_traffic_days(file: Path, prices: str) -> Iterator[days.Day]:
    """The days of a traffic log, with the values of its opportunities."""
    order = (CAMPAIGN_KEY[0], "timeStepIndex", "pvIndex", CAMPAIGN_KEY[1])
    names = (*order, "pValue", "pValueSigma", "leastWinningCost")
    columns = read_columns(file, {name: TRAFFIC[name] or NUMBER for name in names}, missing=True)
    rows = select_whole_opportunities(columns, order)  # (n, N)
    advertisers = columns[CAMPAIGN_KEY[1]][rows]
    if not len(rows) or (advertisers != np.arange(48)).any():
        opportunity = "each opportunity of a step, its pvIndex"
        raise ValueError(f"expected a row for each of the advertisers 0 .. 47 and {opportunity}")
    # the row of the first advertiser has the numbers that all of an opportunity share
    shared = rows[:, 0]
    period = columns[CAMPAIGN_KEY[0]][shared]
    step = columns["timeStepIndex"][shared]
    for number in np.unique(period):
        own = period == number
        begins = np.searchsorted(step[own], np.arange(1, STEPS))
        of_steps = np.split(rows[own], begins)
        traffic = [(columns["pValue"][some], columns["pValueSigma"][some]) for some in of_steps]
        market_prices = [columns["leastWinningCost"][some[:, 0]] for some in of_steps]
        yield days.build_day(int(number), traffic, market_prices, prices=prices)


def select_whole_opportunities(
    columns: dict[str, np.ndarray], order: tuple[str, ...]
) -> np.ndarray:
    """The rows of the opportunities that all 48 advertisers have a row of, (n, 48).

    Args:
        columns: the whole log.
        order: period, step and number of the opportunity, and the advertiser: the rows are sorted
            by these.
    """
    complete_rows = np.flatnonzero(np.isfinite(list(columns.values())).all(0))
    rows = complete_rows[np.lexsort([columns[name][complete_rows] for name in reversed(order)])]
    # the first row of each opportunity, and how many there are
    first = np.flatnonzero(row_changes(*(columns[name][rows] for name in order[:3])))
    count = np.diff(np.append(first, len(rows)))
    whole = first[count == 48]
    return np.asarray(rows[whole[:, None] + np.arange(48)])


def read_trajectory_days(file: Path, prices: str) -> Iterator[days.Day]:
    """The days that are inferred from a trajectory log."""
    return infer_days(read_trajectories(file), prices=prices)


READERS = {
    "file of market prices": read_price_days,
    "traffic log": read_traffic_days,
    "trajectory log": read_trajectory_days,
}
