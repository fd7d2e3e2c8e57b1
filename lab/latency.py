"""The latency of the next actions of a simple_spread team, by its size, one world and many,
each agent alone and in turn.

`python -m lab.latency RUN [--worlds 1 64] [--out latency.jsonl]`, RUN trained with
team.execution=both. The median over the steps of an episode after the first quarter, on one thread;
appends rows to latency.jsonl. The worlds are not timed.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks import measure
from decisionllm.policy import loading
from decisionllm.runs import directory
from decisionllm.teams.spread.env import SpreadTeams

ROWS = Path(__file__).parent / "rows" / "latency.jsonl"


def decisions(policy, env):
    """Seconds that each step's actions took: (steps,)"""
    observations, rewards, took = env.reset(0), None, []
    session = policy.begin(env.tasks, env.horizon, None, env.groups)
    for _ in range(env.horizon):
        began = time.perf_counter()
        actions = session.act(observations, rewards)
        took.append(time.perf_counter() - began)
        observations, rewards, *_ = env.step(actions)
    return np.array(took)


def main():
    parser = argparse.ArgumentParser(
        prog="python -m lab.latency", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    measure.pin()
    machine = {"load": os.getloadavg()[0], "versions": directory.versions()}
    for execution in ("per_agent", "joint"):
        policy = loading.load(arguments.run, execution=execution)
        config = policy.config
        for worlds in arguments.worlds:
            for agents in range(2, 7):
                env = SpreadTeams(
                    worlds,
                    agents=str(agents),
                    actions=config["dataset"]["actions"],
                    text=policy.info["dataset"]["text"],
                )
                took = np.stack([decisions(policy, env) for _ in range(arguments.rounds)])[
                    :, env.horizon // 4 :
                ].ravel()
                each = 1000 * statistics.median(took)
                row = {
                    "benchmark": "latency",
                    "run": config["name"],
                    "execution": execution,
                    "agents": agents,
                    "worlds": worlds,
                    "unit": "ms/step",
                    "ours": each,
                    "p99": float(1000 * np.percentile(took, 99)),
                    "decisions_per_second": 1000 * worlds * agents / each,
                }
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row | machine) + "\n")
                print(
                    "{execution}, {agents} agents, {worlds} worlds: {ours:.2f} ms a step, {decisions_per_second:,.0f} decisions a second".format(
                        **row
                    )
                )


if __name__ == "__main__":
    main()
