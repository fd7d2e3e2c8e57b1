"""The simulator of OGBench's point mazes in closed form, one point or thousands at once.

Facts from seohongpark/ogbench, `ogbench/locomaze/` (maze.py, point.py, assets/point.xml): an action
moves the point by 0.2 of it, then MuJoCo runs five steps of 0.02 s from rest. In the open nothing
moves in these steps. A sphere that was moved into a wall is pushed out by MuJoCo's soft contacts
with friction, see `worlds.ball_physics`, integrated by Runge-Kutta of fourth order.
`tests/worlds/ogbench/test_simulator.py` compares it with recorded steps of the environment itself.

A position is (x, y) in units of length: x grows with the column of the layout, y with the row, and
the middle of cell (row, column) is at x = 4 column - 4, y = 4 row - 4.
"""

from functools import cached_property
from typing import Self

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.schema import raise_for_first
from decisionllm.worlds import ball_physics
from decisionllm.worlds.maze_grid import Grid

CELL = 4.0  # width of a cell
REACH = 0.2  # an action of 1 moves the point so far
RADIUS = 0.7  # of the sphere
MASS = 4 / 3 * np.pi * RADIUS**3 * 100
GOAL_RADIUS = 1.0
SPREAD = 1.0  # starts and goals are uniform within this distance of the middle of a cell, per axis
HORIZON = 1000  # steps of an evaluation

TIME_STEP = 0.02  # seconds
SUBSTEPS = 5
# MuJoCo takes a time constant of two steps where solref asks for less
STIFFNESS = 1 / (0.95 * 2 * TIME_STEP) ** 2
DAMPING = 2 / (0.95 * 2 * TIME_STEP)
# of each edge of the friction pyramid: 4 times the mean of 1/m over x, y and the fixed z
INVERSE_WEIGHT = 4 * (2 / 3) / MASS

LAYOUTS = {
    "medium": """
        ######## #..##..# #..#...# ##...### #..#...# #.#..#.# #...#..# ########
    """,
    "large": """
        ############ #....#.....# #.##.#.#.#.# #......#...# #.####.###.# #..#.#.....#
        ##.#.#.#.### #..#...#...# ############
    """,
    "giant": """
        ################ #.#......##....# #.#.##.#.#..##.# #...#..#...#...# #.###.######.#.#
        #...#...#....#.# ###.#.#..#.#.### #...#..#...#...# #.#.#.######.#.# #.###...#...##.#
        #.....#...#....# ################
    """,
}

# the five tasks of each maze: cells of the start and of the goal, (row, column)
TASKS = {
    "medium": [
        ((1, 1), (6, 6)),
        ((6, 1), (1, 6)),
        ((5, 3), (4, 2)),
        ((6, 5), (6, 1)),
        ((2, 6), (1, 1)),
    ],
    "large": [
        ((1, 1), (7, 10)),
        ((5, 4), (7, 1)),
        ((7, 4), (1, 10)),
        ((3, 8), (5, 4)),
        ((1, 1), (5, 4)),
    ],
    "giant": [
        ((1, 1), (10, 14)),
        ((1, 14), (10, 1)),
        ((8, 14), (1, 1)),
        ((8, 3), (5, 12)),
        ((5, 9), (3, 8)),
    ],
}


class Maze(Grid):
    """A maze of OGBench: `#` walls and `.` free cells."""

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Return a published layout."""
        check_one_of("maze", name, LAYOUTS)
        return cls(LAYOUTS[name])

    @cached_property
    def vertex_cells(self) -> np.ndarray:
        """Return the free cells that are no straight corridor, (cells, 2) int."""
        row, column = self.free_cells.T
        walls = self.walls
        vertical = np.stack([walls[row - 1, column], walls[row + 1, column]])  # (2, cells)
        horizontal = np.stack([walls[row, column - 1], walls[row, column + 1]])
        along_column = ~vertical.any(0) & horizontal.all(0)
        along_row = ~horizontal.any(0) & vertical.all(0)
        return self.free_cells[~along_column & ~along_row]

    @cached_property
    def _paths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `shortest_paths`; of equal moves the first of up, left, down, right is taken."""
        return self.shortest_paths(((-1, 0), (0, -1), (1, 0), (0, 1)))

    def distances(self, start: np.ndarray) -> np.ndarray:
        """Count the moves from a cell (2,) to each free cell, (cells,)."""
        return np.asarray(self._paths[1][self.number(start), self.number(self.free_cells)])

    def waypoint(self, positions: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """Return the middle of the next cell on a shortest path, (N, 2); positions and goals: (N, 2)."""
        now = self.number(cell_of(positions))
        target = self.number(cell_of(goals))
        return middle(self._paths[0][now, target])

    def inside(self, positions: np.ndarray) -> np.ndarray:
        """Return which positions (..., 2) are in free cells, (...) bool."""
        far = 1e6  # no number and no infinity is a place outside too
        cells = cell_of(np.clip(np.nan_to_num(positions, nan=far), -far, far))
        most = np.array(self.walls.shape) - 1
        within = ((cells >= 0) & (cells <= most)).all(-1)
        row, column = np.moveaxis(np.clip(cells, 0, most), -1, 0)
        return np.asarray(within & ~self.walls[row, column])

    def step(self, positions: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Move the points and push them out of the walls: (N, 2), (N, 2) -> (N, 2) float64.

        Actions are clipped to -1 .. 1, as in OGBench's evaluation and in its logs.

        Raises:
            ValueError: a position is not a number or within a wall.
        """
        positions = np.asarray(positions, np.float64)
        message = "position {}: expected a place in a free cell of the maze, got {}"
        raise_for_first("", ~self.inside(positions), message, np.arange(len(positions)), positions)
        moved = positions + REACH * np.clip(np.asarray(actions, np.float64), -1, 1)
        touching = self._contacts(moved)[2].any(1)
        if touching.any():
            moved[touching] = self._settle(moved[touching])
        return moved

    def _settle(self, positions: np.ndarray) -> np.ndarray:
        """Simulate five steps of points that touch walls, and return their positions (M, 2)."""
        velocity = np.zeros_like(positions)
        h = TIME_STEP
        for _ in range(SUBSTEPS):
            # Runge-Kutta of fourth order
            v1 = velocity
            a1 = self._accelerate(positions, velocity)
            v2 = velocity + h / 2 * a1
            a2 = self._accelerate(positions + h / 2 * v1, v2)
            v3 = velocity + h / 2 * a2
            a3 = self._accelerate(positions + h / 2 * v2, v3)
            v4 = velocity + h * a3
            a4 = self._accelerate(positions + h * v3, v4)
            positions = positions + h / 6 * (v1 + 2 * v2 + 2 * v3 + v4)
            velocity = velocity + h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        return positions

    def _accelerate(self, positions: np.ndarray, velocity: np.ndarray) -> np.ndarray:
        """Return the accelerations by the contacts, (M, 2).

        Each contact is a pyramid of four edges, normal + and - tangent and, since the point does
        not move along z, twice the normal alone.
        """
        normal, gap, touching = self._contacts(positions)
        tangent = normal[..., ::-1] * np.array([-1, 1])
        edges = np.stack([normal + tangent, normal - tangent, normal, normal], 2)  # (M, 3, 4, 2)
        impedance = ball_physics.impedance(gap)
        weight = np.where(touching, impedance / (1 - impedance) / INVERSE_WEIGHT, 0)  # (M, 3)
        approach = (edges * velocity[:, None, None]).sum(-1)  # (M, 3, 4)
        target = -DAMPING * approach - STIFFNESS * (impedance * gap)[..., None]
        M = len(positions)
        return ball_physics.solve_acceleration(
            MASS,
            np.zeros_like(positions),
            edges.reshape(M, 12, 2),
            np.repeat(weight, 4, 1),
            target.reshape(M, 12),
        )

    def _contacts(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the contacts of each point, see `find_contacts`: normals, gaps, whether they touch."""
        cell = cell_of(positions)  # (row, column) = (y, x)
        offset = positions - middle(cell)
        normal, gap, wall = ball_physics.find_contacts(
            self.walls.T, cell[:, ::-1], offset, half=CELL / 2, radius=RADIUS
        )
        return normal, gap, wall & (gap < 0)


def middle(cells: np.ndarray) -> np.ndarray:
    """Return the position (..., 2) of the middle of cells (..., 2)."""
    return CELL * (np.asarray(cells)[..., ::-1] - 1.0)


def cell_of(positions: np.ndarray) -> np.ndarray:
    """Return the cell (..., 2) int of positions (..., 2)."""
    return np.floor(np.asarray(positions)[..., ::-1] / CELL + 1.5).astype(int)


def sample_positions(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a position in each cell, as starts and goals are drawn: (N, 2) int -> (N, 2) float64."""
    return middle(cells) + rng.uniform(-SPREAD, SPREAD, np.shape(cells))


def is_reached(positions: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Return which positions (..., 2) are within the radius of goals (..., 2), (...) bool."""
    return np.asarray(np.linalg.norm(np.asarray(positions) - goals, axis=-1) <= GOAL_RADIUS)
