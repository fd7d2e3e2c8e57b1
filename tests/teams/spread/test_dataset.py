"""Logs of simple_spread: their teachers and rewards, and that they equal the world played again."""

import numpy as np
import pytest

from decisionllm.datasets.store_writer import write_store
from decisionllm.teams.spread import dataset as spread
from decisionllm.teams.spread.world import HORIZON, TEACHERS, Spread, to_pushes


def rows_of(log):
    """The agents' columns, group by group and step by step."""
    order = np.lexsort([log.agents[name] for name in ("agent", "step", "group")])
    return {name: column[order] for name, column in log.agents.items()}


def test_a_log_played_again_has_the_same_rewards():
    rows = rows_of(spread.generate("mixed", agents=4, groups=30, seed=2))
    world = Spread(3 * spread.SEEDS + np.arange(30), 4)
    seen, acted, paid = (
        rows[name].reshape(30, HORIZON, 4, -1) for name in ("observation", "action", "reward")
    )
    for step in range(HORIZON):
        assert (world.observe() == seen[:, step].reshape(120, -1)).all()
        assert (
            world.step(to_pushes(acted[:, step])).astype(np.float32) == paid[:, step, :, 0]
        ).all()


@pytest.mark.parametrize("log", spread.LOGS)
@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_every_log_is_a_store_of_teams(tmp_path, log, actions):
    source = spread.load(log=log, groups=20, actions=actions, text="informative")
    store = write_store(tmp_path / "store", source)
    assert (
        store.spec.entity_schema == (("own", 4, 1), ("landmark", 3, 6), ("agent", 3, 6))
        and store.spec.observation_dim == 40
    )
    assert store.spec.num_actions == (5 if actions == "discrete" else 0)
    assert len(np.unique(store.group)) == 20 and "A team of" in store.tasks[0]
    for g in range(20):
        assert np.ptp(store.returns[store.group == g]) < 1e-4, "all of a team have one return"


def test_qualities_differ_in_their_returns():
    means = {}
    for log in ("expert", "medium", "random", "convention", "mixed"):
        returns = [e.rewards.sum() for e in spread.load(log=log, groups=300).episodes]
        means[log] = np.mean(returns)
    assert means["random"] + 7 < means["medium"] < means["convention"] < means["expert"]
    assert means["mixed"] == pytest.approx(
        (means["expert"] + means["medium"] + means["random"]) / 3, abs=0.8
    )


def test_a_mixed_log_has_a_third_of_each_teacher_in_no_order():
    log = spread.generate("mixed", groups=300)
    kinds = rows_of(log)["behaviour"].reshape(300, -1)
    assert (kinds == kinds[:, :1]).all() and np.bincount(kinds[:, 0]).tolist() == [100, 100, 100]
    assert len(np.unique(kinds[:6, 0])) > 1 and log.meta["behaviours"] == list(TEACHERS)


def test_a_wrong_option_is_refused_by_name():
    with pytest.raises(ValueError, match="dataset.log: expected one of expert, medium.*got 'best'"):
        spread.load(log="best")
    with pytest.raises(ValueError, match="agents of 2 .. 16"):
        spread.load(agents=1)
