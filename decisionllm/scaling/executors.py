"""Where the workers of a study run: processes of this machine, Ray tasks, Slurm jobs.

An executor is a context that gives (start, workers, threads): what starts a worker, how many at once, and the threads of each, 0 for
all cores of its machine. start(call) calls call() -> exit code in a worker and returns a `ledger.Worker`, whose exit code is 1 if the
call failed and below 0 if the worker was killed. Another machine needs this package, and the study's folder under the same path on a
file system whose locks (flock) all machines share: NFS without the option local_lock, Lustre with the option flock.
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
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from decisionllm.config import one_of
from decisionllm.files import EACH, explained
from decisionllm.scaling.ledger import Worker

Call = Callable[[], int]
Executor = tuple[Callable[[Call], Worker], int, int]


def from_config(config: dict[str, Any]) -> AbstractContextManager[Executor]:
    """The executor that configs/scale.yaml names; one that is not available is an error when it is entered."""
    executors = {"local": local, "inline": inline, "ray": ray_tasks, "slurm": slurm_jobs}
    one_of("executor", config["executor"], executors)
    given = [config[key] for key in ("processes", "workers", "gpus")]
    if any(number < least for number, least in zip(given, (1, 0, 0), strict=True)):
        raise ValueError(f"processes, workers, gpus: expected at least 1, 0, 0, got {given}")
    if config["gpus"] and config["executor"] in ("local", "inline"):
        raise ValueError(f"gpus={config['gpus']:g}: expected executor=ray or slurm, which assign GPUs; local workers share all")
    return executors[config["executor"]](config)


@contextmanager
def local(config: dict[str, Any]) -> Iterator[Executor]:
    """Processes of this machine, which share its cores."""
    workers = config["workers"] or max(cores() // config["processes"], 1)
    yield process, workers, max(cores() // workers, 1)


@contextmanager
def inline(config: dict[str, Any]) -> Iterator[Executor]:
    """This process, one call after the other: for tests and debuggers."""

    def start(call: Call) -> Worker:
        future: Future[int] = Future()
        future.set_result(call())
        return Remote(future, lambda: None, (), ())

    yield start, 1, 1


@contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """Ray with the cluster at an address, or with one of this machine that ends with the context."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with explained("executor=ray needs Ray: pip install 'decisionllm[ray]'", ImportError, raised=ImportError):
        import ray

    if ours := not ray.is_initialized():
        check_address(address)  # Ray itself would try for minutes
        board = None if address else False
        with explained(f"executor=ray address={address}: Ray did not answer", Exception, raised=ConnectionError):
            ray.init(address or "local", include_dashboard=board, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def of_files(config: dict[str, Any]) -> Iterator[None]:
    """While it lasts, `files.EACH` reads the files of a dataset in this process, or with executor=ray each by a task of the cluster."""
    one_of("executor", config["executor"], ("inline", "ray"))
    if config["executor"] == "inline":
        yield
        return
    with ray_cluster(config["address"]) as ray:
        remote = ray.remote(lambda function, file: function(file))

        def each(function: Callable[[Path], Any], files: Iterable[Path]) -> Iterator[Any]:
            for task in [remote.remote(function, file) for file in files]:
                try:
                    yield ray.get(task)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error

        before = EACH.set(each)
        try:
            yield
        finally:
            EACH.reset(before)


@contextmanager
def ray_tasks(config: dict[str, Any]) -> Iterator[Executor]:
    """Ray tasks, see `ray_cluster`."""
    with ray_cluster(config["address"]) as ray:
        resources, gpus = ray.cluster_resources(), config["gpus"]
        cpus, cards = resources.get("CPU", 0), resources.get("GPU", 0)
        fit = int(cards / gpus + 1e-6) if gpus else int(cpus // config["processes"])
        if not fit:
            needs = f"a run needs {gpus:g} GPUs and {config['processes']} cores"
            raise ValueError(f"executor=ray: {needs}, the cluster has {cards:g} and {cpus:g}")
        workers = config["workers"] or fit
        share = cpus // workers or cpus / workers  # Ray assigns whole cores, or a part of one
        remote = ray.remote(num_cpus=share, num_gpus=gpus, max_retries=0)(_enter)  # the ledger tries again

        def start(call: Call) -> Worker:
            task = remote.remote(call)
            return Remote(task.future(), lambda: ray.cancel(task), ray.exceptions.RayTaskError, ray.exceptions.RayError)

        yield start, workers, max(int(share), 1)


@contextmanager
def slurm_jobs(config: dict[str, Any]) -> Iterator[Executor]:
    """Slurm jobs, or with +slurm.cluster=local processes that submitit starts; their output is in the folder `slurm` of the study."""
    with explained("executor=slurm needs submitit: pip install 'decisionllm[slurm]'", ImportError, raised=ImportError):
        import submitit
        from submitit.core.utils import FailedJobError, UncompletedJobError

    options = {"timeout_min": 240, "name": "decisionllm"} | config["slurm"]
    cluster = options.pop("cluster", "slurm")
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise OSError("executor=slurm: expected Slurm's sbatch on this machine, found none; without it +slurm.cluster=local")
    workers, gpus = config["workers"], config["gpus"]
    if not workers or gpus % 1:
        raise ValueError(f"executor=slurm: expected workers=<jobs at once> and whole gpus, got {workers} and {gpus:g}")
    options |= {"gpus_per_node": int(gpus)} if gpus else {}
    refused = explained(f"slurm: submitit does not take {options}", NameError, TypeError, ValueError)
    with refused, tempfile.TemporaryDirectory() as folder:  # it makes its folder at once: not the study's before all is valid
        submitit.AutoExecutor(folder, cluster).update_parameters(**options)

    def start(call: Call) -> Worker:
        executor = submitit.AutoExecutor(Path(config["out"]) / "slurm", cluster)
        executor.update_parameters(**options)
        job = executor.submit(_enter, call)
        return Remote(job, job.cancel, FailedJobError, UncompletedJobError)

    yield start, workers, 0


class Process(SpawnProcess):
    """A process of this machine; it prints its errors itself."""

    reason = ""


def process(call: Call) -> Worker:
    """Start a call in a process of its own."""
    worker = Process(target=_exit, args=(call,))
    worker.start()
    return worker


class Remote:
    """A future as a worker.

    Args:
        future: with done() and result().
        terminate: interrupts it.
        failed: exceptions of `result` that mean that the call failed.
        killed: exceptions that mean that the worker ended before its call did.
    """

    def __init__(self, future: Any, terminate: Callable[[], Any], failed: Any, killed: Any) -> None:
        self.future, self.terminate, self.failed, self.killed, self.reason = future, terminate, failed, killed, ""

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


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def check_address(address: str) -> None:
    """A ConnectionError if no process listens at host:port; other addresses are left to Ray."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    wanted = f"address={address}: expected a Ray cluster (host:port, as `ray start --head` prints it), got no answer"
    with explained(wanted, OSError, ValueError, raised=ConnectionError):
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=5).close()


def _enter(call: Call) -> int:
    """The exit code of a call in a worker; an interruption is no failure."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return call()
    except KeyboardInterrupt:
        return 0


def _exit(call: Call) -> None:
    sys.exit(_enter(call))
