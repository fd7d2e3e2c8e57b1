"""Train a run in this process, or in several processes that share each batch."""

import fcntl
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from decisionllm.commands.train import train
from decisionllm.registry import Node
from decisionllm.scaling.workers import print_traceback


def launch(config: Node, processes: int, threads: int) -> Path:
    """Train in this process, or as torchrun would in several of this machine that share each batch.

    Returns:
        The run directory.
    """
    if processes == 1:
        return train(config)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    options = LaunchConfig(
        1,
        1,
        processes,
        run_id=config["run"],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # the ledger tries again
    )
    train_all = elastic_launch(options, train_rank)
    try:
        return Path(train_all(config, max(threads // processes, 1))[0])
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        raise RuntimeError(f"process {number} of {processes}: {failure.message}") from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train_rank(config: Node, threads: int) -> Path:
    """Train as one of several processes. Returns the run directory."""
    torch.set_num_threads(threads)
    with (
        Path(f"{config['run']}.txt").open("a", buffering=1, encoding="utf-8") as log,
        redirect_stdout(log),
        redirect_stderr(log),
        print_traceback(),
    ):
        if os.environ["RANK"] == "0":
            fcntl.flock(log, fcntl.LOCK_EX)  # the processes of a killed worker may still be saving
        return train(config)
