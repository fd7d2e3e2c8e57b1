"""Journal of served campaigns and their ticks: a SQLite file, written before an answer is sent.

One row per campaign and one per tick. A write is one transaction that is on the disk when it
returns (WAL, synchronous=FULL), so that neither a killed process nor a power failure loses an
answered tick; writes that come together share a transaction.
"""

import json
import logging
import os
import sqlite3
import stat
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from decisionllm.files import atomic, explained
from decisionllm.schema import Json

Columns = tuple[Any, ...]  # a row as SQLite reads it
Entry = tuple[str, tuple[object, ...]]  # an SQL statement and its values
Item = TypeVar("Item")

APPLICATION_ID = 0x444C4C4D  # SQLite's application_id: DLLM
VERSION_1 = (
    # facts: the settings in JSON
    "CREATE TABLE campaigns (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE,"
    " opened REAL NOT NULL, facts TEXT NOT NULL, ended TEXT)",
    "CREATE TABLE ticks (campaign TEXT NOT NULL REFERENCES campaigns (id), step INTEGER NOT NULL,"
    " request TEXT NOT NULL, answer TEXT NOT NULL, PRIMARY KEY (campaign, step)) WITHOUT ROWID",
)
VERSION_2 = (
    # model: that answers the campaign; NULL: version 1 did not know it
    "ALTER TABLE campaigns ADD COLUMN model TEXT",
    # sum: see `checksum`; NULL: a row of version 1
    "ALTER TABLE campaigns ADD COLUMN sum INTEGER",
    "ALTER TABLE ticks ADD COLUMN sum INTEGER",
    # at: seconds since 1970; 0: version 1 did not know it
    "ALTER TABLE ticks ADD COLUMN at REAL NOT NULL DEFAULT 0",
    # Counted as it is written: /metrics and the page ask for it all the time.
    "CREATE TABLE counts (open INTEGER NOT NULL)",
    "INSERT INTO counts SELECT COUNT(*) FROM campaigns WHERE ended IS NULL",
    "CREATE TRIGGER campaign_opened AFTER INSERT ON campaigns"
    " BEGIN UPDATE counts SET open = open + 1; END",
    "CREATE TRIGGER campaign_ended AFTER UPDATE OF ended ON campaigns"
    " WHEN OLD.ended IS NULL AND NEW.ended IS NOT NULL"
    " BEGIN UPDATE counts SET open = open - 1; END",
    "CREATE INDEX open_campaigns ON campaigns (number) WHERE ended IS NULL",
)
VERSION_3 = (
    # model_sum: the checksum of the model, which changes; NULL: nothing wrote it since version 2
    "ALTER TABLE campaigns ADD COLUMN model_sum INTEGER",
)
# What each version of the tables adds; an older file gets the rest when a server opens it.
VERSIONS = (VERSION_1, VERSION_2, VERSION_3)
VERSION = len(VERSIONS)
# Where nothing may be written, views of an older file have the columns that it lacks.
AS_NEWEST = {
    1: (
        "CREATE TEMP VIEW campaigns AS SELECT *, NULL AS model, NULL AS sum, NULL AS model_sum"
        " FROM main.campaigns",
        "CREATE TEMP VIEW ticks AS SELECT *, 0.0 AS at, NULL AS sum FROM main.ticks",
        "CREATE TEMP VIEW counts AS SELECT COUNT(*) AS open FROM main.campaigns"
        " WHERE ended IS NULL",
    ),
    2: ("CREATE TEMP VIEW campaigns AS SELECT *, NULL AS model_sum FROM main.campaigns",),
}
WAIT = 10.0  # most seconds for a lock that another process holds
READ_WAIT = 0.25  # seconds: a read waits for no write in WAL mode, so that the event loop may read
MAX_DAMAGED = 1000  # most damaged rows whose names are kept
PRUNE_BATCH = 50  # campaigns of one transaction, so that a server's ticks find room between two
MAX_SEARCHED = 50_000  # most campaigns that one search reads
READ_BATCH = 400  # campaigns that one statement names
MAX_REMEMBERED = 4096  # most campaigns whose last answer is kept in memory
# Tables of the files beside a journal that have rows of a campaign, each with an index by campaign:
# a search of all rows would keep a server from bidding. Bids, which have none, go by themselves.
SIDECAR_TABLES = {
    "shadow": ("decisions",),
    "bids": ("totals",),
    "shading": ("counts",),
}
COPIED_SIDECARS = ("shadow", "shading")  # files beside a journal that a backup copies with it
CAMPAIGN = "id, key, opened, facts, sum, ended, model, model_sum"
CAMPAIGN_WIDTH = len(CAMPAIGN.split(", "))
MODEL = CAMPAIGN.split(", ").index("model")
TICK = "campaign, step, request, answer, at, sum"
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


@dataclass
class RowCheck:
    """The result of a check of all rows.

    Attributes:
        campaigns, ticks: numbers of rows.
        unchecked: rows of version 1, which have no checksum.
        faults: damaged or missing rows.
    """

    campaigns: int = 0
    ticks: int = 0
    unchecked: int = 0
    faults: list[str] = field(default_factory=list)

    @contextmanager
    def collect_faults(self) -> Iterator[None]:
        """Keep the fault of a row that is found to be damaged in the block."""
        try:
            yield
        except DamagedRowError as error:
            self.faults.append(str(error))


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
        # what `campaign_and_answer` found at the version `_remembered_at`; threads change it without a lock
        self._remembered: OrderedDict[str, Row] = OrderedDict()
        self._remembered_at = -1
        self._writing = threading.Lock()
        kind = "a file to write, or one written by a server"
        if read_only:
            kind = "a journal of a server"
        with explained(f"journal: expected {kind}, got {path}", sqlite3.Error, OSError):
            if read_only:
                self._writer = _connect_to_read(self.path)
            else:
                self._open_to_write()
            application, version = self._read_format()
            self._open_to_read(shared=read_only or self.path == ":memory:")
        self._file = file_identity(path)
        if application == APPLICATION_ID and version in AS_NEWEST:  # read only: others are changed
            _show_as_newest(self._writer, version)
        elif (application, version) != (APPLICATION_ID, VERSION):
            got = f"version {version}" if application == APPLICATION_ID else "another database"
            raise ValueError(f"journal: expected one of version {VERSION}, got {got}: {self.path}")

    def sidecar_path(self, name: str) -> str:
        """The path of a file beside the journal: shadow, bids, shading, models or snapshot.

        Nothing lies beside a journal in memory.
        """
        return ":memory:" if self.path == ":memory:" else f"{self.path}.{name}"

    def _open_to_write(self) -> None:
        if self.path != ":memory:":
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        self._writer = _connect(self.path)
        _enable_wal(self._writer)
        self._writer.execute("PRAGMA synchronous=FULL")
        # If two processes start together, one of them makes the tables.
        with transaction(self._writer):
            empty = not self._writer.execute("SELECT 1 FROM sqlite_master").fetchone()
            application, version = self._read_format()
            older = application == APPLICATION_ID and 0 < version < VERSION
            if empty or older:
                for statements in VERSIONS[version if older else 0 :]:
                    for statement in statements:
                        self._writer.execute(statement)
                self._writer.execute(f"PRAGMA application_id={APPLICATION_ID}")
                self._writer.execute(f"PRAGMA user_version={VERSION}")

    def _open_to_read(self, *, shared: bool) -> None:
        """Open the connections that read. shared: they are the one that writes."""
        self._reader = self._lister = self._writer
        self._reading = self._listing = self._writing
        if not shared:
            # Reads of one campaign, which bids need, wait neither for a write nor for a list.
            self._reader = _connect(self.path, READ_WAIT)
            self._reading = threading.Lock()
            self._lister = _connect(self.path)
            self._listing = threading.Lock()

    def _read_format(self) -> tuple[int, int]:
        """Application and version that the file says it is of."""
        (application,) = self._writer.execute("PRAGMA application_id").fetchone()
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        return application, version

    def write(self, entries: Sequence[Entry], *, wait: float = WAIT) -> list[bool]:
        """Write all entries of `insert_campaign`, `insert_tick`, `end_campaign`, `move_campaigns` and `move_campaign`, or none.

        Returns which were new. No answer is changed.

        Args:
            wait: most seconds for the lock.

        Raises:
            JournalBusyError: others had the lock for so long; nothing is written.
            sqlite3.Error: the disk is full or the file is damaged; nothing is written.
        """
        with self._lock_writer(wait) as writer, transaction(writer):
            return [writer.execute(*entry).rowcount == 1 for entry in entries]

    @contextmanager
    def _lock_writer(self, wait: float) -> Iterator[sqlite3.Connection]:
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
        return self._parse_campaign(rows[0]) if rows else None

    def find_by_key(self, key: str) -> Json | None:
        """The campaign opened with this key. Raises DamagedRowError."""
        rows = self._read(f"SELECT {CAMPAIGN} FROM campaigns WHERE key = ?", key)
        return self._parse_campaign(rows[0]) if rows else None

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
            ((newest,),) = self._list("SELECT MAX(number) FROM campaigns")
        else:
            query = "SELECT MAX(number) - 1 FROM campaigns WHERE id = ?"
            ((newest,),) = self._list(query, before)
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
        ((older,),) = self._list("SELECT id FROM campaigns WHERE number >= ? LIMIT 1", oldest)
        return exact + rows, older

    def campaign_and_answer(self, id: str) -> Row | None:
        """A campaign with the answer to its last tick. `insert_tick` of the campaign is the time of that
        tick, seconds since 1970; None: there is none.

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
        """`campaign_and_answer`, from the file."""
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

    def open_models(self) -> list[tuple[str | None, int, int]]:
        """(model, number of its campaigns that have not ended, steps of the longest) of each.
        Damaged campaigns, which no model answers, are left out.
        """
        counts: Counter[str | None] = Counter()
        longest: dict[str | None, int] = {}
        horizon = "CASE WHEN json_valid(facts) THEN json_extract(facts, '$.horizon') END"
        for row in self._iter_rows(
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
                request, answer = self._parse_tick(row)
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

    def tick_sums(self, steps: Mapping[str, int]) -> dict[str, int | None]:
        """The checksum of a tick of each of some campaigns as it was written; None: it has none.
        Campaigns without this tick are left out.

        Args:
            steps: of the ticks, by campaign.
        """
        sums: dict[str, int | None] = {}
        for pairs in split_batches(list(steps.items())):
            values = ", ".join(["(?, ?)"] * len(pairs))
            query = (
                f"WITH asked (id, number) AS (VALUES {values}) SELECT campaign, sum"
                " FROM asked CROSS JOIN ticks ON campaign = id AND step = number"
            )
            sums |= dict(self._read(query, *chain.from_iterable(pairs)))
        return sums

    def filter_open(self, ids: Sequence[str]) -> set[str]:
        """Those of some campaigns that there are and that have not ended."""
        still_open: set[str] = set()
        for some in split_batches(ids):
            marks = ", ".join("?" * len(some))
            query = f"SELECT id FROM campaigns WHERE id IN ({marks}) AND ended IS NULL"
            still_open |= {id for (id,) in self._read(query, *some)}
        return still_open

    def tick(self, id: str, step: int) -> tuple[str, str] | None:
        """(request, answer) of a tick as they were written. Raises DamagedRowError."""
        rows = self._read(f"SELECT {TICK} FROM ticks WHERE campaign = ? AND step = ?", id, step)
        return self._parse_tick(rows[0]) if rows else None

    def _list_with_answers(self, which: str, *values: object) -> list[Row]:
        """Campaigns with the answer to their last tick, without those of which a row is damaged."""
        rows = []
        query = f"SELECT {CAMPAIGN}, {LAST_TICK} FROM campaigns {LAST} {which}"
        for row in self._list(query, *values):
            with suppress(DamagedRowError):
                rows.append(self._parse_row(row))
        return rows

    def _iter_sound(self, which: str, *values: object) -> Iterator[Json]:
        """Campaigns, one after the other, without those whose row is damaged."""
        for row in self._iter_rows(f"SELECT {CAMPAIGN} FROM campaigns {which}", *values):
            try:
                campaign = self._parse_campaign(row)
            except DamagedRowError:
                continue
            yield campaign

    def _parse_row(self, row: Columns) -> Row:
        """CAMPAIGN and LAST_TICK of a row."""
        campaign = self._parse_campaign(row[:CAMPAIGN_WIDTH])
        last_tick = row[CAMPAIGN_WIDTH:]
        if last_tick[0] is None:
            return campaign, None
        _, answer = self._parse_tick(last_tick)
        return campaign, json.loads(answer)

    def _parse_campaign(self, row: Columns) -> Json:
        """A row of CAMPAIGN, checked."""
        id, _, opened, settings, _, ended, model, _ = row
        if not is_sound(row):
            raise self._report_damage(f"campaign {id}")
        campaign = {"id": id, "opened": opened, "ended": ended, "model": model}
        campaign |= json.loads(settings)
        return campaign

    def _parse_tick(self, row: Columns) -> tuple[str, str]:
        """(request, answer) of a row of TICK, checked."""
        campaign, step, request, answer, at, sum = row
        if sum not in (None, checksum(campaign, step, request, answer, at)):
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

    def _list(self, query: str, *values: object) -> list[Columns]:
        """Rows of a query that reads many of them, on a connection of its own."""
        with self._listing:
            return self._lister.execute(query, values).fetchall()

    def check_pages(self) -> None:
        """Read the whole file. Raises sqlite3.DatabaseError if it is damaged."""
        with self._listing:
            _check_pages(self._lister)

    def check_rows(self) -> RowCheck:
        """Compare every row with its checksum, and look for rows that are missing: ticks between
        others, campaigns that have ticks, and open campaigns, which are counted.

        Raises:
            sqlite3.DatabaseError: the file itself is damaged.
        """
        self.check_pages()
        check = RowCheck()
        self._check_campaigns(check)
        self._check_ticks(check)
        orphans = (
            "SELECT DISTINCT campaign FROM ticks WHERE campaign NOT IN (SELECT id FROM campaigns)"
        )
        for (id,) in self._iter_rows(orphans):
            check.faults.append(f"campaign {id}, which has ticks, is missing")
        still_open = "SELECT COUNT(*) FROM campaigns WHERE ended IS NULL"
        ((counted, there),) = self._list(f"SELECT (SELECT open FROM counts), ({still_open})")
        if counted != there:
            check.faults.append(f"{counted} open campaigns were counted, {there} are there")
        return check

    def _check_campaigns(self, check: RowCheck) -> None:
        for row in self._iter_rows(f"SELECT {CAMPAIGN} FROM campaigns ORDER BY number"):
            check.campaigns += 1
            check.unchecked += row[4] is None
            with check.collect_faults():
                self._parse_campaign(row)

    def _check_ticks(self, check: RowCheck) -> None:
        campaign, next_step = "", 0
        for row in self._iter_rows(f"SELECT {TICK} FROM ticks ORDER BY campaign, step"):
            check.ticks += 1
            check.unchecked += row[5] is None
            if row[0] != campaign:
                campaign, next_step = row[0], 0
            step = row[1]
            if step != next_step:
                missing = f"ticks {next_step} to {step - 1} of campaign {campaign} are missing"
                check.faults.append(missing)
            next_step = step + 1
            with check.collect_faults():
                self._parse_tick(row)

    def _iter_rows(self, query: str, *values: object) -> Iterator[Columns]:
        """The rows of a query, one after the other: all of them may not fit into memory."""
        with self._listing:
            yield from self._lister.execute(query, values)

    def prune(self, before: float) -> int:
        """Remove campaigns that have ended and whose last tick is older, with their ticks and their
        rows of the tables BESIDE the journal. A server may run.

        Args:
            before: seconds since 1970.

        Returns:
            The number of campaigns that were removed.

        Raises:
            ValueError: a file beside the journal cannot be written; its campaigns stay.
        """
        last = "SELECT at FROM ticks WHERE campaign = id ORDER BY step DESC LIMIT 1"
        old = f"ended IS NOT NULL AND MAX(opened, COALESCE(({last}), 0)) < ?"
        count = 0
        while ids := self._list(
            f"SELECT id FROM campaigns WHERE {old} LIMIT {PRUNE_BATCH}", before
        ):
            # The journal comes last: what fails before is found again by the next call.
            for name, tables in SIDECAR_TABLES.items():
                _delete_beside(self.sidecar_path(name), tables, ids)
            with self._lock_writer(WAIT) as writer, transaction(writer):
                writer.executemany("DELETE FROM ticks WHERE campaign = ?", ids)
                writer.executemany("DELETE FROM campaigns WHERE id = ?", ids)
            count += len(ids)
        return count

    def check_file(self) -> None:
        """Raise sqlite3.DatabaseError if the file at the path is not the one that is open."""
        check_same_file(self._opened_path, self._file)

    def check_room(self) -> None:
        """Write and delete 100 kB. Raises sqlite3.Error if that fails, soon if it is locked."""
        with self._lock_writer(READ_WAIT) as writer:
            # Committed before it is dropped: SQLite writes no page that its transaction frees.
            with transaction(writer):
                writer.execute("CREATE TABLE IF NOT EXISTS room (x)")
                writer.execute("INSERT INTO room VALUES (zeroblob(100000))")
            # another process that checks may have dropped it
            writer.execute("DROP TABLE IF EXISTS room")

    def backup(self, to: str | Path) -> None:
        """Copy the journal and the files of COPIED beside it, also while a server writes them.

        Raises:
            ValueError: there is a file already.
        """
        for path in (to, *[f"{to}.{name}" for name in COPIED_SIDECARS]):
            if Path(path).exists():
                raise ValueError(f"to: expected a new file, got {path}, which exists")
        with ExitStack() as stack:
            # The journal is copied last: no copy beside it is ahead of it.
            for name in COPIED_SIDECARS:
                path = self.sidecar_path(name)
                if Path(path).is_file():
                    source = stack.enter_context(closing(_connect_to_read(path)))
                    _copy(source, stack.enter_context(atomic(f"{to}.{name}")))
            with self._reading:
                _copy(self._reader, stack.enter_context(atomic(to)))

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
    return explained(
        f"journal: {path} cannot be read or written",
        sqlite3.Error,
        remedy="if it is damaged, put a backup in its place by `decisionllm journal restore`",
    )


def is_busy(error: sqlite3.Error) -> bool:
    """Whether the error is that another connection holds a lock."""
    # the lowest byte: SQLITE_BUSY_RECOVERY and others are kinds of it
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Several statements, all or none, with the lock for writing from their beginning."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def open_sidecar(path: str | Path, schema: str, *, wait: float) -> sqlite3.Connection:
    """A connection to a file that a server keeps beside its journal, created if there is none.

    A killed process loses nothing of it. A power failure may lose the last rows, but damages none.

    Args:
        path: of the file; `:memory:` is shared with nobody.
        schema: statements that make its tables where they lack.
        wait: seconds for the lock that other processes hold, once the file is open.

    Raises:
        sqlite3.Error: the file cannot be written or is none of ours.
    """
    file = sqlite3.connect(path, timeout=WAIT, isolation_level=None, check_same_thread=False)
    _enable_wal(file)
    file.execute("PRAGMA synchronous=NORMAL")
    file.executescript(schema)
    file.execute(f"PRAGMA busy_timeout={int(1000 * wait)}")
    return file


def _enable_wal(file: sqlite3.Connection) -> None:
    """Let a file have a log, so that reads wait for no write.

    SQLite does not wait if another process has just begun to write a new file, as replicas that
    start together do.
    """
    end = time.monotonic() + WAIT
    while True:
        try:
            file.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > end:
                raise
        time.sleep(0.01)


def checksum(*values: str | float | None) -> int:
    """The checksum of the values of a row that never change."""
    return zlib.crc32(repr(values).encode())


def resolve_path(path: str | Path, *, read_only: bool = False) -> str:
    """Return the one path of a journal, whatever links lead to it.

    SQLite keeps its log beside this path, and a server its reservations and other files.

    Args:
        path: absolute, relative or through links; `:memory:` stays.
        read_only: a hard link of a file without a log, such as a backup, is taken.

    Raises:
        ValueError: the file has a hard link: one file would have several such paths.
    """
    if str(path) == ":memory:":
        return ":memory:"
    resolved = os.path.realpath(path)
    with suppress(OSError):  # a file that is missing or cannot be read is named when it is opened
        status = os.stat(resolved)
        num_links = status.st_nlink if stat.S_ISREG(status.st_mode) else 1
        if num_links > 1 and not (read_only and not _has_log(resolved)):
            raise ValueError(
                f"journal: expected a file with one name, got {num_links} hard links of {resolved};"
                " copy it, or remove its other names"
            )
    return resolved


def _has_log(path: str) -> bool:
    """Whether the header of a SQLite file says that changes are written to a log beside it."""
    with open(path, "rb") as file:
        header = file.read(20)
    return header[18:] == b"\2\2"  # the file format's version to write and to read: WAL


def is_sound(row: Columns) -> bool:
    """Whether a row that begins with CAMPAIGN is as it was written."""
    _, _, _, _, sum, _, model, model_sum, *_ = row
    if sum is not None and sum != checksum(*row[:4]):
        return False
    return model_sum is None or model_sum == model_checksum(model)


@lru_cache(64)
def model_checksum(model: str | None) -> int:
    """`checksum` of the name of a model, which many campaigns share."""
    return checksum(model)


def split_batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield so many items at a time as one statement may name."""
    for start in range(0, len(items), READ_BATCH):
        yield items[start : start + READ_BATCH]


def check_same_file(path: str | Path, opened: tuple[int, int] | None) -> None:
    """Raise sqlite3.DatabaseError if another file lies at the path than the one that was opened.

    Args:
        path: of the file.
        opened: its `file_identity`; None: one in memory.
    """
    if opened is not None and opened != file_identity(path):
        raise sqlite3.DatabaseError("the file was removed or replaced while it was in use")


def file_identity(path: str | Path) -> tuple[int, int] | None:
    """Which file lies at a path; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _connect(path: str, wait: float = WAIT) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=wait,
        isolation_level=None,
        check_same_thread=False,
        uri=path.startswith("file:"),
    )
    # A damaged byte is found by the checksum of its row. Until then it must neither stop the read
    # of other rows nor be a character that no log, answer or query can hold.
    connection.text_factory = methodcaller("decode", errors="backslashreplace")
    return connection


def _connect_to_read(path: str) -> sqlite3.Connection:
    """A connection that changes no row.

    Where nothing can be written beside the file, it must have no log.
    """
    file = Path(path).resolve()
    connection = _connect(f"{file.as_uri()}?mode=rw")
    try:
        connection.execute("PRAGMA query_only=1")
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError:
        log = file.with_name(f"{file.name}-wal")
        has_log = log.is_file() and log.stat().st_size
        if has_log or not file.is_file():
            raise
        connection = _connect(f"{file.as_uri()}?immutable=1")
    return connection


def _show_as_newest(file: sqlite3.Connection, version: int) -> None:
    """Let a connection that changes no row read an older version like the newest."""
    file.execute("PRAGMA query_only=0")  # which forbids views of the connection's own, too
    for view in AS_NEWEST[version]:
        file.execute(view)
    file.execute("PRAGMA query_only=1")


def _delete_beside(path: str, tables: Sequence[str], ids: Sequence[tuple[str]]) -> None:
    """Delete the rows of campaigns in a file beside a journal, if there is one."""
    if not Path(path).is_file():
        return
    with (
        explained(f"{path} cannot be written", sqlite3.Error, remedy="if it is damaged, remove it"),
        closing(_connect(path)) as file,
        transaction(file),
    ):
        for table in tables:
            file.executemany(f"DELETE FROM {table} WHERE campaign = ?", ids)


def _copy(source: sqlite3.Connection, to: Path) -> None:
    """Copy a database. Raises sqlite3.DatabaseError if it is damaged."""
    with closing(sqlite3.connect(to)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, readable from anywhere
        _check_pages(copy)


def _check_pages(file: sqlite3.Connection) -> None:
    """Read a whole database. Raises sqlite3.DatabaseError if it is damaged."""
    ((result,),) = file.execute("PRAGMA quick_check(1)")
    if result != "ok":
        raise sqlite3.DatabaseError(result)


def insert_campaign(id: str, key: str | None, settings: Json, model: str = "") -> Entry:
    """The entry of a new campaign. Of several with the same key only the first is written."""
    values = id, key, time.time(), json.dumps(settings)
    columns = "id, key, opened, facts, sum, model, model_sum"
    return (
        f"INSERT OR IGNORE INTO campaigns ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*values, checksum(*values), model, checksum(model)),
    )


def insert_tick(id: str, step: int, request: str, answer: str, model: str = "") -> Entry:
    """The entry of a tick of a campaign that has not ended and is this model's.

    Request and answer are JSON and read back unchanged.
    """
    still_open = "EXISTS (SELECT 1 FROM campaigns WHERE id = ? AND ended IS NULL AND model = ?)"
    values = id, step, request, answer, time.time()
    return (
        f"INSERT OR IGNORE INTO ticks ({TICK}) SELECT ?, ?, ?, ?, ?, ? WHERE {still_open}",
        (*values, checksum(*values), id, model),
    )


def end_campaign(id: str, how: str) -> Entry:
    """The entry of the end of a campaign."""
    return "UPDATE campaigns SET ended = ? WHERE id = ? AND ended IS NULL", (how, id)


def end_by_tick(tick: Entry) -> Entry:
    """The entry of the end of a campaign by its last tick, an entry of `insert_tick` before it.

    A tick that is not written, as another one of its step was, or another model's, ends nothing.
    """
    _, (id, step, _, _, _, sum, *_) = tick
    written = "EXISTS (SELECT 1 FROM ticks WHERE campaign = ? AND step = ? AND sum = ?)"
    return (
        f"UPDATE campaigns SET ended = 'over' WHERE id = ? AND ended IS NULL AND {written}",
        (id, id, step, sum),
    )


def move_campaigns(model: str, of: str | None) -> Entry:
    """The entry after which a model answers all campaigns of another one that have not ended.

    Args:
        of: the other model; None: of campaigns of version 1, which did not know it.
    """
    which = "ended IS NULL AND model IS ?"
    return (
        f"UPDATE campaigns SET model = ?, model_sum = ? WHERE {which}",
        (model, checksum(model), of),
    )


def move_campaign(id: str, model: str, of: str) -> Entry:
    """The entry after which a model answers a campaign of another one, if it has not ended."""
    which = "id = ? AND ended IS NULL AND model = ?"
    return (
        f"UPDATE campaigns SET model = ?, model_sum = ? WHERE {which}",
        (model, checksum(model), id, of),
    )
