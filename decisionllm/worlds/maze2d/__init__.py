"""D4RL's Maze2D: a ball in a maze, its planner, logs, and the environment with its score."""
