"""A single step is read by a recorded list of operations, where that gives the same bits."""

import numpy as np
import pytest
import torch

from decisionllm.protocols import Decider
from decisionllm.schema import History, Spec
from tests.conftest import MAX_RETURN, make_policy
from tests.tokenizers.test_entities import SPEC as ENTITIES

pytestmark = pytest.mark.numeric
SPEC = Spec(observation_dim=3, action_dim=2, horizon=9, low=(-2.0, 0.0), high=(2.0, 1.0))
DISCRETE = Spec(observation_dim=3, action_dim=1, horizon=9, num_actions=4)


def histories(spec, targets=(None, 2.0, -1.0), steps=6):
    rng, A = np.random.default_rng(0), spec.action_dim
    for t in range(steps):
        observations = rng.normal(size=(t + 1, spec.observation_dim)).astype(np.float32)
        rewards = rng.normal(size=t)
        yield History(
            observations, np.zeros((t, A), np.float32), rewards, targets[t % len(targets)]
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"objective": MAX_RETURN, "target_return": None},
        {"backbone": "gpt2"},
        {"backbone": "gemma3"},
        {"condition_on": "none"},
    ],
    ids=str,
)
def test_recorded_operations_give_the_same_actions(options, monkeypatch):
    policy = make_policy(SPEC, window=1, stride=1, **options)
    predicts = "target_return" in options
    pasts = [*histories(SPEC, (None, 2.0, -1.0) if policy.return_conditioned else (None,))]

    def played():
        return [policy.act_with_returns([h]) for h in pasts]

    expected, together = played(), policy.act_with_returns(pasts)
    policy.warm_up()  # on any processor: where the bits differ, there is no list
    np.testing.assert_equal(played(), expected)
    np.testing.assert_equal(policy.act_with_returns(pasts), together)
    monkeypatch.setattr(torch, "equal", lambda a, b: torch.allclose(a, b, atol=1e-4))
    policy.warm_up()
    assert set(policy.traced) == ({True, False} if predicts else {True})
    monkeypatch.setattr(policy.model, "read", None)  # a single step is decided by the list alone
    for got, first in zip(played(), expected, strict=True):
        np.testing.assert_allclose(
            np.concatenate([x.ravel() for x in got]),
            np.concatenate([x.ravel() for x in first]),
            atol=1e-4,
        )


class Half(Decider):
    """Takes 0.5, whatever was read."""

    def act(self, hidden, masks, observations, tasks, generator):
        return np.full((len(observations), 2), 0.5)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_another_decider_decides_a_single_step_too(moment, monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: torch.allclose(a, b, atol=1e-4))
    policy = make_policy(SPEC, window=1, stride=1)
    [first, *_] = histories(SPEC, (2.0,))
    if moment == "before":
        policy.decider = Half()
    policy.warm_up()
    policy.decider = Half()
    np.testing.assert_equal(policy.act([first]), [[0.5, 0.5]])


def test_a_list_is_not_used_where_operations_depend_on_the_numbers_or_its_bits_differ(
    monkeypatch, caplog
):
    policy = make_policy(ENTITIES, window=1, stride=1, head="discrete", entity_layers=1)
    policy.warm_up()
    assert not policy.traced
    policy = make_policy(DISCRETE, window=1, stride=1, head="discrete")
    policy.warm_up()
    assert not policy.traced and not caplog.text
    policy = make_policy(SPEC, window=1, stride=1)
    freeze = torch.jit.freeze

    def slightly_wrong(listed):
        frozen = freeze(listed)
        return lambda *pasts: [x * (1 + 1e-4) for x in frozen(*pasts)]

    monkeypatch.setattr(torch.jit, "freeze", slightly_wrong)
    policy.warm_up()
    assert not policy.traced


def test_a_tracer_that_fails_changes_no_answer(monkeypatch, caplog):
    policy = make_policy(SPEC, window=1, stride=1)
    [first, *_] = histories(SPEC, (2.0,))
    expected = policy.act_with_returns([first])
    monkeypatch.setattr(torch.jit, "trace", None)
    policy.warm_up()
    assert not policy.traced and "without a recorded list" in caplog.text
    np.testing.assert_equal(policy.act_with_returns([first]), expected)
