"""Logs of simulated worlds: one row for each agent that acts, ends, and mixtures of teachers."""

import numpy as np
import pytest

from decisionllm.datasets.store_writer import write_store
from decisionllm.teams.dataset import source
from decisionllm.teams.simulated_logs import SEEDS, Game, generate
from decisionllm.teams.team_env import STARTS
from decisionllm.teams.tmaze import dataset as tmaze


class Countdown:
    """Two agents; agent a of world w has ended after w + a + 1 steps. A world is paid the sum of
    the actions, and is over after three steps at the latest."""

    def __init__(self, seeds):
        self.time, self.seeds, E = 0, seeds, len(seeds)
        self.over, self.terminated, self.won = np.zeros((3, E), bool)
        self.alive = np.ones((E, 2), bool)
        self.masks = np.ones((E, 2, 3), bool)

    @property
    def observations(self):
        return np.full((len(self.over), 2, 1), self.time, np.float32)

    def step(self, actions):
        gains = np.where(self.over, 0, (actions * self.alive).sum(1))
        self.time += 1
        self.alive = self.alive & (np.add.outer(np.arange(len(self.over)), [1, 2]) > self.time)
        self.won = self.terminated = ~self.alive.any(1)
        self.over = self.terminated | (self.time >= 3)
        return gains


class Constant:
    def __init__(self, world, kinds, rng, *, noise):
        self.kinds = kinds

    def act(self, world):
        return np.repeat(1 + self.kinds[:, None], 2, 1)


def log(name="one", groups=3, begin=Countdown, **options):
    def describe(world):
        return {"horizon": 3, "types": {"agent": {"num_actions": 3}}}

    game = Game(begin, describe, ("one", "two"), Constant)
    return generate(game, name, groups=groups, **{"noise": 0.0, "seed": 1} | options)


def test_rows_end_with_their_agent_and_rewards_go_on():
    episodes = list(source(log()).episodes)
    assert [(e.group, e.agent, e.rewards.tolist(), e.return_after_exit) for e in episodes] == [
        (0, 0, [2], 1),
        (0, 1, [2, 1], 0),
        (1, 0, [2, 2], 1),
        (1, 1, [2, 2, 1], 0),
        (2, 0, [2, 2, 2], 0),
        (2, 1, [2, 2, 2], 0),
    ]
    assert [(e.terminated, e.truncated) for e in episodes] == [(True, False)] * 5 + [(False, True)]
    assert log().steps["won"].tolist().count(True) == 2 and log().meta["generator"] == {
        "log": "one",
        "noise": 0.0,
        "seed": 1,
    }


def test_a_mixed_log_has_an_equal_share_of_each_teacher():
    made = log("mixed", 8)
    first = made.agents["step"] == 0
    assert np.bincount(made.agents["behaviour"][first]).tolist() == [8, 8]
    assert (made.agents["action"] == made.agents["behaviour"] + 1).all()


def test_worlds_of_logs_are_not_those_of_evaluations():
    seeds = []
    log(begin=lambda args: seeds.extend(args) or Countdown(args))
    assert seeds == [2 * SEEDS, 2 * SEEDS + 1, 2 * SEEDS + 2] and SEEDS > 900 * STARTS


def test_a_log_of_the_t_maze_is_a_store_of_teams(tmp_path):
    store = write_store(
        tmp_path / "store", tmaze.load(agents=2, length=3, groups=30, text="informative")
    )
    assert (
        store.spec.num_actions == 5
        and store.spec.horizon == 4
        and (store.returns == 1).all()
        and (store.lengths == 4).all()
    )
    assert len(np.unique(store.group)) == 30 and "A team of 2" in store.tasks[0]
    again = generate(tmaze.game(2, 3), "mixed", groups=30)
    assert 14 <= again.steps["won"].sum() <= 21, "15 of the experts and an eighth of the others"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: log("three"), "dataset.log: expected one of one, two, mixed, got 'three'"),
        (
            lambda: log(groups=0),
            "expected groups of 1 .. 1000000 and noise of 0 .. 1, got 0 and 0.0",
        ),
        (lambda: log(noise=2), "noise of 0 .. 1, got 3 and 2"),
        (lambda: tmaze.load(agents=1), "agents of 2 .. 16 and a length of at least 1, got 1 and 4"),
    ],
)
def test_a_wrong_option_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError) as raised:
        wrong()
    assert message in str(raised.value)
