"""Runs that a server may load while it runs, and the file that keeps which of them was chosen last.

The file lies beside the journal. A restart reads it, and so do other replicas of the server.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import AsyncFileLock, Timeout

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.server.models import Choice, Model, Models, describe_choice
from decisionllm.files import atomic, explain_errors
from decisionllm.schema import Json

logger = logging.getLogger("decisionllm.bidding.server")
FORMAT = 1
EXPECTED_RUN = "expected the name of a run in the folder of models"
SHORT_TURN = 0.0005  # seconds
loading_lock = threading.Lock()


@contextmanager
def yield_to_ticks() -> Iterator[None]:
    """Load one model at a time, and take the interpreter from the loading thread after SHORT_TURN.

    A tick changes threads several times. Each time it waits for the interpreter until the loading
    thread has had its turn, which is 5 ms by default.
    """
    with loading_lock:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(SHORT_TURN)
        try:
            yield
        finally:
            sys.setswitchinterval(usual)


@dataclass(frozen=True)
class SavedChoice:
    """The content of the file of the choice.

    Attributes:
        command: model and shares that the command line gave: with others it counts instead.
        runs: run of each model of the choices; a name in the folder, or an absolute path.
        choice, before: see `Models`.
        move: open campaigns of models that are not chosen go on with the chosen models.
    """

    command: Json
    runs: dict[str, str]
    choice: Choice
    before: Choice | None
    move: bool


class ModelFolder:
    """Loads runs by their names in a folder, and keeps the choice among them.

    Args:
        folder: of runs; nothing outside of it is loaded by name.
        load: path of a run -> the model, off the event loop.
        run: path of the run of the command line.
        kept: file of the choice; `:memory:` keeps nothing.
        shares: RUN:SHARE of the command line; empty: its run opens all campaigns.
    """

    def __init__(
        self,
        folder: str | Path,
        load: Callable[[Path], Model],
        *,
        run: str | Path,
        choice_file: str = ":memory:",
        shares: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder).resolve()
        self.read_run = load
        self.run = str(Path(run).resolve())
        self.choice_file = None if choice_file == ":memory:" else Path(choice_file)
        self.shares = list(shares)
        self.command: Json = {}

    def load(self, name: str) -> Model:
        """The model of a run.

        Args:
            name: of the run in the folder, such as `auction/nano-1`.

        Raises:
            ValueError: there is no such run in the folder, or it cannot be loaded. The message has
                no path of this machine.
        """
        try:
            path = (self.folder / name).resolve()
            inside = path.is_relative_to(self.folder) and path != self.folder
            is_run = inside and (path / "run.json").is_file()
        except (ValueError, OSError):  # a name with a zero byte, or one that is too long
            is_run = False
        if not is_run:
            raise ValueError(f"{EXPECTED_RUN}, got {name!r}")
        try:
            return self.read_run(path)
        except Exception as error:  # whatever the files of a run can cause
            logger.exception("run %s", name)
            why = str(error).replace(str(self.folder), "")
            raise ValueError(f"{name}: it cannot be loaded: {why}") from error

    def begin(self, models: Models) -> None:
        """Load the last choice, or that of the command line if the command line was changed since.

        Raises:
            ValueError: the file of the choice, or a run, is not as it was.
        """
        self.command = {"model": models.current.name, "shares": self.shares}
        saved = self.read()
        if saved is not None and saved.command == self.command:
            self._restore(models, saved)
            return
        if saved is not None:
            logger.warning(
                "the command line changed: %s no longer counts", describe_choice(saved.choice)
            )
            loaded = dict(models.loaded)
            self.load_open(loaded, saved, models.current.campaigns.journal)
            models.add_new(loaded)
        if self.shares:
            models.choose(self._load_shares(models), None)
        if saved is not None or self.shares:
            self.save_choice(models, models.choice, models.before)

    def _restore(self, models: Models, saved: SavedChoice) -> None:
        loaded = dict(models.loaded)
        with explain_errors(
            "models: the last choice cannot be served",
            ValueError,
            fix=f"put the run back, or delete {self.choice_file} to begin with run=",
        ):
            before = self.load_saved(loaded, saved, models.current.campaigns.journal)
        models.add_new(loaded)
        models.choose(saved.choice, before)

    def load_saved(
        self, loaded: dict[str, Model], saved: SavedChoice, journal: Journal
    ) -> Choice | None:
        """Add what the file names and is not loaded: the models of the choice, of open campaigns
        and of the choice before.

        Args:
            loaded: models by name.
            saved: content of the file.
            journal: of the campaigns.

        Returns:
            What a rollback goes back to; None: there is nothing, or it cannot be loaded.

        Raises:
            ValueError: a model that is chosen or has open campaigns is not in its run any more.
        """
        for name in saved.choice:
            self._add(loaded, name, saved.runs[name])
        self.load_open(loaded, saved, journal)
        before = saved.before
        try:
            for name in before or {}:
                self._add(loaded, name, saved.runs[name])
        except ValueError as error:
            logger.warning("there is no choice to go back to: %s", error)
            return None
        return before

    def load_open(self, loaded: dict[str, Model], saved: SavedChoice, journal: Journal) -> None:
        """Add the models of open campaigns that the file names. See `load_saved`."""
        for name, _, _ in journal.open_models():
            if name in saved.runs:
                self._add(loaded, name, saved.runs[name])

    def _load_shares(self, models: Models) -> Choice:
        choice: Choice = {}
        for name, share in parse_shares(self.shares).items():
            is_first = (self.folder / name).resolve() == Path(self.run)
            model = models.current if is_first else self.load(name)
            if model.name not in models.loaded:
                models.add(model)
            choice[model.name] = share
        return choice

    def _add(self, loaded: dict[str, Model], name: str, run: str) -> None:
        """Load a model that the file names, unless it is loaded.

        Raises:
            ValueError: there is no run, or another one in its place.
        """
        if name in loaded:
            return
        with yield_to_ticks():
            model = self.read_run(Path(run)) if Path(run).is_absolute() else self.load(run)
        if model.name != name:
            raise ValueError(f"expected {name} in run {run}, got {model.name}")
        loaded[name] = model

    def read(self) -> SavedChoice | None:
        """The content of the file; None without one. Raises a ValueError if it is damaged."""
        if self.choice_file is None or not self.choice_file.is_file():
            return None
        return parse_choice(self.choice_file.read_bytes())

    def has_model(self, name: str | None) -> bool:
        """Return whether the file names a model: a replica that has not loaded it is about to."""
        with suppress(ValueError, OSError):
            saved = self.read()
            return saved is not None and name in saved.runs
        return False

    @asynccontextmanager
    async def lock_choice(self, patience: float = 0.0) -> AsyncIterator[bool]:
        """Hold the lock of the file of the choice, which one process has at a time.

        Args:
            patience: seconds to wait for another process that has it.

        Yields:
            False: another one still has it. It is free again once that process ends, however it
            does.

        Raises:
            OSError: there is no room for the file of the lock, or it may not be written.
        """
        if self.choice_file is None:
            yield True
            return
        lock = AsyncFileLock(f"{self.choice_file}.lock", timeout=patience)
        try:
            await lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            await lock.release()

    def save_choice(
        self, models: Models, choice: Choice, before: Choice | None, *, move: bool = False
    ) -> None:
        """Write a choice among loaded models, so that a restart has it. Raises OSError.

        Args:
            move: see `SavedChoice`.
        """
        if self.choice_file is None:
            return
        runs = {name: model.run or self.run for name, model in models.loaded.items()}
        saved = SavedChoice(self.command, runs, choice, before, move)
        with atomic(self.choice_file) as partial, partial.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT} | asdict(saved), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def parse_choice(content: bytes) -> SavedChoice:
    """The choice in the bytes of its file. Raises a ValueError if they are damaged."""
    with explain_errors("models: the file of the last choice is damaged", ValueError, TypeError):
        fields = json.loads(content)
        if fields.pop("format", None) != FORMAT:
            raise ValueError("it is of another version")
        return SavedChoice(**fields)


def parse_shares(shares: Sequence[str]) -> Choice:
    """Parse shares of models: ["a:0.9", "b:0.1"] -> {"a": 0.9, "b": 0.1}.

    Raises:
        ValueError: a share is no number above 0, or they do not sum to 1.
    """
    share_by_run: Choice = {}
    for entry in shares:
        name, _, share = str(entry).rpartition(":")
        with explain_errors(f"models: expected RUN:SHARE, got {entry!r}", ValueError):
            share_by_run[name] = float(share)
    total = sum(share_by_run.values())
    if (
        len(share_by_run) < len(shares)
        or min(share_by_run.values()) <= 0
        or not abs(total - 1) < 1e-6
    ):
        raise ValueError(f"models: expected shares above 0 that sum to 1, got {list(shares)}")
    return share_by_run
