"""POST routes called straight from their declarations: FastAPI documents them, its routing and
dependencies are not run.

They take most of the time of a small request (benchmarks/load.py). A body is read once, by
pydantic's own JSON parser, which is faster than Python's and refuses lone surrogates.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from decisionllm.schema import Json

Validate = Callable[[str | bytes], object]


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
        self.app, self.handlers = app, handlers
        known = [(route, readers(route)) for route in routes if "POST" in (route.methods or ())]
        self.exact = {
            route.path: (route, found) for route, found in known if not route.param_convertors
        }
        self.others = [(route, found) for route, found in known if route.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, reads, path = None, None, {}
        if scope["type"] == "http" and scope["method"] == "POST":
            route, reads = self.exact.get(scope["path"], (None, None))
            for other in () if route else self.others:
                if match := other[0].path_regex.match(scope["path"]):
                    route, reads = other
                    path = match.groupdict()
        if route is None or reads is None:
            return await self.app(scope, receive, send)
        scope["route"], request = route, Request(scope)
        try:
            body = await read(receive)
            response = await route.endpoint(
                **path, **{name: value(request, body) for name, value in reads.items()}
            )
        except ClientDisconnect:
            return None
        except Exception as error:
            kind = next(
                kind for kind in type(error).__mro__ if kind in self.handlers or kind is Exception
            )
            if kind is Exception:
                raise
            response = await self.handlers[kind](request, error)
        await response(scope, receive, send)


def readers(route: APIRoute) -> Json:
    """(request, body) -> value of each parameter of an endpoint that is not in its path."""
    found: Json = {}
    for name, annotation in get_type_hints(route.endpoint, include_extras=True).items():
        if annotation is Request:
            found[name] = lambda request, body: request
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found[name] = partial(parsed, ["body"], TypeAdapter(annotation).validate_json)
        elif name not in ("return", *route.param_convertors):
            found[name] = partial(
                header, name.replace("_", "-"), TypeAdapter(annotation).validate_python
            )
    return found


def header(name: str, validate: Validate, request: Request, body: bytes) -> object:
    found = next(
        (
            value.decode("latin-1")
            for key, value in request.scope["headers"]
            if key == name.encode()
        ),
        None,
    )
    return None if found is None else parsed(["header", name], validate, request, found)


def parsed(where: list[str], validate: Validate, request: Request, value: str | bytes) -> object:
    try:
        return validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError(
            [{**fault, "loc": (*where, *fault["loc"])} for fault in faults]
        ) from error


async def read(receive: Receive) -> bytes:
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
