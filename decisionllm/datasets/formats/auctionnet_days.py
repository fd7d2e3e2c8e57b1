"""Replayable days of AuctionNet's traffic logs, and of market prices of its published traffic."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from decisionllm.datasets.formats.auctionnet import ABOVE_0, CAMPAIGN, NUMBER, STEP, TRAFFIC, Schema, batches, header, log_files
from decisionllm.envs.auction import days
from decisionllm.envs.auction.campaign import STEPS
from decisionllm.envs.auction.market import PUBLISHED, scaled_traffic
from decisionllm.schema import differs

PRICES: Schema = {"timeStepIndex": STEP, "leastWinningCost": ABOVE_0}


def read_days(path: str | Path, *, prices: str) -> Iterator[days.Day]:
    """The replayable days of traffic logs, or of files of market prices of the published traffic, `..._7.parquet` for period 7.

    A price file has the columns timeStepIndex and leastWinningCost, a row an opportunity, in order. Of a traffic log all rows of a
    file are held at once. An opportunity that lacks a number or one of the 48 advertisers is left out.

    Args:
        path: a file, a folder or a pattern.
        prices: whose they are, for results.

    Raises:
        FileNotFoundError: no log at `path`.
        ValueError: a file is neither.
    """
    for file in log_files(path):
        names = set(header(file))
        if lacking := (TRAFFIC.keys() if "pValue" in names else PRICES.keys()) - names:
            wanted = "a traffic log or a file of market prices"
            raise ValueError(f"{file}: expected {wanted}, {', '.join(sorted(lacking))} not among its columns")
        try:
            yield from traffic_days(file, prices) if "pValue" in names else [price_day(file, prices)]
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(str(file)) else f"{file}: {error}") from error


def price_day(file: Path, prices: str) -> days.Day:
    """The published traffic of the period that the file's name ends with, at its prices."""
    if not (found := re.search(r"(\d+)\.\w+(\.gz)?$", file.name)):
        raise ValueError("expected a name that ends with the period's number, such as lwc_period_7.parquet")
    blocks = [columns for _, columns in batches(file, PRICES, missing=False)]
    step, price = (np.concatenate([block[name] for block in blocks]) for name in PRICES)
    if (np.diff(step) < 0).any():
        raise ValueError("timeStepIndex: expected steps in order")
    period, total = int(found[1]), PUBLISHED["opportunities"]
    market_prices = np.split(price, np.searchsorted(step, np.arange(1, STEPS)))
    return days.make(period, scaled_traffic(period, total), market_prices, prices=prices, total=total)


def traffic_days(file: Path, prices: str) -> Iterator[days.Day]:
    """The days of a traffic log, with the values of its opportunities."""
    order = (CAMPAIGN[0], "timeStepIndex", "pvIndex", CAMPAIGN[1])
    schema: Schema = {name: TRAFFIC[name] or NUMBER for name in (*order, "pValue", "pValueSigma", "leastWinningCost")}
    blocks = [columns for _, columns in batches(file, schema, missing=True)]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in schema}
    rows = np.flatnonzero(np.isfinite(list(columns.values())).all(0))
    rows = rows[np.lexsort([columns[name][rows] for name in reversed(order)])]
    first = np.flatnonzero(differs(*(columns[name][rows] for name in order[:3])))
    whole = first[np.diff(np.append(first, len(rows))) == 48]  # opportunities, by their first row
    rows = rows[whole[:, None] + np.arange(48)]  # (n, N)
    if not len(rows) or (columns[CAMPAIGN[1]][rows] != np.arange(48)).any():
        raise ValueError("expected a row for each of the advertisers 0 .. 47 and each opportunity of a step, its pvIndex")
    period, step = (columns[name][rows[:, 0]] for name in order[:2])
    for number in np.unique(period):
        own = np.split(rows[period == number], np.searchsorted(step[period == number], np.arange(1, STEPS)))
        traffic = [(columns["pValue"][part], columns["pValueSigma"][part]) for part in own]
        yield days.make(int(number), traffic, [columns["leastWinningCost"][part[:, 0]] for part in own], prices=prices)
