"""Small options of every registered dataset and environment, so that each can be made in a moment.

Those of a neighbour of the core are in the file small_options.py of its tests. A choice that is
registered and stands in none of these files, nor in `ELSEWHERE`, fails the contract tests.
"""

from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd

from decisionllm.registry import build, discover
from tests.conftest import NEIGHBOURS, episode, make_store, node
from tests.datasets.test_minari import put, rows
from tests.eval.test_gymnasium import counted

TESTS = Path(__file__).parents[1]
# what needs more than a moment, or is no single source -> the file that tests it
ELSEWHERE = {
    "dataset": {
        "imagined": "policy/test_imagined_dataset.py",
        "embodiments": "datasets/test_mixture.py",
    },
    "env": {},
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


def minari(folder):
    """A Minari dataset of two episodes, in the user's folder, where one test may put several."""
    minari_id = f"mine/{folder.name}-v0"
    episodes = [(rows(n + 1), rows(n), np.ones(n)) for n in (3, 2)]
    put(minari_id, episodes, description="Go on.")
    return {"minari_id": minari_id}


def huggingface(folder):
    """A Parquet file of two episodes of 3 and 2 steps."""
    columns = {
        "episode_index": [0, 0, 0, 1, 1],
        "state": [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]],
        "action": [0.1, 0.2, -0.3, 0.4, 0.5],
        "reward": [0.0, 0.0, 1.0, 0.0, 1.0],
    }
    pd.DataFrame(columns).to_parquet(folder / "steps.parquet")
    return {"path": str(folder), "observations": ["state"], "rewards": "reward", "task": "Go on."}


def counter(folder):
    """A Minari dataset that names its environment."""
    counted("mine/counter-v0")
    return {"minari_id": "mine/counter-v0"}


PARTS = {
    "few": {"dataset": "synthetic", "episodes": 4},
    "many": {"dataset": "synthetic", "episodes": 6},
}
# options, or a function of an empty folder that returns them
DATASETS = {
    "arrays": arrays,
    "store": stored,
    "minari": minari,
    "lerobot": {
        "path": str(TESTS / "fixtures" / "lerobot" / "reach"),
        "task": "Go on.",
    },
    "huggingface": huggingface,
    "mixture": {"parts": PARTS},
    "synthetic": {"episodes": 8},
    "synthetic-discrete": {"episodes": 8},
}
ENVS = {
    "gymnasium": {"id": "CartPole-v1", "horizon": 30},
    "minari": counter,
    "synthetic": {},
    "synthetic-discrete": {},
}
for neighbour in NEIGHBOURS:
    if (TESTS / neighbour / "small_options.py").is_file():
        small = import_module(f"tests.{neighbour}.small_options")
        DATASETS |= small.DATASETS
        ENVS |= small.ENVS
        for group, files in small.ELSEWHERE.items():
            ELSEWHERE[group] |= files


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
