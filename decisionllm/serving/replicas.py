"""Several processes of one server at one address: the system gives each new connection to one of
them (SO_REUSEPORT).

All replicas write one journal, and a replica that lacks a campaign or its last ticks replays them
from there, so that any of them gives the same answers. Each counts for itself; /metrics answers for
one of them. A replica that dies is started again.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

START = 10.0  # seconds; a replica that ends sooner failed to start


def run(serve: Callable[..., None], *arguments: Any, replicas: int) -> None:
    """Call serve(*arguments) in so many processes, until interrupted.

    Raises:
        OSError: a replica did not start.
    """
    context = multiprocessing.get_context("spawn")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    running: dict[Any, float] = {}
    try:
        while True:
            while len(running) < replicas:
                (
                    process := context.Process(target=until_orphaned, args=(serve, *arguments))
                ).start()
                running[process] = time.monotonic()
            connection.wait([process.sentinel for process in running])
            for process in [process for process in running if not process.is_alive()]:
                if time.monotonic() - running.pop(process) < START:
                    raise OSError(
                        f"replicas: one ended with exit code {process.exitcode} as it started; see "
                        "its message above"
                    )
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def until_orphaned(serve: Callable[..., None], *arguments: Any) -> None:
    """Serve, and stop when the process that started this one is gone."""

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    serve(*arguments)
