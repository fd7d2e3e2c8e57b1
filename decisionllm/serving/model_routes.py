"""Routes by which a token holder with the right `operate` changes the served models."""

import asyncio
import logging
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import APIRouter, Response

from decisionllm.files import explained
from decisionllm.serving import schemas
from decisionllm.serving.answers import errors, json_text
from decisionllm.serving.campaigns import RequestError
from decisionllm.serving.model_folder import Chosen, ModelFolder, parse
from decisionllm.serving.models import Choice, Model, check_new, with_share
from decisionllm.serving.service import Service
from decisionllm.serving.watched_file import WatchedFile

logger = logging.getLogger("decisionllm.serving")
loading = threading.Lock()
SHORT_TURN = 0.0005  # seconds


@contextmanager
def beside_ticks() -> Iterator[None]:
    """Load one model at a time, and take the interpreter from the loading thread after SHORT_TURN.

    A tick changes threads several times. Each time it waits for the interpreter until the loading
    thread has had its turn, which is 5 ms by default.
    """
    with loading:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(SHORT_TURN)
        try:
            yield
        finally:
            sys.setswitchinterval(usual)


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
        self.lock = asyncio.Lock()
        self.changing = False  # this replica makes a change of its own
        self.models.is_coming = folder.knows

    async def take_over(self, run: str, share: float, *, move: bool) -> schemas.ServedModels:
        """Load a run, check it on the journal, and let it open a share of the new campaigns."""
        async with self._alone():
            model, checked = await asyncio.to_thread(self._checked, run)
            if model.name not in self.models.loaded:
                self.models.add(model)
            choice = with_share(self.models.choice, model.name, share)
            before: Choice | None = self.models.choice
            if choice == before:  # a request sent again does not lose the way back
                before = self.models.before
            moved = await self._change(choice, before, move=move)
        return await self.served(checked=checked, moved=moved)

    async def roll_back(self, *, move: bool) -> schemas.ServedModels:
        """Go back to the choice before the last change; twice is refused, not undone."""
        async with self._alone():
            before = self.models.before
            if before is None:
                raise RequestError(409, "models", "there is no earlier choice to go back to")
            moved = await self._change(before, None, move=move)
        return await self.served(moved=moved)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        if self.changing:
            raise RequestError(409, "models", "another change is being made")
        self.changing = True
        try:
            async with self.lock:  # waits while this replica follows the change of another
                yield
        finally:
            self.changing = False

    def _checked(self, run: str) -> tuple[Model, int]:
        """A run of the folder as a model, and the number of ticks that it was checked on."""
        try:
            with beside_ticks():
                model = self.folder.load(run)
                known = self.models.loaded.get(model.name)
                if known is not None:
                    return known, 0
                return model, check_new(model, self.models.current)
        except ValueError as error:
            raise RequestError(422, "run", str(error)) from error

    async def _change(self, choice: Choice, before: Choice | None, *, move: bool) -> int:
        # kept before it is served: a restart never goes back behind what a client has seen
        try:
            await asyncio.to_thread(self.folder.keep, self.models, choice, before)
        except OSError as error:
            raise RequestError(503, "models", f"the choice could not be saved: {error}") from error
        return await self.service.change(choice, before, move=move)

    async def served(self, **more: int | None) -> schemas.ServedModels:
        """The loaded models, the one with the largest share first."""
        found = await asyncio.to_thread(self.service.journal.open_models)
        open_campaigns = {name: count for name, count, _ in found}
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
        if self.folder.kept is None:
            yield
            return
        loop = asyncio.get_running_loop()

        def take(content: bytes) -> None:
            chosen = parse(content)
            loaded = self._load(chosen)
            adopted = asyncio.run_coroutine_threadsafe(self._adopt(loaded, chosen), loop)
            with explained("models: the journal cannot be read", sqlite3.Error):
                if not adopted.result():
                    watched.seen = None  # the next look takes it again

        watched = WatchedFile(self.folder.kept, take, optional=True)
        async with watched.run():
            yield

    def _load(self, chosen: Chosen) -> list[Model]:
        """The models of a choice that are not loaded yet, in a thread."""
        wanted = {*chosen.choice, *(chosen.before or {})} - {*self.models.loaded}
        models = []
        for name in wanted:
            with beside_ticks():
                model = self.folder.known(name, chosen.runs[name])
                check_new(model, self.models.current)
            models.append(model)
        return models

    async def _adopt(self, loaded: list[Model], chosen: Chosen) -> bool:
        """Follow a choice. False: this replica makes a change, which may fail and leave it to be
        followed, or may be this one.
        """
        if self.changing:
            return False
        async with self.lock:
            for model in loaded:
                self.models.add(model)
            if all(name in self.models.loaded for name in chosen.choice):
                await self.service.change(chosen.choice, chosen.before, move=False)
        return True


def router(changes: ModelChanges) -> APIRouter:
    """The routes of changes."""
    routes = APIRouter(tags=["models"])

    @routes.get(
        "/v1/models", response_model=schemas.ServedModels, responses=errors(401, 503, usual=())
    )
    async def models() -> schemas.ServedModels:
        """The loaded models, their shares of new campaigns and their open campaigns."""
        return await changes.served()

    @routes.post("/v1/models", response_model=schemas.ServedModels, responses=errors(409))
    async def take_over(request: schemas.TakeOver) -> Response:
        """Load a run of the folder of models, and let it open a share of the new campaigns."""
        move = request.campaigns == "move"
        served = await changes.take_over(request.run, request.share, move=move)
        return json_text(served.model_dump_json())

    @routes.post("/v1/models/rollback", response_model=schemas.ServedModels, responses=errors(409))
    async def roll_back(request: schemas.Rollback) -> Response:
        """Go back to the choice before the last change."""
        served = await changes.roll_back(move=request.campaigns == "move")
        return json_text(served.model_dump_json())

    return routes
