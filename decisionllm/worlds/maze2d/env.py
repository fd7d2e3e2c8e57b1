"""Maze2D's evaluation: N mazes in lock-step, D4RL's starts, its fixed goal, its normalised score.

The standard protocol shows four numbers and no goal. For a policy trained with text=goal the text
names the fixed goal; such a row is always labelled `goal-text`, since the standard protocol lacks
that information, or `instructed-1-3` where the text names another cell. Wordings that were never
trained on are labelled `-held-out`. `multi2d`: each episode has a goal of its own.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.paraphrases import render_frames, uses_held_out_frames
from decisionllm.eval.pictures import figure
from decisionllm.eval.rollout import ScriptedPlayer, uniform_player
from decisionllm.protocols import Begin, Env
from decisionllm.schema import Episode, Json
from decisionllm.worlds.maze2d.dataset import GOAL_TEXTS, HORIZON, goal_facts, task_text
from decisionllm.worlds.maze2d.simulator import GOAL_RADIUS, Maze, Planner, reward
from decisionllm.worlds.maze2d.wording_accuracy import confusion_table, measure_wording_accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from decisionllm.policy.policy import Policy

# {(maze, dense): return of a random policy, of the reference controller}.
# Source: D4RL `d4rl/infos.py` and `d4rl/pointmaze/__init__.py`. D4RL has no second version of
# `open`: its numbers are our own of 4,000 episodes.
REFERENCE = {
    ("open", False): (8.05, 104.1),
    ("umaze", False): (23.85, 161.86),
    ("medium", False): (13.13, 277.39),
    ("large", False): (6.7, 273.99),
    ("umaze", True): (68.537689, 193.66285642381482),
    ("medium", True): (44.264742, 297.4552547777125),
    ("large", True): (30.569041, 303.4857382709002),
}

# Normalised scores on D4RL's own data, for context: CORL's README, last checkpoint, 4 seeds x 100
# episodes, and QDT's values.
PUBLISHED = {
    "umaze": {
        "BC (CORL)": 0.36,
        "DT (CORL)": 18.08,
        "DT (QDT paper)": 31.0,
        "IQL (CORL)": 42.11,
        "QDT": 57.3,
        "ReBRAC (CORL)": 106.87,
    },
    "medium": {
        "BC (CORL)": 0.79,
        "DT (CORL)": 31.71,
        "DT (QDT paper)": 8.2,
        "IQL (CORL)": 34.85,
        "QDT": 13.3,
        "ReBRAC (CORL)": 105.11,
    },
    "large": {
        "BC (CORL)": 2.26,
        "DT (CORL)": 35.66,
        "DT (QDT paper)": 2.3,
        "IQL (CORL)": 61.72,
        "QDT": 31.0,
        "ReBRAC (CORL)": 78.33,
    },
}


class Maze2D(Env):
    """N mazes of one layout, with its one goal or a goal for each episode, and D4RL's normalised
    score.

    Args:
        num_episodes: N.
        maze: umaze, medium, large, or open without dense.
        dense: rewards are exp(-distance to the goal) instead of 1 within 0.5 of it.
        text: as in the dataset.
        goal: `fixed`, or `random`: any free cell, drawn for each episode, rewarded and named by its
            text. Needs text=goal. Source: Multi2D of Diffuser (arXiv 2205.09991), there within 0.1
            of the cell's place.
        instructed_goal: the text names this cell instead, as `row,column`, while rewards stay with
            the fixed goal: does the policy follow the text? `1,3;3,1` or `all` name several in
            turn. Needs text=goal.
        wordings: with text=paraphrased, `trained` or `held_out`: which frames the texts have, each
            in turn.
        frames: how many frames were trained on, see `text_wordings`; 0: all.
    """

    reference: tuple[float, float]
    num_actions = 0
    action_dim = 2
    world_options = ("maze", "dense")

    def __init__(
        self,
        num_episodes: int,
        *,
        maze: str,
        dense: bool = False,
        text: str = "none",
        instructed_goal: str = "",
        wordings: str = "trained",
        frames: int = 0,
        goal: str = "fixed",
    ) -> None:
        self.name = f"maze2d-{maze}-dense" if dense else f"maze2d-{maze}"
        self.maze = Maze.from_name(maze)
        self.dense = dense
        self.text = text
        self.horizon = HORIZON[maze]
        self.facts = goal_facts(maze)
        if (maze, dense) not in REFERENCE:
            raise ValueError(
                f"env.dense: expected False with maze={maze}, of which no dense score is known, got "
                f"{dense}"
            )
        self.reference = REFERENCE[maze, dense]
        self.published = {} if dense else PUBLISHED.get(maze, {})
        check_one_of("env.goal", goal, ("fixed", "random"))
        self.random = goal == "random"
        names_goal = text in GOAL_TEXTS
        held_out = uses_held_out_frames(wordings, text)
        if self.random and (instructed_goal or not names_goal):
            raise ValueError(
                "env.goal=random: needs text=goal and no env.instructed_goal, got "
                f"text={text} and {instructed_goal!r}"
            )
        if instructed_goal and not names_goal:
            raise ValueError(
                f"env.instructed_goal: needs text=goal, so that the text names it; got text={text}"
            )
        self.cells = self._named_cells(instructed_goal)
        self.texts = self._write_texts(maze, held_out, frames)
        # {text: the cell that it names, the kind of its frame}
        self.meaning: dict[str, tuple[np.ndarray, str]] = {}
        self.name_goals(np.arange(num_episodes) % len(self.texts))
        self.protocol = "goal-text" if names_goal else "standard"
        if self.random:
            self.protocol = "multi2d"
        if instructed_goal:
            self.protocol = "-".join(["instructed", *re.findall(r"\w+", instructed_goal)])
        if held_out:
            self.protocol += "-held-out"

    def _named_cells(self, instructed_goal: str) -> np.ndarray:
        """Return the cells that texts name, without texts the goal: (G, 2) int."""
        if self.random or instructed_goal == "all":
            return self.maze.free_cells
        if instructed_goal:
            return self.maze.cells(instructed_goal, "env.instructed_goal")
        return self.maze.goal[None]

    def _write_texts(self, maze: str, held_out: bool, frames: int) -> list[list[tuple[str, str]]]:
        """Return the texts that name each of the G cells: (kind of frame, text)."""
        tasks = [task_text(maze, cell) for cell in self.cells]
        if self.text == "paraphrased":
            wordings = render_frames(self.facts, held_out=held_out, frames=frames)
            return [wordings[task] for task in tasks]
        if self.text == "constant":
            tasks = [task_text(maze)]
        elif self.text not in GOAL_TEXTS:
            tasks = [""]
        return [[("", task)] for task in tasks]

    def name_goals(self, numbers: np.ndarray) -> None:
        """Let the texts of the N episodes name these cells, (N,) int; goal=random rewards them."""
        self.tasks = []
        for i, number in enumerate(numbers):
            choices = self.texts[number]
            kind, words = choices[i // len(self.texts) % len(choices)]
            self.tasks.append(words)
            self.meaning[words] = self.cells[number], kind
        self.goals = np.tile(self.maze.goal, (len(numbers), 1))  # (N, 2)
        if self.random:
            self.goals = self.cells[numbers]

    def reset(self, seed: int) -> np.ndarray:
        N = len(self.tasks)
        if self.random:
            self.name_goals(np.random.default_rng((seed, 1)).integers(len(self.cells), size=N))
        self.states = self.maze.reset(N, np.random.default_rng(seed))
        self.time = 0
        return self.states

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rewards are those of the new positions."""
        self.states = self.maze.step(self.states, actions)
        self.time += 1
        N = len(self.tasks)
        gains = reward(self.states[:, :2], self.goals, dense=self.dense)
        return self.states, gains, np.zeros(N, bool), np.full(N, self.time >= self.horizon)

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        """Return and score if every step after the first touch of the goal counted (`latched`).

        With a goal in the text also the share of episodes in which the ball came within its disc
        (`reached`), and stayed for half of the last 100 steps (`stayed`); by kind of frame and by
        goal where there are several, and then the cell at the end.
        """
        metrics: Json = {}
        if not self.dense:
            metrics |= self._latched_return(episodes)
        if self.protocol != "standard":
            metrics |= self._goal_metrics(episodes)
        return metrics

    def _latched_return(self, episodes: Sequence[Episode]) -> Json:
        low, high = self.reference
        steps_after_touch = [np.maximum.accumulate(e.rewards > 0).sum() for e in episodes]
        latched = float(np.mean(steps_after_touch))
        return {"latched_return": latched, "latched_score": 100 * (latched - low) / (high - low)}

    def _goal_metrics(self, episodes: Sequence[Episode]) -> Json:
        """Return the shares of balls that come to the goals of the texts, and of those that stay."""
        places = np.stack([path(e) for e in episodes])  # (M, T + 1, 2)
        goals = np.stack([self.meaning[e.task][0] for e in episodes])  # (M, 2)
        kinds = np.array([self.meaning[e.task][1] for e in episodes])  # (M,)
        inside = reward(places, goals[:, None]) > 0  # (M, T + 1)
        near_the_end = inside[:, -100:].mean(1)  # (M,) share of steps
        # of each episode
        outcomes = {"reached": inside.any(1), "stayed": near_the_end >= 0.5}
        metrics: Json = {name: float(outcome.mean()) for name, outcome in outcomes.items()}
        goal_names = cell_names(goals)
        if len(set(kinds)) > 1:
            metrics["by_kind"] = shares_by(kinds, outcomes)
        if len(set(goal_names)) > 1:
            ends = cell_names(np.rint(places[:, -1]).astype(int))
            metrics["by_goal"] = shares_by(goal_names, outcomes)
            rows = np.unique(goal_names).tolist()
            columns = np.unique([*goal_names, *ends]).tolist()
            table = confusion_table(goal_names, ends, rows=rows, columns=columns)
            metrics["final_cell"] = table
        return metrics

    def probe(self, policy: "Policy") -> Json:
        """Measure the share of texts that a policy understands, on 64 states; see
        `measure_wording_accuracy`.
        """
        trained = policy.info["dataset"].get("wordings", {})
        facts = {task: values for task, values in self.facts.items() if task in trained}
        if not facts:
            return {}
        rng = np.random.default_rng(0)
        states = self.maze.reset(64, rng)
        states[:, 2:] = rng.uniform(-1, 1, (64, 2))
        labels = [f"{values['row']},{values['column']}" for values in facts.values()]
        frames = policy.config["text_wordings"]
        return measure_wording_accuracy(policy, states, facts, labels, frames=frames)

    def draw(self, episodes: Sequence[Episode], title: str, count: int = 16) -> "Figure":
        """Draw the first episodes on the maze."""
        rows, columns = self.maze.walls.shape
        picture = figure(1 + 0.6 * columns, 1 + 0.6 * rows)
        axis = picture.subplots()
        draw_maze(axis, self.maze, self.goals[:count], [e.observations for e in episodes[:count]])
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="y", ylabel="x")
        return picture

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Return a player of uniform actions, and D4RL's controller, which knows the walls and the goal
        and plans once.
        """

        def planner(tasks: Sequence[str]) -> ScriptedPlayer:
            controller = Planner(self.maze, len(tasks), np.random.default_rng(seed))
            starts = self.states[:, :2].astype(np.float32)
            controller.aim(np.arange(len(tasks)), starts, self.goals)
            return ScriptedPlayer(lambda seen, rows: controller.act(seen)[0], tasks)

        return {"random": uniform_player(seed, 2), "planner": planner}


def path(episode: Episode) -> np.ndarray:
    """Return the positions of the ball (T + 1, 2), the last one included."""
    return np.array([*episode.observations, episode.final_observation])[:, :2]


def cell_names(cells: np.ndarray) -> np.ndarray:
    """Name cells (M, 2) int as "1,3": (M,)."""
    return np.array([f"{row},{column}" for row, column in cells])


def shares_by(labels: np.ndarray, shares: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Average shares over the episodes with each label: {label: {name: share}}. labels and shares:
    (M,) each.
    """
    means: dict[str, dict[str, float]] = {}
    for label in np.unique(labels).tolist():
        means[label] = {name: float(x[labels == label].mean()) for name, x in shares.items()}
    return means


def draw_maze(axis: "Axes", maze: Maze, goals: np.ndarray, paths: Iterable[np.ndarray]) -> None:
    """Draw walls, the discs of goals (G, 2), and the paths of balls (T, 2 or more), which begin
    with a dot.

    Rows go downwards, columns to the right; walls are where the ball's frame has them.
    """
    from matplotlib.patches import Circle

    rows, columns = maze.walls.shape
    extent = (-0.7, columns - 0.7, rows - 0.7, -0.7)
    axis.imshow(maze.walls, cmap="Greys", vmax=2, extent=extent)
    for x, y in np.unique(goals, axis=0):
        axis.add_patch(Circle((y, x), GOAL_RADIUS, color="tab:green", alpha=0.3))
    for places in paths:
        x, y = places[:, 0], places[:, 1]
        axis.plot(y, x, linewidth=0.8, alpha=0.8)
        axis.plot(y[0], x[0], "k.", markersize=4)
