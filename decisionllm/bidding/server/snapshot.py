"""Open campaigns as they are in memory, in a file beside the journal, so that a start replays only
the ticks that came after it.

The journal stays the truth: a row counts only if the journal has the tick that it was written
after, unchanged. The file may be deleted while no server runs.
"""

import asyncio
import json
import logging
import sqlite3
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import numpy as np

from decisionllm.bidding.journal.campaign_history import SETTINGS, Campaign
from decisionllm.bidding.journal.journal import Journal, split_batches
from decisionllm.bidding.journal.sqlite_files import open_sidecar, transaction
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.periodic import repeat_work
from decisionllm.schema import Json

logger = logging.getLogger("decisionllm.bidding.server")
WRITE_BATCH = 500  # of one transaction
WAIT = 10.0  # seconds for the lock that other processes hold
TABLE = (
    "CREATE TABLE IF NOT EXISTS campaigns (id TEXT PRIMARY KEY, step INTEGER NOT NULL,"
    # spec: what the numbers mean; tick: checksum of the last tick; sum: of this row
    " spec TEXT NOT NULL, tick INTEGER NOT NULL, state BLOB NOT NULL, sum INTEGER NOT NULL)"
    " WITHOUT ROWID"
)


class Snapshot:
    """Keeps the campaigns in memory in a file, written again and again by a thread.

    Args:
        journal: whose open campaigns they are.
        in_memory: () -> them; called in the event loop.
        every: seconds between two writes.
    """

    def __init__(
        self, journal: Journal, in_memory: Callable[[], list[Campaign]], every: float
    ) -> None:
        self.journal = journal
        self.in_memory = in_memory
        self.every = every
        self.written: dict[str, int] = {}  # step of each campaign as it lies in the file
        self.lock = threading.Lock()
        self.file = _open_file(journal.sidecar_path("snapshot"))

    def begin(self, records: Sequence[Json], spec: ObservationSpec) -> dict[str, Campaign]:
        """Campaigns as the file has them, by id, without those whose last tick the journal lacks.

        Args:
            records: the campaigns in the journal.
            spec: what the model observes.
        """
        name = spec_name(spec)
        campaigns: dict[str, Campaign] = {}
        for some in split_batches(records):
            rows = self._read_rows([record["id"] for record in some], name)
            ticks = self.journal.tick_sums({id: step - 1 for id, (step, _, _) in rows.items()})
            for record in some:
                id = record["id"]
                if id not in rows:
                    continue
                step, tick, state = rows[id]
                if ticks.get(id) != tick:
                    continue
                settings = {name: record[name] for name in SETTINGS}
                fresh = Campaign.begin(settings, spec, id=id, model=record["model"])
                with suppress(ValueError):  # a horizon that was changed by hand
                    campaigns[id] = fresh.restore_state(np.frombuffer(state))
                    self.written[id] = step
        return campaigns

    def _read_rows(self, ids: Sequence[str], spec_name: str) -> dict[str, tuple[int, int, bytes]]:
        """Read (step, checksum of the last tick, state) of campaigns, by id, as they were written
        for this specification.
        """
        marks = ", ".join("?" * len(ids))
        query = f"SELECT id, step, spec, tick, state, sum FROM campaigns WHERE id IN ({marks})"
        read: list[tuple[str, int, str, int, bytes, int]] = []
        with self._log_errors():
            read = self.file.execute(query, ids).fetchall()
        rows: dict[str, tuple[int, int, bytes]] = {}
        for id, step, written_spec, tick, state, sum in read:
            if written_spec == spec_name and sum == checksum(id, step, written_spec, tick, state):
                rows[id] = step, tick, state
        return rows

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Write every so many seconds until the end of the block, and at its end."""
        await asyncio.to_thread(self.clean)
        try:
            async with repeat_work(self.every, self._write_in_thread):
                yield
        finally:
            await self._write_in_thread()
            self.file.close()

    async def _write_in_thread(self) -> None:
        await asyncio.to_thread(self.write, self.in_memory())

    def write(self, campaigns: list[Campaign]) -> None:
        """Write the campaigns that went on since the last write, and forget ended ones."""
        now = {campaign.id for campaign in campaigns}
        changed = [one for one in campaigns if one.step and self.written.get(one.id) != one.step]
        # the last write waits for one that a stop interrupted
        with self.lock, self._log_errors():
            for at in range(0, len(changed), WRITE_BATCH):
                self._write_rows(changed[at : at + WRITE_BATCH])
            self._forget_ended([id for id in self.written if id not in now])

    def clean(self) -> None:
        """Forget campaigns that ended while they were in no memory."""
        with self._log_errors():
            ids = [id for (id,) in self.file.execute("SELECT id FROM campaigns").fetchall()]
            self._forget_ended(ids)

    def _write_rows(self, campaigns: list[Campaign]) -> None:
        rows = []
        ticks = self.journal.tick_sums({one.id: one.step - 1 for one in campaigns})
        for campaign in campaigns:
            if campaign.id not in ticks:  # the journal was replaced by one that lacks the tick
                continue
            head = campaign.id, campaign.step, spec_name(campaign.spec), ticks[campaign.id]
            state = campaign.state().tobytes()
            rows.append((*head, state, checksum(*head, state)))
        with transaction(self.file):
            self.file.executemany(
                "INSERT OR REPLACE INTO campaigns VALUES (?, ?, ?, ?, ?, ?)", rows
            )
        self.written |= {row[0]: row[1] for row in rows}

    def _forget_ended(self, ids: list[str]) -> None:
        """Delete the rows of those campaigns that are no longer open."""
        still_open = self.journal.filter_open(ids)
        ended = [id for id in ids if id not in still_open]
        with transaction(self.file):
            self.file.executemany("DELETE FROM campaigns WHERE id = ?", [(id,) for id in ended])
        for id in ended:
            self.written.pop(id, None)

    @contextmanager
    def _log_errors(self) -> Iterator[None]:
        """Log errors of the files in the block: a start then replays more, no answer depends on
        them.
        """
        try:
            yield
        except sqlite3.Error as error:
            logger.error("snapshot %s: %s", self.journal.sidecar_path("snapshot"), error)


def _open_file(path: str) -> sqlite3.Connection:
    """A connection to the file, which is made anew if it is damaged."""
    try:
        return open_sidecar(path, TABLE, wait=WAIT)
    except sqlite3.DatabaseError as error:
        logger.error("snapshot %s is made anew: %s", path, error)
        for suffix in ("", "-wal", "-shm"):
            Path(path + suffix).unlink(missing_ok=True)
        return open_sidecar(path, TABLE, wait=WAIT)


def spec_name(spec: ObservationSpec) -> str:
    return json.dumps(spec.info(), sort_keys=True)


def checksum(id: str, step: int, spec: str, tick: int, state: bytes) -> int:
    return zlib.crc32(state, zlib.crc32(repr((id, step, spec, tick)).encode()))
