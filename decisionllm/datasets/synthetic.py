"""A point in the plane that walks to one of four goals, half a unit a step at most, by controllers
of three qualities: the dataset of the tests and of quick trials.
"""

from dataclasses import replace

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Spec

STEP = 0.5
NEAR = 0.25
HORIZON = 20  # steps
# of the discrete actions
MOVES = np.array([(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)], np.float32)
GOALS = {"north": (0.0, 2.0), "south": (0.0, -2.0), "east": (2.0, 0.0), "west": (-2.0, 0.0)}


def load(
    *,
    text: str = "none",
    discrete: bool = False,
    episodes: int = 300,
    seed: int = 0,
) -> Source:
    """Generate walks towards goals by controllers with action noise 0.1, 0.5 and 2.0.

    An episode ends at the goal (terminated) or after 20 steps (truncated).

    Args:
        text: `none`, or `goal`: the text names the goal of the episode.
        discrete: five actions, stand still or one of four moves, instead of a step in the plane.
        episodes: number of episodes.
        seed: of the starts and the noise.
    """
    check_one_of("dataset.text", text, ("none", "goal"))
    rng = np.random.default_rng(seed)
    names = [list(GOALS)[e % len(GOALS)] for e in range(episodes)]
    walks = []
    for e, name in enumerate(names):
        episode = walk(np.array(GOALS[name]), (0.1, 0.5, 2.0)[e % 3], rng, discrete=discrete)
        task = task_text(name) if text == "goal" else ""
        walks.append(replace(episode, group=e, task=task))
    if discrete:
        spec = Spec(2, 1, HORIZON, num_actions=len(MOVES))
    else:
        spec = Spec(2, 2, HORIZON, low=(-1.0, -1.0), high=(1.0, 1.0))
    info = {
        "name": "synthetic",
        "env": "synthetic",
        "text": text,
        "discrete": discrete,
        "seed": seed,
    }
    return Source(spec, walks, info)


def walk(goal: np.ndarray, noise: float, rng: np.random.Generator, *, discrete: bool) -> Episode:
    """Walk one episode by a controller with this noise."""
    position = start(1, rng)
    observations: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    arrived = np.zeros(1, bool)
    while len(rewards) < HORIZON and not arrived[0]:
        step = np.clip((goal - position) / STEP + rng.normal(0, noise, (1, 2)), -1, 1)  # (1, 2)
        action = step[0]
        if discrete:
            action = nearest_moves(step)
            step = MOVES[action]
        observations.append(position[0])
        actions.append(action)
        position, reward, arrived = move(position, step, goal)
        rewards.append(reward[0])
    return Episode(
        np.array(observations, np.float32),
        np.array(actions, np.float32),
        np.array(rewards, np.float32),
        terminated=bool(arrived[0]),
        truncated=not arrived[0],
        final_observation=position[0].astype(np.float32),
    )


def nearest_moves(steps: np.ndarray) -> np.ndarray:
    """Return the index of the discrete action that is nearest to each step: (N, 2) -> (N,) int."""
    nearest: np.ndarray = ((MOVES - steps[:, None]) ** 2).sum(2).argmin(1)
    return nearest


def start(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw (count, 2) positions within -3 .. 3."""
    return rng.uniform(-3, 3, (count, 2))


def move(
    positions: np.ndarray,
    actions: np.ndarray,
    goal: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move points: positions and actions (N, 2) -> next positions (N, 2), rewards (N,), arrived
    (N,) bool.

    goal: (2,) or (N, 2).
    """
    after = positions + STEP * np.clip(actions, -1, 1)
    distance = np.linalg.norm(after - goal, axis=1)
    return after, -distance, distance < NEAR


def task_text(name: str) -> str:
    """Return the task in words: the goal by its name."""
    return f"Walk to the goal in the {name}."
