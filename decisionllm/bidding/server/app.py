"""The HTTP app of a policy and its campaigns: requests are checked, passed to the service, and
answered in JSON.
"""

import asyncio
import contextlib
import gc
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from decisionllm import __version__
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.access import LocalAccess, TokenAccess
from decisionllm.bidding.server.answers import INTERNAL_ERROR, errors, refusal_response
from decisionllm.bidding.server.bidding import Bidding, Part, Routes
from decisionllm.bidding.server.campaigns import CampaignManager, RequestError
from decisionllm.bidding.server.direct import DirectRoutes
from decisionllm.bidding.server.metrics import Metrics
from decisionllm.bidding.server.middleware import Access, RequestGuard, error_response
from decisionllm.bidding.server.model_folder import ModelFolder
from decisionllm.bidding.server.models import Model, Models
from decisionllm.bidding.server.policy_routes import policy_routes
from decisionllm.bidding.server.service import Service
from decisionllm.policy.policy import Policy
from decisionllm.schema import Json


def create_app(
    policy: Policy,
    model_info: Json,
    observation: ObservationSpec | None = None,
    journal: Journal | None = None,
    *,
    token: str | None = None,
    access: Access | None = None,
    max_body_bytes: int = 8_000_000,
    campaigns: Json | None = None,
    exchange: Json | None = None,
    move_campaigns: bool = False,
    replica: int | None = None,
    folder: ModelFolder | None = None,
    snapshot_s: float | None = None,
    docs: bool = False,
    **limits: Any,
) -> FastAPI:
    """The FastAPI app of a policy.

    Args:
        model_info: answer of /v1/model; run, model, dataset, fingerprint and more.
        observation: the specification the policy was trained with; None: the app has no campaigns.
        journal: by default one in memory.
        token: with all rights; None or empty: requests of this machine alone are accepted.
        access: who may send a request, in place of `token`.
        max_body_bytes: see RequestGuard.
        campaigns: options of CampaignManager.
        exchange: options of `exchange.open_exchange`.
        move_campaigns: open campaigns of another model go on with this one.
        replica: see Metrics.
        folder: of runs that may take over while the server runs; None: none may.
        snapshot_s: seconds between two snapshots of the open campaigns; None: there are none.
        docs: also serve Swagger UI at /docs.
        limits: of Service.

    Raises:
        ValueError: the journal has open campaigns that this model may not or cannot answer.
    """
    name = model_info["model"]
    manager = None
    if observation is not None:
        manager = CampaignManager(policy, observation, journal, name=name, **campaigns or {})
    models = Models(Model(name, "", policy, manager, model_info))
    bidding = None
    begin = None
    if manager is not None:
        bidding = Bidding.begin(
            models,
            folder,
            move=move_campaigns,
            log=limits.get("log", "none"),
            snapshot_s=snapshot_s,
        )
        begin = bidding.begin_campaign
    metrics = Metrics(replica)
    service = Service(models, on_batch=metrics.batches.observe, begin=begin, **limits)
    metrics.attach(service)
    if access is None:
        access = TokenAccess(token) if token else LocalAccess()
    parts: list[Part] = [access]
    app = app_without_routes(service, parts)
    if docs:
        add_swagger_ui(app)
    routes: list[Routes] = [(policy_routes(app, service, metrics), None)]
    if bidding is not None:
        more_routes, more_parts = bidding.serve(app, service, metrics.registry, exchange or {})
        routes += more_routes
        parts += more_parts
    add_routes(app, routes)
    app.add_middleware(
        RequestGuard,
        access=access,
        max_body_bytes=max_body_bytes,
        on_response=metrics.on_response,
        model=lambda: models.current.name,
    )
    return app


def app_without_routes(service: Service, parts: Sequence[Part]) -> FastAPI:
    """An app that runs a service and its parts, see `lifespan`, and answers errors in one form."""
    app = FastAPI(
        title="decisionllm",
        version=__version__,
        lifespan=lifespan(service, parts),
        openapi_url=None,  # see `add_document`
        docs_url=None,
        redoc_url=None,
        # such a redirect would name the host and the scheme that any client or proxy states
        redirect_slashes=False,
        description=(
            "A trained policy for bidders: campaigns with a journal, and stateless actions "
            "at /v1/act."
        ),
        responses=errors(403, 421, 429, usual=()),
    )
    app.state.service = service
    app.state.ready = False
    handle_errors(app)
    add_document(app)
    return app


def add_document(app: FastAPI) -> None:
    """Add the route of the OpenAPI document. FastAPI's own writes it anew for each request, which
    needs no token and costs more than a bid.
    """

    @cache
    def document() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    async def openapi(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)


def add_swagger_ui(app: FastAPI) -> None:
    """Add the route of Swagger UI, which the browser loads from a public CDN: this page alone may."""
    page = get_swagger_ui_html(openapi_url="openapi.json", title="decisionllm")
    text = bytes(page.body).decode()
    place = '<div id="swagger-ui">'
    without_network = (
        "Swagger UI could not be loaded: it needs a network. /openapi.json has the document."
    )
    text = text.replace(place, f"{place}{without_network}")
    hosts = " ".join(sorted({*re.findall(r'"(https://[^/"]+)', text)}))
    policy = (
        f"default-src 'none'; script-src 'unsafe-inline' {hosts}; style-src 'unsafe-inline' {hosts}; "
        f"img-src 'self' data: {hosts}; connect-src 'self'; frame-ancestors 'none'"
    )

    async def swagger_ui(request: Request) -> Response:
        return HTMLResponse(text, headers={"content-security-policy": policy})

    app.add_route("/docs", swagger_ui, include_in_schema=False)


def add_routes(app: FastAPI, routes: Sequence[Routes]) -> None:
    """Add routers to an app; their routes are called directly, see `DirectRoutes`."""
    direct: list[APIRoute] = []
    for router, responses in routes:
        app.include_router(router, responses=responses)
        direct += [route for route in router.routes if isinstance(route, APIRoute)]
    app.add_middleware(DirectRoutes, routes=direct, handlers=app.exception_handlers)


Lifespan = Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]


def lifespan(service: Service, parts: Sequence[Part]) -> Lifespan:
    """The work of an app before its first request and after its last one.

    Args:
        service: that decides.
        parts: run beside the requests; the list may grow until the app starts.
    """

    @contextlib.asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        async with service.traces.run(), service.run(), contextlib.AsyncExitStack() as stack:
            # the first request does not wait for one-time work
            for model in list(service.models.loaded.values()):
                await asyncio.to_thread(model.policy.warm_up)
            for part in parts:
                await stack.enter_async_context(part.run())
            # A full collection of the objects that are loaded would delay requests.
            gc.freeze()
            app.state.ready = True
            yield
            app.state.ready = False

    return run


def handle_errors(app: FastAPI) -> None:
    """Answer every error in one form: the place of the fault and the expected value."""

    @app.exception_handler(sqlite3.Error)
    async def _(request: Request, error: sqlite3.Error) -> Response:
        return refusal_response(app.state.service.report_failure(error), "server")

    @app.exception_handler(RequestError)
    async def _(request: Request, error: RequestError) -> Response:
        where = "body"
        if error.field == "id":
            where = "path"
        elif error.status == 503:
            where = "server"
        return refusal_response(error, where)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        faults = [
            {"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()[:20]
        ]
        return JSONResponse({"detail": faults}, 422)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        where = {404: ["path"], 405: ["method"]}.get(error.status_code, ["body"])
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        # the router names the methods of one route, not of the path
        if error.status_code == 405 and "route" in request.scope:
            path = request.scope["route"].path
            methods = {method.upper() for method in app.openapi()["paths"][path]}
            if "GET" in methods:
                methods.add("HEAD")
            headers["allow"] = ", ".join(sorted(methods))
        return error_response(error.status_code, where, str(error.detail), headers=headers)

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> Response:
        return error_response(
            500, ["server"], INTERNAL_ERROR, headers={"x-request-id": request.state.request_id}
        )
