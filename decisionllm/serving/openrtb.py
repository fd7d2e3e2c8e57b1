"""OpenRTB 2.6: the current bid multiplier of a campaign answers bid requests, one opportunity at a time.

The request names the campaign (`ext.campaign`) and the value of each impression (`imp[].ext.value`, its predicted conversion
probability); the bid is multiplier x value, sent per mille like OpenRTB's prices and floors. Wins are reported by the
campaign's next tick. An answer holds prices only, no creative.
Source: OpenRTB 2.6 (IAB Tech Lab), sections 3.2.1 (BidRequest), 3.2.4 (Imp), 3.2.11 (Pmp), 4.2 (BidResponse).
"""

import asyncio
import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, ConfigDict, Field

from decisionllm.envs.auction.journal import Journal
from decisionllm.serving.campaigns import RequestError

VERSION = "2.6"
FIRST_PRICE, SECOND_PRICE = 1, 2  # `at`; above 500 are types that an exchange defines
RETURN = 0.01  # seconds of `tmax` reserved for sending the answer
EXAMPLE: dict[str, Any] = {
    "id": "80ce30c5", "at": 2, "tmax": 100, "cur": ["USD"],
    "imp": [{"id": "1", "bidfloor": 0.5, "bidfloorcur": "USD", "ext": {"value": 0.012}}], "ext": {"campaign": "c1"},
}  # fmt: skip
Id = Annotated[str, Field(min_length=1, max_length=200)]
Words = Annotated[list[str], Field(max_length=1000)]


class Part(BaseModel):
    """A part of a BidRequest. Fields that are not read are ignored, as the standard requires."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)


class Pmp(Part):
    private_auction: Literal[0, 1] = 0


class ImpExt(Part):
    value: float = Field(ge=0, le=1, description="predicted conversion probability of the impression")


class Imp(Part):
    id: Id
    bidfloor: float = Field(0.0, ge=0, description="currency per mille")
    bidfloorcur: str = Field("USD", max_length=3)
    pmp: Pmp = Pmp()
    ext: ImpExt


class RequestExt(Part):
    campaign: Id
    cat: Words = Field([], description="content categories of the advertised product, compared with bcat")


class BidRequest(Part):
    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
    id: Id
    imp: list[Imp] = Field(min_length=1, max_length=100)
    at: int = Field(SECOND_PRICE, ge=1, description="1: first price; 2: second price plus")
    tmax: int | None = Field(None, ge=1, le=600_000, description="milliseconds until a bid is worthless")
    cur: Words = []
    wseat: Words = []
    bseat: Words = []
    bcat: Words = []
    test: Literal[0, 1] = 0
    ext: RequestExt


class Bid(BaseModel):
    id: str
    impid: str
    price: float = Field(description="currency per mille")


class SeatBid(BaseModel):
    seat: str
    bid: list[Bid]


class BidResponse(BaseModel):
    id: str
    cur: str
    seatbid: list[SeatBid]


def per_mille(currency: float) -> float:
    """Currency per impression -> currency per thousand impressions."""
    return 1000 * currency


def respond(
    request: dict[str, Any], campaign: dict[str, Any], *, currency: str = "USD", seat: str = "decisionllm"
) -> tuple[dict[str, Any] | None, str | None]:
    """Bid for the impressions of a request.

    A first price is paid in full, so that such a bid is at most target_cpa x value. All bids of an answer together are within
    the remaining budget.

    Args:
        request: a BidRequest as a dict.
        campaign: `multiplier` and `target_cpa`, currency per conversion; `remaining` and `max_bid`, currency; `ended`.

    Returns:
        (BidResponse as a dict, None), or (None, the reason for no bid).
    """
    for reason, applies in (
        ("ended", campaign["ended"]),
        ("no tick yet", campaign["multiplier"] is None),
        ("auction type", request["at"] not in (FIRST_PRICE, SECOND_PRICE)),
        ("currency", bool(request["cur"]) and currency not in request["cur"]),
        ("seat", (bool(request["wseat"]) and seat not in request["wseat"]) or seat in request["bseat"]),
        ("category", bool({*request["bcat"]} & {*request["ext"]["cat"]})),
    ):
        if applies:
            return None, reason
    multiplier, left, reason = campaign["multiplier"], campaign["remaining"], "floor"
    bids: list[dict[str, Any]] = []
    if request["at"] == FIRST_PRICE:
        multiplier = min(multiplier, campaign["target_cpa"])
    for imp in request["imp"]:
        bid = min(multiplier * imp["ext"]["value"], campaign["max_bid"])
        if imp["pmp"]["private_auction"]:
            reason = "private auction"
        elif imp["bidfloor"] and imp["bidfloorcur"] != currency:
            reason = "currency"
        elif bid > left:
            reason = "budget"
        elif bid > 0 and per_mille(bid) >= imp["bidfloor"]:
            left -= bid
            bids.append({"id": f"{len(bids) + 1}", "impid": imp["id"], "price": per_mille(bid)})
    if not bids:
        return None, reason
    return {"id": request["id"], "cur": currency, "seatbid": [{"seat": seat, "bid": bids}]}, None


def campaign_state(journal: Journal, id: str) -> dict[str, Any]:
    """The state of a campaign after its last tick, as `respond` takes it."""
    known = journal.campaign(id)
    if known is None:
        raise RequestError(404, "ext.campaign", "no such campaign")
    tick = journal.tick(id, journal.steps(id) - 1)
    last = json.loads(tick[1]) if tick else {"multiplier": None, "remaining": 0.0, "max_bid": 0.0}
    state = {name: last[name] for name in ("multiplier", "remaining", "max_bid")}
    return state | {"target_cpa": known["target_cpa"], "ended": bool(known["ended"])}


def router(journal: Journal, registry: CollectorRegistry, *, currency: str = "USD", seat: str = "decisionllm") -> APIRouter:
    """The OpenRTB route over a journal, with its outcomes counted in a Prometheus registry."""
    routes, headers = APIRouter(tags=["openrtb"]), {"x-openrtb-version": VERSION}
    outcomes = Counter("decisionllm_openrtb", "Bid requests by outcome.", ["outcome", "test"], registry=registry)

    @routes.post(f"/openrtb/{VERSION}/bid", response_model=BidResponse, responses={204: {"description": "no bid"}})
    async def bid(request: BidRequest) -> Response:
        """Bid for the impressions of a BidRequest, or answer 204."""
        try:
            async with asyncio.timeout(request.tmax and request.tmax / 1000 - RETURN):
                campaign = await asyncio.to_thread(campaign_state, journal, request.ext.campaign)
            response, reason = respond(request.model_dump(), campaign, currency=currency, seat=seat)
        except TimeoutError:
            response, reason = None, "deadline"
        outcomes.labels(reason or "bid", request.test).inc()
        return JSONResponse(response, headers=headers) if response else Response(status_code=204, headers=headers)

    return routes
