"""The command `train`: it makes a training and runs its steps.

The same command continues an interrupted run.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator

from decisionllm import distributed, hardware
from decisionllm.commands.train_schedule import due_after
from decisionllm.commands.training import Training
from decisionllm.config import TrainConfig, train_config
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Json
from decisionllm.trust import trust_user_modules


@trust_user_modules
def train(config: TrainConfig | Json) -> Path:
    """Fit a policy to a dataset. A run directory that holds the same run is continued.

    Args:
        config: a TrainConfig, or plain dicts of its form.

    Returns:
        The run directory.

    Raises:
        ValueError: an option that cannot be, or a run directory that holds another run or other
            files, or is being trained in.
        FloatingPointError: the loss or a weight is no longer finite; the last good checkpoint is
            kept.
        ImportError: the package of log.tracker is not installed.
        ConnectionError: another process of the run was lost; the first one left that notices raises
            it, others a SystemExit.
        KeyboardInterrupt: interrupted; the run is saved.
    """
    config = train_config(config)
    accelerator = make_accelerator(config)
    count_reports = distributed.create_call_counter(accelerator)
    with ExitStack() as stack:
        try:
            if accelerator.is_main_process:
                stack.enter_context(directory.lock_run(config.run))
                directory.refuse_foreign(config.run)
            return fit(config, accelerator)
        except RuntimeError as error:
            if not distributed.is_connection_lost(error):
                raise
            if count_reports() > 1:  # one of the remaining processes reports it
                raise SystemExit(1) from error
            step = checkpoint.trained_steps(config.run) if checkpoint.find(config.run) else 0
            raise ConnectionError(
                f"a process of this run was lost ({error}); the same command continues from step "
                f"{step:,}"
            ) from error


def fit(config: TrainConfig, accelerator: Accelerator) -> Path:
    """Run the training in a run directory that is locked for it; see `train`."""
    training = Training(config, accelerator)
    with interruptible() as stop, training.running():
        while True:
            progress, is_stopped = training.measure_progress(bool(stop))
            due = due_after(config.log, training.step, progress, stopped=is_stopped)
            if due.log:
                training.log(due, progress)
            else:
                training.print_progress(progress)
            if progress >= 1 or is_stopped:
                break
            training.take_step(progress)
    if progress < 1:
        again = "the same command without fresh=true" if config.fresh else "the same command"
        raise KeyboardInterrupt(
            f"stopped at step {training.step:,} and saved; {again} continues from there"
        )
    return training.run


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Make the accelerator of this run; a ValueError if a batch cannot be divided among its
    processes.
    """
    # accelerate would warn alone, and train without a tracker
    tracker = config.log.tracker
    if tracker != "none" and find_spec(tracker) is None:
        raise ImportError(
            f"log.tracker={tracker}: expected the package {tracker}, found none; "
            f"pip install {tracker}, or take log.tracker=none"
        )
    accelerator = distributed.create_accelerator(
        hardware.resolve_precision(config.device, config.optim.precision),
        cpu=hardware.resolve_device(config.device) == "cpu",
        project_dir=config.run,
        log_with=None if tracker == "none" else tracker,
    )
    num_processes = accelerator.num_processes
    if config.optim.batch_size % (num_processes * config.optim.accumulate):
        raise ValueError(
            f"optim.batch_size: expected a multiple of {num_processes} processes x "
            f"optim.accumulate={config.optim.accumulate}, got {config.optim.batch_size}"
        )
    return accelerator


@contextmanager
def interruptible() -> Iterator[list[bool]]:
    """Yield a list that is not empty once SIGINT or SIGTERM came."""
    stop: list[bool] = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, lambda *_: stop.append(True))
    try:
        yield stop
    except RuntimeError as error:
        if distributed.is_connection_lost(error):
            # the launcher ends the remaining processes by it: the message comes first
            del handlers[signal.SIGTERM]
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
