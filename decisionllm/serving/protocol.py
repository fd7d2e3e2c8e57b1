"""uvicorn's HTTP protocol with the bounds that it has for h11 alone: on the bytes of a head, on arrival, on connections."""

import asyncio
import socket
import struct
import sys
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

try:
    import resource
except ImportError:  # Windows has no limit on descriptors to raise
    resource = None  # type: ignore[assignment]

MAX_CONNECTIONS = 4096


class BoundedProtocol(HttpToolsProtocol):
    """A connection that closes itself if its request is too long or does not arrive, and if others need its descriptor.

    Attributes:
        max_overhead: most bytes of a request beyond twice its body: of its head, or of chunks' sizes and trailers.
        arrival: seconds from the connection, or the first byte of a later request, to the request's last byte.
        max_connections: beyond it the connection that has waited longest for a request is closed.
    """

    max_overhead = 65_536
    arrival = 10.0
    max_connections = MAX_CONNECTIONS
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.overhead = 0
        self.socket = socket.socket(fileno=transport.get_extra_info("socket").fileno())  # one, not one a request
        self._expect()
        if len(self.connections) > self.max_connections:
            others: list[Any] = [one for one in self.connections if one is not self and not one.transport.is_closing()]
            if len(others) >= self.max_connections:
                min(others, key=lambda other: (other.answering, other.since)).transport.close()

    @property
    def answering(self) -> bool:
        """Whether a request is complete and its answer is not."""
        return bool(self.pipeline) or not (self.cycle is None or self.cycle.response_complete or self.cycle.more_body)

    def _expect(self) -> None:
        if self.timer is None:
            self.timer = self.loop.call_later(self.arrival, self._overdue)
            self.since = self.loop.time()

    def _arrived(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None

    def _overdue(self) -> None:
        self.timer = None
        if self.answering:
            self._expect()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self.socket.detach()  # the transport closes it
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._expect()
        self.overhead += len(data)
        super().data_received(data)
        if self.overhead > self.max_overhead and not self.transport.is_closing():
            self.send_400_response("Request head too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["arrived"] = time.monotonic() - waited(self.socket)
        self._expect()

    def on_body(self, body: bytes) -> None:
        self.overhead -= 2 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.overhead = 0
        self._arrived()
        super().on_message_complete()


def waited(connection: socket.socket) -> float:
    """Seconds since the last data of a TCP connection came, as the system counts them; 0.0 where it does not tell."""
    if sys.platform != "linux":
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 56)
    return float(struct.unpack_from("I", info, 52)[0] / 1000)  # tcpi_last_data_recv, ms


def server(app: Any, protocol: type[BoundedProtocol] = BoundedProtocol, **options: Any) -> uvicorn.Server:
    """A server of an app, not yet running, with as many connections as half of the descriptors that the process may have.

    Args:
        options: of uvicorn.Config.
    """
    limits: dict[str, Any] = {}
    if resource is not None:
        known = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = (4 * MAX_CONNECTIONS if x == resource.RLIM_INFINITY else x for x in known)
        if soft < (most := min(hard, 4 * MAX_CONNECTIONS)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft := most, known[1]))
        limits = {"max_connections": min(protocol.max_connections, soft // 2)}
    bounded = type(protocol.__name__, (protocol,), limits)
    usual: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "ws": "none"}
    return uvicorn.Server(uvicorn.Config(app, http=bounded, timeout_graceful_shutdown=10, **usual | options))
