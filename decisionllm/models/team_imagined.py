"""The dataset of episodes that a teacher plays in a learned world: a model of the world and a policy
that is good in it come from a log alone, so that a plain model can clone that policy.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from decisionllm.datasets import team
from decisionllm.datasets.formats.team_log import Log, joined
from decisionllm.datasets.joint_steps import JointSteps
from decisionllm.models.team_teacher import TeamTD3, teach
from decisionllm.models.team_world import TeamWorld
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Json

VERSION = 1  # of how episodes are made


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
        if given < 1:
            raise ValueError(f"dataset.{name}: expected 1 or more, got {given}")
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
    seen, taken, paid = [], [], []
    for _ in range(T):
        actions = teacher.act(world.units(observations))
        shaken = actions + noise * torch.from_numpy(rng.normal(size=actions.shape)).float()
        then, rewards = world.advance(observations, shaken.clamp(-1, 1))
        seen.append(observations.numpy())
        taken.append(world.raw_actions(actions).numpy())
        paid.append(rewards.numpy())
        observations = then
    clock = {
        "group": np.repeat(np.arange(worlds), T),
        "step": np.tile(np.arange(T), worlds),
        "reward": rows(paid).mean(1),
        "terminated": np.zeros(worlds * T, bool),
        "truncated": np.tile(np.arange(T) == T - 1, worlds),
    }
    agents = {
        "group": np.repeat(clock["group"], N),
        "step": np.repeat(clock["step"], N),
        "agent": np.tile(np.arange(N), worlds * T),
        "observation": rows(seen).reshape(worlds * T * N, -1),
        "action_values": rows(taken).reshape(worlds * T * N, -1),
        "reward": rows(paid).reshape(-1),
    }
    return Log({"types": {"agent": {}}, "horizon": T}, clock, agents)


def rows(columns: list[np.ndarray]) -> np.ndarray:
    """T arrays (E, N, ...) -> (E T, N, ...), world by world."""
    return np.stack(columns, 1).reshape(-1, *columns[0].shape[1:])
