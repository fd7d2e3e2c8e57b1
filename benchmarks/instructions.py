"""Instructions that no frame contains: does a policy do something of what they say?

`python -m benchmarks.instructions runs/mazes/llm-pretrained-0 --maze medium` or `... runs/auction/llm-words-0 --days data/later:200-203` gives
each instruction of instructions.yaml to the same episodes as a neutral text, and measures what changes, in the direction that the
instruction means. It appends a row for each run to instructions.jsonl and prints one line an instruction.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from decisionllm.eval.report import interval
from decisionllm.eval.rollout import rollout
from decisionllm.policy import checkpoint
from decisionllm.registry import build, choice
from decisionllm.schema import Episode

FOLDER = Path(__file__).parent
EPISODES = 100


def of_maze(episodes: Sequence[Episode], measure: str) -> np.ndarray:
    """Where the ball is at the end of each episode (N,): its row or column."""
    last = np.stack([e.final_observation for e in episodes])
    return last[:, ("row", "column").index(measure)]


def of_auction(episodes: Sequence[Episode], measure: str) -> np.ndarray:
    """What each campaign did (N,)."""
    spend, bids = (np.stack([e.outcome[name] for e in episodes]) for name in ("step_spend", "step_multipliers"))
    total, budget, conversions = (np.array([e.outcome[name] for e in episodes]) for name in ("spend", "budget", "conversions"))
    half = spend.shape[1] // 2
    measures = {
        "morning": spend[:, half - 1] / np.maximum(total, 1e-9),
        "cost": total / np.maximum(conversions, 1),
        "spent": total / budget,
        "bid": bids.mean(1),
    }
    return measures[measure]


def effects(run: Path, kind: str, options: dict[str, Any], world: str) -> list[dict[str, Any]]:
    """What each instruction changes, in its direction, in standard deviations of the neutral episodes, with the 95 % interval.

    world: the sentence before an instruction; empty: the words of each episode.
    """
    policy, config, _ = checkpoint.load(run)
    given = yaml.safe_load((FOLDER / "instructions.yaml").read_text())[kind]
    measured = of_maze if kind == "maze" else of_auction
    env = build(config["env"] | options if kind == "auction" else choice(group="env", **options), EPISODES)
    before = [world or words for words in env.tasks]
    begin = partial(policy.begin, horizon=env.horizon)

    def played(text: str) -> list[Episode]:
        env.tasks = [f"{words} {text}".strip() for words in before]
        return rollout(begin, env, seed=0)

    neutral, rows = played(given["neutral"]), []
    for one in given["instructions"]:
        plain = measured(neutral, one["measure"])
        change = one["sign"] * (measured(played(one["text"]), one["measure"]) - plain) / max(plain.std(), 1e-9)
        low, high = interval(change)
        rows.append({"text": one["text"], "measure": one["measure"], "effect": float(change.mean()), "low": low, "high": high})
        print(f"{rows[-1]['effect']:+.2f} [{low:+.2f}, {high:+.2f}] {one['measure']}: {one['text']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=sys.modules[__name__].__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--maze", help="umaze, medium or large")
    parser.add_argument("--days", metavar="FOLDER:PERIODS", help="days to replay")
    parser.add_argument("--out", type=Path, default=FOLDER / "instructions.jsonl")
    given = parser.parse_args()
    if bool(given.maze) == bool(given.days):
        parser.error("expected either --maze or --days")
    if given.maze:
        kind, options, world = "maze", {"name": f"maze2d-{given.maze}", "text": "goal"}, f"Maze2D {given.maze}."
    else:
        path, _, periods = given.days.rpartition(":")
        kind, options, world = "auction", {"path": path, "periods": periods}, ""
    for run in given.runs:
        rows = effects(run, kind, options, world)
        right = sum(row["low"] > 0 for row in rows)
        wrong = sum(row["high"] < 0 for row in rows)
        print(f"{run}: {right} of {len(rows)} do what they say beyond the interval, {wrong} the opposite")
        row = {
            "run": str(run),
            "kind": kind,
            "right": right,
            "wrong": wrong,
            "effects": rows,
            "versions": checkpoint.versions(),
        }
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
