"""Chance that a first-price bid wins, fitted to the results of earlier bids, and the bid with the
highest expected surplus.

In a first-price auction the winner pays its own bid, so that a bid of what an impression is worth
gains nothing. The best bid b maximises (worth - b) x P(win | b). P is an isotonic regression of the
share of wins by price: a higher bid is never less likely to win. The worth of an impression to a
campaign that shall spend its budget is its bid multiplier x value, as in a second-price auction.
Source: the objective is that of Zhou et al., "An Efficient Deep Distribution Network for Bid
    Shading in First-Price Auctions" (KDD 2021, arXiv 2107.06650), section 3; the fit is the
    pooling of adjacent violators of Ayer et al. (1955), by scipy.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

STEP = 1.05  # upper price of a bucket over its lower one
# shares of a count that its bucket and its two neighbours on each side have: binomial
KERNEL = np.array([1, 4, 6, 4, 1]) / 16
PRIOR = 1.0  # auctions lost in each bucket before anything is known, so that few wins count less
LEAST = 100.0  # auctions below which nothing is concluded
SMALLEST, LARGEST = 1e-9, 1e9  # currency; prices beyond are in the last buckets


def bucket_numbers(prices: ArrayLike) -> np.ndarray:
    """The number of the bucket of each price, int: 1.0 -> 0, 1.05 -> 1, 0.99 -> -1."""
    within = np.clip(prices, SMALLEST, LARGEST)
    # a price on an edge is in the bucket above it, in spite of rounding
    numbers = np.floor(np.log(within) / math.log(STEP) + 1e-9)
    return np.asarray(numbers, int)


@dataclass(frozen=True)
class WinCounts:
    """Results of auctions by bucket of a price. Counts may be fractions: old ones count less.

    Attributes:
        buckets: (K,) int, in rising order, see `bucket_numbers`.
        lost: (K,) auctions that a bid of this bucket lost, where nothing more is known.
        won: (K,) auctions that a bid of this bucket won, where nothing more is known.
        least: (K,) auctions whose least winning price lies in this bucket, won or lost.
    """

    buckets: np.ndarray
    lost: np.ndarray
    won: np.ndarray
    least: np.ndarray

    @cached_property
    def auctions(self) -> float:
        """Number of auctions."""
        return float(self.lost.sum() + self.won.sum() + self.least.sum())


@dataclass(frozen=True)
class WinCurve:
    """The chance of winning by price, linear in the logarithm of the price between its points.

    Attributes:
        prices: (G,) currency, rising; the upper prices of the buckets that have results.
        chances: (G,) not falling, 0 to 1.
    """

    prices: np.ndarray
    chances: np.ndarray

    def best_bid(self, worth: float, *, most: float, floor: float = 0.0) -> float:
        """The bid with the highest expected surplus.

        Args:
            worth: value of a win, currency.
            most: the highest bid that may be made, currency; it is made where nothing better is
                known.
            floor: the lowest bid that counts, currency.

        Returns:
            Currency, from `floor` to `most`; `most` if it is not above `floor`, or if no lower bid
            has ever won.
        """
        if not 0 <= floor < most <= worth < math.inf:
            return most
        between = self.prices[(self.prices > floor) & (self.prices < most)]
        ends = [floor, most] if floor > 0 else [most]
        bids = np.append(between, ends)
        surplus = (worth - bids) * self.chance(bids)
        if not surplus[:-1].any():  # no lower bid has ever won
            return most
        return float(bids[surplus.argmax()])

    def chance(self, bids: np.ndarray) -> np.ndarray:
        """The chance that bids (n,) above 0 win, (n,); 0 below the lowest point."""
        log_prices = np.log(self.prices)
        return np.asarray(np.interp(np.log(bids), log_prices, self.chances, left=0.0))


def fit_win_curve(counts: WinCounts) -> WinCurve | None:
    """The curve of these results; None: there are too few of them."""
    if counts.auctions < LEAST:
        return None
    margin = len(KERNEL) // 2
    first = int(counts.buckets[0]) - margin
    size = int(counts.buckets[-1]) + margin + 1 - first

    def smooth(column: np.ndarray) -> np.ndarray:
        """Smooth (K,) numbers of the buckets with results to (size,) numbers of all buckets."""
        dense = np.zeros(size)
        dense[counts.buckets - first] = column
        return np.convolve(dense, KERNEL, mode="same")

    least = smooth(counts.least)
    # an auction whose least price is known tells of every price whether it would have won
    auctions = smooth(counts.lost) + smooth(counts.won) + least.sum()
    wins = smooth(counts.won) + least.cumsum()
    seen = np.flatnonzero(auctions > 0)
    weights = auctions[seen] + PRIOR
    chances = isotonic_regression(wins[seen] / weights, weights=weights).x
    prices = STEP ** (first + seen + 1.0)
    return WinCurve(prices, np.clip(chances, 0.0, 1.0))


def count_auctions(prices: np.ndarray, won: np.ndarray, least: np.ndarray) -> WinCounts:
    """The counts of n auctions.

    Args:
        prices: (n,) bids, currency.
        won: (n,) bool.
        least: (n,) least prices that would have won, currency; NaN: unknown.
    """
    has_least = np.isfinite(least)
    bucket_prices = np.where(has_least, least, prices)
    numbers, row = np.unique(bucket_numbers(bucket_prices), return_inverse=True)
    size = len(numbers)
    return WinCounts(
        buckets=numbers,
        lost=np.bincount(row[~has_least & ~won], minlength=size).astype(float),
        won=np.bincount(row[~has_least & won], minlength=size).astype(float),
        least=np.bincount(row[has_least], minlength=size).astype(float),
    )
