"""The best first-price bid against rivals whose bids are known, worked out by hand."""

import numpy as np
import pytest

from decisionllm.bidding.market.win_curve import (
    WinCurve,
    bucket_numbers,
    count_auctions,
    fit_win_curve,
)

pytestmark = pytest.mark.numeric

HALVES = WinCurve(np.array([0.25, 0.5, 1.0]), np.array([0.25, 0.5, 1.0]))


def uniform_auctions(n, *, reported):
    """n auctions against one rival who bids uniformly from 0 to 1; P(win | b) = b."""
    rng = np.random.default_rng(0)
    bids, rival = rng.uniform(0.0, 1.0, (2, n))
    least = rival if reported else np.full(n, np.nan)
    return count_auctions(bids, bids > rival, least)


def test_prices_of_a_bucket_are_within_five_percent():
    assert bucket_numbers([1.0, 1.049, 1.05, 0.96, 0.95]).tolist() == [0, 0, 1, -1, -2]
    least, tiny, small, huge, most = bucket_numbers([0.0, 1e-12, 1e-8, 1e300, 1e9])
    assert least == tiny < small < huge == most


def test_the_best_bid_has_the_highest_expected_surplus():
    """(1 - 0.5) x 0.5 is more than (1 - 0.25) x 0.25, and bidding 1 gains nothing."""
    assert HALVES.best_bid(1.0, most=1.0) == 0.5
    assert HALVES.best_bid(1.0, most=1.0, floor=0.6) == 0.6, "nothing lower counts"
    assert HALVES.best_bid(1.0, most=0.4) == 0.4, "0.6 x 0.4 is more than 0.75 x 0.25"
    assert HALVES.best_bid(3.0, most=1.0) == 1.0, "(3 - 1) x 1 is more than (3 - 0.5) x 0.5"


def test_where_nothing_better_is_known_the_bid_stays():
    assert HALVES.best_bid(0.2, most=0.2) == 0.2, "no such price has ever won"
    assert (
        HALVES.best_bid(0.5, most=0.5, floor=0.5) == HALVES.best_bid(0.5, most=0.5, floor=2) == 0.5
    )
    never = WinCurve(HALVES.prices, np.zeros(3))
    assert never.best_bid(1.0, most=1.0) == 1.0
    assert HALVES.best_bid(np.inf, most=np.inf) == np.inf and HALVES.best_bid(0.0, most=0.0) == 0.0


@pytest.mark.parametrize("reported", [False, True], ids=["outcome", "price"])
def test_against_a_uniform_rival_half_of_the_worth_is_bid(reported):
    """(w - b) x b is highest at w / 2."""
    curve = fit_win_curve(uniform_auctions(20_000, reported=reported))
    for worth in (0.3, 0.6, 0.9):
        assert curve.best_bid(worth, most=worth) == pytest.approx(worth / 2, rel=0.2)
    assert curve.chance(np.array([0.5]))[0] == pytest.approx(0.5, abs=0.05)


def test_a_curve_never_falls_and_no_bid_is_raised_or_negative():
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = int(rng.integers(100, 300))
        bids = 10.0 ** rng.uniform(-6, 3, n)
        least = np.where(rng.random(n) < rng.random(), 10.0 ** rng.uniform(-6, 3, n), np.nan)
        curve = fit_win_curve(count_auctions(bids, rng.random(n) < rng.random(), least))
        assert (np.diff(curve.chances) >= 0).all() and (np.diff(curve.prices) > 0).all()
        assert curve.chances[0] >= 0 and curve.chances[-1] <= 1
        for worth in 10.0 ** rng.uniform(-8, 5, 20):
            most = worth * rng.random()
            floor = most * rng.choice([0.0, 0.5, 2.0])
            bid = curve.best_bid(worth, most=most, floor=floor)
            assert min(floor, most) <= bid <= most


def test_too_few_auctions_have_no_curve():
    assert fit_win_curve(uniform_auctions(99, reported=False)) is None
    assert fit_win_curve(uniform_auctions(100, reported=False)) is not None
    assert fit_win_curve(count_auctions(np.zeros(0), np.zeros(0, bool), np.zeros(0))) is None


def test_one_lucky_win_at_a_low_price_changes_no_bid():
    """500 auctions are won at 1.0, and one at 0.01: of that price too little is known."""
    bids = np.append(np.full(500, 1.0), 0.01)
    curve = fit_win_curve(count_auctions(bids, np.ones(501, bool), np.full(501, np.nan)))
    assert curve.best_bid(2.0, most=2.0) == pytest.approx(1.0, rel=0.11)
    lost = count_auctions(
        np.append(bids, np.full(500, 0.9)), np.arange(1001) < 501, np.full(1001, np.nan)
    )
    assert fit_win_curve(lost).best_bid(2.0, most=2.0) == pytest.approx(1.05, rel=0.11)
