"""The HTTP routes over a policy and its desk: what is asked for is checked, handed on, and answered in JSON."""

import asyncio
import contextlib
import json
from typing import Annotated

import numpy as np

from decisionllm import __version__
from decisionllm.envs.auction.campaign import offered, summary
from decisionllm.serving import openrtb, page
from decisionllm.serving.campaigns import Desk, Refused
from decisionllm.serving.metrics import Metrics
from decisionllm.serving.middleware import Door, refusal
from decisionllm.serving.schemas import models
from decisionllm.serving.service import Service, history

LISTED = 200  # campaigns, at most


def create_app(policy, card, observation=None, journal=None, *, token=None, body=4_000_000, desk=None, exchange=None, **limits):
    """The FastAPI app. card: what /v1/model says, a dict with run, model, dataset, fingerprint; observation: the ObservationSpec that the
    policy was trained with, or None: then it has no campaigns. journal: a Journal. token: see Door; body: bytes. desk: options of Desk;
    exchange: of openrtb.router; limits: of Service. `app.state.service` is the Service."""
    from fastapi import FastAPI, Header, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException as Fault

    m = models()
    at = Desk(policy, observation, journal, name=card["model"], **desk or {}) if observation is not None else None
    service = Service(policy, at, watch=lambda n: metrics.batches.observe(n), **limits)
    metrics = Metrics(service, card)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with service.run():
            await asyncio.to_thread(warm, policy)
            app.state.ready = True
            yield
            app.state.ready = False

    said = {
        400: "not JSON",
        401: "no token, or a wrong one", 404: "no such campaign", 409: "out of order, or ended, or asked otherwise before",
        413: "too long a body", 422: "a field is wrong", 503: "busy, or late",
    }  # fmt: skip

    def errors(*codes):
        return {code: {"model": m.Error, "description": said[code]} for code in (400, 401, 413, 422, 503, *codes)}

    app = FastAPI(
        title="decisionllm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="A trained policy, for bidders: campaigns with a journal, and the stateless truth at /v1/act.",
    )  # fmt: skip
    app.state.service, app.state.ready, app.state.metrics = service, False, metrics
    app.add_middleware(Door, token=token, limit=body, watch=metrics.watch)

    def refused(status, where, message, **more):
        headers = {"Retry-After": "1"} if status == 503 else None
        return JSONResponse(refusal(where, message) | {k: v for k, v in more.items() if k == "expected"}, status, headers)

    @app.exception_handler(Refused)
    async def _(request: Request, error: Refused):
        where = "path" if error.field == "id" else "server" if error.status == 503 else "body"
        return refused(error.status, [where, error.field], error.message, **error.more)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError):
        wrong = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()[:20]]
        return JSONResponse({"detail": wrong}, 422)

    @app.exception_handler(Fault)
    async def _(request: Request, error: Fault):
        where = {404: ["path"], 405: ["method"]}.get(error.status_code, ["body"])
        answer = refused(error.status_code, where, str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception):
        return refused(500, ["server"], "an error that is ours; it was logged")

    Deadline = Annotated[int | None, Header(ge=1, le=600_000, description="ms, where it is sooner than the server's own")]

    def seconds(ms):
        return ms and ms / 1000

    def given(text):
        return Response(text, media_type="application/json")

    @app.get("/healthz", tags=["server"])
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["server"], responses={503: {"model": m.Error, "description": "not yet"}})
    async def readyz() -> dict[str, str]:
        """The model is loaded and has made a decision."""
        if not app.state.ready:
            raise Refused(503, "model", "is being loaded")
        return {"status": "ready"}

    @app.get(
        "/metrics",
        tags=["server"],
        responses={200: {"content": {"text/plain": {}}}, 401: errors()[401]},
        response_class=Response,
    )
    async def prometheus():
        """For Prometheus."""
        text, kind = await asyncio.to_thread(metrics.text)
        return Response(text, headers={"content-type": kind})

    @app.get("/v1/model", tags=["policy"], responses={401: errors()[401]})
    async def model() -> dict:
        """What is served: the run, its data, and what it sees and answers."""
        return card

    @app.post("/v1/act", tags=["policy"], response_model=m.Action, responses=errors())
    async def act(asked: m.Act, x_deadline_ms: Deadline = None):
        """An action for a history: the truth, to which every other way to ask must come."""
        action, togo = await service.act(history(policy, asked.model_dump()), seconds(x_deadline_ms))
        if not np.isfinite(action).all():
            raise Refused(422, "observations", "the policy has no finite answer to these numbers")
        return {"action": action.tolist(), "return_to_go": togo}

    if at is None:
        return app
    app.include_router(page.router())
    app.include_router(openrtb.router(at.journal, metrics.registry, **exchange or {}), responses=errors(404))

    def summarised(known, last):
        last = last or {"index": -1, "spend": 0.0, "conversions": 0.0}
        return known | {
            "status": "ended" if known["ended"] else "open", "step": last["index"] + 1, "spend": last["spend"],
            "conversions": last["conversions"],
        }  # fmt: skip

    def whole(id):
        known = at.journal.campaign(id)
        if known is None:
            raise Refused(404, "id", "no such campaign")
        ticks = [tick["answer"] for tick in at.journal.ticks(id)]
        return summarised(known, ticks[-1] if ticks else None) | {"ticks": ticks}

    @app.post("/v1/campaigns", tags=["campaigns"], status_code=201, response_model=m.Campaign, responses=errors(409))
    async def begin(asked: m.Open):
        """Open a campaign."""
        facts = asked.model_dump(exclude={"key"})
        return summarised(await service.open(facts, asked.key), None)

    @app.get("/v1/campaigns", tags=["campaigns"], response_model=m.Campaigns, responses={401: errors()[401]})
    async def campaigns():
        """The last campaigns to be opened, newest first."""
        return {"campaigns": [summarised(*row) for row in await asyncio.to_thread(at.journal.latest, LISTED)]}

    @app.get("/v1/campaigns/{id}", tags=["campaigns"], response_model=m.Whole, responses=errors(404))
    async def campaign(id: str):
        """A campaign and its ticks."""
        return await asyncio.to_thread(whole, id)

    @app.delete("/v1/campaigns/{id}", tags=["campaigns"], response_model=m.Whole, responses=errors(404))
    async def end(id: str):
        """End a campaign. It stays in the journal."""
        await service.close(id)
        return await asyncio.to_thread(whole, id)

    @app.post("/v1/campaigns/{id}/tick", tags=["campaigns"], response_model=m.Answer, responses=errors(404, 409))
    async def tick(id: str, asked: m.Tick, x_deadline_ms: Deadline = None):
        """What to bid in a step. The same request again has the same answer, to the byte."""
        return given(await service.tick(id, asked.model_dump(), seconds(x_deadline_ms)))

    @app.post("/v1/ticks", tags=["campaigns"], response_model=dict[str, m.Answer | m.Error], responses=errors())
    async def ticks(asked: m.Many, x_deadline_ms: Deadline = None):
        """Ticks of many campaigns, decided together; each has its answer, or why it was refused."""
        made = await asyncio.gather(
            *(service.tick(id, tick.model_dump(), seconds(x_deadline_ms)) for id, tick in asked.ticks.items()),
            return_exceptions=True,
        )
        for error in made:
            if isinstance(error, BaseException) and not isinstance(error, Refused):
                raise error
        told = (
            refused(x.status, ["ticks", x.field], x.message, **x.more).body.decode() if isinstance(x, Refused) else x
            for x in made
        )
        return given("{" + ", ".join(f"{json.dumps(id)}: {text}" for id, text in zip(asked.ticks, told, strict=True)) + "}")

    @app.post("/v1/bid", tags=["campaigns"], response_model=m.Bids, responses=errors(404, 409))
    async def bid(asked: m.Bid, x_deadline_ms: Deadline = None):
        """A tick in the shape of AuctionNet's `bidding`: a bid for each opportunity."""
        values, answer = await as_tick(service, asked.model_dump(), seconds(x_deadline_ms))
        bids = np.minimum(np.asarray(values, np.float64) * answer["multiplier"], answer["max_bid"])
        return answer | {"bids": bids.tolist()}

    return app


async def as_tick(service, asked, deadline):
    """AuctionNet's arguments as a tick -> the values of its opportunities, and the answer."""
    result = None
    if asked["timeStepIndex"]:
        names = (
            "historyPValueInfo",
            "historyBid",
            "historyAuctionResult",
            "historyImpressionResult",
            "historyLeastWinningCost",
        )
        for name in names:
            if not asked[name]:
                raise Refused(422, name, f"expected what step {asked['timeStepIndex'] - 1} was, got no step")
        try:
            info, *rest = (asked[name][-1] for name in names)
            result = summary(np.array(info, np.float64).reshape(len(info), -1)[:, 0] if info else [], *rest)
        except (ValueError, IndexError) as error:
            name = next((name for name in names if name in str(error)), "historyPValueInfo")
            raise Refused(422, name, "expected rows of numbers, one an opportunity of the last step") from error
    value, volume = offered(asked["pValues"])
    request = {
        "index": asked["timeStepIndex"], "key": "bid", "result": result and {name: float(x) for name, x in result.items()},
        "coming": {"value": float(value), "volume": float(volume)},
    }  # fmt: skip
    return asked["pValues"], json.loads(await service.tick(asked["campaign"], request, deadline))


def warm(policy):
    """Make one decision, so that the first request does not wait for what is made once."""
    spec = policy.model.spec
    asked = {
        "observations": [[0.0] * spec.observation_dim],
        "actions": [],
        "rewards": [],
        "target_return": None,
        "text": "",
        "action_masks": None,
    }
    policy.act([history(policy, asked)])
