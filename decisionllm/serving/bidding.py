"""What an app has beside its policy where the policy was trained to bid: campaigns, their page,
OpenRTB, snapshots, and changes of the model."""

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry

from decisionllm.domains.auction.journal import Journal
from decisionllm.schema import Json
from decisionllm.serving import campaign_routes, exchange, logs, model_routes
from decisionllm.serving.answers import errors
from decisionllm.serving.model_folder import ModelFolder
from decisionllm.serving.model_routes import ModelChanges
from decisionllm.serving.models import Models
from decisionllm.serving.reservations import Reservations
from decisionllm.serving.service import Service
from decisionllm.serving.snapshot import Snapshot

BID_EXPIRY_S = 60.0
# a router, and the error answers of all its routes
Routes = tuple[APIRouter, dict[int | str, Json] | None]


class Part(Protocol):
    """What works beside the requests while the app runs."""

    def run(self) -> contextlib.AbstractAsyncContextManager[None]: ...


@dataclass
class Bidding:
    """The campaigns of a journal, and what answers for them.

    Attributes:
        journal: of the campaigns.
        models: that decide.
        folder: of runs that may take over while the server runs; None: none may.
        snapshot: of the open campaigns; None: there is none.
        reservations: what open bids may still cost.
        shading: of first-price bids.
        options: of `exchange.router`.
    """

    journal: Journal
    models: Models
    folder: ModelFolder | None
    snapshot: Snapshot | None
    reservations: Reservations
    shading: exchange.Shading
    options: Json

    @classmethod
    def begin(
        cls,
        models: Models,
        folder: ModelFolder | None,
        options: Json,
        *,
        move: bool,
        log: str,
        snapshot_s: float | None,
    ) -> "Bidding":
        """Load the models that were chosen last, and check that they can answer open campaigns.

        Args:
            models: with the one that the server was started with.
            folder, options: see `Bidding`; the options also have `shading`, a bool, and
                `bid_expiry_s`, seconds until a bid without a notice counts as won.
            move: open campaigns of another model go on with this one.
            log: see `logs.written`.
            snapshot_s: seconds between two snapshots; None: there are none.

        Raises:
            ValueError: the journal has open campaigns that no model may or can answer.
        """
        options = dict(options)
        shaded = options.pop("shading", False)
        expiry = options.pop("bid_expiry_s", BID_EXPIRY_S)
        campaigns = models.current.campaigns
        journal = campaigns.journal
        # the service finds a damaged file too, and reports it
        with logs.written(log), contextlib.suppress(sqlite3.Error):
            if folder is not None:
                folder.begin(models)
            campaigns.check_open(move=move, beside=models.loaded)
        snapshot = None
        if snapshot_s and journal.path != ":memory:":
            snapshot = Snapshot(journal, models.all_in_memory, snapshot_s)
        reservations = exchange.reservations(journal, expiry)
        shading = exchange.shading(journal, expiry, wanted=shaded)
        return cls(journal, models, folder, snapshot, reservations, shading, options)

    @property
    def service_options(self) -> dict[str, Callable[..., Any]]:
        """Options of the `Service` that decides for these campaigns."""
        return {} if self.snapshot is None else {"begin": self.snapshot.begin}

    def serve(
        self, app: FastAPI, service: Service, registry: CollectorRegistry
    ) -> tuple[list[Routes], list[Part]]:
        """Add the page to an app. Returns the other routes, and what works beside them."""
        campaign_routes.add_page(app)
        desk = exchange.router(
            self.journal, self.reservations, self.shading, registry, **self.options
        )
        routes: list[Routes] = [
            (campaign_routes.campaign_routes(service, self.journal), None),
            (desk, errors(404)),
        ]
        parts: list[Part] = []
        if self.snapshot is not None:
            parts.append(self.snapshot)
        if self.folder is not None:
            changes = ModelChanges(service, self.folder)
            parts.append(changes)
            routes.append((model_routes.router(changes), None))
        return routes, parts

    def close(self) -> None:
        self.reservations.close()
        self.shading.close()
