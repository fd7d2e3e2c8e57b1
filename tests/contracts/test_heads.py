"""Every registered head meets `protocols.Head` and `protocols.Distribution`."""

import math

import pytest
import torch

from decisionllm.protocols import Head
from decisionllm.registry import build, discover
from decisionllm.schema import Spec
from tests.conftest import node

pytestmark = pytest.mark.numeric

D = 8
CONTINUOUS = Spec(observation_dim=3, action_dim=2, horizon=10, low=(-1.0, -1.0), high=(1.0, 1.0))
DISCRETE = Spec(
    observation_dim=3,
    action_dim=1,
    horizon=10,
    num_actions=4,
    entity_schema=(("own", 1, 1), ("enemy", 1, 2)),
)
every_head = pytest.mark.parametrize("name", [*discover()["head"]])


def specs_of(name):
    """(the spec that this head is for, one of the other kind of actions)"""
    try:
        build(node("head", name), D, CONTINUOUS)
    except ValueError:
        return DISCRETE, CONTINUOUS
    return CONTINUOUS, DISCRETE


def build_head(name, seed=0):
    torch.manual_seed(seed)
    return build(node("head", name), D, specs_of(name)[0])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def hidden_states(B=2, T=3, seed=0):
    return 3 * torch.randn(B, T, D, generator=generator(seed))


def answer(head, hidden, masks=None):
    """Return the distribution of a head, with the encodings of two entities where it points at
    them.
    """
    if head.entities is None:
        return head(hidden, masks)
    entities = torch.randn(2, D, generator=generator()).expand(*hidden.shape[:2], 2, D)
    return head(hidden, masks, entities)


@every_head
def test_a_head_is_a_module_with_the_members_of_its_protocol(name):
    head = build_head(name)
    assert isinstance(head, torch.nn.Module) and isinstance(head, Head)
    assert math.isfinite(head.loss_floor)
    assert head.entities is None or isinstance(head.entities, slice)


@every_head
def test_shapes_and_types_are_those_of_the_protocol(name):
    head, A = build_head(name), specs_of(name)[0].action_dim
    one = answer(head, hidden_states(2, 3))
    drawn = one.sample(generator())
    for actions in (one.mode, one.mean, drawn):
        assert actions.shape == (2, 3, A) and actions.dtype == torch.float32
    for actions in (one.mode, drawn):
        nats = one.log_prob(actions)
        assert nats.shape == (2, 3) and nats.isfinite().all()


@every_head
def test_samples_repeat_with_their_seed_alone(name):
    one = answer(build_head(name), hidden_states())
    torch.manual_seed(5)
    first = one.sample(generator(1))
    torch.manual_seed(6)
    assert torch.equal(first, one.sample(generator(1)))
    assert not torch.equal(first, one.sample(generator(2)))


@every_head
def test_weights_depend_on_the_seed_and_come_back_from_their_state(name):
    hidden = hidden_states()
    head, same, other = (build_head(name, seed) for seed in (3, 3, 4))
    actions = answer(head, hidden).sample(generator())
    expected = answer(head, hidden).log_prob(actions)
    assert torch.equal(answer(same, hidden).log_prob(actions), expected)
    assert not torch.allclose(answer(other, hidden).log_prob(actions), expected)
    other.load_state_dict(head.state_dict())
    assert torch.equal(answer(other, hidden).log_prob(actions), expected)


@every_head
def test_a_distribution_is_of_its_own_hidden_state(name):
    """Other rows and padding of a batch have no effect."""
    head, hidden = build_head(name), hidden_states(3, 4)
    beside = hidden.clone()
    beside[:, 2:] = 100.0
    beside[2] = -100.0
    actions = answer(head, hidden).mode
    near = answer(head, beside).log_prob(actions)
    torch.testing.assert_close(near[:2, :2], answer(head, hidden).log_prob(actions)[:2, :2])
    assert not torch.allclose(near[2], answer(head, hidden).log_prob(actions)[2])


@every_head
def test_the_mode_is_the_likeliest_of_many(name):
    one = answer(build_head(name), hidden_states(1, 1).expand(1, 200, D))
    assert (one.log_prob(one.sample(generator())) <= one.log_prob(one.mode) + 1e-5).all()


@every_head
def test_no_density_exceeds_that_of_the_loss_floor(name):
    one = answer(build_head(name), hidden_states(1, 200))
    assert (-one.log_prob(one.mode) >= build_head(name).loss_floor - 1e-5).all()


@every_head
def test_every_weight_is_trained_and_a_constant_is_fitted(name):
    head = build_head(name)
    expected = torch.tensor([2.0] if specs_of(name)[0].num_actions else [0.5, -0.75])
    expected, hidden = expected.expand(4, 1, -1), hidden_states(4, 1) / 3
    optimizer = torch.optim.Adam(head.parameters(), 0.05)
    for _ in range(150):
        optimizer.zero_grad()
        (-answer(head, hidden).log_prob(expected).mean()).backward()
        assert all(weight.grad is not None for weight in head.parameters())
        optimizer.step()
    torch.testing.assert_close(answer(head, hidden).mode, expected, atol=0.05, rtol=0)


@every_head
def test_a_forbidden_action_has_no_probability(name):
    spec, _ = specs_of(name)
    if not spec.num_actions:
        return  # continuous actions have no masks
    allowed = torch.tensor([True, False, True, False])
    hidden = hidden_states(1, 500)
    one = answer(build_head(name), hidden, allowed.expand(1, 500, 4))
    shares = [one.log_prob(torch.full((1, 500, 1), float(action))).exp() for action in range(4)]
    assert not shares[1].any() and not shares[3].any()
    torch.testing.assert_close(shares[0] + shares[2], torch.ones(1, 500))
    for actions in (one.mode, one.mean, one.sample(generator())):
        assert allowed[actions.long()].all()
    both = torch.ones(1, 500, 4, dtype=torch.bool)
    free = answer(build_head(name), hidden).log_prob(one.mode)
    assert torch.equal(answer(build_head(name), hidden, both).log_prob(one.mode), free)


@every_head
def test_the_other_kind_of_actions_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"head={name}: expected .* actions.*, got"):
        build(node("head", name), D, specs_of(name)[1])
