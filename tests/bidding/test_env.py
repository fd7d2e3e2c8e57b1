"""The auction's evaluation: purchases worked by hand, the original's own spend, one batch that is
each campaign alone, one row a budget.
"""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from decisionllm.bidding.env import Auction
from decisionllm.bidding.logs import replay_days as days
from decisionllm.bidding.market.advertisers import PUBLISHED, industries
from decisionllm.bidding.market.bidders import Constant, TargetCPA, roster
from decisionllm.bidding.market.campaigns import STATE, Campaigns, score
from decisionllm.bidding.market.market import Bidder, Market
from decisionllm.bidding.market.observation import ObservationSpec, task_text
from decisionllm.bidding.market.price_replay import price_period
from decisionllm.bidding.market.simulation import load_priced_period
from decisionllm.bidding.market.traffic import opportunities, scaled_traffic
from decisionllm.eval import report
from decisionllm.eval.rollout import rollout
from tests.bidding.test_dataset import put
from tests.bidding.test_dataset import traffic as log
from tests.conftest import NANO, command, near

FIXTURES = Path(__file__).parents[1] / "fixtures" / "auctionnet"
SMALL = {"opportunities": 2000}  # a period of so many
CHEAP = {"opportunities": 50_000}  # so that a price is small beside what may be left


class Always:
    """The same multiplier for all campaigns, or one each."""

    def __init__(self, multiplier, tasks):
        self.multiplier = np.broadcast_to(multiplier, len(tasks)).astype(float)

    def act(self, observations, rewards=None, action_masks=None):
        return self.multiplier[:, None]

    def select(self, rows):
        self.multiplier = self.multiplier[rows]


def always(multiplier):
    return lambda tasks: Always(multiplier, tasks)


def played(env, begin, seed=0):
    """(conversions, spend, exposed value) of each campaign."""
    episodes = rollout(begin, env, seed=seed)
    c = env.campaigns
    return episodes, np.stack([c.conversions, c.spend, c.exposed_value], 1)


OWN01, OWN0 = (f"replay {p}, own market prices" for p in ("0-1", "0"))
THREE = np.array([[0.5], [0.25], [0.125]])  # values of three opportunities for one advertiser


def bought(multiplier, remaining, *, sigma=0.0, values=THREE, keys=((0,),)):
    """What one campaign buys of three opportunities that cost 1 each."""
    traffic = [(values, np.full_like(values, sigma))]
    day = days.build_day(0, traffic, [np.ones(len(values))], prices="test")
    made = price_period(day).step(
        0,
        np.zeros(len(keys), int),
        np.full(len(keys), multiplier),
        np.full(len(keys), remaining),
        keys=np.array(keys),
    )
    return {name: np.broadcast_to(x, len(keys)) for name, x in made.items()}


@pytest.mark.parametrize(
    ("multiplier", "won"),
    [(1.99, 0), (2.0, 1), (3.99, 1), (4.0, 2), (8.0, 3), (1e9, 3), (0.0, 0), (-5.0, 0)],
)
def test_a_bid_of_at_least_the_price_wins_and_pays_it(multiplier, won):
    made = bought(multiplier, 100.0)
    assert made["won"][0] == pytest.approx(won / 3) and made["spend"][0] == won
    assert made["exposed_value"][0] == THREE[:won].sum()
    assert (
        made["bid"][0] == pytest.approx(max(multiplier, 0) * 0.875 / 3)
        and made["market_price"][0] == 1
    )
    assert made["value"][0] == pytest.approx(0.875 / 3) and made["volume"][0] == 3


def test_a_short_budget_keeps_random_wins_that_it_can_pay():
    made = bought(8.0, 2.5, keys=[(k,) for k in range(900)])
    assert (made["spend"] == 2).all() and made["won"] == pytest.approx(2 / 3)
    lost = 0.875 - made["exposed_value"]
    shares = [np.isclose(lost, value).mean() for value in THREE[:, 0]]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.06) and sum(shares) == pytest.approx(1)
    # a bid that was taken back is none
    np.testing.assert_allclose(made["bid"], 8 * (0.875 - lost) / 3)
    none = bought(8.0, 0.5)
    assert (
        none["spend"][0]
        == none["won"][0]
        == none["exposed_value"][0]
        == none["conversions"][0]
        == none["bid"][0]
        == 0
    )


def test_a_win_converts_as_often_as_its_value_says():
    keys = [(k,) for k in range(4000)]
    for sigma in (0.0, 0.1):
        made = bought(8.0, 100.0, sigma=sigma, keys=keys)
        assert made["conversions"].mean() == pytest.approx(0.875, abs=0.04)  # four deviations
    wide = bought(8.0, 100.0, sigma=1.0, keys=keys, values=np.full((3, 1), 1.0))["conversions"]
    assert wide.mean() == pytest.approx(3 * 0.68438, abs=0.05), (
        "half are 1, of the rest what is above 0: norm.expect"
    )


def test_conversions_do_not_depend_on_the_winning_multiplier():
    values = np.full((400, 1), 0.5) / np.linspace(1, 2, 400)[:, None]
    result = [
        bought(m, 1e9, values=values, sigma=0.05)["conversions"][0] for m in np.linspace(2, 4.1, 60)
    ]
    assert (np.diff(result) >= 0).all() and result[0] == 0 and result[-1] > 100


def test_spend_is_that_of_auctionnets_offline_evaluation():
    """Advertisers 43 and 44 of period 8, which bid their target CPAs.

    Some prices were set by the very bids of 43, and it wins these.
    """
    with np.load(FIXTURES / "prices_period_8_of_advertisers_43_44.npz") as file:
        counts, prices = [], np.full(600_000, 1e6)
        prices[file["opportunity"]] = file["price"]

    def steps():
        for values, sigmas in opportunities(8):
            counts.append(len(values))
            yield values[:, [43, 44]], sigmas[:, [43, 44]]

    of_steps = (prices[sum(counts[:-1]) : sum(counts)] for _ in range(48))
    day = price_period(days.build_day(8, steps(), of_steps, prices="test"))
    spend = np.zeros(2)
    for step in range(48):
        made = day.step(
            step, np.arange(2), np.array([80.0, 60.0]), np.full(2, 1e9), keys=np.array([[43], [44]])
        )
        spend += made["spend"]
    assert spend == pytest.approx([223.0733887636743, 21.257614050488883], rel=1e-9)


def test_campaigns_have_their_own_budgets_and_target_cpas():
    env = Auction(1, periods="0-1", **SMALL)
    env.reset(0)
    assert len(env.tasks) == 96 and env.campaigns.budgets.tolist() == PUBLISHED["budgets"] * 2
    assert env.campaigns.target_cpa.tolist() == PUBLISHED["target_cpa"] * 2
    assert len(Auction(97, periods="0-1", **SMALL).tasks) == 192, (
        "with other draws, until there are so many"
    )
    assert len(Auction(97, periods="0-1", budgets="0.5,1", **SMALL).tasks) == 384


def test_spend_stays_within_the_budget():
    env = Auction(1, periods="0", positions="0-15", budgets=[0.01, 1, 3], **CHEAP)
    episodes, results = played(env, always(1e4))
    assert (results[:, 1] <= env.campaigns.budgets).all() and results[
        :, 1
    ].sum() > 0.9 * env.campaigns.budgets.sum()
    assert (env.campaigns.remaining >= 0).all()
    assert [e.terminated for e in episodes] == (env.campaigns.remaining < 0.1).tolist(), (
        "an episode ends with its money"
    )
    assert np.mean([len(e.rewards) < 48 for e in episodes]) > 0.3


def test_a_batch_of_campaigns_equals_each_campaign_alone():
    options = {"periods": "0-1", **SMALL}
    whole = Auction(1, budgets="0.5,1", repeats=2, **options)
    _, together = played(whole, lambda tasks: whole.player(TargetCPA(), tasks), seed=5)
    assert len({tuple(row) for row in together.tolist()}) > 300, "repeats and budgets differ"
    for i in (3, 47):
        alone = Auction(1, positions=str(i), repeats=2, **options)
        _, one = played(alone, lambda tasks, env=alone: env.player(TargetCPA(), tasks), seed=5)
        rows = np.flatnonzero((whole.entries.advertiser == i) & (whole.entries.budget_factor == 1))
        assert together[rows].tolist() == one.tolist()
    assert (
        played(alone, always(80.0), seed=6)[1].tolist()
        != played(alone, always(80.0), seed=7)[1].tolist()
    )


def test_expected_draws_are_the_mean_of_many_others():
    options = {"periods": "0", "positions": "0-7", **SMALL}
    (_, exact), (_, drawn) = (
        played(Auction(1, **options, **more), always(30.0))
        for more in ({"draws": "expected"}, {"repeats": 200})
    )
    mean = drawn.reshape(200, 8, 3).mean(0)
    assert exact[:, 0].tolist() == exact[:, 2].tolist() and exact[:, 0].sum() > 20
    assert mean[:, 0].sum() == pytest.approx(exact[:, 0].sum(), rel=0.02)
    np.testing.assert_allclose(mean[:, 0], exact[:, 0], atol=4 * np.sqrt(exact[:, 0].max() / 200))
    for seed in (1, 2):  # no campaign runs out of budget, so nothing is drawn
        assert (
            played(Auction(1, **options, draws="expected"), always(30.0), seed)[1].tolist()
            == exact.tolist()
        )


def test_observations_follow_from_the_results_of_each_step(tmp_path):
    """Two steps of one advertiser against prices of a file, with the book kept by hand."""
    steps = list(islice(scaled_traffic(0, 2000), 48))
    market = [np.linspace(0.5, 9, len(values)) for values, _ in steps]
    days.save_day(tmp_path, days.build_day(0, steps, market, prices="test", total=2000))
    env = Auction(
        1, periods="0", positions="9", path=str(tmp_path), context_features="progress", **SMALL
    )
    seen = [env.reset(0)]
    book = Campaigns([PUBLISHED["budgets"][9]], [PUBLISHED["target_cpa"][9]])
    for step, multiplier in ((0, 40.0), (1, 60.0)):
        values, prices = steps[step][0][:, 9], market[step]
        expected = ObservationSpec(context_features="progress").observe(
            book, [values.mean()], len(values)
        )
        np.testing.assert_allclose(seen[-1], expected, rtol=1e-9)
        after, rewards, ended, truncated = env.step(np.array([[multiplier]]))
        seen.append(after)
        wins = multiplier * values >= prices
        assert 0 < wins.sum() < len(values) and not ended.any() and not truncated.any()
        book.record(
            bid=(multiplier * values).mean(),
            market_price=prices.mean(),
            value=values.mean(),
            conversion=rewards[0] / len(values),
            won=wins.mean(),
            volume=len(values),
            spend=prices[wins].sum(),
            conversions=rewards[0],
            exposed_value=values[wins].sum(),
        )


def small_market(period):
    """Traffic of 2,000 opportunities, and the prices of our own market."""
    traffic = list(scaled_traffic(period, 2000))
    return traffic, Market(roster(), traffic=lambda p: scaled_traffic(p, 2000)).play(
        period
    ).market_prices


def test_days_of_our_market_replay_like_our_market(tmp_path):
    days.save_day(tmp_path, days.build_day(3, *small_market(3), prices="test", total=2000))
    (_, own), (_, read) = (
        played(Auction(1, periods="3", path=path, **SMALL), always(50.0))
        for path in ("", str(tmp_path))
    )
    assert own.tolist() == read.tolist() and own[:, 1].sum() > 0


@pytest.mark.parametrize("reward", ["conversions", "expected_value", "score"])
def test_rewards_add_up_and_do_not_change_the_score(reward):
    env = Auction(1, periods="0", reward=reward, **SMALL)
    episodes, results = played(env, always(120.0))
    conversions, spend, value = results.T
    total = {
        "conversions": conversions,
        "expected_value": value,
        "score": score(value, spend, env.target_cpa),
    }[reward]
    near([e.rewards.sum() for e in episodes], total)
    limit = env.target_cpa
    by_hand = [
        n * min(1, (limit[i] * n / s) ** 2) if s else n for i, (n, s, _) in enumerate(results)
    ]
    np.testing.assert_allclose(env.score(episodes), by_hand)
    assert (np.array(by_hand) < conversions).any()
    np.testing.assert_allclose(env.score(episodes[5:7]), by_hand[5:7])


def test_observations_and_texts_are_those_of_the_dataset():
    options = {
        "observation": "minimal",
        "context_features": "budget_and_cpa",
        "text": "informative",
    }
    minimal = Auction(1, periods="0", positions="0,9", budgets="0.5", **options, **SMALL)
    assert minimal.reset(0).shape == (2, 7)
    assert minimal.tasks == [task_text(1450, 100, 0), task_text(1000, 130, 1)]
    assert Auction(1, periods="0", text="constant", **SMALL).tasks == [task_text()] * 48
    informative, shuffled = (
        Auction(1, periods="0-1", budgets="1,2", text=text, **SMALL)
        for text in ("informative", "shuffled")
    )
    blocks = lambda tasks: [sorted(tasks[k : k + 48]) for k in range(0, 192, 48)]  # noqa: E731
    assert blocks(informative.tasks) == blocks(shuffled.tasks), (
        "shuffled within a period and a budget"
    )
    assert sum(a != b for a, b in zip(informative.tasks, shuffled.tasks, strict=True)) > 150


def test_a_bidder_receives_its_own_features():
    env = Auction(1, periods="0", observation="minimal", **CHEAP)
    calls = []

    class Watched(Bidder):
        features = "original"

        def act(self, states, context):
            calls.append((states, context))
            return np.full(len(states), 100.0)

    episodes, _ = played(env, lambda tasks: env.player(Watched(), tasks))
    states, context = calls[6]
    own = Campaigns(PUBLISHED["budgets"], PUBLISHED["target_cpa"])
    own.means = env.campaigns.means
    own.volumes = env.campaigns.volumes
    own.now = 6
    recent = [
        STATE.index(name) for name in ("bid, last 3", "market price, last 3", "value, last 3")
    ]
    assert states.shape == (48, 16)
    np.testing.assert_allclose(states[:, recent], own.observe(0, 0, features="original")[:, recent])
    assert not np.allclose(states[:, recent], own.observe(0, 0)[:, recent])
    assert (
        context.step == 6
        and context.categories.tolist() == industries(48).tolist()
        and (context.remaining > 0).all()
    )
    ends = {len(e.rewards) for e in episodes}
    assert len(ends) > 1 and all((e.actions == 100).all() for e in episodes), (
        "those that go on are answered for"
    )


@pytest.mark.slow
def test_every_baseline_plays():
    env = Auction(1, periods="0", positions="0-7", **SMALL)
    players = env.baselines(0)
    assert set(players) == {
        "target CPA",
        "AuctionNet DT",
        "PID",
        "OnlineLP",
        "IQL",
        "BC",
        "CQL",
        "TD3_BC",
        "MOPO",
        "COMBO",
        "best constant, hindsight",
    }
    first = played(env, players["PID"])[1].tolist()
    for begin in players.values():
        assert len(played(env, begin)[0]) == 8
    assert played(env, players["PID"])[1].tolist() == first, "it begins each period anew"


def test_each_budget_has_a_row_with_its_own_metrics():
    env = Auction(1, periods="0-1", budgets="1,0.5,1.25", **SMALL)
    episodes, results = played(env, always(60.0))
    parts = env.conditions("per_agent", False)
    assert (
        list(parts) == [OWN01, f"{OWN01}, 50 %", f"{OWN01}, 125 %"]
        and [len(rows) for rows in parts.values()] == [96] * 3
    )
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(288))
    assert env.campaigns.budgets[parts[f"{OWN01}, 50 %"]].tolist() == [
        b / 2 for b in PUBLISHED["budgets"] * 2
    ]
    for rows in parts.values():
        part = [episodes[i] for i in rows]
        conversions, spend, _ = results[rows].T
        result, limit = env.metrics(part), env.target_cpa[rows]
        assert result["conversions"] == pytest.approx(conversions.mean(), abs=1e-4)
        assert result["budget_used"] == pytest.approx((spend / env.budgets[rows]).mean(), abs=1e-4)
        some = conversions > 0
        assert result["cpa_ratio"] == pytest.approx(
            (spend / limit)[some].dot(1 / conversions[some]) / some.sum(), abs=1e-4
        )
        over = [
            s > 0 and (n == 0 or s / n > limit[i])
            for i, (n, s) in enumerate(zip(conversions, spend, strict=True))
        ]
        assert result["over_limit"] == pytest.approx(np.mean(over), abs=1e-4)
        scores = env.score(part)
        assert result["by_category"]["2"] == pytest.approx(
            np.mean([*scores[16:24], *scores[64:72]]), abs=1e-4
        )
        assert result["by_period"]["1"] == pytest.approx(scores[48:].mean(), abs=1e-4)
        assert result["by_budget"]["small"] == pytest.approx(
            scores[np.array(PUBLISHED["budgets"] * 2) < 2500].mean(), abs=1e-4
        )
        assert len(result["by_category"]) == 6 and set(result["by_budget"]) == {
            "small",
            "medium",
            "large",
        }


def test_repetitions_of_a_campaign_are_one_cluster():
    env = Auction(1, periods="0-1", budgets="1,0.5", repeats=3, **SMALL)
    campaigns = set()
    for number in np.unique(env.clusters):
        rows = np.flatnonzero(env.clusters == number)
        assert sorted(env.entries.repeat[rows]) == [0, 1, 2]
        campaign = {env.entries.period[row] for row in rows}, {env.budgets[row] for row in rows}
        assert [len(values) for values in campaign] == [1, 1]
        (advertiser,) = {env.entries.advertiser[row] for row in rows}
        campaigns.add((*campaign[0], *campaign[1], advertiser))
    assert len(campaigns) == 2 * 2 * 48


def test_scores_and_metrics_follow_from_the_episodes_alone():
    """100 conversions of 50 currency each at a target of 100 keep their score; at 200 each a
    quarter of it is left.
    """
    env = Auction(1, periods="0", positions="0,9", **SMALL)
    first, _ = played(env, always(60.0))
    scores, metrics = env.score(first).tolist(), env.metrics(first)
    played(env, always(5.0), seed=1)
    assert env.score(first).tolist() == scores and env.metrics(first) == metrics
    outcomes = [
        {"conversions": 100.0, "spend": spend, "target_cpa": 100.0} for spend in (5000.0, 20000.0)
    ]
    assert env.score(
        [replace(e, outcome=o) for e, o in zip(first, outcomes, strict=True)]
    ).tolist() == [100, 25]


def test_half_a_budget_lasts_for_less():
    env = Auction(1, periods="0", budgets="0.5,1,1.5", **SMALL)
    episodes, _ = played(env, always(60.0))
    half, whole, more = (
        env.score([episodes[i] for i in rows]).mean()
        for rows in env.conditions("per_agent", False).values()
    )
    assert half < 0.8 * whole and whole < 0.9 * more


@pytest.mark.slow
def test_each_position_is_played_in_its_own_market():
    env = Auction(100, protocol="market", periods="0-1", positions="3,40", **SMALL)
    assert (
        len(env.tasks) == 4
        and env.protocol == "market 0-1"
        and len(Auction(1, protocol="market", **SMALL).tasks) == 12
    )
    episodes, results = played(env, always([60.0, 70.0, 80.0, 90.0]), seed=2)
    for k, (period, position, multiplier) in enumerate(
        [(0, 3, 60.0), (0, 40, 70.0), (1, 3, 80.0), (1, 40, 90.0)]
    ):
        one = [*roster(), ([position], Constant(multiplier))]
        made = Market(
            one, traffic=lambda p: scaled_traffic(p, 2000), seed=seeded(2, 0, position)
        ).play(period)
        n = len(episodes[k].rewards)
        assert results[k].tolist() == [
            made.conversions.sum(0)[position],
            made.spend[:n, position].cumsum()[-1],
            pytest.approx(made.exposed_value[:, position].sum()),
        ]
        near(episodes[k].observations, made.states[:n, position], 1e-6, axis=0)
        assert episodes[k].rewards.tolist() == made.conversions[:n, position].tolist()


def seeded(*numbers):
    """A market's seed: of the rollout, the repeat and the first of our positions."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def test_in_a_market_only_our_budget_is_another():
    env = Auction(1, protocol="market", periods="0", positions="5", budgets="0.5,1", **SMALL)
    env.reset(0)
    result = [market.budgets / PUBLISHED["budgets"] for market, _ in env.simulation.markets]
    assert [f[5] for f in result] == [0.5, 1] and all((np.delete(f, 5) == 1).all() for f in result)
    assert list(env.conditions("per_agent", False)) == ["market 0, 50 %", "market 0"]


def test_the_picture_shows_spend_multiplier_and_cost():
    env = Auction(1, periods="0", **SMALL)
    episodes, results = played(env, always(60.0))
    spend, multiplier, cost = env.draw(episodes, "title").axes
    mean = [axis.lines[4].get_ydata() for axis in (spend, multiplier, cost)]
    assert (
        mean[0][-1] == pytest.approx(results[:, 1].sum() / env.budgets.sum())
        and (np.diff(mean[0]) >= 0).all()
    )
    assert np.nanmin(mean[1]) == pytest.approx(60) == np.nanmax(mean[1]), "of those that still bid"
    assert mean[2][-1] == pytest.approx(results[:, 1].sum() / (results[:, 0] @ env.target_cpa))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "online"}, "env.protocol: expected one of replay, market, got 'online'"),
        ({"draws": "none"}, "env.draws: expected one of bernoulli, expected, got 'none'"),
        ({"periods": "x"}, "env.periods: expected such as 0-6 or 7,8, got 'x'"),
        ({"periods": ""}, "env.periods: expected such as 0-6 or 7,8, got ''"),
        (
            {"budgets": "0,1"},
            "env.budgets: expected factors above 0, such as 0.5,1 and each once, got '0,1'",
        ),
        ({"budgets": [-1]}, "env.budgets: expected factors above 0"),
        ({"budgets": "1,1"}, "each once, got '1,1'"),
        ({"budgets": "half"}, "got 'half'"),
        ({"positions": "47,48"}, "env.positions: expected 0 .. 47, got 48"),
        ({"positions": "-1"}, "env.positions: expected such as"),
        ({"opportunities": 0}, "env.opportunities: expected 1 or more, got 0"),
        ({"repeats": -1}, "env.repeats: expected 0 or more, got -1"),
        ({"protocol": "market", "path": "prices"}, "env.path: a market makes its own prices"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        Auction(1, **options)
    assert message in str(error.value)


def test_a_missing_day_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"expected period_7.npz in .*; there are periods none; `decisionllm data ",
    ):
        Auction(1, path=str(tmp_path))
    days.save_day(tmp_path, days.build_day(7, *small_market(7), prices="test", total=2000))
    with pytest.raises(FileNotFoundError, match=r"expected period_8.npz in .*there are periods 7;"):
        Auction(1, path=str(tmp_path))


def test_evaluations_of_different_days_both_stand_in_the_table(tmp_path):
    """Two rows of one run that differ in the days alone."""
    days.save_day(tmp_path, days.build_day(0, *small_market(0), prices="test", total=2000))
    names = [
        Auction(1, periods=p, path=path, **SMALL).protocol
        for p, path in (("0", ""), ("0", str(tmp_path)), ("1", ""))
    ]
    assert names == [
        "replay 0, own market prices",
        "replay 0, test prices",
        "replay 1, own market prices",
    ]
    assert Auction(1, protocol="market", periods="3,5-6", **SMALL).protocol == "market 3,5-6"
    row = {
        "dataset": "d",
        "policy": "p",
        "text": "none",
        "target_return": None,
        "headline": True,
        "decode": "mode",
        "seed": 0,
        "run": "r",
        "score": 1.0,
        "low": 0.0,
        "high": 2.0,
        "return": 1.0,
        "n": 1,
        "seconds": 0.0,
    }
    (tmp_path / "results.jsonl").write_text(
        "\n".join(json.dumps(row | {"protocol": name}) for name in names), encoding="utf-8"
    )
    results = report.summarise(report.read_rows(tmp_path))
    assert {result["protocol"] for result in results} == {*names}
    (table,) = report.tables(results)
    assert len({column.header for column in table.columns}) == len(names) + 1, "and the policy"


@pytest.mark.slow
def test_the_best_constant_in_hindsight_bounds_every_other_constant():
    env = Auction(1, periods="0-1", positions="0-7", repeats=10, **SMALL)
    episodes, _ = played(env, env.baselines(0)["best constant, hindsight"])
    best = env.score(episodes).reshape(10, 16).mean(0)
    others = [
        env.score(played(env, always(m))[0]).reshape(10, 16).mean(0) for m in (50.0, 70.0, 90.0)
    ]
    assert best.mean() > np.max(others, 0).mean() - 0.5
    assert env.metrics(episodes)["share_of_best_constant"] == pytest.approx(1, abs=0.05), (
        "the replay of rows and that of curves"
    )


def test_pooled_online_lp_is_a_baseline_where_days_are_given(tmp_path):
    days.save_day(tmp_path, days.build_day(0, *small_market(0), prices="test", total=2000))
    env = Auction(1, periods="0", table_days=str(tmp_path), **SMALL)
    assert len(played(env, env.baselines(0)["OnlineLP, pooled"])[0]) == 48
    assert "OnlineLP, pooled" not in Auction(1, periods="0", **SMALL).baselines(0)


@pytest.mark.slow
def test_a_run_is_evaluated_with_a_row_for_each_budget(tmp_path):
    """From a log to the report, by the command line."""
    put(tmp_path / "log.csv", log())
    loop = (
        "window=5",
        "optim.batch_size=8",
        "steps=2",
        "optim.warmup=1",
        "optim.precision=no",
        "device=cpu",
        "log.tracker=none",
    )
    own = (
        "env.opportunities=2000",
        "env.periods='0'",
        "env.positions=0-7",
        "dataset.context_features=budget_and_cpa",
        "dataset.observation=minimal",
    )
    data = (
        "dataset=auction",
        f"dataset.path={tmp_path}/log.csv",
        f"run={tmp_path}/run",
        f"cache_dir={tmp_path}/data",
    )
    train = (*data, *loop, *own, "text=informative")
    assert (
        command("train", *train, *NANO, "name=ours", "data.held_out=0", "log.validation_batches=1")
        == 0
    )
    evaluate = (f"run={tmp_path}/run", f"out={tmp_path}/out", "episodes=3", "+env.budgets=[0.5,1]")
    assert command("evaluate", *evaluate) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "out/results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["policy"], row["protocol"]) for row in rows[:4]] == [
        (policy, protocol)
        for policy in ("ours", "target CPA")
        for protocol in (f"{OWN0}, 50 %", OWN0)
    ]
    assert (
        len(rows) == 24
        and {row["n"] for row in rows} == {8}
        and all("conversions" in row for row in rows)
    )
    assert rows[3]["score"] > rows[2]["score"] > 0
    pictures = {path.name for path in (tmp_path / "out").glob("rollout-*.png")}
    assert (
        "rollout-ours-replay-0-own-market-prices-50--budgets-0.5-1--0.png" in pictures
        and len(pictures) == 12
    ), "one a player"
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert (
        "conversions, with a penalty for exceeding the target CPA" in page
        and f"{OWN0}, 50 %" in page
        and "37.1" in page
    )
    assert load_priced_period.cache_info().hits > 0, "prices are made once"


def test_campaigns_in_many_wordings_and_scores_by_kind_of_held_out_frame():
    env = Auction(1, text="paraphrased", periods="7", **SMALL)
    entries = Auction(1, text="informative", periods="7", **SMALL).tasks
    assert (
        env.tasks[0] == entries[0]
        and env.tasks[1].startswith("Category ")
        and len({*env.tasks}) == 48
    )
    assert (
        "by_kind" not in env.metrics(rollout(always(0.0), env, seed=0))
        and env.protocol == "replay 7, own market prices"
    )
    assert Auction(1, text="paraphrased", periods="7", frames=1, **SMALL).tasks == entries
    held_out = Auction(1, text="paraphrased", wordings="held_out", periods="7", **SMALL)
    assert held_out.protocol == "replay 7, own market prices, held-out wordings" and not {
        *held_out.tasks
    } & {*env.tasks}
    kinds = [held_out.kinds[task] for task in held_out.tasks]
    assert kinds == (["new_frames"] * 7 + ["contrast"] * 7 + ["unseen_words"] * 6) * 2 + [
        "new_frames"
    ] * 7 + ["contrast"]
    episodes = rollout(always(80.0), held_out, seed=0)
    by_kind = held_out.metrics(episodes)["by_kind"]
    scores = held_out.score(episodes)
    assert by_kind == {
        kind: round(float(scores[np.array(kinds) == kind].mean()), 4)
        for kind in ("new_frames", "contrast", "unseen_words")
    }
    with pytest.raises(
        ValueError, match="env.wordings=held_out: needs text=paraphrased, got text=informative"
    ):
        Auction(1, text="informative", wordings="held_out", **SMALL)


def test_campaigns_have_the_text_of_another_advertiser_of_their_day():
    options = {
        "text": "informative",
        "periods": "7-8",
        "positions": "0,1,2,3",
        "budgets": "0.5,1",
        "opportunities": 4800,
    }
    own, other = (Auction(1, **options, text_of=each) for each in ("own", "another"))
    assert other.tasks == [own.tasks[4 * (i // 4) + (i + 2) % 4] for i in range(16)]
    assert (own.budgets == other.budgets).all() and other.protocol.endswith(", words of another")
    with pytest.raises(
        ValueError, match="env.text_of=another: expected two positions or more, got env.positions=3"
    ):
        Auction(1, **options | {"positions": "3"}, text_of="another")
    with pytest.raises(ValueError, match="env.text_of: expected one of own, another, got 'none'"):
        Auction(1, **options, text_of="none")
