"""Run all benchmarks, one after the other: `python -m benchmarks [--rounds N] [--out
results.jsonl]`.
"""

from benchmarks import measure

if __name__ == "__main__":
    measure.main(
        "benchmarks.windows",
        "benchmarks.dt_step",
        "benchmarks.llm_step_tiny",
        "benchmarks.decide_llm",
        "benchmarks.rollout64",
        "benchmarks.spread_world",
    )
