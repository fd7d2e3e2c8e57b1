"""Rollouts inside training: the score is that of `evaluate`, and nothing of the training changes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decisionllm.eval.eval_callback import EvalCallback, first_stall, is_stalled
from tests.conftest import LOOP, NANO, command, interrupt, metrics

pytestmark = pytest.mark.slow
WATCHED = ("log.rollout_every=2", "log.rollout_episodes=5")
LORA = (*NANO, "backbone.tune=lora")


def weights(run):
    return load_file(run / "checkpoint" / "model.safetensors")


def test_a_run_is_stalled_where_the_loss_falls_and_no_score_is_higher():
    falling = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert not is_stalled(falling[:3], [7, 7, 7]), "three looks are too few"
    assert is_stalled(falling[:4], [7, 7, 6, 7])
    assert not is_stalled(falling[:4], [7, 6, 8, 7]), "a score was higher"
    assert not is_stalled([5, 6, 6, 6], [7, 7, 7, 7]), "the loss did not fall"
    assert is_stalled(falling, [7, 9, 8, 8, 8])
    assert first_stall(falling, [7, 9, 8, 8, 8]) == 5
    assert first_stall(falling, [7, 7, 7, 7, 7]) == 4
    assert first_stall(falling, [1, 2, 3, 4, 5]) == float("inf")


@pytest.mark.parametrize("model", [NANO, LORA], ids=" ".join)
def test_a_watched_run_is_trained_as_any_other_and_its_score_is_that_of_evaluate(model, tmp_path):
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    assert command("train", *LOOP, *model, f"run={plain}") == 0
    assert command("train", *LOOP, *model, *WATCHED, f"run={watched}") == 0
    same = {name: torch.equal(x, weights(watched)[name]) for name, x in weights(plain).items()}
    assert all(same.values()), same
    rows = metrics(watched)
    assert [row["step"] for row in rows if "score" in row] == [2, 4]
    assert [row["nll"] for row in rows] == [row["nll"] for row in metrics(plain)]
    evaluation = ("seed=0", "episodes=5", "baselines=false", "report=false")
    assert command("evaluate", f"run={watched}", *evaluation) == 0
    result = json.loads((tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    np.testing.assert_allclose(rows[-1]["score"], result["score"], atol=1e-3)


def test_a_watched_run_is_resumed_exactly(tmp_path, monkeypatch):
    words = ("train", *LOOP, *LORA, *WATCHED, "log.keep_best=score", "data.held_out=0.2")
    assert command(*words, f"run={tmp_path}/straight") == 0
    with monkeypatch.context() as patch:
        interrupt(patch, step=2)
        assert command(*words, f"run={tmp_path}/resumed") == 130
    assert command(*words, f"run={tmp_path}/resumed") == 0
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "resumed")
    best = "best/checkpoint/model.safetensors"
    assert (tmp_path / "straight" / best).read_bytes() == (tmp_path / "resumed" / best).read_bytes()


def test_the_weights_of_the_highest_score_are_kept(tmp_path, monkeypatch):
    scores = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr(EvalCallback, "look", lambda watch, model: {"score": next(scores)})
    options = ("log.rollout_every=1", "log.keep_best=score", "steps=3")
    assert command("train", *LOOP, *NANO, *options, f"run={tmp_path}/run") == 0
    trainer = tmp_path / "run/best/checkpoint/trainer.json"
    assert json.loads(trainer.read_text(encoding="utf-8"))["step"] == 2


def test_a_loss_that_falls_without_a_higher_score_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(EvalCallback, "look", lambda watch, model: {"score": 12.0})
    options = ("log.rollout_every=4", "log.every=4", "steps=24", "data.held_out=0", "optim.lr=3e-3")
    assert command("train", *LOOP, *NANO, *options, f"run={tmp_path}/run") == 0
    losses = [row["nll"] for row in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0], "or this test says nothing"
    output = capsys.readouterr().out
    assert output.count("warning: in the last 3 rollouts the loss fell") == 1
    assert "the score did not rise above 12.0" in output


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("log.rollout_every=1", "env=none"),
            "env: expected an environment, which log.rollout_every=1 rolls",
        ),
        (
            ("log.rollout_every=1", "team.execution=joint"),
            "env: expected groups of agents, since team.execution=joint and log.rollout_every=1",
        ),
    ],
)
def test_what_cannot_be_watched_is_refused_before_a_run_begins(words, message, tmp_path, capsys):
    assert command("train", *LOOP, *NANO, *words, f"run={tmp_path}/run") != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
