"""The world of the synthetic dataset: N points and a goal."""

import numpy as np

from decisionllm.datasets.synthetic import GOALS, task_text
from decisionllm.envs import point
from decisionllm.registry import register


@register("env", "synthetic", text="${text}")
@register("env", "synthetic-discrete", text="${text}", discrete=True)
class PointWorld:
    """N points that start anywhere; an episode ends at the goal or after 20 steps. The score is the return."""

    horizon = point.HORIZON

    def __init__(self, num_episodes, *, text: str = "none", discrete: bool = False, goal: str = "north"):
        self.goal, self.text, self.discrete = np.array(GOALS[goal]), text, discrete
        self.protocol = "goal-text" if text == "goal" else "standard"
        self.tasks = [task_text(goal) if text == "goal" else ""] * num_episodes

    def reset(self, seed):
        self.positions, self.time = point.start(len(self.tasks), np.random.default_rng(seed)), 0
        return self.positions

    def step(self, actions):
        """(N, A) -> observations (N, 2), rewards (N,), ended (N,), truncated (N,)"""
        moves = point.MOVES[actions[:, 0].astype(int)] if self.discrete else actions
        self.positions, rewards, arrived = point.move(self.positions, moves, self.goal)
        self.time += 1
        return self.positions, rewards, arrived, np.full(len(self.tasks), self.time >= self.horizon)
