"""A single step is read by a recorded list of operations: the same bits, for every request that the list is used for."""

import numpy as np
import pytest
import torch

from decisionllm.schema import History, Spec
from tests.conftest import make_policy
from tests.tokenizers.test_entities import SPEC as ENTITIES

pytestmark = pytest.mark.numeric
SPEC = Spec(observation_dim=3, action_dim=2, horizon=9, low=(-2.0, 0.0), high=(2.0, 1.0))


def histories(spec, targets=(None, 2.0, -1.0), steps=6):
    rng, A = np.random.default_rng(0), spec.action_dim
    for t in range(steps):
        observations, rewards = rng.normal(size=(t + 1, spec.observation_dim)).astype(np.float32), rng.normal(size=t)
        yield History(observations, np.zeros((t, A), np.float32), rewards, targets[t % len(targets)])


@pytest.mark.parametrize("options", [{}, {"max_return_expectile": 0.9, "target_return": None}, {"backbone": "gpt2"}, {"condition_on": "none"}], ids=str)  # fmt: skip
def test_recorded_operations_give_the_same_bits(options, monkeypatch):
    policy, predicts = make_policy(SPEC, window=1, stride=1, **options), "target_return" in options
    targets = (None, 2.0, -1.0) if policy.return_conditioned else (None,)
    wanted = [policy.act_with_returns([h]) for h in histories(SPEC, targets)]
    together = policy.act_with_returns([*histories(SPEC, targets)])
    policy.warm_up()
    assert set(policy.recorded) == ({True, False} if predicts else {True})
    for got, expected in zip(policy.act_with_returns([*histories(SPEC, targets)]), together, strict=True):
        np.testing.assert_array_equal(got, expected)  # several rows are read as before
    monkeypatch.setattr(policy.model, "read", None)  # a single one is not
    for h, expected in zip(histories(SPEC, targets), wanted, strict=True):
        for got, same in zip(policy.act_with_returns([h]), expected, strict=True):
            np.testing.assert_array_equal(got, same)


def test_a_list_is_not_used_where_operations_depend_on_the_numbers_or_its_bits_differ(monkeypatch):
    policy = make_policy(ENTITIES, window=1, stride=1, head="discrete", entity_layers=1)
    policy.warm_up()
    assert not policy.recorded
    policy, trace = make_policy(SPEC, window=1, stride=1), torch.jit.trace
    monkeypatch.setattr(
        torch.jit, "trace", lambda read, *given, **options: trace(lambda *x: read(*x) * (1 + 1e-6), *given, **options)
    )
    policy.warm_up()
    assert not policy.recorded
