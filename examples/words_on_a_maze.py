"""A picture of what words do: runs side by side, each given the same goals in sentences that were
never trained on.

`python -m examples.words_on_a_maze runs/demo-llm/pretrained runs/demo-llm/shuffled runs/demo-llm/dt
--out runs/demo-llm/words.png` draws a column for each run and a row for each goal: the way of eight
balls on Maze2D umaze, the goal's disc, and the sentence above. A run without texts reads nothing,
and goes where it goes. `--panels FILE` also saves the mazes alone, from which `python -m
docs.pictures` draws the picture of the README.
"""

import argparse
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import decisionllm
from decisionllm.datasets.paraphrases import render_frames
from decisionllm.eval.rollout import rollout
from decisionllm.registry import build, choice
from decisionllm.worlds.maze2d.dataset import task_text
from decisionllm.worlds.maze2d.env import draw_maze, path
from decisionllm.worlds.maze2d.simulator import GOAL_RADIUS

BALLS = 8
SEED = 7
# a goal, and the kind of its sentence
GOALS = {
    "1,1": "contrast",
    "3,1": "unseen_words",
    "1,3": "new_frames",
}


def sentence(facts, goal, kind):
    """A held-out wording of a goal of umaze, and the goal's cell."""
    row, column = goal.split(",")
    cell = int(row), int(column)
    worded = render_frames(facts, held_out=True)[task_text("umaze", cell)]
    return next(text for one, text in worded if one == kind), cell


def roll_out(policy, texts):
    """The paths of the balls of a policy, BALLS for each text that it reads: (texts, BALLS, steps,
    2), rows and columns.
    """
    env = build(choice("env", "maze2d-umaze", text="none"), BALLS * len(texts))
    if policy.config["text"] != "none":
        env.tasks = [text for text in texts for _ in range(BALLS)]
    episodes = rollout(partial(policy.begin, horizon=env.horizon), env, seed=SEED)
    paths = np.stack([path(episode) for episode in episodes])
    return paths.reshape(len(texts), BALLS, *paths.shape[1:])


def column_title(policy):
    """What a run is, in words: its name, and shuffled or random weights of a language model."""
    weights = policy.config["backbone"].get("weights", "pretrained")
    name = policy.config["name"].removesuffix(f"-{weights}")
    return name if weights == "pretrained" else f"{name}, {weights} weights"


def save_panels(path, mazes):
    """Save the mazes without words, each 227 pixels wide, close to its inner walls. mazes: rows of
    (maze, cell, paths).
    """
    figure = Figure(figsize=(2.27 * len(mazes[0]), 2.27 * len(mazes)), dpi=100)
    axes = figure.subplots(len(mazes), len(mazes[0]), squeeze=False)
    figure.subplots_adjust(0, 0, 1, 1, 0, 0)
    for line, row in zip(axes, mazes, strict=True):
        for axis, (maze, cell, paths) in zip(line, row, strict=True):
            draw_ways(axis, maze, cell, paths)
            axis.set(xlim=(0.1, 3.9), ylim=(3.9, 0.1), aspect="auto")
    figure.savefig(path)


def draw_ways(axis, maze, cell, paths):
    """Draw the ways of the balls of one panel, with a cross where each ends."""
    ends = paths[:, -1]
    draw_maze(axis, maze, np.array([cell]), paths)
    axis.plot(ends[:, 1], ends[:, 0], "kx", markersize=5)
    axis.set(xticks=[], yticks=[])


def main():
    parser = argparse.ArgumentParser(prog="python -m examples.words_on_a_maze", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--panels", type=Path)
    arguments = parser.parse_args()
    policies = [decisionllm.load(run) for run in arguments.runs]
    env = build(choice("env", "maze2d-umaze", text="paraphrased"), 1)
    figure = Figure(figsize=(3.2 * len(arguments.runs), 3.2 * len(GOALS)), layout="constrained")
    axes = figure.subplots(len(GOALS), len(arguments.runs), squeeze=False)
    worded = [sentence(env.facts, goal, kind) for goal, kind in GOALS.items()]
    texts = [text for text, _ in worded]
    for line, text in zip(axes, texts, strict=True):
        line[0].set_title(textwrap.fill(text, 45 * len(line)), fontsize=9, loc="left")
    mazes = [[] for _ in texts]
    for column, policy in zip(axes.T, policies, strict=True):
        ways = roll_out(policy, texts)
        for axis, (_, cell), paths, row in zip(column, worded, ways, mazes, strict=True):
            arrived = np.linalg.norm(paths[:, -1] - cell, axis=1) <= GOAL_RADIUS
            draw_ways(axis, env.maze, cell, paths)
            axis.set_xlabel(f"{arrived.sum()} of {BALLS} at the goal", fontsize=8)
            row.append((env.maze, cell, paths))
        column[0].annotate(
            column_title(policy),
            (0.5, 1),
            xytext=(0, 20),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            fontweight="bold",
        )
    if arguments.panels:
        save_panels(arguments.panels, mazes)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=110)
    marks = "a dot is where a ball begins, a cross where it ends"
    print(f"{arguments.out}: sentences that were never trained on; {marks}")


if __name__ == "__main__":
    main()
