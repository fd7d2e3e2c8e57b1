"""Replayable days: curves by hand, what is written is read again, the replay of curves and of rows
agree, damaged files are refused.
"""

import numpy as np
import pytest

from decisionllm.bidding.logs import replay_days as days
from decisionllm.bidding.logs.replay_days import GRID
from decisionllm.bidding.market.price_replay import price_period
from decisionllm.bidding.market.traffic import scaled_traffic
from decisionllm.bidding.teacher import Campaigns, Curves
from tests.conftest import near


def linear(total=4000, period=2):
    """A day whose prices are spread evenly below 12 x the mean value x 48."""
    traffic = [(values, sigmas) for values, sigmas in scaled_traffic(period, total)]
    prices = [np.linspace(20, 200, len(values)) * values.mean() for values, _ in traffic]
    return days.build_day(period, traffic, prices, prices="test", total=total)


def test_curves_by_hand():
    """Values 0.5, 0.25 and 0 at a price of 10: ratios 20, 40 and none.

    Multipliers from there on win and pay 10.
    """
    cost, value, won, mean = days.multiplier_curves(
        np.array([[0.5], [0.25], [0.0]]), np.full(3, 10.0)
    )
    for multiplier, wins, worth in (
        (19.0, 0, 0),
        (20.6, 1, 0.5),
        (39.5, 1, 0.5),
        (41.0, 2, 0.75),
        (420.0, 2, 0.75),
    ):
        g = np.searchsorted(GRID, multiplier, side="right") - 1
        assert (won[0, g], cost[0, g], value[0, g]) == (wins, 10 * wins, worth), multiplier
    assert mean == pytest.approx([0.25]) and GRID[1] / GRID[0] == pytest.approx(1.0252, abs=1e-4)
    exact = days.multiplier_curves(np.array([[1 / 8]]), np.array([GRID[0] / 8]))
    assert exact[2][0, 0] == 1, "a bid that equals the price wins"


def test_a_day_is_read_as_it_was_written(tmp_path):
    day = linear()
    other = days.build_day(
        4, list(day.traffic()), day.split_by_step(day.market_price), prices="other"
    )
    assert [len(d.values) for d in (day, other)] == [0, day.volume.sum()], (
        "published traffic is made again"
    )
    for each in (day, other):
        days.save_day(tmp_path, each)
        result = days.read_day(days.find_day_files(tmp_path, [each.period])[each.period])
        assert all(np.array_equal(x, vars(result)[name]) for name, x in vars(each).items())
        for (a, _), (b, _) in zip(result.traffic(), day.traffic(), strict=True):
            assert np.array_equal(a, b)
    assert list(days.find_day_files(tmp_path)) == [2, 4]


@pytest.mark.numeric
def test_the_replay_of_curves_agrees_with_that_of_rows():
    """On the grid to rounding; between two of its points within what 2.5 % of the
    multiplier buy.
    """
    day = linear()
    rows = price_period(day)
    curves = Curves([day])
    advertiser, rng = np.arange(48), np.random.default_rng(0)
    for exact, tolerance in ((True, 1e-5), (False, 0.03)):
        spent, bought = np.zeros((2, 2, 48))
        multipliers = GRID[rng.integers(40, 140, 48)] if exact else rng.uniform(30, 200, 48)
        for step in range(48):
            made = rows.step(
                step,
                advertiser,
                multipliers * (1 + 1e-7),
                np.full(48, 1e9),
                keys=advertiser[:, None],
            )
            held = curves.interpolate(
                *(torch_of(x) for x in (np.zeros(48, int), advertiser)),
                step,
                torch_of(multipliers).float(),
            )
            spent += made["spend"], held[0].numpy()
            bought += made["exposed_value"], held[1].numpy()
        near(spent[1], spent[0], tolerance)
        near(bought[1], bought[0], tolerance)


def test_the_budget_ends_both_replays():
    day = linear()
    rows = price_period(day)
    curves = Curves([day])
    budgets, advertiser = np.full(48, 1000.0), np.arange(48)
    campaigns = Campaigns(curves, *map(torch_of, (np.zeros(48, int), advertiser, budgets, budgets)))
    remaining, value = budgets.copy(), np.zeros(48)
    for step in range(48):
        made = rows.step(step, advertiser, np.full(48, 150.0), remaining, keys=advertiser[:, None])
        remaining = remaining - made["spend"]
        value = value + made["exposed_value"]
        campaigns.bid(torch_of(np.full(48, 150.0)))
    near(campaigns.remaining.numpy(), remaining, 0.02, scale=1000)
    near(campaigns.value.numpy(), value, 0.05)


def torch_of(x):
    import torch

    return torch.from_numpy(np.asarray(x))


def test_unfitting_or_damaged_days_are_refused(tmp_path):
    values = np.ones((2, 48))
    with pytest.raises(ValueError, match="expected 2 market prices in step 1 of period 0, got 3"):
        days.build_day(0, [(values, values)] * 2, [np.ones(2), np.ones(3)], prices="test")
    np.savez(tmp_path / "period_1.npz", format="decisionllm-replay-0")
    with pytest.raises(
        ValueError,
        match=r"period_1.npz: expected format decisionllm-replay-1, got decisionllm-replay-0; make it again",
    ):
        days.read_day(tmp_path / "period_1.npz")
    (tmp_path / "period_2.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="period_2.npz: not a readable day"):
        days.read_day(tmp_path / "period_2.npz")
