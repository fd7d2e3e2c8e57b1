"""The routes of an exchange: bid requests, and notices of their results.

A bid reserves its price, see `reservations`; what was paid is reported by the campaign's next tick.
"""

import math
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic_core import to_json

from decisionllm.domains.auction.journal import DamagedRowError, Journal
from decisionllm.schema import Json
from decisionllm.serving import logs
from decisionllm.serving.campaigns import RequestError
from decisionllm.serving.openrtb import (
    FIRST_PRICE,
    VERSION,
    BidRequest,
    BidResponse,
    Shade,
    respond,
)
from decisionllm.serving.reservations import Reservations
from decisionllm.serving.shading import BidShading

RETURN = 0.01  # seconds of `tmax` reserved for sending the answer


class Shading(Protocol):
    """What lowers first-price bids, see `shading.BidShading`."""

    learns: bool  # whether notices shall say which price would have won

    def bid(self, campaign: str, worth: float, *, most: float, floor: float) -> float: ...

    def sent(self, campaign: str, ids: Sequence[str], prices: Sequence[float]) -> None: ...

    def settle(self, id: str, *, won: bool, least: float | None) -> None: ...

    def close(self) -> None: ...


class Unshaded:
    """No shading: every bid stays as it is."""

    learns = False

    def bid(self, campaign: str, worth: float, *, most: float, floor: float) -> float:
        return most

    def sent(self, campaign: str, ids: Sequence[str], prices: Sequence[float]) -> None:
        """Nothing is kept."""

    def settle(self, id: str, *, won: bool, least: float | None) -> None:
        """Nothing is learned."""

    def close(self) -> None:
        """There is no file."""


def shading(journal: Journal, expiry: float, *, wanted: bool) -> Shading:
    """The shading beside a journal, or none. expiry: see `reservations`."""
    if not wanted:
        return Unshaded()
    return BidShading(journal.beside("shading"), expiry=expiry)


def reservations(journal: Journal, expiry: float) -> Reservations:
    """What bids may still cost, beside a journal. expiry: seconds until a bid without a notice
    counts as won.
    """
    return Reservations(
        journal.beside("bids"), expiry=expiry, last_step=lambda id: journal.steps(id) - 1
    )


class Counts:
    """What happened to bids, in a Prometheus registry."""

    def __init__(self, registry: CollectorRegistry, open_bids: Reservations) -> None:
        what = (
            "Bid requests by outcome: bid, or why there was none; deadline and busy are late ones."
        )
        outcomes = Counter("decisionllm_openrtb", what, ["outcome", "test"], registry=registry)
        self.outcome = cache(outcomes.labels)
        self.notices = Counter(
            "decisionllm_openrtb_notices",
            "Notices of bids that were open.",
            ["kind"],
            registry=registry,
        )
        still = Gauge(
            "decisionllm_openrtb_open_bids", "Bids whose result is not known.", registry=registry
        )
        still.set_function(open_bids.count)
        self.first_price = Counter(
            "decisionllm_openrtb_first_price",
            "Currency of first-price bids, as sent and as they were without shading.",
            ["kind"],
            registry=registry,
        )


@dataclass
class Exchange:
    """Bids over a journal.

    Attributes:
        journal: of the campaigns.
        open_bids: what bids may still cost.
        shading: of first-price bids.
        counts: of what happened.
        currency: of the bids.
        seat: of the bidder.
        notice_url: address of this server for the exchange's notices, such as
            https://bidder.example; None: bids have no notices.
        bid_wait: seconds; a request that waited longer to be read has no bid.
        max_tick_age: seconds; without a tick for so long, a campaign has no bids.
    """

    journal: Journal
    open_bids: Reservations
    shading: Shading
    counts: Counts
    currency: str
    seat: str
    notice_url: str | None
    bid_wait: float
    max_tick_age: float

    def bid(self, request: BidRequest, arrived: float) -> Json | None:
        """Bid for the impressions of a request.

        Args:
            request: of the exchange.
            arrived: when, by time.monotonic().

        Returns:
            A BidResponse, whose cost is reserved; None: there is no bid. Either is counted.
        """
        response: Json | None = None
        reason: str | None = "busy"
        # before anything else, so that others are in time
        if time.monotonic() - arrived <= self.bid_wait:
            response, reason = self._in_time(request, arrived)
        self.counts.outcome(reason or "bid", request.test or 0).inc()
        if response is not None:
            self._prepare_notices(request, response["seatbid"][0]["bid"])
        return response

    def _in_time(self, request: BidRequest, arrived: float) -> tuple[Json | None, str | None]:
        """`_decided`, unless it is too late or the journal cannot be read."""
        logs.note_campaign(request.ext.campaign)
        # nothing waits from here on: under load the first requests are in time, not all are late
        if request.tmax and time.monotonic() >= arrived + request.tmax / 1000 - RETURN:
            return None, "deadline"
        try:
            return self._decided(request)
        except sqlite3.OperationalError:  # another process holds the lock, or the disk is full
            return None, "busy"
        except DamagedRowError:
            return None, "damaged"

    def _decided(self, request: BidRequest) -> tuple[Json | None, str | None]:
        """The answer, whose cost is reserved; or None and the reason for no bid."""
        id = request.ext.campaign
        found = self.journal.last(id)
        if found is None:
            raise RequestError(404, "ext.campaign", "no such campaign")
        known, last = found
        if last and not known["ended"] and time.time() - known["ticked"] > self.max_tick_age:
            return None, "old tick"
        if last is None:
            last = {"index": -1, "multiplier": None, "remaining": 0.0, "max_bid": 0.0}
        logs.note_model(last.get("model") or known["model"])
        step, left = last["index"], last["remaining"]
        state = known | last | {"remaining": left - self.open_bids.committed(id, step)}
        response, reason = respond(
            request.model_dump(),
            state,
            currency=self.currency,
            seat=self.seat,
            shade=self._shade_of(id),
        )
        if response is None or request.test:
            return response, reason
        bids = response["seatbid"][0]["bid"]
        ids = self.open_bids.reserve(id, step, left, [each["price"] / 1000 for each in bids])
        if ids is None:
            return None, "budget"
        for each, reserved in zip(bids, ids, strict=True):
            each["id"] = reserved
        return response, None

    def _shade_of(self, campaign: str) -> Shade | None:
        """How the first-price bids of a campaign are lowered, and counted; None: they are not."""
        if not self.shading.learns:
            return None

        def shade(worth: float, most: float, floor: float) -> float:
            bid = self.shading.bid(campaign, worth, most=most, floor=floor)
            self.counts.first_price.labels("unshaded").inc(most)
            self.counts.first_price.labels("sent").inc(bid)
            return bid

        return shade

    def _prepare_notices(self, request: BidRequest, bids: list[Json]) -> None:
        """Give bids their expiry and where the exchange tells their results."""
        with_least = self.shading.learns and request.at == FIRST_PRICE
        if with_least and not request.test:
            prices = [each["price"] / 1000 for each in bids]
            self.shading.sent(request.ext.campaign, [each["id"] for each in bids], prices)
        for each in bids:
            each["exp"] = int(self.open_bids.expiry)
            if self.notice_url:
                each |= notice_addresses(self.notice_url, each["id"], with_least=with_least)

    def settle(self, id: str, kind: str, price: str, least: str) -> None:
        """Count the result of a bid. Unknown and settled bids are ignored.

        Args:
            id: of the bid.
            kind: win or loss.
            price: that was paid, per mille, as the exchange wrote it.
            least: the least price that would have won, likewise.
        """
        won = kind == "win"
        paid = paid_for(price) if won else 0.0
        if self.open_bids.settle(id, paid):
            self.counts.notices.labels(kind).inc()
        found = least_price(least) if won else least_price(least, price)
        self.shading.settle(id, won=won, least=found)


def router(
    journal: Journal,
    open_bids: Reservations,
    shading: Shading,
    registry: CollectorRegistry,
    *,
    currency: str = "USD",
    seat: str = "decisionllm",
    notice_url: str | None = None,
    bid_wait: float = math.inf,
    max_tick_age: float = math.inf,
) -> APIRouter:
    """The OpenRTB routes over a journal, counted in a Prometheus registry. See `Exchange`."""
    exchange = Exchange(
        journal=journal,
        open_bids=open_bids,
        shading=shading,
        counts=Counts(registry, open_bids),
        currency=currency,
        seat=seat,
        notice_url=notice_url,
        bid_wait=bid_wait,
        max_tick_age=max_tick_age,
    )
    headers = {"x-openrtb-version": VERSION}
    no_bid = Response(status_code=204, headers=headers)
    routes = APIRouter(tags=["openrtb"])

    @routes.post(
        f"/openrtb/{VERSION}/bid",
        response_model=BidResponse,
        responses={204: {"description": "no bid"}},
    )
    async def bid(request: BidRequest, http: Request) -> Response:
        """Bid for the impressions of a BidRequest, or answer 204."""
        response = exchange.bid(request, http.state.arrived)
        if response is None:
            return no_bid
        return Response(to_json(response), headers=headers, media_type="application/json")

    @routes.get("/notices/{id}/{kind}", status_code=204)
    async def notice(
        id: str, kind: Literal["win", "loss"], price: str = "", least: str = ""
    ) -> None:
        """The result of a bid, at the address that the bid named.

        price: that was paid, per mille; least: the least bid that would have won, per mille.
        Unknown and settled bids are ignored.
        """
        exchange.settle(id, kind, price, least)

    return routes


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
