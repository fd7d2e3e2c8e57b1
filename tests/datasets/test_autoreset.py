"""Final observations that are those of another episode."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from decisionllm.datasets.arrays import from_episodes, open_folder
from decisionllm.datasets.data_quality import list_faults
from decisionllm.schema import Episode


class Line(gymnasium.Env):
    """Walks on a line for eight steps from a random place, or from 0."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, *, fixed=False):
        self.fixed = fixed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.x = 0.0 if self.fixed else self.np_random.uniform(-1, 1)
        return self.observation(), {}

    def observation(self):
        return np.array([self.x, self.t / 8], np.float32)

    def step(self, action):
        self.x += 0.3 * (int(action) - 1)
        self.t += 1
        return self.observation(), float(self.x), False, self.t == 8, {}


def record(mode, *, copies=1, steps=400):
    """Episodes as a vector environment shows them, copy by copy."""
    env = SyncVectorEnv([Line] * copies, autoreset_mode=mode)
    rng = np.random.default_rng(0)
    rows = [[] for _ in range(copies)]
    episodes = [[] for _ in range(copies)]
    before, _ = env.reset(seed=0)
    for _ in range(steps):
        actions = rng.integers(0, 3, copies)
        after, rewards, _, truncated, _ = env.step(actions)
        for i in range(copies):
            rows[i].append((before[i].copy(), actions[i], rewards[i], after[i].copy()))
            if truncated[i]:
                episodes[i].append(rows[i])
                rows[i] = []
        before = after
    return [of_rows(each) for copy in episodes for each in copy]


def of_rows(rows):
    observations, actions, rewards, after = (np.array(each) for each in zip(*rows, strict=True))
    return Episode(observations, actions[:, None], rewards, final_observation=after[-1])


def walk(*, fixed=False, episodes=50):
    """Episodes of one environment, recorded by hand."""
    env = Line(fixed=fixed)
    rng = np.random.default_rng(0)
    made = []
    for seed in range(episodes):
        before, _ = env.reset(seed=seed)
        rows = []
        for action in rng.integers(0, 3, 8):
            after, reward, _, _, _ = env.step(action)
            rows.append((before, action, reward, after))
            before = after
        made.append(of_rows(rows))
    return made


def with_finals(episodes, finals):
    return [
        Episode(each.observations, each.actions, each.rewards, final_observation=final)
        for each, final in zip(episodes, finals, strict=True)
    ]


def moved(episodes):
    """The same episodes, each of which ends with the first observation of the next one."""
    starts = [each.observations[0] for each in episodes]
    return with_finals(episodes, [*starts[1:], starts[0]])


def store_of(episodes, path):
    return open_folder(path=from_episodes(episodes, path / "s", name="mine")["path"])


def faults_of(store):
    return [fault for fault in list_faults(store.info) if "episode" in fault]


@pytest.mark.parametrize("copies", [1, 4, 16])
def test_final_observations_of_resets_are_a_fault_and_not_used(copies, tmp_path):
    store = store_of(record(AutoresetMode.SAME_STEP, copies=copies, steps=80), tmp_path)
    E = len(store.lengths)
    # the last episode of each copy is followed by none of the log
    count = E - copies
    (fault,) = faults_of(store)
    assert fault.startswith(f"the final observation of {count} of {E} episodes is the first one of")
    assert store.has_final.sum() == copies
    last = store.offsets[1:] - 1
    assert store.has_next_observation[last].sum() == copies
    unknown = last[~store.has_final]
    assert (store.next_observations(unknown) == store.observations[unknown]).all()


@pytest.mark.parametrize("observations", ["of the line", "without order"])
def test_next_observations_that_are_the_rows_moved_by_one_are_a_fault(observations, tmp_path):
    episodes = walk()
    if observations == "without order":
        rng = np.random.default_rng(0)
        episodes = [
            Episode(rng.normal(size=(8, 2)), each.actions, each.rewards) for each in episodes
        ]
    store = store_of(moved(episodes), tmp_path)
    assert faults_of(store)[0].startswith("the final observation of 50 of 50")
    assert not store.has_final.any()


def test_episodes_in_another_order_are_recognised(tmp_path):
    episodes = moved(walk())
    order = np.random.default_rng(0).permutation(len(episodes))
    store = store_of([episodes[i] for i in order], tmp_path)
    assert faults_of(store)[0].startswith("the final observation of 50 of 50")


@pytest.mark.parametrize("has_finals", [True, False])
def test_rows_of_resets_are_a_fault(has_finals, tmp_path):
    episodes = record(AutoresetMode.NEXT_STEP)
    if not has_finals:
        episodes = with_finals(episodes, [None] * len(episodes))
    store = store_of(episodes, tmp_path)
    (fault,) = faults_of(store)
    assert fault.startswith("the first row of every episode but the first is a reset")
    assert store.has_final.all() == has_finals


@pytest.mark.parametrize("fixed", [False, True])
def test_episodes_recorded_one_by_one_are_no_fault(fixed, tmp_path):
    store = store_of(walk(fixed=fixed), tmp_path)
    assert faults_of(store) == []
    assert store.has_final.all()


def test_episodes_that_end_where_all_of_them_start_are_no_fault(tmp_path):
    store = store_of(moved(walk(fixed=True)), tmp_path)
    assert faults_of(store) == []
    assert store.has_final.all()


def test_a_single_coincidence_is_no_fault(tmp_path):
    episodes = walk()
    finals = [each.final_observation for each in episodes]
    finals[3] = episodes[4].observations[0]
    store = store_of(with_finals(episodes, finals), tmp_path)
    assert faults_of(store) == []
    assert store.has_final.all()


def test_a_log_that_goes_on_without_a_reset_is_no_fault(tmp_path):
    rng = np.random.default_rng(0)
    path = np.cumsum(rng.normal(size=(401, 2)), axis=0)
    episodes = []
    for start in range(0, 400, 8):
        rows = slice(start, start + 8)
        actions = rng.integers(0, 3, (8, 1))
        final = path[start + 8]
        episodes.append(Episode(path[rows], actions, np.ones(8), final_observation=final))
    store = store_of(episodes, tmp_path)
    assert faults_of(store) == []
    assert store.has_final.all()
