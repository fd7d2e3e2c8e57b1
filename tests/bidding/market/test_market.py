"""The market against AuctionNet's own numbers, and against auctions worked by hand."""

import hashlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from decisionllm.bidding.market.advertisers import PUBLISHED
from decisionllm.bidding.market.auctions import Draws, settle
from decisionllm.bidding.market.bidders import Constant, TargetCPA, roster
from decisionllm.bidding.market.campaigns import MEANS
from decisionllm.bidding.market.market import Bidder, Market
from decisionllm.bidding.market.traffic import noise, opportunities
from tests.bidding.auctionnet_draws import (
    AuctionNetDraws,
    auction,
    auctionnet_settle,
    dense,
)

pytestmark = pytest.mark.numeric

FIXTURES = Path(__file__).parents[2] / "fixtures" / "auctionnet"
CERTAIN = {"exposure": (1.0, 1.0, 1.0)}


def columns(name):
    """{column: values of a fixture}"""
    import pyarrow.parquet as pq

    table = pq.read_table(FIXTURES / name)
    return {column: np.array(table[column].to_pylist()) for column in table.column_names}


def bid_only(bids, **rules):
    """An auction where values do not matter."""
    n, N = np.shape(bids)
    return auction(
        np.array(bids, float), np.full((n, N), 0.5), np.zeros((n, N)), np.ones((N, 2)), **rules
    )


small = partial(opportunities, total=4000)  # a period of the 48 in a tenth of a second
three = {
    "traffic": partial(opportunities, total=3000, advertisers=3),
    "budgets": [50.0] * 3,
    "target_cpa": [80.0, 100.0, 120.0],
}


# --- traffic


@pytest.mark.parametrize("period", [0, 7])
def test_traffic_is_auctionnets_to_the_bit(period):
    golden = json.loads((FIXTURES / "pvgen_golden.json").read_text(encoding="utf-8"))["episodes"][
        str(period)
    ]
    digests = (hashlib.sha256(), hashlib.sha256())
    counts = []
    means = []
    for values, sigmas in opportunities(period):
        if not counts:
            assert values[0].tolist() == golden["first_row_tick0_pvalue"]
            assert sigmas[0].tolist() == golden["first_row_tick0_sigma"]
        counts.append(len(values))
        means.append((values.mean(), sigmas.mean()))
        for digest, x in zip(digests, (values, sigmas), strict=True):
            digest.update(np.ascontiguousarray(x, "<f8"))
    assert values[-1].tolist() == golden["last_row_tick47_pvalue"]
    assert counts == golden["traffic_num"]
    np.testing.assert_allclose(
        np.transpose(means),
        [golden["pvalue_mean_per_tick"], golden["sigma_mean_per_tick"]],
        rtol=1e-12,
    )
    assert [digest.hexdigest() for digest in digests] == [
        golden["sha256_pvalues_f8le"],
        golden["sha256_sigmas_f8le"],
    ]


def test_custom_sizes_survive_a_second_period():
    market = Market([([0, 1, 2], TargetCPA())], **three)
    for period in (0, 1):
        volume = 0
        assert market.reset(period).shape == (3, 16)
        while not market.ended:
            volume += market.step().volume
        assert 2900 < volume <= 3000


def test_scale_multiplies_values_as_far_as_one():
    plain, dense, huge = (next(opportunities(1, total=3000, scale=scale)) for scale in (1, 12, 1e5))
    np.testing.assert_allclose(dense[0], 12 * plain[0], atol=1e-12)
    np.testing.assert_allclose(dense[1], 12 * plain[1], atol=1e-12)
    assert huge[0].max() == 1


def test_impossible_sizes_are_refused():
    with pytest.raises(
        ValueError,
        match="expected a period from 0, total and advertisers from 1, got -1, 500000, 48",
    ):
        next(opportunities(-1))


def test_noise_is_the_published_table_and_a_seeded_draw_elsewhere():
    np.testing.assert_allclose(
        noise(0)[:2],
        [[0.004351179671394312, 0.1226202809917245], [0.6536990190246726, 0.278376054433349]],
    )
    for made in (noise(30), noise(0, 3)):
        assert ((made >= 0) & (made < 1)).all()
    assert noise(30).tolist() == noise(30).tolist() != noise(31).tolist()


# --- one step of auctions


def test_auctions_agree_with_auctionnet_in_every_column():
    golden = columns("auction_golden.parquet")
    for case in dict.fromkeys(golden["case"]):
        x = {
            name: column[golden["case"] == case].reshape(-1, 48) for name, column in golden.items()
        }
        values = (
            x["bid_in"],
            x["pValue"],
            x["pValueSigma"],
            noise(x["episode"][0, 0]),
            x["remaining"][0],
        )
        bids, outcome = auctionnet_settle(*values)
        outcome = dense(outcome)
        assert outcome.rounds == x["rounds"][0, 0]
        market_price = np.repeat(outcome.market_price[:, None], 48, 1)
        for name, made in (
            ("bid_out", bids),
            ("xi", outcome.won),
            ("adSlot", outcome.slot),
            ("price", outcome.price),
            ("isExposed", outcome.exposed),
            ("conversion", outcome.converted),
            ("leastWinningCost", market_price),
        ):
            np.testing.assert_array_equal(made, x[name], err_msg=f"{case}, {name}")


def test_three_bidders_by_hand():
    outcome = bid_only([[3, 1, 2], [0.5, 4, 0], [0, 0, 7]], **CERTAIN)
    # row 0: 3 pays 2, 2 pays 1, and 1 has no bid below it; row 1: 4 pays 0.5, which has no bid
    # below it; row 2: no bid below 7
    assert outcome.slot.tolist() == [[1, 0, 2], [0, 1, 0], [0, 0, 0]]
    assert outcome.price.tolist() == [[2, 0, 1], [0, 0.5, 0], [0, 0, 0]]
    assert (
        outcome.exposed.tolist()
        == outcome.won.tolist()
        == [[True, False, True], [False, True, False], [False] * 3]
    )
    assert outcome.market_price.tolist() == [1e-4] * 3


def test_five_bidders_by_hand():
    outcome = bid_only([[1, 5, 3, 2, 4]], **CERTAIN)
    assert outcome.slot.tolist() == [[0, 1, 3, 0, 2]]
    assert outcome.price.tolist() == [[0, 4, 2, 0, 3]]
    assert outcome.market_price.tolist() == [2]


def test_a_price_equal_to_the_reserve_is_unsold():
    bids = [[4, 3, 2, 1.0]]
    assert bid_only(bids, reserve=1.0, **CERTAIN).slot.tolist() == [[1, 2, 0, 0]]
    assert bid_only(bids, reserve=0.99, **CERTAIN).slot.tolist() == [[1, 2, 3, 0]]
    assert bid_only(bids, reserve=2.5, **CERTAIN).price.tolist() == [[3, 0, 0, 0]]
    assert not bid_only([[5.0, -1.0], [5.0, 0.0]]).won.any()


def test_first_prices_are_the_winners_own_bids():
    outcome = bid_only([[1, 5, 3, 2, 4], [0, 0, 0, 0, 7]], first_price=True, **CERTAIN)
    assert outcome.slot.tolist() == [[0, 1, 3, 0, 2], [0, 0, 0, 0, 1]]
    assert outcome.price.tolist() == [[0, 5, 3, 0, 4], [0, 0, 0, 0, 7]]
    assert outcome.market_price.tolist() == [3, 1e-4]
    left = np.array([10.0, 0.5])
    bids = np.tile([1.0, 2.0], (10, 1))
    retained, outcome = settle(
        bids, 0.1 * bids, 0 * bids, np.ones((2, 2)), left, first_price=True, exposure=(1.0,)
    )
    assert not retained[:, 1].any(), "one win costs 2, and 0.5 is left"
    assert outcome.sum_by_advertiser(outcome.exposed, outcome.cost).tolist() == [10, 0]


@pytest.mark.parametrize("draws", [Draws, AuctionNetDraws])
def test_the_third_slot_is_exposed_at_048(draws):
    n = 40_000
    outcome = bid_only(np.tile([4.0, 3.0, 2.0, 1.0], (n, 1)), draws=draws)
    np.testing.assert_allclose(outcome.exposed.mean(0), [1, 0.8, 0.48, 0], atol=4 * 0.5 / n**0.5)
    assert not (outcome.exposed[:, 2] & ~outcome.exposed[:, 1]).any(), "the ad above was not seen"
    assert outcome.won[:, :3].all(), "a slot is won whether it is seen or not"


def drawn_densely(values, sigmas, errors):
    """Every cell's conversion as the original draws it, with NumPy's own binomial."""
    from scipy.special import ndtr, ndtri

    low, high = ndtr(-2 * errors[:, 0]), ndtr(2 * errors[:, 1])
    z = ndtri(low + np.random.default_rng(1).random(values.shape) * (high - low))
    return np.random.default_rng(1).binomial(1, np.clip(values + sigmas * z, 0, 1)).astype(bool)


# with 2.0 real values fall to 0 where predicted ones are not
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_auctionnets_draws_skip_values_of_zero_and_restart(spread):
    rng = np.random.default_rng(5)
    values = rng.random((500, 6)) * (rng.random((500, 6)) < 0.8)
    sigmas = spread * values
    bids = rng.random((500, 6))
    errors = rng.random((6, 2))
    assert (
        spread < 1
        or (np.clip(values - 2 * sigmas * errors[:, 0], 0, 1) == 0).sum() > (values == 0).sum()
    )
    expected = drawn_densely(values, sigmas, errors)
    for _ in range(2):
        outcome = auction(bids, values, sigmas, errors, draws=AuctionNetDraws)
        np.testing.assert_array_equal(outcome.converted, expected & outcome.exposed)
    assert outcome.converted.any()


def test_our_draws_agree_with_auctionnets_in_distribution():
    values, sigmas = next(opportunities(3, total=2_000_000, scale=40))
    bids, errors = values * PUBLISHED["target_cpa"], noise(3)
    theirs, ours = (
        auction(bids, values, sigmas, errors, draws=draws, seed=4)
        for draws in (AuctionNetDraws, Draws)
    )
    (a, converted), (b, own) = ((made.exposed, made.converted.sum()) for made in (theirs, ours))
    assert (a != b).any()
    np.testing.assert_allclose(a.mean(0), b.mean(0), atol=4 * (0.5 / len(values)) ** 0.5)
    assert converted == pytest.approx(own, abs=4 * (2 * own) ** 0.5) and own > 1000


def test_exposed_ads_convert_at_their_value_in_every_slot():
    n = 60_000
    bids = np.tile([4.0, 3.0, 2.0, 1.0], (n, 1))
    values = np.full((n, 4), 0.3)
    # the error is symmetric here
    outcome = auction(bids, values, 0.1 * np.ones((n, 4)), np.ones((4, 2)))
    rate = outcome.converted.sum(0)[:3] / outcome.exposed.sum(0)[:3]
    np.testing.assert_allclose(rate, 0.3, atol=4 * (0.21 / (0.48 * n)) ** 0.5)
    # it only ever adds
    kind = auction(bids, values, 0.1 * np.ones((n, 4)), np.tile([0.0, 1.0], (4, 1)))
    assert (kind.converted.sum(0)[:3] / kind.exposed.sum(0)[:3] > 0.35).all()


def test_draws_repeat_with_their_seed():
    values, sigmas = next(opportunities(3, total=50_000, scale=100))
    a, b, c = (auction(values, values, sigmas, noise(3), seed=seed) for seed in (1, 1, 2))
    assert (a.converted == b.converted).all() and (a.exposed == b.exposed).all()
    assert (a.converted != c.converted).any() and (a.exposed != c.exposed).any()


def test_spend_stays_in_budget_and_only_short_budgets_lose_bids():
    values, sigmas = next(opportunities(2, total=100_000))
    bids = 100 * values
    free = auction(bids, values, sigmas, noise(2))
    left = np.full(48, 1e9)
    left[[3, 20]] = (0.4 * free.outcome.sum_by_advertiser(free.outcome.exposed, free.outcome.cost))[
        [3, 20]
    ]
    for draws in (AuctionNetDraws, Draws):
        retained, outcome = settle(bids, values, sigmas, noise(2), left, draws=draws)
        owed = outcome.sum_by_advertiser(outcome.exposed, outcome.cost)
        assert (owed <= left).all() and (owed > 0.5 * left)[[3, 20]].all() and outcome.rounds > 1
        assert sorted(set(np.nonzero(retained != bids)[1])) == [3, 20]
        again = auction(retained, values, sigmas, noise(2), draws=draws)
        # the auction of the bids that remained
        np.testing.assert_array_equal(again.price, dense(outcome).price)


def test_misshapen_input_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"sigmas: expected \(2, 3\) as values are \(2, 3\), got \(2, 2\)"
    ):
        auction(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 2)), np.ones((3, 2)))


# --- a period


def test_a_period_of_the_reference_roster_is_auctionnets(period=7):
    """Each bidder must bid like the original at each step; where it does, the original's bid is
    played, because float32 sums differ between machines in the seventh digit, and one auction in a
    million hangs on that."""
    golden = columns("reference_roster_periods_0_7.parquet")
    x = {
        name: column[golden["episode"] == period].reshape(48, 48) for name, column in golden.items()
    }
    market = Market(roster(), settle=auctionnet_settle)
    market.reset(period)
    bids = np.zeros(48)
    while not market.ended:
        t = market.campaigns.now
        for positions, bidder in market.roster:
            bids[positions] = np.maximum(
                bidder.act(market.observe(bidder.features)[positions], market.context(positions)), 0
            )
        step = market.step(np.where(np.abs(bids - x["action"][t]) < 1e-4, x["action"][t], bids))
        for name, made in (
            ("wins", step.won),
            ("exposed", step.exposed),
            ("conversions", step.conversions),
            ("done", step.done),
        ):
            np.testing.assert_array_equal(made, x[name][t], err_msg=f"{name}, step {t}")
        for name, made, bound in (
            ("action", step.multipliers, 1e-4),
            ("spend", step.spend, 1e-4),
            ("remainingBudget", step.remaining, 1e-3),
            ("reward_continuous", step.exposed_value, 1e-9),
            ("lwc_mean", step.means[MEANS.index("market_price")], 1e-6),
        ):
            np.testing.assert_allclose(
                made, x[name][t], rtol=0, atol=bound, err_msg=f"{name}, step {t}"
            )


@pytest.mark.slow
def test_a_period_played_freely_ends_like_auctionnets():
    golden = columns("reference_roster_periods_0_7.parquet")
    x = {name: column[golden["episode"] == 0].reshape(48, 48) for name, column in golden.items()}
    made = Market(roster(), settle=auctionnet_settle).play(0)
    assert made.conversions.sum() == pytest.approx(x["conversions"].sum(), rel=0.03)
    np.testing.assert_allclose(made.spend.sum(0), x["spend"].sum(0), rtol=0.05, atol=20)


def test_spend_never_exceeds_the_budget_and_done_repeats():
    market = Market(roster(), traffic=small, budget_factor=0.004)
    made = market.play(1)
    assert (made.spend.sum(0) <= market.budgets).all()
    out = made.remaining < 0.1
    assert out.any() and not out.all()
    np.testing.assert_array_equal(made.done, out | (np.arange(48) == 47)[:, None])
    assert (np.diff(made.done.astype(int), axis=0) >= 0).all()
    for name in ("won", "spend", "chosen_multipliers", "multipliers"):
        assert not getattr(made, name)[out].any(), name
    assert market.budgets.tolist() == [0.004 * budget for budget in PUBLISHED["budgets"]]


def test_a_period_is_its_steps_stacked():
    market, steps = Market(roster(), traffic=small), []
    market.reset(2)
    while not market.ended:
        steps.append(market.step())
    made = Market(roster(), traffic=small).play(2)
    for name in (
        "states",
        "remaining",
        "done",
        "chosen_multipliers",
        "multipliers",
        "volume",
        "means",
        "won",
        "spend",
        "conversions",
    ):
        np.testing.assert_array_equal(
            getattr(made, name), [getattr(step, name) for step in steps], err_msg=name
        )
    assert [len(prices) for prices in made.market_prices] == made.volume.tolist()
    np.testing.assert_allclose(
        [p.mean() for p in made.market_prices], made.means[:, MEANS.index("market_price"), 0]
    )
    np.testing.assert_allclose(made.means[:, MEANS.index("won")] * made.volume[:, None], made.won)
    np.testing.assert_allclose(
        made.remaining[-1] - made.spend[-1], market.budgets - made.spend.sum(0)
    )
    np.testing.assert_allclose(market.campaigns.spend, made.spend.sum(0))
    values = np.stack([v.mean(0) for v, _ in small(2)])
    np.testing.assert_allclose(made.states[:, :, 12], values)
    np.testing.assert_allclose(made.means[:, MEANS.index("bid")], made.multipliers * values)
    assert (made.multipliers <= np.maximum(made.chosen_multipliers, 0) + 1e-9).all(), (
        "bids are only ever taken back"
    )


def test_given_multipliers_replace_the_rosters_for_a_step():
    market = Market([([0, 1, 2], Constant(50.0))], **three)
    market.reset(0)
    assert market.step().chosen_multipliers.tolist() == [50, 50, 50]
    assert market.step([70.0], [1]).chosen_multipliers.tolist() == [50, 70, 50]
    assert market.step([1.0, 2.0, 3.0]).chosen_multipliers.tolist() == [1, 2, 3]
    assert market.step().chosen_multipliers.tolist() == [50, 50, 50]


def test_a_later_pair_takes_a_position_from_an_earlier_one():
    first = Market([([0, 1, 2], Constant(50.0)), ([2], Constant(60.0))], **three)
    first.reset(0)
    assert first.step().chosen_multipliers.tolist() == [50, 50, 60]
    covered = Market([([1], Constant(60.0)), ([0, 1, 2], Constant(50.0))], **three)
    covered.reset(0)
    assert covered.step().chosen_multipliers.tolist() == [50, 50, 50]


def test_a_bidder_receives_its_own_features():
    class Seen(Bidder):
        def __init__(self, features):
            self.features, self.states = features, []

        def act(self, states, context):
            self.states.append(states)
            return np.full(len(states), 100.0)

    bidders = [Seen("original"), Seen("repaired")]
    made = Market([([0, 1], bidders[0]), ([2], bidders[1])], **three).play(0)
    seen = np.stack(bidders[0].states), np.stack(bidders[1].states)
    assert seen[0].shape == (48, 2, 16) and seen[1].shape == (48, 1, 16)
    np.testing.assert_array_equal(seen[1], made.states[:, 2:])
    np.testing.assert_array_equal(seen[0][:4], made.states[:4, :2])
    np.testing.assert_array_equal(seen[0][20, :, 9], seen[0][3, :, 9])
    assert (seen[0][20, :, 9] != made.states[20, :2, 9]).all()


def test_a_step_without_opportunities_brings_nothing():
    def sparse(period):
        for t, (values, sigmas) in enumerate(opportunities(period, total=3000, advertisers=3)):
            yield (values[:0], sigmas[:0]) if t == 5 else (values, sigmas)

    made = Market([([0, 1, 2], TargetCPA())], **three | {"traffic": sparse}).play(0)
    assert made.volume[5] == 0 and made.volume[4] > 0
    assert not made.spend[5].any() and not made.means[5].any()
    assert np.isfinite(made.states).all()


def test_wrong_markets_are_refused():
    market = Market([([0, 2], TargetCPA())], **three)
    market.reset(0)
    with pytest.raises(
        ValueError,
        match="step 0: expected a multiplier for every advertiser, got nan for 1; give one, or put",
    ):
        market.step()
    with pytest.raises(ValueError, match="got inf for 2"):
        market.step([1, 2, np.inf])
    for _ in range(48):
        market.step([1.0], [1])
    with pytest.raises(ValueError, match="the period is over"):
        market.step([1.0], [1])
    with pytest.raises(
        ValueError, match="target_cpa: expected one an advertiser, 2 as budgets has"
    ):
        Market(budgets=[1, 2], target_cpa=[1])
    with pytest.raises(ValueError, match="expected values for 2 advertisers, got 3 in step 0"):
        Market(budgets=[1, 2], target_cpa=[1, 2], traffic=three["traffic"]).reset(0)
    with pytest.raises(ValueError, match="expected 48 steps, period 0 has 2"):
        Market(
            [([0, 1, 2], TargetCPA())],
            **three | {"traffic": lambda period: list(three["traffic"](period))[:2]},
        ).play(0)
    with pytest.raises(
        ValueError, match="expected finite values, got others in step 0 of period 0"
    ):
        Market(
            **three | {"traffic": lambda period: [(np.full((2, 3), np.nan), np.zeros((2, 3)))]}
        ).reset(0)
