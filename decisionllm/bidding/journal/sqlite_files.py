"""SQLite files of a server: connections that several processes share, and the path of a file.

A journal and the files beside it are opened, locked and copied by these functions.
"""

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from operator import methodcaller
from pathlib import Path

WAIT = 10.0  # most seconds for a lock that another process holds


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether the error is that another connection holds a lock."""
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
    enable_wal(file)
    file.execute("PRAGMA synchronous=NORMAL")
    file.executescript(schema)
    file.execute(f"PRAGMA busy_timeout={int(1000 * wait)}")
    return file


def enable_wal(file: sqlite3.Connection) -> None:
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
    """Return whether the header of a SQLite file says that changes are written to a log beside it."""
    with open(path, "rb") as file:
        header = file.read(20)
    return header[18:] == b"\2\2"  # the file format's version to write and to read: WAL


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


def connect(path: str, wait: float = WAIT) -> sqlite3.Connection:
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


def connect_to_read(path: str) -> sqlite3.Connection:
    """A connection that changes no row.

    Where nothing can be written beside the file, it must have no log.
    """
    file = Path(path).resolve()
    connection = connect(f"{file.as_uri()}?mode=rw")
    try:
        connection.execute("PRAGMA query_only=1")
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError:
        log = file.with_name(f"{file.name}-wal")
        has_log = log.is_file() and log.stat().st_size
        if has_log or not file.is_file():
            raise
        connection = connect(f"{file.as_uri()}?immutable=1")
    return connection


def copy_database(source: sqlite3.Connection, to: Path) -> None:
    """Copy a database. Raises sqlite3.DatabaseError if it is damaged."""
    with closing(sqlite3.connect(to)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, readable from anywhere
        check_pages(copy)


def check_pages(file: sqlite3.Connection) -> None:
    """Read a whole database. Raises sqlite3.DatabaseError if it is damaged."""
    ((result,),) = file.execute("PRAGMA quick_check(1)")
    if result != "ok":
        raise sqlite3.DatabaseError(result)
