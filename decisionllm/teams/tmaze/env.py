"""The T-maze's evaluation: E teams, each of which is right or wrong. The score is the share that is
right, in percent."""

from decisionllm.teams.team_env import WorldTeams
from decisionllm.teams.tmaze.dataset import game
from decisionllm.teams.tmaze.world import TMaze


class TMazeTeams(WorldTeams[TMaze]):
    """num_episodes teams.

    Args:
        agents, length, text: as in the dataset.
        wordings, frames: see `WorldTeams`.
    """

    def __init__(
        self,
        num_episodes: int,
        *,
        agents: int = 3,
        length: int = 4,
        text: str = "none",
        wordings: str = "trained",
        frames: int = 0,
    ) -> None:
        self.name = f"tmaze, {agents} agents, length {length}"
        tmaze = game(agents, length)
        super().__init__(tmaze, num_episodes, text=text, wordings=wordings, frames=frames)
