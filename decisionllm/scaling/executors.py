"""Where the workers of a study run: processes of this machine, Ray tasks, Slurm jobs.

An executor is a context that gives (start, workers, threads): what starts a worker, how many at once, and the threads of each, 0 for
all there are where it works. start(call) calls call() -> exit code somewhere, and returns what has is_alive(), exitcode (None, the
code, 1 if it could not be called, less if it was killed), terminate(), which interrupts it, and join(). Where that is another machine,
it needs this package, and the study's folder under the same path on a file system whose locks (flock) all machines see: NFS does
without the option local_lock, Lustre with the option flock.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from decisionllm.config import one_of


def opened(config):
    """The executor that a config (see configs/scale.yaml) names; one that is not there is an error, when it is entered."""
    executors = {"local": local, "here": here, "ray": tasks, "slurm": jobs}
    one_of("executor", config["executor"], executors)
    if config["processes"] < 1 or config["workers"] < 0 or config["gpus"] < 0:
        raise ValueError(f"processes, workers, gpus: expected at least 1, 0, 0, got {[config[key] for key in ('processes', 'workers', 'gpus')]}")  # fmt: skip
    if config["gpus"] and config["executor"] in ("local", "here"):
        raise ValueError(
            f"gpus={config['gpus']:g}: executor=ray and executor=slurm deal out GPUs; local workers see all there are"
        )
    return executors[config["executor"]](config)


@contextmanager
def local(config):
    """Processes of this machine; its cores are shared out."""
    workers = config["workers"] or max(cores() // config["processes"], 1)
    yield process, workers, max(cores() // workers, 1)


@contextmanager
def here(config):
    """This very process, one call after the other: for tests and debuggers."""
    over = {"is_alive": lambda: False, "terminate": lambda: None, "join": lambda: None}
    yield lambda call: SimpleNamespace(exitcode=call(), **over), 1, 1


@contextmanager
def tasks(config):
    """Ray tasks, in the cluster at an address or in one of this machine's own that ends with us."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError("executor=ray: expected Ray, found none; pip install 'decisionllm[ray]'") from error

    ours, address = not ray.is_initialized(), config["address"]
    if ours:
        predict_max_return(address)  # Ray itself would try for minutes
        try:
            ray.init(
                address=address or "local",
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except Exception as error:  # what Ray itself raises where it does not start
            where = f"address={address}: Ray did not answer" if address else "executor=ray: Ray did not start"
            raise ConnectionError(f"{where}: {error}") from error
    try:
        there, gpus = ray.cluster_resources(), config["gpus"]
        cpus = there.get("CPU", 0)
        fit = int(there.get("GPU", 0) / gpus + 1e-6) if gpus else int(cpus // config["processes"])
        if not fit:
            raise ValueError(f"executor=ray: a run needs {gpus:g} GPUs and {config['processes']} cores, the cluster has {there.get('GPU', 0):g} and {cpus:g}")  # fmt: skip
        workers = config["workers"] or fit
        share = cpus // workers or cpus / workers  # Ray takes whole cores, or a part of one
        remote = ray.remote(num_cpus=share, num_gpus=gpus, max_retries=0)(_enter)  # the ledger tries again
        yield lambda call: Task(remote.remote(call)), workers, max(int(share), 1)
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def jobs(config):
    """Slurm jobs, or with +slurm.cluster=local processes that submitit starts; what they print and return is in the folder slurm of the study."""
    try:
        import submitit
    except ImportError as error:
        raise ImportError("executor=slurm: expected submitit, found none; pip install 'decisionllm[slurm]'") from error

    options = {"timeout_min": 240, "name": "decisionllm"} | config["slurm"]
    cluster = options.pop("cluster", "slurm")
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise OSError(
            "executor=slurm: expected Slurm's sbatch on this machine, found none; +slurm.cluster=local tries it without"
        )
    if not config["workers"] or config["gpus"] % 1:
        raise ValueError(
            f"executor=slurm: expected workers=<jobs at once> and whole gpus, got {config['workers']} and {config['gpus']:g}"
        )
    if config["gpus"]:
        options["gpus_per_node"] = int(config["gpus"])
    try:
        with tempfile.TemporaryDirectory() as folder:  # it makes its folder at once: not the study's before all is well
            submitit.AutoExecutor(folder, cluster).update_parameters(**options)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"slurm: submitit does not take {options}: {error}") from error

    def start(call):
        executor = submitit.AutoExecutor(Path(config["out"]) / "slurm", cluster)
        executor.update_parameters(**options)
        return Job(executor.submit(_enter, call))

    yield start, config["workers"], 0


def process(call):
    """Starts a call in a process of its own."""
    worker = multiprocessing.get_context("spawn").Process(target=_exit, args=(call,))
    worker.start()
    return worker


class Task:
    """A Ray task as a worker."""

    def __init__(self, reference):
        self.reference = reference

    def is_alive(self):
        import ray

        return not ray.wait([self.reference], timeout=0)[0]

    @property
    def exitcode(self):
        import ray

        try:
            return None if self.is_alive() else ray.get(self.reference)
        except ray.exceptions.RayTaskError as error:
            self.reason = str(error)
            return 1
        except ray.exceptions.RayError:
            return -1

    def terminate(self):
        import ray

        ray.cancel(self.reference)

    def join(self):
        import ray

        ray.wait([self.reference])


class Job:
    """A job of submitit as a worker."""

    def __init__(self, job):
        self.job, self.terminate, self.join = job, job.cancel, job.wait

    def is_alive(self):
        return not self.job.done()

    @property
    def exitcode(self):
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return None if self.is_alive() else self.job.result()
        except UncompletedJobError:
            return -1
        except FailedJobError as error:
            self.reason = str(error)
            return 1


def cores():
    """Those that we may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def predict_max_return(address):
    """Whether somebody listens at host:port; if not, that is an error."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # "": a cluster of our own, or what Ray finds by itself
    try:
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"address={address}: expected a Ray cluster (host:port, as `ray start --head` prints it), nobody answers: {error}") from error  # fmt: skip


def _enter(call):
    """What a worker does that is not this process. An interruption is no failure: whoever interrupts knows."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return call()
    except KeyboardInterrupt:
        return 0


def _exit(call):
    sys.exit(_enter(call))
