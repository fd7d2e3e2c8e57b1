"""Prometheus metrics of a server."""

import sqlite3
from collections import Counter as Totals
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.server.campaigns import CampaignManager
from decisionllm.bidding.server.models import Models
from decisionllm.bidding.server.service import Service
from decisionllm.bidding.server.shadow import Shadow


class Labelled(CollectorRegistry):
    """The metrics of another registry with more labels."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        super().__init__()
        self.registry = registry
        self.labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self.registry.collect():
            metric.samples = [
                sample._replace(labels=self.labels | sample.labels) for sample in metric.samples
            ]
            yield metric


class Metrics(Collector):
    """The metrics of one app in a registry of its own; prometheus-fastapi-instrumentator would
    match every route twice.

    Args:
        replica: number of this process among several; None: it is the only one.
    """

    service: Service  # see `attach`

    def __init__(self, replica: int | None = None) -> None:
        self.replica = replica
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "decisionllm_requests",
            "Requests.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "decisionllm_request_seconds",
            "Seconds from a request to its answer.",
            ["route"],
            registry=self.registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
        )
        # few, and looked up once each
        self.count_of = cache(self.requests.labels)
        self.seconds_of = cache(self.seconds.labels)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batches = Histogram(
            "decisionllm_batch_size",
            "Decisions per forward.",
            registry=self.registry,
            buckets=sizes,
        )

    def attach(self, service: Service) -> None:
        """Report what a service counts from now on. The service itself needs `batches` before."""
        self.service = service
        self.registry.register(self)
        if service.shadow is not None:
            service.shadow.on_difference = Histogram(
                "decisionllm_shadow_difference",
                "Difference of the two multipliers as a share of the larger one.",
                registry=self.registry,
                buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
            ).observe

    def text(self) -> bytes:
        """All metrics in the format of Prometheus, those of a replica with its number."""
        if self.replica is None:
            return generate_latest(self.registry)
        return generate_latest(Labelled(self.registry, {"replica": str(self.replica)}))

    def on_response(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = route.path if route else "none"
        self.count_of(path, scope["method"], status).inc()
        self.seconds_of(path).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The counts that the service and its campaign manager keep."""
        service = self.service
        yield model_metrics(service.models)
        waiting = "Requests that wait for the model."
        yield gauge("waiting", waiting, len(service.model.waiting))
        oldest = "Age of the oldest request without a decision."
        yield gauge("queue_age_seconds", oldest, service.model.age)
        events = dict(service.counts)
        events["repeated"] = 0
        if service.manager is not None:
            events["repeated"] = service.manager.counts["repeated", ""]
        what = "Requests refused (busy), repeated, or not saved (journal failed)."
        yield counter("events", what, events, "event")
        if service.manager is None:
            return
        yield from self.tick_metrics(service.manager)
        yield from self.journal_metrics(service.manager.journal)
        yield from self.loaded_model_metrics()
        if service.shadow is not None:
            yield from shadow_metrics(service.shadow)

    def tick_metrics(self, manager: CampaignManager) -> Iterator[Metric]:
        """Counts of the answers, and the spend."""
        counts: dict[str, dict[str, float]] = defaultdict(dict)
        for (kind, name), value in list(manager.counts.items()):
            counts[kind][name] = value
        none = {"": 0}
        above = "Ticks answered with a multiplier above 0."
        yield counter("bids", above, counts["bid"] or none)
        yield counter("no_bids", "Ticks answered with a multiplier of 0.", counts["no bid"] or none)
        replayed = "Campaigns replayed from the journal."
        yield counter("rebuilt", replayed, counts["rebuilt"] or none)
        spent = (
            "Currency: reported by results, and an equal share of the budget for each of these "
            "steps (even)."
        )
        yield counter("spend", spent, manager.spend, "kind")
        yield counter("guards", "Answers lowered by a guard rail.", counts["guard"], "guard")
        late = "Answers by linear pacing: the decision was late (deadline) or failed (model)."
        yield counter("fallbacks", late, counts["fallback"], "reason")
        far = "Numbers of the ticks that are far from the training log, such as a target CPA."
        yield counter("unlike_training", far, counts["unlike training"], "number")
        doubtful = "Results that contradict themselves or the budget."
        yield counter("implausible_results", doubtful, counts["implausible result"], "reason")
        yield counter("model_ticks", "Ticks by the model that answered.", counts["model"], "model")

    def journal_metrics(self, journal: Journal) -> Iterator[Metric]:
        lag = "Age of the oldest answer that is not yet on the disk."
        yield gauge("journal_lag_seconds", lag, self.service.journal_writer.age)
        with suppress(sqlite3.Error):  # the other metrics say that it is damaged
            still_open = journal.count_open()
            yield gauge("open_campaigns", "Campaigns that have not ended.", still_open)
        fault = "1 while the journal cannot be read or written."
        yield gauge("journal_fault", fault, bool(self.service.fault))
        damaged = "Rows of the journal that were found not to be as they were written."
        yield gauge("damaged_rows", damaged, len(journal.damaged))

    def loaded_model_metrics(self) -> Iterator[Metric]:
        """The campaigns and caches of all loaded models, and their shares of new campaigns."""
        models = self.service.models
        in_memory = sum(len(each.campaigns) for each in models.managers)
        yield gauge("campaigns_in_memory", "Campaigns in memory.", in_memory)
        caches = models.caches
        if caches:
            events = Totals(models.cache_counts)  # a count never falls
            for cache in caches:
                events.update(cache.counts)
            outcomes = "Prefix-cache hits, misses and evictions."
            yield counter("cache", outcomes, events, "event")
            size = sum(cache.bytes for cache in caches)
            allocated = "Bytes allocated for keys, values and histories."
            yield gauge("cache_bytes", allocated, size)
            rows = sum(len(cache.taken) for cache in caches)
            yield gauge("cache_rows", "Campaigns in the prefix cache.", rows)
        share = GaugeMetricFamily(
            "decisionllm_model_share",
            "Share of new campaigns that a model opens.",
            labels=["model"],
        )
        for name in list(models.loaded):
            share.add_metric([name], models.choice.get(name, 0.0))
        yield share


def counter(name: str, help: str, values: Mapping[str, float], *labels: str) -> Metric:
    """A count of each value of a label; of none, the one value is that of "".

    Args:
        name: without the prefix of the package.
        help: description of the count.
        values: by value of the label.
        labels: its name, at most one.
    """
    family = CounterMetricFamily(f"decisionllm_{name}", help, labels=labels)
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)
    return family


def gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"decisionllm_{name}", help, value=value)


def shadow_metrics(shadow: Shadow) -> Iterator[Metric]:
    """Counts of the ticks of the shadow policy."""
    outcomes = {name: shadow.counts[name] for name in ("decided", "dropped", "failed")}
    ticks = (
        "Ticks that the shadow policy decided, dropped since others waited for an answer, or "
        "failed at."
    )
    yield counter("shadow_ticks", ticks, outcomes, "outcome")
    higher = "Ticks at which the shadow policy would bid more than was answered."
    yield counter("shadow_higher", higher, {"": shadow.counts["higher"]})


def model_metrics(models: Models) -> Metric:
    """The run, the dataset and the fingerprint of each loaded model."""
    family = InfoMetricFamily("decisionllm_model", "The served models.")
    for model in list(models.loaded.values()):
        names = ("run", "model", "dataset", "fingerprint")
        family.add_metric([], {name: str(model.info[name]) for name in names})
    return family
