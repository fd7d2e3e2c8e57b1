"""Every registered environment meets `protocols.Env`."""

import json

import numpy as np
import pytest

from decisionllm.datasets.store_writer import write_store
from decisionllm.eval.env_checks import TrainingData, compare
from decisionllm.eval.env_layout import check_actions
from decisionllm.eval.rollout import rollout
from decisionllm.schema import Spec
from tests.contracts.worlds import DATASETS, ENVS, made, missing

N = 3
SHORTER = {"ogbench": 100}  # steps of an episode here, where the environment's own are slow
every_env = pytest.mark.parametrize("name", ENVS)


class Random:
    """Chooses among the allowed actions, or numbers within 0 .. 1, which every continuous space
    here has.
    """

    def __init__(self, env, size, seed):
        self.env = env
        self.size = size
        self.rng = np.random.default_rng(seed)

    def act(self, observations, rewards=None, action_masks=None):
        M, C = len(observations), self.env.num_actions
        if action_masks is None and not C:
            return self.rng.random((M, self.size)).astype(np.float32)
        if action_masks is None:
            action_masks = np.ones((M, C), bool)
        likes = self.rng.random(action_masks.shape) + action_masks
        return likes.argmax(1)[:, None].astype(np.float32)

    def select(self, rows):
        return None


def player(name, env, seed=7):
    """A random player of an environment by its name."""
    return Random(env, 1 if name in ("auction", "journal") else 2, seed)


def shortened(name, folder):
    """An environment whose episodes are played to their end."""
    env = made("env", name, folder, N)
    if name in SHORTER:
        env.horizon = SHORTER[name]
    return env


def play_episodes(name, env, seed=0):
    return rollout(lambda tasks: player(name, env), env, seed=seed)


def test_every_environment_is_tested():
    assert not missing("env"), f"give it small options in worlds.py: {missing('env')}"


@every_env
def test_an_environment_has_the_members_of_its_protocol(name, tmp_path):
    env = made("env", name, tmp_path, N)
    rows = len(env.tasks)
    assert rows >= 1 and all(isinstance(task, str) for task in env.tasks)
    assert env.horizon >= 1 and env.protocol and isinstance(env.unit, str)
    assert env.groups is None or np.shape(env.groups) == (rows,)
    assert env.reference is None or env.reference[0] != env.reference[1]
    for execution, scripted in (("per_agent", True), ("per_agent", False), ("joint", False)):
        for label, members in env.conditions(execution, scripted).items():
            assert label and set(members) <= set(range(rows)) and len(members)


@every_env
def test_a_step_has_the_shapes_of_the_protocol(name, tmp_path):
    env = made("env", name, tmp_path, N)
    rows, observations = len(env.tasks), env.reset(0)
    S = observations.shape[1]
    assert observations.shape == (rows, S) and np.isfinite(observations).all()
    assert not env.observation_parts or sum(size for _, size in env.observation_parts) == S
    masks = env.action_masks
    if masks is not None:
        assert len(masks) == rows and masks.dtype == bool
        assert env.num_actions == masks.shape[1]
        assert masks.any(1).all(), "some action is allowed"
    actions = player(name, env).act(observations, None, masks)
    after, rewards, terminated, truncated = env.step(actions)
    assert after.shape == (rows, S) and np.isfinite(after).all()
    assert rewards.shape == (rows,) and np.isfinite(rewards).all()
    assert terminated.shape == truncated.shape == (rows,)
    assert terminated.dtype == truncated.dtype == bool


@every_env
def test_a_seed_starts_the_same_episodes_and_they_end_by_the_horizon(name, tmp_path):
    env = shortened(name, tmp_path)
    first, again = play_episodes(name, env), play_episodes(name, env)
    assert len(first) == len(env.tasks)
    for one, other in zip(first, again, strict=True):
        assert 1 <= len(one.rewards) <= env.horizon
        assert np.array_equal(one.observations, other.observations)
        assert np.array_equal(one.rewards, other.rewards)
        assert (one.terminated, one.truncated) == (other.terminated, other.truncated)
        assert one.terminated != one.truncated
    starts, others = env.reset(0), env.reset(1)
    assert starts.shape == others.shape


@every_env
def test_scores_and_metrics_are_of_the_episodes_alone(name, tmp_path):
    env = shortened(name, tmp_path)
    episodes = play_episodes(name, env)
    for members in env.conditions("per_agent", False).values():
        part = [episodes[i] for i in members]
        scores = env.score(part)
        assert scores.shape == (len(part),) and np.isfinite(scores).all()
        one = np.concatenate([env.score([episode]) for episode in part])
        np.testing.assert_allclose(one, scores)
        assert json.dumps(env.metrics(part))


@every_env
def test_baselines_play_and_repeat_with_their_seed(name, tmp_path):
    env = shortened(name, tmp_path)
    for label, begin in env.baselines(0).items():
        first = rollout(begin, env, seed=0)
        again = rollout(env.baselines(0)[label], env, seed=0)
        assert [e.rewards.tolist() for e in first] == [e.rewards.tolist() for e in again], label


@pytest.mark.parametrize("name", [name for name in ENVS if name in DATASETS and name != "minari"])
def test_an_environment_fits_the_dataset_of_its_name(name, tmp_path):
    """As `train` checks it before its first step."""
    source = made("dataset", name, tmp_path)
    store = write_store(tmp_path / "store", source)
    trained = TrainingData("env", {}, store.spec, store.info, store.tasks)
    assert compare(made("env", name, tmp_path, 1), trained, longest=None) == []


@pytest.mark.parametrize("name", [name for name in ENVS if name not in ("smax", "tmaze")])
def test_an_environment_refuses_actions_of_another_kind(name, tmp_path):
    """The two that are left out have as many actions as their map, and masks."""
    env = made("env", name, tmp_path, 1)
    other = Spec(1, 1, 9, num_actions=77)
    if env.num_actions:
        other = Spec(1, 1, 9, low=(-1.0,), high=(1.0,))
    with pytest.raises(ValueError, match="a run: trained on .* actions, the environment has"):
        check_actions(other, env, "a run")
