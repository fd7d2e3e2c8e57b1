"""Record steps, walls and tasks of OGBench's own point mazes, the oracle of `test_world.py`.

pip install --no-deps ogbench mujoco; python -m tests.worlds.ogbench.record
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[2] / "fixtures" / "ogbench" / "steps.npz"
MAZES = ("medium", "large", "giant")


def make(maze):
    """OGBench's environment of a maze."""
    import gymnasium

    return gymnasium.make(f"ogbench.locomaze:pointmaze-{maze}-v0").unwrapped


def recorded(maze, walks, steps, seed):
    """Walks from random free cells that hold a direction for ten steps, so that walls and corners
    are reached at full speed: positions, actions and the positions after them, (n, 2) each.
    """
    from ogbench.locomaze.point import PointEnv

    env, rng = make(maze), np.random.default_rng(seed)
    free = np.argwhere(env.maze_map == 0)
    rows = []
    for row, column in free[rng.integers(len(free), size=walks)]:
        position = np.array(env.ij_to_xy((row, column))) + rng.uniform(-1, 1, 2)
        for t in range(steps):
            if t % 10 == 0:
                action = rng.uniform(-1.5, 1.5, 2).clip(-1, 1)
            env.set_xy(position)
            PointEnv.step(env, action)
            after = env.data.qpos.copy()
            rows.append((position, action, after))
            position = after
    return [np.array(column) for column in zip(*rows, strict=True)]


def facts(maze):
    """Its walls (rows, columns) bool and its tasks (5, start and goal, 2) int."""
    env = make(maze)
    tasks = [(task["init_ij"], task["goal_ij"]) for task in env.task_infos]
    return env.maze_map == 1, np.array(tasks)


if __name__ == "__main__":
    arrays = {}
    for maze in MAZES:
        arrays[f"{maze}_walls"], arrays[f"{maze}_tasks"] = facts(maze)
        steps = recorded(maze, walks=12, steps=40, seed=0)
        for name, rows in zip(("positions", "actions", "after"), steps, strict=True):
            arrays[f"{maze}_{name}"] = rows
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)
