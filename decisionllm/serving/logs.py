"""Request ids and structured logs: one line of JSON or text a request and a message, written by a thread of its own.

Every value is escaped by JSON, also in lines of text, so that no request can write a line. Bodies, headers and query strings are
never logged.
"""

import json
import logging
import queue
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

from decisionllm.config import one_of

KINDS = ("json", "text", "none")
VALID = re.compile(rb"[\w.:=+/-]{1,64}", re.ASCII)  # request ids that are taken over
WAITING = 10_000  # most lines that wait to be written; further ones are dropped
requests = logging.getLogger("decisionllm.serving.requests")
current: ContextVar[dict[str, Any]] = ContextVar("request")  # what is known of the request at work


def begin(given: bytes | None) -> str:
    """Begin a request with the id in its header, or with a new one if that is not valid. Returns the id."""
    id = given.decode() if given and VALID.fullmatch(given) else f"{random.getrandbits(64):016x}"
    current.set({"request_id": id})
    return id


def note_campaign(id: str) -> None:
    """The request at work is about this campaign; of several, their number is logged."""
    if (request := current.get(None)) is not None:
        request.setdefault("campaigns", []).append(id[:64])


def on_response(scope: Mapping[str, Any], status: int, seconds: float) -> None:
    """Log a request: its id, route, status and milliseconds, and its campaign where there is one."""
    if not requests.isEnabledFor(logging.INFO):
        return
    route = scope.get("route")
    record = logging.LogRecord(requests.name, logging.INFO, "", 0, "request", (), None)
    vars(record)["fields"] = {
        "method": scope["method"], "route": route.path if route else None, "status": status, "ms": round(seconds * 1000, 3),
    }  # fmt: skip
    requests.handle(record)


class Handler(QueueHandler):
    """Hands records to the thread that writes them; if too many wait, a record is dropped and counted."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        vars(record)["request"] = current.get(None)
        return record

    def handleError(self, record: logging.LogRecord) -> None:
        self.dropped += 1


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says, in its order."""
    request = dict(vars(record).get("request") or {})
    if campaigns := request.pop("campaigns", []):
        request |= {"campaign": campaigns[0]} if len(campaigns) == 1 else {"campaigns": len(campaigns)}
    line = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"), "level": record.levelname.lower(),
        "logger": record.name, "message": record.getMessage(), **vars(record).get("fields", {}), **request,
    }  # fmt: skip
    if record.exc_info:
        line["exception"] = logging.Formatter().formatException(record.exc_info)
    return line


class JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(fields(record))


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={json.dumps(value)}" for name, value in fields(record).items())


@contextmanager
def written(kind: str, stream: TextIO | None = None) -> Iterator[Handler | None]:
    """Write the records of all loggers, and of each request, to standard error until the end of the block.

    Args:
        kind: `json` or `text`; `none`: only what loggers say without this, warnings in plain lines.
        stream: in place of standard error.

    Raises:
        ValueError: an unknown kind.
    """
    one_of("log", kind, KINDS)
    if kind == "none":
        yield None
        return
    handler, writer, root = Handler(queue.Queue(WAITING)), logging.StreamHandler(stream or sys.stderr), logging.getLogger()
    writer.setFormatter(JSONFormatter() if kind == "json" else TextFormatter())
    listener = QueueListener(handler.queue, writer)
    root.addHandler(handler)
    requests.setLevel(logging.INFO)
    listener.start()
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        requests.setLevel(logging.NOTSET)
        listener.stop()
