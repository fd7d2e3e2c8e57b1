"""Logs of SMAX by scripted teachers, made from a seed: one battle is a group, and each of its units an episode until it dies.

expert, medium, random: one teacher. mixed: a third of the groups each.
"""

from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets.team import Log, source
from decisionllm.envs.smax import HORIZON, OWN, STOP, TEACHERS, UNIT, Facts, Smax, Teacher
from decisionllm.protocols import Source
from decisionllm.registry import register

LOGS = (*TEACHERS, "mixed")
SEEDS = 1_000_000  # log `seed` fights its battles with seeds from (seed + 1) times this on
TASK = "Defeat every enemy unit, and lose none that can be spared"
REWARD_RULE = "the share of the enemies' health that is taken, and 1 for a victory"


@register("dataset", "smax", text="${text}")
def load(
    *, map: str = "2s3z", log: str = "mixed", groups: int = 1500, noise: float = 0.1, text: str = "none", seed: int = 0
) -> Source:
    """A log of SMAX as episodes; the return of each unit is that of its team, also after the unit's death.

    Args:
        map: one of JaxMARL's, such as 3m, 2s3z, 8m.
        log: one of LOGS.
        groups: number of battles.
        noise: share of the teacher's actions that are random.
        text: see `team.source`.
        seed: of the battles and of the teachers.
    """
    made = generate(log, map=map, groups=groups, noise=noise, seed=seed)
    name = f"smax-{map}-{log}@seed{seed}-{groups}"
    capacity = int(made.agents["agent"].max()) + 1  # also enough for the enemies, of which an observation never has more
    return source(made, text=text, capacity=capacity, name=name, behaviour=log, map=map)


def generate(log: str, *, map: str = "2s3z", groups: int = 1500, noise: float = 0.1, seed: int = 0) -> Log:
    """The columns of a log; see `load`."""
    one_of("dataset.log", log, LOGS)
    if not (1 <= groups <= SEEDS and 0 <= noise <= 1):
        raise ValueError(f"dataset: expected groups of 1 .. {SEEDS} and noise of 0 .. 1, got {groups} and {noise}")
    rng = np.random.default_rng(seed)
    kinds = rng.permutation(np.arange(groups) % 3) if log == "mixed" else np.full(groups, TEACHERS.index(log))
    world = Smax(SEEDS * (seed + 1) + np.arange(groups), map)
    teacher, meta = Teacher(world, kinds, rng, noise=noise), describe(map, world.facts, log=log, noise=noise, seed=seed)
    steps: list[dict[str, np.ndarray]] = []
    agents: list[dict[str, np.ndarray]] = []
    while not world.over.all():
        acting, time, fighting = world.acting, world.time, np.flatnonzero(~world.over)
        group, agent = np.nonzero(acting)
        rows = {"group": group, "step": np.full(len(group), time), "agent": agent, "behaviour": kinds[group],
                "agent_type": np.searchsorted(world.facts.kinds, world.kinds[acting]),
                "observation": world.observations[acting], "available": world.masks[acting]}  # fmt: skip
        actions = teacher.act(world)
        gains = world.step(actions)
        agents.append(rows | {"action": actions[acting], "terminated": ~world.alive[acting]})
        steps.append({
            "group": fighting, "step": np.full(len(fighting), time), "reward": gains[fighting], "won": world.won[fighting],
            "terminated": world.terminated[fighting], "truncated": (world.over & ~world.terminated)[fighting],
        })  # fmt: skip
    tables = [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]} for parts in (steps, agents)]
    return Log(meta, tables[0], tables[1])


def blocks(facts: Facts) -> list[list[Any]]:
    """The blocks of an observation, see `team_log`."""
    return [["ally", UNIT, facts.allies - 1], ["enemy", UNIT, facts.enemies], ["own", OWN, 1]]


def describe(map: str, facts: Facts, **generator: Any) -> dict[str, Any]:
    """meta of a log, or of the battles of an evaluation."""
    length = UNIT * (facts.allies + facts.enemies - 1) + OWN
    unit = {"num_actions": STOP + 1 + facts.enemies, "observations": {str(length): blocks(facts)}}
    return {
        "task": TASK, "reward_rule": REWARD_RULE, "name": f"SMAX {map}", "env": "smax", "horizon": HORIZON, "returns": "team", "behaviours": list(TEACHERS),
        "world": {"id": "JaxMARL HeuristicEnemySMAX", "version": facts.version, "arguments": {"scenario": map}},
        "types": {facts.names[k]: unit | {"role": facts.names[k]} for k in facts.kinds}, "generator": generator,
    }  # fmt: skip
