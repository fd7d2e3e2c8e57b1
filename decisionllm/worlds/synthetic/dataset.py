"""A point that walks to one of four goals, by controllers of three qualities: the dataset of the
tests and of quick trials."""

from dataclasses import replace

import numpy as np

from decisionllm.checks import one_of
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec
from decisionllm.worlds.synthetic import point

GOALS = {"north": (0.0, 2.0), "south": (0.0, -2.0), "east": (2.0, 0.0), "west": (-2.0, 0.0)}


@register("dataset", "synthetic", text="${text}")
@register("dataset", "synthetic-discrete", text="${text}", discrete=True)
def load(
    *,
    text: str = "none",
    discrete: bool = False,
    episodes: int = 300,
    seed: int = 0,
) -> Source:
    """Walks towards goals by controllers with action noise 0.1, 0.5 and 2.0.

    An episode ends at the goal (terminated) or after 20 steps (truncated).

    Args:
        text: `none`, or `goal`: the text names the goal of the episode.
        discrete: five actions, stand still or one of four moves, instead of a step in the plane.
        episodes: how many.
        seed: of the starts and the noise.
    """
    one_of("dataset.text", text, ("none", "goal"))
    rng = np.random.default_rng(seed)
    names = [list(GOALS)[e % len(GOALS)] for e in range(episodes)]
    made = []
    for e, name in enumerate(names):
        walked = walk(np.array(GOALS[name]), (0.1, 0.5, 2.0)[e % 3], rng, discrete=discrete)
        made.append(replace(walked, group=e, task=task_text(name) if text == "goal" else ""))
    if discrete:
        spec = Spec(2, 1, point.HORIZON, num_actions=len(point.MOVES))
    else:
        spec = Spec(2, 2, point.HORIZON, low=(-1.0, -1.0), high=(1.0, 1.0))
    info = {
        "name": "synthetic",
        "env": "synthetic",
        "text": text,
        "discrete": discrete,
        "seed": seed,
    }
    return Source(spec, made, info)


def walk(goal: np.ndarray, noise: float, rng: np.random.Generator, *, discrete: bool) -> Episode:
    """One episode of a controller with this noise."""
    position = point.start(1, rng)
    observations: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    arrived = np.zeros(1, bool)
    while len(rewards) < point.HORIZON and not arrived[0]:
        wanted = (goal - position) / point.STEP + rng.normal(0, noise, (1, 2))
        move = np.clip(wanted, -1, 1)
        action = move[0]
        if discrete:
            nearest = np.argmin(((point.MOVES - move) ** 2).sum(1))
            move = point.MOVES[[nearest]]
            action = np.array([nearest])
        observations.append(position[0])
        actions.append(action)
        position, reward, arrived = point.move(position, move, goal)
        rewards.append(reward[0])
    return Episode(
        np.array(observations, np.float32),
        np.array(actions, np.float32),
        np.array(rewards, np.float32),
        terminated=bool(arrived[0]),
        truncated=not arrived[0],
        final_observation=position[0].astype(np.float32),
    )


def task_text(name: str) -> str:
    """The task in words: the goal by its name."""
    return f"Walk to the goal in the {name}."
