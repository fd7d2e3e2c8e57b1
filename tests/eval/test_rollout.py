"""Rollouts and worlds against returns worked out by hand; scores at their references; reports over seeds."""

import warnings

import gymnasium as gym
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer

from decisionllm.envs import point
from decisionllm.eval.maze2d import REFERENCE, Maze2D
from decisionllm.eval.minari import MinariEnv
from decisionllm.eval.rollout import rollout
from decisionllm.eval.synthetic import PointWorld
from decisionllm.registry import build
from decisionllm.schema import Episode, Spec
from tests.conftest import episode, make_policy, node


class Walk:
    """Walkers at 1, 2, 3 and 9 on their way home to 0; who is beyond 5 is stopped; who has ended is somewhere else afterwards."""

    tasks = ["a", "b", "c", "d"]

    def reset(self, seed):
        self.at, self.over, self.got = np.array([1.0, 2.0, 3.0, 9.0]), np.zeros(4, bool), []
        return self.at[:, None]

    def step(self, actions):
        self.got.append(actions[:, 0].tolist())
        self.at = np.where(self.over, -7, self.at + actions[:, 0])
        ended, truncated = self.at <= 0, self.at > 5
        self.over |= ended | truncated
        return self.at[:, None], -self.at, ended, truncated


class Homewards:
    """One step down, whatever is seen; and a diary."""

    def __init__(self, tasks):
        self.diary, self.tasks = [], list(tasks)

    def act(self, observations, rewards):
        self.diary.append((observations[:, 0].tolist(), None if rewards is None else rewards.tolist(), list(self.tasks)))
        return np.full((len(observations), 1), -1.0)

    def select(self, rows):
        self.tasks = [task for task, kept in zip(self.tasks, rows, strict=True) if kept]


def test_a_scripted_player_gets_the_return_worked_out_by_hand():
    episodes = rollout(Homewards, Walk(), seed=0)
    assert [e.rewards.tolist() for e in episodes] == [[0], [-1, 0], [-2, -1, 0], [-8]]
    assert [e.observations[:, 0].tolist() for e in episodes] == [[1], [2, 1], [3, 2, 1], [9]]
    assert [e.final_observation.tolist() for e in episodes] == [[0], [0], [0], [8]]
    assert [(e.task, e.group) for e in episodes] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert [(e.terminated, e.truncated) for e in episodes] == [(True, False)] * 3 + [(False, True)]
    assert all((e.actions == -1).all() for e in episodes)


def test_ended_episodes_leave_the_batch():
    world, players, steps = Walk(), [], []
    rollout(lambda tasks: players.append(Homewards(tasks)) or players[0], world, seed=0, progress=steps.append)
    assert players[0].diary == [([1, 2, 3, 9], None, ["a", "b", "c", "d"]), ([1, 2], [-1, -2], ["b", "c"]), ([1], [-1], ["c"])]
    assert world.got == [[-1, -1, -1, -1], [0, -1, -1, 0], [0, 0, -1, 0]] and steps == [1, 1, 1]


SPEC = Spec(observation_dim=2, action_dim=2, horizon=20, low=(-1.0, -1.0), high=(1.0, 1.0))


def played(world, seed, begin):
    episodes = rollout(begin, world, seed=seed)
    return [[*e.rewards.tolist(), *e.actions.ravel().tolist()] for e in episodes]


def test_a_rollout_repeats_with_its_seed():
    policy = make_policy(SPEC)
    begin = lambda tasks: policy.begin(tasks, point.HORIZON)  # noqa: E731
    one, again, other = (played(PointWorld(5), seed, begin) for seed in (3, 3, 4))
    assert one == again and one != other
    mazes = [Maze2D(3, maze="umaze") for _ in range(3)]
    one, again, other = (played(maze, seed, maze.baselines(0)["random"]) for maze, seed in zip(mazes, (3, 3, 4), strict=True))
    assert one == again and one != other


def test_the_point_world_by_hand():
    world = PointWorld(3, text="goal", goal="east")
    assert world.tasks == ["Walk to the goal in the east."] * 3 and world.protocol == "goal-text"
    world.reset(0)
    world.positions = np.array([[2.0, 1.0], [2.0, 0.7], [0.0, 0.0]])
    after, rewards, ended, truncated = world.step(np.array([[0, -1], [0, -1], [9, 0]]))
    assert after.tolist() == [[2, 0.5], [2, pytest.approx(0.2)], [0.5, 0]]
    np.testing.assert_allclose(rewards, [-0.5, -0.2, -1.5])
    assert ended.tolist() == [False, True, False] and truncated.tolist() == [False] * 3
    for _ in range(19):
        *_, truncated = world.step(np.zeros((3, 2)))
    assert truncated.tolist() == [True] * 3
    discrete = PointWorld(1, discrete=True)
    discrete.reset(0)
    discrete.positions = np.zeros((1, 2))
    assert discrete.step(np.array([[2.0]]))[0].tolist() == [[0, 0.5]] and discrete.protocol == "standard"


def returns(value):
    return episode([value / 2, value / 2])


@pytest.mark.parametrize("maze, dense", REFERENCE)
def test_maze2d_scores_0_and_100_at_its_references(maze, dense):
    random, expert = REFERENCE[maze, dense]
    scores = Maze2D(1, maze=maze, dense=dense).score([returns(random), returns(expert), returns((random + expert) / 2)])
    np.testing.assert_allclose(scores, [0, 100, 50], atol=1e-4)


def test_d4rls_references_are_the_published_ones():
    assert Maze2D(1, maze="umaze").score([returns(300.0)])[0] == pytest.approx(100 * (300 - 23.85) / (161.86 - 23.85))
    assert REFERENCE["medium", False] == (13.13, 277.39) and REFERENCE["large", False] == (6.7, 273.99)


def test_a_maze_pays_for_the_new_position_and_stops_at_its_horizon():
    world = Maze2D(2, maze="umaze")
    starts = world.reset(0)
    assert starts.shape == (2, 4) and world.horizon == 300 and world.tasks == ["", ""] and world.protocol == "standard"
    world.states = np.array([[1.0, 1.52, 0, -4.0], [1.0, 1.48, 0, 4.0]])  # into the goal's disc, and out of it
    after, rewards, ended, truncated = world.step(np.zeros((2, 2)))
    assert rewards.tolist() == [1, 0] and after[0, 1] < 1.5 < after[1, 1]
    for _ in range(298):
        *_, ended, truncated = world.step(np.zeros((2, 2)))
    assert not truncated.any()
    *_, ended, truncated = world.step(np.zeros((2, 2)))
    assert truncated.all() and not ended.any()


def test_a_dense_maze_pays_by_the_distance():
    world = Maze2D(1, maze="umaze", dense=True)
    world.reset(0)
    world.states = np.array([[1.0, 3.0, 0, 0]])
    np.testing.assert_allclose(world.step(np.zeros((1, 2)))[1], [np.exp(-2)], rtol=1e-3)


def test_the_scripted_players_score_what_they_are_known_to():
    world = Maze2D(60, maze="umaze")
    found = {name: world.score(rollout(begin, world, seed=0)).mean() for name, begin in world.baselines(0).items()}
    assert 130 < found["planner"] < 160, "149 over 200 episodes"
    assert -13 < found["random"] < 13, "-1 over 300"


def test_another_goal_may_be_told_while_the_fixed_one_pays():
    world = Maze2D(1, maze="umaze", text="goal", instructed_goal="3,1")
    assert "row 3, column 1 (x = 3.0, y = 1.0)" in world.tasks[0] and world.protocol == "told-3-1"
    world.reset(0)
    world.states = np.array([[1.0, 1.0, 0, 0]])
    assert world.step(np.zeros((1, 2)))[1].tolist() == [1]
    assert "row 1, column 1" in Maze2D(1, maze="umaze", text="goal").tasks[0]
    assert Maze2D(1, maze="umaze", text="shuffled").protocol == "goal-text"
    constant = Maze2D(1, maze="umaze", text="constant")
    assert constant.protocol == "standard" and "row" not in constant.tasks[0] and "umaze" in constant.tasks[0]


@pytest.mark.parametrize("told", ["2,1", "9,9", "-2,1", "1", "1,2,3", "one,two"])
def test_a_goal_that_is_no_free_cell_is_refused(told):
    with pytest.raises(ValueError, match=f"env.instructed_goal: expected a free cell .* 1,1 1,2 1,3 2,3 3,1 .*got '{told}'"):
        Maze2D(1, maze="umaze", text="goal", instructed_goal=told)


def test_a_goal_is_told_only_in_words():
    with pytest.raises(ValueError, match="env.instructed_goal: needs text=goal, or nobody is told; got text=none"):
        Maze2D(1, maze="umaze", instructed_goal="3,1")


def test_the_picture_of_a_maze_has_the_paths_in_its_corridors():
    world = Maze2D(2, maze="large")
    episodes = rollout(world.baselines(0)["planner"], world, seed=0)
    axis = world.draw(episodes, "title").axes[0]
    image = axis.images[0]
    left, right, bottom, top = image.get_extent()
    walls = np.asarray(image.get_array())
    for line, made in zip(axis.lines[::2], episodes, strict=True):
        column = ((line.get_xdata() - left) / (right - left) * walls.shape[1]).astype(int)
        row = ((line.get_ydata() - top) / (bottom - top) * walls.shape[0]).astype(int)
        assert len(column) == len(made.rewards) and not walls[row, column].any()


class Counter(gym.Env):
    """Counts what it is told, in an observation of several parts; ends when it has counted to 3."""

    observation_space = spaces.Dict(
        sum=spaces.Box(-99, 99, (1,), np.float32), parts=spaces.Dict(last=spaces.Discrete(3, start=5))
    )
    action_space = spaces.Discrete(3, start=5)

    def __init__(self, square=False):
        self.square = square
        if square:
            self.action_space = spaces.Box(-1, 1, (2, 2), np.float16)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sum, self.last = float(self.np_random.integers(2)), 5
        return self.seen(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        assert self.sum < 3, "an ended one waits for the others"
        self.last, gain = (5, float(action[0, 1])) if self.square else (action, action - 5)
        self.sum += gain
        return self.seen(), float(gain), self.sum >= 3, False, {}

    def seen(self):
        return {"sum": np.array([self.sum], np.float32), "parts": {"last": self.last}}


def counted(minari_id, *, limit=5, entry="tests.test_eval:Counter", reference=None, **options):
    """A dataset of one step of a Counter that names its environment."""
    world = Counter(**options)
    made = world.action_space.sample()
    seen = {"sum": np.zeros((2, 1), np.float32), "parts": {"last": np.array([5, 5])}}
    named = {"env": None}
    if entry:
        spec = gym.envs.registration.EnvSpec("Counter-v0", entry, max_episode_steps=limit, kwargs=options)
        named = {"eval_env": spec}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = minari.create_dataset_from_buffers(
            minari_id, [EpisodeBuffer(None, None, None, seen, [made], [0.0], [True], [False])], data_format="hdf5", description="Count.",
            observation_space=world.observation_space, action_space=world.action_space, **named,
        )  # fmt: skip
    if reference:
        dataset.storage.update_metadata({"ref_min_score": reference[0], "ref_max_score": reference[1]})


class Always:
    def __init__(self, action):
        self.action, self.seen = action, []

    def act(self, observations, rewards):
        self.seen.append(observations.tolist())
        return np.tile(self.action, (len(observations), 1))

    def select(self, rows):
        pass


def test_a_minari_environment_by_hand():
    counted("mine/count-v0", reference=(1.0, 5.0))
    world, player = MinariEnv(6, minari_id="mine/count-v0"), Always([1.0])
    episodes = rollout(lambda tasks: player, world, seed=0)
    starts = [gym.utils.seeding.np_random(i)[0].integers(2) for i in range(6)]  # of the six seeds that follow the given one
    assert 0 < sum(starts) < 6
    assert [e.rewards.tolist() for e in episodes] == [[1] * (3 - start) for start in starts]
    assert all(e.terminated for e in episodes)
    for e, start in zip(episodes, starts, strict=True):  # parts.last, one-hot, then sum: in order of their names
        assert e.observations.tolist() == [[1, 0, 0, start]] + [[0, 1, 0, start + i] for i in range(1, 3 - start)]
        assert e.final_observation.tolist() == [0, 1, 0, 3]
    assert world.score(episodes).tolist() == [25 * (2 - start) for start in starts], "of returns from 1 to 5"
    assert world.horizon == 5 and world.tasks == [""] * 6


def test_a_minari_environment_stops_at_its_time_limit():
    counted("mine/count-v0", limit=4)
    world = MinariEnv(2, minari_id="mine/count-v0", text="constant")
    assert world.tasks == ["mine/count-v0. Count."] * 2
    episodes = rollout(lambda tasks: Always([0.0]), world, seed=0)
    assert [(len(e.rewards), e.terminated, e.truncated) for e in episodes] == [(4, False, True)] * 2
    assert world.score([returns(7.0)]).tolist() == [7], "without references the score is the return"


def test_actions_have_the_shape_and_type_that_the_environment_wants():
    counted("mine/square-v0", square=True)
    episodes = rollout(lambda tasks: Always([0.0, 1.0, 0.0, 0.0]), MinariEnv(1, minari_id="mine/square-v0"), seed=1)
    assert set(episodes[0].rewards) == {1}


def test_a_dataset_without_a_world_says_so():
    counted("mine/none-v0", entry=None)
    counted("mine/lost-v0", entry="no_such_package:World")
    counted("mine/endless-v0", limit=None)
    for minari_id in ("mine/none-v0", "mine/lost-v0"):
        with pytest.raises(ValueError, match=f"{minari_id}: its environment could not be made .*env=none trains without one"):
            MinariEnv(1, minari_id=minari_id)
    with pytest.raises(ValueError, match="mine/endless-v0: expected an environment with a time limit"):
        MinariEnv(1, minari_id="mine/endless-v0")


@pytest.mark.parametrize("goal, size", [("fixed", 4), ("own", 8)])
def test_pointmaze_is_played_as_its_dataset_is_read(goal, size):
    pytest.importorskip("gymnasium_robotics")
    from tests.datasets.test_minari import point_maze

    point_maze(limit=6)
    dataset = node("dataset", "minari", minari_id="D4RL/pointmaze/umaze-v2", goal=goal)
    world = build(node("env", "minari", minari_id=dataset["minari_id"], goal=goal), 3)
    one, again = (rollout(lambda tasks: Always([1.0, 0.0]), world, seed=5) for _ in range(2))
    assert [e.observations.tolist() for e in one] == [e.observations.tolist() for e in again]
    assert {e.observations.shape for e in one} == {(6, size)} == {(6, build(dataset).spec.observation_dim)}
    assert all(e.truncated for e in one) and len({tuple(e.observations[0]) for e in one}) == 3
    for e in one:
        place, goal_seen = (
            (e.observations[:, :2], None) if goal == "fixed" else (e.observations[:, 4:6], e.observations[:, 2:4])
        )
        assert (np.diff(place[:, 0]) > 0).all(), "pushed along x"
        if goal == "own":
            assert (np.abs(goal_seen - [-1, 1]) <= 0.25).all(), "the one goal of the map, jittered"
            assert e.observations[:, :2].tolist() == place.tolist()


def test_whether_a_told_goal_was_reached_and_held_is_measured():
    env = Maze2D(3, maze="umaze", text="goal", instructed_goal="3,1")
    there, near, far = (3.0, 1.0), (3.0, 1.4), (1.0, 1.0)

    def walk(*places):
        rows = np.array([place for place, count in places for _ in range(count)], np.float32)
        rows = np.concatenate([rows, np.zeros_like(rows)], 1)
        return Episode(rows[:-1], np.zeros((299, 2), np.float32), np.zeros(299, np.float32), final_observation=rows[-1])

    episodes = [walk((far, 100), (near, 200)), walk((there, 200), (far, 51), (there, 49)), walk((far, 300))]
    assert env.metrics(episodes) == {"reached": pytest.approx(2 / 3), "stayed": pytest.approx(1 / 3)}
    assert Maze2D(1, maze="umaze").metrics(episodes) == {}
