"""Estimators on a world whose values are computed on paper.

Two states. In the first, action 1 leads to the second and action 0 ends the episode with reward 1;
in the second, action 1 brings 3 and action 0 nothing, and the episode ends.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionllm.estimates.fitted_q import FittedQ, discounted_returns
from decisionllm.estimates.importance import Importance, effective_episodes
from decisionllm.estimates.learned_model import LearnedModel
from decisionllm.estimates.logged_episodes import estimate_mean
from decisionllm.estimates.networks import Members
from decisionllm.estimates.support import Support
from decisionllm.eval.intervals import over_episodes
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.protocols import Candidate, Logged
from decisionllm.schema import Spec

SPEC = Spec(observation_dim=1, action_dim=1, horizon=2, num_actions=2)
SMALL = {"steps": 600, "members": 1, "width": 16, "batch_size": 64, "lr": 1e-2}
WALKS = {  # the three ways through the world: states, actions, rewards
    "left": ([0], [0], [1.0]),
    "right, left": ([0, 1], [1, 0], [0.0, 0.0]),
    "right, right": ([0, 1], [1, 1], [0.0, 3.0]),
}


def chain(walks, held_out, log_prob=None, **more):
    """A log of these walks, of which the last ones are held out."""
    states, actions, rewards = (
        np.concatenate([WALKS[name][i] for name in walks]) for i in range(3)
    )
    lengths = [len(WALKS[name][0]) for name in walks]
    fields = {
        "spec": SPEC,
        "observations": states[:, None].astype(np.float32),
        "actions": actions[:, None].astype(np.float32),
        "rewards": rewards,
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "terminated": np.ones(len(walks), bool),
        "held_out": np.arange(len(walks)) >= len(walks) - held_out,
        "tasks": [""] * len(walks),
        "recorded": np.ones(len(states), bool),
        "action_log_prob": log_prob,
    }
    return Logged(**fields | more)


def rule(log, first, second):
    """The policy that takes these actions in the two states."""

    def begin(tasks):
        def choose(observations, rows):
            return np.where(observations < 0.5, first, second).astype(np.float32)

        return ScriptedPlayer(choose, tasks)

    actions = np.where(log.observations < 0.5, first, second).astype(np.float32)
    return Candidate(f"{first}{second}", actions, begin)


ALL = [*WALKS] * 40


def test_episodes_of_a_day_are_resampled_together():
    """Ten days, on each of which six campaigns earn the same: ten numbers, not sixty. Of two days
    nothing can be resampled.
    """
    earned = np.random.default_rng(0).normal(size=10)
    log = chain([next(iter(WALKS))] * 60, held_out=60)
    days = replace(log, groups=np.repeat(np.arange(10), 6))
    actual = estimate_mean(np.repeat(earned, 6), days)
    assert (actual.low, actual.high) == pytest.approx(over_episodes(earned))
    alone = estimate_mean(np.repeat(earned, 6), log)
    assert actual.high - actual.low > 2 * (alone.high - alone.low)
    few = replace(log, groups=np.repeat(np.arange(2), 30))
    assert estimate_mean(np.repeat(earned, 6), few) == alone


@pytest.mark.parametrize(
    ("discount", "values"), [(1.0, {"11": 3, "10": 0, "01": 1}), (0.5, {"11": 1.5, "01": 1})]
)
def test_fitted_q_finds_the_values_on_paper(discount, values):
    log = chain(ALL, held_out=6)
    estimator = FittedQ(log, discount, 0, **SMALL, sync_every=50)
    for (first, second), value in values.items():
        actual = estimator.estimate(rule(log, int(first), int(second)))
        assert actual.value == pytest.approx(value, abs=0.1)
        assert actual.low == pytest.approx(actual.high, abs=1e-5)  # all begin in one state


@pytest.mark.parametrize(("says", "believed"), [(100.0, 3.0), (-100.0, 0.0), (2.0, 2.0)])
def test_fitted_q_believes_no_return_beyond_those_of_the_log(says, believed):
    """The first Q says one number everywhere, and what it is fitted to next is read off."""

    class Untrained(FittedQ):
        def _fit(self, net, expected, title):
            self.expected = expected

    log = chain([*WALKS], held_out=0)  # returns-to-go 1; 0, 0; 3, 3
    estimator = Untrained(log, 1.0, 0, members=1)
    for weight in estimator.start.weights:
        torch.nn.init.zeros_(weight)
    with torch.no_grad():
        estimator.start.biases[-1][:] = (says - estimator.shift) / estimator.scale
    estimator.fit(rule(log, 1, 1))
    aims = estimator.expected(0, torch.arange(5)[None]) * estimator.scale + estimator.shift
    # a last step brings its reward, and no more
    assert aims[0].tolist() == pytest.approx([1, believed, 0, believed, 3], abs=1e-4)


def test_fitted_q_leaves_out_steps_whose_action_is_missing():
    log = chain(ALL, held_out=6)
    half = chain(ALL, held_out=6, recorded=log.rewards != 3)
    fitted = FittedQ(half, 1.0, 0, **SMALL | {"steps": 1})
    rewards = fitted.rewards * fitted.scale
    assert len(rewards) == 5 * 38 - 38 and rewards.max() < 2.9


def test_a_learned_model_returns_what_the_world_returns():
    log = chain(ALL, held_out=6)
    estimator = LearnedModel(log, 1.0, 0, **SMALL)
    for (first, second), value in {"11": 3, "10": 0, "01": 1}.items():
        actual = estimator.estimate(rule(log, int(first), int(second)))
        assert actual.value == pytest.approx(value, abs=0.15)


def test_a_rollout_keeps_the_chance_that_a_mean_loses():
    """The second state is -1 or 1, whatever is done: their mean never comes."""
    states = np.array([0, -1, 0, 1] * 60)
    log = chain(["right, right"] * 120, 20, observations=states[:, None].astype(np.float32))
    actual = {}
    for neighbours in (0, 10):
        model = LearnedModel(log, 1.0, 0, **SMALL, neighbours=neighbours)
        first = np.zeros((200, 1), np.float32)
        rng = np.random.default_rng(0)
        actual[neighbours], _, _ = model.advance(first, 0, [""] * 200, first + 1, rng)
    assert np.abs(actual[0]).max() < 0.3 and np.ptp(actual[0]) == 0
    assert np.abs(np.abs(actual[10]) - 1).max() < 0.01 and abs(actual[10].mean()) < 0.5


def test_weights_of_two_episodes_on_paper():
    # the log chose each action with 1/2; the policy takes those of the first episode with
    # probabilities 1 and 3/4, that of the second with 1/4: weights 2, 3 and 1/2, 1/2
    log = chain(["left", "right, right", "left"], 2, log_prob=np.log(np.full(4, 0.5)))
    estimator = Importance(log, 1.0, 0)
    policy = Candidate("", log.actions, lambda tasks: None, np.log([1.0, 1.0, 0.75, 0.25]))
    actual = estimator.estimate(policy)
    # step 0: (2 x 0 + 1/2 x 1) / 2.5 = 0.2; step 1: (3 x 3 + 1/2 x 0) / 3.5 = 18/7
    assert actual.value == pytest.approx(0.2 + 18 / 7)
    # one episode twice has its own return, 1 or 3
    assert (actual.low, actual.high) == pytest.approx((1, 3))
    # (3 + 1/2)^2 / (9 + 1/4) = 1.32
    assert actual.note == "weights worth 1.3 of 2 episodes"
    halved = Importance(log, 0.5, 0).estimate(policy)
    assert halved.value == pytest.approx(0.2 + 9 / 7)


def test_a_policy_like_the_log_has_the_mean_return_of_the_log():
    log_prob = np.log(np.full(5 * 40, 0.5))
    log = chain(ALL, held_out=30, log_prob=log_prob)
    actual = Importance(log, 1.0, 0).estimate(Candidate("", log.actions, None, log_prob))
    assert actual.value == pytest.approx((1 + 0 + 3) / 3)
    assert actual.low < 4 / 3 < actual.high and not actual.note
    assert effective_episodes(np.ones(30)) == 30


def test_weights_of_a_day_are_resampled_together():
    walks = [walk for walk in ["left", "right, right"] * 10 for _ in range(6)]  # twenty days
    log_prob = np.log(np.full(6 * 10 * 3, 0.5))
    log = chain(walks, held_out=120, log_prob=log_prob)
    policy = Candidate("", log.actions, None, log_prob)
    alone = Importance(log, 1.0, 0).estimate(policy)
    days = replace(log, groups=np.repeat(np.arange(20), 6))
    together = Importance(days, 1.0, 0).estimate(policy)
    assert together.value == alone.value
    assert together.high - together.low > 2 * (alone.high - alone.low)


@pytest.mark.parametrize("of_policy", [[0, 0, 0], [0, 1, 0], [1, 0, 0]])
def test_a_policy_that_never_acts_like_the_log_is_said_to_be_unknown(of_policy):
    """It takes no logged action of a step, or none of a last step: the weights of all are 0."""
    log = chain(["left", "right, right"], 2, log_prob=np.log(np.full(3, 0.5)))
    with np.errstate(divide="ignore"):
        policy = Candidate("", log.actions, lambda tasks: None, np.log(of_policy))
    actual = Importance(log, 1.0, 0).estimate(policy)
    assert np.isfinite(actual.value)
    worth = float(of_policy[0])
    assert actual.note == f"weights worth {worth} of 2 episodes"


def test_weights_need_propensities_and_a_distribution():
    with pytest.raises(ValueError, match="estimators=importance: expected a log with propensities"):
        Importance(chain(ALL, 6), 1.0, 0)
    log = chain(ALL, 6, log_prob=np.zeros(200))
    with pytest.raises(ValueError, match="01 draws its actions from no distribution"):
        Importance(log, 1.0, 0).estimate(rule(log, 0, 1))


def test_an_action_that_nobody_took_nearby_is_far():
    log = chain(["left"] * 60 + ["right, right"] * 60, held_out=30)
    support = Support(log, 0)
    assert support.far_share(log.actions) == 0
    # in the second state nobody went left: half of the held-out steps
    assert support.far_share(rule(log, 0, 0).actions) == 0.5


def test_a_twentieth_of_the_logged_actions_themselves_is_far():
    rng = np.random.default_rng(0)
    n = 400
    spec = Spec(observation_dim=1, action_dim=1, horizon=1, low=(-9.0,), high=(9.0,))
    fields = {
        "spec": spec,
        "observations": rng.normal(size=(n, 1)).astype(np.float32),
        "actions": rng.normal(size=(n, 1)).astype(np.float32),
        "rewards": rng.normal(size=n),
        "offsets": np.arange(n + 1),
        "terminated": np.ones(n, bool),
        "held_out": np.arange(n) >= 200,
        "tasks": [""] * n,
        "recorded": np.ones(n, bool),
    }
    log = Logged(**fields)
    support = Support(log, 0)
    assert support.far_share(log.actions) == pytest.approx(0.05, abs=0.005)
    assert support.far_share(log.actions + 8) == 1


def test_discounted_returns_stay_within_their_episode():
    actual = discounted_returns(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 3, 4]), 0.5)
    assert actual.tolist() == [3, 4, 4, 8]


def test_members_are_networks_of_their_own():
    import torch

    net = Members(2, 3, 1, width=4, seed=0)
    x = torch.ones(5, 3)
    both = net(x)
    net.weights[0].data[0] = 0
    changed = net(x)
    assert both.shape == (2, 5, 1) and not torch.equal(both[0], both[1])
    assert not torch.equal(changed[0], both[0]) and torch.equal(changed[1], both[1])
