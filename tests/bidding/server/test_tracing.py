"""Spans of a tick: queue, model and journal, with the campaign and without a body."""

import asyncio
import socket
import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from decisionllm.bidding.serve import build_traces
from decisionllm.bidding.serve_options import ServeConfig
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.models import Model, Models
from decisionllm.bidding.server.otel import OtelTraces, build_otlp_traces
from decisionllm.bidding.server.service import Service
from decisionllm.bidding.server.tracing import NoTraces
from decisionllm.command_line import fill_defaults
from decisionllm.commands.options import read_options
from tests.bidding.server.test_campaigns import SPEC, drawn, policy_of
from tests.bidding.server.test_campaigns import settings as settings_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.conftest import PATIENCE


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def traces(spans):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return OtelTraces(provider)


def test_a_tick_has_three_children_with_its_campaign_and_no_body(traces, spans):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, traces=traces)) as client:
        id = client.post("/v1/campaigns", json=settings_of(0)).json()["id"]
        assert not spans.get_finished_spans(), "opening a campaign is no tick"
        path = f"/v1/campaigns/{id}/tick"
        client.post(path, json=drawn(0, 0), headers={"x-request-id": "abc-1"}).raise_for_status()
        *children, tick = spans.get_finished_spans()
    assert [child.name for child in children] == ["queue", "model", "journal"]
    assert tick.name == "tick" and tick.parent is None
    assert tick.attributes == {"campaign.id": id, "campaign.step": 0, "request.id": "abc-1"}
    for child in children:
        assert child.parent.span_id == tick.context.span_id
        assert child.attributes == {"campaign.id": id} and not child.events
        assert child.status.is_unset
        assert tick.start_time <= child.end_time <= tick.end_time
    queue, model, journal = children
    assert queue.end_time == model.start_time <= model.end_time <= journal.start_time
    assert all(span.start_time < span.end_time for span in (model, journal, tick))


def test_ticks_of_one_request_are_traced_each(traces, spans):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, traces=traces)) as client:
        ids = [client.post("/v1/campaigns", json=settings_of(i)).json()["id"] for i in range(3)]
        client.post("/v1/ticks", json={"ticks": {id: drawn(0, 0) for id in ids}})
        result = spans.get_finished_spans()
    by_tick = {span.context.span_id: [] for span in result if span.name == "tick"}
    for span in result:
        if span.parent is not None:
            by_tick[span.parent.span_id].append(span.name)
    assert list(map(sorted, by_tick.values())) == [["journal", "model", "queue"]] * 3


def test_a_refused_tick_has_the_kind_of_its_error_alone(traces, spans):
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, traces=traces)) as client:
        id = client.post("/v1/campaigns", json=settings_of(0)).json()["id"]
        assert client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 5)).status_code == 409
        (tick,) = spans.get_finished_spans()
    assert tick.status.status_code is StatusCode.ERROR and tick.status.description == "RequestError"
    assert not tick.events


def test_a_late_decision_shows_where_its_time_went(traces, spans):
    """The first tick is late in the model, the second in the queue behind it."""
    gate = threading.Event()

    def slow(requests):
        gate.wait(PATIENCE)
        return [([1.0], None)] * len(requests)

    async def main():
        service = Service(Models(Model("", "", policy_of())), traces=traces, batch_wait=0)
        async with service.run():
            for seconds in (1.0, 0.01):
                with traces.tick("c", 0) as trace:
                    due = service.loop.time() + seconds
                    answer = await service._run_decision(due, slow, None, trace)
                    assert isinstance(answer, TimeoutError)
            gate.set()

    asyncio.run(main())
    names = [(span.name, span.status.description) for span in spans.get_finished_spans()]
    assert names == [
        ("queue", None),
        ("model", "deadline"),
        ("tick", None),
        ("queue", "deadline"),
        ("tick", None),
    ]


def test_without_the_option_nothing_is_traced():
    assert build_traces(None) is None
    assert isinstance(Service(Models(Model("", "", policy_of()))).traces, NoTraces)
    assert isinstance(build_traces("http://127.0.0.1:1/v1/traces"), OtelTraces)
    config = fill_defaults("serve", {"run": "r"})
    assert config["tracing"] is None
    for name, value in (("log_sample", 1.5), ("log_slow_ms", 0)):
        with pytest.raises(ValueError, match=name):
            read_options(ServeConfig, config | {name: value})


def test_a_collector_that_is_away_fails_no_tick_and_no_stop():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    traces = build_otlp_traces(f"http://127.0.0.1:{port}/v1/traces")
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, traces=traces)) as client:
        id = client.post("/v1/campaigns", json=settings_of(0)).json()["id"]
        assert client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0)).status_code == 200
