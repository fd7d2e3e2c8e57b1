"""The environment of the synthetic dataset: N points and a goal."""

from collections.abc import Sequence

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.synthetic import (
    GOALS,
    HORIZON,
    MOVES,
    STEP,
    move,
    nearest_moves,
    start,
    task_text,
)
from decisionllm.eval.rollout import ScriptedPlayer, uniform_player
from decisionllm.protocols import Begin, Env


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

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Return a player of uniform actions, and an expert that goes straight to the goal."""

        def draw_moves(tasks: Sequence[str]) -> ScriptedPlayer:
            rng = np.random.default_rng(seed)
            return ScriptedPlayer(
                lambda seen, rows: rng.integers(len(MOVES), size=(len(seen), 1)), tasks
            )

        def expert(tasks: Sequence[str]) -> ScriptedPlayer:
            return ScriptedPlayer(lambda seen, rows: self.go_straight(seen), tasks)

        return {
            "random": draw_moves if self.discrete else uniform_player(seed, 2),
            "expert": expert,
        }

    def go_straight(self, positions: np.ndarray) -> np.ndarray:
        """Return the actions that lead straight to the goal: (N, 2) -> (N, A)."""
        steps = np.clip((self.goal - positions) / STEP, -1, 1)
        return nearest_moves(steps)[:, None] if self.discrete else steps
