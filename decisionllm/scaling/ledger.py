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

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from decisionllm.files import atomic, explain_errors, write_json
from decisionllm.schema import Json

ENDED = ("done", "failed")

STATES = ("planned", "running", *ENDED)

REMEDY = "delete the folder to make the run again"

States = dict[str, str]


def encode(job: object) -> tuple[str, bytes]:
    """(name, bytes) of a job of JSON values; the order of keys does not matter."""
    content = json.dumps(job, sort_keys=True).encode()
    return hash_name(content), content


def plan(root: str | Path, jobs: Iterable[object]) -> list[str]:
    """Make a folder for each job that has none.

    Returns:
        Their names, in order.

    Raises:
        ValueError: a folder was edited; none is made then.
    """
    root = Path(root)
    content_by_name = dict(map(encode, jobs))
    present = list_names(root)
    planned = {
        name
        for name in present.intersection(content_by_name)
        if (root / name / "job.json").exists()
    }
    for name in planned:
        read_job_bytes(root / name)
    root.mkdir(parents=True, exist_ok=True)
    for name in content_by_name.keys() - planned:
        with atomic(root / name / "job.json") as file:
            file.write_bytes(content_by_name[name])
    return list(content_by_name)


def read_state(folder: str | Path) -> str:
    """Return one of STATES. The folder is listed once, and the lock tried only if there is one."""
    files = set(os.listdir(folder))
    for name in ENDED:
        if f"{name}.json" in files:
            return name
    return "running" if "lock" in files and is_locked(Path(folder) / "lock") else "planned"


def status(root: str | Path, names: Iterable[str]) -> States:
    """Return {name: state}, planned where there is no folder yet.

    Raises:
        ValueError: a folder was edited.
    """
    present = list_names(root)
    for name in present.intersection(names):
        try:
            read_job_bytes(f"{root}/{name}")
        except FileNotFoundError:
            files = os.listdir(f"{root}/{name}")
            if any(not file.startswith(".") for file in files):
                raise
            # else `plan` was killed before it wrote
    return {name: read_state(f"{root}/{name}") if name in present else "planned" for name in names}


def load_job(folder: str | Path) -> Any:
    """Load the job of a run's folder."""
    return json.loads(read_job_bytes(folder))


def load_result(folder: str | Path) -> Json:
    """Load the result of a run that is done, or the reason and last lines of one that failed."""
    paths = [Path(folder) / f"{name}.json" for name in ENDED]
    path = next(path for path in paths if path.exists())
    with explain_errors(
        f"{path} was edited or is damaged", ValueError, KeyError, TypeError, fix=REMEDY
    ):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["digest"] != encode([Path(folder).name, record["result"]])[0]:
            raise ValueError("its content does not match its digest")
    return dict(record["result"])


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
        ours = try_lock(file, fcntl.LOCK_EX)
        if ours:
            # over NFS, files of another machine are seen at once only after a write to their folder
            os.utime(folder)
            ours = not any((folder / f"{name}.json").exists() for name in ENDED)
        yield ours


def list_names(root: str | Path) -> set[str]:
    """Return the names of the files and folders in a ledger."""
    return set(os.listdir(root)) if os.path.isdir(root) else set()


def hash_name(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def read_job_bytes(folder: str | Path) -> bytes:
    """Return the bytes of job.json, if the folder is named after them."""
    path = f"{folder}/job.json"
    not_found = FileNotFoundError
    with (
        explain_errors(
            f"{path}: expected a planned run, found none",
            not_found,
            fix=REMEDY,
            raised=not_found,
        ),
        open(path, "rb") as file,
    ):
        content = file.read()
    if hash_name(content) != os.path.basename(folder):
        raise ValueError(
            f"{path} was edited: it is not the run that its folder is named after; delete the "
            "folder, or undo it"
        )
    return content


def try_lock(file: TextIO, how: int) -> bool:
    """Lock a file until it is closed, unless another process holds it. Returns whether it did."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: str | Path) -> bool:
    with open(path, encoding="utf-8") as file:
        return not try_lock(file, fcntl.LOCK_SH)


def write_outcome(folder: Path, name: str, outcome: Json) -> None:
    record = {"digest": encode([folder.name, outcome])[0], "result": outcome}
    write_json(folder / f"{name}.json", record)
