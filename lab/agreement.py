"""Both executions of the same checkpoints in the same worlds: what teams win when they decide in
turn, and when each agent decides by itself.

`python -m lab.agreement runs/tmaze/nano-*` rolls each run out twice, appends a row a run to
multiagent.jsonl and prints a line a run. The interval is of the paired difference, world by world;
passes are calls of the backbone a step, at most.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from decisionllm.backbones.forward import Backbone
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.eval.intervals import over_episodes
from decisionllm.eval.rollout import rollout
from decisionllm.policy import loading
from decisionllm.registry import build
from decisionllm.runs import directory
from decisionllm.teams.session import TeamSession
from lab.multiagent import ROWS, Row


def scores(run: Path, execution: str, episodes: int, seed: int) -> tuple[np.ndarray, int, float]:
    """The score of each world (E,), the calls of the backbone a step, at most, and the CPU time of
    a step's decisions, ms.
    """
    generator = torch.Generator().manual_seed(seed)
    policy = loading.load(run, execution=execution, generator=generator)
    env = build(policy.config["env"], episodes)
    calls = [0]
    seconds = 0.0
    decide = TeamSession.decide
    advance = env.step

    def step(actions: np.ndarray) -> Any:
        calls.append(appended.call_count + read.call_count)
        return advance(actions)

    def timed(session: TeamSession, *arguments: Any) -> np.ndarray:
        nonlocal seconds
        began = time.process_time()
        actions = decide(session, *arguments)
        seconds += time.process_time() - began
        return actions

    def counted(name: str) -> Any:
        return patch.object(Backbone, name, autospec=True, side_effect=getattr(Backbone, name))

    def begin(tasks: Any) -> Any:
        return policy.begin(tasks, env.horizon, groups=env.groups)

    with (
        patch.object(env, "step", step),
        patch.object(TeamSession, "decide", timed),
        counted("append") as appended,
        counted("forward") as read,
    ):
        played = rollout(begin, env, seed=seed)
    ((_, members), *_) = env.conditions(execution, False).items()
    return (
        env.score([played[i] for i in members]),
        int(np.diff(calls).max()),
        1000 * seconds / (len(calls) - 1),
    )


def compare(run: Path, episodes: int, seed: int = 0) -> Row:
    """The row of a run."""
    (joint, passes, ms), (alone, passes_alone, ms_alone) = (
        scores(run, how, episodes, seed) for how in ("joint", "per_agent")
    )
    low, high = over_episodes(joint - alone)
    config, info = directory.read(run)
    data = info["embodiments"][ONLY]
    return {
        "dataset": data["dataset"]["name"],
        "policy": config["name"],
        "protocol": "joint against per agent",
        "seed": config["seed"],
        "n": episodes,
        "joint": joint.mean(),
        "per_agent": alone.mean(),
        "difference": (joint - alone).mean(),
        "low": low,
        "high": high,
        "agents": data["dataset"]["agents"],
        "passes": passes,
        "passes_per_agent": passes_alone,
        "ms": ms,
        "ms_per_agent": ms_alone,
        "env_seed": seed,
        "fingerprint": info["fingerprint"],
        "versions": directory.versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.agreement", description=sys.modules[__name__].__doc__
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    for run in arguments.runs:
        row = compare(run, arguments.episodes)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            "{dataset}, seed {seed}: joint {joint:.1f}, per agent {per_agent:.1f}, difference "
            "{difference:.1f} [{low:.1f}, {high:.1f}], "
            "{passes} and {passes_per_agent} passes a step, {ms:.0f} and {ms_per_agent:.0f} ms".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
