"""The evaluation of OGBench's point mazes: five tasks a maze, N episodes in lock-step. The score is
the share of episodes that reach their goal, in percent."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.eval.pictures import figure
from decisionllm.eval.rollout import ScriptedPlayer, uniform_player
from decisionllm.protocols import Begin, Env
from decisionllm.schema import Episode, Json
from decisionllm.worlds.ogbench.dataset import TEXTS, heading, parse, task_text
from decisionllm.worlds.ogbench.simulator import (
    CELL,
    GOAL_RADIUS,
    HORIZON,
    TASKS,
    Maze,
    cell_of,
    is_reached,
    middle,
    sample_positions,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Success in percent on the published logs, for context. Sources: OGBench (arXiv 2410.20092), means
# of 8 seeds; ALPS.
PUBLISHED = {
    "pointmaze-large-navigate-v0": {"GCBC": 29.0, "QRL": 86.0},
    "pointmaze-giant-navigate-v0": {"GCBC": 1.0, "QRL": 68.0},
    "pointmaze-medium-stitch-v0": {"GCBC": 23.0, "QRL": 80.0},
    "pointmaze-large-stitch-v0": {"GCBC": 7.0, "ALPS": 96.0},
    "pointmaze-giant-stitch-v0": {"GCBC": 0.0, "ALPS": 98.0},
}


class PointMaze(Env):
    """N points in one maze, whose rows have its five tasks in turn. An episode ends where its goal
    is reached, at the latest after 1,000 steps.

    Args:
        num_episodes: N; a multiple of five shows each task as often: 250 for OGBench's 50 each.
        name: of the dataset, which names the maze.
        text: as in the dataset.
        task: 1 to 5: one task alone; 0: all.
        goal: `x,y`: a place in the maze as the goal of all episodes; empty: those of the tasks.
    """

    unit = "episodes that reach the goal, %"
    horizon = HORIZON
    num_actions = 0
    action_dim = 2

    def __init__(
        self,
        num_episodes: int,
        *,
        name: str = "pointmaze-medium-navigate-v0",
        text: str = "none",
        task: int = 0,
        goal: str = "",
    ) -> None:
        published, self.maze_name, _ = parse(name)
        check_one_of("env.text", text, TEXTS)
        if not 0 <= task <= len(TASKS[self.maze_name]):
            raise ValueError(f"env.task: expected 1 to 5, or 0 for all tasks, got {task}")
        self.name = f"pointmaze-{self.maze_name}"
        self.maze = Maze.from_name(self.maze_name)
        self.published = PUBLISHED.get(published, {})
        self.text = text
        self.protocol = "goal-text" if text == "goal" else "standard"
        if text == "none":
            self.observation_parts = (("position", 2), ("goal", 2))
        # (N,) the task of each row, from 0
        self.number = np.arange(num_episodes) % len(TASKS[self.maze_name])
        if task:
            self.number = np.full(num_episodes, task - 1)
        self.own_goal = None
        if goal:
            self.own_goal = parse_goal(goal, self.maze, self.maze_name)
            self.protocol += "-own-goal"
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        cells = np.array(TASKS[self.maze_name])[self.number]  # (N, start and goal, 2)
        self.positions = sample_positions(cells[:, 0], rng)
        self.goals = sample_positions(cells[:, 1], rng)
        if self.own_goal is not None:
            self.goals = np.tile(self.own_goal, (len(cells), 1))
        self.time = 0
        self.tasks = [""] * len(cells)
        if self.text == "goal":
            self.tasks = [task_text(self.maze_name, goal) for goal in self.goals]
        return self._observations()

    def _observations(self) -> np.ndarray:
        """Return the observations (N, S)."""
        if self.text == "goal":
            return self.positions
        return np.concatenate([self.positions, self.goals], 1)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Advance every point; the reward is 1 where its goal is reached after the step."""
        self.positions = self.maze.step(self.positions, actions)
        self.time += 1
        there = is_reached(self.positions, self.goals)
        late = np.full(len(there), self.time >= self.horizon)
        return self._observations(), there.astype(np.float64), there, late & ~there

    def outcomes(self) -> dict[str, np.ndarray]:
        return {"task": self.number + 1, "goal": self.goals}

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        """Return 100 where the goal was reached, else 0: (M,)."""
        return 100.0 * np.array([e.terminated for e in episodes])

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        """Return the score of each task, and the mean steps of the episodes that reached their goal."""
        numbers = np.array([e.outcome["task"] for e in episodes])
        scores = self.score(episodes)
        by_task = {f"task_{k}": float(scores[numbers == k].mean()) for k in np.unique(numbers)}
        steps = [len(e.rewards) for e in episodes if e.terminated]
        return by_task | {"steps_to_goal": float(np.mean(steps)) if steps else None}

    def draw(self, episodes: Sequence[Episode], title: str, count: int = 10) -> "Figure":
        """Draw the paths of the first episodes on the maze, with the discs of their goals."""
        from matplotlib.patches import Circle

        rows, columns = self.maze.walls.shape
        picture = figure(1 + 0.5 * columns, 1 + 0.5 * rows)
        axis = picture.subplots()
        right, bottom = CELL * (np.array([columns, rows]) - 1.5)
        axis.imshow(self.maze.walls, cmap="Greys", vmax=2, extent=(-6, right, bottom, -6))
        for episode in episodes[:count]:
            x, y = np.array([*episode.observations, episode.final_observation]).T[:2]
            axis.plot(x, y, linewidth=0.8, alpha=0.8)
            axis.plot(x[0], y[0], "k.", markersize=4)
            goal = Circle(episode.outcome["goal"], GOAL_RADIUS, color="tab:green", alpha=0.3)
            axis.add_patch(goal)
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="x", ylabel="y")
        return picture

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Return a player of uniform actions, and OGBench's, which knows the walls and the goal, without
        noise.
        """

        def planner(tasks: Sequence[str]) -> ScriptedPlayer:
            def choose(seen: np.ndarray, rows: np.ndarray) -> np.ndarray:
                return heading(self.maze, seen[:, :2], self.goals[rows])

            return ScriptedPlayer(choose, tasks)

        return {"random": uniform_player(seed, 2), "planner": planner}


def parse_goal(text: str, maze: Maze, name: str) -> np.ndarray:
    """Parse "12.5,4" into a position (2,) float64; a ValueError if it is no place in the maze."""
    words = text.replace(" ", "").split(",")
    try:
        goal = np.array([float(word) for word in words])
    except ValueError:
        goal = np.zeros(0)
    if goal.shape == (2,) and np.isfinite(goal).all() and maze.inside(goal):
        return goal
    example = middle(maze.free_cells[-1]).tolist()
    got = repr(text)
    if goal.shape == (2,) and np.isfinite(goal).all():
        row, column = cell_of(goal).tolist()
        got += f", which is in row {row}, column {column}: no free cell"
    raise ValueError(
        f"env.goal: expected x,y in a free cell of {name}, such as {example[0]:g},{example[1]:g}; "
        f"got {got}"
    )
