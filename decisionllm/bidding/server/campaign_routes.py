"""Routes of campaigns: open, list, tick and end them; and their page."""

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import ValidationError
from pydantic_core import to_json

from decisionllm.bidding.market.campaigns import HISTORIES, summarize_opportunities, summarize_step
from decisionllm.bidding.server import logs, schemas
from decisionllm.bidding.server.answers import (
    INTERNAL_ERROR,
    Deadline,
    errors,
    json_response,
    refusal_response,
)
from decisionllm.bidding.server.campaigns import RequestError
from decisionllm.bidding.server.middleware import error_response
from decisionllm.bidding.server.service import Service
from decisionllm.schema import Json

MAX_LISTED = 200  # most campaigns of a list
LIST_WAIT = 1.0  # most seconds that a list waits for others
STATIC = Path(__file__).parent / "static"
PAGE_FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
logger = logging.getLogger("decisionllm.bidding.server")
Search = Annotated[
    str,
    Query(max_length=200, description="part of the name, or the beginning of the id or the key"),
]
Before = Annotated[
    str | None, Query(max_length=64, description="id of a campaign; only those opened before it")
]


class CampaignRoutes:
    """The routes of the campaigns of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        # The journal reads one list at a time. Others wait here: in threads, which are few, they
        # would delay all that needs one.
        self.one_list = asyncio.Semaphore(1)

    def router(self) -> APIRouter:
        routes = APIRouter(tags=["campaigns"])
        whole: Json = {
            "response_model": schemas.CampaignWithTicks,
            "response_model_exclude_unset": True,
        }
        routes.post(
            "/v1/campaigns", status_code=201, response_model=schemas.Campaign, responses=errors(409)
        )(self.open_campaign)
        routes.get(
            "/v1/campaigns",
            response_model=schemas.Campaigns,
            responses=errors(401, 422, 503, usual=()),
        )(self.campaigns)
        routes.get("/v1/campaigns/{id}", responses=errors(404), **whole)(self.campaign)
        routes.delete("/v1/campaigns/{id}", responses=errors(404), **whole)(self.close)
        routes.post(
            "/v1/campaigns/{id}/tick", response_model=schemas.TickAnswer, responses=errors(404, 409)
        )(self.tick)
        routes.post(
            "/v1/ticks",
            response_model=dict[str, schemas.TickAnswer | schemas.Error],
            responses=errors(),
        )(self.ticks)
        routes.post("/v1/bid", response_model=schemas.BiddingAnswer, responses=errors(404, 409))(
            self.bid
        )
        return routes

    async def open_campaign(self, request: schemas.CampaignSettings) -> Response:
        """Open a campaign, or find the one that was opened with this key."""
        record = await self.service.open(request.model_dump(exclude={"key"}), request.key)
        row = await asyncio.to_thread(self.service.journal.campaign_and_answer, record["id"])
        opened = schemas.Campaign(**add_status(*row or (record, None)))
        return json_response(opened.model_dump_json(), 201)

    async def campaigns(self, search: Search = "", before: Before = None) -> Json:
        """The campaigns opened last, newest first."""
        journal = self.service.journal
        try:
            async with asyncio.timeout(LIST_WAIT):
                await self.one_list.acquire()
        except TimeoutError:
            raise RequestError(503, "queue", "other lists are being read; try again") from None
        try:
            rows, older = await asyncio.to_thread(
                journal.list_latest, MAX_LISTED, search=search, before=before
            )
        finally:
            self.one_list.release()
        still_open = await asyncio.to_thread(journal.count_open)
        listed = [add_status(*row) for row in rows]
        return {"campaigns": listed, "more": older is not None, "older": older, "open": still_open}

    async def campaign(self, id: str) -> Json:
        """A campaign and its ticks."""
        return await asyncio.to_thread(read_with_ticks, self.service, id)

    async def close(self, id: str) -> Json:
        """End a campaign. It stays in the journal."""
        await self.service.close(id)
        return await asyncio.to_thread(read_with_ticks, self.service, id)

    async def tick(
        self, id: str, request: schemas.Tick, x_deadline_ms: Deadline = None
    ) -> Response:
        """Return the bid multiplier of a step. A repeated request has the same answer, byte for
        byte.
        """
        due = self.service.due(x_deadline_ms)
        return json_response(await self.service.tick(id, request.model_dump(), due))

    async def ticks(
        self, request: schemas.Ticks, http: Request, x_deadline_ms: Deadline = None
    ) -> Response:
        """Ticks of many campaigns, decided together; each has its answer or its error."""
        http.state.caller.bucket.charge(len(request.ticks) - 1)
        due = self.service.due(x_deadline_ms)
        ticked = [
            answer_tick_or_error(self.service, id, tick, due) for id, tick in request.ticks.items()
        ]
        answers = await asyncio.gather(*ticked)
        # the answers are JSON already
        pairs = zip(request.ticks, answers, strict=True)
        fields = [f"{json.dumps(id)}: {answer}" for id, answer in pairs]
        return json_response("{" + ", ".join(fields) + "}")

    async def bid(
        self, request: schemas.AuctionNetBidding, x_deadline_ms: Deadline = None
    ) -> Response:
        """A tick in the form of AuctionNet's `bidding`: a bid for each opportunity."""
        due = self.service.due(x_deadline_ms)
        tick = await asyncio.to_thread(parse_bidding, vars(request))
        answer = json.loads(await self.service.tick(request.campaign, tick, due))
        values = np.asarray(request.pValues, np.float64)
        bids = np.minimum(values * answer["multiplier"], answer["max_bid"])
        text = await asyncio.to_thread(lambda: to_json(answer | {"bids": bids.tolist()}))
        return json_response(text)


def read_with_ticks(service: Service, id: str) -> Json:
    """A campaign of the journal with the answers to its ticks."""
    logs.note_campaign(id)
    record = service.journal.campaign(id)
    if record is None:
        raise RequestError(404, "id", "no such campaign")
    ticks = [tick["answer"] for tick in service.journal.ticks(id, damaged="skip")]
    last = ticks[-1] if ticks else None
    if service.shadow is not None:
        beside = service.shadow.decisions(id)
        ticks = [tick | {"shadow": beside.get(tick["index"])} for tick in ticks]
    return add_status(record, last) | {"ticks": ticks}


async def answer_tick_or_error(service: Service, id: str, tick: schemas.Tick, due: float) -> str:
    """The answer to one of many ticks, or its error, in JSON: the others of the request count."""
    try:
        async with service.many:
            return await service.tick(id, tick.model_dump(), due)
    except RequestError as error:
        answer = refusal_response(error, "ticks")
    except sqlite3.Error as error:
        answer = refusal_response(service.report_failure(error), "server")
    except Exception:
        logger.exception("tick %s of campaign %s", tick.index, id)
        answer = error_response(500, ["server"], INTERNAL_ERROR)
    return bytes(answer.body).decode()


def add_status(record: Json, last: Json | None) -> Json:
    """A campaign of the journal with its status after the answer to its last tick."""
    last = last or {"index": -1, "spend": 0.0, "conversions": 0.0}
    status = {"status": "ended" if record["ended"] else "open", "step": last["index"] + 1}
    return record | status | {"spend": last["spend"], "conversions": last["conversions"]}


def add_page(app: FastAPI) -> None:
    """Add the page of the campaigns and its style and script to an app."""
    for path, (name, media_type) in PAGE_FILES.items():
        app.add_route(f"/{path}", static_page(STATIC / name, media_type), include_in_schema=False)


def static_page(file: Path, media_type: str) -> Callable[[Request], FileResponse]:
    """The function of a route that answers with a file."""

    def page(request: Request) -> FileResponse:
        return FileResponse(file, media_type=media_type)

    return page


def parse_bidding(request: Json) -> Json:
    """AuctionNet's arguments -> the request of a tick."""
    step = request["timeStepIndex"]
    value, volume = summarize_opportunities(request["pValues"])
    return {
        "index": step,
        "key": "bid",
        "result": last_result(request) if step else None,
        "coming": {"value": float(value), "volume": float(volume)},
    }


def last_result(request: Json) -> dict[str, float]:
    """The result of the last step in AuctionNet's histories."""
    for name in HISTORIES:
        if not request[name]:
            step = request["timeStepIndex"] - 1
            raise RequestError(422, name, f"expected step {step}, got no step")
    info, *others = [request[name][-1] for name in HISTORIES]
    try:
        values = np.zeros(0)
        if info:
            values = np.array(info, np.float64).reshape(len(info), -1)[:, 0]
        result = summarize_step(values, *others)
    except (ValueError, IndexError) as error:
        name = next((name for name in HISTORIES if name in str(error)), HISTORIES[0])
        message = "expected rows of numbers, one per opportunity of the last step"
        raise RequestError(422, name, message) from error
    return check_result({name: float(x) for name, x in result.items()})


def check_result(result: dict[str, float]) -> dict[str, float]:
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
