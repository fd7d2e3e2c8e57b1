"""Benchmarks time the same work on both sides: every gate holds at a tiny size.

No time is asserted.
"""

from importlib import import_module
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import measure

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

LLM = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "inner": 48}
TINY = {  # sizes of the work, and of the gates alone
    "windows": ({"total": 4000}, {"draws": 4000, "bins": 20}),
    "dt_step": ({"T": 4, "B": 8, "width": 16, "layers": 2}, {"steps": 5}),
    "llm_step_tiny": ({"T": 3, "B": 2, "lora_rank": 4} | LLM, {}),
    "decide_llm": ({"agents": 3, "steps": 8} | LLM, {}),
    "spread_world": ({"worlds": 3}, {}),
    "rollout64": ({"mazes": 3, "steps": 20, "window": 4, "width": 16, "layers": 2}, {}),
}
NAMES = sorted(
    {path.stem for path in Path(benchmarks.__file__).parent.glob("*.py")}
    - {"__init__", "__main__", "measure"}
)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_timed_is_the_same_work(name):
    work, gates = TINY[name]
    assert import_module(f"benchmarks.{name}").gates(**work, **gates)


@pytest.mark.parametrize("name", NAMES)
def test_every_case_runs_on_both_sides(name):
    rows = [
        measure.compare(case, rounds=1)
        for case in import_module(f"benchmarks.{name}").cases(**TINY[name][0])
    ]
    assert rows
    assert all(row["ours"] > 0 and row["peer"] > 0 for row in rows)
    measure.table([{"benchmark": name} | row for row in rows])


def test_the_ratio_is_the_median_of_the_rounds():
    case = measure.Case("by hand", None, None, unit="ms/step", target=3)
    row = measure.verdict(case, [0.001, 0.002, 0.001], [0.003, 0.004, 0.003])
    assert row["ratio"] == pytest.approx(3)
    assert (row["ours"], row["peer"]) == pytest.approx((1, 3))
    assert row["met"] and row["rounds"] == 3


def test_a_target_is_missed_by_the_ratio_or_by_the_limit():
    slow = measure.Case("ratio", None, None, unit="us/window", target=4, limit=3)
    assert not measure.verdict(slow, [1e-6] * 3, [3e-6] * 3)["met"]
    assert not measure.verdict(slow, [4e-6] * 3, [40e-6] * 3)["met"]
    assert measure.verdict(slow, [2e-6] * 3, [8e-6] * 3)["met"]


def test_a_reference_that_spreads_is_noisy():
    case = measure.Case("noise", None, None)
    assert measure.verdict(case, [1.0] * 3, [1.0, 1.2, 1.4])["noisy"]
    assert not measure.verdict(case, [1.0] * 3, [1.0, 1.01, 1.02])["noisy"]


def test_a_gate_that_does_not_hold_stops_the_benchmark():
    assert measure.gate("fine", 1, 1) == {"fine": 1.0}
    with pytest.raises(
        AssertionError,
        match="gradients: expected at most 1e-06, got 0.5; what is timed would not be the same work",
    ):
        measure.gate("gradients", 0.5, 1e-6)
    with pytest.raises(AssertionError):
        measure.gate("a NaN", float("nan"), 1)
    assert measure.largest_difference(
        [torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.5])]
    ) == pytest.approx(0.5 / 29.25**0.5)
