"""Logs of simple_spread by scripted teachers, made from a seed: one world is a group, and each of
its agents an episode.

expert, medium, random: one teacher. mixed: a third of the groups each. convention: every group has
a fixed assignment that no observation shows, so that the log holds several joint policies. varying:
3 to 5 experts, a tenth of the groups lose one midway.
"""

import numpy as np

from decisionllm.checks import one_of
from decisionllm.datasets.formats.team_log import Log
from decisionllm.datasets.team import source
from decisionllm.datasets.team_worlds import SEEDS, stacked
from decisionllm.domains.spread.world import HORIZON, PUSHES, TEACHERS, Spread, Teacher, pushes
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Json

VERSION = 2  # of what a store of it holds
LOGS = ("expert", "medium", "random", "mixed", "convention", "varying")
TASK = "Cover every landmark, each with one agent, without touching another"
REWARD_RULE = "half the distance of each landmark to its nearest agent is lost at every step"
REWARD_RULE += ", and half a point for each touch"


@register("dataset", "spread", text="${text}")
def load(
    *,
    log: str = "mixed",
    agents: int = 3,
    groups: int = 1500,
    actions: str = "discrete",
    noise: float = 0.1,
    text: str = "none",
    capacity: int = 6,
    seed: int = 0,
) -> Source:
    """A log of simple_spread as episodes; the reward of each agent is the mean reward of its team.

    Args:
        log: one of LOGS.
        agents: of each group, except in log=varying.
        groups: number of worlds.
        actions: `discrete`; or `continuous`, pushes within -1 .. 1.
        noise: share of the teacher's actions that are uniform.
        text, capacity: see `team.source`.
        seed: of the worlds and of the teachers.
    """
    made = generate(log, agents=agents, groups=groups, actions=actions, noise=noise, seed=seed)
    name = f"spread-{log}"
    if actions == "continuous":
        name += "-continuous"
    if log != "varying":
        name += f"-{agents}"
    return source(
        made,
        text=text,
        capacity=capacity,
        behaviour=log,
        agents=agents,
        actions=actions,
        name=f"{name}@seed{seed}-{groups}",
    )


def generate(
    log: str,
    *,
    agents: int = 3,
    groups: int = 1500,
    actions: str = "discrete",
    noise: float = 0.1,
    seed: int = 0,
) -> Log:
    """The columns of a log; see `load`."""
    one_of("dataset.log", log, LOGS)
    one_of("dataset.actions", actions, ("discrete", "continuous"))
    if not (2 <= agents <= 16 and 1 <= groups <= SEEDS // 2 and 0 <= noise <= 1):
        known = f"agents of 2 .. 16, groups of 1 .. {SEEDS // 2}, noise of 0 .. 1"
        raise ValueError(f"dataset: expected {known}; got {agents}, {groups}, {noise}")
    rng = np.random.default_rng(seed)
    discrete = actions == "discrete"
    numbers = np.full(groups, agents)
    lost = np.full(groups, -1)  # the step at which one agent is removed
    teacher_name = "expert" if log in ("mixed", "varying") else log
    kinds = np.full(groups, TEACHERS.index(teacher_name))
    if log == "mixed":
        kinds = rng.permutation(np.arange(groups) % 3)
    if log == "varying":
        numbers = rng.integers(3, 6, groups)
        lost[rng.permutation(groups)[: groups // 10]] = HORIZON // 2
    world = Spread(SEEDS * (seed + 1) + np.arange(groups), numbers)
    teacher = Teacher(world, kinds, rng, noise=noise, discrete=discrete)
    removable = rng.integers(numbers)[:, None]
    chosen = np.arange(world.alive.shape[1]) == removable
    parts: list[dict[str, np.ndarray]] = []
    for t in range(HORIZON):
        alive = world.alive
        taken = teacher.act(world).astype(np.float32)
        seen = [(worlds, world.observe(worlds)) for worlds in world.alike()]
        rewards = world.step(pushes(taken)).astype(np.float32)
        going = chosen & (lost == t)[:, None]
        for worlds, raw in seen:
            n, size = raw.shape
            at, agent = np.nonzero(alive[worlds])
            group = worlds[at]
            part = {
                "group": group,
                "step": np.full(n, t),
                "agent": agent,
                "reward": rewards[group, agent],
                "terminated": going[group, agent],
                "behaviour": kinds[group],
                "size": np.full(n, size),
                "action": taken[group, agent],
                "observation": raw.ravel(),
            }
            parts.append(part)
        world.remove(going)
    columns = stacked(parts)
    size = columns.pop("size")
    action = columns.pop("action")
    if discrete:
        columns["action"] = action[:, 0].astype(np.int32)
    else:
        columns["action_values"] = action
    columns["observation_offsets"] = np.cumsum([0, *size])
    step = np.tile(np.arange(HORIZON), groups)
    clock = {
        "group": np.repeat(np.arange(groups), HORIZON),
        "step": step,
        "terminated": np.zeros(len(step), bool),
        "truncated": step == HORIZON - 1,
    }
    meta = describe(np.unique(size).tolist(), actions, log=log, noise=noise, seed=seed)
    return Log(meta, clock, columns)


def blocks(n: int, m: int) -> list[list[str | int]]:
    """The blocks (see `team_log`) of an observation of mpe2, of n agents and m landmarks."""
    return [["own", 4, 1], ["landmark", 2, m], ["agent", 2, n - 1], ["", 2, n - 1]]


def describe(sizes: list[int], actions: str, **generator: object) -> Json:
    """meta of a log, or of the worlds of an evaluation, with observations of these sizes."""
    # (agents, landmarks) of an observation by its length; one agent may have been removed
    known = {}
    for n in range(1, 17):
        for m in (n, n + 1):
            known[4 + 2 * m + 4 * (n - 1)] = n, m
    agent: Json = {"role": ""}
    if actions == "discrete":
        agent["num_actions"] = len(PUSHES)
    else:
        agent |= {"low": [-1.0, -1.0], "high": [1.0, 1.0]}
    agent["observations"] = {str(size): blocks(*known[size]) for size in sizes}
    return {
        "name": "simple_spread",
        "task": TASK,
        "reward_rule": REWARD_RULE,
        "env": "spread",
        "horizon": HORIZON,
        "returns": "mean",
        "behaviours": list(TEACHERS),
        "plane": True,
        "world": {
            "id": "mpe2 simple_spread_v3",
            "version": "1.1.1",
            "arguments": {"local_ratio": 0.5, "max_cycles": HORIZON},
        },
        "types": {"agent": agent},
        "generator": generator,
    }
