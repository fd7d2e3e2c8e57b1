"""The environment of the synthetic dataset: N points and a goal."""

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.synthetic import GOALS, HORIZON, MOVES, move, start, task_text
from decisionllm.protocols import Env


class PointEnv(Env):
    """N points that start anywhere; an episode ends at the goal or after 20 steps. The score is the
    return.

    Args:
        num_episodes: N.
        text: `none`, or `goal`: the text names the goal.
        discrete: five actions instead of a step in the plane.
        goal: north, south, east or west.
    """

    name = "synthetic"
    unit = "return"

    horizon = HORIZON
    action_dim = 2

    def __init__(
        self,
        num_episodes: int,
        *,
        text: str = "none",
        discrete: bool = False,
        goal: str = "north",
    ) -> None:
        check_one_of("env.goal", goal, GOALS)
        self.goal = np.array(GOALS[goal])
        self.text = text
        self.discrete = discrete
        self.num_actions = len(MOVES) if discrete else 0
        self.tasks = [""] * num_episodes
        if text == "goal":
            self.protocol = "goal-text"
            self.tasks = [task_text(goal)] * num_episodes

    def reset(self, seed: int) -> np.ndarray:
        self.positions = start(len(self.tasks), np.random.default_rng(seed))
        self.time = 0
        return self.positions

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        moves = MOVES[actions[:, 0].astype(int)] if self.discrete else actions
        self.positions, rewards, arrived = move(self.positions, moves, self.goal)
        self.time += 1
        over = np.full(len(self.tasks), self.time >= self.horizon)
        return self.positions, rewards, arrived, over
