"""Planning: what is imagined, which plan is taken, and that the session stays as it was."""

import numpy as np
import pytest
import torch
from torch import nn

from decisionllm.schema import History, Spec
from tests.conftest import make_policy
from tests.policy.test_policy import CONTINUOUS, DISCRETE, World, play

pytestmark = pytest.mark.numeric

LINE = Spec(observation_dim=1, action_dim=1, horizon=50, low=(-2.0,), high=(2.0,))
MOVES = Spec(observation_dim=1, action_dim=1, horizon=50, num_actions=4)


class Walk(nn.Module):
    """A known system in place of learned dynamics: the action is added to the place, and a place is paid by `pay`."""

    def __init__(self, pay, step=lambda actions: actions):
        super().__init__()
        self.pay, self.step, self.calls = pay, step, []

    def forward(self, hidden, observations, actions):
        self.calls.append((observations.clone(), actions.clone()))
        return self.step(actions), self.pay(observations[..., 0])


def walker(spec=LINE, *, own=0.5, **options):
    """A policy whose own action is always `own`, in the model's units, and whose normaliser changes nothing but actions."""
    policy = make_policy(spec, dynamics=True, planning_horizon=3, **options)
    policy.model.dynamics = Walk(lambda place: 0 * place)
    if not spec.num_actions:
        policy.model.head.out.weight.data.zero_()
        policy.model.head.out.bias.data.fill_(np.arctanh(own))
    return policy


def decide(policy, place=0.0, horizon=10):
    session = policy.begin([""], horizon)
    session.observe(np.array([[place]], np.float32))
    return session.decide()


def test_the_plan_with_the_highest_reward_is_taken():
    policy = walker()  # places after 0, 1, 2 steps of the policy's own 0.5: 0, 0.5, 1; of holding -1: 0, -1, -2
    policy.model.dynamics.pay = lambda place: -place
    assert decide(policy) == pytest.approx(-2.0)  # raw: the lower bound
    policy.model.dynamics.pay = lambda place: 10 * place
    assert decide(policy) == pytest.approx(2.0)
    policy.model.dynamics.pay = lambda place: -10 * place.square()
    assert decide(policy) == pytest.approx(0.0)


def test_a_plan_must_exceed_the_margin():
    policy = walker()
    assert decide(policy) == pytest.approx(1.0)  # 0.5 of bounds -2 .. 2
    for price, chosen in (
        (1.1, 1.0),
        (1.3, 2.0),
    ):  # three steps: holding 1 is paid 3 prices, the policy's own 1.5; 1.8 is the margin
        policy.model.dynamics.pay = lambda place, price=price: price * place
        assert decide(policy) == pytest.approx(chosen)
        policy.model.normalizer.reward_scale.fill_(0.1)  # the same in another unit
        assert decide(policy) == pytest.approx(chosen)


def test_the_margin_is_an_option_of_the_policy():
    """Three steps: holding 1 is paid 3 prices, the policy's own 1.5. At a price of 1 they differ by 1.5, or 0.5 deviations a step."""
    policy = walker()
    policy.model.dynamics.pay = lambda place: place
    for margin, chosen in ((0.6, 1.0), (0.51, 1.0), (0.49, 2.0), (0.0, 2.0)):
        policy.planning_margin = margin
        assert decide(policy) == pytest.approx(chosen)


def test_the_policys_own_plan_is_decided_at_every_step():
    policy, said = walker(), iter([1.0, -1.0, 2.0])  # raw: now, and after each imagined step
    policy.choose = lambda hidden, *_: np.full((len(hidden), 1), next(said), np.float32)
    decide(policy)
    assert [float(actions[0]) for _, actions in policy.model.dynamics.calls] == [0.5, -0.5, 1.0]


def test_imagined_steps_are_in_raw_units():
    policy = walker()
    units = policy.model.normalizer
    units.observation_mean.fill_(5.0)
    units.observation_scale.fill_(2.0)
    units.change_scale.fill_(4.0)
    decide(policy, place=7.0)
    observation, action = policy.model.dynamics.calls[1]
    own = 7.0 + 4.0 * 0.5
    assert observation[0] == pytest.approx((own - 5.0) / 2.0)
    np.testing.assert_allclose(action[:, 0], [0.5, -1, 0, 1], atol=1e-6)


def test_every_discrete_action_is_tried():
    policy = walker(MOVES, head="discrete")
    policy.model.dynamics.step = lambda actions: actions - 1
    for wanted in range(4):
        policy.model.dynamics.pay = lambda place, wanted=wanted: -10 * (place - 2 * (wanted - 1)).square()
        assert decide(policy) == wanted


@pytest.mark.parametrize("allowed", range(4))
def test_a_plan_takes_allowed_actions_only(allowed):
    """The policy's own action and the best plan are other ones, in a session and from a history."""
    policy, masks = walker(MOVES, head="discrete"), np.arange(4)[None] == allowed
    policy.model.dynamics.step = lambda actions: actions - 1
    policy.model.dynamics.pay = lambda place: -10 * (place - 2 * ((allowed + 1) % 4 - 1)).square()
    session = policy.begin([""], 10)
    session.observe(np.zeros((1, 1), np.float32), action_masks=masks)
    assert session.decide() == allowed
    begun = History(np.zeros((1, 1), np.float32), np.zeros((0, 1)), np.zeros(0), action_masks=masks)
    assert policy.act([begun]) == allowed


@pytest.mark.parametrize("returns", ["return_to_go", "none"])
@pytest.mark.parametrize("window, stride", [(1, 1), (4, 2)])
def test_a_session_plans_as_the_plain_policy_does(window, stride, returns):
    policy = make_policy(CONTINUOUS, window=window, stride=stride, condition_on=returns, dynamics=True, planning_horizon=3)
    policy.model.normalizer.reward_scale.fill_(5.0)
    world = World(CONTINUOUS)
    actions = play(policy, world, policy.begin(world.tasks, 15, world.targets), np.arange(4))
    plain = make_policy(CONTINUOUS, window=window, stride=stride, condition_on=returns, dynamics=True)
    own = plain.act([world.history(i, 14) for i in range(4)])
    held = np.isclose(
        actions[:, :, :, None], np.stack([CONTINUOUS.low, np.add(CONTINUOUS.low, CONTINUOUS.high) / 2, CONTINUOUS.high], -1)
    )
    assert held.any(-1).all(-1).any(), "no plan ever replaced the policy's own action"
    np.testing.assert_allclose(actions[:, 14], own, atol=2e-4)  # the last step has nothing to imagine


def test_planning_leaves_the_session_as_it_was():
    policy = make_policy(CONTINUOUS, dynamics=True, planning_horizon=3)
    world = World(CONTINUOUS)
    session = policy.begin(world.tasks, 15, world.targets)
    for t in range(5):
        session.observe(*world.seen(np.arange(4), t))
        first = session.decide()
        before = [session.observations.copy(), session.rewards.copy(), session.now.copy()]
        np.testing.assert_array_equal(session.decide(), first)
        for now, was in zip([session.observations, session.rewards, session.now], before, strict=True):
            np.testing.assert_array_equal(now, was)
        assert not session.observations[:, t + 1 :].any()
        session.record_action(first)


def test_dynamics_learn_a_known_system():
    """x' = x + 0.3 a and a payment of 2 x: the unexplained share of both falls to almost nothing."""
    rng = np.random.default_rng(0)
    model = make_policy(LINE, window=1, stride=1, condition_on="none", dynamics=True, timesteps="none").model.train()
    from decisionllm.datasets.windows import Steps, collate, cut

    places, actions = rng.normal(size=(512, 1)), rng.uniform(-2, 2, (512, 1))
    observations = np.stack([places, places + 0.3 * actions], 1).reshape(-1, 1).astype(np.float32)
    flat = np.repeat(actions, 2, 0).astype(np.float32)
    first = np.arange(0, 1024, 2)
    steps = Steps(observations, flat, np.zeros(1024, np.float32), first, first + 2, rewards=2 * observations[:, 0])
    model.normalizer.fit([(observations, steps.returns_to_go)])
    model.normalizer.fit_dynamics([(0.3 * actions, steps.rewards[first])])
    batch = collate(
        cut(steps, np.arange(512), np.zeros(512, int), 2),
        (torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)),
        np.zeros(512, int),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        terms = model(batch)
        optimizer.zero_grad()
        sum(terms.values()).backward()
        optimizer.step()
    assert terms["change"] < 0.02 and terms["reward"] < 0.05
    with torch.no_grad():
        after, reward = model.imagine(model.read(batch.steps(slice(-1)))[:, 0], batch.observations[:, 0], batch.actions[:, 0])
    assert (after - batch.observations[:, 1]).abs().mean() < 0.05
    assert (reward - batch.rewards[:, 0]).abs().mean() < 0.5


def test_a_plan_needs_dynamics_and_few_dimensions():
    with pytest.raises(ValueError, match="act.planning_horizon: needs a model trained with model.dynamics=true"):
        make_policy(CONTINUOUS, planning_horizon=3)
    wide = Spec(observation_dim=3, action_dim=3, horizon=15, low=(-1.0,) * 3, high=(1.0,) * 3)
    with pytest.raises(ValueError, match="at most two action dimensions, or discrete actions, got 3"):
        make_policy(wide, planning_horizon=3, dynamics=True)
    make_policy(DISCRETE, planning_horizon=3, dynamics=True, head="discrete")
