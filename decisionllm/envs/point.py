"""A point in the plane that is to walk to a goal, half a unit a step at most: small enough to be worked out by hand."""

import numpy as np

STEP = 0.5
NEAR = 0.25
HORIZON = 20
MOVES = np.array([(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)], np.float32)  # what the discrete actions stand for


def start(count, rng):
    """(count, 2) positions within -3 .. 3."""
    return rng.uniform(-3, 3, (count, 2))


def move(positions, actions, goal):
    """Positions and actions (N, 2), goal (2,) or (N, 2) -> positions after (N, 2), rewards (N,), arrived (N,)"""
    after = positions + STEP * np.clip(actions, -1, 1)
    distance = np.linalg.norm(after - goal, axis=1)
    return after, -distance, distance < NEAR
