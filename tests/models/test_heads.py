"""Distributions over the next action, worked by hand; what every head must be able to do is in
tests/contracts.
"""

from dataclasses import replace

import pytest
import torch

from decisionllm.models.heads import (
    LEAK,
    Bins,
    Discrete,
    DiscreteHead,
    Gaussian,
    GaussianHead,
    PointerHead,
    tanh_that_returns,
)
from decisionllm.registry import build
from decisionllm.schema import Spec
from tests.conftest import node

pytestmark = pytest.mark.numeric

CONTINUOUS = Spec(observation_dim=3, action_dim=2, horizon=10, low=(-1.0, -1.0), high=(1.0, 1.0))
DISCRETE = Spec(observation_dim=3, action_dim=1, horizon=10, num_actions=4)
AIMED = Spec(
    observation_dim=3,
    action_dim=1,
    horizon=10,
    num_actions=4,
    entity_schema=(("own", 1, 1), ("enemy", 1, 2)),
)


def made(name, options, width=8, seed=0):
    torch.manual_seed(seed)
    return build(node("head", name, **options), width, spec_of(name))


def spec_of(name):
    return {"discrete": DISCRETE, "pointer": AIMED}.get(name, CONTINUOUS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def by_hand(*probabilities):
    """Independent bins with these probabilities a dimension: B = T = 1."""
    logits = torch.tensor(probabilities).log()[None, None]
    return Bins(logits)


def test_the_gaussian_is_squared_error_up_to_constants():
    mean = torch.randn(2, 3, 2, generator=generator())
    actions = torch.randn(2, 3, 2, generator=generator(1))
    halves = (
        2 * 0.5**2 * (Gaussian(mean, 0.5).log_prob(actions) - Gaussian(mean, 0.5).log_prob(mean))
    )
    torch.testing.assert_close(halves, -(actions - mean).square().sum(-1))


@pytest.mark.parametrize("name", ["bins", "discrete", "pointer"])
def test_the_loss_of_a_category_is_float32_within_autocast(name):
    """A CPU's autocast computes log-softmax in the type of the logits."""
    head = made(name, {})
    entities = torch.randn(1, 2, 2, head.key.in_features) if name == "pointer" else None
    with torch.autocast("cpu", torch.bfloat16):
        actual = head(torch.randn(1, 2, 8), None, entities)
        log_prob = actual.log_prob(torch.zeros(1, 2, spec_of(name).action_dim))
    assert log_prob.dtype == torch.float32


def test_the_gaussian_is_a_density_in_nats():
    one = Gaussian(torch.tensor([[[0.2, -0.4]]]), 0.5)
    normal = torch.distributions.Normal(one.mean, 0.5)
    action = torch.tensor([[[0.9, 0.1]]])
    torch.testing.assert_close(one.log_prob(action), normal.log_prob(action).sum(-1))


def test_gaussian_samples_have_its_mean_and_deviation():
    drawn = Gaussian(torch.tensor([0.2, -0.4]).expand(1, 20_000, 2), 0.5).sample(generator())
    torch.testing.assert_close(drawn.mean((0, 1)), torch.tensor([0.2, -0.4]), atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.std((0, 1)), torch.tensor([0.5, 0.5]), atol=0.02, rtol=0)


@pytest.mark.parametrize("deviation", [0.05, 0.5])
def test_the_actions_before_noise_and_clipping_are_found(deviation):
    """1 with noise of 0.5 that is clipped is 1 - 0.5 / sqrt(2 pi) on average: the lower half of the
    noise is left.
    """
    expected = torch.tensor([[[-1.0, -0.7, 0.0, 0.3, 0.95, 1.0]]])
    noise = torch.randn(100_000, 1, 1, generator=generator())
    mean = (expected + deviation * noise).clamp(-1, 1).mean(0, keepdim=True)
    actual = Gaussian(mean, deviation).unclipped_mean()
    torch.testing.assert_close(actual, expected, atol=0.01, rtol=0)
    assert mean[0, 0, -1].item() == pytest.approx(1 - deviation / (2 * torch.pi) ** 0.5, abs=0.003)
    # beyond what clipped noise can have
    certain = Gaussian(torch.tensor([[[-1.0, 0.999, 1.0]]]), deviation).unclipped_mean()
    torch.testing.assert_close(certain, torch.tensor([[[-1.0, 1.0, 1.0]]]), atol=1e-3, rtol=0)


def test_the_mean_stays_between_the_bounds():
    hidden = 100 * torch.randn(2, 3, 8, generator=generator())
    torch.manual_seed(0)
    assert GaussianHead(8, CONTINUOUS)(hidden).mean.abs().max() <= 1


def test_a_mean_that_was_thrown_to_a_bound_comes_back():
    head = made("gaussian", {})
    hidden = torch.zeros(1, 1, 8)
    expected = torch.full((1, 1, 2), 0.3)
    with torch.no_grad():
        head.out.bias.fill_(-12.0)  # tanh is -1 here in float32, and its gradient 0
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1, weight_decay=0)
    for _ in range(400):
        loss = -head(hidden).log_prob(expected).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.allclose(head(hidden).mode, expected, atol=0.05)


def test_a_mean_is_the_tanh_to_the_bit():
    x = torch.tensor([-30.0, -2.0, -1e-3, 0.0, 0.7, 30.0])
    assert torch.equal(tanh_that_returns(x), x.tanh())
    assert torch.equal(tanh_that_returns(x.requires_grad_()), x.tanh())


def test_the_gradient_is_that_of_tanh_until_it_would_vanish():
    x = torch.tensor([0.0, 0.7, -2.0, 4.0, -30.0], requires_grad=True)
    tanh_that_returns(x).sum().backward()
    slopes = 1 - x.detach().tanh() ** 2
    assert torch.equal(x.grad[:3], slopes[:3])
    assert x.grad[3:].tolist() == pytest.approx([LEAK, LEAK], rel=1e-4)


def test_bins_by_hand():
    """Three bins at -1, 0 and 1, each one unit wide."""
    two = by_hand([0.2, 0.5, 0.3], [0.1, 0.1, 0.8])
    assert two.log_prob(torch.tensor([[[0.1, 0.9]]])).exp().item() == pytest.approx(0.5 * 0.8)
    assert two.log_prob(torch.tensor([[[-3.0, -0.6]]])).exp().item() == pytest.approx(0.2 * 0.1)
    assert two.mode.tolist() == [[[0, 1]]]
    torch.testing.assert_close(two.mean, torch.tensor([[[0.1, 0.7]]]))


def test_bins_of_half_the_width_are_twice_as_dense():
    assert by_hand([0.25] * 5).log_prob(torch.zeros(1, 1, 1)).exp().item() == pytest.approx(
        0.25 / 0.5 / 1.25
    )


def grid(K):
    """Every pair of bins, as actions (1, K K, 2)."""
    line = torch.linspace(-1, 1, K)
    return torch.cartesian_prod(line, line)[None]


def test_bins_are_a_distribution():
    """Over all bins the density times their size sums to 1."""
    head = made("bins", {"num_bins": 5})
    hidden = 3 * torch.randn(1, 1, 8, generator=generator()).expand(1, 25, 8)
    density = head(hidden).log_prob(grid(5)).exp()
    assert density.std() > 0.1  # not all the same
    assert (density * 0.5**2).sum().item() == pytest.approx(1, abs=1e-5)


def test_samples_have_their_probability():
    head = made("bins", {"num_bins": 3})
    with torch.no_grad():
        head.out.weight.mul_(3)
        hidden = 2 * torch.randn(1, 1, 8, generator=generator())
        expected = head(hidden.expand(1, 9, 8)).log_prob(grid(3))[0].exp()
        drawn = head(hidden.expand(1, 20_000, 8)).sample(generator())[0]
    frequency = torch.stack([(drawn == pair).all(1).float().mean() for pair in grid(3)[0]])
    torch.testing.assert_close(frequency, expected, atol=0.015, rtol=0)


def test_discrete_by_hand():
    one = Discrete(torch.tensor([[[0.1, 0.2, 0.7]]]).log())
    assert one.mode.item() == one.mean.item() == 2
    assert one.log_prob(torch.tensor([[[1.0]]])).exp().item() == pytest.approx(0.2)
    drawn = Discrete(one.logits.expand(1, 20_000, 3)).sample(generator())
    torch.testing.assert_close(
        drawn.flatten().long().bincount() / 20_000,
        torch.tensor([0.1, 0.2, 0.7]),
        atol=0.015,
        rtol=0,
    )


def test_the_loss_floor_is_the_loss_of_a_certain_action():
    """Two dimensions: a normal density of deviation 0.5 at its mean; bins that are 2 / 32 wide."""
    gaussian = made("gaussian", {})
    binned = made("bins", {"num_bins": 33})
    assert gaussian.loss_floor == pytest.approx(2 * 0.225791, abs=1e-5)
    one = gaussian(torch.randn(1, 1, 8, generator=generator()))
    assert -one.log_prob(one.mode).item() == pytest.approx(gaussian.loss_floor, abs=1e-5)
    assert binned.loss_floor == pytest.approx(2 * -2.772589, abs=1e-5)
    # bins of width 1
    certain = Bins(torch.tensor([[0.0, 100.0, 0.0]] * 2)[None, None])
    assert (
        -certain.log_prob(torch.zeros(1, 1, 2)).item()
        == pytest.approx(made("bins", {"num_bins": 3}).loss_floor)
        == 0
    )
    assert made("discrete", {}).loss_floor == made("pointer", {}).loss_floor == 0


def test_a_head_names_the_entities_it_points_at():
    assert [made(name, {}).entities for name in ("gaussian", "bins", "discrete")] == [None] * 3
    assert made("pointer", {}).entities == slice(1, 3)  # after the own block
    cells_first = replace(AIMED, entity_schema=(("grid:a", 1, 2), ("own", 1, 1)))
    assert PointerHead(8, cells_first).entities == slice(1, 3)


def test_a_head_of_the_wrong_action_space_names_the_right_one():
    for name in ("gaussian", "bins"):
        with pytest.raises(
            ValueError, match=f"head={name}: expected continuous actions, got 4 discrete ones"
        ):
            build(node("head", name), 8, DISCRETE)
    for spec in (DISCRETE, CONTINUOUS):
        with pytest.raises(
            ValueError,
            match="head=pointer: expected discrete actions .* got . actions and kind '' of none",
        ):
            PointerHead(8, spec)
    with pytest.raises(ValueError, match="got 4 actions and kind 'ally' of enemy"):
        PointerHead(8, AIMED, kind="ally")
    with pytest.raises(
        ValueError, match="head=discrete: expected discrete actions, got continuous ones"
    ):
        DiscreteHead(8, CONTINUOUS)


def test_a_pointed_action_depends_on_its_own_target_alone():
    """The last two of four actions are aimed at the first and the second target."""
    head = made("pointer", {})
    hidden = torch.randn(1, 1, 8, generator=generator())
    entities = torch.randn(1, 1, 2, 8, generator=generator(1)).requires_grad_()
    logits = head(hidden, None, entities).logits[0, 0]
    # the plain ones are about none
    raw = torch.stack([logits[2] - logits[0], logits[3] - logits[0]])
    for k in (0, 1):
        (slope,) = torch.autograd.grad(raw[k], entities, retain_graph=True)
        assert slope[0, 0, k].abs().max() > 1e-3 and slope[0, 0, 1 - k].abs().max() < 1e-7
    with torch.no_grad():
        swapped = head(hidden, None, entities.flip(2)).logits[0, 0]
        torch.testing.assert_close(swapped, logits[[0, 1, 3, 2]])
        assert (
            head(hidden, torch.tensor([[[True, True, False, True]]]), entities).logits[0, 0, 2]
            == -torch.inf
        )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gaussian", {"deviation": 0.0}, "head.deviation: expected more than 0, got 0.0"),
        ("gaussian", {"deviation": -1.0}, "head.deviation: expected more than 0, got -1.0"),
        ("bins", {"num_bins": 1}, "head.num_bins: expected 2 or more, got 1"),
        ("bins", {"num_bins": 0}, "head.num_bins: expected 2 or more, got 0"),
    ],
)
def test_a_size_that_no_head_can_have_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        made(name, options)
