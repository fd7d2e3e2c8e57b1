"""Request ids and structured logs: one line of JSON or text a request and a message, written by a
thread of its own.

Every value is escaped by JSON, also in lines of text, so that no request can write a line. Bodies,
headers and query strings are never logged.
"""

import json
import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from decisionllm.checks import check_one_of
from decisionllm.schema import Json

if TYPE_CHECKING:
    from starlette.types import Scope


KINDS = ("json", "text", "none")
VALID_REQUEST_ID = re.compile(rb"[\w.:=+/-]{1,64}", re.ASCII)  # request ids that are taken over
MAX_WAITING = 10_000  # most lines that wait to be written; further ones are dropped and counted
SLOW = 0.1  # seconds; a slower request is logged whatever the share is
WRITE_EVERY = 0.05  # seconds between two writes
STOPPING = 2.0  # most seconds that the end waits for a stream that takes no more
current: ContextVar[Json] = ContextVar("request")  # fields of the request at work


def begin_request(header: bytes | None) -> str:
    """Begin a request with the id in its header, or with a new one if that is not valid.

    Returns the id.
    """
    id = f"{random.getrandbits(64):016x}"
    if header and VALID_REQUEST_ID.fullmatch(header):
        id = header.decode()
    current.set({"request_id": id})
    return id


def note_campaign(id: str) -> None:
    """The request at work is about this campaign; of several, their number is logged."""
    request = current.get(None)
    if request is not None:
        request.setdefault("campaigns", []).append(id[:64])


def note_model(name: str | None) -> None:
    """This model answers the request at work, or a part of it."""
    request = current.get(None)
    if name and request is not None:
        names = request.setdefault("models", [])
        if name not in names:
            names.append(name)


def current_request_id() -> str | None:
    """The id of the request at work; None: there is none."""
    request = current.get(None)
    return None if request is None else str(request["request_id"])


def request_models(usual: str) -> str:
    """The models that answer the request at work. usual: the name where none was noted."""
    names = current.get({}).get("models")
    return ", ".join(names) if names else usual


def log_response(scope: "Scope", status: int, seconds: float, model: str) -> None:
    """Log a request: its id, route, status, milliseconds and model, the name of its token, and its
    campaign where there is one. Of fast requests without an error only a share is logged.
    """
    for writer in writers:
        usual = status < 400 and seconds < writer.slow
        if usual and random.random() >= writer.sample:
            continue
        route = scope["route"].path if "route" in scope else None
        fields = {
            "method": scope["method"],
            "status": status,
            "route": route,
            "ms": round(seconds * 1000, 3),
            "model": model,
        }
        caller = scope["state"].get("caller")
        if caller is not None and caller.name:
            fields["token"] = caller.name
        if usual and writer.sample < 1:
            fields["sample"] = writer.sample
        writer.add(time.time(), "info", "request", fields)


def log_event(message: str, **fields: object) -> None:
    """Log an event of the server that is no request and no warning."""
    for writer in writers:
        writer.add(time.time(), "info", message, fields)


class Writer(logging.Handler):
    """Takes the records of all loggers, and requests, and writes them to a stream in a thread of
    its own. See `write_logs` for the arguments.
    """

    def __init__(
        self, kind: str, stream: TextIO | None, *, sample: float = 1.0, slow: float = SLOW
    ) -> None:
        super().__init__()
        self.sample = sample
        self.slow = slow
        self.as_json = kind == "json"
        self.stream = stream
        self.dropped = 0
        self.waiting: deque[tuple[float, str, str, Json, Json | None]] = deque()
        self.stopped = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        fields: Json = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)
        self.add(record.created, record.levelname.lower(), record.getMessage(), fields)

    def add(self, when: float, level: str, message: str, fields: Json) -> None:
        """Let a line be written; without any work here, since the event loop calls it."""
        if len(self.waiting) < MAX_WAITING:
            self.waiting.append((when, level, message, fields, current.get(None)))
        else:
            self.dropped += 1

    def run(self) -> None:
        """Write until stopped."""
        while not self.stopped.wait(WRITE_EVERY):
            self.write()
        self.write()

    def write(self) -> None:
        lines = [self.line(*self.waiting.popleft()) for _ in range(len(self.waiting))]
        if self.dropped:
            dropped = f"{self.dropped} lines were dropped"
            lines.append(self.line(time.time(), "warning", dropped, {}, None))
            self.dropped = 0
        if self.stream is not None:
            self.stream.write("".join(lines))
        else:
            with suppress(OSError):  # there is no other place to report it
                # sys.stderr has a lock that a full pipe would hold at exit
                os.write(2, "".join(lines).encode())

    def line(
        self,
        when: float,
        level: str,
        message: str,
        fields: Json,
        request: Json | None,
    ) -> str:
        stamp = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
        line = {"time": stamp, "level": level, "message": message, **fields}
        if request:
            line["request_id"] = request["request_id"]
            campaigns = request.get("campaigns", [])
            if len(campaigns) == 1:
                line["campaign"] = campaigns[0]
            elif campaigns:
                line["campaigns"] = len(campaigns)
        if self.as_json:
            return json.dumps(line) + "\n"
        return " ".join(f"{name}={json.dumps(value)}" for name, value in line.items()) + "\n"


writers: list[Writer] = []  # at work


@contextmanager
def write_logs(
    kind: str, stream: TextIO | None = None, *, sample: float = 1.0, slow: float = SLOW
) -> Iterator[None]:
    """Write the records of all loggers, and a line for each request, to standard error until the
    end of the block.

    Args:
        kind: `json` or `text`; `none`: nothing more than loggers write by themselves.
        stream: in place of standard error.
        sample: share of the requests that are logged. Those with a status from 400, slow ones and
            messages always are. The line of a request that had this chance says it.
        slow: seconds; a request is slow from there on.

    Raises:
        ValueError: an unknown kind.
    """
    check_one_of("log", kind, KINDS)
    if kind == "none":
        yield
        return
    writer = Writer(kind, stream, sample=sample, slow=slow)
    thread = threading.Thread(target=writer.run, daemon=True)
    server = logging.getLogger("uvicorn")
    root = logging.getLogger()
    before = server.handlers, server.propagate
    server.handlers, server.propagate = [], True
    root.addHandler(writer)
    writers.append(writer)
    thread.start()
    try:
        yield
    finally:
        root.removeHandler(writer)
        server.handlers, server.propagate = before
        writers.remove(writer)
        writer.stopped.set()
        thread.join(STOPPING)
