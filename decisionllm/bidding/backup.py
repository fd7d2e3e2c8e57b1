"""`decisionllm backup`: a copy of a server's journal, whole also while the server writes it; and
the way back.
"""

import logging
import sqlite3
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from decisionllm.bidding.journal.checks import RowCheck, check_rows
from decisionllm.bidding.journal.journal import Journal, explain_journal_errors
from decisionllm.bidding.journal.sqlite_files import connect_to_read, copy_database, resolve_path
from decisionllm.bidding.server.reservations import open_file, rewind
from decisionllm.commands.options import read_options
from decisionllm.files import atomic, explain_errors
from decisionllm.registry import Node

# files beside a journal that a backup copies with it
SIDECAR_CONTENT = {
    "shadow": "the decisions of its shadow policy",
    "shading": "what bid shading learned",
}
REPLACED_SUFFIX = "replaced"  # suffix of what a restore puts aside
MAX_SHOWN = 5  # most faults that are logged
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BackupConfig:
    """The options of `backup`; configs/backup.yaml explains them."""

    journal: str
    to: str


def backup(config: Node) -> None:
    """Copy a journal (see configs/backup.yaml)."""
    options = read_options(BackupConfig, config)
    with explain_journal_errors(options.journal):
        with closing(Journal(options.journal, read_only=True)) as journal:
            copy_journal(journal, options.to)
        with closing(Journal(options.to, read_only=True)) as copy:
            check = check_rows(copy)
            copied = [name for name in SIDECAR_CONTENT if Path(copy.sidecar_path(name)).exists()]
    beside = "".join(f", and {SIDECAR_CONTENT[name]}" for name in copied)
    print(f"{options.to}: {check.campaigns:,} campaigns of {options.journal}{beside}")
    warn_of_faults(options.to, check)


def restore(journal: str | Path, copy: str | Path) -> list[Path]:
    """Put a copy that `backup` made in the place of a journal, which is kept beside it. Damaged
    rows of the copy are logged; a server leaves them out.

    Args:
        journal: file of campaigns and ticks; no server may run with it.
        copy: file that `backup` wrote.

    Returns:
        The files that were put aside.

    Raises:
        ValueError: the file of the copy is damaged or there is no room for it, the journal is in
            use or has a hard link, one was put aside before, or the file of its bids is damaged.
            The journal is as it was.
    """
    journal = Path(resolve_path(journal))
    with closing(Journal(copy, read_only=True)) as source:
        with explain_errors(f"from: {copy} is damaged", sqlite3.DatabaseError):
            warn_of_faults(copy, check_rows(source))
        # all refusals come before the long copy
        check_unused(journal)
        plan_renames(journal)
        bids = Path(f"{journal}.bids")
        if bids.is_file():
            open_file(bids).close()
        journal.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".restored-", dir=journal.parent) as folder:
            with explain_errors(
                f"from: {copy} could not be copied to {journal.parent}",
                sqlite3.Error,
                OSError,
                fix="make room; the journal is as it was",
            ):
                copy_journal(source, Path(folder, journal.name))
            # a server may have started while the copy was made
            check_unused(journal)
            aside = plan_renames(journal)
            for old, new in aside:
                old.rename(new)
            for file in Path(folder).iterdir():
                file.rename(journal.with_name(file.name))
        rewind(bids, lambda id: source.count_ticks(id) - 1)
    return [new for _, new in aside]


def copy_journal(journal: Journal, to: str | Path) -> None:
    """Copy the journal and the files of COPIED beside it, also while a server writes them.

    Raises:
        ValueError: there is a file already.
    """
    for path in (to, *[f"{to}.{name}" for name in SIDECAR_CONTENT]):
        if Path(path).exists():
            raise ValueError(f"to: expected a new file, got {path}, which exists")
    with ExitStack() as stack:
        # The journal is copied last: no copy beside it is ahead of it.
        for name in SIDECAR_CONTENT:
            path = journal.sidecar_path(name)
            if Path(path).is_file():
                source = stack.enter_context(closing(connect_to_read(path)))
                copy_database(source, stack.enter_context(atomic(f"{to}.{name}")))
        journal.copy_to(stack.enter_context(atomic(to)))


def warn_of_faults(path: str | Path, check: RowCheck) -> None:
    """Log damaged and missing rows of a copy."""
    if check.faults:
        shown = "; ".join(check.faults[:MAX_SHOWN])
        logger.warning("%s has %d faults, as its journal had: %s", path, len(check.faults), shown)


def check_unused(journal: str | Path) -> None:
    """Raise a ValueError if another process has a journal open. A damaged one counts as unused."""
    if not Path(journal).is_file():
        return
    with closing(sqlite3.connect(journal, timeout=0)) as file:
        try:
            # SQLite changes this only for a file that nobody else has open
            (mode,) = file.execute("PRAGMA journal_mode=DELETE").fetchone()
        except sqlite3.OperationalError as error:
            raise ValueError(f"journal: {journal} is in use ({error}); stop the server") from error
        except sqlite3.DatabaseError:
            return
    if mode != "delete":
        raise ValueError(f"journal: {journal} is in use; stop the server")


def plan_renames(journal: Path) -> list[tuple[Path, Path]]:
    """Return the pairs (path, new path) of a journal and of the files beside it that must not be
    ahead of it.

    Raises:
        ValueError: there is a file at a new path.
    """
    pairs = []
    for name in ("", ".snapshot", *[f".{name}" for name in SIDECAR_CONTENT]):
        for part in ("", "-wal", "-shm"):  # the file, and what SQLite keeps of it
            old = journal.with_name(f"{journal.name}{name}{part}")
            new = journal.with_name(f"{journal.name}.{REPLACED_SUFFIX}{name}{part}")
            if new.exists():
                raise ValueError(f"{new} is there already, from an earlier restore: move it away")
            if old.exists():
                pairs.append((old, new))
    return pairs
