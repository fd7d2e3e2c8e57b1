"""The T-maze's evaluation: E teams, each of which is right or wrong. The score is the share that is right, in percent."""

from typing import Any

import numpy as np

from decisionllm.datasets.tmaze import describe
from decisionllm.envs.tmaze import TEACHERS, Teacher, TMaze
from decisionllm.eval.team_env import WorldTeams
from decisionllm.registry import register


@register("env", "tmaze", text="${text}", agents="${dataset.agents}", length="${dataset.length}", frames="${text_wordings}")
class TMazeTeams(WorldTeams):
    """num_episodes teams.

    Args:
        agents, length, text: as in the dataset.
        wordings, frames: see TeamEnv.
    """

    teachers, teacher = TEACHERS, Teacher

    def __init__(
        self, num_episodes: int, *, agents: int = 3, length: int = 4, text: str = "none", wordings: str = "trained", frames: int = 0
    ) -> None:  # fmt: skip
        super().__init__(num_episodes, text=text, wordings=wordings, frames=frames)
        self.agents, self.length = agents, length
        self.reset(0)

    def begin(self, seeds: np.ndarray) -> TMaze:
        return TMaze(seeds, self.agents, self.length)

    def meta_of(self, world: TMaze) -> dict[str, Any]:
        return describe(self.agents, self.length)
