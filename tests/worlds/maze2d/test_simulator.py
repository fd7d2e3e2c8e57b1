"""The maze's closed form against the simulators it replaces, and against cases worked by hand."""

import numpy as np
import pytest

from decisionllm.worlds.maze2d.simulator import LAYOUTS, MASS, Maze, Planner, reward


def mujoco_maze(maze, mujoco):
    """The same maze as a MuJoCo model: the oracle.

    From 3.5 on MuJoCo adds the margins of both bodies.
    """
    margin = 0.002 if tuple(int(v) for v in mujoco.__version__.split(".")[:2]) < (3, 5) else 0.001
    boxes = "".join(
        f'<geom type="box" pos="{i + 1} {j + 1} 0" size=".5 .5 .2" contype="1" conaffinity="1"/>'
        for i, j in np.argwhere(maze.walls)
    )
    model = mujoco.MjModel.from_xml_string(f"""<mujoco>
        <compiler inertiafromgeom="true"/><option timestep="0.01" gravity="0 0 0" integrator="Euler"/>
        <default><joint damping="1" limited="false"/>
          <geom density="1000" margin="{margin}" condim="1" contype="2" conaffinity="1"/></default>
        <worldbody><body pos="1.2 1.2 0"><geom type="sphere" size="0.1"/>
          <joint type="slide" name="x" axis="1 0 0"/><joint type="slide" name="y" axis="0 1 0"/></body>{boxes}</worldbody>
        <actuator><motor joint="x" ctrlrange="-1 1" ctrllimited="true" gear="100"/>
          <motor joint="y" ctrlrange="-1 1" ctrllimited="true" gear="100"/></actuator></mujoco>""")
    return model, mujoco.MjData(model)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_step_equals_mujoco(name):
    mujoco = pytest.importorskip("mujoco")
    maze, rng = Maze.from_name(name), np.random.default_rng(1)
    model, data = mujoco_maze(maze, mujoco)
    states, push = maze.reset(20, rng), rng.uniform(-1, 1, (20, 2))
    touched = 0
    for t in range(150):
        # hold a direction for a while, so that walls and corners are reached at speed
        if t % 15 == 0:
            push = rng.uniform(-1.3, 1.3, states[:, 2:].shape)
        expected = []
        for state, action in zip(states, push, strict=True):
            data.qpos[:] = state[:2]
            data.qvel[:] = np.clip(state[2:], -5, 5)
            data.ctrl[:] = action
            data.qacc_warmstart[:] = 0
            mujoco.mj_step(model, data)
            touched += data.ncon > 0
            expected.append(np.concatenate([data.qpos, data.qvel]))
        states = maze.step(states, push)
        np.testing.assert_allclose(states, expected, atol=1e-8)
    assert touched > 300, "the comparison must include contacts"


def test_pointmaze_is_the_same_maze_turned_by_a_quarter():
    gym = pytest.importorskip("gymnasium")
    robotics = pytest.importorskip("gymnasium_robotics")
    mujoco = pytest.importorskip("mujoco")
    gym.register_envs(robotics)
    env = gym.make("PointMaze_UMaze-v3", max_episode_steps=10**6).unwrapped
    maze, rng = Maze.from_name("umaze"), np.random.default_rng(2)
    rows, columns = maze.walls.shape
    margin = 0.002 if tuple(int(v) for v in mujoco.__version__.split(".")[:2]) < (3, 5) else 0.004
    observation, _ = env.reset(seed=3)
    for t in range(400):
        # x to the right, y upwards, the origin in the middle
        X, Y, VX, VY = observation["observation"]
        state = np.array([rows / 2 - Y - 0.7, X - 0.7 + columns / 2, -VY, VX])
        if t % 20 == 0:
            action = rng.uniform(-1, 1, 2)
        observation, *_ = env.step(np.array([action[1], -action[0]]))
        X, Y, VX, VY = observation["observation"]
        np.testing.assert_allclose(
            maze.step(state, action, margin=margin),
            [rows / 2 - Y - 0.7, X - 0.7 + columns / 2, -VY, VX],
            atol=1e-8,
        )
    env.close()


def test_one_ball_moves_as_in_a_batch_of_a_thousand():
    maze, rng = Maze.from_name("large"), np.random.default_rng(0)
    states = maze.reset(1000, rng)
    for _ in range(30):
        actions = rng.uniform(-1, 1, (1000, 2))
        after = maze.step(states, actions)
        np.testing.assert_allclose(maze.step(states[7], actions[7]), after[7], atol=1e-12)
        states = after


def test_free_motion_by_hand():
    # in the middle of a corridor along y, too fast
    state = Maze.from_name("umaze").step([3.0, 1.8, 6.0, 0.0], [1.0, 0.0])
    speed = 5 + 0.01 * (100 - 5) / (MASS + 0.01)
    np.testing.assert_allclose(state, [3.0 + 0.01 * speed, 1.8, speed, 0], atol=1e-12)


def test_nothing_gets_through_a_wall():
    maze, rng = Maze.from_name("medium"), np.random.default_rng(5)
    states = maze.reset(200, rng)
    for t in range(300):
        if t % 40 == 0:
            push = rng.choice([-1.0, 0.0, 1.0], (200, 2))
        states = maze.step(states, push)
        cells = np.rint(states[:, :2] + 0.2).astype(int)
        assert not maze.walls[cells[:, 0], cells[:, 1]].any()


def test_rewards_by_hand():
    positions = [[1.0, 1.0], [1.3, 1.4], [1.3, 1.41], [4.0, 5.0]]
    assert reward(positions, [1, 1]).tolist() == [1, 1, 0, 0]
    np.testing.assert_allclose(reward(positions, [1, 1], dense=True)[[0, 3]], [1, np.exp(-5)])


def test_the_planner_takes_the_shortest_path_and_rests_at_the_goal():
    maze, rng = Maze.from_name("umaze"), np.random.default_rng(0)
    planner = Planner(maze, 1, rng)
    planner.aim(np.array([0]), np.array([[3.0, 1.0]]), np.array([[1, 1]]))
    way = np.ceil(planner.waypoints[0][:6] - 1e-9).astype(int).tolist()
    assert way == [[3, 2], [3, 3], [2, 3], [1, 3], [1, 2], [1, 1]]
    state = np.array([[3.0, 1.0, 0.0, 0.0]])
    for _ in range(400):
        action, solved = planner.act(state)
        state = maze.step(state, action)
    assert solved and np.linalg.norm(state[0, :2] - [1, 1]) < 0.1


def test_unknown_mazes_and_goals_in_walls_are_refused():
    with pytest.raises(ValueError, match="expected one of open, umaze, medium, large, got 'giant'"):
        Maze.from_name("giant")
    with pytest.raises(ValueError, match="expected free cells"):
        Planner(Maze.from_name("umaze"), 1, np.random.default_rng(0)).aim(
            np.array([0]), np.ones((1, 2)), np.array([[2, 1]])
        )


@pytest.mark.parametrize("place", [(1.0, -3.0), (9.0, 1.0), (np.nan, 1.0)])
def test_a_state_outside_the_layout_is_refused(place):
    states = np.array([[1.0, 1.0, 0, 0], [*place, 0, 0]])
    between = r"state 1: expected a position between the outer walls, 0\.3 \.\. 3\.3 and 0\.3 \.\. 3\.3, got \["
    with pytest.raises(ValueError, match=between):
        Maze.from_name("umaze").step(states, np.zeros((2, 2)))
