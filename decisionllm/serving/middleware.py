"""What every request passes before anything reads it: who may come in, how much they may bring, and what each answer carries."""

import hmac
import ipaddress
import json
import time

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
CLOSED = ("/v1/", "/openrtb/", "/metrics")  # what a token opens; a page that asks for it must be readable without


def loopback(host):
    """Whether only this machine can reach a server at this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Door:
    """An ASGI app before another. token: what `Authorization: Bearer ...` must say; limit: bytes of a body; watch(scope, status, seconds): told
    of each request. Without a token only requests to a loopback name are let in, so that no page elsewhere can ask through a browser."""

    def __init__(self, app, *, token=None, limit, watch):
        self.app, self.token, self.limit, self.watch = app, token, limit, watch

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status, got = time.perf_counter(), [500], 0

        async def answer(message):
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                message["headers"] = [
                    *message.get("headers", []), *((name.encode(), value.encode()) for name, value in HEADERS.items())
                ]  # fmt: skip
            await send(message)

        async def bring():
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self.limit:
                from fastapi import HTTPException

                raise HTTPException(413, f"expected at most {self.limit} bytes")
            return message

        try:
            if refused := self._refused(scope):
                return await refuse(answer, *refused)
            await self.app(scope, bring, answer)
        finally:
            self.watch(scope, status[0], time.perf_counter() - began)

    def _refused(self, scope):
        """Why a request may not come in: (status, where, message), or None."""
        headers = {name: value for name, value in scope["headers"]}
        if self.token is None:
            host = headers.get(b"host", b"").decode("latin-1")
            if not loopback(host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host):
                return 421, ["header", "host"], "expected a name of this machine"
        elif scope["path"].startswith(CLOSED):
            told = headers.get(b"authorization", b"").partition(b" ")
            if told[0].lower() != b"bearer" or not hmac.compare_digest(told[2], self.token.encode()):
                return 401, ["header", "authorization"], "expected Bearer and the token of this server"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            return 413, ["body"], f"expected at most {self.limit} bytes"
        return None


def refusal(where, message):
    """The body of an answer that refuses: where the fault is, and what was expected. For JSON."""
    return {"detail": [{"loc": where, "msg": message, "type": "refused"}]}


async def refuse(send, status, where, message):
    body = json.dumps(refusal(where, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
