"""A point that walks to one of four goals, by controllers of three qualities: the dataset of the tests and of quick trials."""

from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.envs import point
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec

GOALS = {"north": (0.0, 2.0), "south": (0.0, -2.0), "east": (2.0, 0.0), "west": (-2.0, 0.0)}


@register("dataset", "synthetic", text="${text}")
@register("dataset", "synthetic-discrete", text="${text}", discrete=True)
def load(*, text: str = "none", discrete: bool = False, episodes: int = 300, seed: int = 0) -> Source:
    """Walks towards goals by controllers with action noise 0.1, 0.5 and 2.0.

    An episode ends at the goal (terminated) or after 20 steps (truncated).

    Args:
        text: `none`, or `goal`: the text names the goal of the episode.
        discrete: five actions, stand still or one of four moves, instead of a step in the plane.
        episodes: how many.
        seed: of the starts and the noise.
    """
    one_of("dataset.text", text, ("none", "goal"))
    rng, made = np.random.default_rng(seed), []
    for e in range(episodes):
        name = list(GOALS)[e % len(GOALS)]
        goal, error = np.array(GOALS[name]), (0.1, 0.5, 2.0)[e % 3]
        position, rows = point.start(1, rng), []
        for _ in range(point.HORIZON):
            action = np.clip((goal - position) / point.STEP + rng.normal(0, error, (1, 2)), -1, 1)
            if discrete:
                chosen = np.argmin(((point.MOVES - action) ** 2).sum(1))
                action = point.MOVES[[chosen]]
            after, reward, arrived = point.move(position, action, goal)
            rows.append((position[0], [chosen] if discrete else action[0], reward[0]))
            position = after
            if arrived:
                break
        observations, actions, rewards = (np.array(column, np.float32) for column in zip(*rows, strict=True))
        made.append(Episode(
            observations, actions, rewards, terminated=bool(arrived[0]), truncated=not arrived[0],
            task=task_text(name) if text == "goal" else "", group=e, final_observation=position[0].astype(np.float32),
        ))  # fmt: skip
    bounds: dict[str, Any] = {} if discrete else {"low": (-1.0, -1.0), "high": (1.0, 1.0)}
    spec = Spec(2, 1 if discrete else 2, point.HORIZON, num_actions=5 * discrete, **bounds)
    return Source(spec, made, {"name": "synthetic", "env": "synthetic", "text": text, "discrete": discrete, "seed": seed})


def task_text(name: str) -> str:
    """The task in words: the goal by its name."""
    return f"Walk to the goal in the {name}."
