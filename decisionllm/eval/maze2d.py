"""Maze2D's evaluation: N mazes in lock-step, D4RL's starts, its fixed goal, its normalised score.

The standard protocol shows four numbers and no goal. For a policy trained with text=goal the text names the fixed goal; such a
row is always labelled `goal-text`, since the standard protocol lacks that information, or `instructed-1-3` where the text names
another cell.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decisionllm.datasets.maze2d import HORIZON, task_text
from decisionllm.envs.maze2d import GOAL_RADIUS, Maze, Planner, reward
from decisionllm.eval.report import figure, normalised
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.protocols import Begin, EnvDefaults
from decisionllm.registry import register
from decisionllm.schema import Episode

# Return of a random policy and of the reference controller: D4RL `d4rl/infos.py` and `d4rl/pointmaze/__init__.py`; of `open`, which has
# no second version there, our own of 4,000 episodes.
REFERENCE = {
    ("open", False): (8.05, 104.1),
    ("umaze", False): (23.85, 161.86),
    ("medium", False): (13.13, 277.39),
    ("large", False): (6.7, 273.99),
    ("umaze", True): (68.537689, 193.66285642381482),
    ("medium", True): (44.264742, 297.4552547777125),
    ("large", True): (30.569041, 303.4857382709002),
}

# Normalised scores on D4RL's own data, for context: CORL's README, last checkpoint, 4 seeds x 100 episodes, and QDT's values.
PUBLISHED = {
    "umaze": {"BC (CORL)": 0.36, "DT (CORL)": 18.08, "DT (QDT paper)": 31.0, "IQL (CORL)": 42.11, "QDT": 57.3, "ReBRAC (CORL)": 106.87},
    "medium": {"BC (CORL)": 0.79, "DT (CORL)": 31.71, "DT (QDT paper)": 8.2, "IQL (CORL)": 34.85, "QDT": 13.3, "ReBRAC (CORL)": 105.11},
    "large": {"BC (CORL)": 2.26, "DT (CORL)": 35.66, "DT (QDT paper)": 2.3, "IQL (CORL)": 61.72, "QDT": 31.0, "ReBRAC (CORL)": 78.33},
}  # fmt: skip


@register("env", "maze2d-umaze", maze="umaze", text="${text}")
@register("env", "maze2d-medium", maze="medium", text="${text}")
@register("env", "maze2d-large", maze="large", text="${text}")
@register("env", "maze2d-open", maze="open", text="${text}")
@register("env", "maze2d-umaze-dense", maze="umaze", dense=True, text="${text}")
@register("env", "maze2d-medium-dense", maze="medium", dense=True, text="${text}")
@register("env", "maze2d-large-dense", maze="large", dense=True, text="${text}")
class Maze2D(EnvDefaults):
    """N mazes of one layout with one goal.

    Args:
        num_episodes: N.
        maze: umaze, medium, large, or open without dense.
        dense: rewards are exp(-distance to the goal) instead of 1 within 0.5 of it.
        text: as in the dataset.
        instructed_goal: the text names this cell instead, as `row,column`, while rewards stay with the fixed goal: does the policy
            follow the text? Needs text=goal.
    """

    def __init__(
        self, num_episodes: int, *, maze: str, dense: bool = False, text: str = "none", instructed_goal: str = ""
    ) -> None:
        self.maze, self.dense, self.text, self.horizon = Maze.named(maze), dense, text, HORIZON[maze]
        self.instructed, by_goal = self.maze.goal, text in ("goal", "shuffled")
        if instructed_goal:
            cells = {f"{row},{column}": np.array((row, column)) for row, column in self.maze.free_cells}
            if (name := instructed_goal.replace(" ", "")) not in cells:
                raise ValueError(
                    f"env.instructed_goal: expected a free cell as row,column, one of {' '.join(cells)}; got {instructed_goal!r}"
                )
            if not by_goal:
                raise ValueError(f"env.instructed_goal: needs text=goal, so that the text names it; got text={text}")
            self.instructed = cells[name]
        words = {"none": "", "constant": task_text(maze)}.get(text, task_text(maze, self.instructed))
        self.tasks = [words] * num_episodes
        self.reference = REFERENCE[maze, dense]
        self.published = {} if dense else PUBLISHED.get(maze, {})
        row, column = self.instructed
        self.protocol = f"instructed-{row}-{column}" if instructed_goal else "goal-text" if by_goal else "standard"

    def reset(self, seed: int) -> np.ndarray:
        self.states, self.time = self.maze.reset(len(self.tasks), np.random.default_rng(seed)), 0
        return self.states

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rewards are those of the new positions."""
        self.states, self.time = self.maze.step(self.states, actions), self.time + 1
        N = len(self.tasks)
        gains = reward(self.states[:, :2], self.maze.goal, dense=self.dense)
        return self.states, gains, np.zeros(N, bool), np.full(N, self.time >= self.horizon)

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        """D4RL's normalised score of each episode: 100 (return - random) / (reference - random)."""
        return normalised(episodes, self.reference)

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """With a goal in the text: the share of episodes in which the ball came within its disc, and stayed for half of the last 100
        steps."""
        if self.protocol == "standard":
            return {}
        places = np.array([[*e.observations, e.final_observation] for e in episodes])[..., :2]
        inside = reward(places, self.instructed) > 0
        return {"reached": float(inside.any(1).mean()), "stayed": float((inside[:, -100:].mean(1) >= 0.5).mean())}

    def draw(self, episodes: Sequence[Episode], title: str, count: int = 16) -> Any:
        """The first episodes on the maze: rows downwards, columns to the right, walls where the ball's frame has them."""
        from matplotlib.patches import Circle

        rows, columns = self.maze.walls.shape
        made = figure(1 + 0.6 * columns, 1 + 0.6 * rows)
        axis = made.subplots()
        axis.imshow(self.maze.walls, cmap="Greys", vmax=2, extent=(-0.7, columns - 0.7, rows - 0.7, -0.7))
        axis.add_patch(Circle(tuple(self.maze.goal[::-1]), GOAL_RADIUS, color="tab:green", alpha=0.3))
        for episode in episodes[:count]:
            x, y = episode.observations[:, 0], episode.observations[:, 1]
            axis.plot(y, x, linewidth=0.8, alpha=0.8)
            axis.plot(y[0], x[0], "k.", markersize=4)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("y")
        axis.set_ylabel("x")
        return made

    def baselines(self, seed: int) -> dict[str, Begin]:
        def uniform(tasks: Sequence[str]) -> ScriptedPlayer:
            rng = np.random.default_rng(seed)
            return ScriptedPlayer(lambda seen: rng.uniform(-1, 1, (len(seen), 2)))

        return {"random": uniform, "planner": lambda tasks: PlannerPlayer(self.maze, len(tasks), seed)}


class PlannerPlayer:
    """D4RL's controller, which plans once an episode and knows the walls and the goal."""

    def __init__(self, maze: Maze, count: int, seed: int) -> None:
        self.planner, self.planned = Planner(maze, count, np.random.default_rng(seed)), False
        self.goals = np.tile(maze.goal, (count, 1))

    def act(
        self, observations: np.ndarray, rewards: np.ndarray | None = None, action_masks: np.ndarray | None = None
    ) -> np.ndarray:
        if not self.planned:
            self.planner.aim(np.arange(len(observations)), observations[:, :2], self.goals)
            self.planned = True
        return self.planner.act(observations)[0]

    def select(self, rows: np.ndarray) -> None:
        self.planner.select(rows)
