"""OGBench's point mazes: a point in a maze, its logs, and the environment with five tasks a maze."""
