"""Budget reserved by open bids, in a SQLite file that all processes of a server share and a
restart finds again.

A bid reserves its price. A win frees it and counts what was paid as spent, a loss frees it. A bid
without a notice counts as won at its price once it expires. What counts as spent does so until the
next tick of the campaign, whose result has it.
"""

import math
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from decisionllm.domains.auction.journal import open_beside, transaction

WAIT = 0.05  # seconds for the lock that other processes hold for some microseconds
EXPIRED = 100  # most expired bids that one call books
SCHEMA = """
CREATE TABLE IF NOT EXISTS bids (id TEXT PRIMARY KEY, campaign TEXT NOT NULL, price INTEGER NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS expiry ON bids (expires);
CREATE TABLE IF NOT EXISTS totals (
    campaign TEXT PRIMARY KEY,
    open INTEGER NOT NULL,  -- reserved by bids whose result is not known
    spent INTEGER NOT NULL,  -- won or expired since the tick `step`
    step INTEGER NOT NULL
) WITHOUT ROWID;
"""


class Reservations:
    """Open bids of all campaigns. Prices are whole numbers of nano-currency, so that sums are
    exact.

    Args:
        path: of the file, created if there is none; `:memory:` is shared with nobody.
        expiry: seconds after which a bid without a notice counts as won.
        last_step: campaign -> index of its last tick.

    Raises:
        sqlite3.Error: by every method, where the file cannot be read or written.
    """

    def __init__(
        self, path: str | Path = ":memory:", *, expiry: float, last_step: Callable[[str], int]
    ) -> None:
        self.expiry = expiry
        self.last_step = last_step
        self.lock = threading.Lock()
        self.file = open_beside(path, SCHEMA, wait=WAIT)
        # counting all bids, for /metrics, delays no bid
        self.counting = self.file
        if str(path) != ":memory:":
            self.counting = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def committed(self, campaign: str, step: int) -> float:
        """Currency that bids may cost or have cost since a tick. step: index of the last tick, -1
        before the first.
        """
        self._book_expired()
        query = "SELECT open, spent, step FROM totals WHERE campaign = ?"
        with self.lock:
            row = self.file.execute(query, (campaign,)).fetchone()
        if row is None:
            return 0.0
        reserved, spent, since = row
        committed: int = reserved + spent if since >= step else reserved
        return committed / 1e9

    def reserve(
        self, campaign: str, step: int, left: float, prices: Sequence[float]
    ) -> list[str] | None:
        """Reserve the prices of the bids of one answer, if the budget has room for all of them.

        Args:
            campaign: its id.
            step: index of its last tick.
            left: currency that its budget had left at that tick.
            prices: currency.

        Returns:
            Ids of the bids, which cannot be guessed; None: another process reserved the budget
            since `committed`.
        """
        ids = [secrets.token_urlsafe(12) for _ in prices]
        expires = time.time() + self.expiry
        rows = [(id, campaign, nano(price), expires) for id, price in zip(ids, prices, strict=True)]
        total = sum(price for _, _, price, _ in rows)
        with self.lock, transaction(self.file):
            self.file.execute("INSERT OR IGNORE INTO totals VALUES (?, 0, 0, ?)", (campaign, step))
            self._begin_step(campaign, step)
            room = "UPDATE totals SET open = open + ? WHERE campaign = ? AND open + spent + ? <= ?"
            if not self.file.execute(room, (total, campaign, total, nano(left))).rowcount:
                return None
            self.file.executemany("INSERT INTO bids VALUES (?, ?, ?, ?)", rows)
        return ids

    def settle(self, id: str, paid: float) -> bool:
        """Book a bid as won for this price, at most its own, currency, or as lost for 0.

        Returns whether it was open.
        """
        with self.lock, transaction(self.file):
            found = self.file.execute(
                "SELECT campaign, price FROM bids WHERE id = ?", (id,)
            ).fetchone()
            if found is None:
                return False
            campaign, price = found
            spent = price if paid * 1e9 >= price else nano(paid)
            self._close(id, campaign, price, spent)
        return True

    def _book_expired(self) -> None:
        """Count bids that have expired as won at their price."""
        query = "SELECT id, campaign, price FROM bids WHERE expires <= ? LIMIT ?"
        with self.lock:
            if not self.file.execute(query, (time.time(), 1)).fetchone():
                return
            with transaction(self.file):
                for id, campaign, price in self.file.execute(
                    query, (time.time(), EXPIRED)
                ).fetchall():
                    self._close(id, campaign, price, price)

    def _close(self, id: str, campaign: str, price: int, spent: int) -> None:
        """Free the price of a bid and add what it cost to what was spent since the last tick."""
        self.file.execute("DELETE FROM bids WHERE id = ?", (id,))
        self._begin_step(campaign, self.last_step(campaign))
        self.file.execute(
            "UPDATE totals SET open = open - ?, spent = spent + ? WHERE campaign = ?",
            (price, spent, campaign),
        )
        self.file.execute(
            "DELETE FROM totals WHERE campaign = ? AND open = 0 AND spent = 0", (campaign,)
        )

    def _begin_step(self, campaign: str, step: int) -> None:
        """Forget what was spent before the tick of a step: it is in the result of that tick."""
        self.file.execute(
            "UPDATE totals SET spent = 0, step = ? WHERE campaign = ? AND step < ?",
            (step, campaign, step),
        )

    def count(self) -> int:
        """Number of bids whose result is not known."""
        return int(self.counting.execute("SELECT COUNT(*) FROM bids").fetchone()[0])

    def close(self) -> None:
        with self.lock:
            self.counting.close()
            self.file.close()


def nano(currency: float) -> int:
    """Currency as a whole number of billionths, rounded up."""
    return math.ceil(currency * 1e9)
