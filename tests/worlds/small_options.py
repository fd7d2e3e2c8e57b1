"""Small options of the registered worlds, for the tests of contracts."""

from decisionllm.registry import discover

MAZES = [name for name in discover()["dataset"] if name.startswith("maze2d-")]
POINT_MAZE = {"name": "pointmaze-medium-stitch"}

DATASETS = {
    "babyai": {"level": "GoToRedBallNoDists", "episodes": 3},
    **{name: {"source": "regenerate", "steps": 600} for name in MAZES},
    "ogbench": {**POINT_MAZE, "source": "regenerate", "episodes": 4},
}
ENVS = {
    "babyai": {"level": ["GoToObjS4", "PickupLoc"]},
    **{name: {} for name in MAZES},
    "ogbench": POINT_MAZE,
}
ELSEWHERE = {"dataset": {}, "env": {}}
