"""Journal of served campaigns and their ticks: a SQLite file, written before an answer is sent.

One row per campaign and one per tick. A write is one transaction that is on the disk when it returns (WAL, synchronous=FULL),
so that neither a killed process nor a power failure loses an answered tick; writes that come together share a transaction.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from decisionllm.files import atomic, explained

Entry = tuple[str, tuple[Any, ...]]  # an SQL statement and its values

VERSION, APPLICATION = 1, 0x444C4C4D  # of the tables; SQLite's application_id: DLLM
SCHEMA = (
    "CREATE TABLE campaigns (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE, opened REAL NOT NULL,"
    " facts TEXT NOT NULL, ended TEXT)",  # facts: the settings in JSON; the column's name belongs to version 1
    "CREATE TABLE ticks (campaign TEXT NOT NULL REFERENCES campaigns (id), step INTEGER NOT NULL, request TEXT NOT NULL,"
    " answer TEXT NOT NULL, PRIMARY KEY (campaign, step)) WITHOUT ROWID",
)
LAST = "(SELECT answer FROM ticks WHERE campaign = id ORDER BY step DESC LIMIT 1)"
Row = tuple[dict[str, Any], dict[str, Any] | None]  # a campaign, and the answer to its last tick


class Journal:
    """Campaigns and ticks in a file; safe to use from any thread and from several processes.

    Args:
        path: a file, created if there is none; `:memory:` keeps nothing after the process.
        read_only: no row is written; the file may be a running server's, or lie where nothing can be written.

    Raises:
        ValueError: the file cannot be written, is no journal, or one of another version.
    """

    def __init__(self, path: str | Path = ":memory:", *, read_only: bool = False) -> None:
        self.path = str(path)
        self.shadow_path = self._beside("shadow")
        self.bids_path = self._beside("bids")
        kind = "a journal of a server" if read_only else "a file to write, or one written by a server"
        with explained(f"journal: expected {kind}, got {path}", sqlite3.Error, OSError):
            if read_only:
                self._writer, self._writing = _connect_to_read(self.path), threading.Lock()
            else:
                self._open_to_write()
            found = tuple(self._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            self._reader, self._reading = self._writer, self._writing
            if self.path != ":memory:" and not read_only:  # readers do not wait for a write
                self._reader, self._reading = _connect(self.path), threading.Lock()
        if found != (APPLICATION, VERSION):
            got = f"version {found[1]}" if found[0] == APPLICATION else "another database"
            raise ValueError(f"journal: expected one of version {VERSION}, got {got}: {self.path}")

    def _beside(self, name: str) -> str:
        """The path of a file beside the journal; nothing is beside one in memory."""
        return ":memory:" if self.path == ":memory:" else f"{self.path}.{name}"

    def _open_to_write(self) -> None:
        if self.path != ":memory:":
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        self._writer, self._writing = _connect(self.path), threading.Lock()
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            self._writer.execute(f"PRAGMA {pragma}")
        self._writer.execute("BEGIN IMMEDIATE")  # of two processes that start together, one makes the tables
        if not self._writer.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in (*SCHEMA, f"PRAGMA application_id={APPLICATION}", f"PRAGMA user_version={VERSION}"):
                self._writer.execute(statement)
        self._writer.execute("COMMIT")

    def write(self, entries: Sequence[Entry]) -> list[bool]:
        """Write all entries of `opened`, `ticked` and `ended`, or none. Returns which were new; no row is changed."""
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                new = [self._writer.execute(*entry).rowcount == 1 for entry in entries]
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
        return new

    def campaigns(self) -> list[dict[str, Any]]:
        """Every campaign in the order of opening: id, opened (seconds since 1970), ended (how, or None) and its settings."""
        return [campaign for campaign, _ in self._found("ORDER BY number")]

    def campaign(self, id: str) -> dict[str, Any] | None:
        return next((campaign for campaign, _ in self._found("WHERE id = ?", id)), None)

    def keyed(self, key: str) -> dict[str, Any] | None:
        """The campaign opened with this key."""
        return next((campaign for campaign, _ in self._found("WHERE key = ?", key)), None)

    def latest(self, count: int, *, search: str = "", before: str | None = None) -> list[Row]:
        """The campaigns opened last, newest first, each with the answer to its last tick.

        Args:
            search: part of the name, or the beginning of the id or the key.
            before: the id of a campaign; only those opened before it.
        """
        where = (
            "WHERE (? = '' OR instr(lower(json_extract(facts, '$.name')), lower(?)) OR instr(id, ?) = 1 OR instr(key, ?) = 1)"
            " AND (? IS NULL OR number < (SELECT number FROM campaigns WHERE id = ?)) ORDER BY number DESC LIMIT ?"
        )
        return self._found(where, *(search,) * 4, before, before, count, answer=LAST)

    def last(self, id: str) -> Row | None:
        """A campaign with the answer to its last tick."""
        return next(iter(self._found("WHERE id = ?", id, answer=LAST)), None)

    def _found(self, which: str, *values: Any, answer: str = "NULL") -> list[Row]:
        rows = self._read(f"SELECT id, opened, ended, facts, {answer} FROM campaigns {which}", *values)
        return [({"id": id, "opened": opened, "ended": ended, **json.loads(settings)}, last and json.loads(last))
                for id, opened, ended, settings, last in rows]  # fmt: skip

    def still_open(self) -> int:
        """Number of campaigns that have not ended."""
        return int(self._read("SELECT COUNT(*) FROM campaigns WHERE ended IS NULL")[0][0])

    def open_ids(self, count: int) -> list[str]:
        """Ids of campaigns that have not ended, the one opened last first, at most so many."""
        query = "SELECT id FROM campaigns WHERE ended IS NULL ORDER BY number DESC LIMIT ?"
        return [id for (id,) in self._read(query, count)]

    def ticks(self, id: str, first: int = 0) -> list[dict[str, Any]]:
        """The ticks of a campaign from this one on, in their order: index, request and answer."""
        rows = self._read("SELECT step, request, answer FROM ticks WHERE campaign = ? AND step >= ? ORDER BY step", id, first)
        return [{"index": step, "request": json.loads(request), "answer": json.loads(answer)} for step, request, answer in rows]

    def steps(self, id: str) -> int:
        """Number of ticks of a campaign."""
        return int(self._read("SELECT COUNT(*) FROM ticks WHERE campaign = ?", id)[0][0])

    def tick(self, id: str, step: int) -> tuple[str, str] | None:
        """(request, answer) of a tick as they were written."""
        found = self._read("SELECT request, answer FROM ticks WHERE campaign = ? AND step = ?", id, step)
        return found[0] if found else None

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def verify(self) -> None:
        """Read the whole file. Raises sqlite3.DatabaseError if it is damaged."""
        if (found := self._read("PRAGMA quick_check(1)")) != [("ok",)]:
            raise sqlite3.DatabaseError(found[0][0])

    def check_room(self) -> None:
        """Write and delete 100 kB. Raises sqlite3.Error if that fails."""
        with self._writing:
            for statement in ("CREATE TABLE IF NOT EXISTS room (x)", "INSERT INTO room VALUES (zeroblob(100000))", "DROP TABLE room"):  # fmt: skip
                self._writer.execute(statement)

    def backup(self, to: str | Path) -> None:
        """Copy the journal, and the decisions of a shadow policy beside it, also while a server writes them.

        Raises:
            ValueError: there is a file already.
        """
        for path in (to, f"{to}.shadow"):
            if Path(path).exists():
                raise ValueError(f"to: expected a new file, got {path}, which exists")
        with ExitStack() as stack:
            if Path(self.shadow_path).is_file():  # first, so that it has no decision on a tick that the copied journal lacks
                shadow = stack.enter_context(closing(_connect_to_read(self.shadow_path)))
                _copy(shadow, stack.enter_context(atomic(f"{to}.shadow")))
            with self._reading:
                _copy(self._reader, stack.enter_context(atomic(to)))

    def close(self) -> None:
        """Close the file; what SQLite kept beside it is then in it, unless another process has it open."""
        with self._writing:
            self._writer.close()
        with self._reading:
            self._reader.close()


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False, uri=path.startswith("file:"))


def _connect_to_read(path: str) -> sqlite3.Connection:
    """A connection that changes no row; where nothing can be written beside the file, only to one without a log."""
    file = Path(path).resolve()
    connection = _connect(f"{file.as_uri()}?mode=rw")
    try:
        connection.execute("PRAGMA query_only=1")
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError:
        log = file.with_name(f"{file.name}-wal")
        if not file.is_file() or (log.is_file() and log.stat().st_size):
            raise
        connection = _connect(f"{file.as_uri()}?immutable=1")
    return connection


def _copy(source: sqlite3.Connection, to: Path) -> None:
    with closing(sqlite3.connect(to)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, readable from anywhere


def opened(id: str, key: str | None, settings: dict[str, Any]) -> Entry:
    """The entry of a new campaign. Of several with the same key only the first is written."""
    values = id, key, time.time(), json.dumps(settings)
    return "INSERT OR IGNORE INTO campaigns (id, key, opened, facts) VALUES (?, ?, ?, ?)", values


def ticked(id: str, step: int, request: str, answer: str) -> Entry:
    """The entry of a tick of a campaign that has not ended; request and answer are JSON and read back unchanged."""
    still_open = "EXISTS (SELECT 1 FROM campaigns WHERE id = ? AND ended IS NULL)"
    return f"INSERT OR IGNORE INTO ticks SELECT ?, ?, ?, ? WHERE {still_open}", (id, step, request, answer, id)


def ended(id: str, how: str) -> Entry:
    """The entry of the end of a campaign."""
    return "UPDATE campaigns SET ended = ? WHERE id = ? AND ended IS NULL", (how, id)
