"""The routes of an exchange: bid requests, and notices of their results.

A bid reserves its price, see `reservations`; the price paid is reported by the campaign's ticks.
"""

import math
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic_core import to_json

from decisionllm.bidding.journal.journal import DamagedRowError, Journal
from decisionllm.bidding.journal.sqlite_files import is_busy
from decisionllm.bidding.server import logs
from decisionllm.bidding.server.campaigns import RequestError
from decisionllm.bidding.server.openrtb import (
    FIRST_PRICE,
    VERSION,
    BidRequest,
    BidResponse,
    Shade,
    respond,
)
from decisionllm.bidding.server.reservations import (
    Reservations,
    ReservationsBusyError,
    ReservationsError,
)
from decisionllm.bidding.server.shading import BidShading
from decisionllm.schema import Json

BID_EXPIRY_S = 60.0
RETURN_SECONDS = 0.01  # seconds of `tmax` reserved for sending the answer


class Counts:
    """Counts of bids, notices and money in a Prometheus registry."""

    def __init__(self, registry: CollectorRegistry, open_bids: Reservations) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"decisionllm_openrtb{name}", what, labels, registry=registry)

        outcomes = counter(
            "",
            "Bid requests by outcome: bid, or why there was none; deadline and busy are late ones, "
            "fault is one of the file of bids.",
            "outcome",
            "test",
        )
        self.outcome = cache(outcomes.labels)
        self.notices = counter(
            "_notices",
            "Notices that changed what a bid costs: the first of an open bid, and later wins that "
            "cost more, after a loss or at a higher price.",
            "kind",
        )
        self.first_price = counter(
            "_first_price",
            "Currency of first-price bids, as sent and as they were without shading.",
            "kind",
        )
        still_open = Gauge(
            "decisionllm_openrtb_open_bids", "Bids whose result is not known.", registry=registry
        )
        still_open.set_function(open_bids.count)
        fault = Gauge(
            "decisionllm_openrtb_fault",
            "1 while the file of bids cannot be read or written.",
            registry=registry,
        )
        fault.set_function(lambda: open_bids.fault is not None)


@dataclass
class Exchange:
    """Bids over a journal.

    Attributes:
        journal: of the campaigns.
        open_bids: what bids may still cost.
        shading: lowers first-price bids; None: they are not lowered.
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
    shading: BidShading | None
    counts: Counts
    currency: str = "USD"
    seat: str = "decisionllm"
    notice_url: str | None = None
    bid_wait: float = math.inf
    max_tick_age: float = math.inf

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Close the files beside the journal at the end of the block."""
        try:
            yield
        finally:
            self.open_bids.close()
            if self.shading is not None:
                self.shading.close()

    async def bid(self, request: BidRequest, arrived: float) -> Json | None:
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
            response, reason = await self._decide_in_time(request, arrived)
        self.counts.outcome(reason or "bid", request.test or 0).inc()
        if response is not None:
            self._prepare_notices(request, response["seatbid"][0]["bid"])
        return response

    async def _decide_in_time(
        self, request: BidRequest, arrived: float
    ) -> tuple[Json | None, str | None]:
        """Decide, unless it is too late or a file cannot be read or written."""
        logs.note_campaign(request.ext.campaign)
        # before the work: under load the first requests are in time, not all are late
        if is_late(request, arrived):
            return None, "deadline"
        unshaded: list[float] = []
        try:
            response, reason = self._answer_request(request, unshaded)
            # the cost of the answer is in the file before the answer is sent
            await self.open_bids.wait_written()
            if response is not None and is_late(request, arrived):  # the lock was waited for
                await self._withdraw(response)
                return None, "deadline"
            if response is not None and unshaded and not request.test:
                self._count_first_prices(request, unshaded, response["seatbid"][0]["bid"])
            return response, reason
        except ReservationsBusyError:
            return None, "busy"
        except ReservationsError:
            return None, "fault"
        except DamagedRowError:
            return None, "damaged"
        except sqlite3.OperationalError as error:  # of the journal
            if not is_busy(error):
                raise
            return None, "busy"

    async def _withdraw(self, response: Json) -> None:
        """Free the prices of an answer that is not sent."""
        for bid in response["seatbid"][0]["bid"]:
            self.open_bids.settle(bid["id"], 0.0)
        await self.open_bids.wait_written()

    def _answer_request(
        self, request: BidRequest, unshaded: list[float]
    ) -> tuple[Json | None, str | None]:
        """The answer, whose cost is reserved; or None and the reason for no bid.

        Args:
            request: of the exchange.
            unshaded: gets what first-price bids were before they were lowered, currency.
        """
        id = request.ext.campaign
        row = self.journal.campaign_and_answer(id)
        if row is None:
            raise RequestError(404, "ext.campaign", "no such campaign")
        record, last = row
        if last and not record["ended"] and time.time() - record["ticked"] > self.max_tick_age:
            return None, "old tick"
        if last is None:
            last = {"index": -1, "multiplier": None, "remaining": 0.0, "max_bid": 0.0}
        logs.note_model(last.get("model") or record["model"])
        step, left = last["index"], last["remaining"]
        reported = last.get("spend", 0.0)
        committed = self.open_bids.committed_amount(
            id, step, reported=reported, bids=len(request.imp)
        )
        state = record | last | {"remaining": left - committed}
        response, reason = respond(
            request,
            state,
            currency=self.currency,
            seat=self.seat,
            shade=self._build_shade(id, unshaded),
        )
        if response is None or request.test:
            return response, reason
        bids = response["seatbid"][0]["bid"]
        prices = [each["price"] / 1000 for each in bids]
        ids = self.open_bids.reserve(id, step, left, prices, reported=reported)
        if ids is None:
            return None, "budget"
        for each, reserved in zip(bids, ids, strict=True):
            each["id"] = reserved
        return response, None

    def _count_first_prices(
        self, request: BidRequest, unshaded: Sequence[float], bids: Sequence[Json]
    ) -> None:
        """Count the bids of an answer, and what they were without shading: currency of each
        impression of the request.
        """
        impressions = [imp.id for imp in request.imp]
        before = dict(zip(impressions, unshaded, strict=True))
        for each in bids:
            self.counts.first_price.labels("unshaded").inc(before[each["impid"]])
            self.counts.first_price.labels("sent").inc(each["price"] / 1000)

    def _build_shade(self, campaign: str, unshaded: list[float]) -> Shade | None:
        """A function that lowers first-price bids of a campaign, and appends to the list what they
        were; None: they stay as they are.
        """
        shading = self.shading
        if shading is None:
            return None

        def shade(worth: float, most: float, floor: float) -> float:
            unshaded.append(most)
            return shading.bid(campaign, worth, most=most, floor=floor)

        return shade

    def _prepare_notices(self, request: BidRequest, bids: list[Json]) -> None:
        """Give bids their expiry and where the exchange tells their results."""
        with_least = self.shading is not None and request.at == FIRST_PRICE
        if self.shading is not None and with_least and not request.test:
            prices = [each["price"] / 1000 for each in bids]
            self.shading.record_sent(request.ext.campaign, [each["id"] for each in bids], prices)
        for each in bids:
            each["exp"] = int(self.open_bids.expiry)
            if self.notice_url:
                each |= notice_addresses(self.notice_url, each["id"], with_least=with_least)

    async def settle(self, id: str, kind: str, price: str, least: str) -> None:
        """Count the result of a bid. Unknown bids are ignored, and so is a loss after a win.

        Args:
            id: of the bid.
            kind: win or loss.
            price: that was paid, per mille, as the exchange wrote it.
            least: the least price that would have won, likewise.
        """
        won = kind == "win"
        paid = parse_price(price) if won else 0.0
        try:
            was_booked = self.open_bids.settle(id, paid)
            await self.open_bids.wait_written()
        except ReservationsError as error:
            message = f"the result could not be saved ({error}); try again"
            raise RequestError(503, "bids", message) from error
        if was_booked:
            self.counts.notices.labels(kind).inc()
        if self.shading is not None:
            prices = [least] if won else [least, price]
            self.shading.settle(id, won=won, least=first_price_above_zero(*prices))


def open_exchange(
    journal: Journal,
    registry: CollectorRegistry,
    *,
    shading: bool = False,
    bid_expiry_s: float = BID_EXPIRY_S,
    **options: Any,
) -> Exchange:
    """The exchange over a journal, with its files beside it, counted in a Prometheus registry.

    Args:
        shading: first-price bids are lowered.
        bid_expiry_s: after it, a bid without a notice counts as won.
        options: of `Exchange`.
    """
    open_bids = Reservations(
        journal.sidecar_path("bids"),
        expiry=bid_expiry_s,
        last_step=lambda id: journal.count_ticks(id) - 1,
    )
    lowers = None
    if shading:
        lowers = BidShading(journal.sidecar_path("shading"), expiry=bid_expiry_s)
    return Exchange(
        journal=journal,
        open_bids=open_bids,
        shading=lowers,
        counts=Counts(registry, open_bids),
        **options,
    )


def router(exchange: Exchange) -> APIRouter:
    """The OpenRTB routes of an exchange."""
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
        response = await exchange.bid(request, http.state.arrived)
        if response is None:
            return no_bid
        return Response(to_json(response), headers=headers, media_type="application/json")

    @routes.get("/notices/{id}/{kind}", status_code=204)
    async def notice(
        id: str, kind: Literal["win", "loss"], price: str = "", least: str = ""
    ) -> None:
        """The result of a bid, at the address that the bid named.

        price: that was paid, per mille; least: the least bid that would have won, per mille.
        Unknown bids are ignored, and so is a loss after a win.
        """
        await exchange.settle(id, kind, price, least)

    return routes


def is_late(request: BidRequest, arrived: float) -> bool:
    """Return whether an answer sent now is too late for the exchange. arrived: see `Exchange.bid`."""
    if not request.tmax:
        return False
    return time.monotonic() >= arrived + request.tmax / 1000 - RETURN_SECONDS


def notice_addresses(notice_url: str, id: str, *, with_least: bool = False) -> dict[str, str]:
    """The addresses of the notices of a bid.

    Args:
        with_least: the exchange also tells the least price that would have won.
    """
    at = f"{notice_url.rstrip('/')}/notices/{id}"
    price = "price=${AUCTION_PRICE}"
    if not with_least:
        return {"nurl": f"{at}/win?{price}", "lurl": f"{at}/loss"}
    prices = f"{price}&least=${{AUCTION_MIN_TO_WIN}}"
    return {"nurl": f"{at}/win?{prices}", "lurl": f"{at}/loss?{prices}"}


def first_price_above_zero(*prices: str) -> float | None:
    """The first of these prices per mille that is a number above 0, in currency; None: there is
    none.
    """
    for price in prices:
        paid = parse_price(price)
        if 0 < paid < math.inf:
            return paid
    return None


def parse_price(price: str) -> float:
    """Currency that a win notice reports, per mille in the notice; infinity, the bid's own price,
    where it is no plain number: encrypted, negative, or the macro was not replaced.
    """
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", price):
        return math.inf
    return float(price) / 1000
