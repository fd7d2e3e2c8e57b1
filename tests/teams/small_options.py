"""Small options of the registered datasets and environments of teams, for the tests of contracts."""

from pathlib import Path

ISLAND = "tests.teams.test_pettingzoo"

LOG = Path(__file__).parents[1] / "fixtures" / "smax" / "log"

DATASETS = {
    "spread": {"groups": 4},
    "team": {"path": str(LOG)},
    "tmaze": {"groups": 4, "agents": 2, "length": 2},
}
ENVS = {
    "pettingzoo": {
        "id": ISLAND,
        "teams": {"thief": 1},
        "partners": {1: f"{ISLAND}.steal"},
        "horizon": 4,
    },
    "spread": {"agents": 3, "actions": "discrete", "capacity": 6},
    "tmaze": {"agents": 2, "length": 2},
}
ELSEWHERE = {
    "dataset": {
        "smax": "teams/smax/test_env.py",
        "team_imagined": "teams/test_learned_world.py",
    },
    "env": {"smax": "teams/smax/test_env.py"},
}
