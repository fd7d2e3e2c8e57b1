"""Logs of Connector, made from a seed: one board is a group, and each of its agents an episode until it is connected or cut off.

expert: paths planned for one agent after another. random: any allowed moves. mixed: half of the groups each.
"""

from functools import partial

from decisionllm.datasets.team import source
from decisionllm.datasets.team_worlds import Game, generate
from decisionllm.envs.connector import MOVES, TEACHERS, Connector, Teacher, horizon
from decisionllm.protocols import Source
from decisionllm.registry import register

TASK = "Draw a path from every agent to its target, so that no two paths cross"
REWARD_RULE = "1 for each connection and -0.03 for each step before it, divided by the number of agents"


@register("dataset", "connector", text="${text}")
def load(
    *, log: str = "expert", boards: str = "facing", grid: int = 6, agents: int = 4, groups: int = 2000, noise: float = 0.0,
    text: str = "none", seed: int = 0,
) -> Source:  # fmt: skip
    """A log of Connector as episodes; the return of each agent is its team's, also after its end.

    Args:
        log: expert, random or mixed.
        boards, grid, agents: see `envs.connector`.
        groups: number of boards.
        noise: share of the teacher's actions that are random.
        text: see `team.source`.
        seed: of the boards and of the teachers.
    """
    made = generate(game(boards, grid, agents), log, groups=groups, noise=noise, seed=seed)
    name = f"connector-{boards}-{log}-{agents}x{grid}@seed{seed}-{groups}"
    return source(made, text=text, capacity=agents, boards=boards, grid=grid, agents=agents, name=name, behaviour=log)


def game(boards: str, grid: int, agents: int) -> Game:
    """Connector on such boards, see `envs.connector`."""
    own = (2 * grid - 1) ** 2 + 2
    blocks = [["own", own, 1], ["agent", 5, agents - 1]]
    types = {"agent": {"role": "", "num_actions": MOVES, "observations": {str(own + 5 * (agents - 1)): blocks}}}
    meta = {"name": "Connector", "task": TASK, "reward_rule": REWARD_RULE, "env": "connector", "horizon": horizon(grid)}
    begin = partial(Connector, boards=boards, grid=grid, agents=agents)
    return Game(begin, lambda world: meta | {"types": types}, TEACHERS, Teacher)
