"""A picture of what words do: runs side by side, each told the same goals in sentences that were never trained on.

`python -m examples.words_on_a_maze runs/demo-llm/pretrained runs/demo-llm/shuffled runs/demo-llm/dt --out runs/demo-llm/words.png`
draws a column for each run and a row for each goal: the way of eight balls on Maze2D umaze, the goal's disc, and the sentence above. A
run without texts reads nothing, and goes where it goes.
"""

import argparse
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import decisionllm
from decisionllm.datasets.maze2d import task_text
from decisionllm.datasets.wordings import spread
from decisionllm.envs.maze2d import GOAL_RADIUS
from decisionllm.eval.rollout import rollout
from decisionllm.registry import build, choice

BALLS, SEED = 8, 7
GOALS = {"1,1": "contrast", "3,1": "unseen_words", "1,3": "new_frames"}  # a goal, and the kind of its sentence


def sentence(facts, goal, kind):
    """A held-out wording of a goal of umaze."""
    cell = tuple(int(x) for x in goal.split(","))
    return next(text for one, text in spread(facts, held_out=True)[task_text("umaze", cell)] if one == kind)


def ways(policy, text):
    """Where the balls of a policy go: positions (BALLS, steps, 2), rows and columns."""
    reads = policy.config["text"] != "none"
    env = build(choice("env", "maze2d-umaze", text="none"), BALLS)
    env.tasks = [text if reads else ""] * BALLS
    episodes = rollout(partial(policy.begin, horizon=env.horizon), env, seed=SEED)
    return np.array([[*e.observations, e.final_observation] for e in episodes])[..., :2]


def main():
    parser = argparse.ArgumentParser(prog="python -m examples.words_on_a_maze", description=sys.modules[__name__].__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    policies = [decisionllm.load(run) for run in given.runs]
    env = build(choice("env", "maze2d-umaze", text="paraphrased"), 1)
    figure = Figure(figsize=(3.2 * len(given.runs), 3.2 * len(GOALS)), layout="constrained")
    axes = figure.subplots(len(GOALS), len(given.runs), squeeze=False)
    rows, columns = env.maze.walls.shape
    for line, (goal, kind) in zip(axes, GOALS.items(), strict=True):
        text = sentence(env.facts, goal, kind)
        place = [int(x) for x in goal.split(",")]
        for axis, policy in zip(line, policies, strict=True):
            places = ways(policy, text)
            arrived = np.linalg.norm(places[:, -1] - place, axis=1) <= GOAL_RADIUS
            axis.imshow(env.maze.walls, cmap="Greys", vmax=2, extent=(-0.7, columns - 0.7, rows - 0.7, -0.7))
            axis.add_patch(Circle((place[1], place[0]), GOAL_RADIUS, color="tab:green", alpha=0.4))
            for way in places:
                axis.plot(way[:, 1], way[:, 0], linewidth=0.8, alpha=0.8)
                axis.plot(way[0, 1], way[0, 0], "k.", markersize=4)
                axis.plot(way[-1, 1], way[-1, 0], "kx", markersize=5)
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{arrived.sum()} of {BALLS} at the goal", fontsize=8)
        line[0].set_title(textwrap.fill(text, 45 * len(line)), fontsize=9, loc="left")
    for axis, run in zip(axes[-1], given.runs, strict=True):
        axis.set_xlabel(f"{axis.get_xlabel()}\n{run.name}", fontsize=9)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, dpi=110)
    print(f"{given.out}: sentences that were never trained on; a dot is where a ball begins, a cross where it ends")


if __name__ == "__main__":
    main()
