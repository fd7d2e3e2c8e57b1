"""What was asked and what was answered, in a SQLite file: written before an answer leaves, read back whole.

A row a campaign and a row a tick. A write is a transaction that is on the disk when it returns (WAL, synchronous=FULL), so that
neither a killed process nor a machine without power loses what somebody was told; writes that come together share one.
"""

import json
import sqlite3
import threading
import time
from pathlib import Path

VERSION, APPLICATION = 1, 0x444C4C4D  # of the schema; what the file says it is: DLLM
SCHEMA = (
    "CREATE TABLE campaigns (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE, opened REAL NOT NULL,"
    " facts TEXT NOT NULL, ended TEXT)",
    "CREATE TABLE ticks (campaign TEXT NOT NULL REFERENCES campaigns (id), step INTEGER NOT NULL, request TEXT NOT NULL,"
    " answer TEXT NOT NULL, PRIMARY KEY (campaign, step)) WITHOUT ROWID",
)


class Journal:
    """path: a file, made if there is none; `:memory:` keeps nothing. It may be used from any thread, and by several processes."""

    def __init__(self, path=":memory:"):
        self.path = str(path)
        try:
            if self.path != ":memory:":
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self._writer, self._writing = self._connect(), threading.Lock()
            self._prepare()
            self._reader, self._reading = self._writer, self._writing
            if self.path != ":memory:":  # readers do not wait for a write
                self._reader, self._reading = self._connect(), threading.Lock()
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"journal: expected a file to write, or one written by a server, got {path} ({error})") from error

    def _connect(self):
        return sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)

    def _prepare(self):
        ask = lambda pragma: self._writer.execute(f"PRAGMA {pragma}").fetchone()[0]  # noqa: E731
        ask("journal_mode=WAL")
        self._writer.execute("PRAGMA synchronous=FULL")
        self._writer.execute("BEGIN IMMEDIATE")  # of two that begin together, one makes the tables
        if not self._writer.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in (*SCHEMA, f"PRAGMA application_id={APPLICATION}", f"PRAGMA user_version={VERSION}"):
                self._writer.execute(statement)
        self._writer.execute("COMMIT")
        found = ask("application_id"), ask("user_version")
        if found != (APPLICATION, VERSION):
            raise ValueError(
                f"journal: expected one of version {VERSION}, got "
                f"{f'version {found[1]}' if found[0] == APPLICATION else 'another database'}: {self.path}"
            )

    def write(self, entries):
        """Write all of these or none: entries as `opened`, `ticked` and `ended` make them. -> for each whether it was new; what was
        there before stays as it is."""
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

    def campaigns(self):
        """Every campaign in the order of opening: its id, when it was opened, how it ended, or None, and what was said of it."""
        for row in self._read("SELECT id, opened, ended, facts FROM campaigns ORDER BY number"):
            yield _campaign(*row)

    def campaign(self, id):
        """One of them, or None."""
        found = self._read("SELECT id, opened, ended, facts FROM campaigns WHERE id = ?", id)
        return _campaign(*found[0]) if found else None

    def keyed(self, key):
        """The campaign that was opened with this key, or None."""
        found = self._read("SELECT id, opened, ended, facts FROM campaigns WHERE key = ?", key)
        return _campaign(*found[0]) if found else None

    def latest(self, count):
        """The last to be opened, newest first, each with the answer to its last tick, or None."""
        rows = self._read(
            "SELECT id, opened, ended, facts, (SELECT answer FROM ticks WHERE campaign = id ORDER BY step DESC LIMIT 1)"
            " FROM campaigns ORDER BY number DESC LIMIT ?", count,
        )  # fmt: skip
        return [(_campaign(*row), answer and json.loads(answer)) for *row, answer in rows]

    def still_open(self):
        """How many campaigns have not ended."""
        return self._read("SELECT COUNT(*) FROM campaigns WHERE ended IS NULL")[0][0]

    def ticks(self, id):
        """The ticks of a campaign in their order: what was asked, and what was answered."""
        rows = self._read("SELECT step, request, answer FROM ticks WHERE campaign = ? ORDER BY step", id)
        for step, request, answer in rows:
            yield {"index": step, "request": json.loads(request), "answer": json.loads(answer)}

    def steps(self, id):
        """How many ticks a campaign has."""
        return self._read("SELECT COUNT(*) FROM ticks WHERE campaign = ?", id)[0][0]

    def tick(self, id, step):
        """(request, answer) of one of them as they were written, or None."""
        found = self._read("SELECT request, answer FROM ticks WHERE campaign = ? AND step = ?", id, step)
        return found[0] if found else None

    def _read(self, query, *values):
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def close(self):
        for connection in {self._writer, self._reader}:
            connection.close()


def opened(id, key, facts):
    """The entry of a campaign that begins. key: of two with the same one, only the first is written; facts: a dict for JSON."""
    values = id, key, time.time(), json.dumps(facts)
    return "INSERT OR IGNORE INTO campaigns (id, key, opened, facts) VALUES (?, ?, ?, ?)", values


def ticked(id, step, request, answer):
    """The entry of a tick of a campaign that has not ended: request and answer as JSON, to be read back as they are."""
    return (
        "INSERT OR IGNORE INTO ticks SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM campaigns WHERE id = ? AND ended IS NULL)",
        (id, step, request, answer, id),
    )


def ended(id, how):
    """The entry of a campaign that ends."""
    return "UPDATE campaigns SET ended = ? WHERE id = ? AND ended IS NULL", (how, id)


def _campaign(id, opened, ended, facts):
    return {"id": id, "opened": opened, "ended": ended} | json.loads(facts)
