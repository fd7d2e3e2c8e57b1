"""Spans of a tick: how long it waited in the queue, for the model and for the journal.

A service traces each tick through `Traces`. `NoTraces` does nothing; `serving.otel` sends spans of
OpenTelemetry.
"""

import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class Timing:
    """When a call of a `Batcher` was made, began to be worked on and ended; time.monotonic().

    None: it did not come so far.
    """

    called: float = field(default_factory=time.monotonic)
    began: float | None = None
    ended: float | None = None


class TickTrace(Protocol):
    """The trace of one tick."""

    def on_decided(self, timing: Timing) -> None:
        """The decision is there, or late, or failed."""
        ...

    def on_written(self, began: float) -> None:
        """The journal has the answer, or has refused it. began: time.monotonic() at the call."""
        ...


class Traces(Protocol):
    """Traces the ticks of a service."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """Spans are sent until the end of the block."""
        ...

    def tick(self, campaign: str, step: int) -> AbstractContextManager[TickTrace]:
        """The trace of the tick that is answered in the block."""
        ...


class NoTraces:
    """Traces nothing."""

    def run(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def tick(self, campaign: str, step: int) -> AbstractContextManager[TickTrace]:
        return nullcontext(self)

    def on_decided(self, timing: Timing) -> None:
        return None

    def on_written(self, began: float) -> None:
        return None
