"""Journal of served campaigns and their ticks: a SQLite file, written before an answer is sent.

One row per campaign and one per tick. A write is one transaction that is on the disk when it returns (WAL, synchronous=FULL),
so that neither a killed process nor a power failure loses an answered tick; writes that come together share a transaction.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Entry = tuple[str, tuple[Any, ...]]  # an SQL statement and its values

VERSION, APPLICATION = 1, 0x444C4C4D  # of the tables; SQLite's application_id: DLLM
SCHEMA = (
    "CREATE TABLE campaigns (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE, opened REAL NOT NULL,"
    " facts TEXT NOT NULL, ended TEXT)",  # facts: the settings in JSON; the column's name belongs to version 1
    "CREATE TABLE ticks (campaign TEXT NOT NULL REFERENCES campaigns (id), step INTEGER NOT NULL, request TEXT NOT NULL,"
    " answer TEXT NOT NULL, PRIMARY KEY (campaign, step)) WITHOUT ROWID",
)
CAMPAIGN = "SELECT id, opened, ended, facts FROM campaigns"


class Journal:
    """Campaigns and ticks in a file; safe to use from any thread and from several processes.

    Args:
        path: a file, created if there is none; `:memory:` keeps nothing after the process.

    Raises:
        ValueError: the file cannot be written, is no journal, or one of another version.
    """

    def __init__(self, path: str | Path = ":memory:") -> None:
        self.path = str(path)
        try:
            if self.path != ":memory:":
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self._writer, self._writing = self._connect(), threading.Lock()
            for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                self._writer.execute(f"PRAGMA {pragma}")
            self._writer.execute("BEGIN IMMEDIATE")  # of two processes that start together, one makes the tables
            if not self._writer.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in (*SCHEMA, f"PRAGMA application_id={APPLICATION}", f"PRAGMA user_version={VERSION}"):
                    self._writer.execute(statement)
            self._writer.execute("COMMIT")
            found = tuple(self._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            self._reader, self._reading = self._writer, self._writing
            if self.path != ":memory:":  # readers do not wait for a write
                self._reader, self._reading = self._connect(), threading.Lock()
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"journal: expected a file to write, or one written by a server, got {path} ({error})") from error
        if found != (APPLICATION, VERSION):
            got = f"version {found[1]}" if found[0] == APPLICATION else "another database"
            raise ValueError(f"journal: expected one of version {VERSION}, got {got}: {self.path}")

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)

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
        return [_campaign(*row) for row in self._read(f"{CAMPAIGN} ORDER BY number")]

    def campaign(self, id: str) -> dict[str, Any] | None:
        return next((_campaign(*row) for row in self._read(f"{CAMPAIGN} WHERE id = ?", id)), None)

    def keyed(self, key: str) -> dict[str, Any] | None:
        """The campaign opened with this key."""
        return next((_campaign(*row) for row in self._read(f"{CAMPAIGN} WHERE key = ?", key)), None)

    def latest(self, count: int) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        """The campaigns opened last, newest first, each with the answer to its last tick."""
        rows = self._read(
            "SELECT id, opened, ended, facts, (SELECT answer FROM ticks WHERE campaign = id ORDER BY step DESC LIMIT 1)"
            " FROM campaigns ORDER BY number DESC LIMIT ?", count,
        )  # fmt: skip
        return [(_campaign(*row), answer and json.loads(answer)) for *row, answer in rows]

    def still_open(self) -> int:
        """Number of campaigns that have not ended."""
        return int(self._read("SELECT COUNT(*) FROM campaigns WHERE ended IS NULL")[0][0])

    def ticks(self, id: str) -> list[dict[str, Any]]:
        """The ticks of a campaign in their order: index, request and answer."""
        rows = self._read("SELECT step, request, answer FROM ticks WHERE campaign = ? ORDER BY step", id)
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

    def close(self) -> None:
        for connection in {self._writer, self._reader}:
            connection.close()


def opened(id: str, key: str | None, settings: dict[str, Any]) -> Entry:
    """The entry of a new campaign. Of several with the same key only the first is written."""
    values = id, key, time.time(), json.dumps(settings)
    return "INSERT OR IGNORE INTO campaigns (id, key, opened, facts) VALUES (?, ?, ?, ?)", values


def ticked(id: str, step: int, request: str, answer: str) -> Entry:
    """The entry of a tick of a campaign that has not ended; request and answer are JSON and read back unchanged."""
    return (
        "INSERT OR IGNORE INTO ticks SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM campaigns WHERE id = ? AND ended IS NULL)",
        (id, step, request, answer, id),
    )


def ended(id: str, how: str) -> Entry:
    """The entry of the end of a campaign."""
    return "UPDATE campaigns SET ended = ? WHERE id = ? AND ended IS NULL", (how, id)


def _campaign(id: str, opened: float, ended: str | None, settings: str) -> dict[str, Any]:
    return {"id": id, "opened": opened, "ended": ended, **json.loads(settings)}
