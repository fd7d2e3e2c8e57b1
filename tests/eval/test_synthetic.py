"""The environment of the synthetic dataset, by hand."""

import numpy as np
import pytest

from decisionllm.eval.synthetic import PointEnv


def test_the_point_by_hand():
    env = PointEnv(3, text="goal", goal="east")
    assert env.tasks == ["Walk to the goal in the east."] * 3 and env.protocol == "goal-text"
    env.reset(0)
    env.positions = np.array([[2.0, 1.0], [2.0, 0.7], [0.0, 0.0]])
    after, rewards, ended, truncated = env.step(np.array([[0, -1], [0, -1], [9, 0]]))
    assert after.tolist() == [[2, 0.5], [2, pytest.approx(0.2)], [0.5, 0]]
    np.testing.assert_allclose(rewards, [-0.5, -0.2, -1.5])
    assert ended.tolist() == [False, True, False] and truncated.tolist() == [False] * 3
    for _ in range(19):
        *_, truncated = env.step(np.zeros((3, 2)))
    assert truncated.tolist() == [True] * 3
    discrete = PointEnv(1, discrete=True)
    discrete.reset(0)
    discrete.positions = np.zeros((1, 2))
    assert (
        discrete.step(np.array([[2.0]]))[0].tolist() == [[0, 0.5]]
        and discrete.protocol == "standard"
    )


def test_an_unknown_goal_is_refused():
    with pytest.raises(
        ValueError, match="env.goal: expected one of north, south, east, west, got 'up'"
    ):
        PointEnv(1, goal="up")
