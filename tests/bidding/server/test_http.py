"""The server over real sockets: concurrent requests are batched, late or excessive ones are
answered as such.
"""

import asyncio
import contextlib
import ctypes
import gzip
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, settings, strategies
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.rows import checksum, insert_campaign
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.serve import build_app, serve
from decisionllm.bidding.serve_options import ServeConfig
from decisionllm.bidding.server import protocol as protocols
from decisionllm.bidding.server import replicas, schemas
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.batcher import Batcher, QueueFullError
from decisionllm.bidding.server.campaigns import RequestError
from decisionllm.bidding.server.direct import MAX_MARKS
from decisionllm.bidding.server.middleware import is_loopback
from decisionllm.bidding.server.models import Model, Models
from decisionllm.bidding.server.openrtb import BidRequest
from decisionllm.bidding.server.protocol import BoundedProtocol
from decisionllm.bidding.server.service import Service
from decisionllm.command_line import fill_defaults
from decisionllm.commands.options import read_options
from decisionllm.policy import loading
from decisionllm.schema import History, Spec
from tests.bidding.server.in_process import CampaignManager
from tests.bidding.server.spawned import leave, lives
from tests.bidding.server.test_campaigns import HIGH, SPEC, STEPS, drawn, policy_of
from tests.bidding.server.test_campaigns import settings as settings_of
from tests.conftest import NANO, PATIENCE, command, make_policy, near

PAGE = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
MODEL_INFO = {"run": "a", "model": "m1", "dataset": "auction", "fingerprint": "f"}


@contextlib.contextmanager
def serving(app, protocol=BoundedProtocol, **options):
    """The app on a free port of this machine: a client of it."""
    server = protocols.server(app, protocol, port=0, **{"log_level": "error"} | options)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            client.app = app
            yield client
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    journal = Journal(tmp_path_factory.mktemp("served") / "j")
    with serving(
        create_app(
            policy_of(),
            MODEL_INFO,
            SPEC,
            journal,
            campaigns={"cache_bytes": 10**7},
            max_body_bytes=200_000,
            deadline=PATIENCE,
        )
    ) as client:
        yield client


def begun(client, campaign=0, **more):
    return client.post("/v1/campaigns", json=settings_of(campaign) | more).json()["id"]


# -- batches --


def test_concurrent_calls_are_batched_and_the_queue_is_bounded():
    sizes, gate, working = [], threading.Event(), threading.Event()

    def work(items):
        working.set()
        gate.wait(PATIENCE)
        if "bad" in items:
            raise ValueError("bad")
        return [item * 2 for item in items]

    async def main():
        batcher = Batcher(work, size=3, queue=5, wait=0.01, on_batch=sizes.append)
        run = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher(1))
        while not working.is_set():
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(batcher(i)) for i in range(2, 7)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await batcher(7)
        waiting[1].cancel()
        assert batcher.age > 0
        gate.set()
        assert await first == 2
        assert [await waiting[i] for i in (0, 2, 3, 4)] == [4, 8, 10, 12]
        with pytest.raises(ValueError, match="bad"):
            await batcher("bad")
        assert await batcher(9) == 18 and batcher.age == 0
        run.cancel()

    asyncio.run(main())
    assert sizes == [1, 2, 2, 1, 1]


def test_an_error_of_the_batcher_itself_is_the_answer_and_it_goes_on(caplog):
    """Of a metric, or of work that returns too few results; the next call is answered."""

    def count(size):
        if size == 2:
            raise RuntimeError("a metric")

    async def main():
        batcher = Batcher(lambda items: items[:3], size=4, queue=9, wait=0.01, on_batch=count)
        run = asyncio.create_task(batcher.run())
        for size, error in ((2, "a metric"), (4, "expected 4 results, got 3")):
            calls = [asyncio.create_task(batcher(i)) for i in range(size)]
            done, waiting = await asyncio.wait(calls, timeout=5)
            assert not waiting and all(error in str(call.exception()) for call in done)
            assert batcher.age == 0
        assert await batcher(7) == 7
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()

    asyncio.run(main())
    # a server of an earlier test may still write the end of its log
    ours = [record for record in caplog.records if record.name == "decisionllm.bidding.server"]
    assert len(ours) == 2 and all(record.exc_info for record in ours)


def test_a_batcher_serves_one_event_loop_after_another():
    batcher = Batcher(lambda items: items, size=1, queue=1)

    async def main():
        run = asyncio.create_task(batcher.run())
        await asyncio.sleep(0.01)
        result = await asyncio.wait_for(batcher(7), 5)
        run.cancel()
        return result

    assert [asyncio.run(main()) for _ in range(2)] == [7, 7]


def serviced(policy, play, manager=None, **limits):
    """Run `play(service)` beside a service of this policy."""

    async def main():
        made = manager or CampaignManager(policy, SPEC, cache_bytes=10**7)
        models = Models(Model(made.name, "", policy, made))
        async with Service(models, **limits).run() as service:
            return await play(service)

    return asyncio.run(main())


@pytest.mark.numeric
def test_concurrent_campaigns_share_forwards():
    policy, sizes = policy_of(), []
    alone = CampaignManager(policy, SPEC)
    expected = [
        [alone.tick(id, **drawn(i, t)) for t in range(4)]
        for i, id in enumerate([alone.open(**settings_of(i)) for i in range(12)])
    ]

    async def play(service):
        ids = [(await service.open(settings_of(i) | {"text": None}))["id"] for i in range(12)]

        async def one(i, id):
            return [json.loads(await service.tick(id, drawn(i, t))) for t in range(4)]

        return await asyncio.gather(*(one(i, id) for i, id in enumerate(ids)))

    got = serviced(policy, play, on_batch=sizes.append, deadline=PATIENCE)
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            near(a["multiplier"], b["multiplier"], scale=HIGH)
            assert a["spend"] == b["spend"]
    assert max(sizes) > 6


def test_a_tick_repeated_while_in_flight_has_one_answer():
    async def play(service):
        id = (await service.open(settings_of(0) | {"text": None}))["id"]
        answers = await asyncio.gather(*(service.tick(id, drawn(0, 0)) for _ in range(5)))
        call = asyncio.create_task(service.tick(id, drawn(0, 1)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="step 1 is being answered"):
            await service.tick(id, drawn(0, 1) | {"key": "other"})
        call.cancel()  # the caller leaves; the tick counts
        await asyncio.wait([call])
        while service.in_flight:
            await asyncio.sleep(0.01)
        assert service.manager.journal.count_ticks(id) == 2
        return answers, await service.tick(id, drawn(0, 1)), service.manager.counts["bid", ""]

    answers, after, count = serviced(policy_of(), play)
    assert len({*answers}) == 1 and json.loads(after)["index"] == 1 and count == 2


class Slow:
    """A policy that waits while its gate is closed."""

    def __init__(self, policy):
        self.policy = policy
        self.gate = threading.Event()
        self.called = threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def act_with_returns(self, histories):
        self.called.set()
        self.gate.wait(PATIENCE)
        return self.policy.act_with_returns(histories)


def test_a_late_decision_is_replaced_by_linear_pacing():
    policy = Slow(policy_of())

    async def play(service):
        id = (await service.open(settings_of(0) | {"text": None}))["id"]
        other = (await service.open(settings_of(1) | {"text": None}))["id"]
        await service.tick(id, drawn(0, 0))
        policy.gate.clear()
        late = json.loads(await service.tick(id, drawn(0, 1), service.due(50)))
        stuck = json.loads(await service.tick(other, drawn(1, 0), service.due(50)))  # behind it
        policy.gate.set()
        return (
            late,
            stuck,
            json.loads(await service.tick(id, drawn(0, 1))),
            json.loads(await service.tick(id, drawn(0, 2))),
        )

    late, stuck, again, after = serviced(
        policy, play, CampaignManager(policy, SPEC), deadline=PATIENCE
    )
    assert (
        late["fallback"] == stuck["fallback"] == "deadline"
        and late["return_to_go"] is None
        and again == late
    )
    assert stuck["multiplier"] == settings_of(1)["target_cpa"]
    assert after["fallback"] is None and after["index"] == 2


def test_a_deadline_that_is_no_number_is_refused(client):
    for wrong in ("0", "-5", "soon", "600001", ""):
        answer = client.post(
            f"/v1/campaigns/{begun(client)}/tick",
            json=drawn(0, 0),
            headers={"x-deadline-ms": wrong},
        )
        assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (
            422,
            ["header", "x-deadline-ms"],
        ), wrong


def test_no_post_route_of_the_document_is_run_by_fastapi(client):
    """They are called directly; FastAPI's own handler would read the body by other rules."""
    posts = [
        path
        for path, route in client.get("/openapi.json").json()["paths"].items()
        if "post" in route
    ]
    assert len(posts) == 6
    for path in posts:
        answer = client.post(
            path.replace("{id}", "unknown"),
            content=b'{"a": 1',
            headers={"content-type": "application/json"},
        )
        assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body"]), path


def test_a_client_can_shorten_the_deadline():
    policy = Slow(policy_of())
    with serving(create_app(policy, MODEL_INFO, SPEC, deadline=PATIENCE)) as client:
        id, hurry = begun(client), {"x-deadline-ms": "50"}
        policy.gate.clear()
        late = client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0), headers=hurry)
        act = client.post(
            "/v1/act",
            json={"observations": [[0.0] * 21], "actions": [], "rewards": []},
            headers=hurry,
        )
        policy.gate.set()
        assert late.json()["fallback"] == "deadline"
        assert (act.status_code, act.json()["detail"][0]["loc"], act.headers["retry-after"]) == (
            503,
            ["server", "deadline"],
            "1",
        )
        metrics = client.get("/metrics").text
        assert 'decisionllm_fallbacks_total{reason="deadline"} 1.0' in metrics


def test_a_full_queue_refuses_at_once():
    policy = Slow(policy_of())

    async def play(service):
        ids = [(await service.open(settings_of(i) | {"text": None}))["id"] for i in range(4)]
        policy.gate.clear()
        calls = []
        for i, id in enumerate(ids[:3]):
            calls.append(asyncio.create_task(service.tick(id, drawn(i, 0))))
            while not (policy.called.is_set() and len(service.model.waiting) == i):
                await asyncio.sleep(0.001)
        # one is decided, two wait; nothing is decided before the gate opens
        with pytest.raises(RequestError) as refused:
            await service.tick(ids[3], drawn(3, 0))
        policy.gate.set()
        answers = [json.loads(await call) for call in calls]
        return refused.value, answers, json.loads(await service.tick(ids[3], drawn(3, 0)))

    refused, answers, after = serviced(
        policy,
        play,
        CampaignManager(policy, SPEC),
        deadline=PATIENCE,
        max_batch_size=1,
        max_queue=2,
    )
    assert refused.status == 503 and all(a["fallback"] is None for a in [*answers, after])


def test_an_answer_that_cannot_be_saved_is_not_given(tmp_path):
    journal = Journal(tmp_path / "j")

    async def play(service):
        id = (await service.open(settings_of(0) | {"text": None}))["id"]
        first = await service.tick(id, drawn(0, 0))
        pages = journal._writer.execute("PRAGMA page_count").fetchone()[0]
        journal._writer.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(RequestError, match="the answer could not be saved or read"):
            for t in range(1, STEPS):
                await service.tick(id, drawn(0, t))
        journal._writer.execute("PRAGMA max_page_count=1000000")
        return [json.loads(first)] + [
            json.loads(await service.tick(id, drawn(0, s))) for s in range(1, t + 2)
        ]

    policy = policy_of()
    manager = CampaignManager(policy, SPEC, journal)
    answers = serviced(policy, play, manager)
    assert manager.counts["bid", ""] == len(answers)
    alone = CampaignManager(policy, SPEC)
    id = alone.open(**settings_of(0))
    assert (
        answers == [alone.tick(id, **drawn(0, t)) for t in range(len(answers))] and len(answers) > 2
    )


def test_answers_logs_and_metrics_name_the_model(tmp_path, capfd):
    app = create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"), log="json")
    with serving(app) as client:
        id = begun(client)
        tick = client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0))
        bid = {"id": "r", "imp": [{"id": "1", "ext": {"value": 0.02}}], "ext": {"campaign": id}}
        answers = [tick, client.post("/openrtb/2.6/bid", json=bid)]
        assert [(a.status_code, a.headers["x-model"]) for a in answers] == [(200, "m1")] * 2
        assert client.get(f"/v1/campaigns/{id}").json()["model"] == "m1"
        assert 'model="m1"' in client.get("/metrics").text
    requests = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert {line["model"] for line in requests if line["message"] == "request"} == {"m1"}
    other = MODEL_INFO | {"model": "m2"}
    with pytest.raises(ValueError, match="expected m2, got open campaigns of another model"):
        create_app(policy_of(), other, SPEC, Journal(tmp_path / "j"))
    create_app(policy_of(), other, SPEC, Journal(tmp_path / "j"), move_campaigns=True)
    assert Journal(tmp_path / "j").campaign(id)["model"] == "m2"


def test_a_restart_replays_open_campaigns_before_it_is_ready(tmp_path):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))) as client:
        ids = [begun(client, i) for i in range(3)]
        client.delete(f"/v1/campaigns/{ids[0]}")
        for id in ids[1:]:
            client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0)).raise_for_status()
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))) as client:
        manager = client.app.state.service.manager
        assert [*manager.campaigns] == ids[1:] and [c.step for c in manager.campaigns.values()] == [
            1,
            1,
        ]
        client.post(f"/v1/campaigns/{ids[1]}/tick", json=drawn(0, 1)).raise_for_status()
        assert manager.counts["rebuilt", ""] == 2


def test_a_replay_does_not_delay_other_requests():
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, deadline=PATIENCE)) as client:
        id, manager = begun(client), client.app.state.service.manager
        manager.campaigns.clear()  # as if another process had opened it
        replayed = manager.replay_from_journal
        begins = threading.Event()
        gate = threading.Event()

        def slow(*given, **more):
            begins.set()
            gate.wait(PATIENCE)
            return replayed(*given, **more)

        manager.replay_from_journal = slow
        answers = []
        tick = threading.Thread(
            target=lambda: answers.append(client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0)))
        )
        tick.start()
        assert begins.wait(PATIENCE)
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE / 2) as other:
            assert other.get("/healthz").status_code == 200
        gate.set()
        tick.join()
        assert answers[0].status_code == 200 and answers[0].json()["fallback"] is None


def test_a_damaged_journal_is_not_ready(tmp_path, caplog):
    journal = Journal(tmp_path / "j")
    for i in range(60):
        journal.write(
            [
                insert_campaign(
                    f"c{i}",
                    None,
                    settings_of(0)
                    | {"name": None, "text": "x" * 500, "target_return": None, "bid_cap": None},
                )
            ]
        )
    journal.close()
    with open(tmp_path / "j", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096 * (tmp_path.joinpath("j").stat().st_size // 4096 - 1))
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))) as client:
        assert (answer := client.get("/readyz")).status_code == 503 and answer.json()["detail"][0][
            "loc"
        ] == [
            "server",
            "journal",
        ]
        assert client.post("/v1/campaigns/c1/tick", json=drawn(0, 0)).status_code == 503
        many = client.post("/v1/ticks", json={"ticks": {"c1": drawn(0, 0)}})
        assert many.status_code == 200 and many.json()["c1"]["detail"][0]["loc"] == [
            "server",
            "journal",
        ]
        assert (
            client.get("/v1/campaigns").status_code == 503
            and client.get("/healthz").status_code == 200
        )
        assert "decisionllm_journal_fault 1.0" in client.get("/metrics").text
    assert [record.levelname for record in caplog.records if "malformed" in record.message], (
        "it is in the log"
    )


def test_a_damaged_row_is_degraded_and_the_rest_is_served(tmp_path):
    def app():
        return create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))

    with serving(app()) as client:
        bad, good = begun(client, 0), begun(client, 1)
        for id in (bad, good):
            client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0)).raise_for_status()
        assert client.get("/readyz").json() == {"status": "ready"}
        with sqlite3.connect(tmp_path / "j") as file:
            file.execute(
                "UPDATE ticks SET answer = CAST(CAST(answer AS BLOB) || x'ff' AS TEXT)"
                " WHERE campaign = ?",
                (bad,),
            )
        file.close()
    with serving(app()) as client:
        ready = client.get("/readyz")
        row = f"tick 0 of campaign {bad}"
        assert (ready.status_code, ready.json()) == (200, {"status": "degraded", "damaged": row})
        assert [c["id"] for c in client.get("/v1/campaigns").json()["campaigns"]] == [good]
        refused = client.post(f"/v1/campaigns/{bad}/tick", json=drawn(0, 1))
        assert refused.status_code == 503 and row in refused.json()["detail"][0]["msg"]
        assert client.get(f"/v1/campaigns/{bad}").json()["ticks"] == []
        bid = {"id": "r", "imp": [{"id": "1", "ext": {"value": 0.02}}], "ext": {"campaign": bad}}
        assert client.post("/openrtb/2.6/bid", json=bid).status_code == 204
        assert client.post(f"/v1/campaigns/{good}/tick", json=drawn(0, 1)).status_code == 200
        metrics = client.get("/metrics").text
        assert "decisionllm_damaged_rows 1.0" in metrics
        assert "decisionllm_journal_fault 0.0" in metrics
        assert client.get("/readyz").status_code == 200


def test_a_path_with_a_slash_too_many_is_no_redirect(client):
    answer = client.get("/v1/campaigns/", headers={"x-forwarded-proto": "https"})
    assert answer.status_code == 404 and "location" not in answer.headers


DAMAGES = {
    "id": "id = CAST(CAST(id AS BLOB) || x'ff' AS TEXT)",
    "horizon": "facts = replace(facts, '\"horizon\": 12', '\"horizon\": 22')",
    "model": "model = 'm3'",
}


@pytest.mark.parametrize("column", DAMAGES)
@pytest.mark.parametrize("model", ["m1", "m2"])
def test_a_server_starts_with_a_damaged_campaign(tmp_path, column, model):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))) as client:
        good, bad = begun(client), begun(client)
    with contextlib.closing(sqlite3.connect(tmp_path / "j")) as file, file:
        changed = file.execute(f"UPDATE campaigns SET {DAMAGES[column]} WHERE id = ?", (bad,))
        assert changed.rowcount == 1
    info = MODEL_INFO | {"model": model}
    journal = Journal(tmp_path / "j")
    with serving(create_app(policy_of(), info, SPEC, journal, move_campaigns=True)) as client:
        ready = client.get("/readyz").json()
        assert ready["status"] == "degraded" and ready["damaged"].startswith(f"campaign {bad}")
        assert client.post(f"/v1/campaigns/{good}/tick", json=drawn(0, 0)).status_code == 200
        assert [c["id"] for c in client.get("/v1/campaigns").json()["campaigns"]] == [good]


def test_a_journal_that_is_gone_is_not_ready_and_answers_nothing(tmp_path):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))) as client:
        id = begun(client)
        (tmp_path / "j").rename(tmp_path / "moved")
        assert client.get("/readyz").status_code == 503
        assert client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0)).status_code == 503
        assert client.post("/v1/campaigns", json=settings_of(1)).status_code == 503


def test_a_full_disk_is_not_ready_until_there_is_room(tmp_path, caplog):
    journal = Journal(tmp_path / "j")
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, journal)) as client:
        pages = journal._writer.execute("PRAGMA page_count").fetchone()[0]
        journal._writer.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            for i in range(100):
                client.post(
                    "/v1/campaigns", json=settings_of(i) | {"text": "x" * 2000}
                ).raise_for_status()
        assert client.get("/readyz").status_code == 503 and "is full" in caplog.text
        journal._writer.execute("PRAGMA max_page_count=1000000")
        assert client.get("/readyz").status_code == 200


def test_a_locked_journal_is_a_503_at_the_deadline_and_changes_nothing(tmp_path):
    app = create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"), deadline=0.3)
    other = sqlite3.connect(tmp_path / "j", isolation_level=None)
    with serving(app) as client, contextlib.closing(other):
        id = begun(client)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        late = client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0))
        not_ready = client.get("/readyz")
        assert time.monotonic() - began < 5, "SQLite itself waits 10 s"
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        # on a busy machine the writer's thread may give up later than the request
        reasons = ("locked", "longer than the deadline")
        assert any(reason in late.json()["detail"][0]["msg"] for reason in reasons)
        assert not_ready.status_code == 503
        other.execute("ROLLBACK")
        assert client.get("/readyz").status_code == 200
        assert client.get(f"/v1/campaigns/{id}").json()["step"] == 0
        other_request = drawn(0, 0) | {"key": "other"}
        assert client.post(f"/v1/campaigns/{id}/tick", json=other_request).status_code == 200


def test_a_write_that_hangs_is_answered_at_the_deadline_and_not_ready(tmp_path):
    journal, gate = Journal(tmp_path / "j"), threading.Event()
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, journal, deadline=0.3)) as client:
        id, write = begun(client), journal.write

        def slow(*given, **more):
            gate.wait(PATIENCE)
            return write(*given, **more)

        journal.write = slow
        tick = client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0))
        assert (tick.status_code, tick.json()["detail"][0]["loc"]) == (503, ["server", "journal"])
        assert client.get("/readyz").status_code == 503
        gate.set()
        again = client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0))
        assert again.status_code == 200 and client.get("/readyz").status_code == 200


def test_lists_wait_for_one_another_and_delay_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.campaign_routes.LIST_WAIT", 0.01)
    journal = Journal(tmp_path / "j")
    searching, gate, result = threading.Event(), threading.Event(), []

    def wait_at_gate():
        searching.set()
        return not gate.wait(PATIENCE)  # true interrupts the search

    with serving(create_app(policy_of(), MODEL_INFO, SPEC, journal)) as client:
        id = begun(client)
        search = threading.Thread(
            target=lambda: result.append(client.get("/v1/campaigns?search=none").json())
        )
        journal._lister.set_progress_handler(wait_at_gate, 1)
        search.start()
        assert searching.wait(PATIENCE)
        late = client.get("/v1/campaigns")
        metrics = client.get("/metrics").text
        gate.set()
        search.join()
        assert late.status_code == 503 and "other lists are being read" in late.text
        assert "decisionllm_open_campaigns 1.0" in metrics
        listed = client.get("/v1/campaigns").json()["campaigns"]
        assert [campaign["id"] for campaign in listed] == [id]
    assert result[0]["campaigns"] == []


def test_a_stop_leaves_every_tick_in_the_file(tmp_path):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"))) as client:
        id = begun(client)
        for t in range(4):
            client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, t)).raise_for_status()
    assert (
        sorted(p.name for p in tmp_path.iterdir()) == ["j", "j.bids"]
        and Journal(tmp_path / "j").count_ticks(id) == 4
    )


# -- HTTP --


@pytest.mark.numeric
def test_a_campaign_over_http_equals_the_manager(client):
    alone = CampaignManager(policy_of(), SPEC)
    mine = alone.open(**settings_of(3))
    id = begun(client, 3, name="shoes")
    answers = []
    for t in range(STEPS):
        answer = client.post(f"/v1/campaigns/{id}/tick", json=drawn(3, t))
        assert answer.status_code == 200
        expected = alone.tick(mine, **drawn(3, t))
        scales = {"multiplier": HIGH, "return_to_go": policy_of().target_return}
        assert answer.json() == expected | {"model": "m1"} | {
            name: pytest.approx(expected[name], rel=0, abs=1e-5 * scale)
            for name, scale in scales.items()
        }
        again = client.post(f"/v1/campaigns/{id}/tick", json=drawn(3, t))
        assert again.content == answer.content
        answers.append(answer.json())
    campaign = client.get(f"/v1/campaigns/{id}").json()
    fields = ("index", "multiplier", "return_to_go", "spend", "conversions", "fallback", "guards")
    fields += ("model",)
    assert campaign["ticks"] == [{name: answer[name] for name in fields} for answer in answers]
    assert (
        campaign["name"],
        campaign["status"],
        campaign["step"],
        campaign["horizon"],
        campaign["budget"],
    ) == (
        "shoes",
        "open",
        STEPS,
        STEPS,
        930,
    )
    assert campaign["spend"] == campaign["ticks"][-1]["spend"] == expected["spend"]
    listed = client.get("/v1/campaigns").json()["campaigns"]
    assert listed[0] == {name: value for name, value in campaign.items() if name != "ticks"}
    assert client.delete(f"/v1/campaigns/{id}").json()["status"] == "ended"
    refused = client.post(f"/v1/campaigns/{id}/tick", json=drawn(3, STEPS) | {"coming": None})
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (409, ["path", "id"])
    # what was answered stays answered
    assert client.post(f"/v1/campaigns/{id}/tick", json=drawn(3, 2)).json()["index"] == 2
    wrong = client.post(f"/v1/campaigns/{id}/tick", json=drawn(3, 2) | {"key": "x"})
    assert (wrong.status_code, wrong.json()["expected"]) == (409, STEPS)


@pytest.mark.numeric
def test_many_ticks_in_one_request_equal_single_ticks(client):
    ids = [begun(client, i) for i in range(6)]
    requests = {id: drawn(i, 0) for i, id in enumerate(ids)}
    together = client.post("/v1/ticks", json={"ticks": requests | {"unknown": drawn(0, 0)}}).json()
    assert together.pop("unknown")["detail"][0]["msg"] == "no such campaign"
    assert together == {
        id: client.post(f"/v1/campaigns/{id}/tick", json=drawn(i, 0)).json()
        for i, id in enumerate(ids)
    }


@pytest.mark.numeric
def test_act_over_http_equals_policy_act_to_the_last_bit(client):
    policy, rng = policy_of(), np.random.default_rng(0)
    for t in (0, 3, 8):
        past = rng.normal(size=(t + 1, 21)), rng.uniform(0, 300, (t, 1)), rng.uniform(0, 2, t)
        body = dict(
            zip(("observations", "actions", "rewards"), (x.tolist() for x in past), strict=True)
        )
        got = client.post("/v1/act", json=body | {"text": "Go.", "target_return": 4.0}).json()
        expected = policy.act_with_returns(
            [History(*(x.astype(np.float32) for x in past[:2]), past[2], 4.0, "Go.")]
        )
        assert got == {"action": expected[0][0].tolist(), "return_to_go": float(expected[1][0])}


def test_a_policy_of_other_data_acts_without_campaigns():
    spec = Spec(observation_dim=3, action_dim=1, horizon=5, num_actions=4)
    policy = make_policy(spec, head="discrete")
    with serving(create_app(policy, MODEL_INFO)) as client:
        body = {
            "observations": [[1, 2, 3], [0, 1, 2]],
            "actions": [[1]],
            "rewards": [0.5],
            "action_masks": [[True] * 4, [False, True, False, False]],
        }
        assert client.post("/v1/act", json=body).json()["action"] == [1.0]
        wrong = {
            "observations": {"observations": [[1, 2], [0, 1]]},
            "actions": {"actions": []},
            "rewards": {"rewards": [1, 2]},
            "action_masks": {"action_masks": [[True], [True]]},
        }
        for name, change in wrong.items():
            answer = client.post("/v1/act", json=body | change)
            assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body", name])
        nowhere = body | {"action_masks": [[True] * 4, [False] * 4]}
        assert (
            "an allowed action" in client.post("/v1/act", json=nowhere).json()["detail"][0]["msg"]
        )
        long = {"observations": [[1, 2, 3]] * 6, "actions": [[1]] * 5, "rewards": [0] * 5}
        assert (
            client.post("/v1/act", json=long).json()["detail"][0]["msg"]
            == "expected at most 5 steps, got 6"
        )
        assert client.get("/v1/campaigns").status_code == 404


def test_an_action_asks_for_what_the_policy_reads():
    """A text or a target that the policy was not trained with is refused, as for a campaign."""
    spec = Spec(observation_dim=3, action_dim=1, horizon=5, num_actions=4)
    policy = make_policy(spec, head="discrete", condition_on="none")
    policy.info["tasks"] = [""]
    with serving(create_app(policy, MODEL_INFO)) as client:
        body = {"observations": [[1, 2, 3]], "actions": [], "rewards": []}
        assert client.post("/v1/act", json=body).status_code == 200
        for name, value in {"text": "Go.", "target_return": 4.0}.items():
            answer = client.post("/v1/act", json=body | {name: value})
            assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body", name])


def test_arguments_of_auctionnet_are_a_tick(client):
    id, rng = begun(client), np.random.default_rng(0)
    values = rng.uniform(0, 0.001, 50)
    first = client.post(
        "/v1/bid", json={"campaign": id, "timeStepIndex": 0, "pValues": values.tolist()}
    ).json()
    np.testing.assert_array_equal(first["bids"], values * first["multiplier"])
    history = {
        "historyPValueInfo": [np.stack([values, values], 1).tolist()],
        "historyBid": [first["bids"]],
        "historyAuctionResult": [[[1, 1, 0.5]] * 10 + [[0, 0, 0]] * 40],
        "historyImpressionResult": [[[1, 1]] * 2 + [[0, 0]] * 48],
        "historyLeastWinningCost": [[0.25] * 50],
    }
    second = client.post(
        "/v1/bid", json={"campaign": id, "timeStepIndex": 1, "pValues": values.tolist()} | history
    ).json()
    # two were shown, at 0.5
    assert (second["spend"], second["conversions"], second["remaining"]) == (1.0, 2.0, 899.0)
    for name in history:
        wrong = client.post(
            "/v1/bid",
            json={"campaign": id, "timeStepIndex": 1, "pValues": [0.1]} | history | {name: []},
        )
        assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["body", name])
        wrong = client.post(
            "/v1/bid",
            json={"campaign": id, "timeStepIndex": 2, "pValues": [0.1]} | history | {name: [[]]},
        )
        assert wrong.status_code == 422 and wrong.json()["detail"][0]["loc"][1].startswith(
            "history"
        )


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("historyAuctionResult", [[1, 1, -1e6]]),
        ("historyImpressionResult", [[-1, 0]]),
        ("historyImpressionResult", [[1, 7]]),
        ("historyBid", [-0.1]),
        ("historyLeastWinningCost", [-0.1]),
        ("historyPValueInfo", [[-0.1, 0]]),
    ],
)
def test_a_step_that_cannot_have_happened_is_refused(client, name, rows):
    id = begun(client)
    client.post(
        "/v1/bid", json={"campaign": id, "timeStepIndex": 0, "pValues": [0.1]}
    ).raise_for_status()
    history = {
        "historyPValueInfo": [[[0.1, 0.01]]],
        "historyBid": [[3.0]],
        "historyAuctionResult": [[[1, 1, 2.0]]],
        "historyImpressionResult": [[[1, 1]]],
        "historyLeastWinningCost": [[2.0]],
    }
    step = {"campaign": id, "timeStepIndex": 1, "pValues": [0.1]}
    refused = client.post("/v1/bid", json=step | history | {name: [rows]})
    assert refused.status_code == 422 and name in refused.json()["detail"][0]["loc"]
    assert client.post("/v1/bid", json=step | history).status_code == 200


def test_a_step_of_twenty_thousand_opportunities_is_bid(tmp_path):
    n = 20_000
    values = np.random.default_rng(0).uniform(0, 0.001, n)
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, deadline=PATIENCE)) as client:
        id = begun(client)
        step = {"campaign": id, "timeStepIndex": 0, "pValues": values.tolist()}
        first = client.post("/v1/bid", json=step).raise_for_status().json()
        history = {
            "historyPValueInfo": [np.stack([values, values], 1).tolist()],
            "historyBid": [first["bids"]],
            "historyAuctionResult": [[[1, 1, 0.25]] * n],
            "historyImpressionResult": [[[1, 0]] * 400 + [[0, 0]] * (n - 400)],
            "historyLeastWinningCost": [[0.25] * n],
        }
        second = (
            client.post("/v1/bid", json=step | history | {"timeStepIndex": 1})
            .raise_for_status()
            .json()
        )
    np.testing.assert_array_equal(
        second["bids"], np.minimum(values * second["multiplier"], second["max_bid"])
    )
    assert second["spend"] == 100.0, "400 were shown, at 0.25"


def test_a_thousand_ticks_in_one_request_are_all_answered():
    app = create_app(policy_of(), MODEL_INFO, SPEC, deadline=PATIENCE, max_queue=20)
    with serving(app) as client:
        ids = [begun(client, i) for i in range(100)]
        unknown = [f"{i}" for i in range(900)]
        ticks = {id: drawn(i, 0) for i, id in enumerate(ids + unknown)}
        answers = client.post("/v1/ticks", json={"ticks": ticks}).json()
    assert [answers[id].get("fallback", answers[id]) for id in ids] == [None] * 100
    assert {answers[id]["detail"][0]["msg"] for id in unknown} == {"no such campaign"}


def break_settings(client, id):
    """Write settings that are no JSON, with the checksum of their row."""
    writer = client.app.state.service.manager.journal._writer
    query = "SELECT id, key, opened FROM campaigns WHERE id = ?"
    row = writer.execute(query, (id,)).fetchone()
    values = checksum(*row, "{"), id
    writer.execute("UPDATE campaigns SET facts = '{', sum = ? WHERE id = ?", values)


def test_one_bad_tick_fails_alone(client):
    """A text that is no text is refused before anything is written; an error in one tick is the
    answer to this tick.
    """
    id = begun(client)
    for bad in ('"\\ud800"', '"' + "x" * 65 + '"'):
        one = json.dumps(drawn(0, 0))
        body = f'{{"ticks": {{"{id}": {one}, {bad}: {one}}}}}'
        answer = client.post(
            "/v1/ticks", content=body, headers={"content-type": "application/json"}
        )
        assert (answer.status_code, client.get(f"/v1/campaigns/{id}").json()["step"]) == (422, 0)
    other = begun(client)
    client.app.state.service.manager.campaigns.clear()  # as after a restart
    break_settings(client, other)
    answers = client.post("/v1/ticks", json={"ticks": {id: drawn(0, 0), other: drawn(0, 0)}})
    client.app.state.service.manager.journal._writer.execute(
        "DELETE FROM campaigns WHERE id = ?", (other,)
    )
    assert answers.status_code == 200 and answers.json()[id]["index"] == 0
    assert "internal server error" in answers.json()[other]["detail"][0]["msg"]


def test_an_unexpected_error_is_a_500(client):
    id = begun(client)
    client.app.state.service.manager.campaigns.clear()  # as after a restart
    break_settings(client, id)
    # as the server does
    answer = client.post(
        f"/v1/campaigns/{id}/tick", json=drawn(0, 0), headers={"connection": "close"}
    )
    client.app.state.service.manager.journal._writer.execute(
        "DELETE FROM campaigns WHERE id = ?", (id,)
    )
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (500, ["server"])


BAD = {
    "coming.value": [float("nan"), float("inf"), -0.1, 1.1, "0.5", None, True, 10**400],
    "coming.volume": [-1, float("-inf"), 1e300],
    "index": [-1, 0.5, "0", None, True],
    "key": [5, "x" * 300],
    "result.spend": [float("nan"), -1],
}


@pytest.mark.parametrize("field", BAD)
def test_a_wrong_number_is_refused_by_its_field(client, field):
    id = begun(client)
    client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0))
    for value in BAD[field]:
        body = json.loads(json.dumps(drawn(0, 1)))
        at, _, name = field.rpartition(".")
        (body[at] if at else body)[name] = value
        answer = client.post(
            f"/v1/campaigns/{id}/tick",
            content=json.dumps(body),
            headers={"content-type": "application/json"},
        )
        assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (
            422,
            ["body", *field.split(".")],
        ), value
    unknown = client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 1) | {"bidd": 1})
    assert (unknown.status_code, unknown.json()["detail"][0]["loc"]) == (422, ["body", "bidd"])
    # nothing was counted
    assert client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 1)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'{"index": 0}{', b"x" * 200_001],
    ids=len,
)
def test_a_malformed_body_is_refused_without_a_traceback(client, body):
    answer = client.post(
        f"/v1/campaigns/{begun(client)}/tick",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code in (400, 413, 422)
    assert (
        answer.json()["detail"][0]["loc"][0] == "body"
        and "Traceback" not in answer.text
        and "/" not in answer.text
    )


def lists_of(schema):
    """The lists of a schema of pydantic, at any depth."""
    inner = []
    if isinstance(schema, dict):
        inner = schema.values()
        if schema.get("type") == "list":
            yield schema
    elif isinstance(schema, list):
        inner = schema
    for each in inner:
        yield from lists_of(each)


def test_every_list_of_a_body_ends_at_its_first_fault():
    models = [*schemas.Body.__subclasses__(), BidRequest]
    schema_of = {model.__name__: TypeAdapter(model).core_schema for model in models}
    assert sum(len([*lists_of(schema)]) for schema in schema_of.values()) > 10
    for name, schema in schema_of.items():
        for each in lists_of(schema):
            assert each.get("fail_fast"), f"{name}: {each}"


def test_very_many_faults_are_counted_and_not_named(client):
    few, many = ({f"x{i}": 0 for i in range(n)} for n in (5, 200))
    named = client.post("/v1/campaigns", json=few).json()["detail"]
    assert [fault["loc"][-1] for fault in named] == ["budget", "target_cpa", *few]
    (counted,) = client.post("/v1/campaigns", json=many).json()["detail"]
    assert "got 202 unknown or wrong ones" in counted["msg"] and counted["loc"] == ["body"]


def test_a_body_that_takes_long_to_parse_is_refused_before():
    json_type = {"content-type": "application/json"}
    with serving(create_app(policy_of(), MODEL_INFO, SPEC)) as client:
        for mark, (most, name) in MAX_MARKS.items():
            marks = mark * (most + 1)
            (refused,) = client.post("/v1/act", content=marks, headers=json_type).json()["detail"]
            assert refused["msg"] == f"expected at most {most:,} {name}, got {most + 1:,}"


LIMITS = {"/v1/campaigns": 65_536, "/v1/ticks": 2_000_000, "/openrtb/2.6/bid": 262_144}


def test_only_a_body_of_many_numbers_may_be_long():
    json_type = {"content-type": "application/json"}
    with serving(create_app(policy_of(), MODEL_INFO, SPEC)) as client:
        for path, most in LIMITS.items():
            whole = client.post(path, content=b" " * most, headers=json_type)
            longer = client.post(path, content=b" " * (most + 1), headers=json_type)
            assert (whole.status_code, longer.status_code) == (422, 413), path
            assert f"expected at most {most} bytes" in longer.text
        long = client.post("/v1/bid", content=b" " * 2_000_001, headers=json_type)
        assert long.status_code == 422


def test_a_chunked_body_ends_at_the_limit(client):
    def endless():
        for _ in range(50):
            yield b" " * 10_000

    answer = client.post("/v1/act", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413 and answer.json()["detail"][0]["loc"] == ["body"]


def test_protected_paths_need_the_token(tmp_path):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, token="s3cret-\u00e9")) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic s3cret"},
            {"authorization": "Bearer"},
        ):
            for path in ("/v1/campaigns", "/v1/model", "/metrics", "/v1/nothing"):
                answer = client.get(path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        right = {"authorization": "Bearer s3cret-\u00e9".encode()}
        assert client.get("/v1/campaigns", headers=right).json()["campaigns"] == []
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_every_answer_has_security_headers_and_foreign_hosts_are_refused(client):
    for answer in (
        client.get("/healthz"),
        client.get("/nothing"),
        client.post("/v1/act", content=b"{"),
    ):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/healthz", headers={"host": "evil.example"}).status_code == 421
    for host in ("localhost:1", "LOCALHOST", "localhost."):
        assert client.get("/healthz", headers={"host": host}).status_code == 200
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "a.b", "", ".", "localhost.evil")))


def test_an_empty_token_is_none():
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, token="")) as client:
        assert client.get("/v1/campaigns", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/v1/campaigns").status_code == 200


def test_a_page_elsewhere_cannot_send_requests(client):
    body = json.dumps(settings_of(0))
    for headers, status in (
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 201),
        ({"content-type": "application/json", "origin": "http://evil.example"}, 403),
        ({"content-type": "application/json", "origin": "null"}, 403),
        ({"content-type": "application/json", "origin": str(client.base_url).rstrip("/")}, 201),
    ):
        answer = client.post("/v1/campaigns", content=body, headers=headers)
        assert answer.status_code == status, headers
        assert status == 201 or answer.json()["detail"][0]["loc"] == [
            "header",
            [*headers, "content-type"][status == 403],
        ]


def test_a_compressed_body_is_refused_as_such(client):
    body = gzip.compress(json.dumps(settings_of(0)).encode())
    kind = {"content-type": "application/json"}
    for encoding, status in (("gzip", 415), ("br", 415), ("identity", 201)):
        content = json.dumps(settings_of(0)).encode() if status == 201 else body
        headers = kind | {"content-encoding": encoding}
        answer = client.post("/v1/campaigns", content=content, headers=headers)
        assert answer.status_code == status
        if status == 415:
            assert answer.json()["detail"][0]["loc"] == ["header", "content-encoding"]
            assert answer.headers["accept-encoding"] == "identity"


def test_metrics_of_a_replica_are_labelled():
    app = create_app(policy_of(), MODEL_INFO, SPEC, replica=1)
    with serving(app) as client:
        client.get("/healthz")
        lines = client.get("/metrics").text.splitlines()
    samples = [line for line in lines if line and line[0] != "#"]
    assert len(samples) > 20 and all('replica="1"' in line for line in samples)


def test_methods_are_answered_as_http_says(client):
    assert client.head("/healthz").status_code == client.head("/").status_code == 200
    assert not client.head("/v1/model").content
    assert client.put("/v1/campaigns", json={}).headers["allow"] == "GET, HEAD, POST"
    assert client.post("/v1/campaigns/x", json={}).headers["allow"] == "DELETE, GET, HEAD"
    assert client.get("/v1/act").headers["allow"] == "POST"
    assert client.post("/", json={}).status_code == 405


def test_a_budget_that_cannot_be_spent_is_refused(client):
    spent = client.post("/v1/campaigns", json=settings_of(0) | {"budget": 0.05})
    assert (spent.status_code, spent.json()["detail"][0]["loc"]) == (422, ["body", "budget"])
    least = begun(client, 0, budget=0.1, horizon=6.0)
    assert client.post(f"/v1/campaigns/{least}/tick", json=drawn(0, 0) | {"index": 0.0}).json()[
        "guards"
    ] != ["budget spent"]


def test_metrics_count_ticks_and_requests(client):
    def value(name):
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.split()[-1]) for line in lines)

    names = (
        "decisionllm_bids_total",
        "decisionllm_open_campaigns",
        'decisionllm_cache_total{event="hits"}',
        "decisionllm_events_total",
        'decisionllm_requests_total{method="POST",route="/v1/campaigns/{id}/tick",status="200"}',
        "decisionllm_batch_size_count",
        'decisionllm_guards_total{guard="bid cap"}',
    )
    before = [value(name) for name in names]
    id = begun(client, 0, bid_cap=1e-6)
    for t in (0, 1, 1):
        client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, t))
    assert [value(name) - b for name, b in zip(names, before, strict=True)] == [2, 1, 1, 1, 3, 2, 2]
    assert (
        'decisionllm_model_info{dataset="auction",fingerprint="f",model="m1",run="a"} 1.0'
        in client.get("/metrics").text
    )


def test_the_dashboard_and_the_alerts_name_metrics_that_exist(client):
    docs = Path(__file__).parents[3] / "docs" / "monitoring"
    text = client.get("/metrics").text
    panels = json.loads((docs / "grafana.json").read_text(encoding="utf-8"))["panels"]
    rules = yaml.safe_load((docs / "alerts.yaml").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [rule["expr"] for rule in rules["groups"][0]["rules"]]
    assert len(queries) == 23 and all(panel["description"] for panel in panels)
    for query in queries:
        for name in re.findall(r"decisionllm_\w+", query):
            assert re.search(f"^# TYPE {name.removesuffix('_bucket')} ", text, re.M), (
                f"{name} is no metric"
            )


def test_spend_is_counted_against_even_pacing(client):
    def spent(kind):
        return float(
            re.search(
                rf'^decisionllm_spend_total{{kind="{kind}"}} (.*)$',
                client.get("/metrics").text,
                re.M,
            )[1]
        )

    before, id = (spent("reported"), spent("even")), begun(client)
    for t in (0, 1, 1, 2):
        client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, t)).raise_for_status()
    reported = drawn(0, 1)["result"]["spend"] + drawn(0, 2)["result"]["spend"]
    assert spent("reported") - before[0] == pytest.approx(reported, abs=1e-6)
    assert spent("even") - before[1] == pytest.approx(2 * 900 / STEPS, abs=1e-6), (
        "two steps of twelve"
    )


def test_opening_twice_with_one_key_is_one_campaign(client):
    first, second = (
        client.post("/v1/campaigns", json=settings_of(0) | {"key": "same"}).json() for _ in range(2)
    )
    assert first == second and first["step"] == 0
    for t in range(3):
        client.post(f"/v1/campaigns/{first['id']}/tick", json=drawn(0, t)).raise_for_status()
    again = client.post("/v1/campaigns", json=settings_of(0) | {"key": "same"}).json()
    spent = drawn(0, 1)["result"]["spend"] + drawn(0, 2)["result"]["spend"]
    assert (again["id"], again["step"], again["spend"]) == (first["id"], 3, spent), (
        "where it is now"
    )
    other = client.post("/v1/campaigns", json=settings_of(1) | {"key": "same"})
    assert (other.status_code, other.json()["detail"][0]["loc"]) == (409, ["body", "key"])


def test_the_openapi_document_is_written_once():
    app = create_app(policy_of(), MODEL_INFO, SPEC)
    with serving(app) as client:
        first = client.get("/openapi.json")
        assert first.headers["content-type"] == "application/json"
        app.openapi_schema["info"]["title"] = "changed"
        assert client.get("/openapi.json").content == first.content


def test_swagger_ui_is_served_where_it_is_switched_on():
    """Only its page may load scripts from elsewhere, and it names one policy."""
    with serving(create_app(policy_of(), MODEL_INFO, SPEC)) as client:
        assert client.get("/docs").status_code == 404
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, docs=True)) as client:
        page = client.get("/docs")
        (policy,) = page.headers.get_list("content-security-policy")
        assert "SwaggerUIBundle" in page.text and "it needs a network" in page.text
        (source,) = re.findall(r'<script src="(https://[^/"]+)', page.text)
        assert f"script-src 'unsafe-inline' {source}" in policy
        (strict,) = client.get("/healthz").headers.get_list("content-security-policy")
        assert "script-src 'self';" in strict


def test_the_examples_of_the_openapi_document_are_valid(client):
    document = client.get("/openapi.json").json()
    bodies = {
        route["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition(
            "/"
        )[2]
        for path, route in document["paths"].items()
        if "post" in route and path.startswith("/v1/")
    }
    assert bodies == {"ActRequest", "CampaignSettings", "Tick", "Ticks", "AuctionNetBidding"}
    for name in bodies:
        for example in document["components"]["schemas"][name]["examples"]:
            getattr(schemas, name).model_validate(example)


# -- generated requests --

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# that a body fits the document does not promise that it is taken: 5 x 7 numbers with 5 others fit
REFUSED = (400, 404, 409, 413, 422, 503)


def fits(document, case):
    """Whether a body fits the document: a body generated as wrong may fit after shrinking."""
    schema = case.operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator(
        schema | {"components": document.raw_schema["components"]}
    ).is_valid(case.body)


@pytest.mark.parametrize(
    "mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE], ids=str
)
def test_generated_requests_cause_no_server_error(client, mode):
    """Every operation of the document, with bodies that fit it and bodies that do not."""
    document = schemathesis.openapi.from_url(str(client.base_url.join("/openapi.json")))
    operations = [result.ok() for result in document.get_all_operations()]
    open_campaign = begun(client)
    codes = set()
    if mode is schemathesis.GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.body]

    for operation in operations:

        @settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), is_open=strategies.booleans())
        def call(case, is_open):
            if is_open and "id" in (case.path_parameters or {}) and case.method != "DELETE":
                case.path_parameters["id"] = open_campaign
            answer = case.call()
            case.validate_response(answer, checks=CHECKS)
            codes.add(answer.status_code)
            if case.operation.body and not fits(document, case):
                assert answer.status_code in REFUSED, case.body
            if answer.status_code >= 400:
                assert answer.json()["detail"][0]["loc"], "which field"

        call()
    assert len(operations) > 4 and 422 in codes and max(codes) < 500


# -- the command --


def ready(client):
    """Whether the server can answer; replicas listen later than their program says where."""
    try:
        return client.get("/readyz").status_code == 200
    except httpx.ConnectError:
        return False


@contextlib.contextmanager
def program(run, *words, **environment):
    """`decisionllm serve` as a process of its own: (process, client)."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "decisionllm",
            "serve",
            f"run={run}",
            "port=0",
            f"deadline_ms={1000 * PATIENCE}",
            *words,
        ],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        encoding="utf-8",
    )
    try:
        line = process.stdout.readline()
        assert " on http://" in line, process.communicate()
        with httpx.Client(
            base_url=line.split(" on ")[1].split(",")[0].split()[0], timeout=PATIENCE
        ) as client:
            while not ready(client):
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            yield process, client
    finally:
        process.kill()
        process.communicate()


def restarted(run, **options):
    """The app of `decisionllm serve` in this process, which need not be started anew."""
    defaults = {"run": str(run), "deadline_ms": 1000 * PATIENCE, "log": "none"}
    config = fill_defaults("serve", defaults | options)
    return build_app(read_options(ServeConfig, config))


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="replicas share a port")
def test_replicas_give_one_campaign_the_same_answers(trained_run, tmp_path):
    """Each tick is sent on a connection of its own, which goes to either replica."""
    policy = loading.load(trained_run)
    alone = CampaignManager(policy, ObservationSpec.from_info(policy.info["dataset"]))
    mine = alone.open(**settings_of(0))
    with program(trained_run, "replicas=2", f"journal={tmp_path}/j") as (process, client):
        id = begun(client)
        for t in range(STEPS):
            answer = client.post(
                f"/v1/campaigns/{id}/tick", json=drawn(0, t), headers={"connection": "close"}
            ).json()
            near(answer["multiplier"], alone.tick(mine, **drawn(0, t))["multiplier"], scale=HIGH)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_a_replica_that_does_not_start_is_an_error():
    with pytest.raises(OSError, match="one ended with exit code 1 as it started"):
        replicas.run_replicas(leave, replicas=2)


def test_replicas_that_die_again_or_hang_are_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(replicas, "HUNG_SECONDS", 0.5)
    monkeypatch.setattr(replicas, "PAUSES", (0.0, 0.05, 0.1))
    replicas.run_replicas(lives, tmp_path, replicas=1)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["0", "1", "2", "3"]
    messages = [record.getMessage() for record in caplog.records]
    assert "replica 0 ended with exit code 7; it is started again in 0 s" in messages[0]
    assert "replica 0 hangs" in messages[1] and "exit code -9" in messages[2] and "7" in messages[3]


def test_the_pause_before_a_new_start_grows():
    dead = SimpleNamespace(is_alive=lambda: False, exitcode=1)
    replica, pauses = replicas.Replica(0, ctypes.c_double(1.0)), []
    for now in (10, 20, 30, 40, 50, 60, 70, 80, 90, 1000):
        replica.process = dead
        replica.started = now - 5 if now < 1000 else 100
        replicas.check_replica(replica, now)
        pauses.append(replica.due - now)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 0]


@pytest.mark.numeric
def test_a_killed_server_continues_with_the_same_answers(trained_run, tmp_path):
    """Killed between ticks and while one is in flight; then each is repeated."""
    policy = loading.load(trained_run)
    alone = CampaignManager(policy, ObservationSpec.from_info(policy.info["dataset"]))
    mine = alone.open(**settings_of(0))
    expected = [alone.tick(mine, **drawn(0, t))["multiplier"] for t in range(STEPS)]
    answers = []
    with program(trained_run, f"journal={tmp_path}/j", "cache_mb=0") as (process, client):
        id = begun(client)
        answers += [client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, t)) for t in range(4)]
        # the next one is sent without waiting for its answer
        with contextlib.suppress(httpx.HTTPError):
            client.post(
                f"/v1/campaigns/{id}/tick",
                json=drawn(0, 4),
                timeout=httpx.Timeout(PATIENCE, read=0.001),
            )
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(restarted(trained_run, journal=f"{tmp_path}/j")) as client:  # and with a cache
        assert (
            client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 3)).content == answers[3].content
        )
        answers += [
            client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, t)) for t in range(4, STEPS)
        ]
        assert client.get(f"/v1/campaigns/{id}").json()["step"] == STEPS
    got = [answer.json()["multiplier"] for answer in answers]
    assert got[:4] == expected[:4]
    near(got, expected, scale=policy.model.spec.high[0])


@pytest.fixture(scope="module")
def shown(trained_run, tmp_path_factory):
    """What one server, which has a shadow and writes its log, answers to the tour of the docs, to the
    docs' Python block, and to a campaign of two steps.
    """
    path = tmp_path_factory.mktemp("shown")
    tour = next(block for block in PAGE.split("```sh\n") if block.startswith("url="))
    block = PAGE.split("```python\n")[1].split("```")[0]
    result = SimpleNamespace(path=path)
    with program(trained_run, f"shadow={trained_run}", f"journal={path}/j") as (process, client):
        url = str(client.base_url)
        lines = tour.split("```")[0].replace("http://127.0.0.1:8080", url.rstrip("/"))
        lines = lines.replace("curl -s ", "curl -s -f -w '\\n' ")
        done = subprocess.run(
            ["bash", "-e", "-c", lines],
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
        )
        result.tour = done.stdout.splitlines()
        result.names = {}
        block = block.replace("runs/auction/nano-0", str(trained_run))
        exec(block.replace("http://127.0.0.1:8080", url), result.names)
        result.again = result.names["remote"].bidding(
            0, [0.0004, 0.0007], [0.0001, 0.0001], [], [], [], [], []
        )
        result.names["remote"].client.close()
        result.model = client.get("/v1/model").json()
        result.id = begun(client, horizon=2)
        first = client.post(
            f"/v1/campaigns/{result.id}/tick",
            json=drawn(0, 0),
            headers={"x-request-id": "first"},
        )
        result.bid = first.json()["multiplier"]
        while not (tick := client.get(f"/v1/campaigns/{result.id}").json()["ticks"][0])["shadow"]:
            time.sleep(0.05)
        result.tick = tick
        for later in (drawn(0, 1), drawn(0, 2) | {"coming": None}):
            client.post(f"/v1/campaigns/{result.id}/tick", json=later).raise_for_status()
        process.terminate()
        result.logged = [json.loads(line) for line in process.stderr.read().splitlines()]
    return result


def test_the_tour_of_the_server_in_the_docs_works(shown):
    """Its lines, run by a shell."""
    ready, opened, first, second, whole, page, bids, ended = (
        line for line in shown.tour if line and line[0] != "#"
    )
    assert json.loads(ready)["status"] == "ready" and json.loads(opened)["name"] == "shoes"
    assert [json.loads(tick)["index"] for tick in (first, second)] == [0, 1] and json.loads(second)[
        "spend"
    ] == 41.5
    assert page == "<title>decisionllm: campaigns</title>"
    assert (
        json.loads(whole)["step"] == 2
        and bids == "decisionllm_bids_total 2.0"
        and json.loads(ended)["status"] == "ended"
    )


@pytest.mark.numeric
def test_the_docs_read_the_journal_and_serve_auctionnet(trained_run, shown, tmp_path, capsys):
    lines = re.findall(r"^decisionllm (data|train) (dataset=journal .*)$", PAGE, re.M)
    bids = shown.names["bids"]
    assert bids.shape == (2,) and (bids > 0).all()
    near(shown.again, bids, scale=0.0007 * loading.load(trained_run).model.spec.high[0])
    assert [verb for verb, _ in lines] == ["data", "train"]
    for verb, words in lines:
        short = (
            [
                "steps=2",
                "optim.batch_size=4",
                "log.tracker=none",
                "data.held_out=0",
                f"run={tmp_path}/again",
                *NANO,
            ]
            if verb == "train"
            else []
        )
        assert (
            command(
                verb,
                *words.replace("runs/auction/nano-0/journal.sqlite", f"{shown.path}/j").split(),
                *short,
            )
            == 0
        )
    response = re.search(r"\d+ in \d+ groups, \d+ steps", capsys.readouterr().out)
    assert response[0] == "2 in 2 groups, 3 steps", "one of the tour, whose second has no result"


def test_a_shadow_and_the_logs_of_the_command(shown):
    assert shown.model["shadow"]["run"] == "run"
    near(shown.tick["shadow"]["multiplier"], shown.bid, scale=shown.bid)
    of_first = [line for line in shown.logged if line.get("request_id") == "first"]
    (line,) = [line for line in of_first if "route" in line]  # others are warnings of its units
    assert (
        line["route"] == "/v1/campaigns/{id}/tick"
        and line["status"] == 200
        and line["campaign"] == shown.id
    )
    assert (shown.path / "j.shadow").is_file()


def test_a_number_out_of_range_or_a_baseline_is_refused(tmp_path):
    for option in ("pacing", "horizon", "max_campaigns"):
        with pytest.raises(ValueError, match=f"{option}: expected a number above 0, got -1"):
            serve(fill_defaults("serve", {"run": str(tmp_path), option: -1}))
    with pytest.raises(ValueError, match="port: expected 0 .. 65535, got 99999"):
        serve(fill_defaults("serve", {"run": str(tmp_path), "port": 99999}))
    (tmp_path / "run.json").write_text('{"format": 5}', encoding="utf-8")
    (tmp_path / "config.yaml").write_text("policy: {}", encoding="utf-8")
    with pytest.raises(
        ValueError, match=f"run={tmp_path}: expected a run of `decisionllm train`, got a baseline"
    ):
        serve(fill_defaults("serve", {"run": str(tmp_path)}))


def test_serve_checks_its_options_before_it_listens(trained_run, tmp_path, capsys, monkeypatch):
    def refused(*words):
        assert command("serve", f"run={trained_run}", *words) == 1
        return capsys.readouterr().err

    monkeypatch.delenv("DECISIONLLM_TOKEN", raising=False)
    assert "others can reach it: set a token, DECISIONLLM_TOKEN" in refused("host=0.0.0.0")
    assert "expected a run directory" in refused(f"run={tmp_path}/none")
    assert "max_batch_size: expected a number above 0, got 0" in refused("max_batch_size=0")
    assert "pacing: expected a number above 0, got nan" in refused("pacing=nan")
    assert "cache_mb: expected a number from 0, got -1" in refused("cache_mb=-1")
    assert "currency: expected three capitals such as USD, got 'usd'" in refused("currency=usd")
    assert "notice_url: expected http:// or https:// and" in refused("notice_url=bidder.example")
    monkeypatch.setenv("DECISIONLLM_TOKEN", "short")
    assert "DECISIONLLM_TOKEN: expected at least 16 bytes" in refused()
    monkeypatch.delenv("DECISIONLLM_TOKEN")
    assert "journal: expected a file to write" in refused(f"journal={tmp_path}")
    in_memory = refused(f"journal='file:{tmp_path}/x?mode=memory'")
    assert "journal: expected the path of a file, got the URI file:" in in_memory
    assert not Path("file:").exists()
    assert "expected a run directory" in refused(f"shadow={tmp_path}/none", f"journal={tmp_path}/j")
    assert "log: expected one of json, text, none, got 'xml'" in refused("log=xml")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen there" in refused(
            f"port={taken.getsockname()[1]}", f"journal={tmp_path}/j"
        )
