"""A file that is read again when it changes, without a restart and off the event loop."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from decisionllm.bidding.server.periodic import repeat_work

logger = logging.getLogger("decisionllm.bidding.server")
CHECK_EVERY = 1.0  # seconds between two looks
# seconds: a file that was changed so short ago may change again without a new time stamp
SETTLED_SECONDS = 2.0
# device, inode, time of the last change in ns, size, mode, user
Identity = tuple[int, int, int, int, int, int]


class WatchedFile:
    """Gives the content of a file to `take`, now and whenever the file changes.

    Args:
        path: of the file.
        take: called with the bytes, in a thread. A ValueError refuses them: the content taken before
            stays, and the log names the reason once.
        check: called with the status of the file and the bytes before they are taken. A ValueError
            refuses them likewise.
        optional: that there is no file is no fault.
    """

    def __init__(
        self,
        path: str | Path,
        take: Callable[[bytes], object],
        *,
        check: Callable[[os.stat_result, bytes], object] = lambda status, content: None,
        optional: bool = False,
    ) -> None:
        self.path = Path(path)
        self.take = take
        self.check = check
        self.optional = optional
        self.seen: Identity | None = None  # None: read again at the next look
        self.fault = ""  # why the file is not taken, as it was logged

    def read(self) -> None:
        """Take the content of the file.

        Raises:
            OSError: it cannot be read.
            ValueError: `check` or `take` refused it.
        """
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
        settled = (
            abs(time.time() - status.st_mtime) > SETTLED_SECONDS
        )  # the clock may have gone back
        self.check(status, content)  # again at the next look if it refuses: a folder may be changed
        self.seen = _identity(status) if settled else None
        self.take(content)

    def poll(self) -> None:
        """Read the file if it has changed; a file that cannot be taken is logged."""
        if self.optional and not self.path.exists():
            return
        try:
            if self.seen == _identity(self.path.stat()):
                return
            self.read()
            self.fault = ""
        except (OSError, ValueError) as error:
            if str(error) != self.fault:
                logger.error("%s is not taken, what was read before counts: %s", self.path, error)
            self.fault = str(error)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Look every second until the end of the block."""
        async with repeat_work(CHECK_EVERY, partial(asyncio.to_thread, self.poll)):
            yield


def _identity(status: os.stat_result) -> Identity:
    file = status.st_dev, status.st_ino
    content = status.st_mtime_ns, status.st_size
    return *file, *content, status.st_mode, status.st_uid
