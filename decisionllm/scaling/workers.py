"""Workers that share the runs of a ledger, and the driver that starts them."""

import errno
import fcntl
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
from typing import Any

from decisionllm.executors import Worker
from decisionllm.scaling.ledger import (
    ENDED,
    STATES,
    States,
    claim,
    encode,
    is_locked,
    load_job,
    load_result,
    read_state,
    write_outcome,
)
from decisionllm.schema import Json

ATTEMPTS = 3  # a run whose workers were killed so often is failed
CANNOT_WRITE, NO_LOCKS = 3, 4  # exit codes of workers
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
    earlier_attempts = (
        attempts.read_text(encoding="utf-8").splitlines() if attempts.exists() else []
    )
    if len(earlier_attempts) >= ATTEMPTS:
        lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
        reason = (
            f"its worker died {len(earlier_attempts)} times without an error message (killed, or "
            "out of memory?)"
        )
        write_outcome(folder, "failed", {"reason": reason, "lines": lines[-8:]})
        return
    planned = load_job(folder)
    this_attempt = f"{os.getpid()} {time.time():.0f} {socket.gethostname()}"
    write_lines(attempts, [*earlier_attempts, this_attempt])
    began = time.monotonic()
    try:
        log = (folder / "log.txt").open("a", buffering=1, encoding="utf-8")
        with log, redirect_stdout(log), redirect_stderr(log), print_traceback():
            outcome = run(folder, planned)
        encode(outcome)  # a result that is not JSON is a failure of the run
        ended = "done"
    except Exception as error:
        if _is_full(error):  # not a failure of the run
            write_lines(attempts, earlier_attempts)
            raise OSError(str(error)) from None
        ended = "failed"
        lines = traceback.format_exc().splitlines()
        outcome = {"reason": f"{type(error).__name__}: {error}", "lines": lines[-8:]}
    except BaseException:  # an interruption is no failure either
        write_lines(attempts, earlier_attempts)
        raise
    write_outcome(folder, ended, outcome | {"seconds": round(time.monotonic() - began, 3)})


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
    """Return whether an error of any library says that the disk or the quota is full."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def work(root: str | Path, names: list[str], run: Run, driver: str | Path, cwd: str | Path) -> int:
    """Attempt the planned runs, as a worker, until none is left or the driver has ended.

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
        if not is_locked(driver):
            return NO_LOCKS
        for name in [*names[first:], *names[:first]]:
            if not is_locked(driver):
                break
            if read_state(Path(root) / name) == "planned":
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
    """Keep `count` workers at work until every run is done or failed, here or by another driver.

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

    Raises:
        KeyboardInterrupt: all workers have saved their state and ended.
        OSError: a worker could not work.
    """
    root = Path(root)
    workers: list[Worker] = []
    ended: States = {}
    with NamedTemporaryFile(dir=root, prefix=".driver-") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        try:
            while True:
                began = time.monotonic()
                states = {name: read_state(root / name) for name in names if name not in ended}
                ended |= {name: was for name, was in states.items() if was in ENDED}
                progress(states | ended)
                # of the look; a run that this process does itself is not part of it
                seconds = time.monotonic() - began
                if states.keys() <= ended.keys():
                    return {name: ended[name] for name in names}
                check_exits(root, workers)
                workers = [worker for worker in workers if worker.is_alive()]
                planned = [name for name, was in states.items() if was == "planned"]
                call = partial(work, root, planned, run, alive.name, os.getcwd())
                for _ in range(min(count - len(workers), len(planned))):
                    workers.append(start(call))
                time.sleep(max(0.05, 2 * seconds))  # a large ledger is listed less often
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(
                f"stopped with {len(ended)} of {len(names)} runs over; those that were begun are "
                "saved, and the same command continues them"
            ) from error
        finally:
            stop_workers(workers)


def stop_workers(workers: list[Worker]) -> None:
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
            failure = load_result(self.root / name)
            lines = "".join(f"\n    {line}" for line in failure["lines"][-4:])
            self.say(f"failed: {self.root / name}: {failure['reason']}{lines}")
        all_ended = set(states.values()) <= {*ENDED}
        due = all_ended or time.monotonic() - self.printed > 10
        if due and states != self.last:
            counts = Counter(states.values())
            counted = ", ".join(f"{counts[state]:,} {state}" for state in STATES)
            self.say(f"{self.root}: {len(states):,} runs; {counted}")
            self.last = states
            self.printed = time.monotonic()
        self.failed = failed
