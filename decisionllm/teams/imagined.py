"""The dataset of episodes that a teacher plays in a learned world: a model of the world and a
policy that is good in it come from a log alone, so that a plain model can clone that policy.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from decisionllm.checks import check_at_least
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.protocols import Source
from decisionllm.schema import Json
from decisionllm.teams import dataset as team
from decisionllm.teams.formats.team_log import Log, concat_logs
from decisionllm.teams.joint_steps import JointSteps
from decisionllm.teams.learned_world import TeamWorld
from decisionllm.teams.td3 import TeamTD3, train_team_td3

# Standard deviation of the noise on played actions, in half ranges; stored actions are without it
NOISE = 0.1


def load(
    *,
    path: str,
    text: str = "none",
    capacity: int = 6,
    meta: str = "",
    cut: int = 25,
    worlds: int = 10_000,
    updates: int = 2000,
    rounds: int = 1200,
    seed: int = 0,
) -> Source:
    """Build episodes of a teacher in a learned world, from first observations of a log on.

    Args:
        path, cut: see `team.load`.
        meta: see `team.load`. All agents are of one type, always present, and their actions
            continuous; `meta` names the blocks of an observation, whose entities are offsets from
            the agent.
        text, capacity: see `team.source`.
        worlds: how many are played.
        updates: of the model of the world.
        rounds: of the teacher's play, 32 worlds each.
        seed: of the model, the teacher and the worlds.

    Raises:
        ValueError: the log is not such a one.
    """
    counts = {"worlds": worlds, "updates": updates, "rounds": rounds}
    for name, count in counts.items():
        check_at_least(f"dataset.{name}", count, 1)
    log = concat_logs(list(team.make_log_reader(path, meta, cut)()))
    steps = JointSteps.from_log(log)
    world = TeamWorld(steps, seed=seed)
    world.fit(updates)
    teacher = train_team_td3(world, rounds=rounds, seed=seed)
    log_of_play = play(world, teacher, worlds, seed=seed)
    described = log.meta | {"name": f"imagined({log.meta['name']})"}
    options: Json = counts | {"path": path, "seed": seed}
    return team.source(
        replace(log_of_play, meta=described), text=text, capacity=capacity, **options
    )


def list_files(*, path: str, meta: str = "", **options: object) -> list[Path]:
    """List the files that `load` reads with these options."""
    return team.list_files(path=path, meta=meta)


@torch.no_grad()
def play(world: TeamWorld, teacher: TeamTD3, worlds: int, *, seed: int) -> Log:
    """Record a log of the teacher's play in a learned world.

    Args:
        world, teacher: that play.
        worlds: how many, from first observations of the log, drawn at random.
        seed: of the draws.
    """
    steps = world.steps
    W, T, N, _ = steps.observations.shape
    rng = np.random.default_rng((seed, 1))
    observations = torch.from_numpy(steps.observations[rng.integers(W, size=worlds), 0])
    played = []
    for _ in range(T):
        actions = teacher.act(world.standardise(observations))
        noisy = actions + NOISE * torch.from_numpy(rng.normal(size=actions.shape)).float()
        following, rewards = world.advance(observations, noisy.clamp(-1, 1))
        played.append((observations, world.raw_actions(actions), rewards))
        observations = following
    # (E, T, N, O), (E, T, N, A), (E, T, N)
    observed, acted, rewarded = (torch.stack(x, 1).numpy() for x in zip(*played, strict=True))
    group, step = np.indices((worlds, T)).reshape(2, -1)
    clock = {
        "group": group,
        "step": step,
        "reward": rewarded.reshape(-1, N).mean(1),
        "terminated": np.zeros(len(step), bool),
        "truncated": step == T - 1,
    }
    group, step, agent = np.indices((worlds, T, N)).reshape(3, -1)
    agents = {
        "group": group,
        "step": step,
        "agent": agent,
        "observation": observed.reshape(len(step), -1),
        "action_values": acted.reshape(len(step), -1),
        "reward": rewarded.ravel(),
    }
    return Log({"types": {"agent": {}}, "horizon": T}, clock, agents)


READER = DatasetReader(version=1, files=list_files)
