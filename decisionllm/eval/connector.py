"""Connector's evaluation: E boards, all of their agents in one batch. The score is the boards on which all connect, in percent."""

from functools import partial

import numpy as np

from decisionllm.datasets.connector import describe
from decisionllm.envs.connector import TEACHERS, Connector, Teacher
from decisionllm.eval.team_env import WorldTeams
from decisionllm.registry import register


@register(
    "env", "connector", text="${text}", boards="${dataset.boards}", grid="${dataset.grid}", agents="${dataset.agents}",
    frames="${text_wordings}",
)  # fmt: skip
class ConnectorTeams(WorldTeams):
    """num_episodes boards.

    Args:
        boards, grid, agents, text: as in the dataset.
        wordings, frames: see TeamEnv.
    """

    teachers, teacher, averages = TEACHERS, Teacher, ("connected",)

    def __init__(
        self, num_episodes: int, *, boards: str = "facing", grid: int = 6, agents: int = 4, text: str = "none",
        wordings: str = "trained", frames: int = 0,
    ) -> None:  # fmt: skip
        begin = partial(Connector, boards=boards, grid=grid, agents=agents)
        super().__init__(begin, lambda world: describe(grid, agents), num_episodes, text=text, wordings=wordings, frames=frames)

    def world_outcomes(self) -> dict[str, np.ndarray]:
        return super().world_outcomes() | {"connected": self.world.connected}
