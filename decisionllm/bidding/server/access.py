"""Access to the server: for this machine alone, or for holders of a token with the right for it."""

import logging
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import Scope

from decisionllm.bidding.server.middleware import (
    CLOSE,
    PROTECTED,
    Headers,
    error_response,
    is_loopback,
)
from decisionllm.bidding.server.secret_file import POSIX, check_writers, list_exposures
from decisionllm.bidding.server.tokens import Caller, Tokens, holds_plain_tokens
from decisionllm.bidding.server.watched_file import WatchedFile
from decisionllm.files import explain_errors

logger = logging.getLogger("decisionllm.bidding.server")
OPERATED = ("/v1/models",)  # paths whose changes need the right `operate`


class LocalAccess:
    """Requests to a loopback host name, and none that a page of another origin sends, since a
    browser may be used to reach the server.
    """

    def __init__(self) -> None:
        self.anyone = Caller()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        yield

    def refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """The answer to a request that is not accepted. The caller is kept in its state."""
        scope["state"]["caller"] = self.anyone
        host = headers.get(b"host", b"").decode("latin-1")
        name, _, port = host.rpartition(":")
        if not port.isdigit():
            name = host
        if not is_loopback(name):
            return error_response(
                421, ["header", "host"], "expected a name of this machine", headers=CLOSE
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.partition(b"://")[2] != headers[b"host"]:
            return error_response(
                403, ["header", "origin"], "expected a page of this server", headers=CLOSE
            )
        return None


class TokenAccess:
    """Requests with `Authorization: Bearer ...` on PROTECTED paths; others are open to all.

    Args:
        single: a token with all rights; None or empty: there is none.
        path: of a file of tokens, see `tokens`; None: there is none.

    Raises:
        ValueError: the file cannot be read or is wrong, or others may write it.
    """

    def __init__(self, single: str | None = None, path: str | Path | None = None) -> None:
        self.tokens = Tokens(single)
        self.file: WatchedFile | None = None
        self.exposures: set[str] = set()  # that were logged
        if path is not None:
            self.file = WatchedFile(path, self.tokens.load, check=self._check_permissions)
            with explain_errors(f"tokens: expected a file to read, got {path}", OSError):
                self.file.read()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Follow changes of the file until the end of the block."""
        if self.file is None:
            yield
            return
        async with self.file.run():
            yield

    def _check_permissions(self, status: os.stat_result, content: bytes) -> None:
        """Refuse a file of tokens that others may write. What else exposes it is logged, once."""
        assert self.file is not None
        path = self.file.path
        try:
            check_writers(path, status)
        except ValueError as error:
            raise ValueError(f"tokens: {error}") from error
        if not POSIX:
            return
        is_plain = holds_plain_tokens(content)
        for exposure in list_exposures(path, status, user=os.geteuid(), is_plain=is_plain):
            if exposure not in self.exposures:
                self.exposures.add(exposure)
                logger.warning("tokens: %s", exposure)

    def refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """The answer to a request that is not accepted. The caller is kept in its state."""
        if not scope["path"].startswith(PROTECTED):
            return None
        where = ["header", "authorization"]
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        caller = self.tokens.find(token) if scheme.lower() == b"bearer" else None
        if caller is None:
            message = "expected Bearer and the token of this server"
            return error_response(401, where, message, headers=CLOSE)
        scope["state"]["caller"] = caller
        right = required_right(scope["method"], scope["path"])
        if right not in caller.rights:
            message = f"expected a token with the right {right!r}, got that of {caller.name}"
            return error_response(403, where, message, headers=CLOSE)
        wait = caller.bucket.take()
        if wait:
            after = {"retry-after": str(math.ceil(wait))}
            message = f"expected at most {caller.bucket.rate:g} requests a second"
            return error_response(429, where, message, headers=after)
        return None


def required_right(method: str, path: str) -> str:
    """The right that a request needs."""
    if method in ("GET", "HEAD"):
        return "read"
    return "operate" if path.startswith(OPERATED) else "bid"
