"""The core by itself, from data to a report, by the commands."""

import json

from tests.conftest import LOOP, NANO, command


def test_a_policy_is_trained_and_evaluated(tmp_path):
    run = tmp_path / "run"
    assert command("train", *LOOP, *NANO, "text=goal", f"run={run}") == 0
    assert (run / "checkpoint" / "model.safetensors").is_file()
    assert command("evaluate", f"run={run}", "episodes=2", "probe=words") == 0
    (result,) = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(result)["world"] == "synthetic"
    assert (tmp_path / "report.html").is_file()
