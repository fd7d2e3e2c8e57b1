"""Small options of every registered dataset and environment, so that each can be made in a moment.

A choice that is registered and stands neither here nor in `ELSEWHERE` fails the contract tests.
"""

from pathlib import Path

import numpy as np

from decisionllm.registry import build, discover
from tests.bidding.test_journal_dataset import serve
from tests.conftest import episode, make_store, node
from tests.datasets.test_minari import put, rows
from tests.eval.test_gymnasium import counted
from tests.teams.test_pettingzoo import ISLAND

TEAM_LOG = Path(__file__).parents[1] / "fixtures" / "smax" / "log"
MAZES = [name for name in discover()["dataset"] if name.startswith("maze2d-")]
DAY = {"periods": "3"}
SHORT_DAY = {"periods": "3", "positions": "0,9", "opportunities": 2000}
# what needs more than a moment, or is no single source -> the file that tests it
ELSEWHERE = {
    "dataset": {
        "smax": "teams/smax/test_env.py",
        "imagined": "policy/test_imagined.py",
        "embodiments": "datasets/test_mixture.py",
        "team_imagined": "teams/test_learned_world.py",
    },
    "env": {"smax": "teams/smax/test_env.py"},
}


def arrays(folder):
    """A file in D4RL's layout: two episodes of 5 and 3 steps."""
    file = folder / "log.npz"
    ends = np.isin(np.arange(8), [4, 7])
    observations = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
    np.savez(
        file,
        observations=observations,
        actions=observations[:, :1] / 2,
        rewards=observations[:, 0],
        terminals=ends,
    )
    return {"path": str(file), "task": "Go on."}


def stored(folder):
    """A data store of two episodes."""
    store = make_store(folder / "log", [episode([1.0, 2.0]), episode([3.0], group=1)])
    return {"path": str(store.path)}


def journal(folder):
    """The journal of one campaign that a server answered for a day."""
    serve(folder / "j.sqlite", positions="0")
    return {"path": str(folder / "j.sqlite")}


def minari(folder):
    """A Minari dataset of two episodes, in the user's folder, where one test may put several."""
    minari_id = f"mine/{folder.name}-v0"
    episodes = [(rows(n + 1), rows(n), np.ones(n)) for n in (3, 2)]
    put(minari_id, episodes, description="Go on.")
    return {"minari_id": minari_id}


def counter(folder):
    """A Minari dataset that names its environment."""
    counted("mine/counter-v0")
    return {"minari_id": "mine/counter-v0"}


POINT_MAZE = {"name": "pointmaze-medium-stitch"}
PARTS = {
    "few": {"dataset": "synthetic", "episodes": 4},
    "many": {"dataset": "synthetic", "episodes": 6},
}
# options, or a function of an empty folder that returns them
DATASETS = {
    "arrays": arrays,
    "store": stored,
    "auction": DAY,
    "babyai": {"level": "GoToRedBallNoDists", "episodes": 3},
    "journal": journal,
    **{name: {"source": "regenerate", "steps": 600} for name in MAZES},
    "minari": minari,
    "mixture": {"parts": PARTS},
    "ogbench": {**POINT_MAZE, "source": "regenerate", "episodes": 4},
    "spread": {"groups": 4},
    "synthetic": {"episodes": 8},
    "synthetic-discrete": {"episodes": 8},
    "team": {"path": str(TEAM_LOG)},
    "tmaze": {"groups": 4, "agents": 2, "length": 2},
}
ENVS = {
    "journal": SHORT_DAY,
    "auction": SHORT_DAY,
    "babyai": {"level": ["GoToObjS4", "PickupLoc"]},
    "gymnasium": {"id": "CartPole-v1", "horizon": 30},
    "minari": counter,
    **{name: {} for name in MAZES},
    "ogbench": POINT_MAZE,
    "pettingzoo": {
        "id": ISLAND,
        "teams": {"thief": 1},
        "partners": {1: f"{ISLAND}.steal"},
        "horizon": 4,
    },
    "spread": {"agents": 3, "actions": "discrete", "capacity": 6},
    "synthetic": {},
    "synthetic-discrete": {},
    "tmaze": {"agents": 2, "length": 2},
}


def node_of(group, name, folder, **options):
    """The node of a choice with its small options; `folder` is where it may put files."""
    own = {"dataset": DATASETS, "env": ENVS}[group][name]
    return node(group, name, **(own if isinstance(own, dict) else own(folder)), **options)


def made(group, name, folder, *supplied, **options):
    """What is registered, made with its small options."""
    return build(node_of(group, name, folder, **options), *supplied)


def missing(group):
    """Registered names that stand neither here nor elsewhere, and the other way round."""
    here = {"dataset": DATASETS, "env": ENVS}[group]
    return set(discover()[group]) ^ {*here, *ELSEWHERE[group]}
