"""Bidders: rules worked by hand, published policies against their own answers."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from decisionllm.baselines.rules import PID, Abid, Constant, OnlineLP, Policy, Table, TargetCPA, online_lp_table, roster
from decisionllm.envs.auction.market import Seats

pytestmark = pytest.mark.numeric

FIXTURES = Path(__file__).parents[1] / "fixtures" / "auctionnet"


def seats(step=0, remaining=(100.0,), target_cpa=80.0, values=None):
    """One advertiser or a few, in category 0, 1, ..."""
    M = len(remaining)
    return Seats(step, np.arange(M), np.full(M, 100.0), np.full(M, target_cpa), np.array(remaining), np.zeros(M), values)


@pytest.mark.parametrize("name", ["BC", "IQL", "CQL", "TD3_BC", "MOPO", "COMBO"])
def test_a_policy_answers_as_it_was_published(name):
    with gzip.open(FIXTURES / "reference_policy_io.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    states = np.array([[float(row[f"s{i}"]) for i in range(16)] for row in rows])
    given = states.copy()
    expected = [float(row.get(f"alpha_{name}") or row[f"alpha_{name}_retrained"]) for row in rows]
    np.testing.assert_allclose(Policy(name).act(states), expected, atol=1e-3)
    np.testing.assert_allclose(Policy(name).act(states[7:8]), expected[7], atol=1e-3)
    np.testing.assert_array_equal(states, given)
    assert Policy(name).features == "original"


def test_an_unknown_policy_or_roster_is_refused():
    with pytest.raises(ValueError, match="policy: expected one of BC, COMBO, CQL, IQL, MOPO, TD3_BC, got 'DT'"):
        Policy("DT")
    with pytest.raises(ValueError, match="roster: expected reference, got 'all'"):
        roster("all")
    with pytest.raises(ValueError, match="memory: expected original or repaired, got 'none'"):
        PID(memory="none")


def played(pid, remaining):
    pid.reset()
    return [float(pid.act(np.zeros((1, 16)), seats(t, [left]))[0]) for t, left in enumerate(remaining)]


def test_the_pacer_by_hand():
    # steps 1-3: 10 of 90 left in a step is a pace of 47 * 10 / 90 = 5.2; 0.5 of 89.5 is 0.26; 1.8 of 87.7 is 0.92, which is kept
    left = [100, 90, 89.5, 87.7]
    assert played(PID(memory="repaired"), left) == pytest.approx([15, 15 * 0.7, 15 * 0.7 * 1.2, 15 * 0.7 * 1.2])
    assert played(PID(), left) == pytest.approx([15, 18, 18 * 1.2, 18 * 1.2])


def test_the_pacer_forgets_the_last_period():
    pid = PID(memory="repaired")
    assert played(pid, [100, 50, 10]) == played(pid, [100, 50, 10])


def test_the_pacer_paces_each_advertiser_by_itself():
    pid = PID()
    pid.reset()
    for t, left in enumerate([[100.0, 100.0], [100.0, 100.0], [50.0, 100.0]]):
        made = pid.act(np.zeros((2, 16)), seats(t, left))
    assert made == pytest.approx([18 * 0.7, 18 * 1.2])


def test_rules_without_memory_by_hand():
    states, here = np.zeros((2, 16)), seats(remaining=(10.0, 20.0), values=np.array([[0.1, 0.0], [0.3, 0.0]]))
    assert Constant(95.0).act(states, here).tolist() == [95, 95]
    assert TargetCPA().act(states, here).tolist() == [80, 80]
    np.testing.assert_allclose(Abid().act(states, here), [[80 / 0.2 * 0.01, 0], [80 / 0.2 * 0.09, 0]])


def test_online_lp_reads_the_first_row_that_costs_more_than_is_left():
    first = np.zeros((2, 49), int)
    first[0, 1:], first[1] = 3, 3
    first[1, 1:] = 4
    bidder = OnlineLP(Table(np.array([10.0, 20.0, 30.0, 5.0]), np.array([40.0, 60.0, 130.0, 7.0]), first))
    for left, expected in ((0, 40), (9.9, 40), (10, 60), (25, 120), (30, 80), (99, 80)):  # 130 is more than 1.5 * 80
        assert bidder.act(np.zeros((1, 16)), seats(0, [left])).tolist() == [expected], left
    assert bidder.act(np.zeros((2, 16)), seats(0, [1.0, 1.0])).tolist() == [40, 7]
    assert bidder.act(np.zeros((1, 16)), seats(1, [1.0])).tolist() == [80], "no row for this step"


def test_a_table_by_hand():
    values, prices = [np.zeros((0, 1))] * 48, [np.zeros(0)] * 48
    # price / (value + 1e-4): 100, 50, 200; no value and no price are not for sale
    values[0], prices[0] = np.array([[0.0999], [0.0]]), np.array([10.0, 5.0])
    values[1], prices[1] = np.array([[0.1999], [0.0499], [0.5]]), np.array([10.0, 10.0, 1e-4])
    table = online_lp_table(values, prices, categories=[0], limit=25.0, spacing=5.0)
    rows = [slice(*table.first[0, t : t + 2]) for t in range(48)]
    assert table.cost[rows[0]].tolist() == [10, 20] and table.ratio[rows[0]] == pytest.approx(
        [50, 100]
    )  # 30 is beyond the limit
    assert table.cost[rows[1]].tolist() == [10, 20] and table.ratio[rows[1]] == pytest.approx([50, 200])
    assert table.first[0, 2:].tolist() == [4] * 47
    assert online_lp_table(values, prices, categories=[0], limit=25.0, spacing=15.0).cost.tolist() == [20, 20]


def test_a_category_is_sampled_down_to_one_advertiser():
    rng = np.random.default_rng(0)
    values, prices = [rng.random((500, 8)) for _ in range(48)], [np.ones(500)] * 48
    table = online_lp_table(values, prices, categories=[0] * 4 + [1] * 4, limit=1e6, spacing=1.0)
    assert table.first.shape == (2, 49)
    for c in (0, 1):
        assert np.diff(table.first[c])[0] == pytest.approx(48 * 500, rel=0.03)
        assert (np.diff(table.ratio[slice(*table.first[c, :2])]) >= 0).all()


def test_a_table_needs_a_price_for_every_opportunity():
    with pytest.raises(ValueError, match="market_prices: expected 3 in step 0, one an opportunity, got 2"):
        online_lp_table([np.ones((3, 6))] * 48, [np.ones(2)] * 48)
    with pytest.raises(ValueError, match="values: expected 48 steps, got 2"):
        online_lp_table([np.ones((3, 6))] * 2, [np.ones(3)] * 2)


def test_the_reference_roster_sits_as_published():
    pairs, kind = roster(), {}
    assert sorted(i for positions, _ in pairs for i in positions) == list(range(48))
    for positions, bidder in pairs:
        kind |= dict.fromkeys(positions, getattr(bidder, "name", type(bidder).__name__))
    even = ["PID", "IQL", "TD3_BC", "OnlineLP", "OnlineLP", "CQL", "BC", "MOPO"]
    odd = ["PID", "Constant", "MOPO", "OnlineLP", "OnlineLP", "TD3_BC", "IQL", "COMBO"]
    assert [kind[i] for i in range(48)] == (even + odd) * 3


def test_the_shipped_tables_cost_more_with_every_row():
    tables = [bidder.table for _, bidder in roster() if isinstance(bidder, OnlineLP)]
    assert len(tables) == 2
    for table in tables:
        for start, end in np.stack([table.first[:, :-1], table.first[:, 1:]], -1).reshape(-1, 2):
            assert end > start and (np.diff(table.cost[start:end]) > 0).all() and (np.diff(table.ratio[start:end]) >= 0).all()


def test_the_roster_passes_its_switches_on():
    bidders = [bidder for _, bidder in roster(features="repaired", memory="repaired")]
    assert {bidder.features for bidder in bidders if isinstance(bidder, Policy)} == {"repaired"}
    assert next(bidder for bidder in bidders if isinstance(bidder, PID)).memory == "repaired"
