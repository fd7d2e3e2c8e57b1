"""Mazes on a grid: walls, free cells, shortest paths."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

Moves = tuple[tuple[int, int], ...]  # (rows, columns) each


@dataclass(frozen=True)
class Grid:
    """A layout of `#` walls and free cells, which are any other letter.

    Rows are separated by blanks.
    """

    layout: str

    @cached_property
    def letters(self) -> np.ndarray:
        """Return the letters of the layout, (rows, columns) str."""
        return np.array([list(row) for row in self.layout.split()])

    @cached_property
    def walls(self) -> np.ndarray:
        """Return which cells are walls, (rows, columns) bool."""
        return np.asarray(self.letters == "#")

    @cached_property
    def free_cells(self) -> np.ndarray:
        """Return the free cells in row order, (cells, 2) int."""
        return np.argwhere(~self.walls)

    def number(self, cells: np.ndarray) -> np.ndarray:
        """Number cells (..., 2) int in row order: (...)."""
        return np.asarray(cells[..., 0] * self.walls.shape[1] + cells[..., 1])

    def shortest_paths(self, moves: Moves) -> tuple[np.ndarray, np.ndarray]:
        """Find shortest paths between any two cells, walls too, numbered in row order.

        Args:
            moves: those that there are, without standing still; of equally good ones the first is
                taken. A move into a wall or out of the grid leaves the cell where it is.

        Returns:
            The next cell, (cells, cells, 2) int, at the goal the cell itself, and the number of
            moves, (cells, cells).
        """
        shape = self.walls.shape
        cells = np.arange(self.walls.size).reshape(shape)
        starts = np.argwhere(cells >= 0)[:, None]  # (cells, 1, 2)
        choices = np.array([(0, 0), *moves])
        after = np.clip(starts + choices, 0, np.array(shape) - 1)  # (cells, choices, 2)
        blocked = self.walls[after[..., 0], after[..., 1]]
        after = np.where(blocked[..., None], starts, after)
        target = cells[after[..., 0], after[..., 1]]  # (cells, choices)
        edges = np.repeat(cells, len(choices)), target.ravel()
        graph = csr_array((np.ones(target.size), edges), (cells.size, cells.size))
        distance = shortest_path(graph, unweighted=True)
        best = distance[target].argmin(1)  # (cells, cells)
        return np.take_along_axis(after, best[..., None], 1), distance
