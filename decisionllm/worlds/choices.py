"""The datasets and environments of the worlds, see `decisionllm.choices`."""

LOAD_MAZE = "decisionllm.worlds.maze2d.dataset.load"
MAZE = "decisionllm.worlds.maze2d.env.Maze2D"
LOAD_POINTS = "decisionllm.worlds.synthetic.dataset.load"
POINTS = "decisionllm.worlds.synthetic.env.PointEnv"
TEXT = {"text": "${text}"}
TEXTS = {"text": "${text}", "frames": "${text_wordings}"}

CHOICES = {
    "dataset": {
        "babyai": {"_target_": "decisionllm.worlds.babyai.dataset.load", **TEXT},
        "maze2d-umaze": {"_target_": LOAD_MAZE, "maze": "umaze", **TEXT},
        "maze2d-medium": {"_target_": LOAD_MAZE, "maze": "medium", **TEXT},
        "maze2d-large": {"_target_": LOAD_MAZE, "maze": "large", **TEXT},
        "maze2d-open": {"_target_": LOAD_MAZE, "maze": "open", **TEXT},
        "maze2d-umaze-dense": {"_target_": LOAD_MAZE, "maze": "umaze", "dense": True, **TEXT},
        "maze2d-medium-dense": {"_target_": LOAD_MAZE, "maze": "medium", "dense": True, **TEXT},
        "maze2d-large-dense": {"_target_": LOAD_MAZE, "maze": "large", "dense": True, **TEXT},
        "ogbench": {"_target_": "decisionllm.worlds.ogbench.dataset.load", **TEXT},
        "synthetic": {"_target_": LOAD_POINTS, **TEXT},
        "synthetic-discrete": {"_target_": LOAD_POINTS, "discrete": True, **TEXT},
    },
    "env": {
        "babyai": {
            "_target_": "decisionllm.worlds.babyai.env.BabyAI",
            "level": "${dataset.level}",
            "view": "${dataset.view}",
            **TEXTS,
        },
        "maze2d-umaze": {"_target_": MAZE, "maze": "umaze", **TEXTS},
        "maze2d-medium": {"_target_": MAZE, "maze": "medium", **TEXTS},
        "maze2d-large": {"_target_": MAZE, "maze": "large", **TEXTS},
        "maze2d-open": {"_target_": MAZE, "maze": "open", **TEXTS},
        "maze2d-umaze-dense": {"_target_": MAZE, "maze": "umaze", "dense": True, **TEXTS},
        "maze2d-medium-dense": {"_target_": MAZE, "maze": "medium", "dense": True, **TEXTS},
        "maze2d-large-dense": {"_target_": MAZE, "maze": "large", "dense": True, **TEXTS},
        "ogbench": {
            "_target_": "decisionllm.worlds.ogbench.env.PointMaze",
            "name": "${dataset.name}",
            **TEXT,
        },
        "synthetic": {"_target_": POINTS, **TEXT},
        "synthetic-discrete": {"_target_": POINTS, "discrete": True, **TEXT},
    },
    # functions that the package looks up by name, see `registry.FUNCTIONS`
    "final_observations": {
        "maze2d": {"_target_": "decisionllm.worlds.maze2d.dataset.final_observations"},
    },
    "export": {
        "hdf5": {"_target_": "decisionllm.worlds.maze2d.dataset.save"},
    },
}
