"""What the processes of tests/scaling/test_ledger.py run. Each of them imports this file, which
imports no torch: that would take them seconds.
"""

import os
import resource
import signal
import time
from multiprocessing.util import Finalize
from pathlib import Path

from decisionllm import executors
from decisionllm.scaling import ledger, workers


def note(folder, job):
    """A short run that adds its number to a file that all runs share."""
    with (folder.parent.parent / "book").open("a", encoding="utf-8") as book:
        book.write(f"{job['i']}\n")
    return {"square": job["i"] ** job["power"]}


def held(folder, job):
    """The same, but only while the book has fewer lines than the file `hold` says."""
    root = folder.parent
    while len(book(root)) >= int((root.parent / "hold").read_text(encoding="utf-8")):
        time.sleep(0.01)
    return note(folder, job)


def hold(root, lines):
    """Let runs of `held` go on until the book has about so many lines; replaced at once, since they
    read it at any time.
    """
    partial = root.parent / "hold-next"
    partial.write_text(str(lines), encoding="utf-8")
    partial.rename(root.parent / "hold")


def fail(folder, job):
    print("it went well so far")
    raise ValueError(f"run {job['i']} is unlucky")


def die(folder, job):
    os.kill(os.getpid(), signal.SIGKILL)


def fill(folder, job):
    """Leave this process no file to open, so that the result cannot be written, as on a
    full disk.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return {}


def overflow(folder, job):
    with open("/dev/full", "w", encoding="utf-8") as file:
        file.write("a checkpoint")


def jobs(n):
    return [{"i": i, "power": 2} for i in range(n)]


def book(root):
    path = Path(root).parent / "book"
    return (
        sorted(int(line) for line in path.read_text(encoding="utf-8").splitlines())
        if path.exists()
        else []
    )


def driver(root, n, count, run=note):
    workers.drive(root, ledger.plan(root, jobs(n)), run, executors.start_process, count)


def end_slowly(folder):
    """Return at once, in a process that takes a moment to end and then is interrupted."""

    def interrupt_self():
        (folder / "ends").touch()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    Finalize(None, interrupt_self, exitpriority=1)
    return 0
