"""A ledger of runs: one folder for each, named by the hash of its job, so that several processes share the work and repeat none.

runs/studies/x/<hash>/
  job.json       the job; its bytes hash to the folder's name, so that an edit is noticed
  lock           locked by the process that works on the run; the kernel releases it when that process ends, in whatever way
  begun          one line for each attempt
  done.json      the result; or failed.json, the reason
  log.txt        what the run printed

planned: neither done nor failed, and the lock is free. Whatever a killed worker leaves behind is therefore planned again.
"""

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from decisionllm.files import atomic, explained

STATES = ("planned", "running", "done", "failed")
ATTEMPTS = 3  # a run whose workers were killed so often is failed
CANNOT_WRITE, NO_LOCKS = 3, 4  # exit codes of workers
REMEDY = "delete the folder to make the run again"
WHY = {
    CANNOT_WRITE: "a worker could not write there (disk full?); make room, then the same command goes on",
    NO_LOCKS: "a worker does not see the locks of this machine; the file system must share them (NFS: without local_lock; Lustre: with flock)",
}

Run = Callable[[Path, Any], dict[str, Any]]  # folder, job -> result, JSON values
Say = Callable[[str], object]
States = dict[str, str]


class Worker(Protocol):
    """A worker that an executor started, with the members of multiprocessing.Process.

    Attributes:
        exitcode: None while it works, below 0 if it was killed.
        reason: why it failed, where it has not printed that itself.
    """

    reason: str

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def terminate(self) -> None: ...

    def join(self) -> None: ...


def encode(job: Any) -> tuple[str, bytes]:
    """(name, bytes) of a job of JSON values; the order of keys does not matter."""
    content = json.dumps(job, sort_keys=True).encode()
    return _name(content), content


def plan(root: str | Path, jobs: Iterable[Any]) -> list[str]:
    """Make a folder for each job that has none. Returns their names, in order. A folder that was edited is an error, before any is made."""
    root, wanted = Path(root), dict(map(encode, jobs))
    present = wanted.keys() & set(os.listdir(root)) if root.is_dir() else set()
    begun = {name for name in present if (root / name / "job.json").exists()}
    for name in begun:
        _content(root / name)
    root.mkdir(parents=True, exist_ok=True)
    for name in wanted.keys() - begun:
        with atomic(root / name / "job.json") as file:
            file.write_bytes(wanted[name])
    return list(wanted)


def state(folder: str | Path) -> str:
    """One of STATES. The folder is listed once, and the lock tried only if there is one."""
    found = set(os.listdir(folder))
    for name in ("done", "failed"):
        if f"{name}.json" in found:
            return name
    return "running" if "lock" in found and _locked(Path(folder) / "lock") else "planned"


def status(root: str | Path, names: Iterable[str]) -> States:
    """{name: state}, planned where there is no folder yet. A folder that was edited by hand is an error."""
    present = set(os.listdir(root)) if os.path.isdir(root) else set()
    for name in present.intersection(names):
        try:
            _content(f"{root}/{name}")
        except FileNotFoundError:
            if any(not file.startswith(".") for file in os.listdir(f"{root}/{name}")):  # else `plan` was killed before it wrote
                raise
    return {name: state(f"{root}/{name}") if name in present else "planned" for name in names}


def job(folder: str | Path) -> Any:
    """The job of a run's folder."""
    return json.loads(_content(folder))


def result(folder: str | Path) -> dict[str, Any]:
    """The result of a run that is done, or the reason and last lines of one that failed."""
    path = next(path for name in ("done", "failed") if (path := Path(folder) / f"{name}.json").exists())
    with explained(f"{path} was edited or is damaged", ValueError, KeyError, TypeError, remedy=REMEDY):
        kept = json.loads(path.read_text())
        if kept["digest"] != encode([Path(folder).name, kept["result"]])[0]:
            raise ValueError("its content does not match its digest")
    return dict(kept["result"])


def retry(root: str | Path, names: Iterable[str]) -> list[str]:
    """Make failed runs planned again. Returns their names."""
    failed = [name for name, was in status(root, names).items() if was == "failed"]
    for name in failed:
        for file in ("failed.json", "begun"):
            (Path(root) / name / file).unlink(missing_ok=True)
    return failed


@contextmanager
def claim(folder: str | Path) -> Iterator[bool]:
    """Holds the lock of a run. True if the run is planned; False if it is done, failed or locked by another process."""
    with (Path(folder) / "lock").open("w") as file:
        for patience in (0.005, 0.02, 0):  # `state` of another process holds the lock for an instant
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(patience)
            else:
                os.utime(folder)  # over NFS, files of another machine are seen at once only after a write to their folder
                yield not any((Path(folder) / f"{name}.json").exists() for name in ("done", "failed"))
                return
        yield False


def attempt(folder: str | Path, run: Run) -> bool:
    """Work on a run unless another process does. Returns whether it was ours to work on.

    An exception makes the run failed, with the last lines of the exception; an interruption or a full disk leaves it planned.
    """
    folder = Path(folder)
    with claim(folder) as ours:
        if not ours:
            return False
        begun = folder / "begun"
        tried = begun.read_text().splitlines() if begun.exists() else []
        if len(tried) >= ATTEMPTS:
            reason = f"its worker died {len(tried)} times without an error message (killed, or out of memory?)"
            _end(folder, "failed", {"reason": reason, "lines": (folder / "log.txt").read_text().splitlines()[-8:]})
            return True
        work = job(folder)
        begun.write_text("".join(f"{line}\n" for line in [*tried, f"{os.getpid()} {time.time():.0f} {socket.gethostname()}"]))
        began = time.monotonic()
        try:
            with (folder / "log.txt").open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
                ended, outcome = "done", run(folder, work)
            encode(outcome)  # a result that is not JSON is a failure of the run
        except BaseException as error:
            full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
            if full or not isinstance(error, Exception):  # not a failure of the run
                begun.write_text("".join(f"{line}\n" for line in tried))
                raise (OSError(str(error)) if full else error) from None
            lines = traceback.format_exc().splitlines()
            ended, outcome = "failed", {"reason": f"{type(error).__name__}: {error}", "lines": lines[-8:]}
        _end(folder, ended, outcome | {"seconds": round(time.monotonic() - began, 3)})
        return True


def work(root: str | Path, names: list[str], run: Run, driver: str | Path, cwd: str | Path) -> int:
    """A worker: attempt the planned runs until none is left or the driver has ended. Returns the exit code.

    It starts at a place of the list that depends on its process id, so that workers seldom meet.

    Args:
        root: of the ledger.
        names: of the runs.
        run: does one run.
        driver: a file that the driver holds locked.
        cwd: the driver's working directory.
    """
    os.chdir(cwd)
    first = os.getpid() * 7919 % len(names)
    try:
        if not _locked(driver):
            return NO_LOCKS
        for name in [*names[first:], *names[:first]]:
            if not _locked(driver):
                break
            if state(Path(root) / name) == "planned":
                attempt(Path(root) / name, run)
    except OSError:
        traceback.print_exc()
        return CANNOT_WRITE
    return 0


def drive(
    root: str | Path, names: list[str], run: Run, start: Callable[[Callable[[], int]], Worker], count: int, *,
    progress: Callable[[States], None] = lambda states: None, poll: float = 0.05,
) -> States:  # fmt: skip
    """Keep so many workers at work until every run is done or failed, here or by another driver. Returns {name: state}.

    A worker that dies is replaced, and its run is planned again. Ctrl-C interrupts all workers; they save their state.

    Args:
        root: of the ledger.
        names: of the runs.
        run: does one run.
        start: starts a worker, see executors.
        count: workers at once.
        progress: called with the states at each look.
        poll: seconds between two looks, at least.
    """
    root, workers, unfinished, ended = Path(root), list[Worker](), list(names), States()
    with NamedTemporaryFile(dir=root, prefix=".driver-") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        try:
            while True:
                began = time.monotonic()
                found = {name: state(root / name) for name in unfinished}
                ended |= {name: was for name, was in found.items() if was in ("done", "failed")}
                unfinished = [name for name in unfinished if name not in ended]
                progress(found | ended)
                took = time.monotonic() - began  # of the look; a run that this process does itself is not part of it
                if not unfinished:
                    return {name: ended[name] for name in names}
                for worker in workers:
                    if (code := worker.exitcode or 0) > 0:
                        raise OSError(f"{root}: {WHY.get(code, 'a worker could not work:')} {worker.reason}")
                workers = [worker for worker in workers if worker.is_alive()]
                planned = [name for name in unfinished if found[name] == "planned"]
                for _ in range(min(count - len(workers), len(planned))):
                    workers.append(start(partial(work, root, planned, run, alive.name, os.getcwd())))
                time.sleep(max(poll, 2 * took))  # a large ledger is listed less often
        finally:
            for worker in (worker for worker in workers if worker.is_alive()):
                worker.terminate()
            for worker in workers:
                worker.join()


class Progress:
    """Prints the state of a study: each failed run once, and the counts.

    Args:
        root: of the ledger.
        say: prints a line.
        every: seconds between two lines of counts, at least.
    """

    def __init__(self, root: Path, say: Say, every: float = 10) -> None:
        self.root, self.say, self.every, self.failed, self.last, self.printed = root, say, every, set[str](), States(), -1e9

    def __call__(self, states: States) -> None:
        failed = {name for name, state in states.items() if state == "failed"}
        for name in sorted(failed - self.failed):
            failure = result(self.root / name)
            lines = "".join(f"\n    {line}" for line in failure["lines"][-4:])
            self.say(f"failed: {self.root / name}: {failure['reason']}{lines}")
        over = {"done", "failed"} >= set(states.values())
        if states != self.last and (over or time.monotonic() - self.printed > self.every):
            counts = Counter(states.values())
            self.say(f"{self.root}: {len(states):,} runs; " + ", ".join(f"{counts[state]:,} {state}" for state in STATES))
            self.last, self.printed = states, time.monotonic()
        self.failed = failed


def _name(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _content(folder: str | Path) -> bytes:
    """The bytes of job.json, if the folder is named after them."""
    path, missing = f"{folder}/job.json", FileNotFoundError
    error = explained(f"{path}: expected a planned run, found none", missing, remedy=REMEDY, raised=missing)
    with error, open(path, "rb") as file:
        content = file.read()
    if _name(content) != os.path.basename(folder):
        raise ValueError(f"{path} was edited: it is not the run that its folder is named after; delete the folder, or undo it")
    return content


def _locked(path: str | Path) -> bool:
    with open(path) as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def _end(folder: Path, name: str, outcome: dict[str, Any]) -> None:
    kept = {"digest": encode([folder.name, outcome])[0], "result": outcome}
    with atomic(folder / f"{name}.json") as file:
        file.write_text(json.dumps(kept, indent=1))
