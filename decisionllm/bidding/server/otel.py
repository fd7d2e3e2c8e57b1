"""Spans of ticks for OpenTelemetry: `tick` with its children `queue`, `model` and `journal`.

They carry the id of the campaign, the step and the id of the request, and nothing of a body.
OpenTelemetry's own variables, such as OTEL_TRACES_SAMPLER and OTEL_RESOURCE_ATTRIBUTES, hold.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from decisionllm import __version__
from decisionllm.bidding.server import logs
from decisionllm.bidding.server.tracing import Timing

EXPORT_TIMEOUT_S = 2.0  # of one request to the collector
Attributes = dict[str, str | int]


class OtelTraces:
    """Makes a span of each tick.

    Args:
        provider: has the processors that the spans go to. It is shut down with the service.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self.tracer = provider.get_tracer("decisionllm.bidding.server", __version__)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(self.provider.shutdown)  # sends what waits

    @contextmanager
    def tick(self, campaign: str, step: int) -> Iterator["OtelTick"]:
        attributes: Attributes = {"campaign.id": campaign, "campaign.step": step}
        request_id = logs.current_request_id()
        if request_id is not None:
            attributes["request.id"] = request_id
        span = self.tracer.start_span("tick", kind=SpanKind.SERVER, attributes=attributes)
        try:
            yield OtelTick(self, span, campaign)
        except BaseException as error:
            # the message of an error may quote a body
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()


class OtelTick:
    """The spans below one tick."""

    def __init__(self, traces: OtelTraces, span: Span, campaign: str) -> None:
        self.traces = traces
        self.context = set_span_in_context(span)
        self.campaign = campaign
        # added to time.monotonic() in ns: nanoseconds since 1970
        self.offset = time.time_ns() - time.monotonic_ns()

    def on_decided(self, timing: Timing) -> None:
        now = time.monotonic()
        began = now if timing.began is None else timing.began
        self._span("queue", timing.called, began, whole=timing.began is not None)
        if timing.began is not None:
            ended = now if timing.ended is None else timing.ended
            self._span("model", timing.began, ended, whole=timing.ended is not None)

    def on_written(self, began: float) -> None:
        self._span("journal", began, time.monotonic(), whole=True)

    def _span(self, name: str, began: float, ended: float, *, whole: bool) -> None:
        """One child. began, ended: time.monotonic(); whole: False if the tick did not wait for its
        end.
        """
        span = self.traces.tracer.start_span(
            name,
            context=self.context,
            start_time=self._since_1970(began),
            attributes={"campaign.id": self.campaign},
        )
        if not whole:
            span.set_status(Status(StatusCode.ERROR, "deadline"))
        span.end(self._since_1970(ended))

    def _since_1970(self, monotonic: float) -> int:
        """Nanoseconds."""
        return round(monotonic * 1e9) + self.offset


def build_otlp_traces(endpoint: str) -> OtelTraces:
    """Traces that go to a collector by OTLP over HTTP, in a thread of their own; where it takes no
    more, spans are dropped.

    Args:
        endpoint: such as http://127.0.0.1:4318/v1/traces.
    """
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "decisionllm"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTraces(provider)
