"""Executors: a study is completed by Ray tasks, Slurm jobs and runs of several processes, whoever is killed."""

import json
import os
import signal
import threading
import time

import pytest

from decisionllm.scaling import executors
from tests.conftest import PATIENCE, command
from tests.test_scale import ONE, SMALL, listed

CONFIG = {"executor": "ray", "workers": 0, "processes": 1, "gpus": 0.0, "address": "", "slurm": {}}


def study(out, *words):
    """Two runs, of the sizes w16 and w32: {size: what came of it}, and the lines of `begun` of each."""
    assert command("scale", *SMALL, *ONE, "study.lr.rule=fixed", f"out={out}", *words) == 0
    runs = {run["size"]: run for run in json.loads((out / "study.json").read_text())["runs"]}
    return runs, {size: (out / run["run"] / "begun").read_text().splitlines() for size, run in runs.items()}


def kill_the_first(out, killed):
    """Kill -9 whoever begins a run first."""
    while not killed:
        for path in out.glob("*/begun"):
            if (words := path.read_text().split()) and not killed:
                os.kill(int(words[0]), signal.SIGKILL)
                killed.append(int(words[0]))
        time.sleep(0.01)


def test_a_study_on_ray_outlives_a_killed_worker_and_runs_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 2, "GPU": 1}))  # Ray counts it, nobody uses it
    killed, out = [], tmp_path / "out"
    with executors.opened(CONFIG | {"gpus": 0.5}) as (start, workers, _):  # a cluster that all of the rest is done in
        seen, broken = start(lambda: len(os.environ["CUDA_VISIBLE_DEVICES"])), start(lambda: 1 / 0)
        for worker in (seen, broken):
            worker.join()
            assert not worker.is_alive()
        assert (workers, seen.exitcode, broken.exitcode) == (2, 1, 1) and "ZeroDivisionError" in broken.reason
        with pytest.raises(ValueError, match="a run needs 2 GPUs and 1 cores, the cluster has 1 and 2"):
            executors.opened(CONFIG | {"gpus": 2.0}).__enter__()

        watch = threading.Thread(target=kill_the_first, args=(out, killed), daemon=True)
        watch.start()
        runs, begun = study(out, "executor=ray", "workers=1", "gpus=1")
        watch.join(PATIENCE)
    assert {run["state"] for run in runs.values()} == {"done"} and killed
    assert sorted(map(len, begun.values())) == [1, 2], "what was killed was not taken again, or the other was"
    assert killed[0] not in {int(lines[-1].split()[0]) for lines in begun.values()}


def test_a_study_is_done_by_jobs_of_submitit(tmp_path):
    runs, _ = study(tmp_path / "out", "executor=slurm", "+slurm.cluster=local", "workers=1")
    assert {run["state"] for run in runs.values()} == {"done"}
    assert len(list((tmp_path / "out" / "slurm").glob("*_result.pkl"))) == 1  # one job did both


def test_a_run_in_two_processes_has_the_loss_of_one_and_says_what_fails(tmp_path):
    """The batch of w32 cannot be dealt out to two."""
    odd = listed("axes.size.w32", "backbone.width=32 backbone.layers=1 backbone.inner=32 optim.batch_size=7")
    one, _ = study(tmp_path / "one", odd)
    two, _ = study(tmp_path / "two", odd, "processes=2")
    assert "2 x cpu" in (tmp_path / "two" / two["w16"]["run"] / "run-0.txt").read_text()
    assert two["w16"]["held_out"] == pytest.approx(one["w16"]["held_out"], rel=1e-4) and one["w16"]["run"] == two["w16"]["run"]
    assert two["w32"]["state"] == "failed" and "expected a multiple of 2 processes" in two["w32"]["reason"]
