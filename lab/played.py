"""Trained runs that are played: options of days, one rollout, rows of a file."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.eval.rollout import rollout
from decisionllm.policy import loading
from decisionllm.protocols import Env
from decisionllm.registry import build
from decisionllm.schema import Episode


def replay_options(days: str) -> dict[str, str]:
    """FOLDER:PERIODS -> the options of an environment that replays these days."""
    path, _, periods = days.rpartition(":")
    return {"path": path, "periods": periods}


def open_run(
    run: Path,
    options: dict[str, Any],
    *,
    node: dict[str, Any] | None = None,
    count: int = 1,
) -> tuple[Any, dict[str, Any], Env]:
    """The policy of a run, its config, and an environment with these options.

    node: of another environment than the run's; count: of episodes.
    """
    policy = loading.load(run)
    config = policy.config
    return policy, config, build((node or config["env"]) | options, count)


def roll_out(policy: Any, env: Env) -> list[Episode]:
    """The episodes of a policy from the seed 0."""
    return rollout(partial(policy.begin, horizon=env.horizon), env, seed=0)


def scores_of_runs(runs: list[Path], options: dict[str, Any]) -> tuple[np.ndarray, Any, str]:
    """Runs of one name in one environment, which is made once.

    Returns:
        The score of each episode by each run, (runs, N); the environment; the name.
    """
    policy, config, env = open_run(runs[0], options)
    scores = [env.score(roll_out(policy, env))]
    for run in runs[1:]:
        scores.append(env.score(roll_out(loading.load(run), env)))
    return np.array(scores), env, config["name"]


def append(out: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
