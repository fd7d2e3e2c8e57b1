"""Your environment with a task in words, and an .npz log of it: one command trains a policy that does
better than the log. python examples/own_environment.py --folder=runs/arm

`Arm` and `record` stand for what you have. `main` has the lines that you write.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from decisionllm.__main__ import main as decisionllm

EPISODES = 300  # of the log
BLOCKS = {"red": (2.0, 0.0), "green": (-1.0, 1.7), "blue": (-1.0, -1.7)}


class Arm(gymnasium.Env[np.ndarray, np.ndarray]):
    """An arm over a table. Which block to reach is a text in the info of `reset`, and nowhere else."""

    observation_space = spaces.Box(-3, 3, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.color = str(self.np_random.choice(list(BLOCKS)))
        self.position = np.zeros(2, np.float32)
        return self.position.copy(), {"task": f"Reach the {self.color} block."}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.position = np.clip(self.position + 0.5 * np.asarray(action, np.float32), -3, 3)
        distance = float(np.linalg.norm(self.position - BLOCKS[self.color]))
        return self.position.copy(), -distance, False, False, {}


def record(env: gymnasium.Env[np.ndarray, np.ndarray]) -> dict[str, list[Any]]:
    """Play episodes of all qualities, from random to good: columns with a row for each step."""
    rng = np.random.default_rng(0)
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "tasks")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for seed in range(10**9, 10**9 + EPISODES):  # evaluation takes seeds from 0
        (observation, info), over, skill = env.reset(seed=seed), False, rng.uniform()
        while not over:
            action = rng.uniform(-1, 1, 2)
            if rng.uniform() < skill:
                action = np.clip(BLOCKS[info["task"].split()[2]] - observation, -1, 1)
            following, reward, terminated, truncated, _ = env.step(action)
            row = (observation, action, reward, terminated, truncated, info["task"])
            for name, value in zip(names, row, strict=True):
                columns[name].append(value)
            observation, over = following, terminated or truncated
    return columns


def command(line: str) -> None:
    """Run a command line as a shell would."""
    print(f"$ decisionllm {line}", flush=True)
    sys.argv = ["decisionllm", *shlex.split(line)]
    if decisionllm():
        raise RuntimeError(f"{line}: the command failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/arm"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    gymnasium.register("Arm-v0", entry_point=Arm, max_episode_steps=10)
    columns = record(gymnasium.make("Arm-v0"))
    np.savez(folder / "log.npz", **{name: np.array(column) for name, column in columns.items()})
    command(
        f"train dataset=arrays dataset.path={folder}/log.npz env=gymnasium env.id=Arm-v0 "
        "env.task_from=info.task window=1 steps=300 optim.batch_size=32 optim.lr=0.002 "
        f"backbone=nano backbone.width=64 backbone.layers=1 log.tracker=none run={folder}/run"
    )
    command(f"evaluate run={folder}/run episodes=50 report=false")

    rows = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    scores = {row["policy"]: row["score"] for row in map(json.loads, rows)}
    mean_of_log = sum(columns["rewards"]) / EPISODES
    of_players = [f"{policy} {score:.2f}" for policy, score in scores.items()]
    print(f"return: {mean_of_log:.2f} in the log, {', '.join(of_players)}")


if __name__ == "__main__":
    main()
