"""What a server counts, for Prometheus."""


class Metrics:
    """A registry of its own, so that two apps of one process do not count for each other."""

    def __init__(self, service, card):
        from prometheus_client import CollectorRegistry, Counter, Histogram, Info

        self.service, self.registry = service, CollectorRegistry()
        self.requests = Counter("decisionllm_requests", "Answers.", ["route", "method", "status"], registry=self.registry)
        self.seconds = Histogram(
            "decisionllm_request_seconds", "From a request to its answer.", ["route"], registry=self.registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
        )  # fmt: skip
        self.batches = Histogram(
            "decisionllm_batch_size", "Decisions of one forward.", registry=self.registry, buckets=(1, 2, 4, 8, 16, 32, 64, 128)
        )
        Info("decisionllm_model", "What is served.", registry=self.registry).info(
            {name: str(card[name]) for name in ("run", "model", "dataset", "fingerprint")}
        )
        self.registry.register(self)

    def watch(self, scope, status, seconds):
        route = getattr(scope.get("route"), "path", "none")
        self.requests.labels(route, scope["method"], status).inc()
        self.seconds.labels(route).observe(seconds)

    def collect(self):
        """What the desk and the service have counted by themselves."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def counter(name, about, values, *labels):
            family = CounterMetricFamily(f"decisionllm_{name}", about, labels=labels)
            for told, value in values.items():
                family.add_metric([told] if labels else [], value)
            return family

        service, desk = self.service, self.service.desk
        gauge = lambda name, about, value: GaugeMetricFamily(f"decisionllm_{name}", about, value=value)  # noqa: E731
        yield gauge("waiting", "Requests that wait for the model.", len(service.model.waiting))
        yield counter("events", "Refused for a full queue, repeated, or not written.", dict(service.counts), "event")
        if desk is None:
            return
        of = lambda kind: {name: value for (k, name), value in list(desk.counts.items()) if k == kind}  # noqa: E731
        yield counter("bids", "Ticks answered with a bid.", {"": desk.counts["bid", ""]})
        yield counter("no_bids", "Ticks answered with none.", {"": desk.counts["no bid", ""]})
        yield counter("rebuilt", "Campaigns read from the journal.", {"": desk.counts["rebuilt", ""]})
        yield counter("guards", "Answers that a guard rail held back.", of("guard"), "guard")
        yield counter("fallbacks", "Answers of linear pacing.", of("fallback"), "reason")
        yield gauge("open_campaigns", "Campaigns that have not ended.", desk.journal.still_open())
        yield gauge("campaigns_in_memory", "Campaigns that need not be rebuilt.", len(desk.campaigns))
        if desk.cache is not None:
            yield counter(
                "cache", "Decisions whose past was remembered, or not, and pasts given up.", dict(desk.cache.counts), "event"
            )
            yield gauge("cache_bytes", "Bytes for keys, values and pasts.", desk.cache.bytes)
            yield gauge("cache_rows", "Episodes that are remembered.", len(desk.cache.taken))

    def text(self):
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST
