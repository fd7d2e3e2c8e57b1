"""Bid shading for first-price auctions, learned from win and loss notices and kept in a SQLite file
that all processes of a server share and a restart finds again.

A bid that was sent is open until its notice comes. A bid without a notice counts as lost once it
expires: exchanges that report wins alone exist, and a loss makes later bids higher, never lower.
The estimator is `market.win_curve`; here are its counts, a campaign each.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decisionllm.bidding.journal.sqlite_files import open_sidecar, transaction
from decisionllm.bidding.market.win_curve import WinCounts, WinCurve, bucket_numbers, fit_win_curve

WAIT = 0.05  # seconds for the lock that other processes hold for some microseconds
EXPIRE_BATCH = 100  # most expired bids that one call counts
REFRESH = 1.0  # seconds between two fits of a campaign
MAX_AUCTIONS = 10_000.0  # auctions of a campaign; beyond it all of its counts are halved
MAX_CURVES = 10_000  # campaigns whose curve is in memory
SCHEMA = """
CREATE TABLE IF NOT EXISTS sent (id TEXT PRIMARY KEY, campaign TEXT NOT NULL, price REAL NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sent_expiry ON sent (expires);
CREATE TABLE IF NOT EXISTS counts (  -- see win_curve.WinCounts
    campaign TEXT NOT NULL,
    bucket INTEGER NOT NULL,
    lost REAL NOT NULL DEFAULT 0,
    won REAL NOT NULL DEFAULT 0,
    least REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (campaign, bucket)
) WITHOUT ROWID;
"""
COUNT = {
    column: f"INSERT INTO counts (campaign, bucket, {column}) VALUES (?, ?, 1)"
    f" ON CONFLICT DO UPDATE SET {column} = {column} + 1"
    for column in ("lost", "won", "least")
}
logger = logging.getLogger("decisionllm.bidding.server")


@dataclass(frozen=True)
class FittedCurve:
    """The curve of a campaign, None where too little is known, and when it was made."""

    curve: WinCurve | None
    at: float  # time.monotonic()


class BidShading:
    """Lowers first-price bids to what notices show to be enough.

    A bid is never raised, and never below the floor; where too little is known, or the file cannot
    be read, it stays as it was. A fault of the file is logged and fails no request.

    Args:
        path: of the file, created if there is none; `:memory:` is shared with nobody.
        expiry: seconds after which a bid without a notice counts as lost.

    Raises:
        ValueError: the file cannot be written or is none of ours.
    """

    def __init__(self, path: str | Path = ":memory:", *, expiry: float) -> None:
        self.path = path
        self.expiry = expiry
        self.lock = threading.Lock()
        self.fitted: dict[str, FittedCurve] = {}
        self.fault = ""  # the last that was logged
        try:
            self.file = open_sidecar(path, SCHEMA, wait=WAIT)
        except sqlite3.Error as error:
            raise ValueError(
                f"shading: {path}: expected a file of ours: {error}; remove the file, and it is"
                " learned again, or take shading=false"
            ) from error

    def bid(self, campaign: str, worth: float, *, most: float, floor: float) -> float:
        """Return the shaded bid for an impression.

        Args:
            campaign: its id.
            worth: multiplier x value, currency.
            most: the bid without shading, currency.
            floor: of the exchange, currency.

        Returns:
            Currency, at most `most`, and not below `floor` unless `most` is.
        """
        curve = self._curve(campaign)
        if curve is None:
            return most
        return min(curve.best_bid(worth, most=most, floor=floor), most)

    def record_sent(self, campaign: str, ids: Sequence[str], prices: Sequence[float]) -> None:
        """Keep bids whose results are awaited. prices: currency."""
        expires = time.time() + self.expiry
        rows = [(id, campaign, price, expires) for id, price in zip(ids, prices, strict=True)]
        try:
            with self.lock, transaction(self.file):
                self.file.executemany("INSERT OR IGNORE INTO sent VALUES (?, ?, ?, ?)", rows)
                self._count_expired()
        except sqlite3.Error as error:
            self._report_failure(error)

    def settle(self, id: str, *, won: bool, least: float | None) -> None:
        """Count the result of a bid. Unknown and settled bids are ignored.

        Args:
            id: of the bid.
            won: whether it won.
            least: the least price that would have won, currency; None: unknown. One that
                contradicts the result is not believed.
        """
        try:
            with self.lock:
                # anybody may send notices: those of unknown ids do not take the lock for writing
                query = "SELECT 1 FROM sent WHERE id = ?"
                if self.file.execute(query, (id,)).fetchone() is None:
                    return
                with transaction(self.file):
                    self._count(id, won, least)
        except sqlite3.Error as error:
            self._report_failure(error)

    def _count(self, id: str, won: bool, least: float | None) -> None:
        """Count the result of a bid, unless another process did. See `settle`."""
        query = "DELETE FROM sent WHERE id = ? RETURNING campaign, price"
        row = self.file.execute(query, (id,)).fetchone()
        if row is None:
            return
        campaign, price = row
        if least is not None and is_plausible(price, won, least):
            self.file.execute(COUNT["least"], (campaign, bucket_number(least)))
        else:
            column = "won" if won else "lost"
            self.file.execute(COUNT[column], (campaign, bucket_number(price)))

    def _count_expired(self) -> None:
        """Count bids that have expired as lost."""
        query = (
            "DELETE FROM sent WHERE id IN (SELECT id FROM sent WHERE expires <= ? LIMIT ?)"
            " RETURNING campaign, price"
        )
        for campaign, price in self.file.execute(query, (time.time(), EXPIRE_BATCH)).fetchall():
            self.file.execute(COUNT["lost"], (campaign, bucket_number(price)))

    def _curve(self, campaign: str) -> WinCurve | None:
        """The curve of a campaign, at most REFRESH seconds old."""
        now = time.monotonic()
        cached = self.fitted.get(campaign)
        if cached is not None and now - cached.at < REFRESH:
            return cached.curve
        curve = None
        try:
            curve = fit_win_curve(self._counts(campaign))
        except sqlite3.Error as error:
            self._report_failure(error)
        if len(self.fitted) >= MAX_CURVES:
            self.fitted.clear()
        self.fitted[campaign] = FittedCurve(curve, now)
        return curve

    def _counts(self, campaign: str) -> WinCounts:
        query = "SELECT bucket, lost, won, least FROM counts WHERE campaign = ? ORDER BY bucket"
        with self.lock:
            rows = self.file.execute(query, (campaign,)).fetchall()
        numbers, lost, won, least = np.array(rows, float).reshape(-1, 4).T
        counts = WinCounts(buckets=numbers.astype(int), lost=lost, won=won, least=least)
        if counts.auctions > MAX_AUCTIONS:
            halve = "UPDATE counts SET lost = lost / 2, won = won / 2, least = least / 2"
            with self.lock, transaction(self.file):
                self.file.execute(f"{halve} WHERE campaign = ?", (campaign,))
        return counts

    def _report_failure(self, error: sqlite3.Error) -> None:
        """Log a fault of the file, once until another one comes."""
        if str(error) != self.fault:
            logger.warning("shading %s: %s; bids may not be shaded", self.path, error)
            self.fault = str(error)

    def close(self) -> None:
        with self.lock:
            self.file.close()


def bucket_number(price: float) -> int:
    return int(bucket_numbers(price))


def is_plausible(price: float, won: bool, least: float) -> bool:
    """Return whether a least winning price can be: a bid at or above it wins. A tie may be lost."""
    if not 0 < least < np.inf:
        return False
    return least <= price * (1 + 1e-9) if won else least >= price * (1 - 1e-9)
