"""Online fine-tuning: what was played is appended, a killed command continues, a round that loses its guard is undone."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import online
from decisionllm import finetune as module
from decisionllm.datasets.store import open_store, prefix
from decisionllm.finetune import Exploring, finetune, play
from decisionllm.policy import checkpoint
from decisionllm.policy.session import Session
from decisionllm.schema import Spec
from decisionllm.train import train
from tests.conftest import make_policy, near

pytestmark = pytest.mark.numeric
FEW = (
    "--opportunities", "200", "--moved", "0", "--days", "1", "--positions", "1", "--logged", "0-0", "--steps", "4",
    "--test", "41-42", "--rounds", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the benchmark with one campaign a day: an offline run, and one round."""
    path = tmp_path_factory.mktemp("online")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["online", "--folder", str(path), "--out", str(path / "rows.jsonl"), *FEW])
        online.main()
    return path


@pytest.fixture
def options(folder, tmp_path):
    market = {"opportunities": 200, "positions": "0"}
    return {"run": str(folder / "offline"), "out": str(tmp_path / "rounds"), "rounds": 2, "days": "9-12", "guard_days": "7",
            "noise": 0.3, "steps": 1, "margin": 100.0, "env": market}  # fmt: skip


def rounds(options):
    return [json.loads(line) for line in (Path(options["out"]) / "rounds.jsonl").read_text().splitlines()]


def test_the_benchmark_has_a_row_a_round(folder):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [row["days_played"] for row in rows] == [0, 1] and rows[0]["above_offline"] == 0


def test_a_factor_stays_with_its_campaign_when_others_have_ended():
    policy = make_policy(Spec(2, 1, 9, (-1.0,), (1.0,)))
    plain, noisy = Session(policy, [""] * 3, 9), Exploring(policy, [""] * 3, 9)
    noisy.factor, seen = np.array([0.5, 1.0, 0.25]), np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]], np.float32)
    for session in (plain, noisy):
        session.act(seen)
        session.select(np.array([True, False, True]))
        session.actions[:] = 0  # what was done differs
    near(noisy.act(seen[[0, 2]], np.zeros(2)), plain.act(seen[[0, 2]], np.zeros(2)) * [[0.5], [0.25]], 1e-4, scale=2)


def test_a_campaigns_bids_are_the_policys_times_one_factor(options):
    config = {"device": "cpu", "env": options["env"]}
    plain, noisy = (play(Path(options["run"]), [9], config, noise=n, seed=3)[1][0].actions for n in (0.0, 0.3))
    factor = np.exp(0.3 * np.random.default_rng(3).standard_normal(1))
    assert noisy[0] == pytest.approx(plain[0] * factor, rel=1e-5)


def test_what_was_played_is_appended_and_a_killed_command_continues(options, tmp_path, monkeypatch):
    last = finetune(options)
    assert last == tmp_path / "rounds/round-2"
    old, new = open_store(checkpoint.read(options["run"])[0]["dataset"]["path"]), open_store(tmp_path / "rounds/store-2")
    E = len(old.lengths)
    assert prefix(new, E, old.spec) == old.fingerprint and new.group[E:].tolist() == [9, 10]
    assert [row[0] for row in new.info["campaigns"][-2:]] == [9, 10] and new.info["campaigns"][-1][5] == pytest.approx(
        new.returns[-1], rel=1e-3
    )
    again = options | {"out": str(tmp_path / "again")}
    with monkeypatch.context() as patch:
        left = [train]  # the second training does not begin
        patch.setattr(module, "train", lambda config: left.pop()(config))
        with pytest.raises(IndexError):
            finetune(again)
    assert len(rounds(again)) == 2 and (tmp_path / "again/store-2/card.json").is_file()
    finetune(again)
    assert [row["scores"] for row in rounds(again)] == [row["scores"] for row in rounds(options)]
    assert open_store(tmp_path / "again/store-2").fingerprint == new.fingerprint
    with pytest.raises(ValueError, match="holds other rounds"):
        finetune(again | {"noise": 0.5})


def test_a_round_that_loses_its_guard_is_undone(options, tmp_path):
    finetune(options | {"margin": -100.0})
    assert [row["kept"] for row in rounds(options)] == [True, False, False]
    assert checkpoint.read(tmp_path / "rounds/round-2")[0]["resume_on"] == options["run"]
    assert len(open_store(tmp_path / "rounds/store-2").lengths) == len(open_store(tmp_path / "rounds/store-1").lengths) + 1


@pytest.mark.parametrize("change", [{"days": "6-9"}, {"rounds": 5}, {"rounds": 0}])
def test_days_that_guard_or_are_too_few_are_refused(change, options, tmp_path):
    with pytest.raises(ValueError, match="days: expected"):
        finetune(options | change)
    assert not (tmp_path / "rounds").exists()
