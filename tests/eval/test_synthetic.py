"""The environment of the synthetic dataset, by hand."""

import numpy as np
import pytest

from decisionllm.eval.rollout import rollout
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


@pytest.mark.parametrize("discrete", [False, True])
def test_the_score_stands_between_a_random_player_and_an_expert(discrete):
    """The expert goes straight: five steps of half a unit for the first row."""
    env = PointEnv(50, discrete=discrete, goal="south")
    env.positions = np.array([[0.0, 0.6], [0.0, -1.9]])
    moves = env.go_straight(env.positions)
    assert moves.tolist() == ([[1], [0]] if discrete else [[0, -1], [0, pytest.approx(-0.2)]])
    players = env.baselines(seed=0)
    assert [*players] == ["random", "expert"]
    scores = {}
    for name, begin in players.items():
        episodes = rollout(begin, env, seed=0)
        scores[name] = np.mean(env.score(episodes))
    assert scores["random"] < 3 * scores["expert"] < 0


def test_an_unknown_goal_is_refused():
    with pytest.raises(
        ValueError, match="env.goal: expected one of north, south, east, west, got 'up'"
    ):
        PointEnv(1, goal="up")
