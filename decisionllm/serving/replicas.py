"""Several processes of one app behind one address, by Ray Serve: `replicas=N` on this machine.

A request goes to the replica that the hash of its header `x-session-id` names; clients send a campaign's id there, so that its keys
and values are in one replica. That saves time and no more: all replicas write one journal, and one that does not know a campaign,
or not its last ticks, reads them there. Each replica counts for itself; /metrics answers for one of them. Ray listens on ports of its
own, on all addresses of the machine, closed by its own token: keep them behind a firewall.
"""

import os
import signal
import threading


def run(build, *, host, port, replicas, queue):
    """Answer until interrupted. build: () -> the app, called in each replica; queue: most requests that each holds at once."""
    shutdown, stop = start(build, host=host, port=port, replicas=replicas, queue=queue), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # not before: Ray has handlers of its own, which end without a word
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    shutdown()


def start(build, *, host, port, replicas, queue):
    """As `run`, and come back when all replicas are ready. -> what ends them"""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is told to anybody
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions, RequestRouterConfig
    except ImportError as error:
        raise ImportError("replicas: more than one needs Ray: pip install 'decisionllm[ray]'") from error

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        ray.init(num_cpus=replicas, include_dashboard=False, logging_level="error")
    except Exception as error:  # it raises just that
        raise OSError(
            f"replicas: Ray did not start ({error}); ask again when the machine is less busy, or take replicas=1"
        ) from error
    serve.start(http_options=HTTPOptions(host=host, port=port), logging_config=quiet)
    router = RequestRouterConfig(request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter")
    deployment = serve.deployment(
        serve.ingress(lambda: build())(), name="decisionllm", num_replicas=replicas, max_ongoing_requests=queue,
        request_router_config=router, logging_config=quiet,
    )  # fmt: skip
    serve.run(deployment.bind(), name="decisionllm", route_prefix="/")

    def shutdown():
        serve.shutdown()
        ray.shutdown()

    return shutdown
