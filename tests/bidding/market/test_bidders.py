"""Bidders: rules worked by hand, published policies against their own answers."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from decisionllm.bidding.market.bidders import (
    PID,
    Constant,
    OnlineLP,
    TargetCPA,
    TrainedBidder,
    behaviour_roster,
    roster,
)
from decisionllm.bidding.market.market import BidderContext

pytestmark = pytest.mark.numeric

FIXTURES = Path(__file__).parents[2] / "fixtures" / "auctionnet"


def context(step=0, remaining=(100.0,), target_cpa=80.0):
    """One advertiser or a few, in category 0, 1, ..."""
    M = len(remaining)
    return BidderContext(
        step,
        np.arange(M),
        np.full(M, 100.0),
        np.full(M, target_cpa),
        np.array(remaining),
        np.zeros(M),
    )


@pytest.mark.parametrize("name", ["BC", "IQL", "CQL", "TD3_BC", "MOPO", "COMBO"])
def test_a_policy_answers_as_it_was_published(name):
    with gzip.open(FIXTURES / "reference_policy_io.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    states = np.array([[float(row[f"s{i}"]) for i in range(16)] for row in rows])
    values = states.copy()
    expected = [float(row.get(f"alpha_{name}") or row[f"alpha_{name}_retrained"]) for row in rows]
    np.testing.assert_allclose(TrainedBidder(name).act(states), expected, atol=1e-3)
    np.testing.assert_allclose(TrainedBidder(name).act(states[7:8]), expected[7], atol=1e-3)
    np.testing.assert_array_equal(states, values)
    assert TrainedBidder(name).features == "original"


def test_an_unknown_policy_or_behaviour_is_refused():
    with pytest.raises(
        ValueError, match="policy: expected one of BC, COMBO, CQL, IQL, MOPO, TD3_BC, got 'DT'"
    ):
        TrainedBidder("DT")
    with pytest.raises(
        ValueError,
        match="behaviour: expected one of reference, shuffled_bidders, constant_bidders, got 'all'",
    ):
        behaviour_roster("all", 0)


def played(pid, remaining):
    pid.reset()
    return [
        float(pid.act(np.zeros((1, 16)), context(t, [left]))[0]) for t, left in enumerate(remaining)
    ]


def test_the_pacer_by_hand():
    # no spend counts at step 1; step 2: 46 * 0.5 / 89.5 = 0.26 is slow; step 3: 45 * 1.8 / 87.7 =
    # 0.92 is kept; step 4: 44 * 9 / 78.7 = 5
    assert played(PID(), [100, 90, 89.5, 87.7, 78.7]) == pytest.approx(
        [15, 18, 18 * 1.2, 18 * 1.2, 18 * 1.2 * 0.7]
    )


def test_the_pacer_forgets_the_last_period():
    pid = PID()
    assert played(pid, [100, 50, 10]) == played(pid, [100, 50, 10])


def test_the_pacer_paces_each_advertiser_by_itself():
    pid = PID()
    pid.reset()
    for t, left in enumerate([[100.0, 100.0], [100.0, 100.0], [50.0, 100.0]]):
        made = pid.act(np.zeros((2, 16)), context(t, left))
    assert made == pytest.approx([18 * 0.7, 18 * 1.2])


def test_rules_without_memory_by_hand():
    states, here = np.zeros((2, 16)), context(remaining=(10.0, 20.0))
    assert Constant(95.0).act(states, here).tolist() == [95, 95]
    assert TargetCPA().act(states, here).tolist() == [80, 80]


def test_online_lp_reads_the_first_row_that_costs_more_than_is_left():
    first = np.zeros((2, 49), int)
    first[0, 1:], first[1] = 3, 3
    first[1, 1:] = 4
    bidder = OnlineLP(np.array([10.0, 20.0, 30.0, 5.0]), np.array([40.0, 60.0, 130.0, 7.0]), first)
    # 130 is more than 1.5 * 80
    for left, expected in ((0, 40), (9.9, 40), (10, 60), (25, 120), (30, 80), (99, 80)):
        assert bidder.act(np.zeros((1, 16)), context(0, [left])).tolist() == [expected], left
    assert bidder.act(np.zeros((2, 16)), context(0, [1.0, 1.0])).tolist() == [40, 7]
    assert bidder.act(np.zeros((1, 16)), context(1, [1.0])).tolist() == [80], "no row for this step"


def test_the_reference_roster_has_the_published_positions():
    pairs, kind = roster(), {}
    assert sorted(i for positions, _ in pairs for i in positions) == list(range(48))
    for positions, bidder in pairs:
        kind |= dict.fromkeys(positions, bidder.name)
    even = ["PID", "IQL", "TD3_BC", "OnlineLP", "OnlineLP", "CQL", "BC", "MOPO"]
    odd = ["PID", "Constant", "MOPO", "OnlineLP", "OnlineLP", "TD3_BC", "IQL", "COMBO"]
    assert [kind[i] for i in range(48)] == (even + odd) * 3


def test_the_shipped_tables_cost_more_with_every_row():
    tables = [bidder for _, bidder in roster() if isinstance(bidder, OnlineLP)]
    assert len(tables) == 2
    for table in tables:
        for start, end in np.stack([table.first[:, :-1], table.first[:, 1:]], -1).reshape(-1, 2):
            assert (
                end > start
                and (np.diff(table.cost[start:end]) > 0).all()
                and (np.diff(table.ratio[start:end]) >= 0).all()
            )
