"""Connections that send too much, too slowly or nothing are closed; the others are answered."""

import contextlib
import select
import socket
import time

import httpx
import pytest

from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.protocol import BoundedProtocol
from tests.bidding.server.test_campaigns import SPEC, policy_of
from tests.bidding.server.test_http import MODEL_INFO, Slow, serving
from tests.conftest import PATIENCE

HEAD = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
POST = (
    b"POST /v1/act HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    b"application/json\r\ncontent-length: 100\r\n\r\n"
)
CHUNKED = (
    b"POST /v1/act HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    b"application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
)


class Hasty(BoundedProtocol):
    patience = 0.3


@pytest.fixture(scope="module")
def app():
    return create_app(policy_of(), MODEL_INFO, SPEC)


@contextlib.contextmanager
def connected(client):
    with socket.create_connection(
        (client.base_url.host, client.base_url.port), timeout=PATIENCE
    ) as connection:
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


@pytest.mark.parametrize(
    "begin",
    [HEAD + b"x-long: ", CHUNKED + b"x-trailer: ", b"GET /"],
    ids=["head", "trailer", "path"],
)
def test_a_head_without_end_is_refused(app, begin):
    with serving(app) as client, connected(client) as connection:
        connection.sendall(begin)
        sent, answer = until_closed(connection, b"x" * 100_000, most=60_000_000)
        assert sent < 20_000_000 and (not answer or answer.startswith(b"HTTP/1.1 4"))
        assert client.get("/healthz", headers={"x-long": "x" * 60_000}).status_code == 200


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"", b""),
        (b"", b"\r\n"),
        (HEAD, b""),
        (HEAD + b"x-a: ", b"x"),
        (POST, b""),
        (POST, b" "),
        (HEAD + b"\r\n", b""),
        (HEAD + b"\r\n", b"\r\n"),
    ],
    ids=[
        "silent",
        "empty lines",
        "half a head",
        "a slow head",
        "half a body",
        "a slow body",
        "idle",
        "idle but for empty lines",
    ],
)
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
    with (
        serving(create_app(policy, MODEL_INFO, SPEC, deadline=PATIENCE), Hasty) as client,
        connected(client) as connection,
    ):
        body = (
            b'{"observations": [[' + b",".join([b"0"] * 21) + b']], "actions": [], "rewards": []}'
        )
        policy.gate.clear()
        # and half of a second request behind it
        connection.sendall(POST.replace(b": 100", b": %d" % len(body)) + body + HEAD)
        time.sleep(3 * Hasty.patience)
        policy.gate.set()
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_bounded(app):
    with serving(app) as client, connected(client) as connection:
        connection.sendall((HEAD + b"\r\n") * 4000)
        _, answer = until_closed(connection)
        answers = answer.count(b"HTTP/1.1 200")
        assert (
            1 <= answers <= 1 + BoundedProtocol.max_waiting and answer.count(b"HTTP/1.1") == answers
        )
        assert client.get("/healthz").status_code == 200


def test_answers_before_a_broken_request_come_in_order_and_alone():
    policy = Slow(policy_of())
    with (
        serving(create_app(policy, MODEL_INFO, SPEC, deadline=PATIENCE)) as client,
        connected(client) as connection,
    ):
        body = (
            b'{"observations": [[' + b",".join([b"0"] * 21) + b']], "actions": [], "rewards": []}'
        )
        policy.gate.clear()
        connection.sendall(
            POST.replace(b": 100", b": %d" % len(body)) + body + b"no request\r\n\r\n"
        )
        policy.called.wait(PATIENCE)
        policy.gate.set()
        _, answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_a_client_that_does_not_read_its_answers_is_cut_off(app):
    with serving(app, Hasty) as client, connected(client) as connection:
        ends = select.poll()
        ends.register(connection, 0)  # errors and hang-ups alone
        connection.settimeout(0.02)
        deadline = time.monotonic() + PATIENCE
        while not ends.poll(20):
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(HEAD.replace(b"healthz", b"openapi.json") + b"\r\n")


async def large(scope, receive, send):
    """An app whose answer never fits into the buffers of a connection."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200})
    for _ in range(2):
        piece = {"type": "http.response.body", "body": b"x" * 50_000_000, "more_body": True}
        await send(piece)


def test_a_stop_with_unread_answers_logs_nothing(capfd):
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(serving(large, timeout_graceful_shutdown=1))
        address = client.base_url.host, client.base_url.port
        connection = socket.create_connection(address, timeout=PATIENCE)
        connection.sendall(HEAD + b"\r\n")
        connection.recv(1)
    connection.close()
    assert capfd.readouterr().err == ""


def test_connections_with_unread_answers_give_way_first(app):
    class Few(BoundedProtocol):
        max_connections = 3

    with serving(app, Few) as client, contextlib.ExitStack() as stack:
        assert client.get("/healthz").status_code == 200
        for _ in range(6):
            unread = stack.enter_context(connected(client))
            unread.settimeout(0.1)
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(300):
                    unread.sendall(HEAD.replace(b"healthz", b"openapi.json") + b"\r\n")
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as other:
            assert other.get("/healthz").status_code == 200


def test_a_trailer_is_no_header():
    trailers = b"0\r\norigin: http://elsewhere\r\n\r\n"
    body = b'{"observations": [[' + b",".join([b"0"] * 21) + b']], "actions": [], "rewards": []}'
    app = create_app(policy_of(), MODEL_INFO, SPEC, deadline=PATIENCE)
    with serving(app) as client, connected(client) as connection:
        connection.sendall(CHUNKED[:-3] + b"%x\r\n" % len(body) + body + b"\r\n" + trailers)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("offered", [b"h2c", b"websocket"])
def test_the_body_of_a_request_that_offers_an_upgrade_is_no_request(app, offered):
    body = HEAD + b"\r\n"
    head = POST.replace(b": 100\r\n", b": %d\r\nconnection: upgrade\r\n" % len(body))
    with serving(app) as client, connected(client) as connection:
        connection.sendall(head[:-2] + b"upgrade: %s\r\n\r\n" % offered)
        with contextlib.suppress(ConnectionError):
            connection.sendall(body)
        _, answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"content-length") == 1
        assert b"expected HTTP/1.1 without Upgrade" in answer


def test_a_body_that_is_cut_off_is_not_run():
    body = b'{"budget": 2900.0, "target_cpa": 100.0, "category": 0, "key": "cut-off"}'
    with serving(create_app(policy_of(), MODEL_INFO, SPEC)) as client:
        with connected(client) as connection:
            connection.sendall(
                POST.replace(b"/v1/act", b"/v1/campaigns").replace(b": 100", b": 500") + body
            )
        for _ in range(20):
            assert client.get("/v1/campaigns").json()["campaigns"] == []


def test_silent_connections_give_way_to_others(app):
    class Few(BoundedProtocol):
        max_connections = 3

    with serving(app, Few) as client, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(client)) for _ in range(5)]
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as other:
            assert other.get("/healthz").status_code == 200
            closed, _, _ = select.select(silent, [], [], 0)
            assert len(closed) >= 3 and {connection.recv(10) for connection in closed} == {b""}
