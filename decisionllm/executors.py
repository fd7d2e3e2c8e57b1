"""Executors of a study's workers: processes of this machine, Ray tasks, Slurm jobs.

An executor is a context that gives (start, workers, threads): a function that starts a worker, how
many at once, and the threads of each, 0 for all cores of its machine. start(call) calls call() ->
exit code in a worker and returns a `Worker`, whose exit code is 1 if the call failed and
below 0 if the worker was killed. Another machine needs this package, and the study's folder under
the same path on a file system whose locks (flock) all machines share: NFS without the option
local_lock, Lustre with the option flock.
"""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from decisionllm.checks import check_one_of
from decisionllm.files import MAP_FILES, explain_errors
from decisionllm.registry import Node

Call = Callable[[], int]


class Worker(Protocol):
    """A worker that an executor started, with the members of multiprocessing.Process.

    Attributes:
        exitcode: None while it works, below 0 if it was killed.
        reason: why it failed, where it has not printed that itself.
    """

    reason: str

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def terminate(self) -> None: ...

    def join(self) -> None: ...


Executor = tuple[Callable[[Call], Worker], int, int]


def build_executor(config: Node) -> AbstractContextManager[Executor]:
    """The executor that configs/scale.yaml names; it fails when entered if it is not available."""
    executors = {"local": local, "inline": inline, "ray": ray_tasks, "slurm": slurm_jobs}
    check_one_of("executor", config["executor"], executors)
    processes, workers, gpus = (config[key] for key in ("processes", "workers", "gpus"))
    if processes < 1 or workers < 0 or gpus < 0:
        got = [processes, workers, gpus]
        raise ValueError(f"processes, workers, gpus: expected at least 1, 0, 0, got {got}")
    if gpus and config["executor"] in ("local", "inline"):
        raise ValueError(
            f"gpus={gpus:g}: expected executor=ray or slurm, which assign GPUs; local workers share all"
        )
    return executors[config["executor"]](config)


@contextmanager
def local(config: Node) -> Iterator[Executor]:
    """Processes of this machine, which share its cores."""
    workers = config["workers"] or max(count_cores() // config["processes"], 1)
    yield start_process, workers, max(count_cores() // workers, 1)


@contextmanager
def inline(config: Node) -> Iterator[Executor]:
    """This process, one call after the other: for tests and debuggers."""

    def start(call: Call) -> Worker:
        future: Future[int] = Future()
        future.set_result(call())
        return FutureWorker(future, lambda: None, (), ())

    yield start, 1, 1


@contextmanager
def ray_cluster(address: str) -> Iterator[ModuleType]:
    """Ray with the cluster at an address, or with one of this machine during the context."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    needs = "executor=ray needs Ray: pip install -e '.[ray]'"
    with explain_errors(needs, ImportError, raised=ImportError):
        import ray

    ours = not ray.is_initialized()
    if ours:
        check_address(address)  # Ray itself would try for minutes
        silent = f"executor=ray address={address}: Ray did not answer"
        with explain_errors(silent, Exception, raised=ConnectionError):
            ray.init(
                address or "local",
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def use_file_executor(config: Node) -> Iterator[None]:
    """While it lasts, files of a dataset are read in this process, or by tasks of a Ray cluster.

    It sets `files.MAP_FILES`.
    """
    check_one_of("executor", config["executor"], ("inline", "ray"))
    if config["executor"] == "inline":
        yield
        return
    with ray_cluster(config["address"]) as ray:
        remote = ray.remote(lambda function, file: function(file))

        def each(function: Callable[[Path], object], files: Iterable[Path]) -> Iterator[object]:
            for task in [remote.remote(function, file) for file in files]:
                try:
                    yield ray.get(task)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error

        before = MAP_FILES.set(each)
        try:
            yield
        finally:
            MAP_FILES.reset(before)


@contextmanager
def ray_tasks(config: Node) -> Iterator[Executor]:
    """Ray tasks, see `ray_cluster`."""
    with ray_cluster(config["address"]) as ray:
        gpus = config["gpus"]
        resources = ray.cluster_resources()
        cpus = resources.get("CPU", 0)
        cards = resources.get("GPU", 0)
        fit = int(cards / gpus + 1e-6) if gpus else int(cpus // config["processes"])
        if not fit:
            raise ValueError(
                f"executor=ray: a run needs {gpus:g} GPUs and {config['processes']} cores, "
                f"the cluster has {cards:g} and {cpus:g}"
            )
        workers = config["workers"] or fit
        share = cpus // workers or cpus / workers  # Ray assigns whole cores, or a part of one
        # without retries, since the ledger tries again
        remote = ray.remote(num_cpus=share, num_gpus=gpus, max_retries=0)(_enter)

        def start(call: Call) -> Worker:
            task = remote.remote(call)
            errors = ray.exceptions
            cancel = partial(ray.cancel, task)
            return FutureWorker(task.future(), cancel, errors.RayTaskError, errors.RayError)

        yield start, workers, max(int(share), 1)


@contextmanager
def slurm_jobs(config: Node) -> Iterator[Executor]:
    """Slurm jobs, or with +slurm.cluster=local processes that submitit starts.

    Their output is in the folder `slurm` of the study.
    """
    needs = "executor=slurm needs submitit: pip install -e '.[slurm]'"
    with explain_errors(needs, ImportError, raised=ImportError):
        import submitit
        from submitit.core.utils import FailedJobError, UncompletedJobError

    options = {"timeout_min": 240, "name": "decisionllm"} | config["slurm"]
    cluster = options.pop("cluster", "slurm")
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise OSError(
            "executor=slurm: expected Slurm's sbatch on this machine, found none; "
            "without it +slurm.cluster=local"
        )
    workers, gpus = config["workers"], config["gpus"]
    if not workers or gpus % 1:
        raise ValueError(
            "executor=slurm: expected workers=<jobs at once> and whole gpus, "
            f"got {workers} and {gpus:g}"
        )
    if gpus:
        options["gpus_per_node"] = int(gpus)
    message = f"slurm: submitit does not take {options}"
    refused = explain_errors(message, NameError, TypeError, ValueError)
    # an executor makes its folder at once: not the study's before all is valid
    with refused, tempfile.TemporaryDirectory() as folder:
        submitit.AutoExecutor(folder, cluster).update_parameters(**options)

    def start(call: Call) -> Worker:
        executor = submitit.AutoExecutor(Path(config["out"]) / "slurm", cluster)
        executor.update_parameters(**options)
        job = executor.submit(_enter, call)
        return FutureWorker(job, job.cancel, FailedJobError, UncompletedJobError)

    yield start, workers, 0


class Process(SpawnProcess):
    """A process of this machine; it prints its errors itself."""

    reason = ""


def start_process(call: Call) -> Worker:
    """Start a call in a process of its own."""
    worker = Process(target=_exit, args=(call,))
    worker.start()
    return worker


class FutureWorker:
    """A future as a worker.

    Args:
        future: with done() and result().
        terminate: interrupts it.
        failed: exceptions of `result` that mean that the call failed.
        killed: exceptions that mean that the worker ended before its call did.
    """

    def __init__(self, future: Any, terminate: Callable[[], Any], failed: Any, killed: Any) -> None:
        self.future = future
        self.terminate = terminate
        self.failed = failed
        self.killed = killed
        self.reason = ""

    def is_alive(self) -> bool:
        return not self.future.done()

    @property
    def exitcode(self) -> int | None:
        try:
            return None if self.is_alive() else self.future.result()
        except self.failed as error:
            self.reason = str(error)
            return 1
        except self.killed:
            return -1

    def join(self) -> None:
        with suppress(Exception):  # `exitcode` says which
            self.future.result()


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def check_address(address: str) -> None:
    """A ConnectionError if no process listens at host:port; other addresses are left to Ray."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    cluster = "a Ray cluster (host:port, as `ray start --head` prints it)"
    silent = f"address={address}: expected {cluster}, got no answer"
    with explain_errors(silent, OSError, ValueError, raised=ConnectionError):
        place = (host.rpartition("/")[2], int(port))
        socket.create_connection(place, timeout=5).close()


def _enter(call: Call) -> int:
    """The exit code of a call in a worker; an interruption is no failure."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return call()
    except KeyboardInterrupt:
        return 0


def _exit(call: Call) -> None:
    code = _enter(call)
    # All is saved: a driver that stops its workers, or Ctrl-C, need not interrupt the exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)
