"""The datasets and environments of the worlds, see `decisionllm.choices`."""

LOAD_MAZE = "decisionllm.worlds.maze2d.dataset.load"
MAZE = "decisionllm.worlds.maze2d.env.Maze2D"
TEXT = {"text": "${text}"}
TEXTS = {"text": "${text}", "frames": "${text_wordings}"}

CHOICES = {
    "dataset": {
        "babyai": dict(_target_="decisionllm.worlds.babyai.dataset.load", **TEXT),
        "maze2d-umaze": dict(_target_=LOAD_MAZE, maze="umaze", **TEXT),
        "maze2d-medium": dict(_target_=LOAD_MAZE, maze="medium", **TEXT),
        "maze2d-large": dict(_target_=LOAD_MAZE, maze="large", **TEXT),
        "maze2d-open": dict(_target_=LOAD_MAZE, maze="open", **TEXT),
        "maze2d-umaze-dense": dict(_target_=LOAD_MAZE, maze="umaze", dense=True, **TEXT),
        "maze2d-medium-dense": dict(_target_=LOAD_MAZE, maze="medium", dense=True, **TEXT),
        "maze2d-large-dense": dict(_target_=LOAD_MAZE, maze="large", dense=True, **TEXT),
        "ogbench": dict(_target_="decisionllm.worlds.ogbench.dataset.load", **TEXT),
    },
    "env": {
        "babyai": dict(
            _target_="decisionllm.worlds.babyai.env.BabyAI",
            level="${dataset.level}",
            view="${dataset.view}",
            **TEXTS,
        ),
        "maze2d-umaze": dict(_target_=MAZE, maze="umaze", **TEXTS),
        "maze2d-medium": dict(_target_=MAZE, maze="medium", **TEXTS),
        "maze2d-large": dict(_target_=MAZE, maze="large", **TEXTS),
        "maze2d-open": dict(_target_=MAZE, maze="open", **TEXTS),
        "maze2d-umaze-dense": dict(_target_=MAZE, maze="umaze", dense=True, **TEXTS),
        "maze2d-medium-dense": dict(_target_=MAZE, maze="medium", dense=True, **TEXTS),
        "maze2d-large-dense": dict(_target_=MAZE, maze="large", dense=True, **TEXTS),
        "ogbench": dict(
            _target_="decisionllm.worlds.ogbench.env.PointMaze", name="${dataset.name}", **TEXT
        ),
    },
    # functions that the package looks up by name, see `registry.FUNCTIONS`
    "final_observations": {
        "maze2d": dict(_target_="decisionllm.worlds.maze2d.dataset.final_observations"),
    },
    "minari_repair": {
        "pointmaze": {"_target_": "decisionllm.worlds.maze2d.pointmaze.find_pointmaze"},
    },
    "export": {
        "hdf5": dict(_target_="decisionllm.worlds.maze2d.dataset.save"),
    },
}
