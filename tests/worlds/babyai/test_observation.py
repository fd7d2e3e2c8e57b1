"""What an agent of BabyAI sees, as numbers: by hand, and in a mirrored world."""

from copy import deepcopy

import numpy as np
import pytest

from decisionllm.worlds.babyai.levels import make_level, reset_level
from decisionllm.worlds.babyai.observation import (
    MOST_OBJECTS,
    OBJECT_SIZE,
    OWN_SIZE,
    encode,
    mirror_view,
    spec_of,
    stack_observations,
)

EMPTY, WALL, DOOR, KEY, BALL, BOX = 1, 2, 4, 5, 6, 7
RED, GREEN, BLUE, GREY = 0, 1, 2, 5
OPEN, LOCKED = 0, 2


def view(**cells):
    """An empty room, 7 x 7, with cells such as x2y4=(BALL, RED, 0)."""
    image = np.zeros((7, 7, 3), np.uint8)
    image[..., 0] = EMPTY
    for name, cell in cells.items():
        image[int(name[1]), int(name[3])] = cell
    return image


def encoded(image, direction=0):
    """The own numbers and the objects of one observation."""
    row = encode(image[None], np.array([direction]), "objects")[0]
    return row[:OWN_SIZE], row[OWN_SIZE:].reshape(MOST_OBJECTS, OBJECT_SIZE)


def test_own_numbers_by_hand():
    image = view(x3y6=(KEY, BLUE, 0), x3y4=(DOOR, RED, OPEN), x3y3=(WALL, GREY, 0))
    image[0, 6] = WALL, GREY, 0
    image[4, 6] = BALL, GREEN, 0
    own, _ = encoded(image, direction=3)
    direction, front, carried, colour, free = np.split(own, [4, 15, 20, 26])
    assert direction.tolist() == [0, 0, 0, 1]
    assert np.flatnonzero(front).tolist() == [EMPTY]
    assert carried.tolist() == [0, 1, 0, 0, 0]  # door, key, ball, box, nothing
    assert np.flatnonzero(colour).tolist() == [BLUE]
    # ahead the cell in front and the open door, left two cells, right none
    np.testing.assert_allclose(free, [2 / 6, 2 / 6, 0], rtol=1e-6)
    nothing, _ = encoded(view())
    assert nothing[15:26].tolist() == [0, 0, 0, 0, 1] + [0] * 6


def test_objects_by_hand_come_nearest_first():
    image = view(x6y6=(BOX, GREEN, 0), x3y5=(BALL, RED, 0), x3y0=(DOOR, GREY, LOCKED))
    _, objects = encoded(image)
    ball, box, door = objects[:3]
    assert not objects[3:].any()
    assert ball.tolist() == [
        1,
        0,
        0,
        1,
        0,
        *(1, 0, 0, 0, 0, 0),
        *(0, 0, 0),
        0,
        np.float32(1 / 6),
        1,
        1,
    ]
    assert box.tolist() == [1, 0, 0, 0, 1, *(0, 1, 0, 0, 0, 0), *(0, 0, 0), 1, 0, 0, 0]
    assert door.tolist() == [1, 1, 0, 0, 0, *(0, 0, 0, 0, 0, 1), *(0, 0, 1), 0, 1, 0, 1]


def test_the_farthest_objects_are_left_out():
    image = view()
    image[..., 0] = BALL
    _, objects = encoded(image)
    distances = np.abs(3 * objects[:, 14]) + 6 * objects[:, 15]
    # 3 cells at distance 1, 5 at 2, 7 at 3, and 5 of the 7 at 4
    assert np.rint(distances).tolist() == [1] * 3 + [2] * 5 + [3] * 7 + [4] * 5


def test_the_grid_view_has_each_cell_and_the_direction():
    image = view(x1y2=(DOOR, GREY, LOCKED))
    row = encode(image[None], np.array([2]), "grid")[0]
    cells = row[:-4].reshape(7, 7, 20)
    assert np.flatnonzero(cells[1, 2]).tolist() == [DOOR, 11 + GREY, 17 + LOCKED]
    assert np.flatnonzero(cells[0, 0]).tolist() == [EMPTY]
    assert row[-4:].tolist() == [0, 0, 1, 0]
    spec = spec_of("grid", 64)
    assert spec.entity_schema == (("grid:image", 20, 49), ("own", 4, 1))
    assert spec.categorical[:4] == ((0, 11), (11, 6), (17, 3), (20, 11))
    assert len(spec.categorical) == 148 and spec.categorical[-1] == (980, 4)


def test_many_observations_are_encoded_as_one_by_one():
    rng = np.random.default_rng(0)
    images = rng.integers(0, (11, 6, 3), (30, 7, 7, 3))
    directions = rng.integers(4, size=30)
    for name in ("objects", "grid"):
        rows = encode(images, directions, name)
        each = [encode(images[i : i + 1], directions[i : i + 1], name)[0] for i in range(30)]
        assert np.array_equal(rows, each) and rows.dtype == np.float32


def mirrored_world(env):
    """The same level after a reset with its grid mirrored east to west."""
    other = deepcopy(env)
    for x in range(env.width):
        for y in range(env.height):
            other.grid.set(env.width - 1 - x, y, deepcopy(env.grid.get(x, y)))
    other.agent_pos = (env.width - 1 - env.agent_pos[0], env.agent_pos[1])
    other.agent_dir = [2, 1, 0, 3][env.agent_dir]
    return other


@pytest.mark.parametrize("seed", range(3))
def test_a_mirrored_world_is_seen_and_played_mirrored(seed):
    """Rooms with doors, some of them locked, by two hundred random actions."""
    env = make_level("MiniBossLevel")
    first = reset_level(env, seed)
    other = mirrored_world(env)
    pairs = [(first, other.gen_obs())]
    rng = np.random.default_rng(seed)
    for action in rng.choice(6, size=200, p=[0.2, 0.15, 0.4, 0.1, 0.05, 0.1]).tolist():
        seen = env.step(action)[0]
        in_mirror = other.step([1, 0, 2, 3, 4, 5][action])[0]
        pairs.append((seen, in_mirror))
    own, theirs = (stack_observations(each) for each in zip(*pairs, strict=True))
    assert len(np.unique(own[0], axis=0)) > 20
    assert np.array_equal(encode(*mirror_view(*own), "objects"), encode(*theirs, "objects"))
