"""HTTP routes of a policy and its campaigns: requests are checked, passed to the service, and
answered in JSON.
"""

import asyncio
import contextlib
import gc
import json
import logging
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from decisionllm import __version__
from decisionllm.domains.auction.campaign import HISTORIES, offered, summary
from decisionllm.domains.auction.journal import Journal
from decisionllm.domains.auction.observation import ObservationSpec
from decisionllm.policy.policy import Policy
from decisionllm.schema import History, Json
from decisionllm.serving import logs, model_routes, openrtb, schemas
from decisionllm.serving.access import LocalAccess, TokenAccess
from decisionllm.serving.campaigns import CampaignManager, RequestError
from decisionllm.serving.direct import DirectRoutes
from decisionllm.serving.metrics import Metrics
from decisionllm.serving.middleware import Access, RequestGuard, error_response
from decisionllm.serving.model_folder import ModelFolder
from decisionllm.serving.model_routes import ModelChanges
from decisionllm.serving.models import Model, Models
from decisionllm.serving.service import Service
from decisionllm.serving.shading import BidShading
from decisionllm.serving.snapshot import Snapshot

BID_EXPIRY_S = 60.0
LISTED = 200  # most campaigns of a list
STATIC = Path(__file__).parent / "static"
PAGE = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
INTERNAL = "internal server error; see the server log"
logger = logging.getLogger("decisionllm.serving")
MEANING = {
    400: "not JSON",
    401: "missing or wrong token",
    403: "sent by a page of another origin, or the token lacks the right",
    404: "no such campaign",
    409: "out of order, ended, or answered otherwise",
    413: "body too long",
    415: "a content type other than application/json",
    421: "without a token: the host is no name of this machine",
    422: "a field is wrong",
    429: "more requests than the token may send",
    503: "busy, late, or the journal failed",
}
Deadline = Annotated[
    int | None, Header(ge=1, le=600_000, description="ms, if shorter than the server's own")
]
Search = Annotated[
    str,
    Query(max_length=200, description="part of the name, or the beginning of the id or the key"),
]
Before = Annotated[
    str | None, Query(max_length=64, description="id of a campaign; only those opened before it")
]


class Part(Protocol):
    """What works beside the requests while the app runs."""

    def run(self) -> contextlib.AbstractAsyncContextManager[None]: ...


def errors(
    *codes: int, usual: tuple[int, ...] = (400, 401, 413, 415, 422, 503)
) -> dict[int | str, Json]:
    """The error answers of a route for the OpenAPI document: these codes and the usual ones."""
    return {
        code: {"model": schemas.Error, "description": MEANING[code]} for code in (*usual, *codes)
    }


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
    **limits: Any,
) -> FastAPI:
    """The FastAPI app of a policy.

    Args:
        model_info: answer of /v1/model; run, model, dataset, fingerprint and more.
        observation: what the policy was trained to observe; None: the app has no campaigns.
        journal: by default one in memory.
        token: with all rights; None or empty: requests of this machine alone are accepted.
        access: who may send a request, in place of `token`.
        max_body_bytes: see RequestGuard.
        campaigns: options of CampaignManager.
        exchange: options of openrtb.router, but shading is a bool; and bid_expiry_s, seconds until
            a bid without a notice counts as won.
        move_campaigns: open campaigns of another model go on with this one.
        replica: see Metrics.
        folder: of runs that may take over while the server runs; None: none may.
        snapshot_s: seconds between two snapshots of the open campaigns; None: there are none.
        limits: of Service.

    Raises:
        ValueError: the journal has open campaigns that this model may not or cannot answer.
    """
    manager = None
    open_bids = None
    bid_shading = None
    exchange = dict(exchange or {})
    shaded = exchange.pop("shading", False)
    expiry = exchange.pop("bid_expiry_s", BID_EXPIRY_S)
    if observation is not None:
        manager = CampaignManager(
            policy, observation, journal, name=model_info["model"], **campaigns or {}
        )
    models = Models(Model(model_info["model"], "", policy, manager, model_info))
    if manager is not None:
        # the service finds a damaged file too, and reports it
        with logs.written(limits.get("log", "none")), contextlib.suppress(sqlite3.Error):
            if folder is not None:
                folder.begin(models)
            models.current.campaigns.check_open(move=move_campaigns, beside=models.loaded)
        open_bids = openrtb.reservations(manager.journal, expiry)
        if shaded:
            bid_shading = BidShading(manager.journal.shading_path, expiry=expiry)
    parts: list[Part] = []
    if manager is not None and snapshot_s and manager.journal.path != ":memory:":
        snapshot = Snapshot(manager.journal, models.all_in_memory, snapshot_s)
        limits["begin"] = snapshot.begin
        parts.append(snapshot)
    service = Service(
        policy, models=models, on_batch=lambda n: metrics.batches.observe(n), **limits
    )
    metrics = Metrics(service, replica)
    if access is None:
        access = TokenAccess(token) if token else LocalAccess()
    parts.append(access)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.traces.run(), service.run(), contextlib.AsyncExitStack() as stack:
            # the first request does not wait for one-time work
            for model in list(models.loaded.values()):
                await asyncio.to_thread(model.policy.warm_up)
            for part in parts:
                await stack.enter_async_context(part.run())
            gc.freeze()  # what was loaded is not collected: a full collection would delay requests
            app.state.ready = True
            yield
            app.state.ready = False
        if open_bids is not None:
            open_bids.close()
        if bid_shading is not None:
            bid_shading.close()

    app = FastAPI(
        title="decisionllm",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        description=(
            "A trained policy for bidders: campaigns with a journal, and stateless actions "
            "at /v1/act."
        ),
        responses=errors(403, 421, 429, usual=()),
    )
    app.state.service, app.state.ready = service, False
    handle_errors(app)
    routers: list[tuple[APIRouter, Any]] = [(policy_routes(app, service, metrics), None)]
    if manager is not None and open_bids is not None:
        for path, (name, media_type) in PAGE.items():
            app.add_route(
                f"/{path}", static_page(STATIC / name, media_type), include_in_schema=False
            )
        routers.append((campaign_routes(service, manager.journal), None))
        exchange["shading"] = bid_shading
        routers.append(
            (openrtb.router(manager.journal, open_bids, metrics.registry, **exchange), errors(404))
        )
        if folder is not None:
            changes = ModelChanges(service, folder)
            parts.append(changes)
            routers.append((model_routes.router(changes, errors), None))
    for router, responses in routers:
        app.include_router(router, responses=responses)
    direct = [
        route for router, _ in routers for route in router.routes if isinstance(route, APIRoute)
    ]
    app.add_middleware(DirectRoutes, routes=direct, handlers=app.exception_handlers)
    app.add_middleware(
        RequestGuard,
        access=access,
        max_body_bytes=max_body_bytes,
        on_response=metrics.on_response,
        model=lambda: models.current.name,
    )
    return app


def static_page(file: Path, media_type: str) -> Any:
    """The function of a route that answers with a file."""

    def page(request: Request) -> FileResponse:
        return FileResponse(file, media_type=media_type)

    return page


def refused(error: RequestError, where: str) -> JSONResponse:
    return error_response(
        error.status, [where, error.field], error.message, expected=error.expected
    )


def handle_errors(app: FastAPI) -> None:
    """Answer every error in one form: where the fault is and what was expected."""

    @app.exception_handler(sqlite3.Error)
    async def _(request: Request, error: sqlite3.Error) -> Response:
        return refused(app.state.service.failed(error), "server")

    @app.exception_handler(RequestError)
    async def _(request: Request, error: RequestError) -> Response:
        return refused(
            error, "path" if error.field == "id" else "server" if error.status == 503 else "body"
        )

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
            methods = {
                method.upper() for method in app.openapi()["paths"][request.scope["route"].path]
            }
            headers["allow"] = ", ".join(
                sorted(methods | ({"HEAD"} if "GET" in methods else set()))
            )
        return error_response(error.status_code, where, str(error.detail), headers=headers)

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> Response:
        return error_response(
            500, ["server"], INTERNAL, headers={"x-request-id": request.state.request_id}
        )


def policy_routes(app: FastAPI, service: Service, metrics: Metrics) -> APIRouter:
    """Routes that every policy has: its health, its metrics, its description and its actions."""
    routes = APIRouter()

    @routes.get("/healthz", tags=["server"])
    async def healthz() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "ok"}

    @routes.get(
        "/readyz",
        tags=["server"],
        responses={503: {"model": schemas.Error, "description": "not yet"}},
    )
    async def readyz() -> dict[str, str]:
        """Whether the model is loaded and has made a decision, and the journal can be written.

        `degraded`: all but the rows that are named is served.
        """
        if not app.state.ready:
            raise RequestError(503, "model", "the model is being loaded")
        if service.manager is None:
            return {"status": "ready"}
        await service.check_journal()
        damaged = sorted(service.manager.journal.damaged)
        if damaged:
            return {"status": "degraded", "damaged": "; ".join(damaged[:20])}
        return {"status": "ready"}

    prometheus: dict[int | str, Json] = {
        200: {"content": {"text/plain": {}}},
        401: errors(401, usual=())[401],
    }

    @routes.get("/metrics", tags=["server"], responses=prometheus, response_class=Response)
    async def metrics_text() -> Response:
        """Metrics in the format of Prometheus."""
        text = await asyncio.to_thread(metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @routes.get("/v1/model", tags=["policy"], responses=errors(401, 503, usual=()))
    async def model() -> Json:
        """The served model: its run, its data, its observations and its actions."""
        return service.models.current.info

    @routes.post("/v1/act", tags=["policy"], response_model=schemas.ActAnswer, responses=errors())
    async def act(request: schemas.ActRequest, x_deadline_ms: Deadline = None) -> Response:
        """An action for a history, without state: the reference for every other route."""
        action, togo = await service.act(
            parse_history(service.models.current.policy, vars(request)), service.due(x_deadline_ms)
        )
        if not np.isfinite(action).all():
            raise RequestError(
                422, "observations", "the policy has no finite action for these numbers"
            )
        return json_text(to_json({"action": action.tolist(), "return_to_go": togo}))

    return routes


def campaign_routes(service: Service, journal: Journal) -> APIRouter:
    routes = APIRouter(tags=["campaigns"])

    def with_ticks(id: str) -> Json:
        logs.note_campaign(id)
        known = journal.campaign(id)
        if known is None:
            raise RequestError(404, "id", "no such campaign")
        ticks = [tick["answer"] for tick in journal.ticks(id, damaged="skip")]
        if service.shadow is not None:
            beside = service.shadow.decisions(id)
            ticks = [tick | {"shadow": beside.get(tick["index"])} for tick in ticks]
        return with_status(known, ticks[-1] if ticks else None) | {"ticks": ticks}

    @routes.post(
        "/v1/campaigns", status_code=201, response_model=schemas.Campaign, responses=errors(409)
    )
    async def open_campaign(request: schemas.CampaignSettings) -> Response:
        """Open a campaign, or find the one that was opened with this key."""
        known = await service.open(request.model_dump(exclude={"key"}), request.key)
        opened = await asyncio.to_thread(
            lambda: with_status(*journal.last(known["id"]) or (known, None))
        )
        return Response(
            schemas.Campaign(**opened).model_dump_json(), 201, media_type="application/json"
        )

    @routes.get(
        "/v1/campaigns", response_model=schemas.Campaigns, responses=errors(401, 422, 503, usual=())
    )
    async def campaigns(search: Search = "", before: Before = None) -> Json:
        """The campaigns opened last, newest first."""
        rows, older = await asyncio.to_thread(journal.latest, LISTED, search=search, before=before)
        still_open = await asyncio.to_thread(journal.still_open)
        listed = [with_status(*row) for row in rows]
        return {"campaigns": listed, "more": older is not None, "older": older, "open": still_open}

    whole: Json = {
        "response_model": schemas.CampaignWithTicks,
        "response_model_exclude_unset": True,
    }

    @routes.get("/v1/campaigns/{id}", responses=errors(404), **whole)
    async def campaign(id: str) -> Json:
        """A campaign and its ticks."""
        return await asyncio.to_thread(with_ticks, id)

    @routes.delete("/v1/campaigns/{id}", responses=errors(404), **whole)
    async def close(id: str) -> Json:
        """End a campaign. It stays in the journal."""
        await service.close(id)
        return await asyncio.to_thread(with_ticks, id)

    @routes.post(
        "/v1/campaigns/{id}/tick", response_model=schemas.TickAnswer, responses=errors(404, 409)
    )
    async def tick(id: str, request: schemas.Tick, x_deadline_ms: Deadline = None) -> Response:
        """What to bid in a step. A repeated request has the same answer, byte for byte."""
        return json_text(await service.tick(id, request.model_dump(), service.due(x_deadline_ms)))

    @routes.post(
        "/v1/ticks",
        response_model=dict[str, schemas.TickAnswer | schemas.Error],
        responses=errors(),
    )
    async def ticks(
        request: schemas.Ticks, http: Request, x_deadline_ms: Deadline = None
    ) -> Response:
        """Ticks of many campaigns, decided together; each has its answer or its error."""
        http.state.caller.bucket.charge(len(request.ticks) - 1)
        due = service.due(x_deadline_ms)

        async def one(id: str, tick: schemas.Tick) -> str:
            try:
                async with service.many:
                    return await service.tick(id, tick.model_dump(), due)
            except RequestError as error:
                answer = refused(error, "ticks")
            except sqlite3.Error as error:
                answer = refused(service.failed(error), "server")
            except Exception:  # the other ticks of the request count
                logger.exception("tick %s of campaign %s", tick.index, id)
                answer = error_response(500, ["server"], INTERNAL)
            return bytes(answer.body).decode()

        answers = await asyncio.gather(*(one(id, tick) for id, tick in request.ticks.items()))
        pairs = zip(request.ticks, answers, strict=True)
        return json_text(
            "{" + ", ".join(f"{json.dumps(id)}: {answer}" for id, answer in pairs) + "}"
        )

    @routes.post("/v1/bid", response_model=schemas.BiddingAnswer, responses=errors(404, 409))
    async def bid(request: schemas.AuctionNetBidding, x_deadline_ms: Deadline = None) -> Response:
        """A tick in the form of AuctionNet's `bidding`: a bid for each opportunity."""
        due, values = service.due(x_deadline_ms), request.pValues
        tick = await asyncio.to_thread(parse_bidding, vars(request))
        answer = json.loads(await service.tick(request.campaign, tick, due))
        bids = np.minimum(np.asarray(values, np.float64) * answer["multiplier"], answer["max_bid"])
        return json_text(await asyncio.to_thread(lambda: to_json(answer | {"bids": bids.tolist()})))

    return routes


def with_status(known: Json, last: Json | None) -> Json:
    """What the journal has of a campaign, and its status after the answer to its last tick."""
    last = last or {"index": -1, "spend": 0.0, "conversions": 0.0}
    status = {"status": "ended" if known["ended"] else "open", "step": last["index"] + 1}
    return known | status | {"spend": last["spend"], "conversions": last["conversions"]}


def json_text(text: str | bytes) -> Response:
    return Response(text, media_type="application/json")


def parse_bidding(request: Json) -> Json:
    """AuctionNet's arguments -> the request of a tick."""
    result, step = None, request["timeStepIndex"]
    if step:
        if empty := [name for name in HISTORIES if not request[name]]:
            raise RequestError(422, empty[0], f"expected step {step - 1}, got no step")
        try:
            info, *rest = (request[name][-1] for name in HISTORIES)
            result = summary(
                np.array(info, np.float64).reshape(len(info), -1)[:, 0] if info else [], *rest
            )
        except (ValueError, IndexError) as error:
            name = next((name for name in HISTORIES if name in str(error)), HISTORIES[0])
            raise RequestError(
                422, name, "expected rows of numbers, one per opportunity of the last step"
            ) from error
        result = checked_result({name: float(x) for name, x in result.items()})
    value, volume = offered(request["pValues"])
    return {
        "index": step,
        "key": "bid",
        "result": result,
        "coming": {"value": float(value), "volume": float(volume)},
    }


def checked_result(result: dict[str, float]) -> dict[str, float]:
    """The result of a step that was summed from single opportunities, refused where the tick route
    would refuse it.
    """
    try:
        schemas.Result.model_validate(result)
    except ValidationError as error:
        fault = error.errors()[0]
        raise RequestError(
            422, "historyImpressionResult", f"{fault['loc'][0]} of the step: {fault['msg']}"
        ) from error
    return result


def parse_history(policy: Policy, request: Json) -> History:
    """observations, actions, rewards, target_return, text and action_masks of a request ->
    History.
    """
    spec, masks = policy.model.spec, request["action_masks"]
    t = len(request["observations"]) - 1
    fields: dict[str, tuple[type, tuple[int, ...]]] = {
        "observations": (np.float32, (t + 1, spec.observation_dim)),
        "actions": (np.float32, (t, spec.action_dim)),
        "rewards": (np.float64, (t,)),
        "action_masks": (bool, (t + 1, spec.num_actions)),
    }
    if t >= spec.horizon and policy.model.tokenizer.timesteps is not None:
        raise RequestError(
            422, "observations", f"expected at most {spec.horizon} steps, got {t + 1}"
        )
    if masks is not None and not spec.num_actions:
        raise RequestError(
            422, "action_masks", "expected none: this policy's actions are continuous"
        )
    arrays: Json = {}
    for name, (dtype, shape) in (
        (name, field) for name, field in fields.items() if request[name] is not None
    ):
        try:
            arrays[name] = np.array(request[name] or np.zeros((0, *shape[1:])), dtype)
        except ValueError:  # rows of different lengths
            arrays[name] = np.zeros(())
        if arrays[name].shape != shape:
            raise RequestError(
                422,
                name,
                f"expected {' x '.join(map(str, shape))} numbers for {t + 1} observations",
            )
    if masks is not None and not arrays["action_masks"].any(1).all():
        raise RequestError(422, "action_masks", "expected an allowed action in every step")
    return History(**arrays, target_return=request["target_return"], task=request["text"])
