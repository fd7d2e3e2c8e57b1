"""All benchmarks, one after the other: `python -m benchmarks [--rounds N] [--out
results.jsonl]`.
"""

from benchmarks import measure

if __name__ == "__main__":
    measure.main(
        "windows",
        "dt_step",
        "llm_step_tiny",
        "decide_llm",
        "rollout64",
        "auction_period",
        "spread_world",
    )
