"""Observations of BabyAI as rows of numbers: one encoding for data, imports and environments.

MiniGrid shows the agent the 7 x 7 cells in front of it, each as (type, colour, state), with the
agent at x = 3, y = 6, looking towards y = 0; its own cell holds what it carries.
"""

from collections.abc import Sequence

import numpy as np

from decisionllm.schema import GRID_PREFIX, Json, Spec, one_hot_groups

VIEW = 7  # cells on a side
AGENT_X, AGENT_Y = 3, 6
FRONT = AGENT_X, AGENT_Y - 1
NUM_TYPES, NUM_COLOURS, NUM_STATES, NUM_DIRECTIONS = 11, 6, 3, 4
EMPTY, FLOOR, DOOR, GOAL = 1, 3, 4, 8
OBJECT_TYPES = 4  # door, key, ball, box: the types from DOOR on
OPEN = 0  # state of a door
MOST_OBJECTS = 20
OWN_SIZE = NUM_DIRECTIONS + NUM_TYPES + OBJECT_TYPES + 1 + NUM_COLOURS + 3
OBJECT_SIZE = 1 + OBJECT_TYPES + NUM_COLOURS + NUM_STATES + 4
SCHEMA = (("own", OWN_SIZE, 1), ("object", OBJECT_SIZE, MOST_OBJECTS))
CELL_PARTS = NUM_TYPES, NUM_COLOURS, NUM_STATES
NUM_CELLS = VIEW * VIEW
GRID_SCHEMA = ((f"{GRID_PREFIX}image", sum(CELL_PARTS), NUM_CELLS), ("own", NUM_DIRECTIONS, 1))
VIEWS = ("objects", "grid")


def cells_by_distance() -> np.ndarray:
    """Return (x, y) of every cell but the agent's own, the nearest first: (48, 2) int."""
    cells = [(x, y) for x in range(VIEW) for y in range(VIEW) if (x, y) != (AGENT_X, AGENT_Y)]
    cells.sort(key=lambda cell: (abs(cell[0] - AGENT_X) + AGENT_Y - cell[1], cell[1], cell[0]))
    return np.array(cells)


CELLS = cells_by_distance()


def spec_of(view: str, horizon: int) -> Spec:
    """Return the spec of episodes whose observations have this view."""
    if view == "objects":
        size = OWN_SIZE + OBJECT_SIZE * MOST_OBJECTS
        return Spec(size, 1, horizon, num_actions=7, entity_schema=SCHEMA)
    sizes = [*CELL_PARTS * NUM_CELLS, NUM_DIRECTIONS]
    return Spec(
        sum(sizes),
        1,
        horizon,
        num_actions=7,
        entity_schema=GRID_SCHEMA,
        categorical=one_hot_groups(sizes),
    )


def encode(images: np.ndarray, directions: np.ndarray, view: str) -> np.ndarray:
    """Encode observations of MiniGrid.

    Args:
        images: (N, 7, 7, 3) type, colour and state of each cell (x, y).
        directions: (N,) 0 east, 1 south, 2 west, 3 north.
        view: `objects`: the agent's own numbers, see `encode_own`, then those of the nearest 20
            objects, see `encode_objects`; `grid`: each cell one-hot, then the direction one-hot.

    Returns:
        (N, S) float32.
    """
    images = np.asarray(images, np.int64)
    N = len(images)
    direction = one_hot(np.asarray(directions), NUM_DIRECTIONS)
    if view == "objects":
        parts = [direction, encode_own(images), encode_objects(images).reshape(N, -1)]
        return np.concatenate(parts, axis=1)
    kind, colour, state = np.moveaxis(images, -1, 0)
    is_thing = (kind > EMPTY)[..., None]
    cells = [
        one_hot(kind, NUM_TYPES),
        one_hot(colour, NUM_COLOURS) * is_thing,
        one_hot(state, NUM_STATES) * is_thing,
    ]
    return np.concatenate([np.concatenate(cells, axis=-1).reshape(N, -1), direction], axis=1)


def encode_own(images: np.ndarray) -> np.ndarray:
    """Encode what concerns the agent itself, but its direction.

    Args:
        images: (N, 7, 7, 3) int.

    Returns:
        (N, 25) float32: the type of the cell in front, one of 11; the type that is carried, one of
        door, key, ball, box and nothing; its colour, one of 6, zeros for nothing; free cells ahead,
        to the left and to the right, in sixths.
    """
    front = one_hot(images[:, *FRONT, 0], NUM_TYPES)
    carried = images[:, AGENT_X, AGENT_Y]
    is_carrying = is_object(carried[:, 0])
    carried_type = np.where(is_carrying, carried[:, 0] - DOOR, OBJECT_TYPES)
    carried_colour = one_hot(carried[:, 1], NUM_COLOURS) * is_carrying[:, None]
    kind, state = images[..., 0], images[..., 2]
    is_free = np.isin(kind, (EMPTY, FLOOR, GOAL)) | ((kind == DOOR) & (state == OPEN))
    rays = (
        is_free[:, AGENT_X, AGENT_Y - 1 :: -1],  # ahead
        is_free[:, AGENT_X - 1 :: -1, AGENT_Y],  # left
        is_free[:, AGENT_X + 1 :, AGENT_Y],  # right
    )
    distances = [ray.cumprod(axis=1).sum(axis=1) / 6 for ray in rays]
    parts = [
        front,
        one_hot(carried_type, OBJECT_TYPES + 1),
        carried_colour,
        np.stack(distances, axis=1).astype(np.float32),
    ]
    return np.concatenate(parts, axis=1)


def encode_objects(images: np.ndarray) -> np.ndarray:
    """Encode the objects that are seen, nearest first; those beyond the 20th are left out.

    Args:
        images: (N, 7, 7, 3) int.

    Returns:
        (N, 20, 18) float32, zeros where there is no object: 1; type, one of door, key, ball, box;
        colour, one of 6; state of a door, one of open, closed, locked; x to the right, in thirds;
        y ahead, in sixths; whether it is in the cell in front; whether it is straight ahead.
    """
    N = len(images)
    cells = images[:, CELLS[:, 0], CELLS[:, 1]]  # (N, 48, 3)
    is_there = is_object(cells[..., 0])
    nearest = np.argsort(~is_there, axis=1, kind="stable")[:, :MOST_OBJECTS]  # (N, 20)
    row, number = np.nonzero(np.take_along_axis(is_there, nearest, axis=1))
    cell = nearest[row, number]
    kind, colour, state = cells[row, cell].T
    x = CELLS[cell, 0] - AGENT_X
    y = AGENT_Y - CELLS[cell, 1]
    place = [x / 3, y / 6, (x == 0) & (y == 1), x == 0]
    objects = np.zeros((N, MOST_OBJECTS, OBJECT_SIZE), np.float32)
    parts = [
        np.ones((len(row), 1), np.float32),
        one_hot(kind - DOOR, OBJECT_TYPES),
        one_hot(colour, NUM_COLOURS),
        one_hot(state, NUM_STATES) * (kind == DOOR)[:, None],
        np.stack(place, axis=1),
    ]
    objects[row, number] = np.concatenate(parts, axis=1)
    return objects


def one_hot(values: np.ndarray, size: int) -> np.ndarray:
    """Return (..., size) float32 with a one at each of the values (...)."""
    return np.asarray(np.eye(size, dtype=np.float32)[values])


def is_object(kind: np.ndarray) -> np.ndarray:
    """Return which of these types are doors, keys, balls or boxes."""
    return np.asarray((kind >= DOOR) & (kind < DOOR + OBJECT_TYPES))


def stack_observations(observations: Sequence[Json]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (N, 7, 7, 3) and directions (N,) of observations of MiniGrid."""
    images = np.stack([observation["image"] for observation in observations])
    return images, np.array([observation["direction"] for observation in observations])


def are_cells(images: np.ndarray) -> np.ndarray:
    """Return which triples of numbers (..., 3) can be the type, colour and state of a cell.

    Images that were compressed with loss have others.
    """
    is_in_range = (images < (NUM_TYPES, NUM_COLOURS, NUM_STATES)).all(axis=-1)
    is_nothing = images[..., 0] <= EMPTY
    return np.asarray(is_in_range & (~is_nothing | (images[..., 1:] == 0).all(axis=-1)))


def mirror_view(images: np.ndarray, directions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what an agent sees in the world mirrored east to west."""
    return images[:, ::-1], np.array([2, 1, 0, 3])[directions]
