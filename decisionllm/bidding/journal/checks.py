"""Checks of the rows of a journal, and the removal of campaigns that ended long ago."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from decisionllm.bidding.journal.journal import DamagedRowError, Journal
from decisionllm.bidding.journal.rows import CAMPAIGN, TICK
from decisionllm.bidding.journal.sqlite_files import WAIT, connect, transaction
from decisionllm.files import explain_errors

PRUNE_BATCH = 50  # campaigns of one transaction, so that a server's ticks find room between two
# Tables of the files beside a journal that have rows of a campaign, each with an index by campaign:
# a search of all rows would keep a server from bidding. Bids, which have none, go by themselves.
SIDECAR_TABLES = {
    "shadow": ("decisions",),
    "bids": ("totals",),
    "shading": ("counts",),
}


@dataclass
class RowCheck:
    """The result of a check of all rows.

    Attributes:
        campaigns, ticks: numbers of rows.
        faults: damaged or missing rows.
    """

    campaigns: int = 0
    ticks: int = 0
    faults: list[str] = field(default_factory=list)

    @contextmanager
    def collect_faults(self) -> Iterator[None]:
        """Keep the fault of a row that is found to be damaged in the block."""
        try:
            yield
        except DamagedRowError as error:
            self.faults.append(str(error))


def check_rows(journal: Journal) -> RowCheck:
    """Compare every row with its checksum, and look for rows that are missing: ticks between
    others, campaigns that have ticks, and open campaigns, which are counted.

    Raises:
        sqlite3.DatabaseError: the file itself is damaged.
    """
    journal.check_pages()
    check = RowCheck()
    _check_campaigns(journal, check)
    _check_ticks(journal, check)
    orphans = "SELECT DISTINCT campaign FROM ticks WHERE campaign NOT IN (SELECT id FROM campaigns)"
    for (id,) in journal.iter_rows(orphans):
        check.faults.append(f"campaign {id}, which has ticks, is missing")
    still_open = "SELECT COUNT(*) FROM campaigns WHERE ended IS NULL"
    ((counted, there),) = journal.list_rows(f"SELECT (SELECT open FROM counts), ({still_open})")
    if counted != there:
        check.faults.append(f"{counted} open campaigns were counted, {there} are there")
    return check


def _check_campaigns(journal: Journal, check: RowCheck) -> None:
    for row in journal.iter_rows(f"SELECT {CAMPAIGN} FROM campaigns ORDER BY number"):
        check.campaigns += 1
        with check.collect_faults():
            journal.parse_campaign(row)


def _check_ticks(journal: Journal, check: RowCheck) -> None:
    campaign, next_step = "", 0
    for row in journal.iter_rows(f"SELECT {TICK} FROM ticks ORDER BY campaign, step"):
        check.ticks += 1
        if row[0] != campaign:
            campaign, next_step = row[0], 0
        step = row[1]
        if step != next_step:
            missing = f"ticks {next_step} to {step - 1} of campaign {campaign} are missing"
            check.faults.append(missing)
        next_step = step + 1
        with check.collect_faults():
            journal.parse_tick(row)


def prune_campaigns(journal: Journal, before: float) -> int:
    """Remove campaigns that have ended and whose last tick is older, with their ticks and their
    rows in the files beside the journal. A server may run.

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
    while ids := journal.list_rows(
        f"SELECT id FROM campaigns WHERE {old} LIMIT {PRUNE_BATCH}", before
    ):
        # The journal comes last: what fails before is found again by the next call.
        for name, tables in SIDECAR_TABLES.items():
            _delete_from_sidecar(journal.sidecar_path(name), tables, ids)
        with journal.lock_writer(WAIT) as writer, transaction(writer):
            writer.executemany("DELETE FROM ticks WHERE campaign = ?", ids)
            writer.executemany("DELETE FROM campaigns WHERE id = ?", ids)
        count += len(ids)
    return count


def _delete_from_sidecar(path: str, tables: Sequence[str], ids: Sequence[tuple[str]]) -> None:
    """Delete the rows of campaigns in a file beside a journal, if there is one."""
    if not Path(path).is_file():
        return
    with (
        explain_errors(
            f"{path} cannot be written", sqlite3.Error, fix="if it is damaged, remove it"
        ),
        closing(connect(path)) as file,
        transaction(file),
    ):
        for table in tables:
            file.executemany(f"DELETE FROM {table} WHERE campaign = ?", ids)
