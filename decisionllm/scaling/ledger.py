"""A ledger of runs: one folder each, named by the hash of what is to be done, so that whoever comes does only what is missing.

runs/studies/x/<hash>/
  job.json       what is to be done; its bytes hash to the folder's name, so that an edit shows
  lock           locked by the process that works on it; the kernel lets go of it when that process ends, however it ends
  begun          a line an attempt
  done.json      what came of it; or failed.json, why nothing did
  log.txt        what was printed on the way

planned: neither done nor failed, and nobody holds the lock. Whatever a killed worker leaves behind is therefore planned again.
"""

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

STATES = ("planned", "running", "done", "failed")
ATTEMPTS = 3  # a run whose worker died so often without a word is not tried again
FULL, BLIND = 3, 4  # exit codes of workers
WHY = {
    FULL: "a worker could not write there (disk full?); make room, and the same command goes on",
    BLIND: "a worker does not see the locks of this machine; the file system must share them (NFS: without local_lock; Lustre: with flock)",
}


def encode(job):
    """(name, bytes) of a job, which is what JSON can hold: the same job has the same name, in whatever order it is written."""
    content = json.dumps(job, sort_keys=True).encode()
    return _name(content), content


def plan(root, jobs):
    """Make a folder for each job that has none. Returns their names, in order; a folder that was edited is an error, first of all."""
    root, wanted = Path(root), dict(map(encode, jobs))
    there = wanted.keys() & set(os.listdir(root)) if root.is_dir() else set()
    begun = {name for name in there if (root / name / "job.json").exists()}
    for name in begun:
        _content(root / name)
    root.mkdir(parents=True, exist_ok=True)
    for name in wanted.keys() - begun:
        (root / name).mkdir(exist_ok=True)
        _put(root / name / "job.json", wanted[name])
    return list(wanted)


def state(folder):
    """One of STATES. A run is looked at in one listing; only where somebody began is the lock tried."""
    found = set(os.listdir(folder))
    for name in ("done", "failed"):
        if f"{name}.json" in found:
            return name
    return "running" if "lock" in found and _locked(Path(folder) / "lock") else "planned"


def status(root, names):
    """{name: state}, planned where there is no folder yet; a folder that was edited by hand is an error."""
    there = set(os.listdir(root)) if os.path.isdir(root) else set()
    for name in there.intersection(names):
        try:
            _content(f"{root}/{name}")
        except FileNotFoundError:
            if any(not file.startswith(".") for file in os.listdir(f"{root}/{name}")):  # if not, who made it was killed then
                raise
    return {name: state(f"{root}/{name}") if name in there else "planned" for name in names}


def job(folder):
    """What is to be done in a folder."""
    return json.loads(_content(folder))


def result(folder):
    """What came of a run that is done, or why it failed: a dict."""
    path = next(path for name in ("done", "failed") if (path := Path(folder) / f"{name}.json").exists())
    try:
        kept = json.loads(path.read_text())
        if kept["digest"] != encode([Path(folder).name, kept["result"]])[0]:
            raise ValueError("its content is not what its digest says")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was edited or is damaged ({error}): delete the folder, and the run is made again") from error
    return kept["result"]


def retry(root, names):
    """Make failed runs planned again. Returns their names."""
    failed = [name for name, was in status(root, names).items() if was == "failed"]
    for name in failed:
        for file in ("failed.json", "begun"):
            (Path(root) / name / file).unlink(missing_ok=True)
    return failed


@contextmanager
def claim(folder):
    """Holds a run while it is worked on: true if it is ours, false if it is somebody's, done or failed."""
    with (Path(folder) / "lock").open("w") as file:
        for patience in (0.005, 0.02, 0):  # somebody may only have looked
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(patience)
            else:
                os.utime(folder)  # over NFS, what another machine wrote in a folder is seen at once only after writing to it
                yield not any((Path(folder) / f"{name}.json").exists() for name in ("done", "failed"))
                return
        yield False


def attempt(folder, run):
    """Work on one run, if nobody else does: run(folder, job) -> result, a dict for JSON. Whether it was ours.

    An exception makes it failed, with the exception's last lines; an interruption and a full disk leave it planned.
    """
    folder = Path(folder)
    with claim(folder) as ours:
        if not ours:
            return False
        begun = folder / "begun"
        tried = begun.read_text().splitlines() if begun.exists() else []
        if len(tried) >= ATTEMPTS:
            reason = f"its worker died {len(tried)} times and left no word (killed, or out of memory?)"
            _end(folder, "failed", {"reason": reason, "lines": (folder / "log.txt").read_text().splitlines()[-8:]})
            return True
        work = job(folder)
        begun.write_text("".join(f"{line}\n" for line in [*tried, f"{os.getpid()} {time.time():.0f} {socket.gethostname()}"]))
        began = time.monotonic()
        try:
            with (folder / "log.txt").open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
                ended, outcome = "done", run(folder, work)
            encode(outcome)  # what JSON cannot hold is the run's mistake
        except BaseException as error:
            full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
            if full or not isinstance(error, Exception):  # not the run's mistake
                begun.write_text("".join(f"{line}\n" for line in tried))
                raise (OSError(str(error)) if full else error) from None
            lines = traceback.format_exc().splitlines()
            ended, outcome = "failed", {"reason": f"{type(error).__name__}: {error}", "lines": lines[-8:]}
        _end(folder, ended, outcome | {"seconds": round(time.monotonic() - began, 3)})
        return True


def work(root, names, run, driver, cwd):
    """A worker: take what is planned until nothing is, or until the driver is gone. -> its exit code

    It begins anywhere, out of others' way. driver: a file that the driver holds locked; cwd: the folder that it works in.
    """
    os.chdir(cwd)
    at = os.getpid() * 7919 % len(names)
    try:
        if not _locked(driver):
            return BLIND
        for name in [*names[at:], *names[:at]]:
            if not _locked(driver):
                break
            if state(Path(root) / name) == "planned":
                attempt(Path(root) / name, run)
    except OSError:
        traceback.print_exc()
        return FULL
    return 0


def drive(root, names, run, start, workers, *, progress=lambda states: None, poll=0.05):
    """So many workers at once, until every run is done or failed, by us or by another driver. -> {name: state}

    start(call) starts a worker (see executors). One that dies is replaced; what it worked on is planned again. Ctrl-C stops them
    all, and they save where they are.
    """
    root, crew, open_, ended = Path(root), [], list(names), {}
    with NamedTemporaryFile(dir=root, prefix=".driver-") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        try:
            while True:
                began = time.monotonic()
                found = {name: state(root / name) for name in open_}
                ended |= {name: was for name, was in found.items() if was in ("done", "failed")}
                open_ = [name for name in open_ if name not in ended]
                progress(found | ended)
                if not open_:
                    return {name: ended[name] for name in names}
                for worker in (worker for worker in crew if (worker.exitcode or 0) > 0):
                    why = WHY.get(worker.exitcode, "a worker could not work:") + " " + getattr(worker, "reason", "")
                    raise OSError(f"{root}: {why}")
                crew = [worker for worker in crew if worker.is_alive()]
                planned = [name for name in open_ if found[name] == "planned"]
                for _ in range(min(workers - len(crew), len(planned))):
                    crew.append(start(partial(work, root, planned, run, alive.name, os.getcwd())))
                time.sleep(max(poll, 2 * (time.monotonic() - began)))  # many runs are looked at less often
        finally:
            for worker in (worker for worker in crew if worker.is_alive()):
                worker.terminate()
            for worker in crew:
                worker.join()


def _name(content):
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _content(folder):
    """The bytes of job.json, if they are those that the folder is named after."""
    path = f"{folder}/job.json"
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: expected a planned run, found none; delete the folder, and it is made again"
        ) from error
    if _name(content) != os.path.basename(folder):
        raise ValueError(f"{path} was edited: it is not the run that its folder is named after; delete the folder, or undo it")
    return content


def _locked(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _end(folder, name, outcome):
    kept = {"digest": encode([folder.name, outcome])[0], "result": outcome}
    _put(folder / f"{name}.json", json.dumps(kept, indent=1).encode())


def _put(path, content):
    """All or nothing, whoever else writes the same."""
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
