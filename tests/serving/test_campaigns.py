"""A campaign's life: the bids are the policy's own, whatever is forgotten in between; what is told twice counts once; guards hold."""

import json
import sqlite3

import numpy as np
import pytest
import torch

from decisionllm.datasets.auction import shown
from decisionllm.envs.auction.campaign import Campaigns
from decisionllm.envs.auction.journal import Journal, opened, ticked
from decisionllm.eval.auction import Auction
from decisionllm.schema import History, Spec
from decisionllm.serving.campaigns import Desk, Refused, guarded, steady
from decisionllm.serving.kv_cache import Cache
from tests.conftest import make_policy, near

pytestmark = pytest.mark.numeric

STEPS = 12
HIGH = 300.0  # the multipliers of the policies here lie within 0 and this
OPTIONS = {"show": "official", "facts": "progress", "returns": "value", "features": "repaired", "text": "informative"}
REACH = {"target_return": None, "max_return_expectile": 0.9}


def drawn(campaign, step):
    """What the last step brought to a campaign, and what is coming: the same for the same numbers, whatever was bid."""
    step, rng = int(step), np.random.default_rng([campaign, step])
    value, volume = (float(x) for x in (rng.uniform(0.0002, 0.001), rng.integers(5000, 20000)))
    result = {
        "bid": rng.uniform(0.01, 0.1), "market_price": rng.uniform(0.05, 0.2), "value": rng.uniform(0.0002, 0.001),
        "conversion": rng.uniform(0, 0.001), "won": rng.uniform(0, 0.1), "volume": 9000.0, "spend": rng.uniform(0, 100),
        "conversions": float(rng.integers(4)), "exposed_value": rng.uniform(0, 2),
    }  # fmt: skip
    return {"index": step, "result": result if step else None, "coming": {"value": value, "volume": volume}, "key": f"k{step}"}


def facts(campaign):
    return {"budget": 900.0 + 10 * campaign, "target_cpa": 60.0 + campaign, "category": campaign % 6, "horizon": STEPS}


def policy_of(options=OPTIONS, **changes):
    """A policy with random weights in the units of drawn campaigns."""
    seen = []
    for i in range(20):
        world = Campaigns([900.0], [60.0], steps=STEPS)
        for step in range(STEPS):
            told = drawn(i, step)
            if step:
                world.record(**told["result"])
            seen.append(
                shown(world.observe(**told["coming"]), world.context(), show=options["show"], facts=options["facts"])[0]
            )
    policy = make_policy(
        Spec(len(seen[0]), 1, STEPS, (0.0,), (HIGH,)), **{"target_return": 9.0, "window": 6, "stride": 2} | changes
    )
    policy.model.normalizer.fit(np.array(seen, np.float32), np.linspace(0, 12, 100, dtype=np.float32))
    return policy


def by_hand(policy, campaign, answers, step, options=OPTIONS):
    """What Policy.act answers to a campaign that was answered so, its history put together here."""
    world, observations, rewards, before = (
        Campaigns([facts(campaign)["budget"]], [facts(campaign)["target_cpa"]], steps=STEPS),
        [],
        [],
        0.0,
    )
    for t in range(step + 1):
        told = drawn(campaign, t)
        if t:
            world.record(**told["result"])
            rewards.append(float(world.exposed_value[0]) - before)
            before = float(world.exposed_value[0])
        observations.append(
            shown(world.observe(**told["coming"]), world.context(), show=options["show"], facts=options["facts"])[0]
        )
    f = facts(campaign)
    size = "small" if f["budget"] < 2500 else "medium"
    task = (
        f"Auction, advertiser of category {f['category']}. Bid for impressions over one day of 48 steps. Get as many conversions as you "
        f"can within a {size} budget of {f['budget']:g}, at a strict cost limit of {f['target_cpa']:g} for each."
    )
    done = np.array(answers[:step], np.float32).reshape(-1, 1)
    return float(policy.act([History(np.array(observations, np.float32), done, np.array(rewards), task=task)])[0, 0])


def play(desk, count=1, steps=STEPS):
    """Campaigns played one after the other: the multipliers, (count, steps)."""
    ids = [desk.open(**facts(i)) for i in range(count)]
    return np.array([[desk.tick(id, **drawn(i, t))["multiplier"] for t in range(steps)] for i, id in enumerate(ids)])


@pytest.mark.parametrize("options", [{}, REACH], ids=["told", "what can be reached"])
def test_bids_are_those_of_the_policy_to_the_last_bit(options):
    policy = policy_of(**options)
    desk = Desk(policy, OPTIONS)
    for i, multipliers in enumerate(play(desk, 2)):
        assert len(set(multipliers)) == STEPS and not desk.counts["fallback", "model"]
        for t in range(STEPS):
            assert multipliers[t] == by_hand(policy, i, multipliers, t), f"step {t}"


@pytest.mark.parametrize("options", [{}, REACH, {"window": 1, "stride": 1}, {"backbone": "gpt2"}], ids=str)
def test_bids_from_the_cache_are_those_of_the_policy_whoever_is_asked_with_them(options):
    """Seven campaigns, some of them at a time, with room for three: each loses its row again and again."""
    policy, rng, now, answers = policy_of(**options), np.random.default_rng(0), np.zeros(7, int), [[] for _ in range(7)]
    desk = Desk(policy, OPTIONS, cache=10**9, kept=3)
    ids = [desk.open(**facts(i)) for i in range(7)]
    while (now < STEPS).any():
        asked = rng.permutation(np.flatnonzero((now < STEPS) & (rng.random(7) < 0.4)))
        pending = [desk.admit(ids[i], drawn(i, now[i])) for i in asked]
        if pending:
            for i, p, decided in zip(
                asked, pending, desk.decide([(p.campaign.id, p.campaign.history()) for p in pending]), strict=True
            ):
                desk.settle(p, decided)
                assert desk.journal.write(desk.entries(p)) == [True]
                desk.commit(p)
                answers[i].append(json.loads(p.answer)["multiplier"])
                now[i] += 1
    for i in range(7):
        wanted = [by_hand(policy, i, answers[i], t) for t in range(STEPS)]
        near(answers[i], wanted, scale=HIGH)
        assert np.std(wanted) > 1
    assert desk.cache.counts["evictions"] > 10 and desk.cache.counts["hits"] > 5 and desk.counts["rebuilt", ""] > 10


def test_a_campaign_that_is_forgotten_goes_on_as_if_it_had_not_been(tmp_path):
    policy = policy_of()
    wanted = play(Desk(policy, OPTIONS), 3)
    desk = Desk(policy, OPTIONS, Journal(tmp_path / "j"), kept=1)
    ids = [desk.open(**facts(i)) for i in range(3)]
    got = [[] for _ in range(3)]
    for t in range(STEPS):
        if t == 5:  # and so does the whole desk
            desk = Desk(policy, OPTIONS, Journal(tmp_path / "j"), kept=1)
        for i in range(3):
            got[i].append(desk.tick(ids[i], **drawn(i, t))["multiplier"])
    np.testing.assert_array_equal(got, wanted)


def test_two_desks_with_one_journal_are_one(tmp_path):
    """Each tick may come to either; each may be repeated to the other."""
    policy = policy_of()
    (wanted,) = play(Desk(policy, OPTIONS))
    desks = [Desk(policy, OPTIONS, Journal(tmp_path / "j")) for _ in range(2)]
    id = desks[0].open(**facts(0))
    for t in range(STEPS):
        first = desks[t // 2 % 2].tick(id, **drawn(0, t))
        assert first["multiplier"] == wanted[t]
        assert desks[1 - t // 2 % 2].tick(id, **drawn(0, t)) == first
    stale = Desk(policy, OPTIONS, Journal(tmp_path / "j"))
    stale._rebuilt(id)
    desks[0].close(id)
    with pytest.raises(Refused, match="has ended"):
        stale.tick(id, **drawn(0, STEPS) | {"coming": None})


def test_a_race_to_the_same_tick_has_one_answer(tmp_path):
    policy = policy_of()
    desks = [Desk(policy, OPTIONS, Journal(tmp_path / "j")) for _ in range(2)]
    id = desks[0].open(**facts(0))
    late = desks[1].admit(id, drawn(0, 0))
    answer = desks[0].tick(id, **drawn(0, 0))
    desks[1].settle(late, (np.array([77.0]), 1.0))
    assert desks[1].journal.write(desks[1].entries(late)) == [False]
    assert desks[1].tick(id, **drawn(0, 0)) == answer


def test_what_is_told_twice_counts_once_and_what_does_not_fit_is_refused():
    desk = Desk(policy_of(), OPTIONS)
    id = desk.open(**facts(0))
    answers = [desk.tick(id, **drawn(0, t)) for t in range(3)]
    spend = sum(drawn(0, t)["result"]["spend"] for t in (1, 2))
    assert answers[2]["spend"] == pytest.approx(spend) and answers[2]["remaining"] == pytest.approx(900 - spend)
    assert [desk.tick(id, **drawn(0, t)) for t in range(3)] == answers
    assert desk.counts["bid", ""] == 3
    for change in ({"key": "other"}, {"coming": {"value": 0.5, "volume": 1.0}}, {"result": drawn(1, 1)["result"]}):
        with pytest.raises(Refused, match="step 1 was answered to another request") as refused:
            desk.tick(id, **drawn(0, 1) | change)
        assert (refused.value.status, refused.value.field, refused.value.more) == (409, "index", {"expected": 3})
    for t in (4, 11):
        with pytest.raises(Refused, match=f"index: expected 3, got {t}") as refused:
            desk.tick(id, **drawn(0, t))
        assert refused.value.more == {"expected": 3}
    with pytest.raises(Refused, match="result: expected what step 2 brought"):
        desk.tick(id, **drawn(0, 3) | {"result": None})
    with pytest.raises(Refused, match="result: expected none before the first step"):
        desk.tick(desk.open(**facts(1)), **drawn(0, 1) | {"index": 0})
    with pytest.raises(Refused, match="id: no such campaign"):
        desk.tick("nobody", **drawn(0, 0))
    for t in range(3, STEPS):
        desk.tick(id, **drawn(0, t))
    with pytest.raises(Refused, match=f"coming: expected none: the campaign has {STEPS} steps"):
        desk.tick(id, **drawn(0, STEPS))
    last = drawn(0, STEPS) | {"coming": None}
    end = desk.tick(id, **last)
    assert end["multiplier"] == 0 and end["spend"] == pytest.approx(
        sum(drawn(0, t)["result"]["spend"] for t in range(1, STEPS + 1))
    )
    assert desk.tick(id, **last) == end and desk.journal.campaign(id)["ended"] == "over"
    with pytest.raises(Refused, match="the campaign has ended"):
        desk.tick(id, **drawn(0, STEPS + 1) | {"coming": None})


def test_campaigns_that_a_policy_cannot_serve_are_refused():
    desk = Desk(policy_of(), OPTIONS)
    with pytest.raises(Refused, match="horizon: expected at most 12 steps"):
        desk.open(**facts(0) | {"horizon": 13})
    with pytest.raises(ValueError, match="horizon: expected at most 12, the longest training episode, got 13"):
        Desk(policy_of(), OPTIONS, horizon=13)
    with pytest.raises(Refused, match="text: expected none"):
        Desk(policy_of(), OPTIONS | {"text": "none"}).open(**facts(0), text="Bid high.")
    with pytest.raises(Refused, match="target_return: expected none"):
        Desk(policy_of(condition_on="none"), OPTIONS).open(**facts(0), target_return=3.0)
    with pytest.raises(ValueError, match="decode: expected mode or mean, got sample"):
        Desk(policy_of(decode="sample"), OPTIONS)


def test_of_two_that_open_with_one_key_there_is_one():
    desk = Desk(policy_of(), OPTIONS)
    assert desk.open(**facts(0), key="a") == desk.open(**facts(0), key="a") != desk.open(**facts(0), key="b")


def test_a_replayed_day_is_bid_for_as_an_evaluation_does():
    """The world of `evaluate`, its features and its rewards, through the desk: the same multipliers."""
    options = OPTIONS | {"text": "informative", "facts": "numbers"}
    env = Auction(
        1,
        periods="3",
        positions="9",
        opportunities=2000,
        **{k: options[k] for k in ("show", "facts", "returns", "text", "features")},
    )
    first = env.reset(0)
    policy = make_policy(Spec(first.shape[1], 1, 48, (0.0,), (300.0,)), window=6, stride=2, target_return=20.0)
    policy.model.normalizer.observation_scale.fill_(50.0)
    session, seen, brought = policy.begin(env.tasks, 48), first, None
    desk = Desk(policy, options)
    id = desk.open(budget=float(env.budgets[0]), target_cpa=float(env.target_cpa[0]), category=int(env.category[0]))
    result = None
    for t in range(48):
        value, volume = env.world.due(t)
        answer = desk.tick(id, index=t, result=result, coming={"value": float(value[0]), "volume": float(volume[0])})
        session.observe(seen, brought)
        if not answer["guards"]:
            near(answer["multiplier"], session.decide()[0, 0], scale=HIGH)
        bid, c = np.array([answer["multiplier"]]), env.campaigns
        session.record_action(bid[:, None])
        result = {name: float(np.broadcast_to(x, 1)[0]) for name, x in env.world.step(t, bid, c.remaining).items()}
        paid = env.paid()
        c.record(**{name: np.array([x]) for name, x in result.items()})
        seen, brought = env.observe(), env.paid() - paid
    assert t == 47 and desk.counts["bid", ""] > 20


def campaign(budget=100.0, spent=0.0, step=0, **more):
    """A campaign of ten steps of which `step` are over, all of the money spent in the last."""
    desk = Desk(policy_of(), OPTIONS)
    id = desk.open(budget=budget, target_cpa=10.0, horizon=10, **more)
    made = desk._rebuilt(id)
    for t in range(step):
        made = (
            made.told(drawn(0, t), OPTIONS)
            if not t
            else made.told({"coming": drawn(0, t)["coming"], "result": nothing()}, OPTIONS)
        )
        made = made.record_action(20.0)
    if step:
        made = made.told({"coming": drawn(0, step)["coming"], "result": nothing() | {"spend": spent}}, OPTIONS)
    return made


def nothing():
    return dict.fromkeys(drawn(0, 1)["result"], 0.0)


def test_guards_hold_a_bid_back():
    coming = {"value": 0.01, "volume": 1000.0}
    assert guarded(20.0, campaign(), coming) == (20.0, [])
    assert guarded(-3.0, campaign(), coming) == (0.0, ["negative"])
    assert guarded(20.0, campaign(bid_cap=0.1), coming) == (pytest.approx(10), ["bid cap"])
    assert guarded(20000.0, campaign(spent=40, step=1), coming) == (
        pytest.approx(6000),
        ["remaining"],
    )  # 60 for one mean opportunity
    assert guarded(20.0, campaign(spent=99.95, step=1), coming) == (0.0, ["budget spent"])
    assert guarded(20.0, campaign(spent=120, step=1), coming)[0] == 0
    assert guarded(20.0, campaign(), coming, pacing=10) == (
        pytest.approx(10),
        ["pacing"],
    )  # 10 even shares of 10; 10 x 0.01 x 1000
    assert guarded(20.0, campaign(spent=10, step=1), coming, pacing=30) == (20.0, [])
    assert guarded(20.0, campaign(), {"value": 0.0, "volume": 0.0}, pacing=1) == (20.0, [])
    capped = campaign()
    for cap in np.random.default_rng(0).uniform(0.01, 1, 200).tolist():
        capped.facts["bid_cap"] = cap
        multiplier, _ = guarded(1e6, capped, coming)
        assert multiplier * 0.01 <= cap < 1.0001 * multiplier * 0.01


def test_a_fallback_goes_for_an_even_share_of_what_is_left():
    assert steady(campaign()) == 10  # the limit
    assert steady(campaign(spent=10, step=1)) == pytest.approx(
        10
    )  # half price would do; 20 is above the limit, who paid too much
    paid_off = campaign(budget=100, spent=20, step=2)  # 80 left for 8 steps: half as fast
    paid_off.world.conversions[:] = 50
    assert steady(paid_off) == pytest.approx(10)
    idle = campaign(step=3)
    assert steady(idle) == pytest.approx(40)  # nothing was spent: twice as much, and no more
    hasty = campaign(spent=90, step=1)
    hasty.world.conversions[:] = 50
    assert steady(hasty) == pytest.approx(10)  # not less than half


def test_a_model_that_fails_is_answered_for_and_its_campaign_goes_on():
    policy = policy_of()
    (wanted,) = play(Desk(policy, OPTIONS), steps=2)
    for cache in (0, 10**8):
        desk = Desk(policy, OPTIONS, cache=cache)
        id = desk.open(**facts(0))
        near(desk.tick(id, **drawn(0, 0))["multiplier"], wanted[0], scale=HIGH)
        weight = policy.model.head.out.weight
        whole = weight.data.clone()
        weight.data.fill_(torch.nan)
        answer = desk.tick(id, **drawn(0, 1))
        weight.data.copy_(whole)
        assert answer["fallback"] == "model" and answer["return_to_go"] is None
        assert answer["multiplier"] == desk.tick(id, **drawn(0, 1))["multiplier"] > 0
        after = desk.tick(id, **drawn(0, 2))
        assert after["fallback"] is None
        near(after["multiplier"], by_hand(policy, 0, [wanted[0], answer["multiplier"]], 2), scale=HIGH)
        assert desk.counts["fallback", "model"] == 1


def test_a_fallback_never_bids_more_than_training_saw():
    desk = Desk(policy_of(), OPTIONS)
    id = desk.open(**facts(0))
    for t in range(6):  # nothing is spent, so that each is twice the last
        tick = drawn(0, t) | {"result": nothing() if t else None}
        pending = desk.admit(id, tick)
        desk.settle(pending, None)
        desk.journal.write(desk.entries(pending))
        desk.commit(pending)
    assert [a["answer"]["multiplier"] for a in desk.journal.ticks(id)] == [60, 120, 240, 300, 300, 300]


def test_what_fails_together_is_tried_alone():
    """One history that is too long for its row takes no other with it."""
    desk = Desk(policy_of(), OPTIONS, cache=10**8)
    ids = [desk.open(**facts(i)) for i in range(2)]
    good = [desk.admit(id, drawn(i, 0)).campaign.history() for i, id in enumerate(ids)]
    long = History(np.zeros((40, 21), np.float32), np.zeros((39, 1), np.float32), np.zeros(39))
    (a, _), bad, (b, _) = desk.decide([(ids[0], good[0]), ("long", long), (ids[1], good[1])])
    assert isinstance(bad, ValueError)
    assert [a[0], b[0]] == [by_hand(desk.policy, i, [], 0) for i in range(2)]


def test_a_row_that_holds_another_past_is_not_used():
    policy, told = policy_of(), [drawn(0, t) for t in range(3)]
    cache, desk = Cache(policy, room=10**8, rows=2, horizon=STEPS), Desk(policy, OPTIONS)
    id = desk.open(**facts(0))
    for t in range(2):
        desk.tick(id, **told[t])
    history = desk.admit(id, told[2]).campaign.history()
    past = History(history.observations[:2], history.actions[:1], history.rewards[:1], task=history.task)
    cache.decide(["a"], [past])
    near(cache.decide(["a"], [history])[0], policy.act([history]), scale=HIGH)
    assert cache.counts["hits"] == 1
    for part, at in (("observations", 0), ("actions", 0), ("rewards", 0)):
        changed = {name: getattr(history, name).copy() for name in ("observations", "actions", "rewards")}
        changed[part][at] += 1
        other = History(**changed, task=history.task)
        cache.forget("a")
        cache.decide(["a"], [history])
        near(cache.decide(["a"], [other])[0], policy.act([other]), scale=HIGH)
    other = History(history.observations, history.actions, history.rewards, task="Bid high.")
    near(cache.decide(["a"], [other])[0], policy.act([other]), scale=HIGH)
    other = History(history.observations, history.actions, history.rewards, target_return=3.0, task="Bid high.")
    near(cache.decide(["a"], [other])[0], policy.act([other]), scale=HIGH)
    assert cache.counts["hits"] == 1


def test_the_cache_stays_within_its_room_also_for_longer_texts():
    policy = policy_of()
    cache = Cache(policy, room=300_000, rows=1000, horizon=STEPS)
    before = cache.rows
    short = History(np.zeros((1, 21), np.float32), np.zeros((0, 1), np.float32), np.zeros(0))
    long = History(
        np.zeros((1, 21), np.float32), np.zeros((0, 1), np.float32), np.zeros(0), task="Bid for as much as you can. " * 10
    )
    for history in (short, long):
        actions, _ = cache.decide(["a", "b"], [history] * 2)
        near(actions, policy.act([history] * 2), scale=HIGH)
        assert 0 < cache.bytes == cache.session.nbytes <= 300_000
    assert 1 < cache.rows < before
    assert Cache(policy, room=1000, rows=5, horizon=STEPS).decide(["a"], [long])[0] == policy.act([long])


def test_a_journal_reads_back_what_was_asked_and_what_was_answered(tmp_path):
    desk = Desk(policy_of(), OPTIONS, Journal(tmp_path / "deep" / "j"), name="m1")
    id, other = desk.open(**facts(0), name="shoes"), desk.open(**facts(1))
    answers = [desk.tick(id, **drawn(0, t)) for t in range(3)]
    desk.close(other)
    journal = Journal(tmp_path / "deep" / "j")
    first, second = journal.campaigns()
    assert (first["id"], first["name"], first["budget"], first["ended"]) == (id, "shoes", 900, None)
    assert second["ended"] == "closed" and "a strict cost limit of 61" in second["text"]
    ticks = list(journal.ticks(id))
    assert [tick["request"] for tick in ticks] == [drawn(0, t) for t in range(3)] and [
        tick["answer"] for tick in ticks
    ] == answers
    assert answers[0]["model"] == "m1"
    assert journal.latest(1) == [(second, None)] and journal.latest(9)[1] == (first, answers[2])
    assert journal.still_open() == 1


def test_a_journal_that_is_full_refuses_and_nothing_was_counted(tmp_path):
    desk = Desk(policy_of(), OPTIONS, Journal(tmp_path / "j"))
    id = desk.open(**facts(0))
    pages = desk.journal._writer.execute("PRAGMA page_count").fetchone()[0]
    desk.journal._writer.execute(f"PRAGMA max_page_count={pages}")
    answers, t = [], 0
    with pytest.raises(sqlite3.OperationalError, match="full"):
        for t in range(STEPS):
            answers.append(desk.tick(id, **drawn(0, t)))
    desk.journal._writer.execute("PRAGMA max_page_count=1000000")
    answers += [desk.tick(id, **drawn(0, t)) for t in range(len(answers), STEPS)]
    assert [a["multiplier"] for a in answers] == play(Desk(desk.policy, OPTIONS))[0].tolist()


def test_a_write_is_whole_or_not_at_all(tmp_path):
    journal = Journal(tmp_path / "j")
    with pytest.raises(sqlite3.IntegrityError):
        journal.write([opened("a", None, {}), ("INSERT INTO campaigns (id, opened, facts) VALUES (?, NULL, ?)", ("b", "{}"))])
    assert list(journal.campaigns()) == []
    assert journal.write([opened("a", None, {}), ticked("a", 0, "{}", "1"), ticked("a", 0, "{}", "2")]) == [True, True, False]
    assert journal.tick("a", 0) == ("{}", "1")


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a database " * 100)
    with pytest.raises(ValueError, match="journal: expected a file to write, or one written by a server"):
        Journal(tmp_path / "text")
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE cats (name)")
    other.close()
    with pytest.raises(ValueError, match="journal: expected one of version 1, got another database"):
        Journal(tmp_path / "other")
    Journal(tmp_path / "old")._writer.execute("PRAGMA user_version=0")
    with pytest.raises(ValueError, match="journal: expected one of version 1, got version 0"):
        Journal(tmp_path / "old")
