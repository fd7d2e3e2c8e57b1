"""POST routes called straight from their declarations: FastAPI documents them, its routing and
dependencies are not run.

They take most of the time of a small request (lab/load.py). A body is read once, by
pydantic's own JSON parser, which is faster than Python's and refuses lone surrogates.
"""

import gc
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

Reader = Callable[[Request, bytes], object]  # (request, its body) -> an argument of the endpoint
Handler = Callable[[Request, Exception], Awaitable[Response]]
MAX_FAULTS = 100  # most faults of a request that are named
# Most of each mark of a body, since the parser keeps the event loop for seconds with a long body that
# is all keys, lists or small numbers. A thousand ticks have 40,000 quotation marks; 50,000
# opportunities and their results have 150,000 lists and 500,000 numbers.
MAX_MARKS = {
    b'"': (100_000, "quotation marks"),
    b"{": (50_000, "objects"),
    b"[": (200_000, "lists"),
    b",": (600_000, "commas"),
}


@dataclass(frozen=True)
class DirectRoute:
    """A route, and how the arguments that are not in its path are read."""

    route: APIRoute
    readers: dict[str, Reader]


class DirectRoutes:
    """ASGI middleware that answers these routes; others are the app's.

    Args:
        routes: with endpoints that return a Response. A parameter is the body (a model), the
            Request, one of the path, or a header.
        handlers: error -> answer, by the type of the error; others are raised.
    """

    def __init__(
        self, app: ASGIApp, *, routes: Iterable[APIRoute], handlers: Mapping[Any, Any]
    ) -> None:
        self.app = app
        self.handlers = handlers
        self.by_path: dict[str, DirectRoute] = {}
        self.by_pattern: list[DirectRoute] = []
        for route in routes:
            if "POST" not in (route.methods or ()):
                continue
            direct = DirectRoute(route, build_readers(route))
            if route.param_convertors:
                self.by_pattern.append(direct)
            else:
                self.by_path[route.path] = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = None
        arguments: dict[str, object] = {}
        if scope["type"] == "http" and scope["method"] == "POST":
            direct, arguments = self._find(scope["path"])
        if direct is None:
            return await self.app(scope, receive, send)
        scope["route"] = direct.route
        request = Request(scope)
        try:
            body = await read_body(receive)
            for name, reader in direct.readers.items():
                arguments[name] = reader(request, body)
            response = await direct.route.endpoint(**arguments)
        except ClientDisconnect:
            return None
        except Exception as error:
            handler = self._handler(error)
            if handler is None:
                raise
            response = await handler(request, error)
        await response(scope, receive, send)

    def _find(self, path: str) -> tuple[DirectRoute | None, dict[str, object]]:
        """The route of a path, and the arguments in the path."""
        if path in self.by_path:
            return self.by_path[path], {}
        for direct in self.by_pattern:
            if match := direct.route.path_regex.match(path):
                return direct, match.groupdict()
        return None, {}

    def _handler(self, error: Exception) -> Handler | None:
        """The handler of the nearest class of an error below Exception."""
        for kind in type(error).__mro__:
            if kind is Exception:
                break
            if kind in self.handlers:
                handler: Handler = self.handlers[kind]
                return handler
        return None


def build_readers(route: APIRoute) -> dict[str, Reader]:
    """A reader of each parameter of an endpoint that is not in its path."""
    reader_by_name: dict[str, Reader] = {}
    for name, annotation in get_type_hints(route.endpoint, include_extras=True).items():
        if name == "return" or name in route.param_convertors:
            continue
        if annotation is Request:
            reader_by_name[name] = lambda request, body: request
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            reader_by_name[name] = body_reader(TypeAdapter(annotation))
        else:
            reader_by_name[name] = header_reader(name.replace("_", "-"), TypeAdapter(annotation))
    return reader_by_name


def body_reader(model: TypeAdapter[Any]) -> Reader:
    def validate_body(request: Request, body: bytes) -> object:
        check_marks(body)
        # a body has no cycles, and a search for them in all that was just read takes as long again
        gc.disable()
        try:
            return model.validate_json(body)
        except ValidationError as error:
            raise validation_error(error, "body") from error
        finally:
            gc.enable()

    return validate_body


def check_marks(body: bytes) -> None:
    """Refuse a body that would take too long to parse. Raises a RequestValidationError."""
    for mark, (most, name) in MAX_MARKS.items():
        count = body.count(mark)
        if count > most:
            message = f"expected at most {most:,} {name}, got {count:,}"
            raise RequestValidationError([{"type": "marks", "loc": ("body",), "msg": message}])


def header_reader(name: str, kind: TypeAdapter[Any]) -> Reader:
    """Reads a header; None: the request has none."""

    def read_header(request: Request, body: bytes) -> object:
        value = request.headers.get(name)
        if value is None:
            return None
        try:
            return kind.validate_python(value)
        except ValidationError as error:
            raise validation_error(error, "header", name) from error

    return read_header


def validation_error(error: ValidationError, *where: str) -> RequestValidationError:
    """The error of a request whose body or header is wrong: its faults, or the number of very many.

    A list has one fault, but an object has one for each key that is unknown. Naming millions of
    them would stop the event loop for minutes.
    """
    count = error.error_count()
    if count > MAX_FAULTS:
        message = f"expected the fields of the route, got {count:,} unknown or wrong ones"
        return RequestValidationError([{"type": "faults", "loc": where, "msg": message}])
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    return RequestValidationError([{**fault, "loc": (*where, *fault["loc"])} for fault in faults])


async def read_body(receive: Receive) -> bytes:
    """The body of a request.

    Raises:
        ClientDisconnect: the connection ended before the body did.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)
