"""Several processes of one server at one address: the system gives each new connection to one of
them (SO_REUSEPORT).

All replicas write one journal, and a replica that lacks a campaign or its last ticks replays them
from there, so that any of them gives the same answers. A replica that dies is started again, after
a pause that grows while it dies again and again; one whose event loop hangs is killed first.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

logger = logging.getLogger("decisionllm.bidding.server")
# seconds before a new start: the first, the second (then twice), the most
PAUSES = (0.0, 1.0, 60.0)
STABLE_SECONDS = 60.0  # seconds; a replica that lived so long begins with the first pause again
HUNG_SECONDS = 30.0  # seconds without a beat after which a replica counts as hung
STOP_SECONDS = 20.0  # seconds for a replica to answer its last requests and stop
CHECK_EVERY = 0.5  # seconds between two looks at the beats
Beat = Callable[[], None]


@dataclass
class Replica:
    """One of the processes, which is started again and again."""

    number: int
    # time.monotonic() of its last beat; 0: not since its start. Without a lock, which a killed
    # process might hold.
    beat: ctypes.c_double
    process: SpawnProcess | None = None  # None: it waits for its next start
    started: float = 0.0
    due: float = 0.0  # time.monotonic() of its next start
    deaths: int = 0  # since it last lived STABLE seconds
    ever_beat: bool = False


def run_replicas(serve: Callable[..., None], *arguments: object, replicas: int) -> None:
    """Call serve(*arguments, number, beat) in so many processes, until interrupted. Each calls
    beat() from its event loop, all the time.

    Raises:
        OSError: a replica ended before its first beat, and none of its number ever had one.
    """
    context = multiprocessing.get_context("spawn")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    all_replicas = [Replica(i, context.RawValue(ctypes.c_double, 0.0)) for i in range(replicas)]
    try:
        while True:
            now = time.monotonic()
            for replica in all_replicas:
                check_replica(replica, now)
                if replica.process is None and now >= replica.due:
                    start_replica(replica, context, serve, *arguments)
            connection.wait(
                [process.sentinel for process in running_processes(all_replicas)], CHECK_EVERY
            )
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        left = running_processes(all_replicas)
        for process in left:
            process.terminate()
        for process in left:
            process.join(STOP_SECONDS)
            if process.is_alive():
                logger.error("a replica did not stop within %.0f s: killed", STOP_SECONDS)
                process.kill()
                process.join()


def running_processes(replicas: Sequence[Replica]) -> list[SpawnProcess]:
    """Return the processes of replicas, leaving out replicas that wait for a new start."""
    return [replica.process for replica in replicas if replica.process is not None]


def start_replica(
    replica: Replica, context: SpawnContext, serve: Callable[..., None], *arguments: object
) -> None:
    """Start the process of a replica."""
    replica.beat.value = 0.0
    process_arguments = (serve, *arguments, replica.number, replica.beat)
    replica.process = context.Process(target=serve_until_orphaned, args=process_arguments)
    replica.process.start()
    replica.started = time.monotonic()


def check_replica(replica: Replica, now: float) -> None:
    """Kill the process of a replica if it hangs, and plan a new start if it is dead.

    Raises:
        OSError: see `run_replicas`.
    """
    process = replica.process
    if process is None:
        return
    last = replica.beat.value
    replica.ever_beat = replica.ever_beat or last > 0
    if last and now - last > HUNG_SECONDS and process.is_alive():
        logger.error("replica %d hangs since %.0f s: killed", replica.number, now - last)
        process.kill()  # a process that hangs may ignore SIGTERM
        process.join()
    if process.is_alive():
        return
    if not replica.ever_beat:
        raise OSError(
            f"replicas: one ended with exit code {process.exitcode} as it started; see its message above"
        )
    replica.deaths = 1 if now - replica.started > STABLE_SECONDS else replica.deaths + 1
    first, second, most = PAUSES
    pause = first
    if replica.deaths > 1:
        pause = min(second * 2.0 ** (replica.deaths - 2), most)
    replica.process = None
    replica.due = now + pause
    message = "replica %d ended with exit code %s; it is started again in %.0f s"
    logger.error(message, replica.number, process.exitcode, pause)


def serve_until_orphaned(serve: Callable[..., None], *arguments: Any) -> None:
    """Serve, and stop when the process that started this one is gone.

    Args:
        arguments: of `serve`; the last one is the shared time of the last beat.
    """
    *serve_arguments, last = arguments

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    def beat() -> None:
        last.value = time.monotonic()

    threading.Thread(target=watch, daemon=True).start()
    try:
        serve(*serve_arguments, beat)
    except (ValueError, OSError) as error:
        print(f"decisionllm: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
