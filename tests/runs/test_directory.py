"""A run directory says what made the run."""

import json

import pytest

import decisionllm
from decisionllm import choice
from decisionllm.runs.directory import FORMAT, convert_node, convert_texts
from tests.conftest import LOOP, NANO, command

pytestmark = pytest.mark.slow


def read_info(run):
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def made_by(run):
    return read_info(run)["made_by"]


def test_a_run_on_one_dataset_is_described_as_one_of_several(tmp_path):
    assert command("train", *LOOP, *NANO, "steps=1", f"run={tmp_path}/run") == 0
    info = read_info(tmp_path / "run")
    ((name, data),) = info["embodiments"].items()
    assert name == "data" and data["dataset"]["name"] == "synthetic" and data["targets"]
    assert info["fingerprint"] == data["fingerprint"] and info["parts"] == {}


def test_text_none_of_format_4_is_auto_and_task_from_none_is_text_none():
    target = "decisionllm.datasets.arrays.load"
    log = {"_target_": target, "text": "none", "task_from": ""}
    world = {"_target_": "mylab.World", "text": "none"}
    config, info = convert_texts(
        {"text": "none", "dataset": log, "env": world},
        {"format": 4, "parts": {"few": {"env": log | {"task_from": "info.task"}}}},
    )
    assert config == {"text": "auto", "dataset": {"_target_": target, "text": "auto"}, "env": world}
    env = {"_target_": target, "text": "auto", "task_from": "info.task"}
    assert info == {"format": FORMAT, "parts": {"few": {"env": env}}}
    assert convert_node(log | {"task_from": "none"}) == {"_target_": target, "text": "none"}


def test_a_run_records_the_command_line_that_made_it(tmp_path):
    words = [*LOOP, *NANO, "steps=1", f"run={tmp_path}/run"]
    assert command("train", *words) == 0
    record = made_by(tmp_path / "run")
    assert (record["command"], record["overrides"]) == ("train", words)
    assert record["choices"]["dataset"] == "synthetic" and record["choices"]["backbone"] == "nano"
    assert "experiment" not in record["choices"]
    assert command("train", *words, "device=auto") == 0
    assert made_by(tmp_path / "run")["overrides"] == words, "a continued run keeps what began it"


def test_each_run_of_a_sweep_records_its_own_words(tmp_path):
    words = (*LOOP, *NANO, "seed=0,1", "steps=1", f"hydra.sweep.dir={tmp_path}")
    words = [word for word in words if word != "seed=7"]
    assert command("train", "--multirun", *words, f"run='{tmp_path}/${{seed}}'") == 0
    for seed in (0, 1):
        record = made_by(tmp_path / str(seed))
        assert record["command"] == "train" and f"seed={seed}" in record["overrides"]


def test_a_run_made_from_python_records_no_command_line(tmp_path):
    # nor one that was printed before, whose config Hydra leaves behind
    assert command("train", "--cfg", "job", "dataset=synthetic") == 0
    options = {
        "dataset": choice("dataset", "synthetic", episodes=4),
        "backbone": choice("backbone", "nano", width=32, layers=1, inner=32),
        "head": choice("head", "gaussian"),
        "run": str(tmp_path / "run"),
        "steps": 1,
        "log": {"tracker": "none"},
    }
    decisionllm.train(options)
    assert made_by(tmp_path / "run") == {}
