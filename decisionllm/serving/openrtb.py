"""OpenRTB 2.6: a campaign's present bid multiplier answers bid requests, one opportunity at a time.

The request names the campaign (`ext.campaign`) and, of each impression, its value (`imp[].ext.value`, the predicted conversion probability);
the bid is multiplier x value. It goes out per mille, as OpenRTB's prices and floors are. What was won comes back with the
campaign's next tick, not here. An answer has prices alone: no creative, which is the bidder's.
Source: OpenRTB 2.6 (IAB Tech Lab), sections 3.2.1 (BidRequest), 3.2.4 (Imp), 3.2.11 (Pmp), 4.2 (BidResponse).
"""

import asyncio
import json

from decisionllm.serving.campaigns import Refused

VERSION = "2.6"
FIRST_PRICE, SECOND_PRICE = 1, 2  # `at`; above 500 is what an exchange agreed on with somebody else
RETURN = 0.01  # seconds of `tmax` that are left for the way back


def per_mille(currency):
    """Currency an impression -> currency a thousand impressions, as a price on the wire."""
    return 1000 * currency


def answer(request, campaign, *, currency="USD", seat="decisionllm"):
    """A BidRequest and what its campaign stands at -> (BidResponse, None), or (None, why there is no bid).

    request: as `models` describes it, as a dict. campaign: `multiplier` and `target_cpa`, currency a conversion; `remaining` and `max_bid`,
    currency; `ended`. A first price is paid whole, so that there nothing is bid above target_cpa x value. All bids of an answer
    together are within what remains.
    """
    for reason, so in (
        ("ended", campaign["ended"]),
        ("no tick yet", campaign["multiplier"] is None),
        ("auction type", request["at"] not in (FIRST_PRICE, SECOND_PRICE)),
        ("currency", bool(request["cur"]) and currency not in request["cur"]),
        ("seat", (bool(request["wseat"]) and seat not in request["wseat"]) or seat in request["bseat"]),
        ("category", bool({*request["bcat"]} & {*request["ext"]["cat"]})),
    ):
        if so:
            return None, reason
    multiplier, left, bids, reason = campaign["multiplier"], campaign["remaining"], [], "floor"
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


def standing(journal, id):
    """What a campaign of a journal stands at, as `answer` takes it."""
    known = journal.campaign(id)
    if known is None:
        raise Refused(404, "ext.campaign", "no such campaign")
    steps = journal.steps(id)
    last = json.loads(journal.tick(id, steps - 1)[1]) if steps else {"multiplier": None, "remaining": 0.0, "max_bid": 0.0}
    return {name: last[name] for name in ("multiplier", "remaining", "max_bid")} | {
        "target_cpa": known["target_cpa"], "ended": bool(known["ended"]),
    }  # fmt: skip


def router(journal, registry, *, currency="USD", seat="decisionllm"):
    """The route, over a Journal; what comes of each request is counted in a Prometheus registry."""
    from fastapi import APIRouter, Response
    from fastapi.responses import JSONResponse
    from prometheus_client import Counter

    routes, headers = APIRouter(tags=["openrtb"]), {"x-openrtb-version": VERSION}
    BidRequest, BidResponse = models()
    outcomes = Counter("decisionllm_openrtb", "Bid requests, by what came of them.", ["outcome", "test"], registry=registry)

    @routes.post(f"/openrtb/{VERSION}/bid", response_model=BidResponse, responses={204: {"description": "no bid"}})
    async def bid(asked: BidRequest):
        """Bid, or not, for the impressions of a BidRequest."""
        try:
            async with asyncio.timeout(asked.tmax and asked.tmax / 1000 - RETURN):
                campaign = await asyncio.to_thread(standing, journal, asked.ext.campaign)
            response, reason = answer(asked.model_dump(), campaign, currency=currency, seat=seat)
        except TimeoutError:
            response, reason = None, "deadline"
        outcomes.labels(reason or "bid", asked.test).inc()
        return JSONResponse(response, headers=headers) if response else Response(status_code=204, headers=headers)

    return routes


def models():
    """The BidRequest, as far as it is read, and the BidResponse: pydantic models. What a request has besides is left alone, as the standard asks."""
    from typing import Annotated, Literal

    from pydantic import BaseModel, ConfigDict, Field  # pip install decisionllm[serve]

    Id = Annotated[str, Field(min_length=1, max_length=200)]
    Words = Annotated[list[str], Field(max_length=1000)]

    class Open(BaseModel):
        model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    class Pmp(Open):
        private_auction: Literal[0, 1] = 0

    class Worth(Open):
        value: float = Field(ge=0, le=1, description="predicted conversion probability of the impression")

    class Imp(Open):
        id: Id
        bidfloor: float = Field(0.0, ge=0, description="currency a thousand impressions")
        bidfloorcur: str = Field("USD", max_length=3)
        pmp: Pmp = Pmp()
        ext: Worth

    class Named(Open):
        campaign: Id
        cat: Words = Field([], description="content categories of what is advertised, held against bcat")

    class BidRequest(Open):
        model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
        id: Id
        imp: list[Imp] = Field(min_length=1, max_length=100)
        at: int = Field(SECOND_PRICE, ge=1, description="1: first price; 2: second price plus")
        tmax: int | None = Field(None, ge=1, le=600_000, description="milliseconds until a bid is worth nothing")
        cur: Words = []
        wseat: Words = []
        bseat: Words = []
        bcat: Words = []
        test: Literal[0, 1] = 0
        ext: Named

    class Price(BaseModel):
        id: str
        impid: str
        price: float = Field(description="currency a thousand impressions")

    class SeatBid(BaseModel):
        seat: str
        bid: list[Price]

    class BidResponse(BaseModel):
        id: str
        cur: str
        seatbid: list[SeatBid]

    return BidRequest, BidResponse


EXAMPLE = {
    "id": "80ce30c5", "at": 2, "tmax": 100, "cur": ["USD"],
    "imp": [{"id": "1", "bidfloor": 0.5, "bidfloorcur": "USD", "ext": {"value": 0.012}}], "ext": {"campaign": "c1"},
}  # fmt: skip
