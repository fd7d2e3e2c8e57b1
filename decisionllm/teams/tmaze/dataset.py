"""Logs of the T-maze for teams, made from a seed: one world is a group, and each of its agents an
episode.

expert: the rooms of the right side in an order drawn for each group. random: any rooms. mixed: half
of the groups each.
"""

from functools import partial

from decisionllm.protocols import Source
from decisionllm.teams.dataset import source
from decisionllm.teams.simulated_logs import Game, generate
from decisionllm.teams.tmaze.world import TEACHERS, Teacher, TMaze

TASK = "Go to the side that the first observation says, each agent to another room"
REWARD_RULE = "1 where each room of that side has one agent"


def load(
    *,
    log: str = "expert",
    agents: int = 3,
    length: int = 4,
    groups: int = 4000,
    text: str = "none",
    seed: int = 0,
) -> Source:
    """A log of the T-maze as episodes; the reward of each agent is its team's.

    Args:
        log: expert, random or mixed.
        agents: of each group, and rooms on a side.
        length: steps of the corridor, so that windows of length + 1 steps hold the cue where it is
            needed.
        groups: number of worlds.
        text: see `source`.
        seed: of the worlds and of the teachers.
    """
    simulated = generate(game(agents, length), log, groups=groups, seed=seed)
    name = f"tmaze-{log}-{agents}x{length}@seed{seed}-{groups}"
    return source(
        simulated,
        text=text,
        capacity=agents,
        agents=agents,
        length=length,
        name=name,
        behaviour=log,
    )


def game(agents: int, length: int) -> Game[TMaze]:
    """Return the T-maze of so many agents and steps."""
    if not (2 <= agents <= 16 and length >= 1):
        raise ValueError(
            f"dataset: expected agents of 2 .. 16 and a length of at least 1, got {agents} and "
            f"{length}"
        )
    agent = {"role": "", "num_actions": 2 * agents + 1, "observations": {"3": [["own", 3, 1]]}}
    meta = {
        "name": "T-maze",
        "task": TASK,
        "reward_rule": REWARD_RULE,
        "env": "tmaze",
        "horizon": length + 1,
        "types": {"agent": agent},
    }
    begin = partial(TMaze, agents=agents, length=length)
    return Game(begin, lambda world: meta, TEACHERS, Teacher)
