"""The point mazes' closed form against OGBench's own environment, and against cases by hand.

The steps of the environment are in a file, `python -m tests.worlds.ogbench.record` makes it again.
Where ogbench is installed (pip install --no-deps ogbench), new ones are compared too.
"""

import numpy as np
import pytest

from decisionllm.worlds.ogbench.simulator import (
    LAYOUTS,
    TASKS,
    Maze,
    cell_of,
    is_reached,
    middle,
    sample_positions,
)
from tests.worlds.ogbench import record

every_maze = pytest.mark.parametrize("name", LAYOUTS)


def compare(name, positions, actions, after):
    """Hold our step to rows of OGBench's; a quarter of them must touch a wall."""
    np.testing.assert_allclose(Maze.from_name(name).step(positions, actions), after, atol=1e-6)
    moved = np.abs(positions + 0.2 * actions - after).max(1) > 1e-9
    assert moved.mean() > 0.25, "the comparison must include contacts"


@every_maze
def test_recorded_steps_of_ogbench_are_the_same(name):
    with np.load(record.FILE) as recorded:
        assert np.array_equal(Maze.from_name(name).walls, recorded[f"{name}_walls"])
        assert np.array_equal(TASKS[name], recorded[f"{name}_tasks"])
        compare(name, *(recorded[f"{name}_{key}"] for key in ("positions", "actions", "after")))


@every_maze
def test_new_steps_of_an_installed_ogbench_are_the_same(name):
    pytest.importorskip("ogbench")
    walls, tasks = record.facts(name)
    assert np.array_equal(Maze.from_name(name).walls, walls) and np.array_equal(TASKS[name], tasks)
    compare(name, *record.recorded(name, walks=6, steps=60, seed=1))


def test_one_point_moves_as_in_a_batch():
    maze, rng = Maze.from_name("large"), np.random.default_rng(0)
    positions = sample_positions(np.repeat(maze.free_cells, 5, 0), rng)
    for _ in range(20):
        actions = rng.choice([-1.0, 1.0], positions.shape)
        after = maze.step(positions, actions)
        np.testing.assert_allclose(maze.step(positions[7:8], actions[7:8]), after[7:8], atol=1e-12)
        positions = after


def test_in_the_open_an_action_moves_by_a_fifth_and_is_clipped():
    # cell (1, 1) is around (0, 0); x grows with the column
    after = Maze.from_name("large").step([[0.0, 0.0], [4.0, 0.0]], [[0.5, -0.5], [3.0, 0.0]])
    np.testing.assert_allclose(after, [[0.1, -0.1], [4.2, 0.0]])


def test_nothing_gets_through_a_wall():
    maze, rng = Maze.from_name("giant"), np.random.default_rng(5)
    positions = sample_positions(maze.free_cells, rng)
    for t in range(200):
        if t % 40 == 0:
            push = rng.choice([-1.0, 0.0, 1.0], positions.shape)
        positions = maze.step(positions, push)
        assert maze.inside(positions).all()


def test_a_place_outside_is_refused():
    maze = Maze.from_name("medium")
    for place in ([8.0, 0.0], [-7.0, 0.0], [1000.0, 0.0], [0.0, -6.1]):
        with pytest.raises(ValueError, match=r"position 1: expected a place in a free cell"):
            maze.step([[0.0, 0.0], place], np.zeros((2, 2)))


def test_cells_and_positions_by_hand():
    assert middle(np.array([[1, 1], [2, 5]])).tolist() == [[0, 0], [16, 4]]
    assert cell_of([[1.9, -1.9], [2.1, -1.9], [16, 5.9]]).tolist() == [[1, 1], [1, 2], [2, 5]]
    assert is_reached(np.array([[3.0, 4.0], [3.1, 4.0]]), np.array([3.0, 5.0])).tolist() == [
        True,
        False,
    ]


def test_ways_and_vertices_of_a_small_maze_by_hand():
    maze = Maze("##### #...# #.#.# #.#.# #####")
    # of the upper row, its middle is a corridor; of the columns, the rows between
    assert maze.vertex_cells.tolist() == [[1, 1], [1, 3], [3, 1], [3, 3]]
    start, goal = middle(np.array([[2, 1]])), middle(np.array([[3, 3]]))
    assert maze.waypoint(start, goal).tolist() == [[0, 0]]  # up, to cell (1, 1)
    assert maze.waypoint(goal + 1, goal).tolist() == goal.tolist()
    steps = dict(
        zip(map(tuple, maze.free_cells.tolist()), maze.distances(np.array([2, 1])), strict=True)
    )
    assert steps[3, 3] == 5 and steps[3, 1] == 1
