"""The two defects of the `D4RL/pointmaze/*` datasets of Minari, repaired on reading.

The first observation of an episode still has the previous goal (Minari issue 265): the goal of the
second one is used. An episode ends with its first reward, so that every return is 1: with goal=fixed
the rewards are those of the evaluation environment for its one goal, as in D4RL's Maze2D, and the
goal is left out of the observation; with goal=own the goal stays in the observation and the rewards
stay as they are.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from decisionllm.datasets.minari import read_env_spec

if TYPE_CHECKING:
    from minari import MinariDataset

GOAL_RADIUS = 0.45


def find_pointmaze(dataset: "MinariDataset") -> "PointMazeRepair | None":
    """Return the repair of a dataset of PointMaze; None for any other dataset."""
    space = dataset.observation_space
    if "pointmaze" not in dataset.id or not isinstance(space, spaces.Dict):
        return None
    if not {"observation", "desired_goal"} <= set(space):
        return None
    return PointMazeRepair(dataset)


class PointMazeRepair:
    """Repairs the episodes of a PointMaze dataset, see `datasets.minari.MinariRepair`."""

    part_without_goal = "observation"

    def __init__(self, dataset: "MinariDataset") -> None:
        self.dataset = dataset

    def repair_observations(self, observations: Any) -> Any:
        """Replace the goal of the first observation by that of the second."""
        goals = np.array(observations["desired_goal"])
        goals[0] = goals[1]
        return observations | {"desired_goal": goals}

    def reward_of_fixed_goal(self) -> Callable[[Any], np.ndarray]:
        """Return the reward function of the evaluation environment, for the one `g` of its map:
        observations of n + 1 steps -> (n,) float32.

        Raises:
            ValueError: the map has no `g`, or several.
        """
        options = read_env_spec(self.dataset).get("kwargs", {})
        maze: list[list[object]] = options.get("maze_map") or []
        cells = np.argwhere(np.array(maze, dtype=str) == "g")
        if len(cells) != 1:
            raise ValueError(
                f"{self.dataset.id}: expected one goal cell 'g' in the map of its evaluation "
                f"environment, got {len(cells)}; use dataset.goal=own"
            )
        i, j = cells[0]
        # x to the right, y upwards, the origin in the middle
        goal = np.array([j + 0.5 - len(maze[0]) / 2, len(maze) / 2 - i - 0.5])

        def reward(observations: Any) -> np.ndarray:
            positions = observations["observation"][1:, :2]
            distance: np.ndarray = np.linalg.norm(positions - goal, axis=1)
            if options.get("reward_type") == "dense":
                return np.asarray(np.exp(-distance), np.float32)
            return np.asarray(distance <= GOAL_RADIUS, np.float32)

        return reward
