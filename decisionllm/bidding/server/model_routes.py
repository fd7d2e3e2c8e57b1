"""Routes by which a token holder with the right `operate` changes the served models."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import APIRouter, Response

from decisionllm.bidding.server import schemas
from decisionllm.bidding.server.answers import errors, json_response
from decisionllm.bidding.server.campaigns import RequestError
from decisionllm.bidding.server.model_folder import (
    ModelFolder,
    SavedChoice,
    parse_choice,
    yield_to_ticks,
)
from decisionllm.bidding.server.models import Choice, Model, check_new_model, set_share
from decisionllm.bidding.server.service import Service
from decisionllm.bidding.server.watched_file import WatchedFile

logger = logging.getLogger("decisionllm.bidding.server")
CHANGE_IN_PROGRESS = "another change is being made"
# seconds that a change waits for a replica that moves campaigns after the last one
PATIENCE = 3.0  # most clients give up after 5


class ModelChanges:
    """Takes models over, one change at a time, and follows the changes of other replicas.

    Args:
        service: whose models change.
        folder: that they are loaded from.
    """

    def __init__(self, service: Service, folder: ModelFolder) -> None:
        self.service = service
        self.models = service.models
        self.folder = folder
        self.lock = asyncio.Lock()  # guards the models that this replica serves
        self.changing = False  # this replica makes a change of its own
        self.models.is_coming = folder.has_model

    async def take_over(self, run: str, share: float, *, move: bool) -> schemas.ServedModels:
        """Load a run, check it on the journal, and let it open a share of the new campaigns."""
        with self._exclude_changes():
            model, checked = await asyncio.to_thread(self._load_and_check, run)
            async with self._lock_and_follow():
                if model.name not in self.models.loaded:
                    self.models.add(model)
                choice = set_share(self.models.choice, model.name, share)
                before: Choice | None = self.models.choice
                if choice == before:  # a request sent again does not lose the way back
                    before = self.models.before
                moved = await self._change(choice, before, move=move)
        return await self.list_models(checked=checked, moved=moved)

    async def roll_back(self, *, move: bool) -> schemas.ServedModels:
        """Go back to the choice before the last change; twice is refused, not undone."""
        with self._exclude_changes():
            async with self._lock_and_follow():
                before = self.models.before
                if before is None:
                    raise RequestError(409, "models", "there is no earlier choice to go back to")
                moved = await self._change(before, None, move=move)
        return await self.list_models(moved=moved)

    @contextmanager
    def _exclude_changes(self) -> Iterator[None]:
        """This replica makes no other change in the block."""
        if self.changing:
            raise RequestError(409, "models", CHANGE_IN_PROGRESS)
        self.changing = True
        try:
            yield
        finally:
            self.changing = False

    @asynccontextmanager
    async def _lock_and_follow(self) -> AsyncIterator[None]:
        """No replica makes a change in the block, which begins with the last choice of all."""
        async with self.lock, self._lock_choice(PATIENCE) as free:
            if not free:
                raise RequestError(409, "models", CHANGE_IN_PROGRESS)
            try:
                await self._follow()
            except ValueError as error:
                message = f"the last choice cannot be followed: {error}"
                raise RequestError(503, "models", message) from error
            yield

    @asynccontextmanager
    async def _lock_choice(self, patience: float = 0.0) -> AsyncIterator[bool]:
        """Lock the choice of models, see `ModelFolder.lock_choice`."""
        try:
            async with self.folder.lock_choice(patience) as free:
                yield free
        except OSError as error:
            raise RequestError(503, "models", f"the choice could not be saved: {error}") from error

    def _load_and_check(self, run: str) -> tuple[Model, int]:
        """A run of the folder as a model, and the number of ticks that it was checked on."""
        try:
            with yield_to_ticks():
                model = self.folder.load(run)
                loaded = self.models.loaded.get(model.name)
                if loaded is not None:
                    return loaded, 0
                return model, check_new_model(model, self.models.current)
        except ValueError as error:
            raise RequestError(422, "run", str(error)) from error

    async def _change(self, choice: Choice, before: Choice | None, *, move: bool) -> int:
        # kept before it is served: a restart never goes back behind what a client has seen
        await asyncio.to_thread(self.folder.save_choice, self.models, choice, before, move=move)
        return await self.service.change(choice, before, move=move)

    async def list_models(self, **more: int | None) -> schemas.ServedModels:
        """The loaded models, the one with the largest share first."""
        open_models = await asyncio.to_thread(self.service.journal.open_models)
        open_campaigns = {name: count for name, count, _ in open_models}
        rows = [
            schemas.ServedModel(
                model=model.name,
                run=str(model.info.get("run", "")),
                share=self.models.choice.get(model.name, 0.0),
                open=open_campaigns.get(model.name, 0),
            )
            for model in list(self.models.loaded.values())
        ]
        rows.sort(key=lambda row: -row.share)
        return schemas.ServedModels(models=rows, before=self.models.before, **more)

    # -- other replicas --

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Follow the file of the choice, which other replicas change, until the end of the block."""
        if self.folder.choice_file is None:
            yield
            return
        loop = asyncio.get_running_loop()

        def take(content: bytes) -> None:
            parse_choice(content)
            followed = asyncio.run_coroutine_threadsafe(self._follow_and_move(), loop)
            if not followed.result():
                watched.seen = None  # the next look takes it again

        watched = WatchedFile(self.folder.choice_file, take, optional=True)
        async with watched.run():
            yield

    async def _follow_and_move(self) -> bool:
        """Follow the last choice, and move campaigns that this or another replica has opened with
        an old model since it was made.

        Returns:
            Whether that is done; otherwise it is to be tried again.

        Raises:
            ValueError: the models of the choice cannot be loaded.
        """
        async with self.lock:
            try:
                saved = await self._follow()
                if saved is None or not saved.move:
                    return True
                async with self._lock_choice() as free:
                    if not free or saved != await asyncio.to_thread(self.folder.read):
                        return False
                    await self.service.change(self.models.choice, self.models.before, move=True)
            except sqlite3.Error as error:
                self.service.report_failure(error)
                return False
            except RequestError:  # the journal takes no write
                return False
        return True

    async def _follow(self) -> SavedChoice | None:
        """Serve the last choice, in whatever replica it was made. Returns it; None: there is none.

        The file is read here, within the lock: an earlier read may be older than a change of this
        replica.
        """
        saved = await asyncio.to_thread(self.folder.read)
        if saved is not None:
            loaded, before = await asyncio.to_thread(self._load, saved)
            self.models.add_new(loaded)
            await self.service.change(saved.choice, before, move=False)
        return saved

    def _load(self, saved: SavedChoice) -> tuple[dict[str, Model], Choice | None]:
        """The loaded models with those of a choice, and what a rollback goes back to."""
        loaded = dict(self.models.loaded)
        before = self.folder.load_saved(loaded, saved, self.service.journal)
        for name in loaded.keys() - self.models.loaded.keys():
            with yield_to_ticks():
                check_new_model(loaded[name], self.models.current)
        return loaded, before


def router(changes: ModelChanges) -> APIRouter:
    """The routes of changes."""
    routes = APIRouter(tags=["models"])

    @routes.get(
        "/v1/models", response_model=schemas.ServedModels, responses=errors(401, 503, usual=())
    )
    async def models() -> schemas.ServedModels:
        """The loaded models, their shares of new campaigns and their open campaigns."""
        return await changes.list_models()

    @routes.post("/v1/models", response_model=schemas.ServedModels, responses=errors(409))
    async def take_over(request: schemas.TakeOver) -> Response:
        """Load a run of the folder of models, and let it open a share of the new campaigns."""
        move = request.campaigns == "move"
        served = await changes.take_over(request.run, request.share, move=move)
        return json_response(served.model_dump_json())

    @routes.post("/v1/models/rollback", response_model=schemas.ServedModels, responses=errors(409))
    async def roll_back(request: schemas.Rollback) -> Response:
        """Go back to the choice before the last change."""
        served = await changes.roll_back(move=request.campaigns == "move")
        return json_response(served.model_dump_json())

    return routes
