"""The actions of a policy along a log are those of `Policy.act` at each logged history."""

import numpy as np
import pytest

from decisionllm.estimates.logged_episodes import build_logged
from decisionllm.estimates.policy_actions import policy_actions
from decisionllm.schema import Episode, History, Spec
from tests.conftest import MAX_RETURN, make_policy, make_store, near

pytestmark = pytest.mark.numeric

SPEC = Spec(observation_dim=3, action_dim=2, horizon=50, low=(-2.0, 0.0), high=(2.0, 1.0))


def make_log(path, discrete=False):
    """Two episodes to fit to and two that are held out, of 9, 1, 4 and 7 steps."""
    rng = np.random.default_rng(0)
    episodes = []
    for i, n in enumerate((9, 1, 4, 7)):
        actions = rng.uniform(0, 1, (n, 2))
        masks = None
        if discrete:
            actions = rng.integers(0, 2, (n, 1))
            masks = np.ones((n, 3), bool)
            masks[:, 2] = rng.random(n) < 0.5
        episode = Episode(
            rng.normal(size=(n, 3)).astype(np.float32),
            actions.astype(np.float32),
            rng.normal(size=n).astype(np.float32),
            task=("north", "south")[i % 2],
            group=i,
            action_masks=masks,
        )
        episodes.append(episode)
    spaces = {"num_actions": 3} if discrete else {"low": SPEC.low, "high": SPEC.high}
    store = make_store(path, episodes, **spaces)
    return build_logged(store, np.array([0, 1]), np.array([2, 3]))


def history(log, row, target):
    """The logged past of a step."""
    e = log.episode[row]
    first = log.offsets[e]
    masks = None if log.action_masks is None else log.action_masks[first : row + 1]
    return History(
        log.observations[first : row + 1],
        log.actions[first:row],
        log.rewards[first:row],
        target,
        log.tasks[e],
        action_masks=masks,
    )


@pytest.mark.parametrize(
    ("discrete", "options"),
    [
        (False, {"window": 4, "stride": 2}),
        (False, {"window": 3, "stride": 3, "return_horizon": 2}),
        (False, {"window": 5, "stride": 1, "target_return": None, "objective": MAX_RETURN}),
        (True, {"window": 4, "stride": 2, "head": "discrete"}),
    ],
)
def test_actions_along_a_log_are_those_of_each_history(tmp_path, discrete, options):
    log = make_log(tmp_path / "store", discrete)
    policy = make_policy(log.spec, **options)
    acted = policy_actions(policy, log)
    expected = policy.act([history(log, row, policy.target_return) for row in range(21)])
    near(acted.actions, expected)
    assert np.ptp(expected, axis=0).min() > 0


def test_the_density_of_a_logged_action_is_in_raw_units(tmp_path):
    log = make_log(tmp_path / "store")
    policy = make_policy(log.spec, head_options={"deviation": 0.5})
    acted = policy_actions(policy, log)
    # the ranges are 4 and 1, so that a deviation of 0.5 of half a range is 1 and 0.25
    deviation = np.array([1.0, 0.25])
    scaled = (log.actions - acted.actions) / deviation
    density = -0.5 * scaled**2 - np.log(deviation * np.sqrt(2 * np.pi))
    near(acted.log_prob, density.sum(1))
