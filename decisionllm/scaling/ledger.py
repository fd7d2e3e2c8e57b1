"""A ledger of runs, by which several processes share the work and repeat none.

Each run has a folder, named by the hash of its job.

runs/studies/x/<hash>/
  job.json       the job; its bytes hash to the folder's name, so that an edit is noticed
  lock           locked by the process that works on the run; the kernel releases it when that
                 process ends, in whatever way
  begun          one line for each attempt
  done.json      the result; or failed.json, the reason
  log.txt        what the run printed

planned: neither done nor failed, and the lock is free. Whatever a killed worker leaves behind is
therefore planned again.
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
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TextIO

from decisionllm.executors import Worker
from decisionllm.files import atomic, explained, write_json
from decisionllm.schema import Json

ENDED = ("done", "failed")
STATES = ("planned", "running", *ENDED)
ATTEMPTS = 3  # a run whose workers were killed so often is failed
CANNOT_WRITE, NO_LOCKS = 3, 4  # exit codes of workers
REMEDY = "delete the folder to make the run again"
WHY = {
    CANNOT_WRITE: (
        "a worker could not write there (disk full?); make room, then the same command goes on"
    ),
    NO_LOCKS: (
        "a worker does not see the locks of this machine; the file system must share them (NFS: "
        "without local_lock; Lustre: with flock)"
    ),
}

Run = Callable[[Path, Any], Json]  # folder, job -> result, JSON values
Say = Callable[[str], object]
States = dict[str, str]


def encode(job: object) -> tuple[str, bytes]:
    """(name, bytes) of a job of JSON values; the order of keys does not matter."""
    content = json.dumps(job, sort_keys=True).encode()
    return _name(content), content


def plan(root: str | Path, jobs: Iterable[object]) -> list[str]:
    """Make a folder for each job that has none.

    Returns:
        Their names, in order.

    Raises:
        ValueError: a folder was edited; none is made then.
    """
    root = Path(root)
    wanted = dict(map(encode, jobs))
    present = _present(root)
    made = {name for name in present.intersection(wanted) if (root / name / "job.json").exists()}
    for name in made:
        _content(root / name)
    root.mkdir(parents=True, exist_ok=True)
    for name in wanted.keys() - made:
        with atomic(root / name / "job.json") as file:
            file.write_bytes(wanted[name])
    return list(wanted)


def state(folder: str | Path) -> str:
    """One of STATES. The folder is listed once, and the lock tried only if there is one."""
    found = set(os.listdir(folder))
    for name in ENDED:
        if f"{name}.json" in found:
            return name
    return "running" if "lock" in found and _locked(Path(folder) / "lock") else "planned"


def status(root: str | Path, names: Iterable[str]) -> States:
    """{name: state}, planned where there is no folder yet; a ValueError for an edited folder."""
    present = _present(root)
    for name in present.intersection(names):
        try:
            _content(f"{root}/{name}")
        except FileNotFoundError:
            files = os.listdir(f"{root}/{name}")
            if any(not file.startswith(".") for file in files):
                raise
            # else `plan` was killed before it wrote
    return {name: state(f"{root}/{name}") if name in present else "planned" for name in names}


def job(folder: str | Path) -> Any:
    """The job of a run's folder."""
    return json.loads(_content(folder))


def result(folder: str | Path) -> Json:
    """The result of a run that is done, or the reason and last lines of one that failed."""
    paths = [Path(folder) / f"{name}.json" for name in ENDED]
    path = next(path for path in paths if path.exists())
    damaged = f"{path} was edited or is damaged"
    with explained(damaged, ValueError, KeyError, TypeError, remedy=REMEDY):
        kept = json.loads(path.read_text(encoding="utf-8"))
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
    """Hold the lock of a run, if it is free.

    Yields:
        True if the run is planned; False if it is done, failed or locked by another process.
    """
    folder = Path(folder)
    with (folder / "lock").open("w", encoding="utf-8") as file:
        ours = _lock(file, fcntl.LOCK_EX)
        if ours:
            # over NFS, files of another machine are seen at once only after a write to their folder
            os.utime(folder)
            ours = not any((folder / f"{name}.json").exists() for name in ENDED)
        yield ours


def attempt(folder: str | Path, run: Run) -> bool:
    """Work on a run unless another process does.

    An exception makes the run failed, with the last lines of the exception; an interruption or a
    full disk leaves it planned.

    Returns:
        Whether it was ours to work on.
    """
    folder = Path(folder)
    with claim(folder) as ours:
        if ours:
            _work_on(folder, run)
        return ours


def _work_on(folder: Path, run: Run) -> None:
    """Do a claimed run, and write its result or why it failed."""
    attempts = folder / "begun"
    tried = attempts.read_text(encoding="utf-8").splitlines() if attempts.exists() else []
    if len(tried) >= ATTEMPTS:
        why = "without an error message (killed, or out of memory?)"
        reason = f"its worker died {len(tried)} times {why}"
        lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
        _end(folder, "failed", {"reason": reason, "lines": lines[-8:]})
        return
    planned = job(folder)
    now = f"{os.getpid()} {time.time():.0f} {socket.gethostname()}"
    write_lines(attempts, [*tried, now])
    began = time.monotonic()
    try:
        log = (folder / "log.txt").open("a", buffering=1, encoding="utf-8")
        with log, redirect_stdout(log), redirect_stderr(log), print_traceback():
            outcome = run(folder, planned)
        encode(outcome)  # a result that is not JSON is a failure of the run
        ended = "done"
    except Exception as error:
        if _is_full(error):  # not a failure of the run
            write_lines(attempts, tried)
            raise OSError(str(error)) from None
        ended = "failed"
        lines = traceback.format_exc().splitlines()
        outcome = {"reason": f"{type(error).__name__}: {error}", "lines": lines[-8:]}
    except BaseException:  # an interruption is no failure either
        write_lines(attempts, tried)
        raise
    _end(folder, ended, outcome | {"seconds": round(time.monotonic() - began, 3)})


@contextmanager
def print_traceback() -> Iterator[None]:
    """Print the traceback of an exception in the block, and raise it on."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file of these lines."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _is_full(error: BaseException) -> bool:
    """Whether an error, of whatever library, says that the disk or the quota is full."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def work(root: str | Path, names: list[str], run: Run, driver: str | Path, cwd: str | Path) -> int:
    """A worker: attempt the planned runs until none is left or the driver has ended.

    It starts at a place of the list that depends on its process id, so that workers seldom meet.

    Args:
        root: of the ledger.
        names: of the runs.
        run: does one run.
        driver: a file that the driver holds locked.
        cwd: the driver's working directory.

    Returns:
        The exit code.
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
    root: str | Path,
    names: list[str],
    run: Run,
    start: Callable[[Callable[[], int]], Worker],
    count: int,
    *,
    progress: Callable[[States], None] = lambda states: None,
) -> States:
    """Keep so many workers at work until every run is done or failed, here or by another driver.

    A worker that dies is replaced, and its run is planned again. Ctrl-C interrupts all workers;
    they save their state.

    Args:
        root: of the ledger.
        names: of the runs.
        run: does one run.
        start: starts a worker, see executors.
        count: workers at once.
        progress: called with the states at each look.

    Returns:
        {name: state}.
    """
    root = Path(root)
    workers: list[Worker] = []
    ended: States = {}
    with NamedTemporaryFile(dir=root, prefix=".driver-") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        try:
            while True:
                began = time.monotonic()
                found = {name: state(root / name) for name in names if name not in ended}
                ended |= {name: was for name, was in found.items() if was in ENDED}
                progress(found | ended)
                # of the look; a run that this process does itself is not part of it
                took = time.monotonic() - began
                if found.keys() <= ended.keys():
                    return {name: ended[name] for name in names}
                check_exits(root, workers)
                workers = [worker for worker in workers if worker.is_alive()]
                planned = [name for name, was in found.items() if was == "planned"]
                call = partial(work, root, planned, run, alive.name, os.getcwd())
                for _ in range(min(count - len(workers), len(planned))):
                    workers.append(start(call))
                time.sleep(max(0.05, 2 * took))  # a large ledger is listed less often
        finally:
            stop(workers)


def stop(workers: list[Worker]) -> None:
    """Interrupt workers, and wait until they have saved their state."""
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    for worker in workers:
        worker.join()


def check_exits(root: Path, workers: Iterable[Worker]) -> None:
    """Raise an OSError if a worker ended because it could not work."""
    for worker in workers:
        code = worker.exitcode or 0
        if code > 0:
            why = WHY.get(code, "a worker could not work:")
            raise OSError(f"{root}: {why} {worker.reason}")


class Progress:
    """Prints the state of a study: each failed run once, and the counts every ten seconds at most.

    Args:
        root: of the ledger.
        say: prints a line.
    """

    def __init__(self, root: Path, say: Say) -> None:
        self.root = root
        self.say = say
        self.failed: set[str] = set()
        self.last: States = {}
        self.printed = -1e9

    def __call__(self, states: States) -> None:
        failed = {name for name, state in states.items() if state == "failed"}
        for name in sorted(failed - self.failed):
            failure = result(self.root / name)
            lines = "".join(f"\n    {line}" for line in failure["lines"][-4:])
            self.say(f"failed: {self.root / name}: {failure['reason']}{lines}")
        over = set(states.values()) <= {*ENDED}
        due = over or time.monotonic() - self.printed > 10
        if due and states != self.last:
            counts = Counter(states.values())
            shown = ", ".join(f"{counts[state]:,} {state}" for state in STATES)
            self.say(f"{self.root}: {len(states):,} runs; {shown}")
            self.last = states
            self.printed = time.monotonic()
        self.failed = failed


def _present(root: str | Path) -> set[str]:
    """The names of the files and folders in a ledger."""
    return set(os.listdir(root)) if os.path.isdir(root) else set()


def _name(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _content(folder: str | Path) -> bytes:
    """The bytes of job.json, if the folder is named after them."""
    path = f"{folder}/job.json"
    missing = FileNotFoundError
    nothing = f"{path}: expected a planned run, found none"
    with explained(nothing, missing, remedy=REMEDY, raised=missing), open(path, "rb") as file:
        content = file.read()
    if _name(content) != os.path.basename(folder):
        edited = f"{path} was edited: it is not the run that its folder is named after"
        raise ValueError(f"{edited}; delete the folder, or undo it")
    return content


def _lock(file: TextIO, how: int) -> bool:
    """Lock a file until it is closed, unless another process holds it. Returns whether it did."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked(path: str | Path) -> bool:
    with open(path, encoding="utf-8") as file:
        return not _lock(file, fcntl.LOCK_SH)


def _end(folder: Path, name: str, outcome: Json) -> None:
    kept = {"digest": encode([folder.name, outcome])[0], "result": outcome}
    write_json(folder / f"{name}.json", kept)
