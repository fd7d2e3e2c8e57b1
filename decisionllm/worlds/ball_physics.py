"""MuJoCo's soft contacts of a ball with the walls of a grid, solved exactly for many balls at once.

For one ball on two slides they are a problem of two variables, so that no simulator is needed.
"""

import numpy as np

BOXES = np.array([[1, 0], [0, 1], [1, 1]])  # beside the ball, above it, across the corner


def find_contacts(
    walls: np.ndarray, cell: np.ndarray, offset: np.ndarray, *, half: float, radius: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the contacts of M balls with up to three boxes each.

    Args:
        walls: bool, by the two indices of a cell.
        cell: (M, 2) int, where the middle of the ball is.
        offset: (M, 2) of that middle from the middle of the cell, along the two indices.
        half: half the width of a cell.
        radius: of the balls.

    Returns:
        Normals from the wall to the ball (M, 3, 2), gaps (M, 3), whether the box is a wall (M, 3).
    """
    side = np.where(offset < 0, -1, 1)
    to_face = half - np.abs(offset)  # (M, 2) distance to the next cell, per axis
    towards = to_face[:, None] * BOXES  # (M, 3, 2)
    distance = np.linalg.norm(towards, axis=-1)
    neighbour = cell[:, None] + side[:, None] * BOXES
    normal = -side[:, None] * towards / np.maximum(distance, 1e-12)[..., None]
    return normal, distance - radius, walls[neighbour[..., 0], neighbour[..., 1]]


def impedance(depth: np.ndarray) -> np.ndarray:
    """Return MuJoCo's default impedance, solimp (0.9, 0.95, 0.001, 0.5, 2), of depths of contacts."""
    bend = np.minimum(np.abs(depth) / 0.001, 1)
    share = np.where(bend <= 0.5, 2 * bend**2, 1 - 2 * (1 - bend) ** 2)
    return np.asarray(0.9 + 0.05 * share)


def solve_acceleration(
    mass: float, force: np.ndarray, edges: np.ndarray, weight: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """Return the acceleration of M balls under a force and their contacts, (M, 2).

    argmin over a of  m/2 |a - f/m|^2 + 1/2 sum_i D_i min(0, e_i a - wanted_i)^2, by Newton steps on
    the active set.

    Args:
        mass: m.
        force: (M, 2) f, without contacts.
        edges: (M, E, 2) e, directions in which contacts push.
        weight: (M, E) D, 0 without a contact.
        target: (M, E) acceleration along the edge that the contact aims at.
    """
    result = force / mass
    active = np.zeros(weight.shape, bool)
    for _ in range(20):
        now = (weight > 0) & ((edges * result[:, None]).sum(-1) < target)
        if (now == active).all():
            break
        active = now
        weights = np.where(active, weight, 0)
        xx = mass + (weights * edges[..., 0] ** 2).sum(1)
        yy = mass + (weights * edges[..., 1] ** 2).sum(1)
        xy = (weights * edges[..., 0] * edges[..., 1]).sum(1)
        right = force + ((weights * target)[..., None] * edges).sum(1)
        along_x = yy * right[:, 0] - xy * right[:, 1]
        along_y = xx * right[:, 1] - xy * right[:, 0]
        result = np.stack([along_x, along_y], 1) / (xx * yy - xy * xy)[:, None]
    return result
