"""Progress of work that takes minutes: a bar on a terminal; elsewhere, such as in the file of a job,
a line a minute.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import Progress

T = TypeVar("T")
Advance = Callable[[int], None]  # called with how much was done since its last call
EVERY = 60.0  # seconds from one line to the next


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Advance]:
    """Show how much of some work is done while the block of this statement does it.

    Args:
        title: what the work is, `planner: values`.
        total: how much there is to do.
    """
    if not sys.stdout.isatty():
        yield ProgressLines(title, total).advance
        return
    with Progress(transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


def track(items: Sequence[T], title: str) -> Iterator[T]:
    """The items, one after another; what is done with each is the work that is shown."""
    with show_progress(title, len(items)) as advance:
        for item in items:
            yield item
            advance(1)


class ProgressLines:
    """Print on standard error how much is done and how long the remaining work will take."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.began = time.monotonic()
        self.last_print = self.began

    def advance(self, done: int) -> None:
        self.done += done
        now = time.monotonic()
        if now - self.last_print < EVERY:
            return
        self.last_print = now
        left = (now - self.began) / self.done * (self.total - self.done)
        words = f"{self.title}: {self.done:,} of {self.total:,}, {left / 60:.0f} min left"
        print(words, file=sys.stderr, flush=True)
