"""Gymnasium environments by their id or through a Minari dataset: against plain loops over the same
seeds, and by hand.
"""

import json
import sys
import warnings
from dataclasses import replace

import gymnasium as gym
import minari
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer

from decisionllm.datasets.action_spaces import action_spec
from decisionllm.datasets.arrays import from_episodes
from decisionllm.datasets.categorical import grid_parts
from decisionllm.datasets.minari import load
from decisionllm.datasets.minari_export import export_store
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.spaces import stack
from decisionllm.datasets.store import open_store
from decisionllm.eval.env_checks import TrainingData, compare
from decisionllm.eval.gymnasium import GymnasiumEnv, make, recover
from decisionllm.eval.rollout import rollout
from decisionllm.files import DIGESTS
from decisionllm.policy.loading import load_policy
from decisionllm.registry import build
from decisionllm.runs import directory
from decisionllm.schema import Spec
from tests.conftest import LOOP, NANO, command, episode, node


class Lean:
    """Pushes the cart towards the side to which the pole leans; swings the pendulum by its
    speed.
    """

    def act(self, observations, rewards=None, action_masks=None):
        assert action_masks is None
        return (
            (observations[:, 2:3] > 0).astype(float)
            if observations.shape[1] == 4
            else 2 * np.sign(observations[:, 2:3])
        )

    def select(self, rows):
        pass


def plain(env_id, seed):
    """Rewards, terminated and truncated of an episode of the same controller in a plain loop."""
    env = gym.make(env_id)
    observation, _ = env.reset(seed=seed)
    rewards, ended = [], (False, False)
    while not any(ended):
        action = Lean().act(np.asarray(observation, np.float32)[None])[0]
        observation, reward, *ended, _ = env.step(
            int(action[0]) if env_id == "CartPole-v1" else action.astype(np.float32)
        )
        rewards.append(reward)
    return rewards, *ended


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_rollout_equals_plain_loops_over_the_same_seeds(env_id):
    episodes = rollout(lambda tasks: Lean(), make(3, id=env_id), seed=7)
    for i, made in enumerate(episodes):
        rewards, terminated, truncated = plain(env_id, 7_000_000 + i)
        np.testing.assert_array_equal(made.rewards, np.array(rewards, np.float32))
        assert (made.terminated, made.truncated) == (terminated, truncated)
    assert len({len(e.rewards) for e in episodes}) == (3 if env_id == "CartPole-v1" else 1)


def test_the_same_seed_starts_the_same_episodes_and_another_seed_none_of_them():
    env = make(3, id="CartPole-v1")
    one, same, other = (env.reset(seed).tolist() for seed in (0, 0, 1))
    assert one == same
    assert len({*map(tuple, one), *map(tuple, other)}) == 6


def test_a_time_limit_truncates_and_a_fall_terminates():
    (made,) = rollout(lambda tasks: Lean(), make(1, id="CartPole-v1", horizon=5), seed=0)
    assert len(made.rewards) == 5 and made.truncated and not made.terminated
    (made,) = rollout(lambda tasks: Always([0.0]), make(1, id="CartPole-v1"), seed=0)
    assert 5 < len(made.rewards) < 20 and made.terminated and not made.truncated
    assert make(1, id="CartPole-v1").horizon == 500


def test_scores_are_returns_or_normalised_by_the_reference():
    env = make(1, id="Pendulum-v1")
    assert env.score([episode([-1, -2])]).tolist() == [-3] and env.unit == "return"
    env = make(1, id="Pendulum-v1", reference=[-5, -1])
    assert env.score([episode([-1, -2])]).tolist() == [50] and env.unit == ""
    for wrong in ([1], [2, 2]):
        with pytest.raises(
            ValueError,
            match=r"env.reference: expected two (returns, of a random policy and of an|numbers)",
        ):
            make(1, id="Pendulum-v1", reference=wrong)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_random_player_samples_the_action_space(env_id):
    env = make(2, id=env_id, horizon=8)
    one, same = (rollout(env.baselines(3)["random"], env, seed=0) for _ in range(2))
    assert [e.actions.tolist() for e in one] == [e.actions.tolist() for e in same]
    expected = gym.make(env_id).action_space
    expected.seed(3)
    assert one[0].actions[0, 0] == pytest.approx(float(np.ravel(expected.sample())[0]))


def test_options_reach_the_environment_and_the_text_the_policy():
    env = make(2, id="Pendulum-v1", arguments={"g": 3.0}, task="Swing up.", text="constant")
    assert env.envs[1].unwrapped.g == 3 and env.tasks == ["Swing up."] * 2
    assert make(1, id="Pendulum-v1", task="Swing up.").tasks == [""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"id": "CartPol-v1"},
            "env.id: Environment `CartPol` doesn't exist.* near are CartPole-v1",
        ),
        (
            {"id": "Xyzzy-v1"},
            "env.id: Environment `Xyzzy` doesn't exist.* give package:id to import",
        ),
        (
            {"id": "no_such_package:Xyzzy-v1"},
            "no_such_package:Xyzzy-v1, env.arguments={}: could not be made .No module named.*"
            "PYTHONPATH=. for this one",
        ),
        (
            {"id": "Pendulum-v1", "arguments": {"gee": 3}},
            "env.id=Pendulum-v1, .*'gee': 3.*: could not be made",
        ),
        (
            {"id": "Pendulum-v1", "text": "goal"},
            "env.text: expected one of auto, none, constant, template, episode, got 'goal'",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(1, **options)


def test_actions_of_another_space_are_refused():
    env = make(1, id="CartPole-v1")
    env.reset(0)
    with pytest.raises(
        ValueError, match="actions: expected 1 numbers, as Discrete.2. takes, got 3"
    ):
        env.step(np.zeros((1, 3)))
    with pytest.raises(
        ValueError, match="actions: expected an index below 2, as Discrete.2. takes, got 4"
    ):
        env.step(np.full((1, 1), 4.0))


def test_an_environment_without_a_time_limit_is_refused():
    with pytest.raises(ValueError, match="None: expected an environment with a time limit"):
        GymnasiumEnv([Counter()])


@pytest.mark.slow
def test_a_run_on_any_data_is_evaluated_in_any_environment(tmp_path, capsys):
    options = [
        "env=gymnasium",
        "env.id=Pendulum-v1",
        "env.horizon=20",
        "+env.arguments.g=3.0",
        "env.reference=[-900,0]",
    ]
    env = [
        *NANO,
        "dataset=arrays",
        f"dataset.path={tmp_path / 'log.npz'}",
        f"run={tmp_path / 'run'}",
        *options,
    ]
    sizes = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    columns = {
        "observations": sizes,
        "actions": sizes[:, :1].clip(-2, 2),
        "rewards": -abs(sizes[:, 0]),
    }
    np.savez(
        tmp_path / "log.npz",
        **columns,
        terminals=np.zeros(40, bool),
        timeouts=np.arange(40) % 20 == 19,
    )
    loop = [word for word in LOOP if not word.startswith("dataset")]
    assert command("train", *loop, *env, f"cache_dir={tmp_path}/data") == 0
    evaluated = [
        "evaluate",
        f"run={tmp_path / 'run'}",
        f"out={tmp_path}",
        "episodes=2",
        "report=false",
    ]
    assert command(*evaluated) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["policy"], row["protocol"], row["dataset"]) for row in rows] == [
        ("nano", "standard", "log"),
        ("random", "scripted", "Pendulum-v1"),
    ]
    for row in rows:
        assert row["score"] == pytest.approx(100 * (row["return"] + 900) / 900)
    capsys.readouterr()
    assert command(*evaluated, "+env.id=MountainCarContinuous-v0", "+env.arguments={}") == 1
    assert "expected observations of shape (2, 3)" in capsys.readouterr().err
    assert command(*evaluated, "+env._target_=decisionllm.eval.synthetic.PointEnv") == 1
    assert "the environment takes 2" in capsys.readouterr().err, (
        "options of the run's own environment are left out"
    )


class Counter(gym.Env):
    """Adds its actions up, in an observation of several parts; ends at 3."""

    observation_space = spaces.Dict(
        sum=spaces.Box(-99, 99, (1,), np.float32),
        parts=spaces.Dict(last=spaces.Discrete(3, start=5)),
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


def counted(
    minari_id, *, limit=5, entry="tests.eval.test_gymnasium:Counter", reference=None, **options
):
    """A dataset of one step of a Counter that names its environment."""
    env = Counter(**options)
    made = env.action_space.sample()
    seen = {"sum": np.zeros((2, 1), np.float32), "parts": {"last": np.array([5, 5])}}
    named = {"env": None}
    if entry:
        spec = gym.envs.registration.EnvSpec(
            "Counter-v0", entry, max_episode_steps=limit, kwargs=options
        )
        named = {"eval_env": spec}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = minari.create_dataset_from_buffers(
            minari_id,
            [EpisodeBuffer(None, None, None, seen, [made], [0.0], [True], [False])],
            data_format="hdf5",
            description="Count.",
            observation_space=env.observation_space,
            action_space=env.action_space,
            **named,
        )
    if reference:
        dataset.storage.update_metadata(
            {"ref_min_score": reference[0], "ref_max_score": reference[1]}
        )


class Always:
    def __init__(self, action):
        self.action, self.seen = action, []

    def act(self, observations, rewards=None, action_masks=None):
        self.seen.append(observations.tolist())
        return np.tile(self.action, (len(observations), 1))

    def select(self, rows):
        pass


def test_a_minari_environment_by_hand():
    counted("mine/count-v0", reference=(1.0, 5.0))
    env, player = recover(6, minari_id="mine/count-v0"), Always([1.0])
    episodes = rollout(lambda tasks: player, env, seed=0)
    # of the six seeds that follow the given one
    starts = [gym.utils.seeding.np_random(i)[0].integers(2) for i in range(6)]
    assert 0 < sum(starts) < 6
    assert [e.rewards.tolist() for e in episodes] == [[1] * (3 - start) for start in starts]
    assert all(e.terminated for e in episodes)
    # parts.last, one-hot, then sum: in order of their names
    for e, start in zip(episodes, starts, strict=True):
        assert e.observations.tolist() == [[1, 0, 0, start]] + [
            [0, 1, 0, start + i] for i in range(1, 3 - start)
        ]
        assert e.final_observation.tolist() == [0, 1, 0, 3]
    assert env.score(episodes).tolist() == [25 * (2 - start) for start in starts], (
        "of returns from 1 to 5"
    )
    assert env.horizon == 5 and env.tasks == [""] * 6


def test_a_minari_environment_stops_at_its_time_limit():
    counted("mine/count-v0", limit=4)
    env = recover(2, minari_id="mine/count-v0", text="constant")
    assert env.tasks == ["mine/count-v0. Count."] * 2
    episodes = rollout(lambda tasks: Always([0.0]), env, seed=0)
    assert [(len(e.rewards), e.terminated, e.truncated) for e in episodes] == [(4, False, True)] * 2
    assert env.score([episode([3, 4])]).tolist() == [7], (
        "without references the score is the return"
    )


def test_actions_have_the_shape_and_type_of_the_space():
    counted("mine/square-v0", square=True)
    episodes = rollout(
        lambda tasks: Always([0.0, 1.0, 0.0, 0.0]), recover(1, minari_id="mine/square-v0"), seed=1
    )
    assert set(episodes[0].rewards) == {1}


def test_a_dataset_without_an_environment_is_refused():
    counted("mine/none-v0", entry=None)
    counted("mine/lost-v0", entry="no_such_package:Env")
    counted("mine/endless-v0", limit=None)
    for minari_id in ("mine/none-v0", "mine/lost-v0"):
        with pytest.raises(
            ValueError,
            match=f"{minari_id}: its environment could not be made .*env=none trains without one",
        ):
            recover(1, minari_id=minari_id)
    with pytest.raises(ValueError, match="Counter-v0: expected an environment with a time limit"):
        recover(1, minari_id="mine/endless-v0")


@pytest.mark.parametrize("goal, size", [("fixed", 4), ("own", 8)])
def test_pointmaze_observations_are_those_of_its_dataset(goal, size):
    pytest.importorskip("gymnasium_robotics")
    from tests.worlds.maze2d.test_pointmaze import point_maze

    point_maze(limit=6)
    dataset = node("dataset", "minari", minari_id="D4RL/pointmaze/umaze-v2", goal=goal)
    env = build(node("env", "minari", minari_id=dataset["minari_id"], goal=goal), 3)
    one, again = (rollout(lambda tasks: Always([1.0, 0.0]), env, seed=5) for _ in range(2))
    assert [e.observations.tolist() for e in one] == [e.observations.tolist() for e in again]
    assert (
        {e.observations.shape for e in one}
        == {(6, size)}
        == {(6, build(dataset).spec.observation_dim)}
    )
    assert all(e.truncated for e in one) and len({tuple(e.observations[0]) for e in one}) == 3
    for e in one:
        place, goal_seen = (
            (e.observations[:, :2], None)
            if goal == "fixed"
            else (e.observations[:, 4:6], e.observations[:, 2:4])
        )
        assert (np.diff(place[:, 0]) > 0).all(), "pushed along x"
        if goal == "own":
            assert (np.abs(goal_seen - [-1, 1]) <= 0.25).all(), "the one goal of the map, jittered"
            assert e.observations[:, :2].tolist() == place.tolist()


class Reach(gym.Env):
    """A place and where to go; the keywords of its observation are not in the order of
    their names.
    """

    observation_space = spaces.Dict(
        pos=spaces.Box(-9, 9, (2,), np.float64), goal=spaces.Box(-9, 9, (1,), np.float64)
    )
    action_space = spaces.Discrete(4, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.pos = self.np_random.uniform(-1, 1, 2)
        self.goal = self.np_random.uniform(5, 6, 1)
        return self.seen(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.pos = self.pos + [0.5, action / 4]
        return self.seen(), 1.0, False, False, {}

    def seen(self):
        return {"pos": self.pos.copy(), "goal": self.goal.copy()}


def reach(entry="Reach", **options):
    return gym.make(
        gym.envs.registration.EnvSpec(
            "Reach-v0", f"{__name__}:{entry}", max_episode_steps=3, kwargs=options
        )
    )


def recorded(env, minari_id, *, actions):
    """A Minari dataset of one episode of an environment, begun with seed 0."""
    seen, ends, rewards = [env.reset(seed=0)[0]], [], []
    for action in actions:
        observation, reward, *end, _ = env.step(action)
        seen.append(observation)
        ends.append(end)
        rewards.append(reward)
    ends = np.array(ends, bool)
    buffer = EpisodeBuffer(
        observations=stack(seen),
        actions=np.array(actions),
        rewards=rewards,
        terminations=ends[:, 0],
        truncations=ends[:, 1],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minari.create_dataset_from_buffers(minari_id, [buffer], env=env, data_format="hdf5")


def test_an_environment_is_laid_out_as_its_recorded_data():
    env = reach()
    recorded(env, "mine/reach-v0", actions=[1, 4, 2])
    source = load(minari_id="mine/reach-v0")
    (read,) = source.episodes
    for played in (GymnasiumEnv([env]), recover(1, minari_id="mine/reach-v0")):
        rows = [played.reset(0), *(played.step(action[None])[0] for action in read.actions)]
        seen = np.array([*read.observations, read.final_observation])
        np.testing.assert_array_equal(np.concatenate(rows), seen.astype(np.float32))
        assert played.observation_parts == [("goal", 1), ("pos", 2)]
    assert source.info["observation_parts"] == [["goal", 1], ["pos", 2]]
    assert 5 <= read.observations[0, 0] <= 6


@pytest.mark.slow
def test_a_run_whose_data_are_laid_out_otherwise_is_refused(tmp_path, monkeypatch, capsys):
    """As columns pos, goal; the environment's are goal, pos.

    A run of before, which names no parts, is rolled out with a note.
    """
    spec = gym.envs.registration.EnvSpec("Reach-v0", f"{__name__}:Reach", max_episode_steps=3)
    monkeypatch.setitem(gym.registry, "Reach-v0", spec)
    log = [episode([1, 1, 1], S=3) for _ in range(40)]
    discrete = Spec(observation_dim=3, action_dim=1, horizon=3, num_actions=4)
    log = [replace(each, actions=np.ones((3, 1), np.float32)) for each in log]
    from_episodes(
        log,
        tmp_path / "log",
        name="log",
        spec=discrete,
        observation_parts=[("pos", 2), ("goal", 1)],
    )
    words = [
        "dataset=store",
        f"dataset.path={tmp_path}/log",
        "head=discrete",
        "steps=1",
        f"run={tmp_path}/run",
    ]
    environment = ["env=gymnasium", "env.id=Reach-v0"]
    assert command("train", *LOOP[2:], *NANO, *words, *environment) == 1
    assert (
        "laid out as pos 2, goal 1" in capsys.readouterr().err and not (tmp_path / "run").exists()
    )
    assert command("train", *LOOP[2:], *NANO, *words, "env=none") == 0
    evaluated = [
        "evaluate",
        f"run={tmp_path}/run",
        "episodes=2",
        "report=false",
        *environment,
        "env.text=none",
    ]
    assert command(*evaluated) == 1
    message = (
        "the data's observations are laid out as pos 2, goal 1, the environment's as goal 1, pos 2"
    )
    assert message in " ".join(capsys.readouterr().err.split())
    card = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))
    assert card["embodiments"][ONLY]["dataset"].pop("observation_parts") == [
        ["pos", 2],
        ["goal", 1],
    ]
    (tmp_path / "run/run.json").write_text(json.dumps(card), encoding="utf-8")
    (tmp_path / "run" / DIGESTS).unlink()  # as a run of before
    assert command(*evaluated) == 0
    noted = (
        "the data do not name the parts of an observation, the environment lays them out as "
        "goal 1, pos 2"
    )
    assert noted in " ".join(capsys.readouterr().out.split())


class Buttons(Reach):
    """Two buttons, of which the second pays."""

    action_space = spaces.MultiDiscrete([3, 2], start=[1, 5])

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return self.seen(), float(action[1] - 5), False, False, {}


def test_a_multi_discrete_environment_takes_an_index():
    spec = gym.envs.registration.EnvSpec("Buttons-v0", Buttons, max_episode_steps=3)
    env = GymnasiumEnv([gym.make(spec)])
    assert env.num_actions == 6 and list(env.action_parts) == [3, 2]
    env.reset(0)
    assert [float(env.step(np.array([[index]]))[1][0]) for index in (0, 1, 4)] == [0, 1, 0], (
        "(1, 5), (1, 6), (3, 5)"
    )
    with pytest.raises(ValueError, match="actions: expected an index below 6, as MultiDiscrete"):
        env.decode(np.array([6.0]))
    (made,) = rollout(env.baselines(0)["random"], env, seed=0)
    assert made.actions.min() >= 0 and made.actions.max() < 6


class Bounded(Reach):
    """The bound 0.1 is no float32 number: the nearest one lies outside."""

    observation_space = spaces.Dict(
        pos=spaces.Box(-9, 9, (2,), np.float64), goal=spaces.Box(-1, 0.1, (1,), np.float64)
    )
    action_space = spaces.Box(0.1, 0.7, (1,), np.float64)

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return self.seen(), 1.0, False, False, {}

    def seen(self):
        return {"pos": self.pos.copy(), "goal": np.array([0.1])}


def test_a_template_is_the_same_text_in_data_and_environments(monkeypatch):
    spec = gym.envs.registration.EnvSpec("Reach-v0", f"{__name__}:Reach", max_episode_steps=3)
    monkeypatch.setitem(gym.registry, "Reach-v0", spec)
    recorded(gym.make("Reach-v0"), "mine/reach-v0", actions=[1, 4, 2])
    words = {"text": "template", "task": "Go to {goal}."}
    (read,) = load(minari_id="mine/reach-v0", **words).episodes
    number = read.task.removeprefix("Go to ").removesuffix(".")
    assert (
        float(number) == pytest.approx(read.observations[0, 0], abs=0.005)
        and 5 <= float(number) <= 6
    )
    for env in (make(2, id="Reach-v0", **words), recover(2, minari_id="mine/reach-v0", **words)):
        begun = []
        made = rollout(
            lambda tasks, begun=begun: begun.append([*tasks]) or Always([0.0]), env, seed=0
        )
        assert begun == [[each.task for each in made]], "a policy reads the texts of this reset"
        assert made[0].task == read.task != made[1].task
        env.reset(1)
        assert env.tasks[0] not in begun[0], "and not those of the last one"


def test_a_template_of_an_unknown_part_is_refused():
    with pytest.raises(
        ValueError,
        match="env.task: expected names of parts of the observation, .observation., got goal; ",
    ):
        make(1, id="Pendulum-v1", text="template", task="Go to {goal}.")
    with pytest.raises(ValueError, match="env.task: text=template needs a text, got none"):
        make(1, id="Pendulum-v1", text="template")


@pytest.mark.slow
def test_a_run_on_templates_is_evaluated_on_those_of_its_environment(tmp_path, monkeypatch, capsys):
    spec = gym.envs.registration.EnvSpec("Reach-v0", f"{__name__}:Reach", max_episode_steps=3)
    monkeypatch.setitem(gym.registry, "Reach-v0", spec)
    env = make(40, id="Reach-v0")
    log = rollout(env.baselines(0)["random"], env, seed=0)
    facts = Spec(observation_dim=3, **action_spec(env.space), horizon=3)
    node = from_episodes(
        log, tmp_path / "log", name="log", spec=facts, observation_parts=env.observation_parts
    )
    export_store(
        "mine/reach-v0",
        open_store(node["path"]),
        env=env.envs[0].spec,
        observation_space=env.observation_space,
        action_space=env.space,
    )
    words = [
        "dataset=minari",
        "dataset.minari_id=mine/reach-v0",
        "text=template",
        'dataset.task="Go to {goal}."',
        "head=discrete",
    ]
    assert command("train", *LOOP[2:], *NANO, *words, "steps=1", f"run={tmp_path}/run") == 0
    assert command("evaluate", f"run={tmp_path}/run", "episodes=2", "report=false") == 0
    assert "such as 'Go to 5" not in capsys.readouterr().out, (
        "seed 0 is that of the log: the same goals, the same texts"
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert rows[0]["text"] == "template"
    card = directory.read(tmp_path / "run")[1]["embodiments"][ONLY]
    assert card["dataset"]["observation_parts"] == [["goal", 1], ["pos", 2]]
    assert sorted(card["tasks"]) == sorted(
        {
            each.task
            for each in load(
                minari_id="mine/reach-v0", text="template", task="Go to {goal}."
            ).episodes
        }
    )


class Robot(gym.Env):
    """Says in its info which of two marks to walk to; `change` is the step after which it says the
    other one.
    """

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, change=0, key="task", as_bytes=False):
        self.change, self.key, self.as_bytes = change, key, as_bytes

    def info(self, goal):
        text = f"Go to {goal}."
        return {self.key: {"text": text.encode() if self.as_bytes else text}, "speed": 1.0}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = ("left", "right")[self.np_random.integers(2)]
        self.time = 0
        return np.zeros(1, np.float32), self.info(self.goal)

    def step(self, action):
        self.time += 1
        info = self.info("nowhere") if self.time == self.change else {}
        return np.zeros(1, np.float32), 0.0, False, self.time == 4, info


@pytest.fixture
def robot():
    gym.register("Robot-v0", Robot, max_episode_steps=4)
    yield "Robot-v0"
    del gym.registry["Robot-v0"]


def still(tasks):
    return Always([0.0])


@pytest.mark.parametrize("as_bytes", [False, True])
def test_task_from_reads_the_text_of_each_episode_in_the_info_of_its_reset(as_bytes, robot):
    env = make(6, id=robot, task_from="info.task.text", arguments={"as_bytes": as_bytes})
    episodes = rollout(still, env, seed=0)
    goals = [f"Go to {each.unwrapped.goal}." for each in env.envs]
    assert [each.task for each in episodes] == goals and len(set(goals)) == 2
    assert env.text_label == "episode" and list(env.conditions("per_agent", False)) == ["task-text"]
    assert env.notes() == []


def test_texts_of_the_info_that_are_not_read_are_said(robot):
    env = make(1, id=robot)
    env.reset(0)
    assert env.tasks == [""] and env.text_label == "none"
    (note,) = env.notes()
    assert "'Go to " in note and "env.task_from=info.task.text reads it" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"task_from": "task"},
            "env.task_from: expected info.KEY, .* or observation.NAME, .* got 'task'",
        ),
        ({"text": "episode"}, "env.text: expected env.task_from with text=episode, got none"),
        ({"text": "constant", "task": "x", "task_from": "info.task"}, "got text=constant, which"),
        ({"task_from": "info.goal"}, "expected info.goal, got info.task.text, info.speed"),
        (
            {"task_from": "info.task.goal"},
            "expected info.task.goal, got info.task.text, info.speed",
        ),
        ({"task_from": "info.speed"}, "expected one text for each episode as info.speed, got 1.0"),
    ],
)
def test_a_text_that_the_info_does_not_have_is_refused(options, message, robot):
    with pytest.raises(ValueError, match=message):
        make(1, id=robot, **options).reset(0)


def test_a_text_that_changes_within_an_episode_is_refused_with_its_step(robot):
    env = make(1, id=robot, task_from="info.task.text", arguments={"change": 3})
    with pytest.raises(
        ValueError, match="and, after step 3 of episode 0, 'Go to nowhere.'; end the"
    ):
        rollout(still, env, seed=0)


def test_train_names_the_text_that_the_environment_has_and_nobody_reads(robot, tmp_path, capsys):
    made = [episode([1, 2, 3, 4], S=1, task="Go.", group=i) for i in range(4)]
    path = from_episodes(made, tmp_path / "told", name="told")["path"]
    silent = from_episodes(
        [episode([1, 2, 3, 4], S=1, group=i) for i in range(4)], tmp_path / "s", name="s"
    )
    words = [*NANO, *LOOP[2:], "env=gymnasium", f"env.id={robot}", f"run={tmp_path / 'run'}"]
    assert command("train", *words, "dataset=store", f"dataset.path={path}") == 1
    assert "env.task_from=info.task.text reads it" in capsys.readouterr().err
    assert command("train", *words, "dataset=store", f"dataset.path={silent['path']}") == 0
    assert "note: env: the text info.task.text of the environment is" in capsys.readouterr().out
    words[-1] = f"run={tmp_path / 'other'}"
    reading = "env.task_from=info.task.text"
    assert command("train", *words, "dataset=store", f"dataset.path={path}", reading) == 0
    options = ["episodes=2", "report=false", "baselines=false"]
    assert command("evaluate", f"run={tmp_path / 'other'}", *options) == 0
    row = json.loads((tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert (row["text"], row["protocol"]) == ("episode", "task-text")


def test_text_none_is_a_control_that_reads_no_text_in_training_and_evaluation(robot, tmp_path):
    made = [episode([1, 2, 3, 4], S=1, task=task) for task in ("Go to left.", "Go to right.") * 2]
    path = from_episodes(made, tmp_path / "told", name="told")["path"]
    words = [*NANO, *LOOP[2:], "env=gymnasium", f"env.id={robot}", "env.task_from=info.task.text"]
    words += ["dataset=store", f"dataset.path={path}"]
    for text in ("auto", "none"):
        run = f"run={tmp_path / text}"
        assert command("train", *words, f"text={text}", run) == 0
        assert command("evaluate", run, "episodes=2", "report=false", "baselines=false") == 0
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["text"] for row in rows] == ["episode", "none"]
    assert [
        directory.has_texts(load_policy(tmp_path / text).info) for text in ("auto", "none")
    ] == [True, False]
    env = make(2, id=robot, task_from="info.task.text", text="none")
    env.reset(0)
    assert env.tasks == ["", ""] and not env.notes(), "what is left out on purpose is no note"


def test_a_run_of_format_4_reads_the_texts_that_it_was_trained_with(robot, tmp_path):
    made = [episode([1, 2, 3, 4], S=1, task=task) for task in ("Go to left.", "Go to right.") * 2]
    path = from_episodes(made, tmp_path / "told", name="told")["path"]
    run = tmp_path / "run"
    train = ["train", *NANO, *LOOP[2:], "env=gymnasium", f"env.id={robot}", f"run={run}"]
    train += ["env.task_from=info.task.text", "dataset=store", f"dataset.path={path}"]
    assert command(*train) == 0
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["text"] = config["env"]["text"] = "none"
    config["dataset"] = {"_target_": config["dataset"]["_target_"], "path": path, "task_from": ""}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps(info | {"format": 4}), encoding="utf-8")
    (run / DIGESTS).unlink()
    assert command("evaluate", f"run={run}", "episodes=2", "report=false", "baselines=false") == 0
    row = json.loads((tmp_path / "results.jsonl").read_text(encoding="utf-8"))
    assert row["text"] == "episode"
    assert command(*train) == 0, "it goes on"
    assert command(*train, "text=none") == 1, "another run"


class Plain(gym.Env):
    """Two zeros, and 1 for each step; `changes` replaces what it returns, by name."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, *, from_step=0, **changes):
        self.from_step = from_step  # observations have another size
        self.changes = changes

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.changes.get("reset", (self.changes.get("seen", np.zeros(2, np.float32)), {}))

    def step(self, action):
        self.time += 1
        seen = np.zeros(2, np.float32)
        if self.time == self.from_step:
            seen = np.zeros(3, np.float32)
        result = {"seen": seen, "reward": 1.0, "terminated": False, "truncated": False}
        return self.changes.get("step", (*(result | self.changes).values(), {})[:5])


class WithoutSeed(Plain):
    def reset(self):
        return np.zeros(2, np.float32), {}


class RandomState(Plain):
    """Draws from a generator that takes seeds of 32 bits alone."""

    def reset(self, *, seed=None, options=None):
        return np.random.RandomState(seed).uniform(-1, 1, 2).astype(np.float32), {}


def registered(monkeypatch, kind=Plain):
    spec = gym.envs.registration.EnvSpec("Plain-v0", kind, max_episode_steps=4)
    monkeypatch.setitem(gym.registry, "Plain-v0", spec)


FLAT = Spec(2, 1, 4, (-1.0,), (1.0,))


def trained():
    return TrainingData(env_name="env", env={}, spec=FLAT, info={}, tasks=[""])


@pytest.mark.parametrize("checker", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seen": np.zeros(3)}, r"env Plain-v0: observation .*shape \(2,\), got shape \(3,\)"),
        ({"seen": {"a": 1}}, "env Plain-v0: observation .*got a dict of a"),
        ({"seen": np.full(2, np.nan)}, "env Plain-v0, reset: .*finite observations, got nan"),
        ({"reset": np.zeros(2)}, r"env Plain-v0: reset\(seed=0\) failed .*two values, got a ndarr"),
        ({"reset": (np.zeros(2), 1)}, "env Plain-v0: reset.* failed .*dict"),
        ({"step": (np.zeros(2), 1.0, False, {})}, "env Plain-v0: step failed .*expected 5, got 4"),
        ({"step": None}, "env Plain-v0: step failed .*tuple|NoneType"),
        ({"reward": np.zeros(2)}, "env Plain-v0: step failed .*one finite number, got array"),
        ({"reward": np.nan}, "env Plain-v0: step failed .*one finite number, got nan"),
        ({"reward": None}, "env Plain-v0: step failed .*one finite number, got None"),
        (
            {"terminated": 0.5},
            "env Plain-v0: step failed .*terminated to be true or false, got 0.5",
        ),
        (
            {"truncated": "no"},
            "env Plain-v0: step failed .*truncated to be true or false, got 'no'",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # Gymnasium's own checker warns of the same
def test_results_unlike_the_interface_are_refused_before_training(
    changes, message, checker, monkeypatch
):
    registered(monkeypatch)
    arguments = changes | {"disable_env_checker": not checker}
    with pytest.raises(ValueError, match=message):
        compare(make(1, id="Plain-v0", arguments=arguments), trained(), longest=4)


@pytest.mark.filterwarnings("ignore")
def test_an_environment_that_takes_no_seed_is_refused(monkeypatch):
    registered(monkeypatch, WithoutSeed)
    with pytest.raises(ValueError, match="env Plain-v0: reset.*unexpected keyword argument 'seed'"):
        compare(make(1, id="Plain-v0"), trained(), longest=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": np.float64(1)},
        {"reward": np.array(1)},
        {"reward": np.array([1.0])},
        {"terminated": np.False_, "truncated": 0},
        {"seen": np.zeros((1, 2))},
        {"seen": [0, 0]},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_harmless_results_are_taken(changes, monkeypatch):
    registered(monkeypatch)
    env = make(2, id="Plain-v0", arguments=changes)
    assert compare(env, trained(), longest=4) == []
    episodes = rollout(lambda tasks: Always([0.0]), env, seed=0)
    assert [each.rewards.tolist() for each in episodes] == [[1, 1, 1, 1]] * 2


def test_an_observation_that_changes_its_shape_names_the_environment(monkeypatch):
    registered(monkeypatch)
    env = make(2, id="Plain-v0", arguments={"from_step": 3})
    with pytest.raises(ValueError, match=r"env Plain-v0: observation .*got shape \(3,\)"):
        rollout(lambda tasks: Always([0.0]), env, seed=0)


@pytest.mark.parametrize("seed", [0, 4294, 4295, 12345, 20261128, 2**40])
def test_a_generator_of_32_bits_takes_every_seed(seed, monkeypatch):
    registered(monkeypatch, RandomState)
    starts = make(3, id="Plain-v0").reset(seed)
    assert len(np.unique(starts, axis=0)) == 3


def test_an_observation_space_without_a_layout_is_refused_by_its_name(monkeypatch):
    class Graph(Plain):
        observation_space = spaces.Dict(a=spaces.Graph(spaces.Discrete(2), None))

    registered(monkeypatch, Graph)
    with pytest.raises(ValueError, match="env Plain-v0 .*part a: expected a Box, .* got Graph"):
        make(1, id="Plain-v0")


def test_hands_of_blackjack_are_one_hot():
    rows = make(3, id="Blackjack-v1", horizon=5).reset(0)
    assert rows.shape == (3, 32 + 11 + 2)
    assert rows.sum(1).tolist() == [3] * 3


class Room(gym.Env):
    """Says its mission in the observation; from the step `change` on another one."""

    action_space = spaces.Discrete(2)

    def __init__(self, change=9, texts=("mission",)):
        self.change, self.texts = change, texts
        letters = frozenset("去红色的门。 .Stopghedr")
        text_spaces = {name: spaces.Text(20_000, charset=letters) for name in texts}
        self.observation_space = spaces.Dict(
            **text_spaces, place=spaces.Box(-9, 9, (1,), np.float32)
        )

    def seen(self):
        text = "Stop." if self.time >= self.change else self.mission
        return {name: text for name in self.texts} | {"place": np.ones(1, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.mission = ("去红色的门。", "go to the red door " * 500)[self.np_random.integers(2)]
        return self.seen(), {}

    def step(self, action):
        self.time += 1
        return self.seen(), 1.0, False, False, {}


@pytest.fixture
def room():
    gym.register("Room-v0", Room, max_episode_steps=3)
    yield "Room-v0"
    del gym.registry["Room-v0"]


@pytest.mark.parametrize("options", [{"text": "episode"}, {"task_from": "observation.mission"}])
def test_a_part_of_the_observation_that_is_a_text_is_the_task(options, room):
    env = make(8, id=room, **options)
    episodes = rollout(still, env, seed=0)
    assert [each.task for each in episodes] == [each.unwrapped.mission for each in env.envs]
    assert len({each.task for each in episodes}) == 2
    assert episodes[0].observations.tolist() == [[1.0]] * 3 and env.text_label == "episode"


def test_a_template_may_name_a_text_of_the_observation(room):
    env = make(2, id=room, text="template", task="Please {mission} ({place})")
    env.reset(0)
    assert env.tasks == [f"Please {each.unwrapped.mission} (1)" for each in env.envs]
    assert env.notes() == []


def test_a_text_of_the_observation_that_is_not_read_is_said(room):
    env = make(1, id=room)
    env.reset(0)
    assert "env.task_from=observation.mission reads it" in env.notes()[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text": "episode", "arguments": {"texts": ("b", "a")}},
            "observation.a, observation.b, wh",
        ),
        ({"task_from": "observation.place"}, "that is a text, observation.mission, got observat"),
        ({"text": "template", "task": "{misson}"}, r"parts of the observation, \[place, mission\]"),
        (
            {"text": "episode", "arguments": {"change": 2}},
            "after step 2 of episode 0, 'Stop.'; end",
        ),
    ],
)
def test_texts_of_the_observation_that_cannot_be_read_are_refused(options, message, room):
    with pytest.raises(ValueError, match=message):
        rollout(still, make(1, id=room, **options), seed=0)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "minigrid"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(ValueError, match="^env.id=minigrid:B.*import of minigrid .*; install the"):
        make(1, id="minigrid:BabyAI-GoToLocal-v0")


class Cells(gym.Env):
    """A grid of two cells, each of a kind below 3 and a colour below 2."""

    observation_space = spaces.Dict(
        grid=spaces.Box(0, 2, (1, 2, 2), np.uint8), place=spaces.Box(-9, 9, (1,), np.float32)
    )
    action_space = spaces.Discrete(2)

    def seen(self):
        grid = self.np_random.integers(0, [3, 2], (1, 2, 2)).astype(np.uint8)
        return {"grid": grid, "place": np.ones(1, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action):
        return self.seen(), 1.0, False, False, {}


@pytest.fixture
def cells():
    gym.register("Cells-v0", f"{__name__}:Cells", max_episode_steps=3)
    yield "Cells-v0"
    del gym.registry["Cells-v0"]


def test_declared_parts_are_one_hot_in_an_environment_as_in_its_recorded_data(cells):
    env = gym.make(cells)
    recorded(env, "mine/cells-v0", actions=[0, 1, 1])
    for declared, size in (({"grid": [3, 2]}, 11), (["grid"], 13)):
        source = load(minari_id="mine/cells-v0", categorical=declared)
        (read,) = source.episodes
        for played in (
            GymnasiumEnv([env], categorical=declared),
            recover(1, minari_id="mine/cells-v0", categorical=declared),
        ):
            rows = [played.reset(0), *(played.step(action[None])[0] for action in read.actions)]
            seen = np.array([*read.observations, read.final_observation])
            np.testing.assert_array_equal(np.concatenate(rows), seen)
            assert seen.shape == (4, size) and seen.sum(1).tolist() == [5] * 4
            assert played.categorical == source.info["categorical"]


def test_categories_that_an_environment_cannot_have_are_refused(cells):
    for declared, message in (
        ({"gird": 3}, "env Cells-v0 .env.categorical: expected a name .*, such as grid, got gird"),
        (["place"], "env.categorical.place: expected a Box of integers, got Box .* float32"),
    ):
        with pytest.raises(ValueError, match=message):
            make(1, id=cells, categorical=declared)
    message = (
        r"observation .expected a value below 2 in grid\[0, ., .\], got 2; give it more values"
    )
    with pytest.raises(ValueError, match=message):
        rollout(still, make(4, id=cells, categorical={"grid": 2}), seed=0)


@pytest.mark.slow
def test_a_run_on_categories_is_evaluated_with_those_of_its_data(cells, tmp_path, capsys):
    env = make(40, id=cells, categorical=["grid"])
    log = rollout(env.baselines(0)["random"], env, seed=0)
    facts = Spec(observation_dim=13, **action_spec(env.space), horizon=3)
    options = {"name": "log", "spec": facts, "observation_parts": env.observation_parts}
    node = from_episodes(log, tmp_path / "log", **options)
    spaces_of = {"observation_space": env.observation_space, "action_space": env.space}
    export_store("mine/cells-v0", open_store(node["path"]), env=env.envs[0].spec, **spaces_of)
    assert minari.load_dataset("mine/cells-v0").observation_space == Cells.observation_space
    train = ["train", *LOOP[2:], *NANO, "dataset=minari", "dataset.minari_id=mine/cells-v0"]
    train += ["head=discrete", "steps=1", f"run={tmp_path}/run"]
    ours = ["env=gymnasium", f"env.id={cells}"]
    for words, message in (
        (["env.categorical={grid:[3,2]}"], "dataset.categorical={grid: [3, 2]}"),
        (
            ["dataset.categorical={grid:[3,2]}", "env.categorical={grid:[2,3]}"],
            "give env.categorical={grid: [3, 2]}, as in the data",
        ),
    ):
        assert command(*train, *ours, *words) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert command(*train, "dataset.categorical={grid:[3,2]}") == 0
    for words in ([], [*ours, "env.text=none"]):
        evaluation = ["evaluate", f"run={tmp_path}/run", "episodes=2", "report=false", *words]
        assert command(*evaluation) == 0
    card = directory.read(tmp_path / "run")[1]["embodiments"][ONLY]
    assert card["dataset"]["categorical"] == {"grid": [3, 2]}
    assert card["spec"]["categorical"] == [[0, 3], [3, 2], [5, 3], [8, 2]]
    assert card["spec"]["entity_schema"] == [["grid:grid", 5, 2], ["own", 1, 1]]


def test_a_minigrid_is_one_hot_with_its_mission_as_text():
    declared = {"image": [11, 6, 4]}
    options = {"id": "minigrid:BabyAI-GoToLocal-v0", "horizon": 3, "text": "episode"}
    env = make(2, **options, categorical=declared)
    first, _ = rollout(env.baselines(0)["random"], env, seed=0)
    assert env.observation_parts == [("direction", 4), ("image", 1029)]
    assert first.observations.sum(1).tolist() == [148] * 3 and first.task.startswith("go to ")
    space = env.envs[0].observation_space
    assert grid_parts(space, declared) == [("image", 4, 49, 21)]
