"""The auction's evaluation: purchases worked by hand, the original's own spend, one batch that is each campaign alone, one row a budget."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from decisionllm.baselines import rules as bidders
from decisionllm.datasets.auction import shown, task_text
from decisionllm.envs.auction import market as auction
from decisionllm.envs.auction.campaign import STATE, Campaigns, score
from decisionllm.envs.auction.market import PUBLISHED
from decisionllm.envs.auction.replay import offers
from decisionllm.eval.auction import Auction, Bidder, priced, traffic
from decisionllm.eval.rollout import rollout
from tests.conftest import NANO, command, near
from tests.datasets.test_auction import put
from tests.datasets.test_auction import traffic as log

FIXTURES = Path(__file__).parents[1] / "fixtures" / "auctionnet"
SMALL = {"opportunities": 2000}  # a period of so many
CHEAP = {"opportunities": 50_000}  # so that a price is small beside what may be left


class Always:
    """The same multiplier for everybody, or one each."""

    def __init__(self, multiplier, tasks):
        self.multiplier = np.broadcast_to(multiplier, len(tasks)).astype(float)

    def act(self, observations, rewards=None):
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


THREE = np.array([[0.5], [0.25], [0.125]])  # values of three opportunities for one advertiser


def bought(multiplier, remaining, *, sigma=0.0, values=THREE, keys=((0,),)):
    """What one campaign buys of three opportunities that cost 1 each."""
    day = offers(0, [(values, np.full_like(values, sigma))], [np.ones(len(values))])
    made = day.step(
        0, np.zeros(len(keys), int), np.full(len(keys), multiplier), np.full(len(keys), remaining), keys=np.array(keys)
    )
    return {name: np.broadcast_to(x, len(keys)) for name, x in made.items()}


@pytest.mark.parametrize(
    ("multiplier", "won"), [(1.99, 0), (2.0, 1), (3.99, 1), (4.0, 2), (8.0, 3), (1e9, 3), (0.0, 0), (-5.0, 0)]
)
def test_a_bid_wins_where_it_is_at_least_the_price_and_pays_the_price(multiplier, won):
    made = bought(multiplier, 100.0)
    assert made["won"][0] == pytest.approx(won / 3) and made["spend"][0] == won
    assert made["exposed_value"][0] == THREE[:won].sum()
    assert made["bid"][0] == pytest.approx(max(multiplier, 0) * 0.875 / 3) and made["market_price"][0] == 1
    assert made["value"][0] == pytest.approx(0.875 / 3) and made["volume"][0] == 3


def test_who_cannot_pay_keeps_wins_at_random_as_far_as_the_money_goes():
    made = bought(8.0, 2.5, keys=[(k,) for k in range(900)])
    assert (made["spend"] == 2).all() and made["won"] == pytest.approx(2 / 3)
    lost = 0.875 - made["exposed_value"]
    shares = [np.isclose(lost, value).mean() for value in THREE[:, 0]]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.06) and sum(shares) == pytest.approx(1)
    np.testing.assert_allclose(made["bid"], 8 * (0.875 - lost) / 3)  # a bid that was taken back is none
    none = bought(8.0, 0.5)
    assert none["spend"][0] == none["won"][0] == none["exposed_value"][0] == none["conversions"][0] == none["bid"][0] == 0


def test_a_win_converts_as_often_as_its_value_says_with_doubt_and_without():
    keys = [(k,) for k in range(4000)]
    for sigma in (0.0, 0.1):
        made = bought(8.0, 100.0, sigma=sigma, keys=keys)
        assert made["conversions"].mean() == pytest.approx(0.875, abs=0.04)  # four deviations
    wide = bought(8.0, 100.0, sigma=1.0, keys=keys, values=np.full((3, 1), 1.0))["conversions"]
    assert wide.mean() == pytest.approx(3 * 0.68438, abs=0.05), "half are 1, of the rest what is above 0: norm.expect"


def test_an_opportunity_converts_for_every_multiplier_that_buys_it_or_for_none():
    values = np.full((400, 1), 0.5) / np.linspace(1, 2, 400)[:, None]
    found = [bought(m, 1e9, values=values, sigma=0.05)["conversions"][0] for m in np.linspace(2, 4.1, 60)]
    assert (np.diff(found) >= 0).all() and found[0] == 0 and found[-1] > 100


def test_what_the_originals_offline_evaluation_spends_is_spent():
    """Advertisers 43 and 44 of period 8, who bid their limits. Some prices were set by the very bids of 43, and it wins these."""
    with np.load(FIXTURES / "prices_period_8_of_advertisers_43_44.npz") as file:
        counts, prices = [], np.full(600_000, 1e6)
        prices[file["opportunity"]] = file["price"]

    def steps():
        for values, sigmas in auction.opportunities(8):
            counts.append(len(values))
            yield values[:, [43, 44]], sigmas[:, [43, 44]]

    day = offers(8, steps(), (prices[sum(counts[:-1]) : sum(counts)] for _ in range(48)))
    spend = np.zeros(2)
    for step in range(48):
        made = day.step(step, np.arange(2), np.array([80.0, 60.0]), np.full(2, 1e9), keys=np.array([[43], [44]]))
        spend += made["spend"]
    assert spend == pytest.approx([223.0733887636743, 21.257614050488883], rel=1e-9)


def test_all_campaigns_are_played_with_their_own_budgets_and_limits():
    env = Auction(1, periods="0-1", **SMALL)
    env.reset(0)
    assert len(env.tasks) == 96 and env.campaigns.budgets.tolist() == PUBLISHED["budgets"] * 2
    assert env.campaigns.target_cpa.tolist() == PUBLISHED["target_cpa"] * 2
    assert len(Auction(97, periods="0-1", **SMALL).tasks) == 192, "with other draws, until there are so many"
    assert len(Auction(97, periods="0-1", budgets="0.5,1", **SMALL).tasks) == 384


def test_nobody_spends_more_than_its_budget():
    env = Auction(1, periods="0", budgets=[0.01, 1, 3], **CHEAP)
    episodes, brought = played(env, always(1e4))
    assert (brought[:, 1] <= env.campaigns.budgets).all() and brought[:, 1].sum() > 0.9 * env.campaigns.budgets.sum()
    assert (env.campaigns.remaining >= 0).all()
    assert [e.terminated for e in episodes] == (env.campaigns.remaining < 0.1).tolist(), "an episode ends with its money"
    assert np.mean([len(e.rewards) < 48 for e in episodes]) > 0.3


def test_one_batch_of_all_campaigns_is_each_campaign_alone():
    options = {"periods": "0-1", **SMALL}
    whole = Auction(1, budgets="0.5,1", repeats=2, **options)
    _, together = played(whole, lambda tasks: Bidder(whole, bidders.TargetCPA(), tasks), seed=5)
    assert len({tuple(row) for row in together.tolist()}) > 300, "repeats and budgets differ"
    for i in (3, 47):
        alone = Auction(1, positions=str(i), repeats=2, **options)
        _, one = played(alone, lambda tasks, env=alone: Bidder(env, bidders.TargetCPA(), tasks), seed=5)
        rows = np.flatnonzero((whole.advertiser == i) & (whole.factor == 1))
        assert together[rows].tolist() == one.tolist()
    assert played(whole, always(80.0), seed=6)[1].tolist() != played(whole, always(80.0), seed=7)[1].tolist()


def test_expected_draws_are_the_mean_of_many_others():
    options = {"periods": "0", "positions": "0-7", **SMALL}
    (_, exact), (_, drawn) = (
        played(Auction(1, **options, **more), always(30.0)) for more in ({"draws": "expected"}, {"repeats": 200})
    )
    mean = drawn.reshape(200, 8, 3).mean(0)
    assert exact[:, 0].tolist() == exact[:, 2].tolist() and exact[:, 0].sum() > 20
    assert mean[:, 0].sum() == pytest.approx(exact[:, 0].sum(), rel=0.02)
    np.testing.assert_allclose(mean[:, 0], exact[:, 0], atol=4 * np.sqrt(exact[:, 0].max() / 200))
    for seed in (1, 2):  # nobody ran out of money, so nothing was drawn at all
        assert played(Auction(1, **options, draws="expected"), always(30.0), seed)[1].tolist() == exact.tolist()


def test_what_is_observed_is_what_the_campaigns_were_told(tmp_path):
    """Two steps of one advertiser against prices of a file, with the book kept by hand."""
    steps = list(islice(traffic(0, 2000), 48))
    market = [np.linspace(0.5, 9, len(values)) for values, _ in steps]
    write(tmp_path / "lwc_period_0.parquet", market)
    env = Auction(1, periods="0", positions="9", path=str(tmp_path), context_features="progress", **SMALL)
    seen = [env.reset(0)]
    book = Campaigns([PUBLISHED["budgets"][9]], [PUBLISHED["target_cpa"][9]])
    for step, multiplier in ((0, 40.0), (1, 60.0)):
        values, prices = steps[step][0][:, 9], market[step]
        expected = shown(book.observe([values.mean()], len(values)), book.context(), context_features="progress")
        np.testing.assert_allclose(seen[-1], expected, rtol=1e-9)
        after, rewards, ended, truncated = env.step(np.array([[multiplier]]))
        seen.append(after)
        wins = multiplier * values >= prices
        assert 0 < wins.sum() < len(values) and not ended.any() and not truncated.any()
        book.record(
            bid=(multiplier * values).mean(), market_price=prices.mean(), value=values.mean(), conversion=rewards[0] / len(values),
            won=wins.mean(), volume=len(values), spend=prices[wins].sum(), conversions=rewards[0],
            exposed_value=values[wins].sum(),
        )  # fmt: skip


def write(path, market, **columns):
    table = {"timeStepIndex": np.repeat(np.arange(len(market)), [len(p) for p in market]).astype(np.int8)}
    pq.write_table(pa.table(table | {"leastWinningCost": np.concatenate(market)} | columns), path)


def test_prices_of_a_file_are_those_of_our_market_if_it_holds_them(tmp_path):
    made = auction.play(bidders.roster(), 3, market_prices=True, traffic=lambda p: traffic(p, 2000))
    write(tmp_path / "lwc_period_3.parquet", made.market_prices)
    (_, own), (_, read) = (
        played(Auction(1, periods="3", path=path, **SMALL), always(50.0)) for path in ("", str(tmp_path / "lwc_*.parquet"))
    )
    assert own.tolist() == read.tolist() and own[:, 1].sum() > 0


@pytest.mark.parametrize("returns", ["conversions", "value", "score"])
def test_rewards_add_up_to_the_return_that_was_asked_for_and_the_score_is_the_same(returns):
    env = Auction(1, periods="0", condition_on=returns, **SMALL)
    episodes, brought = played(env, always(120.0))
    conversions, spend, value = brought.T
    total = {"conversions": conversions, "value": value, "score": score(value, spend, env.target_cpa)}[returns]
    near([e.rewards.sum() for e in episodes], total)
    limit = env.target_cpa
    by_hand = [n * min(1, (limit[i] * n / s) ** 2) if s else n for i, (n, s, _) in enumerate(brought)]
    np.testing.assert_allclose(env.score(episodes), by_hand)
    assert (np.array(by_hand) < conversions).any()
    np.testing.assert_allclose(env.score(episodes[5:7]), by_hand[5:7])


def test_what_is_shown_and_told_is_as_in_the_dataset():
    lean = Auction(
        1,
        periods="0",
        positions="0,9",
        observation="minimal",
        context_features="budget_and_cpa",
        text="informative",
        budgets="0.5",
        **SMALL,
    )
    assert lean.reset(0).shape == (2, 7)
    assert lean.tasks == [task_text(1450, 100, 0), task_text(1000, 130, 1)]
    assert Auction(1, periods="0", text="constant", **SMALL).tasks == [task_text()] * 48
    told, dealt = (Auction(1, periods="0-1", budgets="1,2", text=text, **SMALL) for text in ("informative", "shuffled"))
    blocks = lambda tasks: [sorted(tasks[k : k + 48]) for k in range(0, 192, 48)]  # noqa: E731
    assert blocks(told.tasks) == blocks(dealt.tasks), "dealt within a period and a budget"
    assert sum(a != b for a, b in zip(told.tasks, dealt.tasks, strict=True)) > 150


def test_a_bidder_of_the_market_is_shown_what_it_was_made_for():
    env = Auction(1, periods="0", observation="minimal", features="repaired", **CHEAP)
    asked = []

    class Watched:
        features = "original"

        def act(self, states, seats):
            asked.append((states, seats))
            return np.full(len(states), 100.0)

    episodes, _ = played(env, lambda tasks: Bidder(env, Watched(), tasks))
    states, seats = asked[6]
    own = Campaigns(PUBLISHED["budgets"], PUBLISHED["target_cpa"])
    own.means, own.volumes, own.now = env.campaigns.means, env.campaigns.volumes, 6
    recent = [STATE.index(name) for name in ("bid, last 3", "market price, last 3", "value, last 3")]
    assert states.shape == (48, 16)
    np.testing.assert_allclose(states[:, recent], own.observe(0, 0, features="original")[:, recent])
    assert not np.allclose(states[:, recent], own.observe(0, 0)[:, recent])
    assert seats.step == 6 and seats.categories.tolist() == auction.industries(48).tolist() and (seats.remaining > 0).all()
    ends = {len(e.rewards) for e in episodes}
    assert len(ends) > 1 and all((e.actions == 100).all() for e in episodes), "those that go on are answered for"


def test_every_baseline_plays():
    env = Auction(1, periods="0", **SMALL)
    players = env.baselines(0)
    assert set(players) == {"target CPA", "DT (stock)", "PID", "OnlineLP", "IQL", "BC", "CQL", "TD3_BC", "MOPO", "COMBO"}
    first = played(env, players["PID"])[1].tolist()
    for begin in players.values():
        assert len(played(env, begin)[0]) == 48
    assert played(env, players["PID"])[1].tolist() == first, "it begins each period anew"


def test_each_budget_is_a_part_with_measures_of_its_own():
    env = Auction(1, periods="0-1", budgets="1,0.5,1.25", **SMALL)
    episodes, brought = played(env, always(60.0))
    parts = env.conditions()
    assert list(parts) == ["replay", "replay 50 %", "replay 125 %"] and [len(rows) for rows in parts.values()] == [96] * 3
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(288))
    assert env.campaigns.budgets[parts["replay 50 %"]].tolist() == [b / 2 for b in PUBLISHED["budgets"] * 2]
    for rows in parts.values():
        part = [episodes[i] for i in rows]
        conversions, spend, _ = brought[rows].T
        found, limit = env.metrics(part), env.target_cpa[rows]
        assert found["conversions"] == pytest.approx(conversions.mean(), abs=1e-4)
        assert found["budget_used"] == pytest.approx((spend / env.budgets[rows]).mean(), abs=1e-4)
        some = conversions > 0
        assert found["cpa_ratio"] == pytest.approx((spend / limit)[some].dot(1 / conversions[some]) / some.sum(), abs=1e-4)
        over = [s > 0 and (n == 0 or s / n > limit[i]) for i, (n, s) in enumerate(zip(conversions, spend, strict=True))]
        assert found["over_limit"] == pytest.approx(np.mean(over), abs=1e-4)
        scores = env.score(part)
        assert found["by_category"]["2"] == pytest.approx(np.mean([*scores[16:24], *scores[64:72]]), abs=1e-4)
        assert found["by_period"]["1"] == pytest.approx(scores[48:].mean(), abs=1e-4)
        assert found["by_budget"]["small"] == pytest.approx(scores[np.array(PUBLISHED["budgets"] * 2) < 2500].mean(), abs=1e-4)
        assert len(found["by_category"]) == 6 and set(found["by_budget"]) == {"small", "medium", "large"}


def test_half_a_budget_lasts_for_less():
    env = Auction(1, periods="0", budgets="0.5,1,1.5", **SMALL)
    episodes, _ = played(env, always(60.0))
    half, whole, more = (env.score([episodes[i] for i in rows]).mean() for rows in env.conditions().values())
    assert half < 0.8 * whole and whole < 0.9 * more


def test_the_guard_is_off_unless_asked_for_and_says_so_in_the_protocol():
    paid = {}
    for guard in (False, True):
        env = Auction(48, periods="3", draws="expected", guard=guard, **SMALL)
        assert env.protocol == "replay, expected" + ", guarded" * guard
        played(env, always(4 * np.array(PUBLISHED["target_cpa"])))
        paid[guard] = env.campaigns.spend / (env.campaigns.conversions * env.target_cpa)
    asked = np.stack([step[0] for step in env.log])  # (T, N)
    assert set(np.unique(asked / env.target_cpa)) <= {0, 1, 4}
    assert (paid[False] > 1.1).sum() > 10 and paid[True].mean() < paid[False].mean()


def test_in_a_market_we_play_each_position_in_turn():
    env = Auction(100, protocol="market", periods="0-1", positions="3,40", **SMALL)
    assert len(env.tasks) == 4 and env.protocol == "market" and len(Auction(1, protocol="market", **SMALL).tasks) == 12
    episodes, brought = played(env, always([60.0, 70.0, 80.0, 90.0]), seed=2)
    for k, (period, position, multiplier) in enumerate([(0, 3, 60.0), (0, 40, 70.0), (1, 3, 80.0), (1, 40, 90.0)]):
        one = [*bidders.roster(), ([position], bidders.Constant(multiplier))]
        made = auction.play(one, period, traffic=lambda p: traffic(p, 2000), seed=seeded(2, 0, position))
        n = len(episodes[k].rewards)
        assert brought[k].tolist() == [
            made.conversions.sum(0)[position],
            made.spend[:n, position].cumsum()[-1],
            pytest.approx(made.exposed_value[:, position].sum()),
        ]
        near(episodes[k].observations, made.states[:n, position], 1e-6, axis=0)
        assert episodes[k].rewards.tolist() == made.conversions[:n, position].tolist()


def test_positions_of_one_market_are_shared_if_asked_for():
    options = {"protocol": "market", "periods": "0", "positions": "0,1,2,3,4,5", **SMALL}
    alone, shared = (Auction(1, **options, **more) for more in ({}, {"share": "all"}))
    (_, apart), (_, together) = (played(env, always(75.0)) for env in (alone, shared))
    assert shared.protocol == "market, shared" and len(shared.world.worlds) <= 1 < len(alone.world.worlds)
    six = [*bidders.roster(), (range(6), bidders.Constant(75.0))]
    made = auction.play(six, 0, traffic=lambda p: traffic(p, 2000), seed=seeded(0, 0, 0))
    assert together[:, 0].tolist() == made.conversions.sum(0)[:6].tolist() != apart[:, 0].tolist()


def seeded(*numbers):
    """A market's seed: of the rollout, the repeat and the first of our positions."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def test_in_a_market_only_our_budget_is_another():
    env = Auction(1, protocol="market", periods="0", positions="5", budgets="0.5,1", **SMALL)
    env.reset(0)
    found = [market.budgets / PUBLISHED["budgets"] for market, _ in env.world.worlds]
    assert [f[5] for f in found] == [0.5, 1] and all((np.delete(f, 5) == 1).all() for f in found)
    assert list(env.conditions()) == ["market 50 %", "market"]


def test_the_picture_shows_spend_multiplier_and_cost():
    env = Auction(1, periods="0", **SMALL)
    episodes, brought = played(env, always(60.0))
    spend, multiplier, cost = env.draw(episodes, "title").axes
    mean = [axis.lines[4].get_ydata() for axis in (spend, multiplier, cost)]
    assert mean[0][-1] == pytest.approx(brought[:, 1].sum() / env.budgets.sum()) and (np.diff(mean[0]) >= 0).all()
    assert np.nanmin(mean[1]) == pytest.approx(60) == np.nanmax(mean[1]), "of those who still bid"
    assert mean[2][-1] == pytest.approx(brought[:, 1].sum() / (brought[:, 0] @ env.target_cpa))


@pytest.mark.parametrize(("options", "message"), [
    ({"protocol": "online"}, "env.protocol: expected one of replay, market, got 'online'"),
    ({"draws": "none"}, "env.draws: expected one of bernoulli, expected, got 'none'"),
    ({"share": "two"}, "env.share: expected one of one, all, got 'two'"),
    ({"periods": "x"}, "env.periods: expected such as 0-6 or 7,8, got 'x'"),
    ({"periods": ""}, "env.periods: expected such as 0-6 or 7,8, got ''"),
    ({"budgets": "0,1"}, "env.budgets: expected factors above 0, such as 0.5,1 and each once, got '0,1'"),
    ({"budgets": [-1]}, "env.budgets: expected factors above 0"),
    ({"budgets": "1,1"}, "each once, got '1,1'"),
    ({"budgets": "half"}, "got 'half'"),
    ({"positions": "47,48"}, "env.positions: expected advertisers from 0 to 47, got 48"),
    ({"positions": "-1"}, "env.positions: expected such as"),
    ({"opportunities": 0}, "env.opportunities: expected a number from 1, got 0"),
    ({"repeats": -1}, "env.repeats: expected a number from 0, got -1"),
    ({"protocol": "market", "path": "prices"}, "env.path: a market makes its own prices"),
])  # fmt: skip
def test_what_cannot_be_played_is_refused(options, message):
    with pytest.raises(ValueError) as error:
        Auction(1, **options)
    assert message in str(error.value)


def test_prices_that_are_not_there_or_do_not_fit_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected lwc_period_7.parquet in .*there are market prices of no period"):
        Auction(1, path=str(tmp_path))
    market = [np.ones(len(values)) for values, _ in traffic(7, 2000)]
    write(tmp_path / "lwc_period_7.parquet", market)
    with pytest.raises(FileNotFoundError, match=r"expected lwc_period_8.parquet in .*there are market prices of period 7$"):
        Auction(1, path=str(tmp_path))
    with pytest.raises(ValueError, match=r"lwc_period_7.parquet: expected \d+ market prices in step 0 of period 7, got \d+"):
        Auction(1, path=str(tmp_path), periods="7", opportunities=3000).reset(0)

    def refused(message, market=market, **columns):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        write(folder / "lwc_period_7.parquet", market, **columns)
        with pytest.raises(ValueError, match=message):
            Auction(1, path=str(folder), periods="7", **SMALL).reset(0)

    refused(r"lwc_period_7.parquet: expected \d+ market prices in step 47 of period 7, got \d+", [*market[:-1], market[-1][1:]])
    refused(r"leastWinningCost: row 3: expected a price above 0, got 0.0", [np.array([1, 1, 1, 0.0]), *market[1:]])
    refused(r"leastWinningCost: row 1: expected a price above 0, got nan", [np.array([1, np.nan]), *market[1:]])
    total = sum(map(len, market))
    refused("timeStepIndex: expected steps from 0 to 47 in order", timeStepIndex=np.arange(total) % 48)
    refused("timeStepIndex: expected steps from 0 to 47 in order", timeStepIndex=np.full(total, 48))
    folder = tmp_path / "other"
    folder.mkdir()
    pq.write_table(pa.table({"price": [1.0]}), folder / "lwc_period_7.parquet")
    with pytest.raises(ValueError, match="expected columns timeStepIndex and leastWinningCost, got price"):
        Auction(1, path=str(folder), periods="7", **SMALL).reset(0)


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
        "dataset.context_features=budget_and_cpa",
        "dataset.observation=minimal",
        "text=informative",
    )
    train = (
        "dataset=auction",
        f"dataset.path={tmp_path}/log.csv",
        f"run={tmp_path}/run",
        f"cache_dir={tmp_path}/data",
        *loop,
        *own,
    )
    assert command("train", *train, *NANO, "name=ours", "data.held_out=0", "log.validation_batches=1") == 0
    evaluate = (f"run={tmp_path}/run", f"out={tmp_path}/out", "episodes=3", "+env.budgets=[0.5,1]")
    assert command("evaluate", *evaluate) == 0
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [(row["policy"], row["protocol"]) for row in rows[:4]] == [
        ("ours", "replay 50 %"), ("ours", "replay"), ("target CPA", "replay 50 %"), ("target CPA", "replay"),
    ]  # fmt: skip
    assert len(rows) == 22 and {row["n"] for row in rows} == {48} and all("conversions" in row for row in rows)
    assert rows[3]["score"] > rows[2]["score"] > 0
    pictures = {path.name for path in (tmp_path / "out").glob("rollout-*.png")}
    assert "rollout-ours-replay-50--0.png" in pictures and len(pictures) == 11, "one a player"
    page = (tmp_path / "out/report.html").read_text()
    assert "conversions, less where they cost more than allowed" in page and "replay 50 %" in page and "37.1" in page
    assert priced.cache_info().hits > 0, "prices are made once"
