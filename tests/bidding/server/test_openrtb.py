"""OpenRTB: prices per mille, floors, currencies, auction types, seats and categories, checked by
hand.
"""

import asyncio
import math
import sqlite3
import sys
import threading
import time
from contextlib import closing
from json import dumps

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.rows import end_campaign, insert_campaign, insert_tick
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.exchange import open_exchange, parse_price
from decisionllm.bidding.server.openrtb import EXAMPLE, BidRequest, per_mille, respond
from tests.bidding.server.test_campaigns import SPEC, STEPS, policy_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.conftest import PATIENCE

STATE = {
    "multiplier": 50.0,
    "remaining": 100.0,
    "max_bid": 100.0,
    "target_cpa": 40.0,
    "ended": False,
}


ONE_IMPRESSION = ({},)


def request(imps=ONE_IMPRESSION, **fields):
    """A valid request: a value of 0.02 per impression, no conditions."""
    made = [{"id": str(i + 1), "ext": {"value": 0.02}} | imp for i, imp in enumerate(imps)]
    body = {"id": "r", "imp": made, "ext": {"campaign": "c1"}} | fields
    return BidRequest.model_validate(body)


def prices(campaign=STATE, *, imps=ONE_IMPRESSION, **fields):
    response, reason = respond(request(imps, **fields), campaign)
    assert (response is None) == (reason is not None)
    return reason or [(bid["impid"], bid["price"]) for bid in response["seatbid"][0]["bid"]]


def test_a_bid_is_multiplier_times_value_per_mille():
    assert per_mille(1.0) == 1000.0
    assert prices() == [("1", 1000.0)], "50 x 0.02 = 1 currency an impression"
    response, _ = respond(request(), STATE)
    assert response == {
        "id": "r",
        "cur": "USD",
        "seatbid": [{"seat": "decisionllm", "bid": [{"id": "1", "impid": "1", "price": 1000.0}]}],
    }


def test_a_floor_is_per_mille_and_a_bid_may_equal_it():
    assert prices(imps=[{"bidfloor": 1000.0}]) == [("1", 1000.0)]
    assert prices(imps=[{"bidfloor": 1000.1}]) == "floor"
    assert prices(imps=[{"bidfloor": 1000.1}, {"bidfloor": 2.0}]) == [("2", 1000.0)], (
        "the other impression is bid for"
    )
    assert prices(STATE | {"multiplier": 0.0}) == "floor", "nothing is no bid"


def test_a_first_price_bid_is_at_most_target_cpa_times_value():
    assert prices(at=1) == [("1", 800.0)], "40 x 0.02, where a second price takes 50 x 0.02"
    assert (
        prices(STATE | {"multiplier": 30.0}, at=1)
        == prices(STATE | {"multiplier": 30.0}, at=2)
        == [("1", 600.0)]
    )
    assert prices(at=3) == prices(at=500) == "auction type"


def test_bids_of_one_answer_are_within_the_remaining_budget():
    assert prices(STATE | {"remaining": 1.0}) == [("1", 1000.0)]
    assert prices(STATE | {"remaining": 0.99}) == "budget"
    assert prices(STATE | {"remaining": 2.5}, imps=[{}] * 4) == [("1", 1000.0), ("2", 1000.0)]


def test_no_bid_is_above_max_bid():
    assert (
        prices(STATE | {"max_bid": 0.75}) == [("1", 750.0)]
        and prices(STATE | {"max_bid": 0.0}) == "floor"
    )


def test_another_currency_is_not_converted():
    assert prices(cur=["EUR", "GBP"]) == "currency" and prices(cur=["EUR", "USD"]) == prices(
        cur=[]
    ) == [("1", 1000.0)]
    assert prices(imps=[{"bidfloor": 1.0, "bidfloorcur": "EUR"}]) == "currency"
    assert prices(imps=[{"bidfloorcur": "EUR"}]) == [("1", 1000.0)], "no floor has no currency"
    assert respond(request(cur=["EUR"]), STATE, currency="EUR")[0]["cur"] == "EUR"


def test_excluded_seats_categories_and_campaigns_do_not_bid():
    assert prices(wseat=["other"]) == "seat" and prices(wseat=["other", "decisionllm"]) == [
        ("1", 1000.0)
    ]
    assert prices(bseat=["decisionllm"]) == "seat"
    ext = {"campaign": "c1", "cat": ["IAB7", "IAB25"]}
    assert prices(bcat=["IAB25", "IAB26"], ext=ext) == "category" and prices(
        bcat=["IAB26"], ext=ext
    ) == [("1", 1000.0)]
    assert prices(imps=[{"pmp": {"private_auction": 1}}]) == "private auction"
    assert prices(imps=[{"pmp": {"private_auction": 0, "deals": [{"id": "d"}]}}]) == [("1", 1000.0)]
    assert prices(STATE | {"ended": True}) == "ended"


def test_what_exchanges_send_is_accepted():
    """null is as good as absent, tmax 0 is no limit, and a list of categories may be long."""
    absent = dict.fromkeys(("cur", "wseat", "bseat", "bcat", "tmax", "at", "test"))
    assert prices(imps=[{"bidfloor": None, "bidfloorcur": None, "pmp": None}], **absent) == [
        ("1", 1000.0)
    ]
    assert prices(tmax=0, bcat=[f"IAB{i}" for i in range(5000)], at=2.0) == [("1", 1000.0)]
    assert prices(
        imps=[{"bidfloor": 1.0, "bidfloorcur": None}], ext={"campaign": "c1", "cat": None}
    ) == [("1", 1000.0)]
    assert prices(
        imps=[{"pmp": {"private_auction": None, "deals": [{"id": "d", "bidfloor": 1.5}]}}]
    ) == [("1", 1000.0)]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"imp": []}, "imp"),
        ({"imp": [{"id": "1", "ext": {"value": 1.2}}]}, "value"),
        ({"imp": [{"id": "1"}]}, "ext"),
        ({"imp": [{"id": "1", "ext": {"value": float("nan")}}]}, "value"),
        ({"imp": [{"id": "1", "ext": {"value": 0.1}, "bidfloor": -1}]}, "bidfloor"),
        ({"imp": [{"id": "1", "ext": {"value": 0.1}, "bidfloor": False}]}, "bidfloor"),
        ({"tmax": "100"}, "tmax"),
        ({"imp": [{"id": "1", "ext": {"value": True}}]}, "value"),
        ({"imp": [{"id": "1", "ext": {"value": "0.5"}}]}, "value"),
        ({"tmax": -1}, "tmax"),
        ({"ext": {}}, "campaign"),
        ({"test": 2}, "test"),
        ({"id": ""}, "id"),
        ({"imp": None}, "imp"),
    ],
)
def test_a_wrong_request_is_refused_by_its_field(wrong, field):
    with pytest.raises(ValidationError) as refused:
        BidRequest.model_validate(EXAMPLE | wrong)
    assert field in [error["loc"][-1] for error in refused.value.errors()]


def test_the_example_is_valid_and_other_fields_are_ignored():
    whole = EXAMPLE | {
        "site": {"domain": "example.com"},
        "device": {"ua": "x"},
        "source": {"tid": "t"},
    }
    example = BidRequest.model_validate(EXAMPLE)
    assert BidRequest.model_validate(whole) == example
    assert respond(example, STATE)[0]["seatbid"][0]["bid"][0]["price"] == 600.0


@pytest.fixture
def served():
    """A client, the journal of its server, and an open campaign without ticks."""
    journal = Journal()
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, journal)) as client:
        id = client.post(
            "/v1/campaigns", json={"budget": 1000, "target_cpa": 40, "horizon": STEPS}
        ).json()["id"]
        yield client, journal, id


def send(client, id, value=0.02, **fields):
    body = {
        "id": "r",
        "imp": [{"id": "1", "ext": {"value": value}}],
        "ext": {"campaign": id},
    } | fields
    return client.post("/openrtb/2.6/bid", json=body, headers={"x-openrtb-version": "2.6"})


def outcomes(client):
    lines = client.get("/metrics").text.splitlines()
    return {
        line.split('outcome="')[1].split('"')[0] + line.split('test="')[1][0]: float(
            line.split()[-1]
        )
        for line in lines
        if line.startswith("decisionllm_openrtb_total")
    }


def test_a_campaign_bids_the_multiplier_of_its_last_tick(served):
    client, _, id = served
    assert send(client, id).status_code == 204, "no tick yet"
    tick = {"index": 0, "coming": {"value": 0.01, "volume": 100}}
    last = client.post(f"/v1/campaigns/{id}/tick", json=tick).json()
    answer = send(client, id, test=1)
    assert answer.status_code == 200 and answer.headers["x-openrtb-version"] == "2.6"
    (bid,) = answer.json()["seatbid"][0]["bid"]
    assert bid["price"] == 1000 * (last["multiplier"] * 0.02) > 0
    client.delete(f"/v1/campaigns/{id}")
    refused = send(client, id)
    assert (refused.status_code, refused.content, refused.headers["x-openrtb-version"]) == (
        204,
        b"",
        "2.6",
    )
    assert outcomes(client) == {"no tick yet0": 1, "bid1": 1, "ended0": 1}


def test_bids_between_two_ticks_stay_within_the_budget():
    exchange = {"notice_url": "http://localhost/"}
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, exchange=exchange)) as client:
        id = client.post(
            "/v1/campaigns", json={"budget": 10, "target_cpa": 40, "horizon": STEPS}
        ).json()["id"]
        tick = {"index": 0, "coming": {"value": 0.01, "volume": 100}}
        multiplier = client.post(f"/v1/campaigns/{id}/tick", json=tick).json()["multiplier"]

        def bid(**fields):
            answer = send(client, id, 3 / multiplier, **fields)
            return answer.json()["seatbid"][0]["bid"][0] if answer.status_code == 200 else None

        assert bid(test=1)["price"] == pytest.approx(3000), "a test costs nothing"
        first, second, third, *others = (bid() for _ in range(1000))
        assert third["price"] == pytest.approx(3000) and not any(others), "10 are left"
        # it has no token
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as exchange:
            won = first["nurl"].replace("${AUCTION_PRICE}", "500")
            lost = second["lurl"]
            for notice in (won, won, lost):
                assert exchange.get(notice.removeprefix("http://localhost")).status_code == 204
        assert bid() and bid() and not bid(), (
            "0.5 was paid, 3 may still be, and 6 are the two new ones"
        )
        assert 'decisionllm_openrtb_notices_total{kind="win"} 1.0' in client.get("/metrics").text


def opened_with(client, budget):
    """An open campaign with one tick: its id, and the value of an impression for which it
    bids 3.
    """
    id = client.post(
        "/v1/campaigns", json={"budget": budget, "target_cpa": 40, "horizon": STEPS}
    ).json()["id"]
    tick = {"index": 0, "coming": {"value": 0.01, "volume": 100}}
    return id, 3 / client.post(f"/v1/campaigns/{id}/tick", json=tick).json()["multiplier"]


def test_bids_that_expire_without_a_notice_stay_spent_until_the_next_tick():
    with serving(
        create_app(policy_of(), MODEL_INFO, SPEC, exchange={"bid_expiry_s": 0.001})
    ) as client:
        id, value = opened_with(client, 10)
        assert [send(client, id, value).status_code for _ in range(10)] == [200] * 3 + [204] * 7
        result = {
            "bid": 3,
            "market_price": 1,
            "value": 0.01,
            "conversion": 0,
            "won": 0.01,
            "volume": 100,
            "spend": 1,
            "conversions": 0,
            "exposed_value": 0.01,
        }
        tick = {"index": 1, "coming": {"value": 0.01, "volume": 100}, "result": result}
        client.post(f"/v1/campaigns/{id}/tick", json=tick)
        assert send(client, id, value).status_code == 200, "one of the three bids was won, for 1"


NOTICES = {
    "a win after a loss": (["loss", "win?price=3000"], 3),
    "a win after two losses": (["loss", "loss", "win?price=2000"], 2),
    "a win at a price that cannot be read after a loss": (["loss", "win?price=x"], 3),
    "a loss after a win": (["win?price=2000", "loss", "loss"], 2),
    "a win twice after a loss": (["loss", "win?price=2000", "loss", "win?price=2000"], 2),
    "wins at several prices": (["win?price=1000", "win?price=2000", "win?price=1500"], 2),
    "a win above the bid": (["loss", "win?price=9000"], 3),
    "losses alone": (["loss", "loss"], 0),
}


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize(("notices", "spent"), NOTICES.values(), ids=NOTICES)
def test_a_bid_costs_the_highest_price_of_its_notices_once(tmp_path, notices, spent, restarts):
    desk = desk_of(tmp_path / "j", budget=10)
    id = bid_of(desk, 3)
    for notice in notices:
        if restarts:
            close_desk(desk)
            desk = desk_of(tmp_path / "j", budget=10)
        kind, _, price = notice.partition("?price=")
        settle(desk, id, kind, price)
    assert desk.open_bids.committed_amount("c1", 0) == spent and desk.open_bids.count() == 0
    close_desk(desk)


def test_a_win_after_a_loss_and_the_end_of_its_campaign_counts(tmp_path):
    desk = desk_of(tmp_path / "j", budget=10)
    id = bid_of(desk, 3)
    settle(desk, id, "loss")
    desk.journal.write([end_campaign("c1", "closed")])
    settle(desk, id, "win", "3000")
    assert desk.open_bids.committed_amount("c1", 0) == 3
    close_desk(desk)


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("late", [0, 1, 4, 12])
def test_a_feeder_that_is_late_by_some_steps_spends_the_budget_once(tmp_path, late, restarts):
    desk = desk_of(tmp_path / "j", budget=20)
    costs = [0.0] * late  # of each step, as they are reported
    for step in range(12):
        report(desk.journal, step, 20, costs[:step])
        if restarts:
            close_desk(desk)
            desk = desk_of(tmp_path / "j", budget=20)
        ids = [bid_of(desk, 3), bid_of(desk, 3)]
        wins = [id for id in ids if id is not None]
        for id in wins:
            settle(desk, id, "win", "3000")
        costs.append(3.0 * len(wins))
    assert costs[late:] == [6, 6, 6] + [0] * 9, "18 of 20, however late they are reported"
    close_desk(desk)


def test_a_result_above_the_wins_is_corrected_by_a_lower_one(tmp_path):
    desk = desk_of(tmp_path / "j", budget=20)
    costs = [5.0, 0.0, 3.0, 0.0]
    left = []
    for step in range(1, 5):
        settle(desk, bid_of(desk, 3), "win", "3000")
        report(desk.journal, step, 20, costs[:step])
        left.append(20 - sum(costs[:step]) - committed(desk))
    assert left == [15, 14, 11, 8], "3, 6, 9 and 12 were won; 5, 5, 8 and 8 are reported"
    close_desk(desk)


def test_a_result_replaces_wins_whose_price_cannot_be_read(tmp_path):
    desk = desk_of(tmp_path / "j", budget=10)
    settle(desk, bid_of(desk, 3), "win", "${AUCTION_PRICE}")
    assert committed(desk) == 3
    report(desk.journal, 1, 10, [1.0])
    assert committed(desk) == 0
    close_desk(desk)


def test_what_is_left_after_a_result_with_all_wins_has_the_same_bits(tmp_path):
    desk = desk_of(tmp_path / "j", budget=1e4)
    spends = []
    for step in range(1, 40):
        costs = [step / 70, 0.1, step / 30]
        for cost in costs:
            settle(desk, bid_of(desk, cost), "win", repr(1000 * cost))
        spends += [sum(reversed(costs))]
        report(desk.journal, step, 1e4, spends)
        assert committed(desk) == 0.0
    close_desk(desk)


def desk_of(path, budget):
    """An exchange over a journal with one campaign, c1, whose multiplier is 10."""
    journal = Journal(path)
    journal.write([insert_campaign("c1", "c1", {"target_cpa": 40.0, "budget": budget})])
    report(journal, 0, budget, [])
    return open_exchange(journal, CollectorRegistry())


def report(journal, step, budget, costs):
    """Write the answer to a tick that reported these costs so far."""
    left = budget
    for cost in costs:
        left -= cost
    money = {"spend": float(sum(costs)), "remaining": left, "max_bid": 3.0}
    answer = {"index": step, "multiplier": 10.0} | money
    journal.write([insert_tick("c1", step, "{}", dumps(answer))])


def bid_of(desk, price):
    """The id of a bid at this price; None: there is no bid."""
    bidding = desk.bid(request([{"ext": {"value": price / 10}}]), arrived=time.monotonic())
    response = asyncio.run(bidding)
    return None if response is None else response["seatbid"][0]["bid"][0]["id"]


def settle(desk, id, kind, price=""):
    asyncio.run(desk.settle(id, kind, price, ""))


def committed(desk):
    """Currency that the last tick's remaining budget is lowered by."""
    _, last = desk.journal.campaign_and_answer("c1")
    return desk.open_bids.committed_amount("c1", last["index"], reported=last["spend"])


def close_desk(desk):
    desk.open_bids.close()
    desk.journal.close()


def test_servers_of_one_journal_and_a_restart_share_what_bids_may_cost(tmp_path):
    def app():
        return create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))

    with serving(app()) as first, serving(app()) as second:
        id, value = opened_with(first, 10)
        assert [
            send(client, id, value).status_code for client in (first, second, first, second)
        ] == [200, 200, 200, 204]
    with serving(app()) as restarted:
        assert send(restarted, id, value).status_code == 204


NAMES = {
    "a link": "link",
    "a link to a link": "other_folder/link",
    "a linked folder": "linked_folder/j",
    "a path through a linked folder": "linked_folder/../folder/j",
    "a relative path": "./folder/../folder/j",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_budget_is_spent_once_whatever_name_the_journal_has(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "other_folder"):
        (tmp_path / folder).mkdir()
    (tmp_path / "linked_folder").symlink_to("folder")
    (tmp_path / "link").symlink_to("folder/j")
    (tmp_path / "other_folder" / "link").symlink_to("../link")

    def app(path):
        return create_app(policy_of(), MODEL_INFO, SPEC, Journal(path))

    with serving(app(name)) as first, serving(app(tmp_path / "folder" / "j")) as second:
        id, value = opened_with(first, 10)
        order = (first, second, first, second, first)
        assert [send(client, id, value).status_code for client in order] == [200] * 3 + [204] * 2
    for path in (name, "folder/j"):
        with serving(app(path)) as restarted:
            assert send(restarted, id, value).status_code == 204
    assert (tmp_path / "folder" / "j.bids").is_file()


def test_faults_of_the_file_of_bids_are_none_of_the_journal(tmp_path):
    exchange = {"notice_url": "http://localhost/"}
    journal = Journal(tmp_path / "j")
    app = create_app(policy_of(), MODEL_INFO, SPEC, journal, exchange=exchange)
    with serving(app) as client:
        id, value = opened_with(client, 1000)
        lost = send(client, id, value).json()["seatbid"][0]["bid"][0]["lurl"]
        lost = lost.removeprefix("http://localhost")
        with closing(sqlite3.connect(journal.sidecar_path("bids"), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert send(client, id, value).status_code == 204
            refused = client.get(lost)
            assert refused.status_code == 503
            assert refused.json()["detail"][0]["loc"] == ["server", "bids"]
            other.execute("ROLLBACK")
        assert client.get("/readyz").json() == {"status": "ready"}
        assert client.get(lost).status_code == 204
        (tmp_path / "j.bids").unlink()
        assert send(client, id, value).status_code == 204
        ready = client.get("/readyz")
        assert ready.status_code == 200 and ready.json()["status"] == "degraded"
        assert "removed or replaced" in ready.json()["bids"]
        assert outcomes(client) == {"bid0": 1, "busy0": 1, "fault0": 1}
        metrics = client.get("/metrics").text
        assert "decisionllm_openrtb_fault 1.0" in metrics
        assert "decisionllm_journal_fault 0.0" in metrics


def test_the_last_tick_is_bid_on_for_a_limited_time(tmp_path):
    def app(age):
        exchange = {"max_tick_age": age}
        return create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"), exchange=exchange)

    with serving(app(3600.0)) as client:
        id, value = opened_with(client, 10)
        assert send(client, id, value).status_code == 200
        settings = {"budget": 10, "target_cpa": 40, "horizon": STEPS}
        never = client.post("/v1/campaigns", json=settings).json()["id"]
    time.sleep(0.01)
    with serving(app(0.001)) as client:  # also after a restart
        assert send(client, id, value).status_code == send(client, never).status_code == 204
        assert outcomes(client) == {"old tick0": 1, "no tick yet0": 1}
        client.delete(f"/v1/campaigns/{id}")
        assert send(client, id, value).status_code == 204
        assert outcomes(client)["ended0"] == 1


def test_a_late_answer_is_no_bid(served):
    client, _, id = served
    client.post(
        f"/v1/campaigns/{id}/tick", json={"index": 0, "coming": {"value": 0.01, "volume": 100}}
    )
    assert send(client, id, tmax=1000 * PATIENCE).status_code == 200
    assert send(client, id, tmax=1).status_code == 204, "time to send the answer is reserved"
    assert outcomes(client) == {"bid0": 1, "deadline0": 1}


def test_an_answer_that_is_late_once_it_is_written_frees_its_price(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("decisionllm.bidding.server.exchange.time.monotonic", lambda: now[0])
    journal = Journal()
    tick = {"index": 0, "multiplier": 50.0, "remaining": 100.0, "max_bid": 100.0}
    journal.write(
        [insert_campaign("c1", None, {"target_cpa": 40.0}), insert_tick("c1", 0, "{}", dumps(tick))]
    )
    registry = CollectorRegistry()
    desk = open_exchange(journal, registry, shading=True)

    async def play(late):
        bid = asyncio.create_task(desk.bid(request(tmax=100, at=1), arrived=0.0))
        # after the bid is decided, before it is written
        asyncio.get_running_loop().call_soon(now.__setitem__, 0, late)
        return await bid

    for late, sent in ((0.08, True), (0.11, False)):
        now[0] = 0.0
        assert (asyncio.run(play(late)) is not None) == sent
        assert desk.open_bids.count() == 1 and desk.open_bids.committed_amount("c1", 0) == 0.8
    for kind in ("sent", "unshaded"):
        name = "decisionllm_openrtb_first_price_total"
        assert registry.get_sample_value(name, {"kind": kind}) == 0.8, "40 x 0.02, sent once"


@pytest.mark.parametrize(
    ("price", "paid"),
    [("500", 0.5), ("0.25", 0.00025), ("0", 0.0)]
    + [(wrong, math.inf) for wrong in ("-5", "1_0", "nan", "1e9", "\u0661", "", "${PRICE}")],
)
def test_a_notice_whose_price_is_no_plain_number_costs_the_bid(price, paid):
    assert parse_price(price) == paid


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells how long a request waited to be read"
)
def test_the_time_before_a_request_is_read_counts(served):
    client, _, id = served
    client.post(
        f"/v1/campaigns/{id}/tick", json={"index": 0, "coming": {"value": 0.01, "volume": 100}}
    )
    loop = client.app.state.service.loop
    busy = threading.Event()
    over = threading.Event()
    loop.call_soon_threadsafe(lambda: (busy.set(), over.wait(PATIENCE)))
    busy.wait(PATIENCE)
    threading.Timer(1.0, over.set).start()
    assert (
        send(client, id, tmax=700).status_code == 204
        and send(client, id, tmax=1000 * PATIENCE).status_code == 200
    )
    assert outcomes(client) == {"deadline0": 1, "bid0": 1}


def test_a_request_that_waited_too_long_has_no_bid():
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, exchange={"bid_wait": 0.0})) as client:
        assert send(client, "any").status_code == 204 and outcomes(client) == {"busy0": 1}
        assert client.get("/notices/unknown/win").status_code == 204, "notices are always read"


def test_a_wrong_request_over_http_names_its_field(served):
    client, _, id = served
    unknown = send(client, "unknown")
    worthless = send(client, id, value=2)
    assert unknown.status_code == 404 and unknown.json()["detail"][0]["loc"] == [
        "body",
        "ext.campaign",
    ]
    assert worthless.status_code == 422 and worthless.json()["detail"][0]["loc"] == [
        "body",
        "imp",
        0,
        "ext",
        "value",
    ]
