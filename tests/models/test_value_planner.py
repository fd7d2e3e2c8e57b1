"""A value inside a learned model: its units, what is imagined, which sequences count, and that it
finds a known optimum.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from decisionllm.models import dynamics
from decisionllm.models.dynamics import FourierMLP, candidate_actions
from decisionllm.models.fitting import minimise
from decisionllm.models.normalizer import Normalizer
from decisionllm.models.value_planner import CODE, ImaginedValue, codes
from decisionllm.protocols import Transitions
from decisionllm.schema import Spec

pytestmark = pytest.mark.numeric

TEXTS = ["Go up.", "Go down."]
LINE = Spec(observation_dim=1, action_dim=1, horizon=50, low=(-1.0,), high=(1.0,))


class Shift(nn.Module):
    """A member that moves by the action and an error of its own."""

    def __init__(self, error=0.0):
        super().__init__()
        self.error = error

    def forward(self, x):
        return x[..., 1:] + self.error


class Pay(nn.Module):
    """Pays at 1 and above, or at places of its own; the task ends the episode at 3."""

    def __init__(self, least=1.0):
        super().__init__()
        self.least = least

    def forward(self, x):
        return torch.stack(
            [
                torch.where(x[..., 0] >= self.least, 50.0, -50.0),
                torch.where(x[..., 0] >= 3, 50.0, -50.0),
            ],
            -1,
        )


def build_planner(errors=(0.0, 0.0), discount=0.5):
    made = ImaginedValue(LINE, discount=discount)
    made.dynamics.members = nn.ModuleList(Shift(error) for error in errors)
    made.rewards = nn.ModuleList([Pay(), Pay(), Pay()])
    for value in made.values:
        nn.init.zeros_(value.last.weight)
        nn.init.zeros_(value.last.bias)  # a value of 0.5 everywhere
    made.dynamics.low.fill_(-10.0)
    made.dynamics.bin_width.fill_(1.0)
    return made


def test_an_action_is_held_and_its_rewards_are_discounted():
    """From 0.5, holding 1 for three steps: rewards are those of 0.5, 1.5 and 2.5, or 0, 1, 1; times
    1 - 0.5.
    """
    ends, gains, alive, agreed = build_planner().imagine(torch.tensor([[0.5]]), 3)
    assert candidate_actions(LINE)[:, 0].tolist() == [-1, 0, 1] and agreed.all()
    assert ends[0, :, 0].tolist() == [-2.5, 0.5, 3.5]
    np.testing.assert_allclose(gains[0], [0, 0, 0.5 * (0.5 + 0.25)], atol=1e-6)
    np.testing.assert_allclose(
        build_planner().plan(torch.tensor([[0.5]]), 3)[0],
        [0.0625, 0.0625, 0.375 + 0.0625],
        atol=1e-6,
    )
    np.testing.assert_allclose(alive, 1, atol=1e-6)


def test_an_episode_that_the_task_ends_brings_rewards_of_zero():
    """From 2.5 up: paid at 2.5 and, at 3.5, once more while the task ends the episode; then raw 0,
    which is 0.25 of -1 .. 3.
    """
    made = build_planner()
    made.reward_low.fill_(-1.0)
    made.reward_span.fill_(4.0)
    _, gains, alive, _ = made.imagine(torch.tensor([[2.5]]), 3)
    assert alive[0].tolist() == pytest.approx([1, 1, 0], abs=1e-6)
    assert gains[0, 2].item() == pytest.approx(0.5 * (1 + 0.5 + 0.25 * 0.25))
    assert made.plan(torch.tensor([[2.5]]), 3)[0, 2].item() == pytest.approx(
        gains[0, 2].item() + 0.125 * 0.25
    )


def test_a_sequence_on_whose_end_the_members_disagree_does_not_count():
    """Errors of +-0.1 and +-0.3 a step: after two steps the ends differ from their mean by 0.2 and
    0.6, the tolerance is 0.4.
    """
    assert (build_planner((-0.1, 0.1)).plan(torch.zeros(1, 1), 2) >= 0).all()
    assert (build_planner((-0.3, 0.3)).plan(torch.zeros(1, 1), 2) == -1).all()
    after, paid, over, agreed = build_planner((-0.3, 0.3)).advance(
        torch.tensor([[1.0], [3.0]]), torch.tensor([[0.5], [0.5]])
    )
    assert after[:, 0].tolist() == [1.5, 3.5] and paid.tolist() == [1, 1]
    assert over.tolist() == [False, True] and not agreed.any()


def test_an_end_in_a_bin_without_data_does_not_count(monkeypatch):
    """Two numbers that were only seen equal, from 0 to 9.99 in 100 bins of 0.1: (3, 3.05) and the
    bins beside it are like the data, (3, 3.35) and 12 are not."""
    monkeypatch.setattr(dynamics, "BINS", 100)
    made = dynamics.Dynamics(replace(LINE, observation_dim=2))
    line = torch.linspace(0, 9.99, 2000)
    made.count_bins(torch.stack([line, line], 1))
    assert made.together[0].sum() == 100 + 2 * 99 + 2 * 98 and made.together[0].diagonal().all()
    ends = torch.tensor([[3.05, 3.05], [3.05, 3.15], [3.05, 3.35], [12.0, 12.0], [-0.15, 0.0]])
    assert made.is_supported(ends).tolist() == [True, True, False, False, False]
    assert made.agree(ends[None], 1).tolist() == [True, True, False, False, False]


def test_the_lesser_value_counts():
    made = build_planner()
    nn.init.constant_(made.values[0].last.bias, 2.0)
    assert made.value(torch.zeros(3, 1)).tolist() == [0.5] * 3
    nn.init.constant_(made.values[1].last.bias, -2.0)
    assert made.value(torch.zeros(3, 1)).tolist() == pytest.approx([1 / (1 + np.exp(2))] * 3)


def test_a_reward_counts_where_all_models_find_it():
    made = build_planner()
    made.rewards[1] = Pay(2.0)
    paid, over = made.predict_rewards(torch.tensor([[0.5], [1.5], [2.5], [3.5]]), torch.zeros(4, 1))
    assert paid.tolist() == pytest.approx([0, 0, 1, 1]) and over.tolist() == pytest.approx(
        [0, 0, 0, 1]
    )


def test_frequencies_resolve_a_step():
    net = FourierMLP(2, 3, 1, count=8)
    net.set_frequencies(torch.tensor([0.01, 0.9]))
    assert (
        30 < net.frequencies[:, 0].max() <= 100
        and net.frequencies[:, 1].max() <= 2
        and net.frequencies.min() >= 1
    )


def line(monkeypatch, sides=(1,)):
    """Transitions along places -2 .. 2, both numbers of an observation: each of these texts pays 7
    at its side from 1 on.
    """
    monkeypatch.setattr(dynamics, "BATCH", 128)
    monkeypatch.setattr("decisionllm.models.value_planner.BATCH", 128)
    monkeypatch.setattr(dynamics, "BINS", 20)
    rng = np.random.default_rng(0)
    spec = replace(LINE, observation_dim=2)
    places = rng.uniform(-2, 2, (4000, 1))
    actions = rng.uniform(-1, 1, (4000, 1))
    after = np.clip(places + 0.2 * actions, -2, 2)
    x = np.repeat(np.stack([places, after], 1).reshape(-1, 1), 2, 1).astype(np.float32)
    text = np.arange(8000) // 2 % len(sides)
    rewards = (x[:, 0] * np.array(sides)[text] >= 1).astype(np.float32) * 7
    units = Normalizer(spec)
    units.change_scale.fill_(0.1)
    columns = (
        torch.from_numpy(x),
        torch.from_numpy(np.repeat(actions, 2, 0)).float(),
        torch.from_numpy(rewards),
    )
    read = codes(TEXTS[: len(sides)]) if len(sides) > 1 else torch.zeros(1, 0)
    made = ImaginedValue(spec, discount=0.9, horizon=4, reads_text=len(sides) > 1, steps=400)
    data = Transitions(
        *columns, torch.zeros(8000), torch.arange(0, 8000, 2), torch.from_numpy(text), read
    )
    made.fit(data, units, seed=0)
    return made


@pytest.mark.slow
def test_a_value_tells_texts_apart(monkeypatch):
    """One text pays at the upper end, the other one at the lower: from the middle the first goes up
    and the second down.
    """
    made = line(monkeypatch, sides=(1, -1))
    states = made.states(torch.zeros(2, 2), TEXTS)
    assert states.shape == (2, 2 + CODE) and made.plan(states, 4).argmax(1).tolist() == [
        2,
        0,
    ]
    after, paid, _, agreed = made.advance(
        made.states(torch.full((2, 2), 1.5), TEXTS), torch.zeros(2, 1)
    )
    assert (
        after.shape == (2, 2) and agreed.all() and paid.tolist() == pytest.approx([7, 0], abs=0.5)
    )
    with pytest.raises(
        ValueError, match="expected a task text that the value was fitted to, got 'Go home.'"
    ):
        made.states(torch.zeros(2, 2), ["Go up.", "Go home."])


def test_equal_texts_have_equal_codes():
    first, other, again = codes(["Go up.", "Go down.", "Go up."])
    assert torch.equal(first, again) and (first - other).norm() > 5


def test_the_value_of_a_line_is_found(monkeypatch):
    """From everywhere the best is to go up, from above 1 also to stay. Where the two numbers differ
    there are no data, so that no sequence counts."""
    made = line(monkeypatch)
    values = made.plan(torch.tensor([[-1.0, -1.0], [0.0, 0.0], [0.7, 0.7]]), 4)
    assert values.argmax(1).tolist() == [2, 2, 2] and (values.amax(1).diff() > 0).all()
    assert made.plan(torch.tensor([[1.5, 1.5]]), 4)[0, 1:].tolist() == pytest.approx(
        [1, 1], abs=0.15
    ), "paid for ever"
    _, paid, _, agreed = made.advance(
        torch.tensor([[1.5, 1.5], [0.0, 0.0], [1.5, -1.5]]), torch.zeros(3, 1)
    )
    assert paid[:2].tolist() == pytest.approx([7, 0], abs=0.5) and agreed.tolist() == [
        True,
        True,
        False,
    ]
    assert (made.plan(torch.tensor([[1.5, -1.5], [-1.0, 1.0]]), 4) == -1).all()
    assert not any(weight.requires_grad for weight in made.parameters())


def test_a_discount_is_below_one():
    with pytest.raises(ValueError, match=r"planner.discount: expected within 0 \.\. 1, got 1.5"):
        ImaginedValue(LINE, discount=1.5)


def test_a_least_value_is_a_share():
    with pytest.raises(ValueError, match="planner.least_value: expected a share"):
        ImaginedValue(LINE, least_value=-1.5)


def test_a_regression_is_fitted():
    torch.manual_seed(0)
    net = FourierMLP(1, 1, 1, inner=32)
    x = torch.linspace(-1, 1, 64)[:, None]
    minimise(net, lambda step: (net(x) - x.abs()).square().mean(), 200, "test")
    assert (net(x) - x.abs()).abs().mean() < 0.05 and not net.last.weight.requires_grad


def test_a_fit_may_take_any_number_of_steps():
    """A warm-up of 5 % of 20 steps is one step long."""
    for steps in (1, 19, 20, 21):
        net = nn.Linear(1, 1)
        minimise(net, lambda step, net=net: net(torch.ones(1, 1)).sum(), steps, "test")


def test_a_log_in_which_no_step_follows_another_is_refused():
    none = torch.zeros(0, dtype=torch.long)
    texts = torch.zeros(3, dtype=torch.long)
    alone = Transitions(
        torch.zeros(3, 1),
        torch.zeros(3, 1),
        torch.zeros(3),
        torch.ones(3),
        none,
        texts,
        torch.zeros(1, 0),
    )
    with pytest.raises(
        ValueError, match="planner=value: expected some episodes of two steps or more"
    ):
        ImaginedValue(LINE).fit(alone, Normalizer(LINE), seed=0)
