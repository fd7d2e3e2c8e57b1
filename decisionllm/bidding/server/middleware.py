"""Request middleware: request id, host check, bearer token, body limit, security headers, request
metrics and logs.
"""

import ipaddress
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decisionllm.bidding.server import logs
from decisionllm.schema import Json

# in metrics and logs: the client left before its request was complete, as nginx counts it
DISCONNECTED = 499
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
CLOSE = {"connection": "close"}
# paths that need the token; the page that prompts for it is readable without
PROTECTED = ("/v1/", "/openrtb/", "/metrics")
# A body is read in the event loop, also a wrong one: only where it holds a number for each
# opportunity or step may it be as long as max_body_bytes.
LONG_BODY = ("/v1/act", "/v1/bid")
# most bytes of a body by path: 1,000 ticks of 2 kB, and 100 impressions of 2.6 kB
BODY_BYTES = {"/v1/ticks": 2_000_000, "/openrtb/2.6/bid": 262_144}
SHORT_BODY = 65_536  # most bytes of any other body


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return whether a server at this address is reachable from this machine only."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def error_response(
    status: int,
    where: list[str],
    message: str,
    *,
    expected: int | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """The answer to a refused request: the place of the fault and what was expected. expected: the
    tick index in order.
    """
    body: Json = {"detail": [{"loc": where, "msg": message, "type": "refused"}]}
    if expected is not None:
        body["expected"] = expected
    usual = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}.get(status, {})
    return JSONResponse(body, status, usual | (headers or {}))


Headers = Mapping[bytes, bytes]


class Access(Protocol):
    """Decides who may send a request, from its head alone."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """Keep the tokens up to date until the end of the block."""
        ...

    def refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """The answer to a request that is not accepted; of one that is, `caller` is kept in its
        state.
        """
        ...


class RequestGuard:
    """ASGI middleware that checks a request before its body is read.

    Starlette's TrustedHostMiddleware takes a list of names instead of all loopback addresses, and
    fastapi's HTTPBearer checks after the body is read and leaves unknown paths open, so that both
    checks are made here.

    Args:
        access: who may send a request.
        max_body_bytes: most bytes of a body, also of a chunked one, on paths of LONG_BODY.
        on_response: called with the scope, the status and the seconds of each request.
        model: () -> name of the model that a header of each answer and the logs name, where the
            route noted no other.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        max_body_bytes: int,
        on_response: Callable[[Scope, int, float], object],
        model: Callable[[], str],
    ) -> None:
        self.model = model
        self.app = app
        self.access = access
        self.max_body_bytes = max_body_bytes
        self.on_response = on_response
        self.headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began = time.perf_counter()
        status = DISCONNECTED
        received = 0
        most = self._most_bytes(scope["path"])
        # unless the protocol knows better
        scope.setdefault("state", {}).setdefault("arrived", time.monotonic())
        id = scope["state"]["request_id"] = logs.begin_request(
            dict(scope["headers"]).get(b"x-request-id")
        )
        if scope["method"] == "HEAD":  # answered as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = list(message.get("headers", []))
                names = {name for name, _ in own}
                message["headers"] = [
                    *own,
                    *(pair for pair in self.headers if pair[0] not in names),
                    (b"x-model", logs.request_models(self.model()).encode()),
                    (b"x-request-id", id.encode()),
                ]
            await send(message)

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413, f"expected at most {most} bytes")
            return message

        try:
            refusal = self._refusal(scope, most)
            await (refusal or self.app)(scope, receive_limited, send_with_headers)
        except Exception:
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - began
            self.on_response(scope, status, seconds)
            logs.log_response(scope, status, seconds, logs.request_models(self.model()))

    def _most_bytes(self, path: str) -> int:
        """Most bytes of the body of a request."""
        if path in LONG_BODY:
            return self.max_body_bytes
        return min(BODY_BYTES.get(path, SHORT_BODY), self.max_body_bytes)

    def _refusal(self, scope: Scope, most: int) -> JSONResponse | None:
        """The answer to a request that is not accepted. most: bytes of its body."""
        headers = dict(scope["headers"])
        refused = self.access.refusal(scope, headers)
        if refused is not None:
            return refused
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        # a page elsewhere can send other types unasked
        if scope["method"] == "POST" and kind != b"application/json":
            return error_response(
                415, ["header", "content-type"], "expected application/json", headers=CLOSE
            )
        # the limit of a body would not hold for what it becomes
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if scope["method"] == "POST" and encoding != b"identity":
            return error_response(
                415,
                ["header", "content-encoding"],
                "expected none: compressed bodies are not read",
                headers=CLOSE | {"accept-encoding": "identity"},
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            return error_response(413, ["body"], f"expected at most {most} bytes", headers=CLOSE)
        return None
