"""The synthetic dataset: controllers of three qualities, goals in words, and rows that follow the
simulator.
"""

import numpy as np
import pytest

from decisionllm.datasets.store_writer import write_store
from decisionllm.datasets.synthetic import GOALS, HORIZON, MOVES, load, move, task_text
from tests.conftest import node


def goal_of(e):
    return GOALS[list(GOALS)[e % 4]]


@pytest.mark.parametrize("discrete", [False, True])
def test_every_row_follows_the_simulator(discrete):
    for e, made in enumerate(load(discrete=discrete, episodes=24).episodes):
        n = len(made.rewards)
        actions = MOVES[made.actions[:, 0].astype(int)] if discrete else made.actions
        after, rewards, arrived = move(made.observations, actions, np.tile(goal_of(e), (n, 1)))
        np.testing.assert_allclose(
            after, [*made.observations[1:], made.final_observation], atol=1e-5
        )
        np.testing.assert_allclose(made.rewards, rewards, atol=1e-5)
        assert arrived.tolist() == [False] * (n - 1) + [made.terminated]
        assert made.truncated == (not made.terminated) and (made.terminated or n == HORIZON)


def test_a_better_controller_arrives_sooner():
    episodes = load(episodes=600).episodes
    good, middling, bad = (np.mean([len(e.rewards) for e in episodes[i::3]]) for i in range(3))
    assert good + 0.5 < middling and middling + 4 < bad
    assert all(e.terminated for e in episodes[0::3]) and not all(
        e.terminated for e in episodes[2::3]
    )


def test_the_text_names_the_goal(tmp_path):
    store = write_store(tmp_path / "s", load(text="goal", episodes=8))
    assert [store.episode(e).task for e in range(4)] == [
        f"Walk to the goal in the {name}." for name in ("north", "south", "east", "west")
    ]
    assert store.task.tolist() == [0, 1, 2, 3] * 2 and store.group.tolist() == list(range(8))
    assert task_text("north") == store.tasks[0]
    assert {e.task for e in load(episodes=8).episodes} == {""}


def test_discrete_actions_are_the_nearest_moves(tmp_path):
    store = write_store(tmp_path / "s", load(discrete=True, episodes=40))
    assert store.spec.num_actions == 5 and set(np.unique(store.actions)) == {0, 1, 2, 3, 4}
    to_goal = (
        np.array([goal_of(e) for e in range(40)])[np.repeat(np.arange(40), store.lengths)]
        - store.observations
    )
    good = np.repeat(np.arange(40) % 3 == 0, store.lengths)  # controllers with noise 0.1
    far = good & (np.abs(to_goal) > 1).all(1)
    towards = (MOVES[store.actions[:, 0].astype(int)] * to_goal).sum(1)
    assert far.sum() > 10 and (towards[far] > 0).all()


def test_the_registered_names_differ_by_their_actions():
    assert (
        node("dataset", "synthetic")["discrete"] is False
        and node("dataset", "synthetic-discrete")["discrete"] is True
    )
