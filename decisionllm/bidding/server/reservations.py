"""Budget reserved by open bids, in a SQLite file that all processes of a server share and a
restart finds again.

A bid reserves its price. A win frees it and counts what was paid as spent, a loss frees it. A bid
without a notice counts as won at its price once it expires. What counts as spent does so until the
next tick of the campaign, whose result has it; a win at a known price until results have reported
as much as all such wins, since a feeder may report a step late.

A bid costs the highest amount of its notices, once: a win after a loss counts, a loss after a win
does not.
"""

import asyncio
import logging
import math
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from decisionllm.bidding.journal.sqlite_files import (
    check_same_file,
    file_identity,
    is_busy,
    open_sidecar,
    transaction,
)
from decisionllm.files import explain_errors

logger = logging.getLogger("decisionllm.bidding.server")
WAIT = 0.05  # seconds for the lock that other processes hold for some microseconds
EXPIRE_BATCH = 10  # expired bids that a call books at least, if there are so many
MAX_NANO = 2**63 - 1  # nano-currency, the largest integer of SQLite
OPENING_WAIT = 10.0  # seconds for the lock while the file is opened
# seconds after its expiry, for which a bid is kept: until then a win after a loss counts
KEEP_SECONDS = 3600.0
FORGET_BATCH = 2  # older bids that are forgotten for each that is settled, if there are so many
ROUNDING = 10**12  # a sum of spend that a feeder reports is right up to one part of so many
SCHEMA = """
CREATE TABLE IF NOT EXISTS bids (id TEXT PRIMARY KEY, campaign TEXT NOT NULL, price INTEGER NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS expiry ON bids (expires);
CREATE TABLE IF NOT EXISTS settled (
    id TEXT PRIMARY KEY,
    campaign TEXT NOT NULL,
    price INTEGER NOT NULL,
    cost INTEGER NOT NULL,  -- that was added to `spent` of the campaign
    won INTEGER NOT NULL  -- that was added to its `won`
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (
    campaign TEXT PRIMARY KEY,
    open INTEGER NOT NULL,  -- reserved by bids whose result is not known
    spent INTEGER NOT NULL,  -- won or expired since the tick `step`
    step INTEGER NOT NULL,
    won INTEGER NOT NULL DEFAULT 0  -- paid for all wins so far whose price is known
) WITHOUT ROWID;
"""
# the result of a tick holds all spend before that tick
SPENT = "CASE WHEN step < :step THEN 0 ELSE spent END"
RESERVE = f"""
INSERT INTO totals (campaign, open, spent, step) VALUES (:campaign, :total, 0, :step)
ON CONFLICT (campaign) DO UPDATE
SET open = open + :total, spent = {SPENT}, step = :step
-- spend before a later tick is no longer here: the budget of an earlier tick is not known
WHERE step <= :step AND open + MAX({SPENT}, won - :reported) + :total <= :most
"""
SETTLE = f"""
UPDATE totals
SET open = open - :price, spent = {SPENT} + :cost, step = MAX(step, :step), won = won + :won
WHERE campaign = :campaign
"""
FIND = """
SELECT campaign FROM bids WHERE id = :id
UNION ALL SELECT campaign FROM settled WHERE id = :id AND :is_win
"""
FORGET = "DELETE FROM settled WHERE id IN (SELECT id FROM settled WHERE id < ? ORDER BY id LIMIT ?)"


class ReservationsError(Exception):
    """The file cannot be read or written; nothing was reserved or settled."""


class ReservationsBusyError(ReservationsError):
    """Another process has the lock for writing."""


class TurnTransaction:
    """Writes of one turn of the event loop share a transaction: a commit costs more than they do.

    `with turn:` holds statements that are written with all others of the turn. If one such block
    fails, nothing of its turn is: what can fail by itself comes before the block.

    Args:
        file: that nobody but the thread of the event loop writes with.
        check: called before each transaction, to raise what forbids it.
    """

    def __init__(self, file: sqlite3.Connection, check: Callable[[], None]) -> None:
        self.file = file
        self.check = check
        self.begun = False
        self.waits = True  # for the lock
        self.waiting: list[asyncio.Future[None]] = []

    def __enter__(self) -> None:
        if self.begun:
            return
        self.check()
        self._take_lock()
        self.begun = True
        asyncio.get_running_loop().call_soon(self.commit)  # behind all that is ready to run now

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._roll_back(error)

    async def wait_written(self) -> None:
        """Wait until the writes of this turn are in the file.

        Raises:
            sqlite3.Error: nothing of it is.
        """
        if self.begun:
            end = asyncio.get_running_loop().create_future()
            self.waiting.append(end)
            await end

    def commit(self) -> None:
        """End the turn's transaction, if it is still open, and tell all who wait."""
        if not self.begun:
            return
        try:
            self.file.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back(error)
            return
        for end in self._finish_turn():
            end.set_result(None)

    def _take_lock(self) -> None:
        """Begin a transaction that writes.

        The event loop stands still while this waits for the lock. After one wait in vain nothing
        waits until the lock was free once: others may have it for long.
        """
        try:
            self.file.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self._set_wait(0.0)
            raise
        if not self.waits:
            self._set_wait(WAIT)

    def _set_wait(self, seconds: float) -> None:
        self.file.execute(f"PRAGMA busy_timeout={int(1000 * seconds)}")
        self.waits = seconds > 0

    def _roll_back(self, error: BaseException) -> None:
        with suppress(sqlite3.Error):  # SQLite ends it by itself if the disk is full
            self.file.execute("ROLLBACK")
        for end in self._finish_turn():
            end.set_exception(error)

    def _finish_turn(self) -> list[asyncio.Future[None]]:
        """End the turn. Returns those who wait, without requests that were cancelled."""
        waiting = [end for end in self.waiting if not end.done()]
        self.begun = False
        self.waiting = []
        return waiting


class Reservations:
    """Open bids of all campaigns. Prices are whole numbers of nano-currency, so that sums are
    exact.

    Its methods are called from one event loop. What they return holds at once for all calls after
    them, and for other processes and a restart once `wait_written` has returned.

    Args:
        path: of the file, created if there is none; `:memory:` is shared with nobody.
        expiry: seconds after which a bid without a notice counts as won.
        last_step: campaign -> index of its last tick.

    Raises:
        ValueError: the file cannot be written or is none of ours.
        ReservationsError: by every method, where the file cannot be read or written.

    Attributes:
        fault: the last error of the file; None after a write, unless the file is damaged, which
            needs a person.
    """

    def __init__(
        self, path: str | Path = ":memory:", *, expiry: float, last_step: Callable[[str], int]
    ) -> None:
        self.path = path
        self.expiry = expiry
        self.last_step = last_step
        self.fault: sqlite3.Error | None = None
        self.file = open_file(path)
        self.identity = file_identity(path)
        self.turn = TurnTransaction(self.file, self.check_file)
        # counting all bids, for /metrics, delays no bid
        self.counting = self.file
        if str(path) != ":memory:":
            self.counting = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def committed_amount(
        self, campaign: str, step: int, *, reported: float = math.inf, bids: int = 1
    ) -> float:
        """Currency that bids may cost or have cost, beyond what the results up to a tick report.

        Args:
            campaign: its id.
            step: index of the last tick, -1 before the first.
            reported: currency that the results up to this tick have spent in total; by default all
                that was won before.
            bids: most that are reserved next. Up to twice as many that have expired are booked:
                faster than others come, and not all at once, since others wait meanwhile.
        """
        self._book_expired(max(EXPIRE_BATCH, 2 * bids))
        query = "SELECT open, spent, step, won FROM totals WHERE campaign = ?"
        with self._translate_errors():
            row = self.file.execute(query, (campaign,)).fetchone()
        if row is None:
            return 0.0
        reserved, spent, since, won = row
        if since < step:
            spent = 0
        committed: int = reserved + max(spent, won - explained_wins(reported))
        return committed / 1e9

    def reserve(
        self,
        campaign: str,
        step: int,
        left: float,
        prices: Sequence[float],
        *,
        reported: float = math.inf,
    ) -> list[str] | None:
        """Reserve the prices of the bids of one answer, if the budget has room for all of them.

        Args:
            campaign: its id.
            step: index of its last tick.
            left: currency that its budget had left at that tick.
            prices: currency.
            reported: see `committed_amount`.

        Returns:
            Ids of the bids, which cannot be guessed; None: another process reserved the budget
            since `committed_amount`, or knows of a later tick.
        """
        now = time.time()
        rows = [(new_id(now), campaign, to_nano(price), now + self.expiry) for price in prices]
        total = sum(price for _, _, price, _ in rows)
        most = min(to_nano(left), MAX_NANO)
        if total > most:
            return None
        with self._translate_errors(), self.turn:
            reserved = {"campaign": campaign, "step": step, "total": total, "most": most}
            reserved["reported"] = explained_wins(reported)
            if not self.file.execute(RESERVE, reserved).rowcount:
                return None
            self.file.executemany("INSERT INTO bids VALUES (?, ?, ?, ?)", rows)
        return [id for id, *_ in rows]

    def settle(self, id: str, paid: float) -> bool:
        """Book a bid as won for this price, at most its own, currency, or as lost for 0. Infinity
        is a price that is not known: the bid's own.

        Returns whether it was open, or costs more than was booked before.
        """
        with self._translate_errors():
            row = self.file.execute(FIND, {"id": id, "is_win": paid > 0}).fetchone()
        if row is None:
            return False
        (campaign,) = row
        step = self.last_step(campaign)
        with self._translate_errors(), self.turn:
            return self._settle_open(id, step, paid) or self._settle_again(id, step, paid)

    async def wait_written(self) -> None:
        """Wait until all reservations and results of this turn of the event loop are in the file.

        Raises:
            ReservationsError: nothing of it is.
        """
        if not self.turn.begun:
            return
        with self._translate_errors():
            await self.turn.wait_written()
        if isinstance(self.fault, sqlite3.OperationalError):
            self.fault = None

    def _book_expired(self, most: int) -> None:
        """Count bids that have expired as won at their price, at most so many."""
        query = "SELECT id, campaign FROM bids WHERE expires <= ? LIMIT ?"
        with self._translate_errors():
            expired = self.file.execute(query, (time.time(), most)).fetchall()
        if not expired:
            return
        steps = {campaign: self.last_step(campaign) for _, campaign in expired}
        with self._translate_errors(), self.turn:
            for id, campaign in expired:
                self._settle_open(id, steps[campaign], math.inf)

    def _settle_open(self, id: str, step: int, paid: float) -> bool:
        """Free the price of a bid and add its cost to the spend since the last tick.

        Args:
            id: of the bid.
            step: index of the last tick of its campaign.
            paid: see `settle`.

        Returns:
            Whether it was still open.
        """
        query = "DELETE FROM bids WHERE id = ? RETURNING campaign, price"
        row = self.file.execute(query, (id,)).fetchone()
        if row is None:
            return False
        campaign, price = row
        cost, won = bid_cost(price, paid)
        settled = {"campaign": campaign, "price": price, "cost": cost, "won": won, "step": step}
        self.file.execute(SETTLE, settled)
        self.file.execute(
            "INSERT INTO settled VALUES (?, ?, ?, ?, ?)", (id, campaign, price, cost, won)
        )
        oldest = time_prefix(time.time() - self.expiry - KEEP_SECONDS)
        self.file.execute(FORGET, (oldest, FORGET_BATCH))
        return True

    def _settle_again(self, id: str, step: int, paid: float) -> bool:
        """Add what a settled bid costs more than was booked. See `_settle_open`.

        Returns:
            Whether it costs more.
        """
        query = "SELECT campaign, price, cost, won FROM settled WHERE id = ?"
        row = self.file.execute(query, (id,)).fetchone()
        if row is None:
            return False
        campaign, price, booked_cost, booked_won = row
        cost, won = bid_cost(price, paid)
        more_cost: int = max(cost - booked_cost, 0)
        more_won: int = max(won - booked_won, 0)
        more = {"campaign": campaign, "price": 0, "cost": more_cost, "won": more_won, "step": step}
        self.file.execute(SETTLE, more)
        self.file.execute(
            "UPDATE settled SET cost = cost + ?, won = won + ? WHERE id = ?",
            (more_cost, more_won, id),
        )
        return more_cost > 0

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise ReservationsError for an error of the file in the block.

        It is logged once, until another one comes.
        """
        try:
            yield
        except sqlite3.Error as error:
            if is_busy(error):
                raise ReservationsBusyError("locked by another process") from error
            if str(error) != str(self.fault):
                logger.error("bids %s: %s; there are no bids", self.path, error)
            self.fault = error
            raise ReservationsError(str(error)) from error

    def check_file(self) -> None:
        """Raise sqlite3.DatabaseError if the file at the path is not the one that is open."""
        check_same_file(self.path, self.identity)

    def check(self) -> str:
        """The fault of the file; "": none is known. Notices a file that was removed or replaced."""
        with suppress(ReservationsError), self._translate_errors():
            self.check_file()
        return str(self.fault or "")

    def count(self) -> float:
        """Number of bids whose result is not known; NaN if the file cannot be read."""
        try:
            ((count,),) = self.counting.execute("SELECT COUNT(*) FROM bids")
        except sqlite3.Error:
            return math.nan
        return float(count)

    def close(self) -> None:
        self.turn.commit()
        self.counting.close()
        self.file.close()


def open_file(path: str | Path) -> sqlite3.Connection:
    """The file of reservations. Raises a ValueError if it cannot be written or is none of ours."""
    with explain_errors(
        f"bids: expected a file of ours, got {path}",
        sqlite3.Error,
        fix="remove the file if it is damaged: what open bids may cost is then forgotten",
    ):
        file = open_sidecar(path, SCHEMA, wait=OPENING_WAIT)
        file.execute("SELECT won FROM totals LIMIT 0")  # an older file has no such column
        file.execute(f"PRAGMA busy_timeout={int(1000 * WAIT)}")
        return file


def rewind(path: str | Path, last_step: Callable[[str], int]) -> None:
    """Adapt the file to an earlier journal that was restored; no server may run.

    What is spent counts until the next tick of the campaign. By the step that it had before, it
    would count until the campaign is as far again.

    Args:
        path: of the file; nothing is done if there is none.
        last_step: campaign -> index of its last tick in the restored journal.
    """
    if not Path(path).is_file():
        return
    with closing(open_file(path)) as file, transaction(file):
        for (campaign,) in file.execute("SELECT campaign FROM totals").fetchall():
            file.execute(
                "UPDATE totals SET step = MIN(step, ?) WHERE campaign = ?",
                (last_step(campaign), campaign),
            )


def new_id(now: float) -> str:
    """An id that cannot be guessed. now: seconds since 1970.

    It begins with the time, so that new rows lie together in the file.
    """
    return time_prefix(now) + secrets.token_urlsafe(12)


def time_prefix(now: float) -> str:
    """Return the prefix of the ids of a time, seconds since 1970."""
    return f"{max(int(1000 * now), 0):011x}"


def bid_cost(price: int, paid: float) -> tuple[int, int]:
    """Nano-currency that a bid at a price costs, and how much of it is known to have been paid.

    Args:
        price: nano-currency.
        paid: see `Reservations.settle`.
    """
    cost = min(to_nano(paid), price)
    # rounded down: a sum of wins does not exceed what a result reports of them
    won = min(math.floor(paid * 1e9), price) if paid < math.inf else 0
    return cost, won


def explained_wins(reported: float) -> int:
    """Nano-currency of wins that results explain. reported: currency that they have spent."""
    spent = round(min(reported * 1e9, MAX_NANO))
    return min(spent + spent // ROUNDING, MAX_NANO)


def to_nano(currency: float) -> int:
    """Currency as a whole number of billionths, rounded up; MOST + 1 stands for all above MOST."""
    return math.ceil(min(currency * 1e9, MAX_NANO + 1))
