"""The parts of an app whose policy was trained to bid: campaigns, their page, OpenRTB, snapshots,
and changes of the model.
"""

import contextlib
import sqlite3
from dataclasses import dataclass
from typing import Protocol

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry

from decisionllm.bidding.server import campaign_routes, exchange, logs, model_routes
from decisionllm.bidding.server.answers import errors
from decisionllm.bidding.server.campaigns import Begin
from decisionllm.bidding.server.model_folder import ModelFolder
from decisionllm.bidding.server.model_routes import ModelChanges
from decisionllm.bidding.server.models import Models
from decisionllm.bidding.server.service import Service
from decisionllm.bidding.server.snapshot import Snapshot
from decisionllm.schema import Json

# a router, and the error answers of all its routes
Routes = tuple[APIRouter, dict[int | str, Json] | None]


class Part(Protocol):
    """Work beside the requests while the app runs."""

    def run(self) -> contextlib.AbstractAsyncContextManager[None]: ...


@dataclass
class Bidding:
    """The campaigns of a journal, and what answers for them.

    Attributes:
        models: that decide.
        folder: of runs that may take over while the server runs; None: none may.
        snapshot: of the open campaigns; None: there is none.
    """

    models: Models
    folder: ModelFolder | None
    snapshot: Snapshot | None

    @property
    def begin_campaign(self) -> Begin | None:
        """The state from which the replay of a campaign goes on, see `CampaignManager.load_open`."""
        return None if self.snapshot is None else self.snapshot.begin

    @classmethod
    def begin(
        cls,
        models: Models,
        folder: ModelFolder | None,
        *,
        move: bool,
        log: str,
        snapshot_s: float | None,
    ) -> "Bidding":
        """Load the models that were chosen last, and check that they can answer open campaigns.

        Args:
            models: with the one that the server was started with.
            folder: see `Bidding`.
            move: open campaigns of another model go on with this one.
            log: see `logs.write_logs`.
            snapshot_s: seconds between two snapshots; None: there are none.

        Raises:
            ValueError: the journal has open campaigns that no model may or can answer.
        """
        campaigns = models.current.campaigns
        # the service finds a damaged file too, and reports it
        with logs.write_logs(log), contextlib.suppress(sqlite3.Error):
            if folder is not None:
                folder.begin(models)
            campaigns.check_open(move=move, beside=models.loaded)
        snapshot = None
        if snapshot_s and campaigns.journal.path != ":memory:":
            snapshot = Snapshot(campaigns.journal, models.campaigns_in_memory, snapshot_s)
        return cls(models, folder, snapshot)

    def serve(
        self, app: FastAPI, service: Service, registry: CollectorRegistry, options: Json
    ) -> tuple[list[Routes], list[Part]]:
        """Add the page to an app.

        Args:
            options: of `exchange.open_exchange`.

        Returns:
            The other routes, and what works beside them.
        """
        campaign_routes.add_page(app)
        journal = self.models.current.campaigns.journal
        desk = exchange.open_exchange(journal, registry, **options)
        service.reservations = desk.open_bids
        routes: list[Routes] = [
            (campaign_routes.CampaignRoutes(service).router(), None),
            (exchange.router(desk), errors(404)),
        ]
        parts: list[Part] = [desk]
        if self.snapshot is not None:
            parts.append(self.snapshot)
        if self.folder is not None:
            changes = ModelChanges(service, self.folder)
            parts.append(changes)
            routes.append((model_routes.router(changes), None))
        return routes, parts
