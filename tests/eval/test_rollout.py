"""Rollouts against returns worked out by hand."""

import numpy as np
import pytest

from decisionllm.eval.rollout import rollout, uniform_player
from decisionllm.eval.synthetic import PointEnv
from decisionllm.protocols import Env
from decisionllm.schema import Spec
from tests.conftest import make_policy


class Walk(Env):
    """Points at 1, 2, 3 and 9 that end at 0 and are truncated above 5; ended ones are at -7
    afterwards.
    """

    tasks = ["a", "b", "c", "d"]
    horizon = 9

    def reset(self, seed):
        self.at = np.array([1.0, 2.0, 3.0, 9.0])
        self.ended = np.zeros(4, bool)
        self.got = []
        return self.at[:, None]

    def step(self, actions):
        self.got.append(actions[:, 0].tolist())
        self.at = np.where(self.ended, -7, self.at + actions[:, 0])
        ended, truncated = self.at <= 0, self.at > 5
        self.ended |= ended | truncated
        return self.at[:, None], -self.at, ended, truncated


class Down:
    """One step down at each observation, and a log of the calls."""

    def __init__(self, tasks):
        self.calls, self.tasks = [], list(tasks)

    def act(self, observations, rewards=None, action_masks=None):
        self.calls.append(
            (
                observations[:, 0].tolist(),
                None if rewards is None else rewards.tolist(),
                list(self.tasks),
            )
        )
        return np.full((len(observations), 1), -1.0)

    def select(self, rows):
        self.tasks = [task for task, is_running in zip(self.tasks, rows, strict=True) if is_running]


class MaskedWalk(Walk):
    """`Walk` with two actions, the second of which is allowed from the second step on."""

    @property
    def action_masks(self):
        masks = np.ones((4, 2), bool)
        masks[:, 1] = bool(self.got)
        return masks


def test_episodes_keep_the_action_masks_of_their_steps():
    episodes = rollout(Down, MaskedWalk(), seed=0)
    assert episodes[1].action_masks.tolist() == [[True, False], [True, True]]
    assert rollout(Down, Walk(), seed=0)[1].action_masks is None


def test_a_scripted_player_gets_the_return_worked_out_by_hand():
    episodes = rollout(Down, Walk(), seed=0)
    assert [e.rewards.tolist() for e in episodes] == [[0], [-1, 0], [-2, -1, 0], [-8]]
    assert [e.observations[:, 0].tolist() for e in episodes] == [[1], [2, 1], [3, 2, 1], [9]]
    assert [e.final_observation.tolist() for e in episodes] == [[0], [0], [0], [8]]
    assert [(e.task, e.group) for e in episodes] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert [(e.terminated, e.truncated) for e in episodes] == [(True, False)] * 3 + [(False, True)]
    assert all((e.actions == -1).all() for e in episodes)


def test_ended_episodes_leave_the_batch():
    env, players, steps = Walk(), [], []
    rollout(
        lambda tasks: players.append(Down(tasks)) or players[0], env, seed=0, progress=steps.append
    )
    assert players[0].calls == [
        ([1, 2, 3, 9], None, ["a", "b", "c", "d"]),
        ([1, 2], [-1, -2], ["b", "c"]),
        ([1], [-1], ["c"]),
    ]
    assert env.got == [[-1, -1, -1, -1], [0, -1, -1, 0], [0, 0, -1, 0]] and steps == [1, 1, 1]


def test_observations_of_another_size_are_refused():
    with pytest.raises(
        ValueError, match=r"env: expected observations of shape \(4, 3\), .* got \(4, 1\)"
    ):
        rollout(Down, Walk(), seed=0, observation_dim=3)
    assert len(rollout(Down, Walk(), seed=0, observation_dim=1)) == 4


def test_ended_episodes_may_return_anything_of_their_shape():
    class Gone(Walk):
        def step(self, actions):
            ended_before = self.ended.copy()
            seen, rewards, ended, truncated = super().step(actions)
            seen[ended_before] = np.nan
            return seen, np.where(ended_before, np.nan, rewards), ended, truncated

    episodes = rollout(Down, Gone(), seed=0)
    assert [e.rewards.tolist() for e in episodes] == [[0], [-1, 0], [-2, -1, 0], [-8]]


def test_what_an_env_returns_beside_rewards_is_kept_by_episode():
    class Counted(Walk):
        def outcomes(self):
            return {"place": self.at, "pair": np.arange(8).reshape(4, 2)}

    episodes = rollout(Down, Counted(), seed=0)
    assert [e.outcome["pair"].tolist() for e in episodes] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [float(e.outcome["place"]) for e in episodes] == [-7, -7, 0, -7]


SPEC = Spec(observation_dim=2, action_dim=2, horizon=20, low=(-1.0, -1.0), high=(1.0, 1.0))


def played(env, seed, begin):
    episodes = rollout(begin, env, seed=seed)
    return [[*e.rewards.tolist(), *e.actions.ravel().tolist()] for e in episodes]


def test_a_rollout_repeats_with_its_seed():
    policy = make_policy(SPEC)
    begin = lambda tasks: policy.begin(tasks, PointEnv.horizon)  # noqa: E731
    one, again, other = (played(PointEnv(5), seed, begin) for seed in (3, 3, 4))
    assert one == again and one != other
    one, again, other = (played(PointEnv(3), seed, uniform_player(0, 2)) for seed in (3, 3, 4))
    assert one == again and one != other
