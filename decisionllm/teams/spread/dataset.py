"""Logs of simple_spread by scripted teachers, made from a seed: one world is a group, and each of
its agents an episode.

expert, medium, random: one teacher. mixed: a third of the groups each. convention: every group has
a fixed assignment that no observation shows, so that the log holds several joint policies.
"""

from collections.abc import Iterable

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.protocols import Source
from decisionllm.randomness import derive_seeds
from decisionllm.schema import Json
from decisionllm.teams.dataset import source
from decisionllm.teams.formats.team_log import Log
from decisionllm.teams.simulated_logs import SEEDS
from decisionllm.teams.spread.world import HORIZON, PUSHES, TEACHERS, Spread, Teacher, to_pushes

LOGS = ("expert", "medium", "random", "mixed", "convention")
TASK = "Cover every landmark, each with one agent, without touching another"
REWARD_RULE = "half the distance of each landmark to its nearest agent is lost at every step"
REWARD_RULE += ", and half a point for each touch"


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
        log: expert, medium, random, mixed or convention.
        agents: number in each group.
        groups: number of worlds.
        actions: `discrete`; or `continuous`, pushes within -1 .. 1.
        noise: share of the teacher's actions that are uniform.
        text, capacity: see `source`.
        seed: draws the worlds and the noise of the teachers.
    """
    simulated = generate(log, agents=agents, groups=groups, actions=actions, noise=noise, seed=seed)
    name = f"spread-{log}"
    if actions == "continuous":
        name += "-continuous"
    return source(
        simulated,
        text=text,
        capacity=capacity,
        behaviour=log,
        agents=agents,
        actions=actions,
        name=f"{name}-{agents}@seed{seed}-{groups}",
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
    """Play the worlds of a log; see `load`."""
    check_one_of("dataset.log", log, LOGS)
    check_one_of("dataset.actions", actions, ("discrete", "continuous"))
    if not (2 <= agents <= 16 and 1 <= groups <= SEEDS // 2 and 0 <= noise <= 1):
        raise ValueError(
            f"dataset: expected agents of 2 .. 16, groups of 1 .. {SEEDS // 2}, noise of 0 .. "
            f"1; got {agents}, {groups}, {noise}"
        )
    rng = np.random.default_rng(seed)
    discrete = actions == "discrete"
    if log == "mixed":
        kinds = rng.permutation(np.arange(groups) % 3)
    else:
        kinds = np.full(groups, TEACHERS.index(log))
    world = Spread(derive_seeds(seed, groups, first=SEEDS), agents)
    teacher = Teacher(world, kinds, rng, noise=noise, discrete=discrete)
    # Not used. Published logs have the actions that are drawn after these numbers.
    rng.integers(np.full(groups, agents))

    observations = []
    actions_by_step = []
    rewards = []
    for _ in range(HORIZON):
        observations.append(world.observe())  # (groups x agents, S)
        actions_by_step.append(teacher.act(world).astype(np.float32))
        rewards.append(world.step(to_pushes(actions_by_step[-1])).astype(np.float32))

    # a row for each step, group and agent, in this order
    step, group, agent = np.indices((HORIZON, groups, agents)).reshape(3, -1)
    action = np.concatenate(actions_by_step).reshape(len(step), -1)
    columns: dict[str, np.ndarray] = {
        "group": group,
        "step": step,
        "agent": agent,
        "reward": np.ravel(rewards),
        "terminated": np.zeros(len(step), bool),
        "behaviour": kinds[group],
        "observation": np.concatenate(observations),
    }
    if discrete:
        columns["action"] = action[:, 0].astype(np.int32)
    else:
        columns["action_values"] = action
    group, step = np.indices((groups, HORIZON)).reshape(2, -1)
    clock = {
        "group": group,
        "step": step,
        "terminated": np.zeros(len(step), bool),
        "truncated": step == HORIZON - 1,
    }
    return Log(describe([agents], actions, log=log, noise=noise, seed=seed), clock, columns)


def observation_blocks(agents: int) -> list[list[str | int]]:
    """Return the blocks (see `log_meta`) of an observation of mpe2 of this many agents."""
    others = agents - 1
    return [["own", 4, 1], ["landmark", 2, agents], ["agent", 2, others], ["", 2, others]]


def describe(agents: Iterable[int], actions: str, **generator: object) -> Json:
    """meta of a log, or of the worlds of an evaluation, with these numbers of agents."""
    agent: Json = {"role": ""}
    if actions == "discrete":
        agent["num_actions"] = len(PUSHES)
    else:
        agent |= {"low": [-1.0, -1.0], "high": [1.0, 1.0]}
    # by length: 4 + 2 n + 4 (n - 1) numbers
    agent["observations"] = {str(6 * n): observation_blocks(n) for n in agents}
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


READER = DatasetReader(version=2)
