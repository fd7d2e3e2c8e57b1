"""Replayable days of traffic: their market prices, and what each bid multiplier of a grid would
have cost and brought.

A folder holds one file for each day, `period_7.npz`, with the fields of Day. Training reads the
curves, evaluation the prices. The opportunities of the published traffic are made again from the
day's number; those of another traffic log are in the file.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from decisionllm.bidding.market.market import Market, Roster
from decisionllm.bidding.market.traffic import Traffic, scaled_traffic
from decisionllm.files import atomic, explain_errors
from decisionllm.schema import Json

FORMAT = "decisionllm-replay-1"
GRID = np.geomspace(8, 420, 160)  # bid multipliers, currency per conversion, 2.5 % apart
MAKE = "decisionllm data dataset=auction dataset.periods=11-51 export=replay:FOLDER"


@dataclass(frozen=True)
class Day:
    """One day of N = 48 advertisers, T = 48 steps, n opportunities, G multipliers.

    Attributes:
        period: its number.
        prices: name of the market that made the prices.
        total: nominal number of opportunities of the published traffic; 0: `values` and `sigmas`
            hold the traffic, or nothing where the day was inferred from trajectories.
        volume: (T,) int, opportunities of each step.
        market_price: (n,) currency, step after step.
        mean_value: (T, N) over a step's opportunities.
        cost: (T, N, G) float32, currency that the advertiser would have paid if it had held a
            multiplier of GRID through the step.
        value: (T, N, G) float32, the sum of the values of the opportunities it would have won.
        won: (T, N, G) float32, their number.
        values: (n, N) or (0, N) predicted conversion probabilities.
        sigmas: (n, N) or (0, N) float32, their standard deviations.
    """

    period: int
    prices: str
    total: int
    volume: np.ndarray
    market_price: np.ndarray
    mean_value: np.ndarray
    cost: np.ndarray
    value: np.ndarray
    won: np.ndarray
    values: np.ndarray
    sigmas: np.ndarray

    def split_by_step(self, rows: np.ndarray) -> list[np.ndarray]:
        """Split rows (n, ...) by step: T arrays (opportunities of the step, ...)."""
        return np.split(rows, np.cumsum(self.volume)[:-1])

    @property
    def mean_price(self) -> np.ndarray:
        """Mean price over each step's opportunities, (T,) currency; 0 where there are none."""
        prices = self.split_by_step(self.market_price)
        return np.array([price.sum() / max(len(price), 1) for price in prices])

    def traffic(self) -> Traffic:
        """Values and standard deviations of each step's opportunities, (n, N) each.

        Raises:
            ValueError: the day was inferred from a trajectory log, which has no opportunities.
        """
        if self.total:
            return scaled_traffic(self.period, self.total)
        if len(self.values) < len(self.market_price):
            raise ValueError(
                f"period {self.period}: expected the opportunities of a day, got none, since it was "
                "inferred from trajectories; replay days of a traffic log or of a market"
            )
        return zip(self.split_by_step(self.values), self.split_by_step(self.sigmas), strict=True)


def build_day(
    period: int,
    traffic: Traffic,
    market_prices: Iterable[np.ndarray],
    *,
    prices: str,
    total: int = 0,
) -> Day:
    """A day of this traffic at these market prices, (n,) currency for each step.

    Args:
        period: its number.
        traffic: as `Market` takes it.
        market_prices: least winning bid of each opportunity, for each step.
        prices: name of the market that made the prices.
        total: argument of `scaled_traffic` that makes this traffic; 0: it is another, and is kept.

    Raises:
        ValueError: the prices are not as many as the opportunities.
    """
    steps = []
    step_curves = []
    stored_rows = slice(0) if total else slice(None)
    for t, ((values, sigmas), step_prices) in enumerate(zip(traffic, market_prices, strict=True)):
        price = np.asarray(step_prices, np.float64)
        if len(price) != len(values):
            raise ValueError(
                f"expected {len(values)} market prices in step {t} of period {period},"
                f" got {len(price)}"
            )
        steps.append((values[stored_rows], sigmas[stored_rows].astype(np.float32), price))
        step_curves.append(multiplier_curves(values, price))
    values, sigmas, market_price = (np.concatenate(x) for x in zip(*steps, strict=True))
    cost, value, won, mean_value = (np.stack(x) for x in zip(*step_curves, strict=True))
    return Day(
        period=period,
        prices=prices,
        total=total,
        volume=np.array([len(price) for _, _, price in steps]),
        market_price=market_price,
        mean_value=mean_value,
        cost=cost,
        value=value,
        won=won,
        values=values,
        sigmas=sigmas,
    )


def multiplier_curves(values: np.ndarray, prices: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cost, value and number of the opportunities won with each multiplier of GRID, and the mean
    value.

    Args:
        values: (n, N).
        prices: (n,) currency. A multiplier wins where multiplier x value is at least the price.

    Returns:
        Three arrays (N, G) float32, and (N,) float64.
    """
    n, N = values.shape
    G = len(GRID)
    with np.errstate(divide="ignore"):
        least = np.searchsorted(GRID, prices[:, None] / values)  # (n, N), of a multiplier that wins
    cell = (least + np.arange(N) * (G + 1)).ravel()

    def total(weights: np.ndarray | None) -> np.ndarray:
        """Sums over the opportunities that each multiplier wins: (N, G) float32."""
        sums = np.bincount(cell, weights, N * (G + 1)).reshape(N, G + 1)
        return sums[:, :G].cumsum(1).astype(np.float32)

    mean = values.sum(0) / max(n, 1)
    return total(np.repeat(prices, N)), total(values.ravel()), total(None), mean


def play_day(period: int, roster: Callable[[], Roster], *, total: int, seed: int = 0) -> Day:
    """A day of our own market with these bidders."""
    played = Market(roster(), traffic=partial(scaled_traffic, total=total), seed=seed).play(period)
    return build_day(
        period,
        scaled_traffic(period, total),
        played.market_prices,
        prices="own market",
        total=total,
    )


def save_day(folder: str | Path, day: Day) -> Path:
    """Write a day into a folder, all or nothing. Returns its path."""
    path = Path(folder).expanduser() / f"period_{day.period}.npz"
    with atomic(path) as partial_path:
        np.savez(partial_path, format=FORMAT, **vars(day))
    return path


def find_day_files(
    folder: str | Path,
    periods: Sequence[int] = (),
    *,
    option: str = "days",
) -> dict[int, Path]:
    """The files of these days in a folder, by period; without periods, of all.

    option: the name of the folder in messages.

    Raises:
        FileNotFoundError: a day is not there.
    """
    files = list_day_files(folder)
    missing = [period for period in periods if period not in files]
    if missing or not files:
        first = missing[0] if missing else "*"
        existing = ", ".join(map(str, sorted(files))) or "none"
        raise FileNotFoundError(
            f"{option}: expected period_{first}.npz in {folder or 'a path'}, a folder of replay"
            f" days; there are periods {existing}; `{MAKE}` makes one"
        )
    return {period: files[period] for period in sorted(periods or files)}


def list_day_files(folder: str | Path) -> dict[int, Path]:
    """The files of all days in a folder, by period."""
    files = {}
    for file in Path(folder).expanduser().glob("period_*.npz"):
        number = file.stem.removeprefix("period_")
        if number.isdigit():
            files[int(number)] = file
    return files


def read_day(file: str | Path) -> Day:
    """A day that `save_day` wrote.

    Raises:
        ValueError: it is not such a file, or of another version.
    """
    again = f"make it again: {MAKE}"
    unreadable = f"{file}: not a readable day"
    with (
        explain_errors(unreadable, OSError, ValueError, EOFError, fix=again),
        np.load(file) as arrays,
    ):
        columns: Json = dict(arrays)
    got = str(columns.pop("format", "another"))
    if got != FORMAT or columns.keys() != {field.name for field in fields(Day)}:
        raise ValueError(f"{file}: expected format {FORMAT}, got {got}; {again}")
    columns["period"] = int(columns["period"])
    columns["prices"] = str(columns["prices"])
    columns["total"] = int(columns["total"])
    return Day(**columns)
