"""Any class of the interface `Planner` is fitted to the training steps of a run."""

import numpy as np
import pytest
import torch
from torch import nn

from decisionllm.config import train_config
from decisionllm.datasets.batches import open_data
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.protocols import Planner
from decisionllm.runs.start import new_model
from tests.conftest import episode, make_store, node


class TextLengths(nn.Module, Planner):
    """A planner of a user's own, which keeps what it is fitted to."""

    horizon = 2
    least_value = 0.0

    def __init__(self, spec, *, scale=1.0):
        super().__init__()
        self.candidates = torch.zeros(1, spec.action_dim)
        self.scale = scale

    def text_codes(self, texts):
        return self.scale * torch.tensor([[float(len(text))] for text in texts])

    def states(self, observations, texts):
        return torch.cat([observations, self.text_codes(texts)], -1)

    def plan(self, states, steps):
        return torch.zeros(len(states), 1)

    def fit(self, data, units, *, seed):
        self.data = data
        self.units = units
        self.seed = seed


@pytest.fixture
def fitted(tmp_path):
    """The planner of a new run on two episodes: 3 steps that end, with an unknown action in the
    middle; 2 steps that are cut off.
    """
    recorded = np.array([1, 0, 1], np.float32)
    episodes = [
        episode([1, 2, 3], task="north", group=0, terminated=True, action_weight=recorded),
        episode([4, 5], task="up", start=10, group=1, truncated=True),
    ]
    store = make_store(tmp_path / "log", episodes)
    planner = {"_target_": f"{__name__}.TextLengths", "scale": 10.0}
    backbone = node("backbone", "nano", width=32, layers=1, heads=2, kv_heads=1, inner=32)
    options = {
        "dataset": {"_target_": "none"},
        "backbone": backbone,
        "head": node("head", "gaussian"),
        "window": 1,
        "seed": 3,
        "planner": planner,
        "data": {"held_out": 0.0},
    }
    config = train_config(options)
    return new_model(config, {ONLY: open_data(config, store, [1.0])}).planner


def test_a_planner_is_given_the_steps_whose_action_is_known(fitted):
    data = fitted.data
    assert data.rewards.tolist() == [1, 3, 4, 5]
    assert data.ended.tolist() == [0, 1, 0, 0], "of the last two, the episode was cut off"
    assert data.pairs.tolist() == [2], "no action leads from the first row to the next known one"
    assert data.codes[data.text].tolist() == [[50], [50], [20], [20]]
    assert data.states(torch.tensor([3]))[0, -1] == 20
    assert fitted.seed == 3


def test_a_planner_reads_the_units_of_the_model(fitted):
    seen = torch.tensor([0.0, 2.0, 10.0, 11.0])[:, None].repeat(1, 2)
    assert torch.equal(fitted.data.observations, fitted.units.observations(seen))
    assert torch.allclose(fitted.units.change_mean, torch.tensor(1.0)), "each step adds 1"
