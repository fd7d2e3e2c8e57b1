"""The environment of a run is compared with its data before the first step, in a training and in a
study.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from decisionllm.datasets.arrays import from_episodes
from decisionllm.eval.env_checks import TrainingData, compare, compare_observations
from decisionllm.eval.gymnasium import make
from decisionllm.eval.synthetic import PointEnv
from decisionllm.protocols import Env
from decisionllm.schema import Spec
from tests.conftest import LOOP, NANO, command, episode

PLANE = Spec(observation_dim=2, action_dim=2, horizon=20, low=(-1.0, -1.0), high=(1.0, 1.0))


class Small(Env):
    """One episode of an environment with these facts.

    It counts how often it is built and started.
    """

    built = 0
    started = 0

    def __init__(self, num_episodes=1, *, horizon=20, text="", size=2):
        type(self).built += 1
        self.horizon, self.size = horizon, size
        self.tasks = [text] * num_episodes

    def reset(self, seed):
        type(self).started += 1
        return np.zeros((len(self.tasks), self.size))

    def step(self, actions):
        rows = len(self.tasks)
        over = np.ones(rows, bool)
        return np.zeros((rows, self.size)), np.zeros(rows), over, over


class Begins(Small):
    """An environment whose reset returns this."""

    def __init__(self, result, **members):
        super().__init__()
        self.result = result
        for name, value in members.items():
            setattr(self, name, value)

    def reset(self, seed):
        return self.result


def trained(tasks=("",), **changes):
    facts = {"env_name": "env", "env": {}, "spec": PLANE, "info": {}, "tasks": tasks}
    return TrainingData(**facts | changes)


@pytest.mark.parametrize(
    "env, longest, message",
    [
        (
            Small(size=3),
            20,
            "env: expected observations of 2 numbers, as in the data, got 3; give the environment "
            "of the data",
        ),
        (
            Small(horizon=1000),
            200,
            "env: expected episodes of at most 200 steps, .*got 1,000; give env.horizon=200, "
            "dataset.horizon=1000",
        ),
        (
            Small(text="Go."),
            20,
            "env: expected no texts, as in the data, the environment has such as 'Go.'; add the text "
            "of each episode to the data .a column `tasks`",
        ),
    ],
)
def test_an_environment_unlike_the_data_is_refused(env, longest, message):
    with pytest.raises(ValueError, match=message):
        compare(env, trained(), longest=longest)


def test_an_environment_without_the_texts_of_the_data_is_refused():
    with pytest.raises(
        ValueError,
        match="env of maze: expected texts such as 'Go.', as in the data, the environment has none",
    ):
        compare(Small(), trained(["Go."], env_name="env of maze"), longest=20)


def test_an_environment_of_another_world_is_refused():
    env = Small()
    env.world_options = ("layout", "size")
    node, info = {"layout": "small", "size": 3}, {"layout": "large", "size": 3}
    message = "env: expected layout=large, as in the data, got small; give env.layout=large"
    with pytest.raises(ValueError, match=message):
        compare(env, trained(env=node, info=info), longest=20)
    assert compare(env, trained(env=node, info={"size": 3}), longest=20) == []


def test_what_may_be_meant_so_is_a_note():
    assert compare(Small(horizon=1000), trained(), longest=None) == [], (
        "a model without time steps acts for any number"
    )
    (note,) = compare(Small(text="Run."), trained(["Go."]), longest=20)
    assert (
        note
        == "env: no text of the environment, such as 'Run.', is in the data, which have such as 'Go.'"
    )
    assert compare(Small(text="Run."), trained(["Go."], info={"wordings": {}}), longest=20) == []


def ranges(*columns):
    """The range of observations whose numbers have these (least, greatest)."""
    low, high = zip(*columns, strict=True)
    return np.float32(low), np.float32(high)


def bounded(start=(0.0, 0.0), **members):
    """An environment whose observation is a part `goal` within -1 .. 1 and a part `pixel`."""
    members = {"observation_range": ([-1, 0], [1, 255])} | members
    parts = [("goal", 1), ("pixel", 1)]
    return Begins(np.array([start]), observation_parts=parts, **members)


def alike(env, observation_range):
    """Data with this range of observations, whose parts are those of the environment."""
    info = {"observation_parts": env.observation_parts}
    return trained(info=info, observation_range=observation_range)


@pytest.mark.parametrize(
    ("env", "observation_range", "message"),
    [
        (
            bounded(),
            ranges((0, 255), (-1, 1)),
            r"goal \[0\] is 0 .. 255 in the data, the environment has -1 .. 1; pixel \[0\] is -1 ..",
        ),
        (
            bounded([0.0, 255.0]),
            ranges((-1, 1), (0, 1)),
            r"pixel \[0\] is 0 .. 1 in the data, the environment begins with 255",
        ),
        (
            Begins(np.array([[0.0, 90.0]])),
            ranges((-1, 1), (-2, 2)),
            r"observation \[1\] is -2 .. 2 in the data, the environment begins with 90",
        ),
    ],
)
def test_observations_of_another_order_or_unit_get_a_note(env, observation_range, message):
    (note,) = compare(env, alike(env, observation_range), longest=20)
    assert re.search(message, note) and "the order and the units" in note


@pytest.mark.parametrize(
    ("env", "observation_range"),
    [
        (bounded(), ranges((-1, 1), (0, 255))),
        (bounded(), ranges((-1.00001, 1), (0, 255.01))),  # rounded
        (bounded([0.0, 1.0]), ranges((-1, 1), (0, 0))),  # the log never has this category
        (bounded(observation_range=([-np.inf] * 2, [np.inf] * 2)), ranges((-9, 9), (0, 1))),
        (Begins(np.array([[0.0, 9.0]])), ranges((-1, 1), (-2, 2))),
    ],
)
def test_observations_like_those_of_the_data_get_no_note(env, observation_range):
    assert compare(env, alike(env, observation_range), longest=20) == []


def test_a_note_names_three_numbers_and_counts_the_others():
    env = Begins(np.zeros((1, 5)), observation_range=([0] * 5, [1] * 5))
    spec = replace(PLANE, observation_dim=5)
    data = trained(spec=spec, observation_range=ranges(*[(0, 2)] * 5))
    note = compare_observations(env, np.zeros((1, 5)), data)
    assert "observation [2]" in note and "observation [3]" not in note
    assert "and 2 more numbers" in note


def test_episodes_longer_than_those_of_the_environment_get_a_note():
    (note,) = compare(Small(horizon=20), trained(longest=78), longest=None)
    assert "has 78 steps, the environment ends one after 20; check that the log marks" in note
    assert compare(Small(horizon=20), trained(longest=20), longest=None) == []


def test_a_run_measures_the_observations_of_its_log(tmp_path, capsys):
    still = replace(episode([1, 1, 1], S=3), actions=np.zeros((3, 1), np.float32))
    swapped = np.tile(np.float32([[-7, 0, 1]]), (3, 1))  # Pendulum has cos, sin and a speed up to 8
    episodes = [replace(still, observations=swapped, group=e) for e in range(40)]
    spec = Spec(3, 1, horizon=200, low=(-2.0,), high=(2.0,))
    from_episodes(episodes, tmp_path / "log", name="log", spec=spec)
    words = [*LOOP[2:], *NANO, "dataset=store", f"dataset.path={tmp_path / 'log'}"]
    words += ["env=gymnasium", "env.id=Pendulum-v1", f"run={tmp_path / 'run'}"]
    assert command("train", *words) == 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "observation [0] is -7 .. -7 in the data, the environment has -1 .. 1" in shown


def spec_of(**actions):
    """The spec of four observations and one action."""
    return Spec(4, 1, horizon=200, **actions)


DISCRETE, CONTINUOUS = spec_of(num_actions=2), spec_of(low=(-1.0,), high=(1.0,))


@pytest.mark.parametrize(
    ("spec", "env_id", "message"),
    [
        (DISCRETE, "Acrobot-v1", "trained on 2 discrete actions, the environment has 3 discrete"),
        (CONTINUOUS, "CartPole-v1", "trained on continuous actions, the environment has 2 discr"),
        (CONTINUOUS, "Pendulum-v1", "env: expected observations of 4 numbers, as in .*, got 3"),
    ],
)
def test_an_environment_of_gymnasium_unlike_the_data_is_refused(spec, env_id, message):
    with pytest.raises(ValueError, match=message):
        compare(make(1, id=env_id), trained(spec=spec), longest=200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["env.id=NoSuch-v1"],
            "env: could not be built (env.id: Environment `NoSuch` doesn't exist",
        ),
        (
            ["env.id=CartPole-v1", "env.horizon=1000"],
            "expected episodes of at most 200 steps, the longest in the data",
        ),
    ],
)
def test_a_run_is_refused_before_its_first_step(options, message, tmp_path, capsys):
    still = replace(episode([1, 1, 1], S=4), actions=np.zeros((3, 1), np.float32))
    episodes = [replace(still, group=e) for e in range(40)]
    from_episodes(episodes, tmp_path / "log", name="log", spec=DISCRETE)
    data = ("dataset=store", f"dataset.path={tmp_path / 'log'}", "head=discrete")
    run = tmp_path / "run"
    words = [*LOOP[2:], *NANO, *data, "env=gymnasium", *options, f"run={run}"]
    assert command("train", *words) == 1
    assert message in " ".join(capsys.readouterr().err.split()) and not run.exists()


@pytest.mark.slow
def test_parts_that_share_an_environment_build_it_once(tmp_path):
    from_episodes(
        [episode([1, 1, 1]) for _ in range(40)],
        tmp_path / "log",
        name="log",
        spec=Spec(2, 1, 20, (-1.0,), (1.0,)),
    )
    part = (
        f"{{_target_: decisionllm.datasets.arrays.open_folder, path: {tmp_path / 'log'}, env: "
        f"{{_target_: {__name__}.Small}}}}"
    )
    before = Small.built
    words = [
        "dataset=mixture",
        f"dataset.parts={{a: {part}, b: {part}}}",
        f"run={tmp_path / 'run'}",
    ]
    assert command("train", *LOOP[2:], *NANO, *words) == 0
    assert Small.built == before + 1


@pytest.mark.slow
def test_a_run_that_is_continued_needs_no_environment(tmp_path, monkeypatch):
    words = ("train", *LOOP, *NANO, f"run={tmp_path / 'run'}")
    assert command(*words) == 0
    monkeypatch.setattr(PointEnv, "__init__", None)
    assert command(*words) == 0


class Wrong(Small):
    """An environment whose step returns this."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    def step(self, actions):
        return self.result


SEEN, OVER = np.zeros((1, 2)), np.ones(1, bool)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((SEEN, np.zeros(1), OVER, OVER, {}), "expected observations, rewards, terminated, "),
        (SEEN, "truncated, got ndarray"),
        ((SEEN, 0.0, OVER, OVER), r"expected rewards of shape \(1,\), got \(\)"),
        ((SEEN[0], np.zeros(1), OVER, OVER), r"expected observations of shape \(1, S\), got"),
        ((SEEN, np.zeros(1), np.ones(1, int), OVER), "expected terminated of bool, got int64"),
        ((SEEN, np.zeros(1), OVER, np.ones((1, 1), bool)), "expected truncated of shape"),
        (
            (np.zeros((1, 3)), np.zeros(1), OVER, OVER),
            r"shape \(1, 2\) as at the start, got \(1, 3",
        ),
        ((SEEN * np.nan, np.zeros(1), OVER, OVER), "finite observations, got nan in episode 0"),
        (([[0, "a"]], np.zeros(1), OVER, OVER), "expected observations of numbers, got <U"),
        (([[0, 0], [0]], np.zeros(1), OVER, OVER), "expected observations as one array"),
        ((SEEN, np.array([np.nan]), OVER, OVER), "expected finite rewards, got nan in episode 0"),
        ((SEEN, np.array([1e39]), OVER, OVER), "expected finite rewards, got 1e.39 in episode 0"),
        ((SEEN, np.array([None]), OVER, OVER), "expected rewards of numbers, got object"),
    ],
)
def test_a_step_that_returns_something_else_is_refused_before_training(result, message):
    with pytest.raises(ValueError, match=message):
        compare(Wrong(result), trained(), longest=20)


@pytest.mark.parametrize(
    ("result", "members", "message"),
    [
        ((SEEN, {}), {}, "env.reset: expected observations alone, got a tuple of 2"),
        (SEEN[0], {}, r"env.reset: expected observations of shape \(1, S\), got \(2,\)"),
        (SEEN * np.nan, {"name": "lab"}, "env lab, reset: expected finite observations, got nan"),
        (None, {}, r"env.reset: expected observations of shape \(1, S\), got \(\)"),
        (
            np.zeros((1, 3)),
            {"observation_parts": [("observation", 2)]},
            "env: expected observations of 2 numbers, as in the data, got 3",
        ),
    ],
)
def test_a_start_that_is_something_else_is_refused_before_training(result, members, message):
    with pytest.raises(ValueError, match=message):
        compare(Begins(result, **members), trained(), longest=20)
