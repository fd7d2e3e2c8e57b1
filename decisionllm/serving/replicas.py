"""Several processes of one app behind one address, by Ray Serve: `replicas=N` on this machine.

The hash of the header `x-session-id` selects the replica; clients send a campaign's id there, so that its keys and values are
in one replica. This only saves time: all replicas write one journal, and a replica that lacks a campaign or its last ticks
replays them from there. Each replica counts for itself; /metrics answers for one of them. Ray listens on ports of its own, on
all addresses of the machine, protected by its own token: keep them behind a firewall.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any


def run(build: Callable[[], Any], *, host: str, port: int, replicas: int, max_queue: int) -> None:
    """Serve until interrupted. build: () -> the app, called in each replica; max_queue: most requests of a replica at once."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions, RequestRouterConfig
    except ImportError as error:
        raise ImportError("replicas: more than one needs Ray: pip install 'decisionllm[ray]'") from error

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        ray.init(num_cpus=replicas, include_dashboard=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises no narrower class
        remedy = "try again when the machine is less busy, or use replicas=1"
        raise OSError(f"replicas: Ray did not start ({error}); {remedy}") from error
    serve.start(http_options=HTTPOptions(host=host, port=port), logging_config=quiet)
    by_session: dict[str, Any] = {"request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"}
    deployment: Any = serve.deployment(
        serve.ingress(lambda: build())(), name="decisionllm", num_replicas=replicas, max_ongoing_requests=max_queue,
        request_router_config=RequestRouterConfig(**by_session), logging_config=quiet,
    )  # fmt: skip
    serve.run(deployment.bind(), name="decisionllm", route_prefix="/")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after the start, which sets handlers of Ray's own
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()
