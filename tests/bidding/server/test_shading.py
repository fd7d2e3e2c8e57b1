"""Bid shading in the server: notices are learned from, a restart and replicas know them, and no bid
is ever raised.
"""

import re
import sqlite3
from contextlib import closing

import httpx
import pytest

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.server import shading as module
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.openrtb import respond
from decisionllm.bidding.server.shading import BidShading
from tests.bidding.server.test_campaigns import SPEC, STEPS, policy_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.bidding.server.test_openrtb import STATE, opened_with, outcomes, request, send
from tests.conftest import PATIENCE

EXCHANGE = {"notice_url": "http://localhost/", "shading": True}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Curves are fitted at every bid, and time stands still unless a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(module, "REFRESH", 0.0)
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


def learn(shading, count, *, price, won, least=None, campaign="c"):
    """Bids of this price that have this result."""
    for i in range(count):
        shading.record_sent(campaign, [f"{campaign}{price}{won}{i}"], [price])
        shading.settle(f"{campaign}{price}{won}{i}", won=won, least=least)


def bid(shading, most=2.0, campaign="c"):
    return shading.bid(campaign, most, most=most, floor=0.0)


def test_bids_fall_to_what_won_and_only_of_that_campaign():
    shading = BidShading(expiry=60)
    learn(shading, 60, price=1.0, won=True)
    learn(shading, 39, price=0.5, won=False)
    assert bid(shading) == 2.0, "99 results are too few"
    learn(shading, 1, price=0.6, won=False)
    assert bid(shading) == pytest.approx(1.05, rel=0.11)
    assert bid(shading, campaign="other") == 2.0 and bid(shading, 0.3) == 0.3


def test_a_least_price_counts_for_every_bid_if_it_can_be():
    shading = BidShading(expiry=60)
    learn(shading, 100, price=2.0, won=True, least=0.5)
    assert bid(shading) == pytest.approx(0.525, rel=0.11)
    for won, least in ((True, 3.0), (False, 0.1), (True, -1.0), (True, float("inf"))):
        other = BidShading(expiry=60)
        learn(other, 200, price=1.0, won=won, least=least)
        columns = other.file.execute("SELECT SUM(lost), SUM(won), SUM(least) FROM counts")
        assert columns.fetchone() == (200 * (not won), 200 * won, 0), "it is not believed"


def test_bids_without_a_notice_count_as_lost_when_they_expire(clock):
    shading = BidShading(expiry=60)
    learn(shading, 100, price=1.0, won=True)
    shading.record_sent("c", [f"x{i}" for i in range(50)], [1.0] * 50)
    clock[0] += 61
    shading.record_sent("c", ["y"], [1.0])
    assert shading.file.execute("SELECT SUM(lost), SUM(won) FROM counts").fetchone() == (50, 100)
    shading.settle("x1", won=True, least=None)
    shading.settle("never", won=True, least=None)
    assert shading.file.execute("SELECT SUM(won) FROM counts").fetchone() == (100,)


def test_a_restart_and_another_process_know_what_was_learned(tmp_path):
    first, second = (BidShading(tmp_path / "s", expiry=60) for _ in range(2))
    learn(first, 100, price=1.0, won=True)
    first.record_sent("c", ["late"], [1.0])
    second.settle("late", won=True, least=None)
    result = bid(first)
    assert result == bid(second) < 2.0
    for each in (first, second):
        each.close()
    restarted = BidShading(tmp_path / "s", expiry=60)
    assert bid(restarted) == result
    assert restarted.file.execute("SELECT SUM(won) FROM counts").fetchone() == (101,)


def test_old_results_count_less(monkeypatch):
    monkeypatch.setattr(module, "MAX_AUCTIONS", 200)
    shading = BidShading(expiry=60)
    learn(shading, 150, price=0.5, won=True)
    learn(shading, 150, price=0.51, won=False)
    bid(shading)
    assert shading.file.execute("SELECT SUM(lost + won) FROM counts").fetchone() == (150,)


def test_a_file_that_cannot_be_read_shades_nothing_and_fails_nothing(tmp_path, caplog):
    (tmp_path / "s").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match="remove the file, and it is learned again"):
        BidShading(tmp_path / "s", expiry=60)
    shading = BidShading(expiry=60)
    learn(shading, 200, price=1.0, won=True)
    shading.file.close()
    for _ in range(3):
        assert bid(shading) == 2.0
    learn(shading, 1, price=1.0, won=True)
    assert sum("bids may not be shaded" in line for line in caplog.messages) == 1


def test_a_notice_of_an_unknown_bid_does_not_wait_for_the_lock(tmp_path):
    shading = BidShading(tmp_path / "s", expiry=60)
    with closing(sqlite3.connect(tmp_path / "s", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        shading.settle("unknown", won=True, least=None)
    assert shading.fault == ""


def test_only_first_prices_are_shaded_within_floor_and_limits():
    def prices(**fields):
        asked = []

        def shade(worth, most, floor):
            asked.append((worth, most, floor))
            return floor or most / 2

        response, _ = respond(request(**fields), STATE, shade=shade)
        return response and [each["price"] for each in response["seatbid"][0]["bid"]], asked

    assert prices(at=2) == ([1000.0], []) and prices() == ([1000.0], [])
    assert prices(at=1) == ([400.0], [(1.0, 0.8, 0.0)]), "worth 50 x 0.02, at most 40 x 0.02"
    for floor in (500.0, 31.3324, 3.9421):  # of the last two, 1000 x the thousandth is less
        result, [(_, _, least)] = prices(at=1, imps=[{"bidfloor": floor}])
        assert result[0] >= floor and least == pytest.approx(floor / 1000)
    assert prices(at=1, imps=[{"bidfloor": 900.0}])[0] is None, "above what is bid at most"


def served(path, shading=True):
    exchange = EXCHANGE | {"shading": shading}
    return serving(
        create_app(policy_of(), MODEL_INFO, SPEC, Journal(path / "j"), exchange=exchange)
    )


def test_first_prices_are_counted_if_they_are_sent(tmp_path):
    with served(tmp_path) as client:
        id, value = opened_with(client, 1e6)
        price = send(client, id, value, at=1).json()["seatbid"][0]["bid"][0]["price"]
        assert send(client, id, value, at=1, test=1).status_code == 200
        dear = [{"id": "1", "bidfloor": 2 * price, "ext": {"value": value}}]
        assert send(client, id, at=1, imp=dear).status_code == 204
        text = client.get("/metrics").text
    for kind in ("unshaded", "sent"):
        counted = re.search(rf'first_price_total{{kind="{kind}"}} (.*)', text)
        assert float(counted[1]) == pytest.approx(price / 1000), kind


def test_a_server_learns_from_its_notices_and_keeps_it(tmp_path):
    with served(tmp_path) as client, httpx.Client(base_url=client.base_url, timeout=PATIENCE) as ex:
        settings = {"budget": 1e6, "target_cpa": 40, "horizon": STEPS}
        id = client.post("/v1/campaigns", json=settings).json()["id"]
        tick = {"index": 0, "coming": {"value": 0.01, "volume": 100}}
        client.post(f"/v1/campaigns/{id}/tick", json=tick)

        def price(**fields):
            return send(client, id, **fields).json()["seatbid"][0]["bid"][0]

        unshaded = price(at=1)
        for _ in range(100):
            sent = price(at=1)
            assert sent["price"] == unshaded["price"]
            least = sent["nurl"].replace("${AUCTION_MIN_TO_WIN}", f"{sent['price'] / 4}")
            ex.get(least.removeprefix("http://localhost")).raise_for_status()
        shaded = price(at=1, test=1)["price"]
        assert shaded == pytest.approx(unshaded["price"] / 4, rel=0.15)
        assert "least" not in price(at=2)["nurl"] and price(at=2)["price"] >= unshaded["price"]
        lost = price(at=1)["lurl"].replace("${AUCTION_PRICE}", f"{unshaded['price']}")
        ex.get(lost.removeprefix("http://localhost")).raise_for_status()
        with sqlite3.connect(tmp_path / "j.shading") as file:
            assert file.execute("SELECT SUM(least), SUM(lost) FROM counts").fetchone() == (101, 0)
        text = client.get("/metrics").text
        assert 'decisionllm_openrtb_first_price_total{kind="unshaded"}' in text
        assert set(outcomes(client)) == {"bid0", "bid1"}
    with served(tmp_path) as client:
        assert send(client, id, at=1).json()["seatbid"][0]["bid"][0]["price"] < unshaded["price"]
    with served(tmp_path, shading=False) as client:
        plain = send(client, id, at=1).json()["seatbid"][0]["bid"][0]
        assert plain["price"] == unshaded["price"] and plain["lurl"].endswith("/loss")
