"""The dataset of episodes that a teacher plays in a learned world: a model of the world and a policy
that is good in it come from a log alone, so that a plain model can clone that policy.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from decisionllm.checks import at_least
from decisionllm.datasets.store import DatasetReader
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Json
from decisionllm.teams import dataset as team
from decisionllm.teams.formats.team_log import Log, joined
from decisionllm.teams.joint_steps import JointSteps
from decisionllm.teams.learned_world import TeamWorld
from decisionllm.teams.teacher import TeamTD3, teach


@register("dataset", "team_imagined", text="${text}")
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
    discount: float = 0.95,
    noise: float = 0.1,
    seed: int = 0,
) -> Source:
    """Episodes of a teacher in a learned world, from first observations of a log on.

    Args:
        path, meta, cut: of the log, see `team.load`. All agents are of one type, always present,
            and their actions continuous; `meta` names the blocks of an observation, whose entities
            are offsets from the agent.
        text, capacity: see `team.source`.
        worlds: how many are played.
        updates: of the model of the world.
        rounds: of the teacher's play, 32 worlds each.
        discount: of a step, for the teacher.
        noise: standard deviation of the noise on actions, in half ranges; the stored action is the
            one without noise.
        seed: of the model, the teacher and the worlds.

    Raises:
        ValueError: the log is not such a one.
    """
    counts = {"worlds": worlds, "updates": updates, "rounds": rounds}
    for name, given in counts.items():
        at_least(f"dataset.{name}", given, 1)
    log = joined(list(team.logs_of(path, meta, cut)()))
    steps = JointSteps.of(log)
    world = TeamWorld(steps, seed=seed)
    world.fit(updates)
    teacher = teach(world, rounds=rounds, discount=discount, seed=seed)
    made = play(world, teacher, worlds, noise=noise, seed=seed)
    named = log.meta | {"name": f"imagined({log.meta['name']})"}
    options: Json = counts | {"path": path, "discount": discount, "noise": noise, "seed": seed}
    return team.source(replace(made, meta=named), text=text, capacity=capacity, **options)


def files(*, path: str, meta: str = "", **options: object) -> list[Path]:
    """The files that `load` reads with these options."""
    return team.files(path=path, meta=meta)


@torch.no_grad()
def play(world: TeamWorld, teacher: TeamTD3, worlds: int, *, noise: float, seed: int) -> Log:
    """A log of the teacher's play in a learned world.

    Args:
        world, teacher: that play.
        worlds: how many, from first observations of the log, drawn at random.
        noise: see `load`.
        seed: of the draws.
    """
    steps = world.steps
    W, T, N, _ = steps.observations.shape
    rng = np.random.default_rng((seed, 1))
    observations = torch.from_numpy(steps.observations[rng.integers(W, size=worlds), 0])
    steps_of_worlds = []
    for _ in range(T):
        actions = teacher.act(world.units(observations))
        shaken = actions + noise * torch.from_numpy(rng.normal(size=actions.shape)).float()
        then, rewards = world.advance(observations, shaken.clamp(-1, 1))
        steps_of_worlds.append((observations, world.raw_actions(actions), rewards))
        observations = then
    # (E, T, N, O), (E, T, N, A), (E, T, N)
    seen, taken, paid = (torch.stack(x, 1).numpy() for x in zip(*steps_of_worlds, strict=True))
    group, step = np.indices((worlds, T)).reshape(2, -1)
    clock = {
        "group": group,
        "step": step,
        "reward": paid.reshape(-1, N).mean(1),
        "terminated": np.zeros(len(step), bool),
        "truncated": step == T - 1,
    }
    group, step, agent = np.indices((worlds, T, N)).reshape(3, -1)
    agents = {
        "group": group,
        "step": step,
        "agent": agent,
        "observation": seen.reshape(len(step), -1),
        "action_values": taken.reshape(len(step), -1),
        "reward": paid.ravel(),
    }
    return Log({"types": {"agent": {}}, "horizon": T}, clock, agents)


READER = DatasetReader(version=1, files=files)
