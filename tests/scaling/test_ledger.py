"""The ledger: every run is done once, even if processes are killed or two drivers share it; edited
folders are refused.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest

from decisionllm import executors
from decisionllm.scaling import ledger, workers
from tests.conftest import PATIENCE
from tests.scaling.spawned import (
    book,
    die,
    driver,
    end_slowly,
    fail,
    fill,
    held,
    hold,
    jobs,
    note,
    overflow,
)

pytestmark = pytest.mark.slow

SPAWN = multiprocessing.get_context("spawn")
with executors.inline({}) as (start, count, _):
    INLINE = start, count


def until(condition, timeout=PATIENCE):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout
        time.sleep(0.02)


def test_a_run_has_a_folder_a_state_and_a_result(tmp_path):
    names = ledger.plan(tmp_path, jobs(3))
    assert names == ledger.plan(tmp_path, jobs(3)) and len(set(names)) == 3
    # the order of keys does not matter
    assert ledger.plan(tmp_path, [{"power": 2, "i": 1}]) == [names[1]]
    assert set(ledger.status(tmp_path, names).values()) == {"planned"}
    with ledger.claim(tmp_path / names[0]) as ours:
        assert ours and ledger.read_state(tmp_path / names[0]) == "running"
        assert not workers.attempt(tmp_path / names[0], note)
    assert workers.attempt(tmp_path / names[1], lambda folder, job: {"square": job["i"] ** 2})
    assert not workers.attempt(tmp_path / names[1], note)
    assert list(ledger.status(tmp_path, names).values()) == ["planned", "done", "planned"]
    assert ledger.load_result(tmp_path / names[1])["square"] == 1


def test_a_failed_run_keeps_its_reason_until_it_is_retried(tmp_path):
    names = ledger.plan(tmp_path, jobs(2))
    assert workers.attempt(tmp_path / names[1], fail)
    failure = ledger.load_result(tmp_path / names[1])
    assert failure["reason"] == "ValueError: run 1 is unlucky" and "unlucky" in failure["lines"][-1]
    log = (tmp_path / names[1] / "log.txt").read_text(encoding="utf-8")
    assert log.startswith("it went well so far\nTraceback")
    assert log.endswith("\nValueError: run 1 is unlucky\n")
    assert not workers.attempt(tmp_path / names[1], fail)  # it is not retried by itself
    assert ledger.retry(tmp_path, names) == [names[1]]
    assert list(ledger.status(tmp_path, names).values()) == ["planned", "planned"]


def test_a_result_that_json_cannot_hold_is_a_failure(tmp_path):
    (name,) = ledger.plan(tmp_path, jobs(1))
    assert workers.attempt(tmp_path / name, lambda folder, job: {"loss": {1, 2}})
    assert "not JSON serializable" in ledger.load_result(tmp_path / name)["reason"]


def test_a_folder_without_a_job_yet_is_planned(tmp_path):
    name, _ = ledger.encode(jobs(1)[0])
    (tmp_path / name).mkdir()
    (tmp_path / name / ".partial-123-job.json").touch()
    assert ledger.status(tmp_path, [name]) == {name: "planned"}
    (tmp_path / name / "done.json").touch()
    with pytest.raises(FileNotFoundError, match="expected a planned run, found none"):
        ledger.status(tmp_path, [name])


def test_an_edited_folder_is_refused_and_nothing_is_written(tmp_path):
    names = ledger.plan(tmp_path, jobs(2))
    workers.attempt(tmp_path / names[0], lambda folder, job: {"loss": 1.0})
    done = tmp_path / names[0] / "done.json"
    done.write_text(done.read_text(encoding="utf-8").replace("1.0", "0.5"), encoding="utf-8")
    with pytest.raises(ValueError, match="done.json was edited or is damaged"):
        ledger.load_result(tmp_path / names[0])
    path = tmp_path / names[1] / "job.json"
    path.write_text(json.dumps({"i": 7}), encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    for call in (lambda: ledger.plan(tmp_path, jobs(5)), lambda: ledger.status(tmp_path, names)):
        with pytest.raises(
            ValueError,
            match="job.json was edited: it is not the run that its folder is named after",
        ):
            call()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_killed_driver_and_worker_lose_and_repeat_nothing(tmp_path):
    root = tmp_path / "study"
    hold(root, 30)
    first = SPAWN.Process(target=driver, args=(root, 60, 2, held))
    first.start()
    until(lambda: len(book(root)) >= 10)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    names = ledger.plan(root, jobs(60))
    hold(root, 60)
    # its workers finish their runs, then end
    until(lambda: "running" not in ledger.status(root, names).values())
    assert 10 <= len(book(root)) < 60
    hold(root, len(book(root)) + 5)
    killed = []

    def kill_one(states):
        if killed or len(book(root)) < int((root.parent / "hold").read_text(encoding="utf-8")):
            return
        begun = [root / name / "begun" for name, state in states.items() if state == "running"]
        for words in (path.read_text(encoding="utf-8").split() for path in begun if path.exists()):
            if words and not killed:
                killed.append(int(words[0]))
                os.kill(killed[0], signal.SIGKILL)
                hold(root, 61)

    assert set(
        workers.drive(root, names, held, executors.start_process, 2, progress=kill_one).values()
    ) == {"done"}
    assert killed and set(book(root)) == set(range(60))
    begun = sum(
        len((root / name / "begun").read_text(encoding="utf-8").splitlines()) for name in names
    )
    assert begun <= 61, "only the run of the killed worker was begun again"


def test_two_drivers_never_run_one_twice(tmp_path):
    root = tmp_path / "study"
    drivers = [SPAWN.Process(target=driver, args=(root, 200, 2)) for _ in range(2)]
    for process in drivers:
        process.start()
    for process in drivers:
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert book(root) == list(range(200))


def test_a_run_that_kills_its_workers_has_failed(tmp_path):
    names = ledger.plan(tmp_path, jobs(1))
    assert workers.drive(tmp_path, names, die, executors.start_process, 1) == {names[0]: "failed"}
    assert "its worker died 3 times" in ledger.load_result(tmp_path / names[0])["reason"]


def test_runs_of_this_process_are_not_slept_after(tmp_path, monkeypatch):
    clock, slept = [0.0], []
    monkeypatch.setattr(
        workers,
        "time",
        SimpleNamespace(time=time.time, monotonic=lambda: clock[0], sleep=slept.append),
    )

    def long(folder, job):
        clock[0] += 3600
        return {}

    names = ledger.plan(tmp_path, jobs(2))
    assert set(workers.drive(tmp_path, names, long, *INLINE).values()) == {"done"}
    assert clock[0] == 7200 and max(slept) < 1


def test_a_ledger_that_cannot_be_written_stops_the_driver(tmp_path, capfd):
    names = ledger.plan(tmp_path, jobs(1))
    with pytest.raises(OSError, match="a worker could not write there"):
        workers.drive(tmp_path, names, fill, executors.start_process, 1)
    assert (
        "Too many open files" in capfd.readouterr().err
        and ledger.read_state(tmp_path / names[0]) == "planned"
    )
    assert workers.drive(tmp_path, names, note, *INLINE) == {names[0]: "done"}


def test_a_full_disk_leaves_the_run_planned(tmp_path, capfd):
    names = ledger.plan(tmp_path, jobs(3))
    with pytest.raises(OSError, match=r"disk full\?\); make room, then the same command goes on"):
        workers.drive(tmp_path, names, overflow, *INLINE)
    assert (
        set(ledger.status(tmp_path, names).values()) == {"planned"}
        and "No space left on device" in capfd.readouterr().err
    )
    assert not any(
        (tmp_path / name / "begun").read_text(encoding="utf-8")
        for name in names
        if (tmp_path / name / "begun").exists()
    )


def stranger(call):
    """Start a worker that finds another file at the driver's path, as on a file system that shares
    no locks.
    """
    root, names, run, driver, cwd = call.args
    shutil.copy(driver, other := f"{driver}-copy")
    return INLINE[0](partial(workers.work, root, names, run, other, cwd))


def test_a_worker_without_shared_locks_does_nothing(tmp_path):
    names = ledger.plan(root := tmp_path / "study", jobs(2))
    with pytest.raises(OSError, match="does not see the locks of this machine"):
        workers.drive(root, names, note, stranger, 1)
    assert not book(root) and set(ledger.status(root, names).values()) == {"planned"}


def test_a_worker_that_cannot_start_is_an_error(tmp_path, capfd):
    names = ledger.plan(tmp_path, jobs(1))
    with pytest.raises(OSError, match="a worker could not work"):
        workers.drive(
            tmp_path,
            names,
            note,
            lambda call: executors.start_process(partial(workers.work, "too few")),
            1,
        )
    assert "missing 4 required positional arguments" in capfd.readouterr().err


def test_a_worker_that_is_interrupted_when_it_ends_says_nothing(tmp_path, capfd):
    worker = executors.start_process(partial(end_slowly, tmp_path))
    worker.join()
    assert (tmp_path / "ends").exists() and worker.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_ends_with_its_driver(tmp_path):
    """It finishes its run and takes no other."""
    names = ledger.plan(tmp_path / "study", jobs(3))
    alive = tmp_path / "alive"
    with alive.open("w", encoding="utf-8") as driver:
        fcntl.flock(driver, fcntl.LOCK_EX)

        def run(folder, job):
            fcntl.flock(driver, fcntl.LOCK_UN)
            return note(folder, job)

        assert workers.work(tmp_path / "study", names, run, alive, tmp_path) == 0
    assert len(book(tmp_path / "study")) == 1


def test_an_interruption_does_not_count_as_an_attempt(tmp_path):
    def interrupted(folder, job):
        raise KeyboardInterrupt

    names = ledger.plan(tmp_path, jobs(1))
    for _ in range(workers.ATTEMPTS + 1):
        with pytest.raises(KeyboardInterrupt, match="0 of 1 runs over.*same command"):
            workers.drive(tmp_path, names, interrupted, *INLINE)
    assert workers.drive(tmp_path, names, note, *INLINE) == {names[0]: "done"}
    assert [path.name for path in tmp_path.glob(".driver*")] == []


def test_a_driver_waits_for_the_runs_of_another(tmp_path):
    names, seen = ledger.plan(tmp_path, jobs(2)), []
    with ledger.claim(tmp_path / names[0]):

        def look(states):
            seen.append(states[names[0]])
            if len(seen) > 20:
                raise TimeoutError

        with pytest.raises(TimeoutError):
            workers.drive(tmp_path, names, note, executors.start_process, 1, progress=look)
    assert set(seen) == {"running"}
