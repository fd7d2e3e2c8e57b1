"""Connector's evaluation: E boards, all of their agents in one batch. The score is the boards on which all connect, in percent."""

import numpy as np

from decisionllm.datasets.connector import game
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

    averages = ("connected",)

    def __init__(
        self, num_episodes: int, *, boards: str = "facing", grid: int = 6, agents: int = 4, text: str = "none",
        wordings: str = "trained", frames: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(game(boards, grid, agents), num_episodes, text=text, wordings=wordings, frames=frames)

    def world_outcomes(self) -> dict[str, np.ndarray]:
        return super().world_outcomes() | {"connected": self.world.connected}
