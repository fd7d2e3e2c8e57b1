"""Journal of served campaigns and their ticks: a SQLite file, written before an answer is sent.

One row per campaign and one per tick. A write is one transaction that is on the disk when it
returns (WAL, synchronous=FULL), so that neither a killed process nor a power failure loses an
answered tick; writes that come together share a transaction.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from decisionllm.files import atomic, explained

Entry = tuple[str, tuple[Any, ...]]  # an SQL statement and its values

VERSION = 2  # of the tables
APPLICATION = 0x444C4C4D  # SQLite's application_id: DLLM
VERSION_1 = (
    # facts: the settings in JSON
    "CREATE TABLE campaigns (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE,"
    " opened REAL NOT NULL, facts TEXT NOT NULL, ended TEXT)",
    "CREATE TABLE ticks (campaign TEXT NOT NULL REFERENCES campaigns (id), step INTEGER NOT NULL,"
    " request TEXT NOT NULL, answer TEXT NOT NULL, PRIMARY KEY (campaign, step)) WITHOUT ROWID",
)
# What version 2 adds; a file of version 1 gets it when a server opens it.
VERSION_2 = (
    # model: that answers the campaign; NULL: version 1 did not know it
    "ALTER TABLE campaigns ADD COLUMN model TEXT",
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
WAIT = 10.0  # most seconds for a lock that another process holds
# of reads, which wait for no write in WAL mode, so that they may run in an event loop
READ_WAIT = 0.25
SEARCHED = 50_000  # most campaigns that one search reads
LAST = "(SELECT answer FROM ticks WHERE campaign = id ORDER BY step DESC LIMIT 1)"
COLUMNS = "id, opened, ended, model, facts"  # of a campaign
Row = tuple[dict[str, Any], dict[str, Any] | None]  # a campaign, and the answer to its last tick


class JournalBusyError(sqlite3.OperationalError):
    """Another process or thread has the lock for writing."""


class Journal:
    """Campaigns and ticks in a file; safe to use from any thread and from several processes.

    Args:
        path: a file, created if there is none; `:memory:` keeps nothing after the process.
        read_only: no row is written; the file may be a running server's, or lie where nothing can
            be written.

    Raises:
        ValueError: the file cannot be written, is no journal, or one of another version.
    """

    def __init__(self, path: str | Path = ":memory:", *, read_only: bool = False) -> None:
        self.path = str(path)
        self.shadow_path = self._beside("shadow")
        self.bids_path = self._beside("bids")
        in_memory = self.path == ":memory:"
        kind = "a file to write, or one written by a server"
        if read_only:
            kind = "a journal of a server"
        with explained(f"journal: expected {kind}, got {path}", sqlite3.Error, OSError):
            self._writing = threading.Lock()
            if read_only:
                self._writer = _connect_to_read(self.path)
            else:
                self._open_to_write()
            pragmas = "PRAGMA application_id", "PRAGMA user_version"
            application, version = (self._writer.execute(x).fetchone()[0] for x in pragmas)
            self._reader = self._lister = self._writer
            self._reading = self._listing = self._writing
            if not in_memory and not read_only:
                # Reads of one campaign, which bids need, wait neither for a write nor for a list.
                self._reader = _connect(self.path, READ_WAIT)
                self._reading = threading.Lock()
                self._lister = _connect(self.path)
                self._listing = threading.Lock()
        got = "another database"
        if application == APPLICATION:
            got = f"version {version}"
            if version == 1:
                got += ", which a server that starts with it brings up to date"
        if (application, version) != (APPLICATION, VERSION):
            raise ValueError(f"journal: expected one of version {VERSION}, got {got}: {self.path}")

    def _beside(self, name: str) -> str:
        """The path of a file beside the journal; nothing is beside one in memory."""
        return ":memory:" if self.path == ":memory:" else f"{self.path}.{name}"

    def _open_to_write(self) -> None:
        if self.path != ":memory:":
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        self._writer = _connect(self.path)
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.execute("PRAGMA synchronous=FULL")
        # of two processes that start together, one makes the tables
        with transaction(self._writer):
            empty = not self._writer.execute("SELECT 1 FROM sqlite_master").fetchone()
            statements = VERSION_1 if empty else ()
            if empty or self._is_version_1():
                for statement in (*statements, *VERSION_2):
                    self._writer.execute(statement)
                self._writer.execute(f"PRAGMA application_id={APPLICATION}")
                self._writer.execute(f"PRAGMA user_version={VERSION}")

    def _is_version_1(self) -> bool:
        pragmas = "PRAGMA application_id", "PRAGMA user_version"
        found = [self._writer.execute(pragma).fetchone()[0] for pragma in pragmas]
        return found == [APPLICATION, 1]

    def write(self, entries: Sequence[Entry], *, wait: float = WAIT) -> list[bool]:
        """Write all entries of `opened`, `ticked`, `ended` and `moved`, or none.

        Returns which were new. No answer is changed.

        Args:
            wait: most seconds for the lock.

        Raises:
            JournalBusyError: others had the lock for so long; nothing is written.
            sqlite3.Error: the disk is full or the file is damaged; nothing is written.
        """
        with self._locked(wait) as writer, transaction(writer):
            return [writer.execute(*entry).rowcount == 1 for entry in entries]

    @contextmanager
    def _locked(self, wait: float) -> Iterator[sqlite3.Connection]:
        """The connection that writes, waiting at most so many seconds for threads and processes."""
        end = time.monotonic() + wait
        if not self._writing.acquire(timeout=wait):
            raise JournalBusyError("locked by another thread")
        try:
            left = max(int(1000 * (end - time.monotonic())), 0)
            self._writer.execute(f"PRAGMA busy_timeout={left}")
            yield self._writer
        except sqlite3.OperationalError as error:
            # the lowest byte: SQLITE_BUSY_RECOVERY and others are kinds of it
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise JournalBusyError("locked by another process") from error
            raise
        finally:
            self._writing.release()

    def campaigns(self) -> list[dict[str, Any]]:
        """Every campaign in the order of opening.

        It has id, opened (seconds since 1970), ended (how, or None), model and its settings.
        """
        return [campaign for campaign, _ in self._listed("ORDER BY number", answer="NULL")]

    def campaign(self, id: str) -> dict[str, Any] | None:
        return next((campaign for campaign, _ in self._found("WHERE id = ?", id)), None)

    def keyed(self, key: str) -> dict[str, Any] | None:
        """The campaign opened with this key."""
        return next((campaign for campaign, _ in self._found("WHERE key = ?", key)), None)

    def latest(
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
        last = "(SELECT MAX(number) FROM campaigns)"
        if before is not None:
            last = "(SELECT number - 1 FROM campaigns WHERE id = ?)"
        ((newest,),) = self._list(f"SELECT {last}", *[before] * (before is not None))
        if newest is None:
            return [], None
        oldest = 1
        exact: list[Row] = []
        which = "number BETWEEN ? AND ?"
        words: list[str] = []
        if search:
            oldest = max(newest - SEARCHED + 1, 1)
            which += " AND (instr(lower(json_extract(facts, '$.name')), lower(?))"
            which += " OR instr(id, ?) = 1 OR instr(key, ?) = 1)"
            words = [search] * 3
            if before is None:
                known = "WHERE (id = ? OR key = ?) AND number < ?"
                exact = self._listed(known, search, search, oldest)
        rows = self._listed(
            f"WHERE {which} ORDER BY number DESC LIMIT ?", oldest, newest, *words, count + 1
        )
        if len(rows) > count:
            return exact + rows[:count], rows[count - 1][0]["id"]
        if oldest == 1:
            return exact + rows, None
        ((older,),) = self._list("SELECT id FROM campaigns WHERE number >= ? LIMIT 1", oldest)
        return exact + rows, older

    def last(self, id: str) -> Row | None:
        """A campaign with the answer to its last tick."""
        return next(iter(self._found("WHERE id = ?", id, answer=LAST)), None)

    def _found(self, which: str, *values: Any, answer: str = "NULL") -> list[Row]:
        return _rows(self._read(f"SELECT {COLUMNS}, {answer} FROM campaigns {which}", *values))

    def _listed(self, which: str, *values: Any, answer: str = LAST) -> list[Row]:
        return _rows(self._list(f"SELECT {COLUMNS}, {answer} FROM campaigns {which}", *values))

    def still_open(self) -> int:
        """Number of campaigns that have not ended."""
        ((count,),) = self._list("SELECT open FROM counts")
        return int(count)

    def open_models(self) -> list[tuple[str | None, int, int]]:
        """(model, number of its campaigns that have not ended, steps of the longest) of each."""
        longest = "MAX(json_extract(facts, '$.horizon'))"
        query = f"SELECT model, COUNT(*), {longest} FROM campaigns WHERE ended IS NULL"
        return self._list(f"{query} GROUP BY model")

    def open_ids(self, count: int, model: str) -> list[str]:
        """Ids of a model's campaigns that have not ended, the newest first, at most so many."""
        which = "ended IS NULL AND model = ? ORDER BY number DESC LIMIT ?"
        return [id for (id,) in self._list(f"SELECT id FROM campaigns WHERE {which}", model, count)]

    def ticks(self, id: str, first: int = 0) -> list[dict[str, Any]]:
        """The ticks of a campaign from this one on, in their order: index, request and answer."""
        which = "campaign = ? AND step >= ? ORDER BY step"
        rows = self._read(f"SELECT step, request, answer FROM ticks WHERE {which}", id, first)
        found = []
        for step, request, answer in rows:
            tick = {"index": step, "request": json.loads(request), "answer": json.loads(answer)}
            found.append(tick)
        return found

    def steps(self, id: str) -> int:
        """Number of ticks of a campaign."""
        ((count,),) = self._read("SELECT COUNT(*) FROM ticks WHERE campaign = ?", id)
        return int(count)

    def tick(self, id: str, step: int) -> tuple[str, str] | None:
        """(request, answer) of a tick as they were written."""
        query = "SELECT request, answer FROM ticks WHERE campaign = ? AND step = ?"
        found = self._read(query, id, step)
        return found[0] if found else None

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def _list(self, query: str, *values: Any) -> list[Any]:
        """Rows of a query that reads many of them, on a connection of its own."""
        with self._listing:
            return self._lister.execute(query, values).fetchall()

    def verify(self) -> None:
        """Read the whole file. Raises sqlite3.DatabaseError if it is damaged."""
        found = self._list("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise sqlite3.DatabaseError(found[0][0])

    def check_room(self) -> None:
        """Write and delete 100 kB. Raises sqlite3.Error if that fails, soon if it is locked."""
        with self._locked(READ_WAIT) as writer:
            writer.execute("CREATE TABLE IF NOT EXISTS room (x)")
            writer.execute("INSERT INTO room VALUES (zeroblob(100000))")
            writer.execute("DROP TABLE room")

    def backup(self, to: str | Path) -> None:
        """Copy the journal, and the decisions of a shadow policy beside it, also while a server
        writes them.

        Raises:
            ValueError: there is a file already.
        """
        for path in (to, f"{to}.shadow"):
            if Path(path).exists():
                raise ValueError(f"to: expected a new file, got {path}, which exists")
        with ExitStack() as stack:
            # first, so that it has no decision on a tick that the copied journal lacks
            if Path(self.shadow_path).is_file():
                shadow = stack.enter_context(closing(_connect_to_read(self.shadow_path)))
                _copy(shadow, stack.enter_context(atomic(f"{to}.shadow")))
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


def _connect(path: str, wait: float = WAIT) -> sqlite3.Connection:
    return sqlite3.connect(
        path,
        timeout=wait,
        isolation_level=None,
        check_same_thread=False,
        uri=path.startswith("file:"),
    )


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


def _rows(found: list[Any]) -> list[Row]:
    """Rows of COLUMNS and an answer, read from their JSON."""
    rows = []
    for id, opened, ended, model, settings, last in found:
        campaign = {"id": id, "opened": opened, "ended": ended, "model": model}
        campaign |= json.loads(settings)
        rows.append((campaign, json.loads(last) if last else None))
    return rows


def _copy(source: sqlite3.Connection, to: Path) -> None:
    with closing(sqlite3.connect(to)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, readable from anywhere


def opened(id: str, key: str | None, settings: dict[str, Any], model: str = "") -> Entry:
    """The entry of a new campaign. Of several with the same key only the first is written."""
    values = id, key, time.time(), json.dumps(settings), model
    columns = "id, key, opened, facts, model"
    return f"INSERT OR IGNORE INTO campaigns ({columns}) VALUES (?, ?, ?, ?, ?)", values


def ticked(id: str, step: int, request: str, answer: str, model: str = "") -> Entry:
    """The entry of a tick of a campaign that has not ended and is this model's.

    Request and answer are JSON and read back unchanged.
    """
    columns = "campaign, step, request, answer"
    still_open = "EXISTS (SELECT 1 FROM campaigns WHERE id = ? AND ended IS NULL AND model = ?)"
    values = id, step, request, answer, id, model
    return f"INSERT OR IGNORE INTO ticks ({columns}) SELECT ?, ?, ?, ? WHERE {still_open}", values


def ended(id: str, how: str) -> Entry:
    """The entry of the end of a campaign."""
    return "UPDATE campaigns SET ended = ? WHERE id = ? AND ended IS NULL", (how, id)


def moved(model: str) -> Entry:
    """The entry after which this model answers all campaigns that have not ended."""
    return "UPDATE campaigns SET model = ? WHERE ended IS NULL AND model IS NOT ?", (model, model)
