"""OpenRTB 2.6: the current bid multiplier of a campaign answers bid requests, one opportunity at a
time.

The request names the campaign (`ext.campaign`) and the value of each impression (`imp[].ext.value`,
its predicted conversion probability); the bid is multiplier x value, sent per mille like OpenRTB's
prices and floors. A bid reserves its price, see `reservations`; what was paid is reported by the
campaign's next tick. In a first-price auction the bid may be shaded, see `shading`. An answer holds
prices only, no creative.
Source: OpenRTB 2.6 (IAB Tech Lab), sections 3.2.1 (BidRequest), 3.2.4 (Imp), 3.2.11 (Pmp), 4.2
    (BidResponse), 4.4 (macros).
"""

import math
import sqlite3
import time
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from decisionllm.domains.auction.journal import DamagedRowError, Journal
from decisionllm.schema import Json
from decisionllm.serving import logs
from decisionllm.serving.campaigns import RequestError
from decisionllm.serving.reservations import Reservations
from decisionllm.serving.schemas import Whole
from decisionllm.serving.shading import BidShading

VERSION = "2.6"
FIRST_PRICE, SECOND_PRICE = 1, 2  # `at`; above 500 are types that an exchange defines
RETURN = 0.01  # seconds of `tmax` reserved for sending the answer
EXAMPLE: Json = {
    "id": "80ce30c5",
    "at": 2,
    "tmax": 100,
    "cur": ["USD"],
    "imp": [{"id": "1", "bidfloor": 0.5, "bidfloorcur": "USD", "ext": {"value": 0.012}}],
    "ext": {"campaign": "c1"},
}
Id = Annotated[str, Field(min_length=1, max_length=200)]
Words = list[str]
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
    imp: list[Imp] = Field(min_length=1, max_length=100)
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
    request: Json,
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
        request: a BidRequest as a dict.
        campaign: `multiplier` and `target_cpa`, currency per conversion; `remaining` (not yet spent
            or reserved) and `max_bid`, currency; `ended`.
        currency: of the bids.
        seat: of the bidder.
        shade: lowers first-price bids; None: they are not lowered.

    Returns:
        (BidResponse as a dict, None), or (None, the reason for no bid).
    """
    refused = refusal(request, campaign, currency, seat)
    if refused is not None:
        return None, refused
    multiplier = campaign["multiplier"]
    first_price = request["at"] == FIRST_PRICE
    most = min(multiplier, campaign["target_cpa"]) if first_price else multiplier
    left = campaign["remaining"]
    reason = "floor"
    bids: list[Json] = []
    for imp in request["imp"]:
        value = imp["ext"]["value"]
        bid = min(most * value, campaign["max_bid"])
        if first_price and shade is not None:
            bid = min(bid, shade(multiplier * value, bid, lowest_bid(imp)))
        why_not = no_bid_for(imp, bid, left, currency)
        if why_not is not None:
            reason = why_not
        elif bid > 0 and per_mille(bid) >= (imp["bidfloor"] or 0.0):
            left -= bid
            bids.append({"id": f"{len(bids) + 1}", "impid": imp["id"], "price": per_mille(bid)})
    if not bids:
        return None, reason
    return {"id": request["id"], "cur": currency, "seatbid": [{"seat": seat, "bid": bids}]}, None


def refusal(request: Json, campaign: Json, currency: str, seat: str) -> str | None:
    """Why a campaign has no bid for a whole request; None: it may have some. See `respond`."""
    if campaign["ended"]:
        return "ended"
    if campaign["multiplier"] is None:
        return "no tick yet"
    if request["at"] not in (None, FIRST_PRICE, SECOND_PRICE):
        return "auction type"
    if request["cur"] and currency not in request["cur"]:
        return "currency"
    if request["wseat"] and seat not in request["wseat"]:
        return "seat"
    if request["bseat"] and seat in request["bseat"]:
        return "seat"
    blocked = set(request["bcat"] or [])
    if not blocked.isdisjoint(request["ext"]["cat"] or []):
        return "category"
    return None


def no_bid_for(imp: Json, bid: float, left: float, currency: str) -> str | None:
    """Why there is no bid for an impression, beside its floor; None: there may be one.

    Args:
        imp: of the request.
        bid: currency.
        left: of the budget, currency.
        currency: of the bid.
    """
    if imp["pmp"] and imp["pmp"]["private_auction"]:
        return "private auction"
    if imp["bidfloor"] and (imp["bidfloorcur"] or "USD") != currency:
        return "currency"
    if bid > left:
        return "budget"
    return None


def lowest_bid(imp: Json) -> float:
    """The lowest bid, currency, that is not below the floor of an impression once it is per mille."""
    floor = imp["bidfloor"] or 0.0
    bid = floor / 1000
    while per_mille(bid) < floor:
        bid = math.nextafter(bid, math.inf)
    return float(bid)


def reservations(journal: Journal, expiry: float) -> Reservations:
    """What bids may still cost, beside a journal. expiry: seconds until a bid without a notice
    counts as won.
    """
    return Reservations(
        journal.bids_path, expiry=expiry, last_step=lambda id: journal.steps(id) - 1
    )


def router(
    journal: Journal,
    open_bids: Reservations,
    registry: CollectorRegistry,
    *,
    currency: str = "USD",
    seat: str = "decisionllm",
    notice_url: str | None = None,
    bid_wait: float = math.inf,
    max_tick_age: float = math.inf,
    shading: BidShading | None = None,
) -> APIRouter:
    """The OpenRTB routes over a journal, with their outcomes counted in a Prometheus registry.

    Args:
        bid_wait: seconds; a request that waited longer to be read has no bid.
        max_tick_age: seconds; without a tick for so long, a campaign has no bids.
        notice_url: address of this server for the exchange's notices, such as
            https://bidder.example; None: bids have no notices.
        shading: of first-price bids; None: there is none.
    """
    headers = {"x-openrtb-version": VERSION}
    what = "Bid requests by outcome: bid, or why there was none; deadline and busy are late ones."
    outcomes = Counter("decisionllm_openrtb", what, ["outcome", "test"], registry=registry)
    outcome = cache(outcomes.labels)
    notices = Counter(
        "decisionllm_openrtb_notices",
        "Notices of bids that were open.",
        ["kind"],
        registry=registry,
    )
    still = Gauge(
        "decisionllm_openrtb_open_bids", "Bids whose result is not known.", registry=registry
    )
    still.set_function(open_bids.count)
    first_price = Counter(
        "decisionllm_openrtb_first_price",
        "Currency of first-price bids, as sent and as they were without shading.",
        ["kind"],
        registry=registry,
    )
    no_bid = Response(status_code=204, headers=headers)

    routes = APIRouter(tags=["openrtb"])

    @routes.post(
        f"/openrtb/{VERSION}/bid",
        response_model=BidResponse,
        responses={204: {"description": "no bid"}},
    )
    async def bid(request: BidRequest, http: Request) -> Response:
        """Bid for the impressions of a BidRequest, or answer 204."""
        arrived = http.state.arrived
        # before anything else, so that others are in time
        if time.monotonic() - arrived > bid_wait:
            outcome("busy", 0).inc()
            return no_bid
        logs.note_campaign(request.ext.campaign)
        due = arrived + request.tmax / 1000 - RETURN if request.tmax else math.inf
        response: Json | None = None
        reason: str | None = "deadline"
        # nothing waits from here on: under load the first requests are in time, not all are late
        if time.monotonic() < due:
            try:
                response, reason = decided(
                    request,
                    journal,
                    open_bids,
                    currency=currency,
                    seat=seat,
                    max_tick_age=max_tick_age,
                    shade=shade_of(request.ext.campaign),
                )
            except sqlite3.OperationalError:  # another process holds the lock, or the disk is full
                reason = "busy"
            except DamagedRowError:
                reason = "damaged"
        outcome(reason or "bid", request.test or 0).inc()
        if response is None:
            return no_bid
        bids = response["seatbid"][0]["bid"]
        learned = shading is not None and request.at == FIRST_PRICE
        if shading is not None and learned and not request.test:
            prices = [each["price"] / 1000 for each in bids]
            shading.sent(request.ext.campaign, [each["id"] for each in bids], prices)
        for each in bids:
            each["exp"] = int(open_bids.expiry)
            if notice_url:
                each |= notice_addresses(notice_url, each["id"], with_least=learned)
        return Response(to_json(response), headers=headers, media_type="application/json")

    def shade_of(campaign: str) -> Shade | None:
        """How the first-price bids of a campaign are shaded, and counted; None: they are not."""
        if shading is None:
            return None

        def shade(worth: float, most: float, floor: float) -> float:
            bid = shading.bid(campaign, worth, most=most, floor=floor)
            first_price.labels("unshaded").inc(most)
            first_price.labels("sent").inc(bid)
            return bid

        return shade

    @routes.get("/notices/{id}/{kind}", status_code=204)
    async def notice(
        id: str, kind: Literal["win", "loss"], price: str = "", least: str = ""
    ) -> None:
        """The result of a bid, at the address that the bid named.

        price: that was paid, per mille; least: the least bid that would have won, per mille.
        Unknown and settled bids are ignored.
        """
        won = kind == "win"
        paid = paid_for(price) if won else 0.0
        if open_bids.settle(id, paid):
            notices.labels(kind).inc()
        if shading is not None:
            shading.settle(id, won=won, least=least_price(least, "" if won else price))

    return routes


def decided(
    request: BidRequest,
    journal: Journal,
    open_bids: Reservations,
    *,
    currency: str,
    seat: str,
    max_tick_age: float,
    shade: Shade | None = None,
) -> tuple[Json | None, str | None]:
    """The answer to a bid request, whose cost is reserved; or None and the reason for no bid. See
    `router` for the arguments.
    """
    id = request.ext.campaign
    found = journal.last(id)
    if found is None:
        raise RequestError(404, "ext.campaign", "no such campaign")
    known, last = found
    if last and not known["ended"] and time.time() - known["ticked"] > max_tick_age:
        return None, "old tick"
    if last is None:
        last = {"index": -1, "multiplier": None, "remaining": 0.0, "max_bid": 0.0}
    logs.note_model(last.get("model") or known["model"])
    step, left = last["index"], last["remaining"]
    state = known | last | {"remaining": left - open_bids.committed(id, step)}
    response, reason = respond(
        request.model_dump(), state, currency=currency, seat=seat, shade=shade
    )
    if response is None:
        return None, reason
    bids = response["seatbid"][0]["bid"]
    if not request.test:
        ids = open_bids.reserve(id, step, left, [each["price"] / 1000 for each in bids])
        if ids is None:
            return None, "budget"
        for each, reserved in zip(bids, ids, strict=True):
            each["id"] = reserved
    return response, None


def notice_addresses(notice_url: str, id: str, *, with_least: bool = False) -> dict[str, str]:
    """Where the exchange tells that a bid won or lost. with_least: and which price would have won."""
    at = f"{notice_url.rstrip('/')}/notices/{id}"
    price = "price=${AUCTION_PRICE}"
    if not with_least:
        return {"nurl": f"{at}/win?{price}", "lurl": f"{at}/loss"}
    prices = f"{price}&least=${{AUCTION_MIN_TO_WIN}}"
    return {"nurl": f"{at}/win?{prices}", "lurl": f"{at}/loss?{prices}"}


def least_price(*told: str) -> float | None:
    """The first of these prices per mille that is a number above 0, in currency; None: there is
    none.
    """
    for price in told:
        paid = paid_for(price)
        if 0 < paid < math.inf:
            return paid
    return None


def paid_for(price: str) -> float:
    """Currency that a win notice reports, per mille in the notice; infinity, the bid's own price,
    where it cannot be read.
    """
    try:
        paid = float(price) / 1000
    except ValueError:  # encrypted, or the macro was not replaced
        return math.inf
    return math.inf if math.isnan(paid) else max(paid, 0.0)
