"""OpenRTB 2.6: the current bid multiplier of a campaign answers bid requests, one opportunity at a
time.

The request names the campaign (`ext.campaign`) and the value of each impression (`imp[].ext.value`,
its predicted conversion probability); the bid is multiplier x value, sent per mille like OpenRTB's
prices and floors. Here is what a bid is; `exchange` has its routes. In a first-price auction the
bid may be shaded, see `shading`. An answer holds prices only, no creative.
Source: OpenRTB 2.6 (IAB Tech Lab), sections 3.2.1 (BidRequest), 3.2.4 (Imp), 3.2.11 (Pmp), 4.2
    (BidResponse), 4.4 (macros).
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from decisionllm.bidding.server.schemas import Whole
from decisionllm.schema import Json

VERSION = "2.6"
FIRST_PRICE, SECOND_PRICE = 1, 2  # `at`; above 500 are types that an exchange defines
EXAMPLE: Json = {
    "id": "80ce30c5",
    "at": 2,
    "tmax": 100,
    "cur": ["USD"],
    "imp": [{"id": "1", "bidfloor": 0.5, "bidfloorcur": "USD", "ext": {"value": 0.012}}],
    "ext": {"campaign": "c1"},
}
Id = Annotated[str, Field(min_length=1, max_length=200)]
# ends at its first fault, see `schemas.Row`
Words = Annotated[list[str], Field(fail_fast=True)]
# (worth, most, floor) -> bid, each currency, see `BidShading.bid`
Shade = Callable[[float, float, float], float]


class Part(BaseModel):
    """A part of a BidRequest.

    Fields that are not read are ignored, as the standard requires; null is as good as absent.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)


class Pmp(Part):
    private_auction: Literal[0, 1] | None = 0


class ImpExt(Part):
    value: float = Field(
        ge=0, le=1, description="predicted conversion probability of the impression"
    )


class Imp(Part):
    id: Id
    bidfloor: float | None = Field(0.0, ge=0, description="currency per mille")
    bidfloorcur: str | None = Field("USD", max_length=3)
    pmp: Pmp | None = None
    ext: ImpExt


class RequestExt(Part):
    campaign: Id
    cat: Words | None = Field(
        None, description="content categories of the advertised product, compared with bcat"
    )


class BidRequest(Part):
    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
    id: Id
    imp: list[Imp] = Field(min_length=1, max_length=100, fail_fast=True)
    at: Annotated[Whole, Field(ge=1)] | None = Field(
        SECOND_PRICE, description="1: first price; 2: second price plus"
    )
    tmax: Annotated[Whole, Field(ge=0, le=600_000)] | None = Field(
        None, description="ms for a bid; 0: unknown"
    )
    cur: Words | None = None
    wseat: Words | None = None
    bseat: Words | None = None
    bcat: Words | None = None
    test: Literal[0, 1] | None = 0
    ext: RequestExt


class Bid(BaseModel):
    id: str
    impid: str
    price: float = Field(description="currency per mille")
    exp: int = Field(description="seconds after which the bid does not count any more")
    nurl: str | None = Field(None, description="to request if the bid has won")
    lurl: str | None = Field(None, description="to request if the bid has lost")


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
    request: BidRequest,
    campaign: Json,
    *,
    currency: str = "USD",
    seat: str = "decisionllm",
    shade: Shade | None = None,
) -> tuple[Json | None, str | None]:
    """Bid for the impressions of a request.

    A first price is paid in full, so that such a bid is at most target_cpa x value. All bids of an
    answer together are within the remaining budget.

    Args:
        request: of the exchange.
        campaign: `multiplier` and `target_cpa`, currency per conversion; `remaining` (not yet spent
            or reserved) and `max_bid`, currency; `ended`.
        currency: of the bids.
        seat: of the bidder.
        shade: lowers first-price bids; None: they are not lowered.

    Returns:
        (BidResponse as a dict, None), or (None, the reason for no bid).
    """
    refused = request_refusal(request, campaign, currency, seat)
    if refused is not None:
        return None, refused
    multiplier = campaign["multiplier"]
    first_price = request.at == FIRST_PRICE
    most = min(multiplier, campaign["target_cpa"]) if first_price else multiplier
    left = campaign["remaining"]
    reason = "floor"
    bids: list[Json] = []
    for imp in request.imp:
        value = imp.ext.value
        bid = min(most * value, campaign["max_bid"])
        if first_price and shade is not None:
            bid = min(bid, shade(multiplier * value, bid, lowest_bid(imp)))
        why_not = no_bid_reason(imp, bid, left, currency)
        if why_not is not None:
            reason = why_not
        elif bid > 0 and per_mille(bid) >= (imp.bidfloor or 0.0):
            left -= bid
            bids.append({"id": f"{len(bids) + 1}", "impid": imp.id, "price": per_mille(bid)})
    if not bids:
        return None, reason
    return {"id": request.id, "cur": currency, "seatbid": [{"seat": seat, "bid": bids}]}, None


def request_refusal(request: BidRequest, campaign: Json, currency: str, seat: str) -> str | None:
    """The reason for no bid for a whole request; None: there may be bids. See `respond`."""
    if campaign["ended"]:
        return "ended"
    if campaign["multiplier"] is None:
        return "no tick yet"
    if request.at not in (None, FIRST_PRICE, SECOND_PRICE):
        return "auction type"
    if request.cur and currency not in request.cur:
        return "currency"
    if request.wseat and seat not in request.wseat:
        return "seat"
    if request.bseat and seat in request.bseat:
        return "seat"
    blocked = set(request.bcat or [])
    if not blocked.isdisjoint(request.ext.cat or []):
        return "category"
    return None


def no_bid_reason(imp: Imp, bid: float, left: float, currency: str) -> str | None:
    """The reason for no bid for an impression, beside its floor; None: there may be one.

    Args:
        imp: of the request.
        bid: currency.
        left: of the budget, currency.
        currency: of the bid.
    """
    if imp.pmp and imp.pmp.private_auction:
        return "private auction"
    if imp.bidfloor and (imp.bidfloorcur or "USD") != currency:
        return "currency"
    if bid > left:
        return "budget"
    return None


def lowest_bid(imp: Imp) -> float:
    """The lowest bid, currency, that is not below the floor of an impression once it is per mille."""
    floor = imp.bidfloor or 0.0
    bid = floor / 1000
    while per_mille(bid) < floor:
        bid = math.nextafter(bid, math.inf)
    return float(bid)
