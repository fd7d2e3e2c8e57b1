"""uvicorn's HTTP protocol with limits that hold before a request is read: a client without a token
cannot occupy the server.

uvicorn bounds the bytes of a request head for h11 alone, and never bounds pipelined requests or
answers that nobody reads. The server is the owner of these limits, so that it is safe without a
proxy; nginx of deploy/ adds TLS and limits for each address.
"""

import asyncio
import heapq
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from decisionllm.schema import Json

if TYPE_CHECKING:
    from starlette.types import ASGIApp


try:
    import resource
except ImportError:  # Windows has no limit on descriptors to raise
    resource = None  # type: ignore[assignment]

MAX_CONNECTIONS = 4096
NO_UPGRADE = "expected HTTP/1.1 without Upgrade; in Java: HttpClient.Builder.version(HTTP_1_1)"
MAX_JOINED = 65_536  # most bytes that wait for the end of a turn of the event loop
TICKS_PER_SECOND = 10  # uvicorn calls `Server.on_tick` so often


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is aborted if its client is too slow, sends too much, or others need its
    descriptor.

    Attributes:
        max_overhead: most bytes of a request beyond twice its body: its head, or the sizes and
            trailers of chunks.
        max_waiting: most complete requests of a connection that wait for the answer before theirs.
        patience: seconds for a request to arrive, from the connection or its first byte, and for an
            answer to be read.
        max_connections: beyond it the worst connections are aborted, see `rank`.
    """

    max_overhead = 65_536
    max_waiting = 8
    patience = 10.0
    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        now = self.loop.time()
        self.overhead = 0
        self.in_head = False
        self.refusal = ""  # why a request is refused that the parser could read
        self.requests = 0
        self.active = now  # the last time that a request was complete
        self.expecting: float | None = now  # time since which a request is awaited; None: none is
        self.unread: float | None = None  # time since which an answer is unread
        # one, not one a request
        self.socket = socket.socket(fileno=transport.get_extra_info("socket").fileno())
        if len(self.connections) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Abort a sixteenth of all connections, the worst ones: a scan of all of them for each new
        one would cost too much.
        """
        others: list[Any] = []
        for one in self.connections:
            if one is not self and not one.transport.is_closing():
                others.append(one)
        if len(others) < self.max_connections:
            return
        free = [one for one in others if not one.answering]
        count = self.max_connections // 16 + 1
        for worst in heapq.nsmallest(count, free, key=lambda one: one.rank):
            worst.transport.abort()

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts connections, the first to be aborted first: unread answers, no request yet, the
        longest without a request.
        """
        return not self.transport.get_write_buffer_size(), self.requests > 0, self.active

    @property
    def answering(self) -> bool:
        """Return whether a request is complete and its answer is not."""
        if self.pipeline:
            return True
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def check(self, now: float) -> None:
        """Abort the connection if its client does not read an answer, or does not send the rest of
        a request.

        Args:
            now: the time of the event loop.
        """
        if not self.transport.get_write_buffer_size():
            self.unread = None
        elif self.unread is None:
            self.unread = now
        if self.answering and self.expecting is not None:
            self.expecting = now
        for since in (self.unread, self.expecting):
            if since is not None and now - since > self.patience:
                self.transport.abort()  # close() would wait until the client has read everything

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        self.socket.detach()  # the transport closes it
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.expecting is None:
            self.expecting = self.loop.time()
        self.overhead += len(data)
        super().data_received(data)
        if self.overhead > self.max_overhead and not self.transport.is_closing():
            self.send_400_response("Request head too long.")

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read.

        Behind complete requests: close the connection after their answers, in their order.
        """
        if self.answering:
            self.flow.pause_reading()
            self.cycle.keep_alive = False
        else:
            super().send_400_response(self.refusal or msg)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self.max_waiting:
            # reported to `send_400_response` by the parser
            raise BufferError("too many requests wait for an answer")
        super().on_message_begin()
        self.in_head = True
        self.scope["state"]["arrived"] = time.monotonic() - seconds_since_data(self.socket)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # a trailer of a chunked body is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        # httptools skips the body of such a request: it would be read as the next request
        if self.parser.should_upgrade():
            self.refusal = NO_UPGRADE
            raise ValueError(NO_UPGRADE)  # reported to `send_400_response` by the parser
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.overhead -= 2 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.overhead = 0
        self.expecting = None
        self.requests += 1
        self.active = self.loop.time()
        super().on_message_complete()


class JoinedWrites:
    """A transport that joins all writes of one turn of the event loop.

    uvicorn writes the head and the body of an answer apart; each write is a call of the system, a
    packet and a client that wakes up.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self.loop = loop
        self.parts: list[bytes] = []
        self.size = 0  # bytes of the parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        if not self.parts:
            self.loop.call_soon(self._flush)
        self.parts.append(data)
        self.size += len(data)
        if self.size > MAX_JOINED:  # so that the transport says when its client reads too slowly
            self._flush()

    def _flush(self) -> None:
        joined = b"".join(self.parts)
        self.parts = []
        self.size = 0
        if joined and not self.transport.is_closing():
            self.transport.write(joined)

    def get_write_buffer_size(self) -> int:
        """Bytes that the client has not read yet."""
        return self.size + self.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close once everything is sent."""
        self._flush()
        self.transport.close()


def seconds_since_data(connection: socket.socket) -> float:
    """Seconds since the last data of a TCP connection came, by the system's count; 0.0 where the
    system has none.
    """
    if sys.platform != "linux":
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 56)
    return float(struct.unpack_from("I", info, 52)[0] / 1000)  # tcpi_last_data_recv, ms


class BoundedServer(uvicorn.Server):
    """A server that looks at all of its connections every second, see `BoundedProtocol.check`.

    Args:
        beat: called from the event loop ten times a second.
    """

    def __init__(self, config: uvicorn.Config, beat: Callable[[], object]) -> None:
        super().__init__(config)
        self.beat = beat

    async def on_tick(self, counter: int) -> bool:
        self.beat()
        if counter % TICKS_PER_SECOND == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.check(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop once all answers are read, or at the end of the time for it.

        Just before that end, uvicorn would cancel each request whose answer nobody reads and log
        its traceback, and uvloop would wait for the client when it closes. Such connections are
        aborted before.
        """
        seconds = 0.9 * (self.config.timeout_graceful_shutdown or 0)
        asyncio.get_running_loop().call_later(seconds, self._abort_unread)
        await super().shutdown(sockets)

    def _abort_unread(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport.get_write_buffer_size():
                connection.transport.abort()


def server(
    app: "ASGIApp",
    protocol: type[BoundedProtocol] = BoundedProtocol,
    *,
    beat: Callable[[], object] = lambda: None,
    **options: Any,
) -> uvicorn.Server:
    """A server of an app, not yet running, with as many connections as half of the descriptors that
    the process may have.

    Args:
        beat: see BoundedServer.
        options: of uvicorn.Config.
    """
    limits: Json = {}
    if resource is not None:
        limits["max_connections"] = min(protocol.max_connections, _raise_descriptor_limit() // 2)
    bounded = type(protocol.__name__, (protocol,), limits)
    defaults: Json = {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "ws": "none",
        "timeout_graceful_shutdown": 10,  # seconds
    }
    config = uvicorn.Config(app, http=bounded, **defaults | options)
    return BoundedServer(config, beat)


def _raise_descriptor_limit() -> int:
    """Raise the number of descriptors that this process may open, if the system allows it, and
    return that number.
    """
    target = 4 * MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return target
    most = target
    if hard != resource.RLIM_INFINITY:
        most = min(hard, target)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return soft
