"""The public Python interface: what a user imports from `decisionllm`, on a tiny trained run."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest

import decisionllm
from decisionllm import History, Policy
from decisionllm.protocols import Env
from tests.conftest import LOOP, NANO, command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps on the point world."""
    path = tmp_path_factory.mktemp("api")
    assert command("train", *LOOP, *NANO, f"run={path}/run", f"cache_dir={path}/data") == 0
    return path / "run"


def test_every_public_name_is_there():
    assert set(decisionllm.__all__) == set(decisionllm.PUBLIC) <= set(dir(decisionllm))
    for name in decisionllm.__all__:
        assert vars(decisionllm).get(name, decisionllm.__getattr__(name)) is not None
    with pytest.raises(AttributeError, match="module 'decisionllm' has no attribute 'lode'"):
        decisionllm.lode  # noqa: B018


@pytest.mark.parametrize("name", ["Episode", "History", "Spec"])
def test_every_field_of_a_record_is_explained(name):
    record = getattr(decisionllm, name)
    section = inspect.getdoc(record).partition("Attributes:\n")[2]
    explained = re.findall(r"^    (\w+): \S", section, re.M)
    assert sorted(explained) == sorted(field.name for field in fields(record))


def test_every_option_of_training_is_on_the_page_of_the_api():
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
    (members,) = re.findall(r"members: \[(TrainConfig, .*)\]", page)
    groups = [each.default_factory for each in fields(decisionllm.TrainConfig)]
    nested = [group.__name__ for group in groups if is_dataclass(group)]
    assert members.split(", ") == ["TrainConfig", *nested]


@pytest.mark.slow
def test_importing_the_package_imports_no_torch():
    code = "import sys, decisionllm; decisionllm.choice; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_is_loaded_and_acts_on_histories(run):
    policy = decisionllm.load(run)
    assert (
        isinstance(policy, Policy) and policy.config["window"] == 5 and policy.info["format"] == 5
    )
    assert policy.target_return == policy.info["targets"]["0.9"]
    S = policy.model.spec.observation_dim
    A = policy.model.spec.action_dim
    first = History(np.zeros((1, S)), np.zeros((0, A)), np.zeros(0))
    later = History(np.zeros((3, S)), np.zeros((2, A)), np.ones(2), target_return=5.0)
    actions = policy.act([first, later])
    assert actions.shape == (2, A) and np.isfinite(actions).all()
    assert (actions >= policy.model.spec.low).all() and (actions <= policy.model.spec.high).all()


def test_acting_options_take_the_place_of_the_runs_own(run):
    policy = decisionllm.load(run, decode="mean", stride=1, target_return=7.0)
    assert (policy.decode, policy.stride, policy.target_return) == ("mean", 1, 7.0)
    assert (decisionllm.load(run).stride, decisionllm.load(run, decode=None).decode) == (2, "mode")


def test_a_session_acts_in_the_users_own_loop(run):
    """Three episodes of four steps, of which the second ends after two; the policy's act gives the
    same actions.
    """
    policy, rng = decisionllm.load(run), np.random.default_rng(0)
    S = policy.model.spec.observation_dim
    A = policy.model.spec.action_dim
    observations = rng.normal(size=(3, 4, S)).astype(np.float32)
    rewards = rng.normal(size=(3, 4)).astype(np.float32)
    session = policy.begin([""] * 3, horizon=4)
    running = np.arange(3)
    taken = np.zeros((3, 4, A), np.float32)
    for t in range(4):
        taken[running, t] = session.act(
            observations[running, t], rewards[running, t - 1] if t else None
        )
        histories = [
            History(observations[i, : t + 1], taken[i, :t], rewards[i, :t]) for i in running
        ]
        np.testing.assert_allclose(taken[running, t], policy.act(histories), atol=2e-4)
        if t == 1:
            session.select(np.array([True, False, True]))
            running = running[[0, 2]]


class Line(Env):
    """Two numbers to which the actions are added; row i ends after i + 1 steps, and each step is
    rewarded with 1.
    """

    horizon = 3

    def __init__(self, N, S):
        self.tasks, self.S = [""] * N, S

    def reset(self, seed):
        self.t = 0
        self.places = (
            np.random.default_rng(seed).normal(size=(len(self.tasks), self.S)).astype(np.float32)
        )
        return self.places

    def step(self, actions):
        self.t += 1
        self.places = self.places + actions.sum(1, keepdims=True)
        ended = np.arange(len(self.tasks)) < self.t
        return self.places, np.ones(len(self.tasks)), ended, np.zeros_like(ended)


def test_a_rollout_gives_episodes(run):
    policy = decisionllm.load(run)
    env = Line(3, policy.model.spec.observation_dim)
    episodes = decisionllm.rollout(lambda tasks: policy.begin(tasks, env.horizon), env, seed=0)
    assert [len(e.rewards) for e in episodes] == [1, 2, 3] and all(e.terminated for e in episodes)
    assert env.score(episodes).tolist() == [1, 2, 3]
    for e in episodes:
        np.testing.assert_allclose(
            e.observations[1:] - e.observations[:-1],
            e.actions[:-1].sum(1, keepdims=True) + 0 * e.observations[1:],
            atol=1e-5,
        )
        first = policy.act([History(e.observations[:1], e.actions[:0], e.rewards[:0])])
        np.testing.assert_allclose(e.actions[:1], first, atol=2e-4)
