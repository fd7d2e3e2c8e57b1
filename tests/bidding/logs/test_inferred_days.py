"""Days inferred from a trajectory log: means of steps by hand, a known market found again, its
curves against those of drawn opportunities, a real log of AuctionNet.
"""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from decisionllm.bidding.logs import auctionnet
from decisionllm.bidding.logs import replay_days as days
from decisionllm.bidding.logs.auctionnet_log import Log
from decisionllm.bidding.logs.inferred_days import (
    ADVERTISERS,
    fit_prices,
    infer_days,
    select_counted_steps,
    step_means,
    upper_tail,
)
from decisionllm.bidding.logs.replay_days import GRID, find_day_files, read_day
from decisionllm.bidding.market.campaigns import STATE, STEPS
from decisionllm.bidding.market.price_replay import price_period
from decisionllm.bidding.teacher import Curves
from decisionllm.commands.data import data
from tests.conftest import near, node

FIXTURES = Path(__file__).parents[2] / "fixtures" / "auctionnet"
LOG = FIXTURES / "trajectories_periods_7_8.csv.gz"
VOLUME = 1000
VALUE = 5e-4
PRICE = 0.1
SPREAD = 0.45
RATIOS = np.array([0.8, 1.2])  # of prices to their mean, half of them each


def market():
    """A log of one period in which advertiser i bids 40 + 4 i x value and won what it would win on
    average; the price of step t is PRICE x (1 + t / 48).
    """
    price = PRICE * (1 + np.arange(STEPS) / STEPS)
    multiplier = np.tile(40.0 + 4 * np.arange(ADVERTISERS)[:, None], STEPS)
    least = RATIOS * price[:, None] / (multiplier[..., None] * VALUE)
    won = upper_tail(least, SPREAD)[0].mean(-1)
    states = np.zeros((ADVERTISERS, STEPS, len(STATE)))
    states[..., STATE.index("budget left")] = 1
    states[..., STATE.index("value now")] = VALUE
    states[..., STATE.index("volume now")] = VOLUME
    before = np.arange(1, STEPS)
    states[:, 1:, STATE.index("market price")] = price.cumsum()[:-1] / before
    states[:, 1:, STATE.index("won")] = won.cumsum(1)[:, :-1] / before
    numbers = np.arange(ADVERTISERS)
    nothing = np.zeros((ADVERTISERS, STEPS))
    return Log(
        period=np.full(ADVERTISERS, 3),
        advertiser=numbers,
        category=numbers // 8,
        budget=np.full(ADVERTISERS, 1e6),
        target_cpa=np.full(ADVERTISERS, 100.0),
        states=states,
        multiplier=multiplier,
        conversions=nothing,
        exposed_value=nothing,
        remaining=np.full((ADVERTISERS, STEPS), 1e6),
        spend=np.zeros(ADVERTISERS),
        done=nothing > 0,
        repairs={},
    )


def test_means_of_steps_by_hand():
    """Means of all steps before are 0, 4, 5, 4: steps of 4, 6 and 2."""
    log = market()
    states = log.states.copy()
    states[:, :4, STATE.index("won")] = [0, 4, 5, 4]
    result = step_means(replace(log, states=states), "won")
    assert result[0, :3] == pytest.approx([4, 6, 2]) and np.isnan(result[:, -1]).all()


def test_the_share_and_the_mean_above_a_value():
    values = np.random.default_rng(0).normal(1, SPREAD, 1_000_000).clip(0)
    for least in (0.5, 1.0, 1.7):
        share, mean = upper_tail(np.array(least), SPREAD)
        won = values >= least
        assert share == pytest.approx(won.mean(), abs=2e-3)
        assert mean == pytest.approx((values * won).mean(), abs=2e-3)


def test_steps_whose_bids_did_not_all_count_are_left_out():
    """A step without a bid, steps after which no budget is left, and the last one of each day."""
    log = market()
    multiplier, remaining = log.multiplier.copy(), log.remaining.copy()
    multiplier[0, 5] = 0
    remaining[1, 20:] = 0.05
    bid, won, volume = select_counted_steps(
        replace(log, multiplier=multiplier, remaining=remaining)
    )
    # advertiser 1 has 19 steps left, 0 .. 18
    assert len(bid) == len(won) == len(volume) == 46 * 47 + (47 - 1) + 19
    assert bid[0] == pytest.approx(40 * VALUE / PRICE) and set(volume) == {VOLUME}


@pytest.mark.numeric
def test_a_known_market_is_found_again():
    result = fit_prices(market())
    assert result.spread == pytest.approx(SPREAD)
    assert result.mean == pytest.approx(1, abs=0.01) and result.chances.sum() == pytest.approx(1)
    deviation = np.sqrt(result.chances @ (result.ratios - result.mean) ** 2)
    assert deviation == pytest.approx(0.2, abs=0.01)


@pytest.mark.numeric
def test_curves_are_those_of_drawn_opportunities():
    """The same market with 20,000 opportunities a step, of which each multiplier wins some."""
    day = next(infer_days(market(), prices="test"))
    assert (day.period, day.prices, day.total) == (3, "test", 0)
    assert day.volume.tolist() == [VOLUME] * STEPS
    near(day.mean_price[:-1], PRICE * (1 + np.arange(STEPS - 1) / STEPS), 1e-9)
    rng = np.random.default_rng(0)
    n = 20_000
    for step in (0, 30):
        values = VALUE * rng.normal(1, SPREAD, (n, 1)).clip(0)
        prices = PRICE * (1 + step / STEPS) * rng.choice(RATIOS, n)
        drawn = days.multiplier_curves(values, prices)[:3]
        for name, expected in zip(("cost", "value", "won"), drawn, strict=True):
            result = vars(day)[name][step, 7] * n / VOLUME
            assert np.abs(result - expected[0]).max() < 0.02 * expected.max(), name


def test_each_day_is_also_made_with_the_prices_and_volumes_of_the_others():
    """Periods 3 and 4; in 4 all values are twice as high and there are half as many auctions."""
    one = market()
    states = one.states.copy()
    states[..., STATE.index("value now")] *= 2
    states[..., STATE.index("volume now")] /= 2
    other = replace(one, period=one.period + 1, states=states, multiplier=one.multiplier / 2)
    made = {day.period: day for day in infer_days(together(one, other), prices="test")}
    assert list(made) == [3, 4, 1003, 1004]
    recombined = made[1003]
    assert recombined.volume.tolist() == [VOLUME / 2] * STEPS
    near(recombined.mean_value, made[3].mean_value, 1e-9)
    near(recombined.mean_price, made[4].mean_price, 1e-9)
    # prices are the same in both, so that all differs by the number of auctions
    near(recombined.won, made[3].won / 2)
    near(made[1004].value, 2 * made[4].value)


def together(*logs):
    """A log with the rows of all of these."""
    columns = {}
    for field in fields(Log):
        if field.name != "repairs":
            columns[field.name] = np.concatenate([vars(log)[field.name] for log in logs])
    return Log(**columns, repairs={})


def test_more_is_never_won_with_less():
    day = next(infer_days(market(), prices="test"))
    for curve in (day.cost, day.value, day.won):
        assert (np.diff(curve, axis=2) >= 0).all() and curve.dtype == np.float32
    assert (day.won <= VOLUME * (1 + 1e-6)).all() and len(GRID) == day.won.shape[2]


def test_a_log_from_which_nothing_can_be_inferred_is_refused():
    log = market()
    with pytest.raises(
        ValueError, match=r"period 3: expected each of the advertisers 0 .. 47, got 47"
    ):
        list(infer_days(log.rows(np.arange(1, ADVERTISERS)), prices="test"))
    silent = replace(log, multiplier=np.zeros_like(log.multiplier))
    with pytest.raises(
        ValueError, match="expected steps with bids, prices and shares of won auctions"
    ):
        list(infer_days(silent, prices="test"))


@pytest.mark.numeric
def test_auctionnets_own_log_says_how_its_market_spreads():
    """Eight advertisers of two periods. Values of its traffic spread by 0.45 of their mean, and the
    price that has to be beaten is a little above the least winning one of the log.
    """
    result = fit_prices(auctionnet.read(LOG))
    assert result.spread == pytest.approx(0.45, abs=0.06)
    assert 1 < result.mean < 1.15


def test_days_of_a_trajectory_log_are_written_and_read(tmp_path):
    """By the command, as those of any other log; a teacher learns from them, nothing is replayed."""
    log = tmp_path / "log.csv"
    auctionnet.write(log, market())
    options = {"cache_dir": str(tmp_path / "cache"), "export": f"replay:{tmp_path / 'days'}"}
    data({"dataset": node("dataset", "auction", path=str(log)), **options})
    files = find_day_files(tmp_path / "days")
    assert list(files) == [3]
    result = read_day(files[3])
    near(result.won, next(infer_days(market(), prices="log")).won, 1e-4, scale=VOLUME)
    assert Curves([result]).sums.isfinite().all()
    with pytest.raises(ValueError, match="period 3: expected the opportunities of a day, got none"):
        price_period(result)
