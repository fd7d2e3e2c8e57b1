"""Structured logs: a line for each request with its id, no line that a request could write, no
secrets.
"""

import io
import json
import logging
import time

import pytest

from decisionllm.bidding.server import logs
from decisionllm.bidding.server.app import create_app
from tests.bidding.server.test_campaigns import SPEC, drawn, policy_of
from tests.bidding.server.test_campaigns import settings as settings_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.conftest import PATIENCE


@pytest.fixture(scope="module")
def client():
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, token="secret")) as client:
        client.headers["authorization"] = "Bearer secret"

        @client.app.get("/fails")
        async def fails():
            raise RuntimeError("broken\n{}")

        yield client


def until(stream, count):
    """Wait until so many lines are written; an answer may come before its line."""
    end = time.monotonic() + PATIENCE
    while stream.getvalue().count("\n") < count and time.monotonic() < end:
        time.sleep(0.01)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_is_one_json_line_with_its_id(client):
    with logs.write_logs("json", stream := io.StringIO()):
        id = client.post("/v1/campaigns", json=settings_of(0)).json()["id"]
        tick = client.post(
            f"/v1/campaigns/{id}/tick?why=private",
            json=drawn(0, 0),
            headers={"x-request-id": "abc-1"},
        )
        both = {id: drawn(0, 1), "none": drawn(0, 0)}
        several = client.post("/v1/ticks", json={"ticks": both})
        refused = client.get("/v1/campaigns", headers={"authorization": "Bearer other"})
        until(stream, 4)
    opened, ticked, many, unauthorised = lines(stream)
    assert ticked | {"time": "", "ms": 0} == {
        "time": "",
        "level": "info",
        "message": "request",
        "method": "POST",
        "route": "/v1/campaigns/{id}/tick",
        "status": 200,
        "ms": 0,
        "model": "m1",
        "request_id": "abc-1",
        "campaign": id,
    }
    assert ticked["ms"] > 0 and tick.headers["x-request-id"] == "abc-1"
    assert opened["campaign"] == id and opened["status"] == 201 and many["campaigns"] == 2
    assert several.headers["x-request-id"] == many["request_id"] != opened["request_id"]
    assert unauthorised["status"] == 401 == refused.status_code and unauthorised["route"] is None
    assert refused.headers["x-request-id"] == unauthorised["request_id"]
    assert not {"secret", "other", "private", "budget"} & {
        *stream.getvalue().replace('"', " ").split()
    }


def test_a_server_that_stops_says_so():
    app = create_app(policy_of(), MODEL_INFO, SPEC, token="secret")
    with logs.write_logs("json", stream := io.StringIO()), serving(app):
        pass
    events = [(line["level"], line["message"]) for line in lines(stream)]
    assert events == [("info", "stopping"), ("info", "stopped")]


@pytest.mark.parametrize("kind", ["json", "text"])
def test_no_request_writes_a_line_of_its_own(client, kind):
    forged = "x\n{}\x1b[31m\u2028"
    with logs.write_logs(kind, stream := io.StringIO()):
        for path in ("/%0a%7b%7d", "/v1/campaigns/%0aforged%20status=200%1b%5b31m"):
            assert client.get(path).status_code == 404
        client.get("/healthz", headers={"x-request-id": "a b"})
        client.get("/healthz", headers={"x-request-id": "a" * 65})
        logging.getLogger("decisionllm.bidding.server").warning("a message of %s", forged)
        until(stream, 5)
    text = stream.getvalue()
    assert (
        len(text.splitlines()) == 5
        and text.isascii()
        and "\x1b" not in text
        and "a b" not in text
        and "a" * 65 not in text
    )
    if kind == "text":
        assert 'level="warning" message="a message of x\\n{}' in text.splitlines()[-1]


def test_an_error_is_logged_with_the_id_that_its_answer_has(client):
    with logs.write_logs("json", stream := io.StringIO()):
        answer = client.get("/fails", headers={"x-request-id": "mine", "connection": "close"})
        until(stream, 2)
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine"
    errors = [line for line in lines(stream) if line["level"] == "error"]
    assert errors and all(line["request_id"] == "mine" for line in lines(stream))
    assert "RuntimeError: broken" in errors[0]["exception"]


def test_a_share_of_usual_requests_is_logged_and_all_others(client):
    def logged(sample, slow, paths):
        with logs.write_logs("json", stream := io.StringIO(), sample=sample, slow=slow):
            for path in paths:
                client.get(path)
            logging.getLogger("decisionllm.bidding.server").warning("of a loss")
        return lines(stream)

    usual = ["/healthz"] * 200
    some = logged(0.5, PATIENCE, usual)[:-1]
    assert 50 < len(some) < 150 and all(line["sample"] == 0.5 for line in some)
    none = logged(0.0, PATIENCE, ["/healthz", "/v1/campaigns/none", "/healthz"])
    assert [line["message"] for line in none] == ["request", "of a loss"]
    assert none[0]["status"] == 404 and "sample" not in none[0], "an error is always logged"
    slow = logged(0.0, 1e-9, usual[:3])
    assert len(slow) == 4 and not any("sample" in line for line in slow)
    assert not any("sample" in line for line in logged(1.0, PATIENCE, usual[:3]))


def test_without_a_kind_nothing_is_written_and_too_many_lines_are_dropped(
    client, capsys, monkeypatch
):
    with logs.write_logs("none"):
        client.get("/healthz")
    assert not logs.writers and capsys.readouterr().err == ""
    monkeypatch.setattr(logs, "MAX_WAITING", 2)
    writer = logs.Writer("json", stream := io.StringIO())
    for i in range(5):
        writer.handle(logging.makeLogRecord({"msg": f"{i}"}))
    writer.write()
    assert [line["message"] for line in lines(stream)] == ["0", "1", "3 lines were dropped"]
    with (
        pytest.raises(ValueError, match="log: expected one of json, text, none, got 'xml'"),
        logs.write_logs("xml"),
    ):
        pass
