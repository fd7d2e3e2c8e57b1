"""Connections that send too much, too slowly or nothing are closed; the others are answered."""

import contextlib
import select
import socket
import time

import httpx
import pytest

from decisionllm.serving.app import create_app
from decisionllm.serving.protocol import BoundedProtocol
from tests.conftest import PATIENCE
from tests.serving.test_campaigns import SPEC, policy_of
from tests.serving.test_http import MODEL_INFO, Slow, serving

HEAD = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/act HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
CHUNKED = (
    b"POST /v1/act HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
)


class Hasty(BoundedProtocol):
    arrival = 0.3


@pytest.fixture(scope="module")
def app():
    return create_app(policy_of(), MODEL_INFO, SPEC)


@contextlib.contextmanager
def connected(client):
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=PATIENCE) as connection:
        yield connection


def until_closed(connection, piece=b"", most=10**9):
    """Send a piece again and again until the server closes: (bytes sent, what it answered)."""
    sent, answer = 0, b""
    connection.settimeout(0.02 if piece else PATIENCE)
    with contextlib.suppress(ConnectionError):
        while sent < most:
            if piece:
                with contextlib.suppress(TimeoutError):
                    sent += connection.send(piece)
            with contextlib.suppress(TimeoutError):
                if not (got := connection.recv(65_536)):
                    break
                answer += got
    return sent, answer


@pytest.mark.parametrize("begin", [HEAD + b"x-long: ", CHUNKED + b"x-trailer: ", b"GET /"], ids=["head", "trailer", "path"])
def test_a_head_without_end_is_refused(app, begin):
    with serving(app) as client, connected(client) as connection:
        connection.sendall(begin)
        sent, answer = until_closed(connection, b"x" * 100_000, most=60_000_000)
        assert sent < 20_000_000 and (not answer or answer.startswith(b"HTTP/1.1 4"))
        assert client.get("/healthz", headers={"x-long": "x" * 60_000}).status_code == 200


@pytest.mark.parametrize(
    ("begin", "piece"),
    [(b"", b""), (b"", b"\r\n"), (HEAD, b""), (HEAD + b"x-a: ", b"x"), (POST, b""), (POST, b" "), (HEAD + b"\r\n", b""), (HEAD + b"\r\n", b"\r\n")],
    ids=["silent", "empty lines", "half a head", "a slow head", "half a body", "a slow body", "idle", "idle but for empty lines"],
)  # fmt: skip
def test_a_request_that_does_not_arrive_is_given_up(app, begin, piece):
    with serving(app, Hasty, timeout_keep_alive=1) as client, connected(client) as connection:
        connection.sendall(begin)
        until_closed(connection, piece, most=60 if begin == POST else 10**9)
        connection.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1000):
                pass


def test_a_slow_answer_is_not_cut_off():
    policy = Slow(policy_of())
    with serving(create_app(policy, MODEL_INFO, SPEC, deadline=PATIENCE), Hasty) as client, connected(client) as connection:
        body = b'{"observations": [[' + b",".join([b"0"] * 21) + b']], "actions": [], "rewards": []}'
        policy.gate.clear()
        connection.sendall(POST.replace(b": 100", b": %d" % len(body)) + body + HEAD)  # and half of a second request behind it
        time.sleep(3 * Hasty.arrival)
        policy.gate.set()
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_silent_connections_give_way_to_others(app):
    class Few(BoundedProtocol):
        max_connections = 3

    with serving(app, Few) as client, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(client)) for _ in range(5)]
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as other:
            assert other.get("/healthz").status_code == 200
            closed, _, _ = select.select(silent, [], [], 0)
            assert len(closed) >= 3 and {connection.recv(10) for connection in closed} == {b""}
