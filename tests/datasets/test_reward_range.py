"""Rewards that are too large for returns in float32."""

import numpy as np
import pytest

from decisionllm.datasets.arrays import from_episodes, load, open_folder
from decisionllm.datasets.data_quality import list_faults
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.schema import Episode


def store_with(reward, path, scale=1.0):
    """Ten episodes of five steps, of which the fourth has this reward."""
    rng = np.random.default_rng(0)
    episodes = []
    for i in range(10):
        rewards = scale * rng.normal(size=5)
        if i == 3:
            rewards[1] = reward
        episodes.append(Episode(rng.normal(size=(5, 2)), rng.uniform(-1, 1, (5, 1)), rewards))
    node = from_episodes(episodes, path, name="mine")
    return open_folder(path=node["path"])


@pytest.mark.parametrize("reward", [np.finfo(np.float32).min, 1e20, -1e30])
def test_returns_whose_squares_float32_cannot_hold_are_refused(reward, tmp_path):
    with pytest.raises(
        ValueError, match="episode 3: expected returns-to-go within 1.8e.19.*divide"
    ):
        store_with(reward, tmp_path / "s")


def test_a_file_of_such_rewards_is_refused(tmp_path):
    least = np.finfo(np.float32).min
    columns = {"observations": np.eye(3), "actions": np.ones(3, int), "terminals": [0, 0, 1]}
    path = str(tmp_path / "log.npz")
    np.savez(path, rewards=np.array([least, least, 1]), **columns)
    assert len(list(load(path=path).episodes)) == 1
    node = {"_target_": "decisionllm.datasets.arrays.load", "path": path}
    with pytest.raises(ValueError, match="episode 0: expected returns-to-go within .*got 6.8e.38"):
        prepare_store(node, tmp_path)


@pytest.mark.parametrize("reward", [1e9, -1e16])
def test_rewards_that_hide_usual_ones_are_a_fault(reward, tmp_path):
    (fault,) = list_faults(store_with(reward, tmp_path / "s").info)
    assert fault.startswith(f"rewards of up to {abs(reward):.2g}: float32 rounds returns-to-go by")


@pytest.mark.parametrize(("reward", "scale"), [(1e3, 1.0), (0.0, 1.0), (1e16, 1e15), (1, 1e-4)])
def test_rewards_of_a_usual_range_are_no_fault(reward, scale, tmp_path):
    assert list_faults(store_with(reward, tmp_path / "s", scale).info) == []
