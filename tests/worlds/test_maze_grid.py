"""Shortest paths on a grid, by hand."""

import numpy as np

from decisionllm.worlds.maze_grid import Grid

RING = Grid("##### #...# #.#.# #...# #####")  # a wall in the middle: two ways around
UP, LEFT, DOWN, RIGHT = (-1, 0), (0, -1), (1, 0), (0, 1)


def number(row, column):
    return 5 * row + column


def test_the_free_cells_are_in_row_order():
    cells = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2), (3, 3)]
    assert list(map(tuple, RING.free_cells)) == cells and RING.walls.sum() == 25 - 8


def test_of_equally_short_ways_the_first_move_is_taken():
    corner, opposite = number(1, 1), number(3, 3)
    for moves, second in (((DOWN, RIGHT, UP, LEFT), (2, 1)), ((RIGHT, DOWN, UP, LEFT), (1, 2))):
        following, distance = RING.shortest_paths(moves)
        assert distance[corner, opposite] == 4
        assert tuple(following[corner, opposite]) == second
        assert tuple(following[opposite, opposite]) == (3, 3), "at the goal it stays"


def test_nothing_goes_into_a_wall():
    following, distance = RING.shortest_paths((UP, LEFT, DOWN, RIGHT))
    free = [number(*cell) for cell in RING.free_cells]
    assert np.isfinite(distance[np.ix_(free, free)]).all()
    assert not RING.walls[tuple(np.moveaxis(following[np.ix_(free, free)], -1, 0))].any()
    assert np.isinf(distance[free, number(2, 2)]).all()
