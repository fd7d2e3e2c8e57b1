"""Logs of SMAX by scripted teachers, made from a seed: one battle is a group, and each of its units
an episode until it dies.

expert, medium, random: one teacher. mixed: a third of the groups each.
"""

from functools import partial

import numpy as np

from decisionllm.protocols import Source
from decisionllm.schema import Json
from decisionllm.teams.dataset import source
from decisionllm.teams.simulated_logs import Game, generate
from decisionllm.teams.smax.world import HORIZON, OWN, STOP, TEACHERS, UNIT, Facts, Smax, Teacher

TASK = "Defeat every enemy unit, and lose none that can be spared"
REWARD_RULE = "the share of the enemies' health that is taken, and 1 for a victory"


def load(
    *,
    map: str = "2s3z",
    log: str = "mixed",
    groups: int = 1500,
    noise: float = 0.1,
    text: str = "none",
    seed: int = 0,
) -> Source:
    """A log of SMAX as episodes; the return of each unit is that of its team, also after the unit's
    death.

    Args:
        map: one of JaxMARL's, such as 3m, 2s3z, 8m.
        log: expert, medium, random or mixed.
        groups: number of battles.
        noise: share of the teacher's actions that are random.
        text: see `source`.
        seed: draws the battles and the noise of the teachers.
    """
    simulated = generate(game(map), log, groups=groups, noise=noise, seed=seed)
    name = f"smax-{map}-{log}@seed{seed}-{groups}"
    # Also enough for the enemies, of which an observation never has more
    capacity = int(simulated.agents["agent"].max()) + 1
    return source(simulated, text=text, capacity=capacity, name=name, behaviour=log, map=map)


def game(map: str) -> Game[Smax]:
    """Return the battles of a map."""

    def describe_worlds(world: Smax) -> Json:
        return describe(map, world.facts)

    return Game(partial(Smax, map=map), describe_worlds, TEACHERS, Teacher, agent_types)


def agent_types(world: Smax) -> np.ndarray:
    """(E, N) index of each unit's type in meta["types"]"""
    return np.searchsorted(world.facts.kinds, world.kinds)


def describe(map: str, facts: Facts) -> Json:
    """meta of a log, or of the battles of an evaluation."""
    length = UNIT * (facts.allies + facts.enemies - 1) + OWN
    # The blocks of an observation, see `log_meta`
    blocks = [["ally", UNIT, facts.allies - 1], ["enemy", UNIT, facts.enemies], ["own", OWN, 1]]
    unit = {"num_actions": STOP + 1 + facts.enemies, "observations": {str(length): blocks}}
    names = [facts.names[k] for k in facts.kinds]
    return {
        "task": TASK,
        "reward_rule": REWARD_RULE,
        "name": f"SMAX {map}",
        "env": "smax",
        "horizon": HORIZON,
        "world": {
            "id": "JaxMARL HeuristicEnemySMAX",
            "version": facts.version,
            "arguments": {"scenario": map},
        },
        "types": {name: unit | {"role": name} for name in names},
    }
