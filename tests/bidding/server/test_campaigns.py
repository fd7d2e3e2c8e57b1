"""Served campaigns: bids equal the policy's, also after eviction or a restart; repeated ticks count
once; guard rails hold.
"""

import json
import sqlite3
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from decisionllm.bidding.env import Auction
from decisionllm.bidding.journal.campaign_history import SETTINGS, Campaign
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.rows import VERSION, insert_campaign, insert_tick, move_campaign
from decisionllm.bidding.market.campaigns import Campaigns
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.campaigns import RequestError, guard_multiplier, linear_pacing
from decisionllm.bidding.server.kv_cache import Cache
from decisionllm.schema import History, Spec
from tests.bidding.server.in_process import CampaignManager
from tests.conftest import MAX_RETURN, make_policy, near

pytestmark = pytest.mark.numeric

STEPS = 12
HIGH = 300.0  # largest multiplier of these policies
SPEC = ObservationSpec("auctionnet", "progress", "expected_value", "informative")
MAXIMUM = {"target_return": None, "objective": MAX_RETURN}


def drawn(campaign, step):
    """A tick with random results and opportunities: the same for the same numbers, independent of
    the bids.
    """
    step, rng = int(step), np.random.default_rng([campaign, step])
    value, volume = (float(x) for x in (rng.uniform(0.0002, 0.001), rng.integers(5000, 20000)))
    result = {
        "bid": rng.uniform(0.01, 0.1),
        "market_price": rng.uniform(0.05, 0.2),
        "value": rng.uniform(0.0002, 0.001),
        "conversion": rng.uniform(0, 0.001),
        "won": rng.uniform(0, 0.1),
        "volume": 9000.0,
        "spend": rng.uniform(0, 100),
        "conversions": float(rng.integers(4)),
        "exposed_value": rng.uniform(0, 2),
    }
    return {
        "index": step,
        "result": result if step else None,
        "coming": {"value": value, "volume": volume},
        "key": f"k{step}",
    }


def settings(campaign):
    return {
        "budget": 900.0 + 10 * campaign,
        "target_cpa": 60.0 + campaign,
        "category": campaign % 6,
        "horizon": STEPS,
    }


@lru_cache
def observed():
    """(240, S) observations of drawn campaigns, which policies are normalised by."""
    rows = []
    for i in range(20):
        totals = Campaigns([900.0], [60.0], steps=STEPS)
        for step in range(STEPS):
            tick = drawn(i, step)
            if step:
                totals.record(**tick["result"])
            rows.append(SPEC.observe(totals, **tick["coming"])[0])
    return np.array(rows, np.float32)


def policy_of(**changes):
    """A policy with random weights in the units of drawn campaigns."""
    policy = make_policy(
        Spec(observed().shape[1], 1, STEPS, (0.0,), (HIGH,)),
        **{"target_return": 9.0, "window": 6, "stride": 2} | changes,
    )
    policy.model.normalizer.fit([(observed(), np.linspace(0, 12, 100, dtype=np.float32))])
    return policy


def by_hand(policy, campaign, answers, step):
    """The answer of Policy.act to a campaign with these answers so far, its history
    assembled here.
    """
    totals = Campaigns(
        [settings(campaign)["budget"]], [settings(campaign)["target_cpa"]], steps=STEPS
    )
    observations, rewards, before = [], [], 0.0
    for t in range(step + 1):
        tick = drawn(campaign, t)
        if t:
            totals.record(**tick["result"])
            rewards.append(float(totals.exposed_value[0]) - before)
            before = float(totals.exposed_value[0])
        observations.append(SPEC.observe(totals, **tick["coming"])[0])
    f = settings(campaign)
    size = "small" if f["budget"] < 2500 else "medium"
    task = (
        f"Auction, advertiser of category {f['category']}. Bid for impressions over one day of 48 "
        "steps. Get as many conversions as you "
        f"can within a {size} budget of {f['budget']:g}, at a strict cost limit of "
        f"{f['target_cpa']:g} for each."
    )
    done = np.array(answers[:step], np.float32).reshape(-1, 1)
    return float(
        policy.act(
            [History(np.array(observations, np.float32), done, np.array(rewards), task=task)]
        )[0, 0]
    )


def play(manager, count=1, steps=STEPS):
    """Campaigns played one after the other: the multipliers, (count, steps)."""
    ids = [manager.open(**settings(i)) for i in range(count)]
    return np.array(
        [
            [manager.tick(id, **drawn(i, t))["multiplier"] for t in range(steps)]
            for i, id in enumerate(ids)
        ]
    )


@pytest.mark.parametrize("options", [{}, MAXIMUM], ids=["target return", "max return"])
def test_bids_equal_the_policy_to_the_last_bit(options):
    policy = policy_of(**options)
    manager = CampaignManager(policy, SPEC)
    for i, multipliers in enumerate(play(manager, 2)):
        assert len(set(multipliers)) == STEPS and not manager.counts["fallback", "model"]
        for t in range(STEPS):
            assert multipliers[t] == by_hand(policy, i, multipliers, t), f"step {t}"


@pytest.mark.parametrize(
    "options", [{}, MAXIMUM, {"window": 1, "stride": 1}, {"backbone": "gpt2"}], ids=str
)
def test_cached_bids_equal_the_policy_in_any_batch(options):
    """Seven campaigns, some of them at a time, with rows for three: each is evicted again and
    again.
    """
    policy = policy_of(**options)
    rng = np.random.default_rng(0)
    now = np.zeros(7, int)
    answers = [[] for _ in range(7)]
    manager = CampaignManager(policy, SPEC, cache_bytes=10**9, max_campaigns=3)
    ids = [manager.open(**settings(i)) for i in range(7)]
    while (now < STEPS).any():
        batch = rng.permutation(np.flatnonzero((now < STEPS) & (rng.random(7) < 0.4)))
        pending = [manager.admit(ids[i], drawn(i, now[i])) for i in batch]
        if pending:
            for i, p, decided in zip(
                batch,
                pending,
                manager.decide([(p.campaign.id, p.campaign.history()) for p in pending]),
                strict=True,
            ):
                manager.answer(p, decided)
                assert manager.journal.write(manager.entries(p)) == [True]
                manager.commit(p)
                answers[i].append(json.loads(p.answer)["multiplier"])
                now[i] += 1
    for i in range(7):
        expected = [by_hand(policy, i, answers[i], t) for t in range(STEPS)]
        near(answers[i], expected, scale=HIGH)
        assert np.std(expected) > 1
    assert (
        manager.cache.counts["evictions"] > 10
        and manager.cache.counts["hits"] > 5
        and manager.counts["rebuilt", ""] > 10
    )


@pytest.mark.parametrize("options", [{}, MAXIMUM], ids=["target return", "max return"])
def test_a_window_of_one_step_without_text_needs_no_session(options):
    policy = policy_of(window=1, stride=1, **options)
    plain = ObservationSpec("auctionnet", "progress", "expected_value")
    alone = CampaignManager(policy, plain)
    batched = CampaignManager(policy, plain, cache_bytes=10**8)
    ids = [[manager.open(**settings(i)) for i in range(5)] for manager in (alone, batched)]
    for t in range(3):
        expected = [alone.tick(id, **drawn(i, t))["multiplier"] for i, id in enumerate(ids[0])]
        pending = [batched.admit(id, drawn(i, t)) for i, id in enumerate(ids[1])]
        decided = batched.decide([(p.campaign.id, p.campaign.history()) for p in pending])
        near([action[0] for action, _ in decided], expected, scale=HIGH)
        for p, multiplier in zip(pending, expected, strict=True):
            batched.answer(p, (np.array([multiplier]), None))
            batched.journal.write(batched.entries(p))
            batched.commit(p)
    assert np.std(expected) > 1 and not batched.cache.counts


def test_a_manager_reads_only_the_ticks_that_another_one_answered(tmp_path, monkeypatch):
    policy, read = policy_of(), []
    managers = [CampaignManager(policy, SPEC, Journal(tmp_path / "j")) for _ in range(2)]
    id = managers[0].open(**settings(0))
    ticks = Journal.ticks
    monkeypatch.setattr(
        Journal,
        "ticks",
        lambda journal, id, first=0: read.append(first) or ticks(journal, id, first),
    )
    for t, which in enumerate((0, 0, 1, 0, 1, 1)):
        managers[which].tick(id, **drawn(0, t))
    assert read == [0, 2, 3], "each begins at the step that it knows, that of the opening at none"


def test_an_evicted_campaign_continues_with_the_same_answers(tmp_path):
    policy = policy_of()
    expected = play(CampaignManager(policy, SPEC), 3)
    manager = CampaignManager(policy, SPEC, Journal(tmp_path / "j"), max_campaigns=1)
    ids = [manager.open(**settings(i)) for i in range(3)]
    got = [[] for _ in range(3)]
    for t in range(STEPS):
        if t == 5:  # a restart
            manager = CampaignManager(policy, SPEC, Journal(tmp_path / "j"), max_campaigns=1)
        for i in range(3):
            got[i].append(manager.tick(ids[i], **drawn(i, t))["multiplier"])
    np.testing.assert_array_equal(got, expected)


def test_two_managers_share_one_journal(tmp_path):
    """Each tick may go to either, and may be repeated to the other."""
    policy = policy_of()
    (expected,) = play(CampaignManager(policy, SPEC))
    managers = [CampaignManager(policy, SPEC, Journal(tmp_path / "j")) for _ in range(2)]
    id = managers[0].open(**settings(0))
    for t in range(STEPS):
        first = managers[t // 2 % 2].tick(id, **drawn(0, t))
        assert first["multiplier"] == expected[t]
        assert managers[1 - t // 2 % 2].tick(id, **drawn(0, t)) == first
    stale = CampaignManager(policy, SPEC, Journal(tmp_path / "j"))
    stale.replay(id)
    managers[0].close(id)
    with pytest.raises(RequestError, match="has ended"):
        stale.tick(id, **drawn(0, STEPS) | {"coming": None})


def test_a_race_to_the_same_tick_has_one_answer(tmp_path):
    policy = policy_of()
    managers = [CampaignManager(policy, SPEC, Journal(tmp_path / "j")) for _ in range(2)]
    id = managers[0].open(**settings(0))
    late = managers[1].admit(id, drawn(0, 0))
    answer = managers[0].tick(id, **drawn(0, 0))
    managers[1].answer(late, (np.array([77.0]), 1.0))
    assert managers[1].journal.write(managers[1].entries(late)) == [False]
    assert managers[1].tick(id, **drawn(0, 0)) == answer


@pytest.mark.parametrize(
    ("changes", "coming", "number"),
    [
        ({}, {}, None),
        ({"target_cpa": 9000.0}, {}, "target cpa"),
        ({"budget": 9e8}, {}, "log budget"),
        ({}, {"value": 0.5}, "value now"),
    ],
)
def test_a_campaign_in_other_units_than_the_log_is_reported(changes, coming, number, caplog):
    manager = CampaignManager(policy_of(), SPEC)
    id = manager.open(**settings(0) | changes)
    for step in range(2):
        tick = drawn(0, step)
        manager.tick(id, **tick | {"coming": tick["coming"] | coming})
    unlike = {name: count for (kind, name), count in manager.counts.items() if "unlike" in kind}
    assert unlike == ({number: 2} if number else {})
    assert len(caplog.records) == len(unlike), "once a campaign"
    assert not number or f"campaign {id}: {number} is" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"spend": 5e4}, "spend beyond the budget"),
        ({"won": 0.0, "spend": 1.0}, "spend without a win"),
        ({"conversions": 9e4}, "more conversions than opportunities"),
    ],
)
def test_a_result_that_contradicts_itself_is_reported(changes, reason, caplog):
    manager = CampaignManager(policy_of(), SPEC)
    id = manager.open(**settings(0))
    manager.tick(id, **drawn(0, 0))
    for step in (1, 2):
        tick = drawn(0, step)
        manager.tick(id, **tick | {"result": tick["result"] | (changes if step == 1 else {})})
    reasons = [name for (kind, name) in manager.counts if kind == "implausible result"]
    assert reasons == ([reason] if reason else [])
    assert (f"campaign {id}, result of step 0: {reason}" in caplog.text) == bool(reason)


def test_a_campaign_keeps_the_model_that_it_began_with(tmp_path, caplog):
    policy, path = policy_of(), tmp_path / "j"
    first, second = (
        CampaignManager(policy, SPEC, Journal(path), name=name) for name in ("a@1", "b@2")
    )
    id = first.open(**settings(0))
    first.tick(id, **drawn(0, 0))
    with pytest.raises(RequestError, match="answered by model a@1, this is b@2"):
        second.tick(id, **drawn(0, 1))
    with pytest.raises(
        ValueError, match="model: expected b@2, got open campaigns .* 1 of a@1; .*move_campaigns"
    ):
        second.check_open()
    second.check_open(move=True)
    assert "1 campaigns of a@1 go on with b@2" in caplog.text
    assert second.tick(id, **drawn(0, 1))["model"] == "b@2"
    with pytest.raises(RequestError, match="answered by model b@2, this is a@1"):
        first.tick(id, **drawn(0, 2))
    second.check_open()
    answers = [tick["answer"]["model"] for tick in first.journal.ticks(id)]
    assert answers == ["a@1", "b@2"] and first.journal.campaign(id)["model"] == "b@2"
    second.close(id)
    first.check_open()


def test_a_horizon_below_an_open_campaign_is_refused(tmp_path):
    policy = policy_of()
    manager = CampaignManager(policy, SPEC, Journal(tmp_path / "j"))
    id = manager.open(**settings(0))
    lower = CampaignManager(policy, SPEC, Journal(tmp_path / "j"), horizon=STEPS - 1)
    with pytest.raises(ValueError, match="horizon: expected at least 12, .*, got 11; raise it"):
        lower.check_open()
    with pytest.raises(RequestError, match="the campaign has 12 steps, this server allows 11"):
        lower.tick(id, **drawn(0, 0))
    manager.close(id)
    lower.check_open()


@pytest.mark.parametrize("version", [0, 1, 2, 99])
def test_a_journal_of_another_version_is_refused_and_stays(tmp_path, version):
    Journal(tmp_path / "j").close()
    with sqlite3.connect(tmp_path / "j") as other:
        other.execute(f"PRAGMA user_version={version}")
    for read_only in (False, False, True):
        with pytest.raises(
            ValueError,
            match=f"expected one of version {VERSION}, got version {version}: .*begin a new file",
        ):
            Journal(tmp_path / "j", read_only=read_only)


def test_a_last_tick_that_is_refused_ends_no_campaign(tmp_path):
    policy = policy_of()
    one, other = (
        CampaignManager(policy, SPEC, Journal(tmp_path / "j"), name="m1") for _ in range(2)
    )
    id = one.open(**settings(0))
    one.tick(id, **drawn(0, 0))
    other.replay(id)
    one.tick(id, **drawn(0, 1))
    with pytest.raises(RequestError, match="step 1 was answered to another request"):
        other.tick(id, **drawn(0, 1) | {"coming": None})
    other.replay(id)
    other.journal.write([move_campaign(id, "m2", "m1")])
    last = drawn(0, 2) | {"coming": None}
    with pytest.raises(RequestError, match="the campaign is answered by model m2, this is m1"):
        one.tick(id, **last)
    new = CampaignManager(policy, SPEC, one.journal, name="m2")
    assert new.tick(id, **last) == new.tick(id, **last)
    assert one.journal.campaign(id)["ended"] == "over" and one.journal.count_ticks(id) == 3


def test_repeated_ticks_count_once_and_wrong_ones_are_refused():
    manager = CampaignManager(policy_of(), SPEC)
    id = manager.open(**settings(0))
    answers = [manager.tick(id, **drawn(0, t)) for t in range(3)]
    spend = sum(drawn(0, t)["result"]["spend"] for t in (1, 2))
    assert answers[2]["spend"] == pytest.approx(spend) and answers[2]["remaining"] == pytest.approx(
        900 - spend
    )
    assert [manager.tick(id, **drawn(0, t)) for t in range(3)] == answers
    assert manager.counts["bid", ""] == 3
    for change in (
        {"key": "other"},
        {"coming": {"value": 0.5, "volume": 1.0}},
        {"result": drawn(1, 1)["result"]},
    ):
        with pytest.raises(RequestError, match="step 1 was answered to another request") as refused:
            manager.tick(id, **drawn(0, 1) | change)
        assert (refused.value.status, refused.value.field, refused.value.expected) == (
            409,
            "index",
            3,
        )
    for t in (4, 11):
        with pytest.raises(RequestError, match=f"index: expected 3, got {t}") as refused:
            manager.tick(id, **drawn(0, t))
        assert refused.value.expected == 3
    with pytest.raises(RequestError, match="result: expected the result of step 2, got none"):
        manager.tick(id, **drawn(0, 3) | {"result": None})
    with pytest.raises(RequestError, match="result: expected none before the first step"):
        manager.tick(manager.open(**settings(1)), **drawn(0, 1) | {"index": 0})
    with pytest.raises(RequestError, match="id: no such campaign"):
        manager.tick("unknown", **drawn(0, 0))
    for t in range(3, STEPS):
        manager.tick(id, **drawn(0, t))
    with pytest.raises(
        RequestError, match=f"coming: expected none: the campaign has {STEPS} steps"
    ):
        manager.tick(id, **drawn(0, STEPS))
    last = drawn(0, STEPS) | {"coming": None}
    end = manager.tick(id, **last)
    assert end["multiplier"] == 0 and end["spend"] == pytest.approx(
        sum(drawn(0, t)["result"]["spend"] for t in range(1, STEPS + 1))
    )
    assert manager.tick(id, **last) == end and manager.journal.campaign(id)["ended"] == "over"
    with pytest.raises(RequestError, match="the campaign has ended"):
        manager.tick(id, **drawn(0, STEPS + 1) | {"coming": None})


def test_settings_that_a_policy_does_not_support_are_refused():
    manager = CampaignManager(policy_of(), SPEC)
    with pytest.raises(RequestError, match="horizon: expected at most 12 steps"):
        manager.open(**settings(0) | {"horizon": 13})
    with pytest.raises(
        ValueError, match="horizon: expected at most 12 steps, the longest in training, got 13"
    ):
        CampaignManager(policy_of(), SPEC, horizon=13)
    with pytest.raises(RequestError, match="text: expected none"):
        CampaignManager(policy_of(), replace(SPEC, text="none")).open(
            **settings(0), text="Bid high."
        )
    with pytest.raises(RequestError, match="target_return: expected none"):
        CampaignManager(policy_of(condition_on="none"), SPEC).open(**settings(0), target_return=3.0)
    with pytest.raises(ValueError, match="decode: expected mode or mean, got sample"):
        CampaignManager(policy_of(decode="sample"), SPEC)


def test_two_requests_with_one_key_open_one_campaign():
    manager = CampaignManager(policy_of(), SPEC)
    assert (
        manager.open(**settings(0), key="a")
        == manager.open(**settings(0), key="a")
        != manager.open(**settings(0), key="b")
    )
    with pytest.raises(
        RequestError, match="key: campaign .* was opened with this key and other settings"
    ):
        manager.open(**settings(1), key="a")


def test_a_policy_of_served_texts_needs_the_text_of_each_campaign():
    """Its texts are data of a journal, so that any template would be another text than it was
    trained with.
    """
    policy, spec = policy_of(), replace(SPEC, text="served")
    manager = CampaignManager(policy, spec)
    with pytest.raises(
        RequestError, match="text: expected the task text of this campaign, got none"
    ) as refused:
        manager.open(**settings(0))
    assert (refused.value.status, refused.value.field) == (422, "text")
    id = manager.open(**settings(0), text="Bid high.")
    assert manager.journal.campaign(id)["text"] == "Bid high."
    assert manager.admit(id, drawn(0, 0)).campaign.history().task == "Bid high."
    with pytest.raises(ValueError, match="text=served: this policy has no text template"):
        Campaign.begin(dict.fromkeys(SETTINGS) | settings(0), spec)


def test_bids_for_a_replayed_day_equal_an_evaluation():
    """The environment of `evaluate`, its observations and rewards, through the manager: the same
    multipliers.
    """
    spec = replace(SPEC, context_features="budget_and_cpa")
    env = Auction(
        1,
        periods="3",
        positions="9",
        opportunities=2000,
        **spec.info(),
    )
    first = env.reset(0)
    policy = make_policy(
        Spec(first.shape[1], 1, 48, (0.0,), (HIGH,)), window=6, stride=2, target_return=20.0
    )
    policy.model.normalizer.observation_scale.fill_(50.0)
    session = policy.begin(env.tasks, 48)
    observations = first
    rewards = None
    manager = CampaignManager(policy, spec)
    id = manager.open(
        budget=float(env.budgets[0]),
        target_cpa=float(env.target_cpa[0]),
        category=int(env.category[0]),
        encoding="utf-8",
    )
    result = None
    for t in range(48):
        value, volume = env.simulation.next_opportunities(t)
        answer = manager.tick(
            id,
            index=t,
            result=result,
            coming={"value": float(value[0]), "volume": float(volume[0])},
        )
        session.observe(observations, rewards)
        if not answer["guards"]:
            near(answer["multiplier"], session.decide()[0, 0], scale=HIGH)
        bid, c = np.array([answer["multiplier"]]), env.campaigns
        session.record_action(bid[:, None])
        result = {
            name: float(np.broadcast_to(x, 1)[0])
            for name, x in env.simulation.step(t, bid, c.remaining).items()
        }
        paid = env.total_reward()
        c.record(**{name: np.array([x]) for name, x in result.items()})
        observations, rewards = env.observe(), env.total_reward() - paid
    assert t == 47 and manager.counts["bid", ""] > 20


def campaign(budget=100.0, spent=0.0, step=0, **more):
    """A campaign of ten steps of which `step` are over, all of the money spent in the last."""
    manager = CampaignManager(policy_of(), SPEC)
    id = manager.open(budget=budget, target_cpa=10.0, horizon=10, **more)
    made = manager.replay(id)
    for t in range(step):
        made = made.advance(nothing() if t else None, drawn(0, t)["coming"]).record_action(20.0)
    return made.advance(nothing() | {"spend": spent}, drawn(0, step)["coming"]) if step else made


def nothing():
    return dict.fromkeys(drawn(0, 1)["result"], 0.0)


def test_guards_lower_a_bid():
    coming = {"value": 0.01, "volume": 1000.0}
    assert guard_multiplier(20.0, campaign(), coming) == (20.0, [])
    assert guard_multiplier(-3.0, campaign(), coming) == (0.0, ["negative"])
    assert guard_multiplier(20.0, campaign(bid_cap=0.1), coming) == (pytest.approx(10), ["bid cap"])
    # 60 for one mean opportunity
    assert guard_multiplier(20000.0, campaign(spent=40, step=1), coming) == (
        pytest.approx(6000),
        ["remaining"],
    )
    assert guard_multiplier(20.0, campaign(spent=99.95, step=1), coming) == (0.0, ["budget spent"])
    assert guard_multiplier(20.0, campaign(spent=120, step=1), coming)[0] == 0
    # 10 even shares of 10; 10 x 0.01 x 1000
    assert guard_multiplier(20.0, campaign(), coming, pacing=10) == (
        pytest.approx(10),
        ["pacing"],
    )
    assert guard_multiplier(20.0, campaign(spent=10, step=1), coming, pacing=30) == (20.0, [])
    assert guard_multiplier(20.0, campaign(), {"value": 0.0, "volume": 0.0}, pacing=1) == (20.0, [])
    capped = campaign()
    for cap in np.random.default_rng(0).uniform(0.01, 1, 200).tolist():
        capped.settings["bid_cap"] = cap
        multiplier, _ = guard_multiplier(1e6, capped, coming)
        assert multiplier * 0.01 <= cap < 1.0001 * multiplier * 0.01


def test_linear_pacing_spends_even_shares():
    assert linear_pacing(campaign()) == 10  # the limit
    # spend without conversions: capped at target_cpa
    assert linear_pacing(campaign(spent=10, step=1)) == pytest.approx(10)
    paid_off = campaign(budget=100, spent=20, step=2)  # 80 left for 8 steps: half as fast
    paid_off.totals.conversions[:] = 50
    assert linear_pacing(paid_off) == pytest.approx(10)
    idle = campaign(step=3)
    assert linear_pacing(idle) == pytest.approx(40)  # nothing was spent: twice as much, and no more
    hasty = campaign(spent=90, step=1)
    hasty.totals.conversions[:] = 50
    assert linear_pacing(hasty) == pytest.approx(10)  # not less than half


def test_a_failing_model_is_replaced_by_linear_pacing():
    policy = policy_of()
    (expected,) = play(CampaignManager(policy, SPEC), steps=2)
    for cache in (0, 10**8):
        manager = CampaignManager(policy, SPEC, cache_bytes=cache)
        id = manager.open(**settings(0))
        near(manager.tick(id, **drawn(0, 0))["multiplier"], expected[0], scale=HIGH)
        weight = policy.model.head.out.weight
        whole = weight.data.clone()
        weight.data.fill_(torch.nan)
        answer = manager.tick(id, **drawn(0, 1))
        weight.data.copy_(whole)
        assert answer["fallback"] == "model" and answer["return_to_go"] is None
        assert answer["multiplier"] == manager.tick(id, **drawn(0, 1))["multiplier"] > 0
        after = manager.tick(id, **drawn(0, 2))
        assert after["fallback"] is None
        near(
            after["multiplier"],
            by_hand(policy, 0, [expected[0], answer["multiplier"]], 2),
            scale=HIGH,
        )
        assert manager.counts["fallback", "model"] == 1


def test_a_fallback_bids_at_most_the_largest_training_action():
    manager = CampaignManager(policy_of(), SPEC)
    id = manager.open(**settings(0))
    for t in range(6):  # nothing is spent, so that each is twice the last
        tick = drawn(0, t) | {"result": nothing() if t else None}
        pending = manager.admit(id, tick)
        manager.answer(pending, ValueError())
        manager.journal.write(manager.entries(pending))
        manager.commit(pending)
    assert [a["answer"]["multiplier"] for a in manager.journal.ticks(id)] == [
        60,
        120,
        240,
        300,
        300,
        300,
    ]


def test_a_failing_batch_is_decided_one_by_one():
    """A history that is too long for its row does not fail the others."""
    manager = CampaignManager(policy_of(), SPEC, cache_bytes=10**8)
    ids = [manager.open(**settings(i)) for i in range(2)]
    good = [manager.admit(id, drawn(i, 0)).campaign.history() for i, id in enumerate(ids)]
    long = History(np.zeros((40, 21), np.float32), np.zeros((39, 1), np.float32), np.zeros(39))
    (a, _), bad, (b, _) = manager.decide([(ids[0], good[0]), ("long", long), (ids[1], good[1])])
    assert isinstance(bad, ValueError)
    assert [a[0], b[0]] == [by_hand(manager.policy, i, [], 0) for i in range(2)]


def test_a_cache_row_with_another_past_is_not_used():
    policy, ticks = policy_of(), [drawn(0, t) for t in range(3)]
    cache = Cache(policy, room=10**8, rows=2, horizon=STEPS)
    manager = CampaignManager(policy, SPEC)
    id = manager.open(**settings(0))
    for t in range(2):
        manager.tick(id, **ticks[t])
    history = manager.admit(id, ticks[2]).campaign.history()
    past = History(
        history.observations[:2], history.actions[:1], history.rewards[:1], task=history.task
    )
    cache.decide(["a"], [past])
    near(cache.decide(["a"], [history])[0], policy.act([history]), scale=HIGH)
    assert cache.counts["hits"] == 1
    for part, at in (("observations", 0), ("actions", 0), ("rewards", 0)):
        changed = {
            name: getattr(history, name).copy() for name in ("observations", "actions", "rewards")
        }
        changed[part][at] += 1
        other = History(**changed, task=history.task)
        cache.forget("a")
        cache.decide(["a"], [history])
        near(cache.decide(["a"], [other])[0], policy.act([other]), scale=HIGH)
    other = History(history.observations, history.actions, history.rewards, task="Bid high.")
    near(cache.decide(["a"], [other])[0], policy.act([other]), scale=HIGH)
    other = History(
        history.observations, history.actions, history.rewards, target_return=3.0, task="Bid high."
    )
    near(cache.decide(["a"], [other])[0], policy.act([other]), scale=HIGH)
    assert cache.counts["hits"] == 1


def test_the_cache_stays_within_its_memory_for_longer_texts():
    policy = policy_of()
    cache = Cache(policy, room=300_000, rows=1000, horizon=STEPS)
    before = cache.rows
    short = History(np.zeros((1, 21), np.float32), np.zeros((0, 1), np.float32), np.zeros(0))
    long = History(
        np.zeros((1, 21), np.float32),
        np.zeros((0, 1), np.float32),
        np.zeros(0),
        task="Bid for as much as you can. " * 10,
    )
    for history in (short, long):
        actions, _ = cache.decide(["a", "b"], [history] * 2)
        near(actions, policy.act([history] * 2), scale=HIGH)
        assert 0 < cache.bytes == cache.session.nbytes <= 300_000
    assert 1 < cache.rows < before
    assert Cache(policy, room=1000, rows=5, horizon=STEPS).decide(["a"], [long])[0] == policy.act(
        [long]
    )


def test_a_journal_reads_back_requests_and_answers(tmp_path):
    manager = CampaignManager(policy_of(), SPEC, Journal(tmp_path / "deep" / "j"), name="m1")
    id = manager.open(**settings(0), name="shoes")
    other = manager.open(**settings(1))
    answers = [manager.tick(id, **drawn(0, t)) for t in range(3)]
    manager.close(other)
    journal = Journal(tmp_path / "deep" / "j")
    first, second = journal.campaigns()
    assert (first["id"], first["name"], first["budget"], first["ended"]) == (id, "shoes", 900, None)
    assert second["ended"] == "closed" and "a strict cost limit of 61" in second["text"]
    ticks = list(journal.ticks(id))
    assert [tick["request"] for tick in ticks] == [drawn(0, t) for t in range(3)] and [
        tick["answer"] for tick in ticks
    ] == answers
    assert answers[0]["model"] == "m1"
    assert journal.list_latest(1) == ([(second, None)], second["id"])
    assert journal.list_latest(9) == ([(second, None), (first, answers[2])], None)
    assert journal.count_open() == 1


def test_a_full_journal_refuses_a_tick_and_counts_nothing(tmp_path):
    manager = CampaignManager(policy_of(), SPEC, Journal(tmp_path / "j"))
    id = manager.open(**settings(0))
    pages = manager.journal._writer.execute("PRAGMA page_count").fetchone()[0]
    manager.journal._writer.execute(f"PRAGMA max_page_count={pages}")
    answers, t = [], 0
    with pytest.raises(sqlite3.OperationalError, match="full"):
        for t in range(STEPS):
            answers.append(manager.tick(id, **drawn(0, t)))
    manager.journal._writer.execute("PRAGMA max_page_count=1000000")
    answers += [manager.tick(id, **drawn(0, t)) for t in range(len(answers), STEPS)]
    assert [a["multiplier"] for a in answers] == play(CampaignManager(manager.policy, SPEC))[
        0
    ].tolist()


def test_a_write_is_atomic(tmp_path):
    journal = Journal(tmp_path / "j")
    with pytest.raises(sqlite3.IntegrityError):
        journal.write(
            [
                insert_campaign("a", None, {}),
                ("INSERT INTO campaigns (id, opened, facts) VALUES (?, NULL, ?)", ("b", "{}")),
            ]
        )
    assert list(journal.campaigns()) == []
    assert journal.write(
        [
            insert_campaign("a", None, {}),
            insert_tick("a", 0, "{}", "1"),
            insert_tick("a", 0, "{}", "2"),
        ]
    ) == [True, True, False]
    assert journal.tick("a", 0) == ("{}", "1")


def test_another_file_is_not_taken_for_a_journal(tmp_path):
    (tmp_path / "text").write_text("not a database " * 100, encoding="utf-8")
    with pytest.raises(
        ValueError, match="journal: expected a file to write, or one written by a server"
    ):
        Journal(tmp_path / "text")
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE cats (name)")
    other.close()
    with pytest.raises(
        ValueError, match="journal: expected one of version 3, got another database"
    ):
        Journal(tmp_path / "other")
