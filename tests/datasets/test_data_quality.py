"""Faults of a log: each kind is found, counted by hand, and a clean log has none; a log is read
once.
"""

from dataclasses import replace

import numpy as np

from decisionllm.datasets import data_quality
from decisionllm.datasets.store_writer import write_store
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Spec


def describe_faults(path, episodes, **options):
    S = episodes[0].observations.shape[1]
    spec = Spec(S, 1, 100, (-1.0,), (1.0,), **options)
    return data_quality.survey_log(
        write_store(path, Source(spec, episodes, {"name": "test"}))
    ).faults


def walk(group, n=40, *, columns=1, seed=None, **changed):
    rng = np.random.default_rng(group if seed is None else seed)
    steps = {
        "observations": rng.normal(size=(n, columns)),
        "actions": rng.uniform(-1, 1, (n, 1)),
        "rewards": rng.normal(size=n),
    }
    return Episode(
        **{name: x.astype(np.float32) for name, x in (steps | changed).items()}, group=group
    )


def test_a_clean_log_has_no_fault(tmp_path):
    assert describe_faults(tmp_path / "s", [walk(g) for g in range(5)]) == []


def test_repeated_episodes_are_counted_and_placed(tmp_path):
    # two extra copies of one, one of another
    episodes = [walk(0), walk(0), walk(1, seed=0), walk(2), walk(3), walk(3)]
    assert describe_faults(tmp_path / "s", episodes) == [
        "3 of 6 episodes repeat another one, 2 different ones; 1 of them in several groups, of "
        "which one may be held out"
    ]


def test_constant_rewards_and_numbers(tmp_path):
    still = np.stack([np.full(40, 7.0), np.arange(40) ** 2], 1)
    episodes = [walk(g, observations=still, rewards=np.full(40, 2.0)) for g in range(2)]
    assert describe_faults(tmp_path / "s", episodes) == [
        "every reward is 2: a return says no more than the length of an episode",
        "observation [0]: the same number at every step",
    ]


def test_an_entity_that_is_never_there_is_no_constant_number(tmp_path):
    """Of two balls of two numbers, the second one is zeros throughout."""
    steps = np.arange(40.0)
    one, none = np.ones(40), np.zeros(40)
    seen = np.stack([none, steps % 3, one, steps**2, none, none], 1)
    schema = (("own", 2, 1), ("ball", 2, 2))
    assert describe_faults(tmp_path / "s", [walk(0, observations=seen)], entity_schema=schema) == [
        "observation [0, 2]: the same number at every step"
    ]
    schema = (("grid:a", 1, 2), ("own", 4, 1))  # a category that a cell never has
    assert describe_faults(
        tmp_path / "grid", [walk(0, observations=seen)], entity_schema=schema
    ) == ["observation [2, 4, 5]: the same number at every step"]


def test_a_jump_is_one_of_the_logs_own_scale_and_not_from_one_episode_to_the_next(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(data_quality, "BLOCK", 7)  # each episode is a block
    line = np.arange(40.0)[:, None] % 2  # changes of 1
    jumped = line.copy()
    jumped[20] += 31.5
    episodes = [
        walk(0, observations=line),
        walk(1, observations=line + 500),
        walk(2, observations=jumped),
    ]
    assert describe_faults(tmp_path / "s", episodes) == [
        "observation [0]: 2 changes of more than 30 times its usual change in a step, 1"
    ]


def test_an_observation_that_holds_the_future(tmp_path, monkeypatch):
    monkeypatch.setattr(data_quality, "BLOCK", 21)
    episodes = []
    for g in range(3):
        e = walk(g, columns=3)
        togo = np.cumsum(e.rewards[::-1])[::-1]
        seen = np.stack([e.observations[:, 0], togo, -3 * e.rewards + 5], 1)
        episodes.append(walk(g, observations=seen, rewards=e.rewards))
    assert describe_faults(tmp_path / "s", episodes) == [
        "observation [1]: as good as the return-to-go, which is known only later",
        "observation [2]: as good as the reward of the step, which is known only later",
    ]


class Traced(np.ndarray):
    """An array that notes the first row of each slice that is taken of it."""

    def __getitem__(self, rows):
        if isinstance(rows, slice):
            self.starts.append(rows.start)
        return np.asarray(self)[rows]


def test_a_log_is_read_once_from_its_begin_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(data_quality, "BLOCK", 80)  # of rows, about
    monkeypatch.setattr(data_quality, "SAMPLE", 1)  # one episode is
    store = write_store(
        tmp_path / "s",
        Source(Spec(1, 1, 40, (-1.0,), (1.0,)), [walk(g) for g in range(6)], {"name": "test"}),
    )
    observations = store.observations.view(Traced)
    observations.starts = []
    assert data_quality.survey_log(replace(store, observations=observations)).faults == []
    assert observations.starts == [0, 0, 0, 40, 40, 120, 120], (
        "the sample; then the hash and the survey of each block"
    )
