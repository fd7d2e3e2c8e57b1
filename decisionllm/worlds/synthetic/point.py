"""A point in the plane that walks to a goal, half a unit a step at most: checked by hand."""

import numpy as np

STEP = 0.5
NEAR = 0.25
HORIZON = 20  # steps
# of the discrete actions
MOVES = np.array([(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)], np.float32)


def start(count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, 2) positions within -3 .. 3."""
    return rng.uniform(-3, 3, (count, 2))


def move(
    positions: np.ndarray,
    actions: np.ndarray,
    goal: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions and actions (N, 2) -> next positions (N, 2), rewards (N,), arrived (N,) bool.

    goal: (2,) or (N, 2).
    """
    after = positions + STEP * np.clip(actions, -1, 1)
    distance = np.linalg.norm(after - goal, axis=1)
    return after, -distance, distance < NEAR
