"""Journal of served campaigns and their ticks: a SQLite file, written before an answer is sent.

One row per campaign and one per tick. A write is one transaction that is on the disk when it
returns (WAL, synchronous=FULL), so that neither a killed process nor a power failure loses an
answered tick; writes that come together share a transaction.
"""

import json
import logging
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from decisionllm.bidding.journal.rows import (
    APPLICATION_ID,
    CAMPAIGN,
    SCHEMA,
    TICK,
    VERSION,
    Columns,
    Entry,
    checksum,
    is_sound,
)
from decisionllm.bidding.journal.sqlite_files import (
    WAIT,
    check_pages,
    check_same_file,
    connect,
    connect_to_read,
    copy_database,
    enable_wal,
    file_identity,
    is_busy,
    resolve_path,
    transaction,
)
from decisionllm.files import explain_errors
from decisionllm.schema import Json

Item = TypeVar("Item")

READ_WAIT = 0.25  # seconds: a read waits for no write in WAL mode, so that the event loop may read
MAX_DAMAGED = 1000  # most damaged rows whose names are kept
MAX_SEARCHED = 50_000  # most campaigns that one search reads
READ_BATCH = 400  # campaigns that one statement names
MAX_REMEMBERED = 4096  # most campaigns whose last answer is kept in memory
CAMPAIGN_WIDTH = len(CAMPAIGN.split(", "))
MODEL = CAMPAIGN.split(", ").index("model")
# the last tick of each campaign beside it
LAST = (
    "LEFT JOIN (SELECT campaign, step, request, answer, at, sum AS tick_sum FROM ticks)"
    " ON campaign = id AND step = (SELECT MAX(step) FROM ticks WHERE campaign = id)"
)
LAST_TICK = "campaign, step, request, answer, at, tick_sum"
NAME = "CASE WHEN json_valid(facts) THEN json_extract(facts, '$.name') END"
logger = logging.getLogger(__name__)
Row = tuple[Json, Json | None]  # a campaign, and the answer to its last tick


class JournalBusyError(sqlite3.OperationalError):
    """Another process or thread has the lock for writing."""


class DamagedRowError(sqlite3.DatabaseError):
    """A row is not as it was written."""


class Journal:
    """Campaigns and ticks in a file; safe to use from any thread and from several processes.

    Args:
        path: a file, created if there is none; `:memory:` keeps nothing after the process.
        read_only: no row is written; the file may be a running server's, or lie where nothing can
            be written.

    Raises:
        ValueError: the file cannot be written, is no journal, one of another version, or has a hard
            link.

    Attributes:
        path: of the file itself, see `resolve_path`.
    """

    def __init__(self, path: str | Path = ":memory:", *, read_only: bool = False) -> None:
        if str(path).startswith("file:"):
            raise ValueError(f"journal: expected the path of a file, got the URI {path}")
        self.path = resolve_path(path, read_only=read_only)
        self._opened_path = path  # where another file, or a link to one, may be put
        self.damaged: set[str] = set()  # rows that were found not to be as they were written
        # results of `campaign_and_answer` at the version `_remembered_at`; threads change them
        # without a lock
        self._remembered: OrderedDict[str, Row] = OrderedDict()
        self._remembered_at = -1
        self._writing = threading.Lock()
        kind = "a file to write, or one written by a server"
        if read_only:
            kind = "a journal of a server"
        with explain_errors(f"journal: expected {kind}, got {path}", sqlite3.Error, OSError):
            if read_only:
                self._writer = connect_to_read(self.path)
            else:
                self._open_to_write()
            (application,) = self._writer.execute("PRAGMA application_id").fetchone()
            (version,) = self._writer.execute("PRAGMA user_version").fetchone()
            self._open_to_read(shared=read_only or self.path == ":memory:")
        self._file = file_identity(path)
        if (application, version) != (APPLICATION_ID, VERSION):
            got = f"version {version}" if application == APPLICATION_ID else "another database"
            raise ValueError(
                f"journal: expected one of version {VERSION}, got {got}: {self.path}; read it with"
                " the release that wrote it, and begin a new file with journal=..."
            )

    def sidecar_path(self, name: str) -> str:
        """The path of a file beside the journal: shadow, bids, shading, models or snapshot.

        Nothing lies beside a journal in memory.
        """
        return ":memory:" if self.path == ":memory:" else f"{self.path}.{name}"

    def _open_to_write(self) -> None:
        if self.path != ":memory:":
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        self._writer = connect(self.path)
        enable_wal(self._writer)
        self._writer.execute("PRAGMA synchronous=FULL")
        # If two processes start together, one of them makes the tables.
        with transaction(self._writer):
            if not self._writer.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in SCHEMA:
                    self._writer.execute(statement)
                self._writer.execute(f"PRAGMA application_id={APPLICATION_ID}")
                self._writer.execute(f"PRAGMA user_version={VERSION}")

    def _open_to_read(self, *, shared: bool) -> None:
        """Open the connections that read. shared: they are the one that writes."""
        self._reader = self._lister = self._writer
        self._reading = self._listing = self._writing
        if not shared:
            # Reads of one campaign, which bids need, wait neither for a write nor for a list.
            self._reader = connect(self.path, READ_WAIT)
            self._reading = threading.Lock()
            self._lister = connect(self.path)
            self._listing = threading.Lock()

    def write(self, entries: Sequence[Entry], *, wait: float = WAIT) -> list[bool]:
        """Write all entries of `insert_campaign`, `insert_tick`, `end_campaign`, `move_campaigns`
        and `move_campaign`, or none.

        Returns which were new. No answer is changed.

        Args:
            wait: most seconds for the lock.

        Raises:
            JournalBusyError: others had the lock for so long; nothing is written.
            sqlite3.Error: the disk is full or the file is damaged; nothing is written.
        """
        with self.lock_writer(wait) as writer, transaction(writer):
            return [writer.execute(*entry).rowcount == 1 for entry in entries]

    @contextmanager
    def lock_writer(self, wait: float) -> Iterator[sqlite3.Connection]:
        """The connection that writes, waiting at most so many seconds for threads and processes."""
        end = time.monotonic() + wait
        if not self._writing.acquire(timeout=wait):
            raise JournalBusyError("locked by another thread")
        try:
            self.check_file()
            left = max(int(1000 * (end - time.monotonic())), 0)
            self._writer.execute(f"PRAGMA busy_timeout={left}")
            yield self._writer
        except sqlite3.OperationalError as error:
            if is_busy(error):
                raise JournalBusyError("locked by another process") from error
            raise
        finally:
            self._writing.release()

    def campaigns(self) -> list[Json]:
        """Every campaign in the order of opening.

        It has id, opened (seconds since 1970), ended (how, or None), model and its settings.
        """
        return list(self._iter_sound("ORDER BY number"))

    def campaign(self, id: str) -> Json | None:
        """The campaign with this id. Raises DamagedRowError."""
        rows = self._read(f"SELECT {CAMPAIGN} FROM campaigns WHERE id = ?", id)
        return self.parse_campaign(rows[0]) if rows else None

    def find_by_key(self, key: str) -> Json | None:
        """The campaign opened with this key. Raises DamagedRowError."""
        rows = self._read(f"SELECT {CAMPAIGN} FROM campaigns WHERE key = ?", key)
        return self.parse_campaign(rows[0]) if rows else None

    def list_latest(
        self, count: int, *, search: str = "", before: str | None = None
    ) -> tuple[list[Row], str | None]:
        """The campaigns opened last, newest first, each with the answer to its last tick.

        Args:
            count: most campaigns.
            search: part of the name, or the beginning of the id or the key. One call looks at the
                latest SEARCHED campaigns; a whole id or key is found at once.
            before: the id of a campaign; only those opened before it.

        Returns:
            (campaigns, `before` of the call that goes on with older ones; None: there are none).
        """
        if before is None:
            ((newest,),) = self.list_rows("SELECT MAX(number) FROM campaigns")
        else:
            query = "SELECT MAX(number) - 1 FROM campaigns WHERE id = ?"
            ((newest,),) = self.list_rows(query, before)
        if newest is None:
            return [], None
        oldest = 1
        exact: list[Row] = []
        which = "number BETWEEN ? AND ?"
        words: list[str] = []
        if search:
            oldest = max(newest - MAX_SEARCHED + 1, 1)
            which += f" AND (instr(lower({NAME}), lower(?))"
            which += " OR instr(id, ?) = 1 OR instr(key, ?) = 1)"
            words = [search] * 3
            if before is None:
                exact = self._list_with_answers(
                    "WHERE (id = ? OR key = ?) AND number < ?", search, search, oldest
                )
        rows = self._list_with_answers(
            f"WHERE {which} ORDER BY number DESC LIMIT ?", oldest, newest, *words, count + 1
        )
        if len(rows) > count:
            return exact + rows[:count], rows[count - 1][0]["id"]
        if oldest == 1:
            return exact + rows, None
        ((older,),) = self.list_rows("SELECT id FROM campaigns WHERE number >= ? LIMIT 1", oldest)
        return exact + rows, older

    def campaign_and_answer(self, id: str) -> Row | None:
        """A campaign with the answer to its last tick. `ticked` of the campaign is the time of
        that tick, seconds since 1970; None: there is none.

        Kept in memory until something is written, by whatever process. Change nothing of it.

        Raises:
            DamagedRowError: the campaign or the tick is damaged.
        """
        if self._reader is self._writer:  # the version tells of writes by other connections alone
            return self._read_campaign_and_answer(id)
        # before the rows are read, so that they are of this version or newer
        ((version,),) = self._read("PRAGMA data_version")
        if version != self._remembered_at:
            self._remembered = OrderedDict()
            self._remembered_at = version
        remembered = self._remembered
        row = remembered.get(id)
        if row is None:
            row = self._read_campaign_and_answer(id)
            if row is not None:
                if len(remembered) >= MAX_REMEMBERED:
                    remembered.popitem(last=False)
                remembered[id] = row
        return row

    def _read_campaign_and_answer(self, id: str) -> Row | None:
        """Read `campaign_and_answer` from the file."""
        rows = self._read(f"SELECT {CAMPAIGN}, {LAST_TICK} FROM campaigns {LAST} WHERE id = ?", id)
        if not rows:
            return None
        campaign, answer = self._parse_row(rows[0])
        *_, ticked, _ = rows[0]
        return campaign | {"ticked": ticked}, answer

    def count_open(self) -> int:
        """Number of campaigns that have not ended."""
        ((count,),) = self._read("SELECT open FROM counts")
        return int(count)

    def open_models(self) -> list[tuple[str, int, int]]:
        """List (model, number of its campaigns that have not ended, steps of the longest) of each
        model. Damaged campaigns, which no model answers, are left out.
        """
        counts: Counter[str] = Counter()
        longest: dict[str, int] = {}
        horizon = "CASE WHEN json_valid(facts) THEN json_extract(facts, '$.horizon') END"
        for row in self.iter_rows(
            f"SELECT {CAMPAIGN}, {horizon} FROM campaigns WHERE ended IS NULL"
        ):
            if not is_sound(row):
                self._report_damage(f"campaign {row[0]}")
                continue
            model, steps = row[MODEL], row[-1]
            counts[model] += 1
            if steps > longest.get(model, 0):
                longest[model] = steps
        return [(model, count, longest[model]) for model, count in counts.items()]

    def open_campaigns(self, count: int, model: str) -> list[Json]:
        """A model's campaigns that have not ended, the newest first, at most so many. Damaged
        campaigns are left out.
        """
        which = "WHERE ended IS NULL AND model = ? ORDER BY number DESC LIMIT ?"
        return list(self._iter_sound(which, model, count))

    def open_ids(self, count: int, model: str) -> list[str]:
        """Ids of `open_campaigns`."""
        return [campaign["id"] for campaign in self.open_campaigns(count, model)]

    def ticks(self, id: str, first: int = 0, *, damaged: str = "raise") -> list[Json]:
        """The ticks of a campaign from this one on, in their order: index, request and answer.

        Args:
            damaged: `skip` leaves damaged ticks out.

        Raises:
            DamagedRowError: a tick is damaged.
        """
        which = "campaign = ? AND step >= ? ORDER BY step"
        ticks = []
        for row in self._read(f"SELECT {TICK} FROM ticks WHERE {which}", id, first):
            try:
                request, answer = self.parse_tick(row)
            except DamagedRowError:
                if damaged != "skip":
                    raise
                continue
            tick = {"index": row[1], "request": json.loads(request), "answer": json.loads(answer)}
            ticks.append(tick)
        return ticks

    def count_ticks(self, id: str) -> int:
        """Number of ticks of a campaign."""
        ((count,),) = self._read("SELECT COUNT(*) FROM ticks WHERE campaign = ?", id)
        return int(count)

    def tick_sums(self, steps: Mapping[str, int]) -> dict[str, int]:
        """The checksum of a tick of each of some campaigns as it was written.
        Campaigns without this tick are left out.

        Args:
            steps: of the ticks, by campaign.
        """
        sums: dict[str, int] = {}
        for pairs in split_batches(list(steps.items())):
            values = ", ".join(["(?, ?)"] * len(pairs))
            query = (
                f"WITH asked (id, number) AS (VALUES {values}) SELECT campaign, sum"
                " FROM asked CROSS JOIN ticks ON campaign = id AND step = number"
            )
            sums |= dict(self._read(query, *chain.from_iterable(pairs)))
        return sums

    def filter_open(self, ids: Sequence[str]) -> set[str]:
        """Return the ids of those campaigns that exist and have not ended."""
        still_open: set[str] = set()
        for some in split_batches(ids):
            marks = ", ".join("?" * len(some))
            query = f"SELECT id FROM campaigns WHERE id IN ({marks}) AND ended IS NULL"
            still_open |= {id for (id,) in self._read(query, *some)}
        return still_open

    def tick(self, id: str, step: int) -> tuple[str, str] | None:
        """Read (request, answer) of a tick as they were written. Raises DamagedRowError."""
        rows = self._read(f"SELECT {TICK} FROM ticks WHERE campaign = ? AND step = ?", id, step)
        return self.parse_tick(rows[0]) if rows else None

    def _list_with_answers(self, which: str, *values: object) -> list[Row]:
        """Campaigns with the answer to their last tick, without those of which a row is damaged."""
        rows = []
        query = f"SELECT {CAMPAIGN}, {LAST_TICK} FROM campaigns {LAST} {which}"
        for row in self.list_rows(query, *values):
            with suppress(DamagedRowError):
                rows.append(self._parse_row(row))
        return rows

    def _iter_sound(self, which: str, *values: object) -> Iterator[Json]:
        """Campaigns, one after the other, without those whose row is damaged."""
        for row in self.iter_rows(f"SELECT {CAMPAIGN} FROM campaigns {which}", *values):
            try:
                campaign = self.parse_campaign(row)
            except DamagedRowError:
                continue
            yield campaign

    def _parse_row(self, row: Columns) -> Row:
        """Return the campaign and the last answer of a row of CAMPAIGN and LAST_TICK."""
        campaign = self.parse_campaign(row[:CAMPAIGN_WIDTH])
        last_tick = row[CAMPAIGN_WIDTH:]
        if last_tick[0] is None:
            return campaign, None
        _, answer = self.parse_tick(last_tick)
        return campaign, json.loads(answer)

    def parse_campaign(self, row: Columns) -> Json:
        """Return the campaign of a row of CAMPAIGN. Raises DamagedRowError."""
        id, _, opened, settings, _, ended, model, _ = row
        if not is_sound(row):
            raise self._report_damage(f"campaign {id}")
        campaign = {"id": id, "opened": opened, "ended": ended, "model": model}
        campaign |= json.loads(settings)
        return campaign

    def parse_tick(self, row: Columns) -> tuple[str, str]:
        """Return (request, answer) of a row of TICK. Raises DamagedRowError."""
        campaign, step, request, answer, at, sum = row
        if sum != checksum(campaign, step, request, answer, at):
            raise self._report_damage(f"tick {step} of campaign {campaign}")
        return request, answer

    def _report_damage(self, row: str) -> DamagedRowError:
        """The error of a damaged row, which is logged when it is found first."""
        message = f"{row} is damaged"
        if row not in self.damaged and len(self.damaged) < MAX_DAMAGED:
            self.damaged.add(row)
            logger.error("journal %s: %s", self.path, message)
        return DamagedRowError(message)

    def _read(self, query: str, *values: object) -> list[Columns]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def list_rows(self, query: str, *values: object) -> list[Columns]:
        """Rows of a query that reads many of them, on a connection of its own."""
        with self._listing:
            return self._lister.execute(query, values).fetchall()

    def check_pages(self) -> None:
        """Read the whole file. Raises sqlite3.DatabaseError if it is damaged."""
        with self._listing:
            check_pages(self._lister)

    def iter_rows(self, query: str, *values: object) -> Iterator[Columns]:
        """The rows of a query, one after the other: all of them may not fit into memory."""
        with self._listing:
            yield from self._lister.execute(query, values)

    def check_file(self) -> None:
        """Raise sqlite3.DatabaseError if the file at the path is not the one that is open."""
        check_same_file(self._opened_path, self._file)

    def check_room(self) -> None:
        """Write and delete 100 kB. Raises sqlite3.Error if that fails, soon if it is locked."""
        with self.lock_writer(READ_WAIT) as writer:
            # Committed before it is dropped: SQLite writes no page that its transaction frees.
            with transaction(writer):
                writer.execute("CREATE TABLE IF NOT EXISTS room (x)")
                writer.execute("INSERT INTO room VALUES (zeroblob(100000))")
            # another process that checks may have dropped it
            writer.execute("DROP TABLE IF EXISTS room")

    def copy_to(self, to: Path) -> None:
        """Copy the file of the journal. Raises sqlite3.DatabaseError if it is damaged."""
        with self._reading:
            copy_database(self._reader, to)

    def close(self) -> None:
        """Close the file.

        What SQLite kept beside it is then in it, unless another process has it open.
        """
        with self._reading:
            self._reader.close()
        with self._listing:
            self._lister.close()
        with self._writing:
            self._writer.close()


def explain_journal_errors(path: str | Path) -> AbstractContextManager[None]:
    """Raise a ValueError that says what to do for an error of SQLite in the block."""
    return explain_errors(
        f"journal: {path} cannot be read or written",
        sqlite3.Error,
        fix="if it is damaged, put a backup in its place by `decisionllm journal restore`",
    )


def split_batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield so many items at a time as one statement may name."""
    for start in range(0, len(items), READ_BATCH):
        yield items[start : start + READ_BATCH]
