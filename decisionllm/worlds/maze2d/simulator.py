"""The Maze2D simulator: D4RL's ball in a maze in closed form, and the planner of its data protocol,
one maze or thousands at once.

Facts from Farama-Foundation/D4RL, `d4rl/pointmaze/`: a sphere of radius 0.1 and density 1000 on two
damped slides, pushed by two motors of gear 100, integrated by semi-implicit Euler. Its contacts
with the unit boxes of the walls are MuJoCo's soft constraints with the default solver parameters,
see `worlds.ball_physics`. `tests/worlds/maze2d/test_simulator.py` compares it with MuJoCo where that is
installed.

States are (x, y, vx, vy): x grows with the row of the layout, y with the column. The ball's frame
is 0.2 off the walls': the middle of free cell (i, j) is at position (i - 0.2, j - 0.2).
"""

from functools import cached_property
from typing import Self

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.schema import raise_for_first
from decisionllm.worlds import ball_physics
from decisionllm.worlds.maze_grid import Grid

TIME_STEP = 0.01  # seconds
MAX_SPEED = 5.0  # per axis, clipped before each step
MASS = 4 / 3 * np.pi * 0.1**3 * 1000
RADIUS = 0.1
GEAR = 100.0
FRAME = 0.2  # position + FRAME is in the frame of the walls, whose boxes are centred at integers
GOAL_RADIUS = 0.5

LAYOUTS = {
    "open": "####### #OOOOO# #OOGOO# #OOOOO# #######",
    "umaze": "##### #GOO# ###O# #OOO# #####",
    "medium": "######## #OO##OO# #OO#OOO# ##OOO### #OO#OOO# #O#OO#O# #OOO#OG# ########",
    "large": """
        ############ #OOOO#OOOOO# #O##O#O#O#O# #OOOOOO#OOO# #O####O###O# #OO#O#OOOOO#
        ##O#O#O#O### #OO#OOO#OGO# ############
    """,
}


class Maze(Grid):
    """A maze of D4RL: `#` walls, `O` free cells and one `G`, the free cell of the fixed goal."""

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Return a published layout."""
        check_one_of("maze", name, LAYOUTS)
        return cls(LAYOUTS[name])

    @cached_property
    def goal(self) -> np.ndarray:
        """Return the cell of the fixed goal, which is also its position: (2,) int."""
        (goal,) = np.argwhere(self.letters == "G")
        return goal

    @cached_property
    def _paths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `shortest_paths`; of equal moves the first of left, right, up, down is taken.

        D4RL iterates values with discount 0.99 and takes the greedy move, the first among equals;
        with one rewarded cell that is the first move that shortens the distance.
        """
        return self.shortest_paths(((0, -1), (0, 1), (-1, 0), (1, 0)))

    def cells(self, text: str, option: str) -> np.ndarray:
        """Parse "1,3; 3,1" into free cells (cells, 2) int; a ValueError names the option."""
        cell_by_name = {
            f"{row},{column}": (row, column) for row, column in self.free_cells.tolist()
        }
        cells = []
        for name in text.replace(" ", "").split(";"):
            if name and name not in cell_by_name:
                names = " ".join(cell_by_name)
                raise ValueError(
                    f"{option}: expected free cells as row,column, of {names}; got {name!r}"
                )
            if name:
                cells.append(cell_by_name[name])
        return np.array(cells, int).reshape(-1, 2)

    def is_free(self, places: np.ndarray) -> np.ndarray:
        """Return which places (..., 2), in the frame of the walls, are in free cells: (...) bool."""
        most = np.array(self.walls.shape) - 1
        cells = np.clip(np.rint(places), 0, most).astype(int)  # the outer cells are walls
        return np.asarray(~self.walls[cells[..., 0], cells[..., 1]])

    def distance(self, start: np.ndarray, goal: np.ndarray) -> int:
        """Count the moves of a shortest path between two free cells."""
        return int(self._paths[1][self.number(start), self.number(goal)])

    def reset(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw (count, 4) float64 starts as in D4RL: any free cell, the goal's too, noise."""
        cells = self.free_cells[rng.integers(len(self.free_cells), size=count)]
        positions = cells + rng.uniform(-0.1, 0.1, (count, 2))
        velocities = rng.normal(0, 0.1, (count, 2))
        return np.concatenate([positions, velocities], 1)

    def step(self, states: np.ndarray, actions: np.ndarray, *, margin: float = 0.002) -> np.ndarray:
        """Simulate one time step of the ball: (..., 4), (..., 2) -> (..., 4) float64, actions clipped
        to [-1, 1].

        margin: the distance at which contacts begin, 0.002 as in the physics of D4RL's data. MuJoCo
        >= 3.5 adds the margins of both bodies, so that an unchanged model file behaves as 0.004
        there.

        Raises:
            ValueError: a position is not a number, or beyond the outer walls.
        """
        shape = np.shape(states)
        states = np.asarray(states, np.float64).reshape(-1, 4)
        actions = np.asarray(actions, np.float64).reshape(-1, 2)
        position = states[:, :2]
        velocity = np.clip(states[:, 2:], -MAX_SPEED, MAX_SPEED)
        inner = np.array(self.walls.shape) - 2
        inside = (position > 0.5 - FRAME) & (position < inner + 0.5 - FRAME)
        limits = f"0.3 .. {inner[0] + 0.3} and 0.3 .. {inner[1] + 0.3}"
        message = f"state {{}}: expected a position between the outer walls, {limits}, got {{}}"
        raise_for_first(
            "", np.logical_not(inside.all(1)), message, np.arange(len(states)), position
        )
        force = GEAR * np.clip(actions, -1, 1) - velocity  # the joints' damping is 1
        self._push_walls(position, velocity, force, margin)
        # damping is implicit in the new velocity
        velocity = velocity + TIME_STEP / (MASS + TIME_STEP) * force
        return np.concatenate([position + TIME_STEP * velocity, velocity], 1).reshape(shape)

    def _push_walls(
        self,
        position: np.ndarray,
        velocity: np.ndarray,
        force: np.ndarray,
        margin: float,
    ) -> None:
        """Add the contact forces to `force`, in place. All (n, 2)."""
        cell = np.rint(position + FRAME).astype(int)
        offset = position + FRAME - cell  # within [-0.5, 0.5]
        near = np.abs(offset) > 0.5 - RADIUS - margin
        rows = np.flatnonzero(near.any(1))
        if not len(rows):
            return
        normal, gap, wall = ball_physics.find_contacts(
            self.walls, cell[rows], offset[rows], half=0.5, radius=RADIUS
        )
        beside, above = near[rows].T
        touching = wall & (gap < margin) & np.stack([beside, above, beside & above], 1)
        some = touching.any(1)
        rows, normal, gap, touching = rows[some], normal[some], gap[some], touching[some]

        # MuJoCo's default solref (0.02, 1)
        depth = gap - margin
        impedance = ball_physics.impedance(depth)
        stiffness = np.where(touching, MASS * impedance / (1 - impedance), 0)
        approach = (normal * velocity[rows, None]).sum(-1)
        # acceleration along the normal
        target = -2 / (0.95 * 0.02) * approach - impedance * depth / (0.95 * 0.02) ** 2
        acceleration = ball_physics.solve_acceleration(MASS, force[rows], normal, stiffness, target)
        missing = np.maximum(target - (normal * acceleration[:, None]).sum(-1), 0)
        force[rows] += ((stiffness * missing)[..., None] * normal).sum(1)


def reward(positions: np.ndarray, goal: np.ndarray, *, dense: bool = False) -> np.ndarray:
    """Return rewards at positions, (..., 2) -> (...): 1 within 0.5 of the goal; dense: exp(-distance)."""
    distance: np.ndarray = np.linalg.norm(np.asarray(positions, np.float64) - goal, axis=-1)
    return np.exp(-distance) if dense else (distance <= GOAL_RADIUS).astype(np.float64)


class Planner:
    """D4RL's waypoint controller for N balls: a shortest path over cells, a noisy point in each, a
    PD controller between.

    Solved: the ball is within 0.1 of the middle of its goal cell. D4RL also requires that the ball
    moved less than 0.1 in the last step; at speeds below 5.3 it always has.
    """

    def __init__(self, maze: Maze, count: int, rng: np.random.Generator) -> None:
        self.maze = maze
        self.rng = rng
        self.goals = np.zeros((count, 2), int)
        self.waypoints = np.zeros((count, len(maze.free_cells) + 1, 2))
        self.leg = np.zeros(count, int)

    def aim(self, rows: np.ndarray, positions: np.ndarray, goals: np.ndarray) -> None:
        """Plan afresh for these rows: (rows,) int, (rows, 2) positions, (rows, 2) int cells."""
        maze = self.maze
        cells = np.clip(np.rint(positions).astype(int), 0, np.array(maze.walls.shape) - 1)
        walls = maze.walls[goals[:, 0], goals[:, 1]]
        if walls.any():
            got = goals[walls][0].tolist()
            raise ValueError(f"goal: expected free cells of the maze, got {got}")
        for leg in range(self.waypoints.shape[1]):
            cells = maze._paths[0][maze.number(cells), maze.number(goals)]
            at_goal = (cells == goals).all(1, keepdims=True)
            noise = self.rng.uniform(0, 0.2, cells.shape)
            self.waypoints[rows, leg] = cells - np.where(at_goal, 0, noise)
            if at_goal.all():
                self.waypoints[rows, leg + 1 :] = goals[:, None]
                break
        self.goals[rows] = goals
        self.leg[rows] = 0

    def act(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return actions (N, 2) within -1 .. 1 in states (N, 4), and which balls have solved: (N,) bool."""
        position, velocity = states[:, :2], states[:, 2:]
        each = np.arange(len(states))
        solved = np.linalg.norm(position - self.goals, axis=1) < 0.1
        target = np.where(solved[:, None], self.goals, self.waypoints[each, self.leg])
        arrived = ~solved & (np.linalg.norm(position - target, axis=1) < 0.1)
        self.leg = np.minimum(self.leg + arrived, self.waypoints.shape[1] - 1)
        return np.clip(10 * (target - position) - velocity, -1, 1), solved
