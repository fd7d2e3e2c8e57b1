"""The core by itself, from data to a report, by the commands."""

import json

from tests.conftest import LOOP, NANO, command


def test_a_policy_is_trained_and_evaluated(tmp_path):
    run = tmp_path / "run"
    assert command("train", *LOOP, *NANO, "text=goal", f"run={run}") == 0
    assert (run / "checkpoint" / "model.safetensors").is_file()
    assert command("evaluate", f"run={run}", "episodes=2", "probe=words") == 0
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["policy"] for row in rows] == ["nano", "random", "expert"]
    assert {row["world"] for row in rows} == {"synthetic"}
    assert (tmp_path / "report.html").is_file()
