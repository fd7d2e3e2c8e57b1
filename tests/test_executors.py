"""Executors: Ray tasks, Slurm jobs and runs of several processes complete a study, even if a worker
is killed.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from decisionllm import executors
from decisionllm.bidding.logs.auctionnet import read, write
from decisionllm.files import MAP_FILES
from tests.conftest import PATIENCE, command
from tests.scaling.test_scale import ONE, SMALL, listed

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parent / "fixtures" / "auctionnet"
CONFIG = {"executor": "ray", "workers": 0, "processes": 1, "gpus": 0.0, "address": "", "slurm": {}}


def study(out, *words):
    """Two runs, of the sizes w16 and w32: {size: row}, and {size: lines of `begun`}."""
    assert command("scale", *SMALL, *ONE, "study.lr.rule=fixed", f"out={out}", *words) == 0
    runs = {
        run["size"]: run
        for run in json.loads((out / "study.json").read_text(encoding="utf-8"))["runs"]
    }
    return runs, {
        size: (out / run["run"] / "begun").read_text(encoding="utf-8").splitlines()
        for size, run in runs.items()
    }


def kill_the_first(out, killed):
    """Kill -9 the worker that begins the first run."""
    while not killed:
        for path in out.glob("*/begun"):
            if (words := path.read_text(encoding="utf-8").split()) and not killed:
                os.kill(int(words[0]), signal.SIGKILL)
                killed.append(int(words[0]))
        time.sleep(0.01)


@pytest.fixture(scope="module")
def cluster():
    """One for all tests: Ray takes long to start, and a second time in one process it may not."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray counts it, no run uses it
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 2, "GPU": 1}))
        with executors.ray_cluster(""):
            yield


def test_ray_survives_a_killed_worker_and_shares_a_gpu(tmp_path, cluster):
    killed, out = [], tmp_path / "out"
    with executors.build_executor(CONFIG | {"gpus": 0.5}) as (start, workers, _):
        devices = start(lambda: len(os.environ["CUDA_VISIBLE_DEVICES"]))
        broken = start(lambda: 1 / 0)
        for worker in (devices, broken):
            worker.join()
            assert not worker.is_alive()
        assert (workers, devices.exitcode, broken.exitcode) == (
            2,
            1,
            1,
        ) and "ZeroDivisionError" in broken.reason
        with pytest.raises(
            ValueError, match="a run needs 2 GPUs and 1 cores, the cluster has 1 and 2"
        ):
            executors.build_executor(CONFIG | {"gpus": 2.0}).__enter__()

        watch = threading.Thread(target=kill_the_first, args=(out, killed), daemon=True)
        watch.start()
        runs, begun = study(out, "executor=ray", "workers=1", "gpus=1")
        watch.join(PATIENCE)
    assert {run["state"] for run in runs.values()} == {"done"} and killed
    assert sorted(map(len, begun.values())) == [1, 2], "the killed run alone is attempted twice"
    assert killed[0] not in {int(lines[-1].split()[0]) for lines in begun.values()}


def test_ray_reads_the_files_of_a_log(tmp_path, cluster):
    days = read(FIXTURES / "trajectories_periods_7_8.csv.gz")
    for period in (7, 8):
        write(tmp_path / f"log_{period}.csv.gz", days.rows(np.flatnonzero(days.period == period)))
    sources, pids = {}, []
    for executor in ("inline", "ray"):
        with executors.use_file_executor({"executor": executor, "address": ""}):
            sources[executor] = read(tmp_path / "log_*.csv.gz")
            pids.append({*MAP_FILES.get()(lambda file: os.getpid(), [Path("a"), Path("b")])})
            if executor == "ray":
                (tmp_path / "log_9.csv.gz").write_bytes(b"broken")
                with pytest.raises(ValueError, match="log_9.csv.gz"):
                    read(tmp_path / "log_*.csv.gz")
    for name, column in vars(sources["inline"]).items():
        np.testing.assert_array_equal(column, vars(sources["ray"])[name], err_msg=name)
    assert pids[0] == {os.getpid()} and os.getpid() not in pids[1] and MAP_FILES.get() is map
    with pytest.raises(ValueError, match="executor: expected one of inline, ray, got 'slurm'"):
        executors.use_file_executor({"executor": "slurm"}).__enter__()


def test_a_failed_job_of_submitit_gives_its_reason(tmp_path):
    config = {
        "executor": "slurm",
        "workers": 1,
        "slurm": {"cluster": "local"},
        "out": str(tmp_path),
    }
    with executors.build_executor(CONFIG | config) as (start, _, _):
        broken = start(lambda: 1 / 0)
        killed = start(lambda: os.kill(os.getpid(), signal.SIGKILL))
        for worker in (broken, killed):
            worker.join()
        assert (
            broken.exitcode == 1 and "ZeroDivisionError" in broken.reason and killed.exitcode == -1
        )


def test_a_study_is_done_by_jobs_of_submitit(tmp_path):
    runs, _ = study(tmp_path / "out", "executor=slurm", "+slurm.cluster=local", "workers=1")
    assert {run["state"] for run in runs.values()} == {"done"}
    assert len(list((tmp_path / "out" / "slurm").glob("*_result.pkl"))) == 1  # one job did both


def test_a_run_in_two_processes_has_the_loss_of_one(tmp_path):
    """The batch of w32 is odd and fails in two."""
    odd = listed(
        "axes.size.w32", "backbone.width=32 backbone.layers=1 backbone.inner=32 optim.batch_size=7"
    )
    one, _ = study(tmp_path / "one", odd)
    two, _ = study(tmp_path / "two", odd, "processes=2")
    assert "2 x cpu" in (tmp_path / "two" / two["w16"]["run"] / "run-0.txt").read_text(
        encoding="utf-8"
    )
    assert (
        two["w16"]["held_out"] == pytest.approx(one["w16"]["held_out"], rel=1e-4)
        and one["w16"]["run"] == two["w16"]["run"]
    )
    assert (
        two["w32"]["state"] == "failed"
        and "expected a multiple of 2 processes" in two["w32"]["reason"]
    )
