"""Instructions that no frame contains: does a policy do something of what they say?

`python -m lab.instructions runs/mazes/llm-pretrained-0 --maze medium` or `...
runs/auction/llm-words-0 --days data/later:200-203` gives each instruction of instructions.yaml to
the same episodes as a neutral text, and measures what changes, in the direction that the
instruction means. It appends a row for each run to instructions.jsonl and prints one line an
instruction.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from decisionllm.eval.intervals import over_episodes
from decisionllm.registry import choice
from decisionllm.runs import directory
from decisionllm.schema import Episode
from lab.played import append, open_run, replay_options, roll_out

FOLDER = Path(__file__).parent
EPISODES = 100


def of_maze(episodes: Sequence[Episode], measure: str) -> np.ndarray:
    """Where the ball is at the end of each episode (N,): its row or column."""
    last = np.stack([e.final_observation for e in episodes])
    return last[:, ("row", "column").index(measure)]


def of_auction(episodes: Sequence[Episode], measure: str) -> np.ndarray:
    """Return the measured quantity of each campaign, (N,)."""

    def outcome(name: str) -> np.ndarray:
        return np.stack([e.outcome[name] for e in episodes])

    so_far = outcome("step_spend")  # (N, T)
    noon = so_far[:, so_far.shape[1] // 2 - 1]
    spend = outcome("spend")
    measures = {
        "morning": noon / np.maximum(spend, 1e-9),
        "cost": spend / np.maximum(outcome("conversions"), 1),
        "spent": spend / outcome("budget"),
        "bid": outcome("step_multipliers").mean(1),
    }
    return measures[measure]


def effects(
    run: Path,
    kind: str,
    options: dict[str, Any],
    *,
    node: dict[str, Any] | None = None,
    world: str = "",
) -> list[dict[str, Any]]:
    """The effect of each instruction in its direction, with the 95 % interval.

    Its unit is the standard deviation of the neutral episodes.

    Args:
        run: the run directory.
        kind: `maze` or `auction`.
        options: of the environment.
        node: the environment, where it is not the run's.
        world: the sentence before an instruction; empty: the words of each episode.
    """
    policy, _, env = open_run(run, options, node=node, count=EPISODES)
    measured = of_maze if kind == "maze" else of_auction
    texts = yaml.safe_load((FOLDER / "instructions.yaml").read_text(encoding="utf-8"))[kind]
    before = [world or words for words in env.tasks]

    def play(text: str) -> list[Episode]:
        env.tasks = [f"{words} {text}".strip() for words in before]
        return roll_out(policy, env)

    neutral = play(texts["neutral"])
    rows = []
    for one in texts["instructions"]:
        text, measure = one["text"], one["measure"]
        plain = measured(neutral, measure)
        change = one["sign"] * (measured(play(text), measure) - plain) / max(plain.std(), 1e-9)
        low, high = over_episodes(change)
        effect = float(change.mean())
        rows.append({"text": text, "measure": measure, "effect": effect, "low": low, "high": high})
        print(f"{effect:+.2f} [{low:+.2f}, {high:+.2f}] {measure}: {text}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.instructions", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--maze", help="umaze, medium or large")
    parser.add_argument("--days", metavar="FOLDER:PERIODS", help="days to replay")
    parser.add_argument("--out", type=Path, default=FOLDER / "rows" / "instructions.jsonl")
    arguments = parser.parse_args()
    if bool(arguments.maze) == bool(arguments.days):
        parser.error("expected either --maze or --days")
    kind = "maze" if arguments.maze else "auction"
    node = None
    world = ""
    if arguments.maze:
        node = choice("env", f"maze2d-{arguments.maze}")
        world = f"Maze2D {arguments.maze}."
        options = {"text": "goal"}
    else:
        options = replay_options(arguments.days)
    for run in arguments.runs:
        rows = effects(run, kind, options, node=node, world=world)
        right = sum(row["low"] > 0 for row in rows)
        wrong = sum(row["high"] < 0 for row in rows)
        counts = f"{right} of {len(rows)} do what they say beyond the interval"
        print(f"{run}: {counts}, {wrong} the opposite")
        row = {
            "run": str(run),
            "kind": kind,
            "right": right,
            "wrong": wrong,
            "effects": rows,
            "versions": directory.versions(),
        }
        append(arguments.out, row)


if __name__ == "__main__":
    main()
