"""The point mazes' evaluation: tasks, success, goals in numbers and in words."""

import numpy as np
import pytest

from decisionllm.eval.rollout import ScriptedPlayer, rollout
from decisionllm.worlds.ogbench.dataset import task_text
from decisionllm.worlds.ogbench.env import PointMaze
from decisionllm.worlds.ogbench.simulator import TASKS, is_reached, middle

LARGE = "pointmaze-large-stitch-v0"


def standing(tasks):
    """A player that stands still."""
    return ScriptedPlayer(lambda seen, rows: np.zeros((len(seen), 2)), tasks)


def test_the_rows_have_the_five_tasks_in_turn_with_noise():
    env = PointMaze(250, name=LARGE)
    seen = env.reset(3)
    expected = middle(np.array(TASKS["large"]))[np.arange(250) % 5]  # (N, start and goal, 2)
    apart = seen.reshape(250, 2, 2) - expected
    assert np.abs(apart).max() <= 1 and np.abs(apart).max() > 0.95 and abs(apart.mean()) < 0.1
    assert not np.array_equal(env.reset(4), seen) and np.array_equal(env.reset(3), seen)


def test_an_episode_succeeds_in_the_step_that_comes_within_1_of_the_goal():
    env = PointMaze(2, name=LARGE, task=1, goal="4,0")
    env.reset(0)
    env.positions = np.array([[2.7, 0.0], [2.9, 0.0]])
    seen, rewards, terminated, truncated = env.step(np.array([[1.0, 0.0], [1.0, 0.0]]))
    np.testing.assert_allclose(seen, [[2.9, 0, 4, 0], [3.1, 0, 4, 0]])
    assert rewards.tolist() == [0, 1] and terminated.tolist() == [False, True]
    assert not truncated.any()


def test_an_arrival_in_the_last_step_is_a_success():
    env = PointMaze(2, name=LARGE, task=1, goal="4,0")
    env.positions = np.array([[2.7, 0.0], [2.9, 0.0]])
    env.time = 999
    _, _, terminated, truncated = env.step(np.array([[1.0, 0.0], [1.0, 0.0]]))
    assert terminated.tolist() == [False, True] and truncated.tolist() == [True, False]


def test_an_episode_that_does_not_arrive_fails_after_1000_steps():
    env = PointMaze(5, name=LARGE)
    made = rollout(standing, env, seed=0)
    assert [len(e.rewards) for e in made] == [1000] * 5 and all(e.truncated for e in made)
    assert env.score(made).tolist() == [0] * 5
    assert env.metrics(made) == {f"task_{k}": 0.0 for k in range(1, 6)} | {"steps_to_goal": None}


def test_the_score_of_a_task_is_the_share_of_its_episodes():
    env = PointMaze(10, name=LARGE)
    made = rollout(env.baselines(0)["planner"], env, seed=1)
    scores, metrics = env.score(made), env.metrics(made)
    assert scores.mean() >= 70
    for task in range(5):
        assert metrics[f"task_{task + 1}"] == scores[task::5].mean()
    arrived = [e for e in made if e.terminated]
    assert metrics["steps_to_goal"] == np.mean([len(e.rewards) for e in arrived])
    for one in arrived:
        assert is_reached(one.final_observation[:2], one.outcome["goal"]) and one.rewards.sum() == 1


def test_a_goal_in_the_text_is_not_in_the_observation():
    numbers, words = (PointMaze(5, name=LARGE, text=text) for text in ("none", "goal"))
    np.testing.assert_array_equal(numbers.reset(2)[:, :2], words.reset(2))
    assert words.tasks == [task_text("large", goal) for goal in numbers.goals]
    assert (numbers.protocol, words.protocol) == ("standard", "goal-text")
    assert set(numbers.tasks) == {""} and not words.observation_parts


def test_one_task_and_a_goal_of_ones_own():
    env = PointMaze(3, name=LARGE, task=2, goal="36, 24")
    assert env.protocol == "standard-own-goal"
    assert env.reset(0)[:, 2:].tolist() == [[36, 24]] * 3
    assert np.abs(env.positions - middle(np.array([5, 4]))).max() <= 1


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ("16,0", r"got '16,0', which is in row 1, column 5: no free cell"),
        ("400,0", r"got '400,0', which is in row 1, column 101: no free cell"),
        ("4", r"expected x,y in a free cell of large, such as 36,24; got '4'"),
        ("4,here", r"got '4,here'"),
        ("nan,0", r"got 'nan,0'"),
    ],
)
def test_a_goal_outside_of_the_maze_is_refused(goal, words):
    with pytest.raises(ValueError, match=f"env.goal: expected x,y in a free cell.*{words}|{words}"):
        PointMaze(1, name=LARGE, goal=goal)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match=r"env.task: expected 1 to 5, or 0 for all tasks, got 6"):
        PointMaze(1, name=LARGE, task=6)
    with pytest.raises(ValueError, match=r"env.text: expected one of none, goal, got 'paper'"):
        PointMaze(1, name=LARGE, text="paper")


def test_the_picture_has_the_paths_and_the_goals():
    env = PointMaze(3, name=LARGE)
    made = rollout(env.baselines(0)["planner"], env, seed=0)
    axis = env.draw(made, "three").axes[0]
    assert axis.get_title() == "three" and len(axis.lines) == 2 * 3 and len(axis.patches) == 3
