"""Maze2D's evaluation: N mazes in lock-step, D4RL's starts, its fixed goal, its normalised score.

The standard protocol shows four numbers and no goal. For a policy trained with text=goal the text names the fixed goal; such a
row is always labelled `goal-text`, since the standard protocol lacks that information, or `instructed-1-3` where the text names
another cell. Wordings that were never trained on are labelled `-held-out`. `multi2d`: each episode has a goal of its own.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets.maze2d import GOAL_TEXTS, HORIZON, goal_facts, task_text
from decisionllm.datasets.wordings import is_held_out, spread
from decisionllm.envs.maze2d import GOAL_RADIUS, Maze, Planner, reward
from decisionllm.eval.report import figure
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.eval.understood import understood
from decisionllm.protocols import Begin, Env
from decisionllm.registry import register
from decisionllm.schema import Episode

# Return of a random policy and of the reference controller: D4RL `d4rl/infos.py` and `d4rl/pointmaze/__init__.py`; of `open`, which has
# no second version there, our own of 4,000 episodes.
REFERENCE = {
    ("open", False): (8.05, 104.1), ("umaze", False): (23.85, 161.86), ("medium", False): (13.13, 277.39), ("large", False): (6.7, 273.99),
    ("umaze", True): (68.537689, 193.66285642381482), ("medium", True): (44.264742, 297.4552547777125),
    ("large", True): (30.569041, 303.4857382709002),
}  # fmt: skip

# Normalised scores on D4RL's own data, for context: CORL's README, last checkpoint, 4 seeds x 100 episodes, and QDT's values.
PUBLISHED = {
    "umaze": {"BC (CORL)": 0.36, "DT (CORL)": 18.08, "DT (QDT paper)": 31.0, "IQL (CORL)": 42.11, "QDT": 57.3, "ReBRAC (CORL)": 106.87},
    "medium": {"BC (CORL)": 0.79, "DT (CORL)": 31.71, "DT (QDT paper)": 8.2, "IQL (CORL)": 34.85, "QDT": 13.3, "ReBRAC (CORL)": 105.11},
    "large": {"BC (CORL)": 2.26, "DT (CORL)": 35.66, "DT (QDT paper)": 2.3, "IQL (CORL)": 61.72, "QDT": 31.0, "ReBRAC (CORL)": 78.33},
}  # fmt: skip


@register("env", "maze2d-umaze", maze="umaze", text="${text}", frames="${text_wordings}")
@register("env", "maze2d-medium", maze="medium", text="${text}", frames="${text_wordings}")
@register("env", "maze2d-large", maze="large", text="${text}", frames="${text_wordings}")
@register("env", "maze2d-open", maze="open", text="${text}", frames="${text_wordings}")
@register("env", "maze2d-umaze-dense", maze="umaze", dense=True, text="${text}", frames="${text_wordings}")
@register("env", "maze2d-medium-dense", maze="medium", dense=True, text="${text}", frames="${text_wordings}")
@register("env", "maze2d-large-dense", maze="large", dense=True, text="${text}", frames="${text_wordings}")
class Maze2D(Env):
    """N mazes of one layout, with its one goal or a goal for each episode, and D4RL's normalised score.

    Args:
        num_episodes: N.
        maze: umaze, medium, large, or open without dense.
        dense: rewards are exp(-distance to the goal) instead of 1 within 0.5 of it.
        text: as in the dataset.
        goal: `fixed`, or `random`: any free cell, drawn for each episode, rewarded and named by its text. Needs text=goal. Source:
            Multi2D of Diffuser (arXiv 2205.09991), there within 0.1 of the cell's place.
        instructed_goal: the text names this cell instead, as `row,column`, while rewards stay with the fixed goal: does the policy
            follow the text? `1,3;3,1` or `all` name several in turn. Needs text=goal.
        wordings: with text=paraphrased, `trained` or `held_out`: which frames the texts have, each in turn.
        frames: how many frames were trained on, see `text_wordings`; 0: all.
    """

    reference: tuple[float, float]

    def __init__(
        self, num_episodes: int, *, maze: str, dense: bool = False, text: str = "none", instructed_goal: str = "",
        wordings: str = "trained", frames: int = 0, goal: str = "fixed",
    ) -> None:  # fmt: skip
        self.maze, self.dense, self.text, self.horizon = Maze.named(maze), dense, text, HORIZON[maze]
        self.facts = goal_facts(maze)
        by_goal, held_out, cells = text in GOAL_TEXTS, is_held_out(wordings, text), self.maze.goal[None]
        one_of("env.goal", goal, ("fixed", "random"))
        self.random = goal == "random"
        if self.random and (instructed_goal or not by_goal):
            given = f"got text={text} and {instructed_goal!r}"
            raise ValueError(f"env.goal=random: needs text=goal and no env.instructed_goal, {given}")
        if instructed_goal and not by_goal:
            raise ValueError(f"env.instructed_goal: needs text=goal, so that the text names it; got text={text}")
        if self.random or instructed_goal == "all":
            cells = self.maze.free_cells
        elif instructed_goal:
            cells = self.maze.cells(instructed_goal, "env.instructed_goal")
        goals = {task_text(maze, cell): cell for cell in cells} if by_goal else {"": cells[0]}
        self.cells, self.texts = cells, [[("", task_text(maze) if text == "constant" else task)] for task in goals]
        if text == "paraphrased":
            self.texts = [spread(self.facts, held_out=held_out, frames=frames)[task] for task in goals]
        self.meaning: dict[str, tuple[np.ndarray, str]] = {}  # of each text: its goal, and the kind of its frame
        self.name_goals(np.arange(num_episodes) % len(goals))
        self.reference = REFERENCE[maze, dense]
        self.published = {} if dense else PUBLISHED.get(maze, {})
        self.protocol = "multi2d" if self.random else "goal-text" if by_goal else "standard"
        if instructed_goal:
            self.protocol = "-".join(["instructed", *re.findall(r"\w+", instructed_goal)])
        self.protocol += "-held-out" * held_out

    def name_goals(self, numbers: np.ndarray) -> None:
        """Make the texts of the episodes name these of the cells, (N,) int; the cells are rewarded too with goal=random."""
        self.tasks = []
        for i, number in enumerate(numbers):
            kind, words = self.texts[number][i // len(self.texts) % len(self.texts[number])]
            self.tasks.append(words)
            self.meaning[words] = self.cells[number], kind
        self.goals = self.cells[numbers] if self.random else np.tile(self.maze.goal, (len(numbers), 1))  # (N, 2)

    def reset(self, seed: int) -> np.ndarray:
        if self.random:
            self.name_goals(np.random.default_rng((seed, 1)).integers(len(self.cells), size=len(self.tasks)))
        self.states, self.time = self.maze.reset(len(self.tasks), np.random.default_rng(seed)), 0
        return self.states

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rewards are those of the new positions."""
        self.states, self.time = self.maze.step(self.states, actions), self.time + 1
        N = len(self.tasks)
        gains = reward(self.states[:, :2], self.goals, dense=self.dense)
        return self.states, gains, np.zeros(N, bool), np.full(N, self.time >= self.horizon)

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return and score if every step after the first touch of the goal counted (`latched`).

        With a goal in the text also the share of episodes in which the ball came within its disc (`reached`), and stayed for half of
        the last 100 steps (`stayed`); by kind of frame and by goal where there are several, and then the cell at the end.
        """
        found: dict[str, Any] = {}
        if not self.dense:
            low, high = self.reference
            latched = float(np.mean([np.maximum.accumulate(e.rewards > 0).sum() for e in episodes]))
            found = {"latched_return": latched, "latched_score": 100 * (latched - low) / (high - low)}
        if self.protocol == "standard":
            return found
        places = np.array([[*e.observations, e.final_observation] for e in episodes])[..., :2]
        goals, kinds = (np.array(x) for x in zip(*(self.meaning[e.task] for e in episodes), strict=True))
        inside = reward(places, goals[:, None]) > 0
        shares = {"reached": inside.any(1), "stayed": inside[:, -100:].mean(1) >= 0.5}
        found |= {name: float(x.mean()) for name, x in shares.items()}
        names, ends = (np.array([f"{r},{c}" for r, c in cells]) for cells in (goals, np.rint(places[:, -1]).astype(int)))
        for by, labels in {"by_kind": kinds, "by_goal": names}.items():
            if len(several := np.unique(labels).tolist()) > 1:
                found[by] = {k: {name: float(x[labels == k].mean()) for name, x in shares.items()} for k in several}
        if "by_goal" in found:
            rows, columns = (np.unique(x).tolist() for x in (names, [*names, *ends]))
            table = [[float((ends[names == r] == c).mean()) for c in columns] for r in rows]
            found["final_cell"] = {"rows": rows, "columns": columns, "shares": table}
        return found

    def probe(self, policy: Any) -> dict[str, Any]:
        """The share of texts that a policy with text=paraphrased understands, on 64 states with velocities; see `understood`."""
        trained = policy.info["dataset"].get("wordings", {})
        facts = {task: known for task, known in self.facts.items() if task in trained}
        if not facts:
            return {}
        rng = np.random.default_rng(0)
        states = self.maze.reset(64, rng)
        states[:, 2:] = rng.uniform(-1, 1, (64, 2))
        labels = [f"{known['row']},{known['column']}" for known in facts.values()]
        return understood(policy, states, facts, labels, frames=policy.config["text_wordings"])

    def draw(self, episodes: Sequence[Episode], title: str, count: int = 16) -> Any:
        """The first episodes on the maze: rows downwards, columns to the right, walls where the ball's frame has them."""
        from matplotlib.patches import Circle

        rows, columns = self.maze.walls.shape
        made = figure(1 + 0.6 * columns, 1 + 0.6 * rows)
        axis = made.subplots()
        axis.imshow(self.maze.walls, cmap="Greys", vmax=2, extent=(-0.7, columns - 0.7, rows - 0.7, -0.7))
        for goal in np.unique(self.goals[:count], axis=0):
            axis.add_patch(Circle(tuple(goal[::-1]), GOAL_RADIUS, color="tab:green", alpha=0.3))
        for episode in episodes[:count]:
            x, y = episode.observations[:, 0], episode.observations[:, 1]
            axis.plot(y, x, linewidth=0.8, alpha=0.8)
            axis.plot(y[0], x[0], "k.", markersize=4)
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="y", ylabel="x")
        return made

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Uniform actions; D4RL's controller, which plans once an episode and knows the walls and the goal."""

        def uniform(tasks: Sequence[str]) -> ScriptedPlayer:
            rng = np.random.default_rng(seed)
            return ScriptedPlayer(lambda seen, rows: rng.uniform(-1, 1, (len(seen), 2)), tasks)

        def planner(tasks: Sequence[str]) -> ScriptedPlayer:
            planner = Planner(self.maze, len(tasks), np.random.default_rng(seed))
            planner.aim(np.arange(len(tasks)), self.states[:, :2].astype(np.float32), self.goals)
            return ScriptedPlayer(lambda seen, rows: planner.act(seen)[0], tasks)

        return {"random": uniform, "planner": planner}
