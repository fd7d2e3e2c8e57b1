"""deploy/nginx.conf in a real nginx, with TLS, before a real server: what passes and what is limited.

Each test has an address of its own of this machine, since the limits are those of an address.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request

from decisionllm.bidding.server.access import TokenAccess
from decisionllm.bidding.server.app import create_app
from tests.bidding.server.test_campaigns import SPEC, drawn, policy_of
from tests.bidding.server.test_campaigns import settings as settings_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.conftest import PATIENCE

DEPLOY = Path(__file__).parents[3] / "deploy"
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
pytestmark = [
    pytest.mark.skipif(
        not (NGINX and shutil.which("openssl")) and "CI" not in os.environ,
        reason="needs nginx and openssl: apt-get install nginx-light openssl",
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="needs 127.0.0.2, an address of Linux"),
]
# limits that a test reaches on any machine: {of the file: of the test}
SMALL = {
    "zone=clients:10m rate=500r/s": "zone=clients:10m rate=1r/m",
    "limit_req zone=clients burst=250 nodelay": "limit_req zone=clients burst=20 nodelay",
    "limit_conn connections 256": "limit_conn connections 8",
    "client_header_timeout 5s": "client_header_timeout 1s",
}


@dataclass
class Proxy:
    """A running nginx."""

    tls_port: int
    plain_port: int
    trust: ssl.SSLContext
    log: Path
    token: str
    app: Any = None

    def client(self, address: str) -> httpx.Client:
        """A client at this address of the machine, with the token of a bidder."""
        return httpx.Client(
            base_url=f"https://127.0.0.1:{self.tls_port}",
            transport=httpx.HTTPTransport(verify=self.trust, local_address=address),
            headers={"authorization": f"Bearer {self.token}"},
            timeout=PATIENCE,
        )

    def connection(self, address: str) -> ssl.SSLSocket:
        """A TLS connection from this address."""
        plain = socket.create_connection(
            ("127.0.0.1", self.tls_port), timeout=PATIENCE, source_address=(address, 0)
        )
        return self.trust.wrap_socket(plain, server_hostname="localhost")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1, f"expected {old!r} once in nginx.conf, got {text.count(old)}"
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def nginx(folder: Path, server: str):
    """deploy/nginx.conf with SMALL limits, before the server at `host:port`."""
    subprocess.run([DEPLOY / "secrets.sh", "localhost", folder / "secrets"], check=True)
    secrets = folder / "secrets" / "nginx"
    tls_port, plain_port = free_port(), free_port()
    places = {
        "server server:8080": f"server {server}",
        "listen 8443 ssl": f"listen 127.0.0.1:{tls_port} ssl",
        "listen 8081": f"listen 127.0.0.1:{plain_port}",
        "secrets/certificate.pem": f"{secrets}/certificate.pem",
        "secrets/key.pem": f"{secrets}/key.pem",
        "access_log /dev/stdout": f"access_log {folder}/access.log",
    }
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8").replace("/tmp/", f"{folder}/")
    text = replaced(text, places | SMALL | {"worker_processes auto": "worker_processes 1"})
    config = folder / "nginx.conf"
    config.write_text(text, encoding="utf-8")
    # workers of root's nginx have another user, who may not enter the folder of a test
    user = "user root; " if os.geteuid() == 0 else ""
    command = [NGINX, "-p", folder, "-c", config, "-e", "stderr", "-g", f"{user}daemon off;"]
    process = subprocess.Popen(command)
    try:
        until(lambda: process.poll() is not None or listens(tls_port))
        assert process.poll() is None, "nginx does not start"
        trust = ssl.create_default_context(cafile=secrets / "certificate.pem")
        token = (folder / "secrets" / "bidder.token").read_text(encoding="utf-8")
        yield Proxy(tls_port, plain_port, trust, folder / "access.log", token)
    finally:
        process.terminate()
        process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(done) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    subprocess.run([DEPLOY / "secrets.sh", "localhost", folder / "secrets"], check=True)
    access = TokenAccess(path=folder / "secrets" / "server" / "tokens.toml")
    app = create_app(policy_of(), MODEL_INFO, SPEC, access=access, deadline=PATIENCE)
    waiting: list[asyncio.Event] = []

    @app.get("/echo")
    async def echo(request: Request) -> dict[str, str]:
        return dict(request.headers)

    @app.get("/waits")
    async def waits() -> dict[str, str]:
        waiting.append(asyncio.Event())
        await waiting[-1].wait()
        return {}

    app.state.waiting = waiting
    with serving(app) as direct, nginx(folder, f"127.0.0.1:{direct.base_url.port}") as proxy:
        proxy.app = app
        yield proxy


def test_a_tick_and_its_deadline_pass_with_their_request_id(proxy):
    with proxy.client("127.0.0.1") as client:
        id = client.post("/v1/campaigns", json=settings_of(0)).json()["id"]
        path = f"/v1/campaigns/{id}/tick?why=private"
        answer = client.post(path, json=drawn(0, 0), headers={"x-request-id": "abc-1"})
        assert answer.status_code == 200 and answer.json()["multiplier"] > 0
        assert answer.headers.get_list("x-request-id") == ["abc-1"]
        assert answer.headers["x-model"] == "m1"
        refused = client.post(path, json=drawn(0, 1), headers={"x-deadline-ms": "soon"})
        assert refused.status_code == 422, "the server reads the deadline of the client"
        values = client.get("/echo", headers={"x-request-id": "a b"})
        assert len(values.headers["x-request-id"]) == 32 and values.json()["x-request-id"] != "a b"
        assert client.get("/v1/model", headers={"authorization": "none"}).status_code == 401
        assert client.get("/metrics").status_code == 404
    until(lambda: proxy.log.read_text(encoding="utf-8").count("\n") >= 6)
    lines = [json.loads(line) for line in proxy.log.read_text(encoding="utf-8").splitlines()]
    (line,) = [line for line in lines if line["request_id"] == "abc-1"]
    assert line["path"] == f"/v1/campaigns/{id}/tick" and line["address"] == "127.0.0.1"
    assert "private" not in proxy.log.read_text(
        encoding="utf-8"
    ) and proxy.token not in proxy.log.read_text(encoding="utf-8")


def test_the_server_is_told_the_address_that_nginx_saw(proxy):
    with proxy.client("127.0.0.2") as client:
        headers = {"x-forwarded-for": "10.0.0.1", "forwarded": "for=10.0.0.1"}
        entries = client.get("/echo", headers=headers).json()
    assert entries["x-forwarded-for"] == "127.0.0.2" and entries["x-forwarded-proto"] == "https"
    assert "forwarded" not in entries


def test_a_body_that_is_too_large_is_a_413(proxy):
    head = b"POST /v1/act HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunks = b"7a1201\r\n" + b" " * 8_000_001 + b"\r\n0\r\n\r\n"
    bodies = (b"content-length: 8000001\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n" + chunks)
    for body in bodies:
        with proxy.connection("127.0.0.3") as connection:
            # nginx answers before it has all of it
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                connection.sendall(head + body)
            answer = connection.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 413") and '"loc": ["body"]' in answer
    with proxy.client("127.0.0.3") as client:
        largest = b"{}" + b" " * 7_999_998
        answer = client.post(
            "/v1/act", content=largest, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422, "the server has read the largest body"
        assert client.get("/", headers={"x-large": "a" * 9000}).status_code == 400


def test_slow_heads_are_cut_off_and_others_are_served(proxy):
    slow = [proxy.connection("127.0.0.4") for _ in range(50)]
    for connection in slow:
        connection.sendall(b"POST /v1/act HTTP/1.1\r\nhost: localhost\r\n")
    with proxy.client("127.0.0.5") as client:
        assert client.get("/readyz").status_code == 200
    for connection in slow:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1024) == b"", "nginx ends the connection without an answer"
        connection.close()


def test_a_flood_of_one_address_is_limited_and_others_are_served(proxy):
    with proxy.client("127.0.0.6") as flood, proxy.client("127.0.0.7") as honest:
        codes = []
        for i in range(60):
            codes.append(flood.get("/healthz").status_code)
            if i % 6 == 0:
                assert honest.get("/healthz").status_code == 200
        refused = flood.get("/healthz", headers={"x-request-id": "flood"})
    assert codes[:21] == [200] * 21 and codes.count(429) >= 30
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.headers["x-request-id"] == "flood"
    assert refused.json()["detail"][0]["loc"] == ["server"]


def test_requests_of_one_address_at_once_are_limited(proxy):
    waiting = proxy.app.state.waiting
    many = [proxy.connection("127.0.0.8") for _ in range(8)]
    for connection in many:
        connection.sendall(b"GET /waits HTTP/1.1\r\nhost: localhost\r\n\r\n")
    until(lambda: len(waiting) == 8)
    with proxy.client("127.0.0.8") as same, proxy.client("127.0.0.9") as other:
        assert same.get("/healthz").status_code == 429
        assert other.get("/healthz").status_code == 200
        for event in waiting:
            proxy.app.state.service.loop.call_soon_threadsafe(event.set)
        for connection in many:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            connection.close()
        assert same.get("/healthz").status_code == 200


def test_pipelined_requests_reach_the_server_one_by_one(proxy):
    """Of so many the server itself answers nine and closes the connection."""
    with proxy.connection("127.0.0.10") as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 15)
        answers = b""
        while answers.count(b'"ok"') < 15:
            answers += connection.recv(65536)
    assert answers.count(b"HTTP/1.1 200") == 15


def test_plain_http_is_redirected(proxy):
    url = f"http://127.0.0.1:{proxy.plain_port}/v1/campaigns?a=1"
    answer = httpx.post(url, json=settings_of(0))
    assert answer.status_code == 308
    assert answer.headers["location"] == "https://127.0.0.1/v1/campaigns?a=1"


def test_a_server_that_is_away_is_a_503(tmp_path):
    with nginx(tmp_path, f"127.0.0.1:{free_port()}") as proxy, proxy.client("127.0.0.1") as client:
        answer = client.get("/healthz", headers={"x-request-id": "abc-2"})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.headers["x-request-id"] == "abc-2"
    assert re.search("try again", answer.json()["detail"][0]["msg"])
