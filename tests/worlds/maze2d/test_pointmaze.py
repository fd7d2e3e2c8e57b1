"""The two defects of PointMaze's Minari datasets are repaired."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from decisionllm.datasets.minari import load
from decisionllm.datasets.minari_export import export_store
from tests.conftest import episode, make_store
from tests.datasets.test_minari import put, rows

# the goal is at (-1, 1)
UMAZE = [[1, 1, 1, 1, 1], [1, "g", 0, 0, 1], [1, 1, 1, 0, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]]


def point_maze(
    minari_id="D4RL/pointmaze/umaze-v2", *, maze_map=UMAZE, reward_type="sparse", limit=300
):
    """Two episodes of three steps whose first observation still has the goal of the episode before,
    as in the public files.
    """
    numbers = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    space = spaces.Dict(
        observation=spaces.Box(-np.inf, np.inf, (4,), np.float64),
        achieved_goal=numbers,
        desired_goal=numbers,
    )
    made = []
    for xs, goals in (
        ([1.0, 0.0, -0.54, -0.56], [[9, 9], [1, 1], [1, 1], [1, 1]]),
        ([-0.56, -1.0, -1.45, -1.46], [[1, 1], [0, -1], [0, -1], [0, -1]]),
    ):
        place = np.array([[x, 1.0] for x in xs])
        seen = {
            "observation": np.concatenate([place, 0 * place], 1),
            "achieved_goal": place,
            "desired_goal": np.array(goals, float),
        }
        made.append((seen, rows(3), [0, 0, 1]))
    kwargs = {
        "maze_map": maze_map,
        "reward_type": reward_type,
        "continuing_task": True,
        "reset_target": False,
    }
    entry = "gymnasium_robotics.envs.maze.point_maze:PointMazeEnv"
    return put(
        minari_id,
        made,
        observation_space=space,
        eval_env=EnvSpec("PointMaze_UMaze-v3", entry, max_episode_steps=limit, kwargs=kwargs),
    )


def test_a_pointmaze_goal_is_that_of_the_second_observation():
    point_maze()
    first, second = load(minari_id="D4RL/pointmaze/umaze-v2", goal="own").episodes
    assert first.observations[:, 2:4].tolist() == [[1, 1]] * 3, (
        "achieved goal, desired goal, observation: in order of their names"
    )
    assert second.observations[:, 2:4].tolist() == [[0, -1]] * 3 and second.final_observation[
        2:4
    ].tolist() == [0, -1]
    assert second.observations.shape == (3, 8) and second.rewards.tolist() == [0, 0, 1]


def test_pointmaze_rewards_are_those_of_the_evaluations_goal():
    point_maze()
    source = load(minari_id="D4RL/pointmaze/umaze-v2")
    first, second = source.episodes
    assert first.observations.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [np.float32(-0.54), 1, 0, 0]]
    assert first.rewards.tolist() == [0, 0, 1], (
        "for the new position: x = 0, -0.54, -0.56, and the goal's disc begins at -0.55"
    )
    assert second.rewards.tolist() == [1, 1, 0], "x = -1, -1.45, -1.46"
    assert source.info["goal"] == "fixed"


def test_a_dense_pointmaze_has_dense_rewards():
    point_maze("D4RL/pointmaze/umaze-dense-v2", reward_type="dense")
    first, _ = load(minari_id="D4RL/pointmaze/umaze-dense-v2").episodes
    np.testing.assert_allclose(first.rewards, np.exp([-1, -0.46, -0.44]), rtol=1e-6)


def test_a_pointmaze_without_one_goal_says_what_to_do():
    point_maze(maze_map=[["g" if cell == 0 else cell for cell in row] for row in UMAZE])
    with pytest.raises(
        ValueError, match="expected one goal cell 'g' .* got 7; use dataset.goal=own"
    ):
        load(minari_id="D4RL/pointmaze/umaze-v2")
    assert load(minari_id="D4RL/pointmaze/umaze-v2", goal="own").info["goal"] == "own"


def test_a_template_of_a_pointmaze_has_the_repaired_goal():
    point_maze()
    options = {
        "minari_id": "D4RL/pointmaze/umaze-v2",
        "text": "template",
        "task": "Go to {desired_goal}.",
    }
    source = load(goal="own", **options)
    assert [each.task for each in source.episodes] == ["Go to 1, 1.", "Go to 0, -1."]
    with pytest.raises(
        ValueError,
        match=r"parts of the observation, .observation., got desired_goal; dataset.goal=own keeps",
    ):
        load(**options)


def test_pointmaze_in_the_name_alone_changes_nothing(tmp_path):
    export_store("mine/pointmaze-v0", make_store(tmp_path / "s", [episode([1, 2])]))
    (only,) = load(minari_id="mine/pointmaze-v0").episodes
    assert only.rewards.tolist() == [1, 2]
