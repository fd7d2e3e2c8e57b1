"""State numbers of a campaign by hand over five steps, and the score."""

from functools import partial

import numpy as np
import pytest

from decisionllm.bidding.market.auctions import settle
from decisionllm.bidding.market.bidders import TargetCPA
from decisionllm.bidding.market.campaigns import (
    CONTEXT,
    STATE,
    Campaigns,
    score,
    summarize_opportunities,
    summarize_step,
)
from decisionllm.bidding.market.market import Market
from decisionllm.bidding.market.traffic import opportunities
from tests.bidding.auctionnet_draws import dense

RESULTS = {  # of steps 0 to 4, of one campaign
    "bid": [0.1, 0.2, 0.3, 0.4, 0.5],
    "market_price": [1.0, 2.0, 3.0, 4.0, 5.0],
    "value": [0.01, 0.02, 0.03, 0.04, 0.05],
    "conversion": [0.0, 0.5, 0.0, 0.25, 0.0],
    "won": [1.0, 0.0, 0.5, 0.0, 0.25],
    "volume": [10, 20, 30, 40, 50],
    "spend": [5.0, 0.0, 5.0, 10.0, 0.0],
    "conversions": [1, 0, 2, 0, 0],
    "exposed_value": [0.5, 0.0, 1.5, 1.0, 0.0],
}


def after(steps):
    campaigns = Campaigns([100.0, 50.0], [10.0, 20.0])
    for t in range(steps):
        campaigns.record(**{name: np.array([column[t], 0.0]) for name, column in RESULTS.items()})
    return campaigns


def state(campaigns, **options):
    return dict(
        zip(STATE, campaigns.observe([0.07, 0.0], [60, 0], **options)[0].tolist(), strict=True)
    )


def test_the_first_state_holds_time_budget_and_next_opportunities():
    expected = dict.fromkeys(STATE, 0.0) | {
        "time left": 1,
        "budget left": 1,
        "value now": 0.07,
        "volume now": 60,
    }
    assert state(after(0)) == pytest.approx(expected)


def test_means_are_over_steps_and_over_the_last_three():
    expected = {
        "time left": 43 / 48,
        "budget left": 0.8,
        "bid": 0.3,
        "bid, last 3": 0.4,
        "market price": 3,
        "market price, last 3": 4,
        "value": 0.03,
        "value, last 3": 0.04,
        "conversion": 0.15,
        "conversion, last 3": 0.25 / 3,
        "won": 0.35,
        "won, last 3": 0.25,
        "value now": 0.07,
        "volume now": 60,
        "volume, last 3": 120,
        "volume, all": 150,
    }
    assert state(after(5)) == pytest.approx(expected)


def test_original_features_take_the_first_three_for_the_last():
    campaigns = after(5)
    first = {
        "bid, last 3": 0.2,
        "market price, last 3": 2,
        "value, last 3": 0.02,
        "conversion, last 3": 0.5 / 3,
        "won, last 3": 0.5,
    }
    expected = state(campaigns) | first  # but volumes are counted over the last
    assert state(campaigns, features="original") == pytest.approx(expected)


def test_context_is_budget_target_cpa_and_progress():
    context = dict(zip(CONTEXT, after(5).context()[0].tolist(), strict=True))
    expected = {
        "log budget": np.log(100),
        "target cpa": 10,
        "spend / target cpa": 2,
        "conversions": 3,
        "value exposed": 3,
    }
    assert context == pytest.approx(expected)


def test_multipliers_are_capped_while_the_cpa_is_exceeded():
    campaigns = after(5)  # 20 spent for 3 conversions, 10 allowed for each
    assert campaigns.cap_multipliers(np.array([70.0, 70.0])).tolist() == [70, 70]
    campaigns.record(**{name: np.zeros(2) for name in RESULTS} | {"spend": np.array([10.1, 0.0])})
    assert campaigns.cap_multipliers(np.array([70.0, 70.0])).tolist() == [10, 70]
    assert campaigns.cap_multipliers(np.array([4.0, 70.0])).tolist() == [4, 70]
    # bad luck is not dear
    campaigns.record(
        **{name: np.zeros(2) for name in RESULTS} | {"exposed_value": np.array([0.1, 0.0])}
    )
    assert campaigns.cap_multipliers(np.array([70.0, 70.0])).tolist() == [70, 70]


def test_one_campaign_does_not_see_another():
    assert (
        state(after(5))["won"] == 0.35
        and after(5).observe([0, 0], [0, 0])[1, 1:].tolist() == [1.0] + [0.0] * 14
    )


@pytest.mark.parametrize("wrong", [[100.0, 0.0], [np.nan, 1.0], [[100.0], [1.0]], [-5.0, 1.0]])
def test_a_campaign_without_a_budget_or_a_limit_is_refused(wrong):
    for values in (
        {"budgets": wrong, "target_cpa": [1.0, 1.0]},
        {"budgets": [1.0, 1.0], "target_cpa": wrong},
    ):
        with pytest.raises(ValueError, match="expected one number above 0 a campaign"):
            Campaigns(**values)


def test_the_score_by_hand():
    """Ten conversions for 500 are allowed at 50 each; for 1,000 each costs twice as much, a quarter
    is left.
    """
    assert score([10, 10, 0, 10], [500, 1000, 300, 0], 50).tolist() == [10, 2.5, 0, 10]
    assert score(np.ones((2, 3)), np.ones(3), np.array([[1.0], [0.5]])).tolist() == [
        [1] * 3,
        [0.25] * 3,
    ]


def test_summary_gives_the_markets_numbers_to_the_last_bit():
    retained = []

    def keep(bids, values, *rest, **options):
        left, outcome = settle(bids, values, *rest, **options)
        made = dense(outcome)
        retained.append(
            (
                values,
                left,
                np.stack([made.won, made.slot, made.price], 2),
                np.stack([made.exposed, made.converted], 2),
                made,
            )
        )
        return left, outcome

    market = Market(
        [(np.arange(48), TargetCPA())],
        traffic=partial(opportunities, total=50_000, scale=10),
        settle=keep,
        budget_factor=0.05,
    )
    market.reset(2)
    for step in range(3):
        market.step()
        values, left, auction, impressions, made = retained[step]
        assert len(values) > 300
        for i in (0, 9, 40):
            arguments = summarize_step(
                values[:, i], left[:, i], auction[:, i], impressions[:, i], made.market_price
            )
            alone = Campaigns(market.budgets[[i]], market.target_cpa[[i]])
            alone.record(**arguments)
            assert alone.means[0, :, 0].tolist() == market.campaigns.means[step, :, i].tolist()
            assert (arguments["value"], arguments["volume"]) == summarize_opportunities(
                values[:, i]
            ) and arguments["volume"] == len(values)
    assert any(made.rounds > 1 for *_, made in retained) and market.campaigns.spend[9] > 0, (
        "bids were taken back"
    )
    summaries = [
        summarize_step(v[:, 9], b[:, 9], a[:, 9], s[:, 9], made.market_price)
        for v, b, a, s, made in retained
    ]
    for name in ("spend", "conversions", "exposed_value"):
        assert sum(arguments[name] for arguments in summaries) == getattr(market.campaigns, name)[9]
