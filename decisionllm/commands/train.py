"""The command `train`: data, model, loop, read from top to bottom.

The same command continues an interrupted run.
"""

import math
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import Tensor, nn

from decisionllm import distributed, hardware
from decisionllm.commands.train_history import History
from decisionllm.config import LogOptions, TrainConfig, one_agent_reads, train_config
from decisionllm.datasets import mixture
from decisionllm.datasets.batches import open_data, to_batch
from decisionllm.datasets.store import Store, check_texts
from decisionllm.eval.env_checks import check_environments
from decisionllm.eval.eval_callback import EvalCallback
from decisionllm.files import append_line
from decisionllm.models.generalist import Model, members
from decisionllm.runs import checkpoint, directory
from decisionllm.runs.optimizer import (
    load_moments,
    make_optimizer,
    moments_by_name,
    scheduled_learning_rate,
)
from decisionllm.runs.start import check_text_readers, create_folder, new_model, unfitted_model
from decisionllm.runs.summary import training_summary
from decisionllm.runs.validation import validation_terms
from decisionllm.schema import Batch, Json, Window
from decisionllm.trust import trust_user_modules

ALL_ROWS = slice(None)
PRINT_EVERY = 10  # seconds between printed lines where nobody watches a terminal


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
    run = Path(config.run)
    device = accelerator.device
    num_processes = accelerator.num_processes
    is_main = accelerator.is_main_process  # this process writes files and prints
    console = Console(soft_wrap=True, markup=False, highlight=False, quiet=not is_main)
    is_resumed = has_checkpoint(config, accelerator)

    # -- data: a store and a sampler of windows for each embodiment --
    with accelerator.main_process_first():
        stores = mixture.open_stores(config.dataset, config.cache_dir, config.transform)
    if is_main and not is_resumed:
        check_texts(config.text, stores.values(), config.dataset)
        check_text_readers(config, stores)
        for line in check_environments(config, stores):
            console.print(f"note: {line}")
    shares = mixture.part_shares(config.dataset, stores)
    data = {}
    for name, store in stores.items():
        options = mixture.embodiment_config(config, name)
        data[name] = open_data(options, store, shares[name])
    shares_by_embodiment = {name: each.shares for name, each in data.items()}

    # -- model and optimiser: new ones, or those of the last checkpoint --
    model: Model = unfitted_model(config, data) if is_resumed else new_model(config, data)
    plain_optimizer = make_optimizer(model, config.optim)
    if is_resumed:
        checkpoint.restore(run, model, directory.check_same_run(run, config, stores))
    elif is_main:
        create_folder(config, stores, data, model)
    if accelerator.is_fsdp2:
        check_sharded_texts(stores)
    wrapped_model, optimizer = distributed.wrap_model(
        accelerator, model, plain_optimizer, alike=has_equal_steps(config, stores)
    )
    model = accelerator.unwrap_model(wrapped_model)
    if device.type == "cuda" and num_processes == 1:
        model.backbone.record()  # CUDA graphs

    step = 0
    elapsed = 0.0  # seconds of training, over all continuations
    if is_resumed:
        folder = checkpoint.checkpoint_folder(run)
        load_moments(model, optimizer, directory.read_file(folder / "trainer.safetensors"))
        state = directory.read_file(folder / "trainer.json")
        step = state["step"]
        elapsed = state["elapsed"]

    # -- logs --
    score_watch = None
    if config.log.rollout_every:
        accelerator.wait_for_everyone()  # until run.json is written
        _, info = directory.read(run)
        score_watch = EvalCallback(asdict(config), info, config.log.rollout_episodes, str(device))
        # as each rollout does, so that held-out losses before and after the first have equal bits
        model.backbone.pack()
    history = History()
    if is_main:
        for values in directory.trim_log(run / "metrics.jsonl", step):
            history.add(values)
    if config.log.tracker != "none":
        accelerator.init_trackers("decisionllm", init_kwargs=tracker_options(config, step))
    precision = accelerator.mixed_precision
    number_type = "float32" if precision == "no" else precision
    devices = f"{number_type}, {num_processes} x {device}"
    for line in training_summary(config, data, model, devices=devices, step=step):
        console.print(line)

    # -- what training and validation share --
    def make_batch(embodiment: str, window: Window, rows: slice | np.ndarray = ALL_ROWS) -> Batch:
        store, tasks = data[embodiment].store, data[embodiment].tasks
        encode = model.backbone.encode
        return to_batch(window, rows, store=store, tasks=tasks, encode=encode, device=device)

    def loss_terms(module: nn.Module, batch: Batch, embodiment: str) -> dict[str, Tensor]:
        with accelerator.autocast():
            terms: dict[str, Tensor] = module(batch, embodiment)
        return terms

    def held_out_terms(embodiment: str, window: Window) -> dict[str, Tensor]:
        # The batch is made outside of autocast: it may read a text for the first time.
        batch = make_batch(embodiment, window)
        return loss_terms(model, batch, embodiment)

    # -- the loop --
    rate = 0.0  # learning rate
    # sums of the loss terms since the last log line
    loss_sums: defaultdict[str, Tensor | float] = defaultdict(float)
    num_summed = 0  # over so many steps
    printed = -math.inf  # `elapsed` at the last printed line
    wrapped_model.train()
    with interruptible() as stop, ExitStack() as stack:
        # on a CPU a float32 product with denormal numbers takes a hundred times as long
        torch.set_flush_denormal(True)
        stack.callback(torch.set_flush_denormal, False)
        stack.callback(accelerator.end_training)
        began = time.monotonic() - elapsed
        while True:
            # -- progress, in steps or in time, whichever is further; all processes agree --
            elapsed = time.monotonic() - began
            progress = step / config.steps
            if config.minutes:
                progress = max(progress, elapsed / 60 / config.minutes)
            is_stopped = bool(stop)
            if num_processes > 1:
                own = torch.tensor([progress, is_stopped], dtype=torch.float64, device=device)
                agreed = accelerator.reduce(own, "mean")
                progress = float(agreed[0])
                is_stopped = float(agreed[1]) > 0
            due = due_after(config.log, step, progress, stopped=is_stopped)

            # -- a log line: losses, held-out losses, scores; weights and checkpoint are saved --
            if due.log and num_summed:
                values = {}
                for term, total in loss_sums.items():
                    values[term] = float(accelerator.reduce(total)) / num_summed
                if due.held_out and config.log.validation_batches:
                    wrapped_model.eval()
                    values |= validation_terms(data, held_out_terms, config.log.validation_batches)
                    wrapped_model.train()
                    distributed.reshard_weights(model)
                check_finite(run, model, values, step=step, num_steps=num_summed)
                values |= {"lr": rate, "seconds": elapsed}
                loss_sums.clear()
                num_summed = 0
                if due.roll_out and score_watch is not None:
                    wrapped_model.eval()
                    distributed.gather_weights(model)
                    values |= score_watch.look(model)
                    wrapped_model.train()
                    distributed.reshard_weights(model)

                accelerator.log(values, step=step)
                if is_main:
                    append_line(run / "metrics.jsonl", {"step": step, **values})
                # the main process decides: it alone has read the lines of an earlier start
                (is_best,) = broadcast_object_list([history.is_best(values, config.log.keep_best)])
                if is_best:
                    checkpoint.save(run / "best", model, {}, {"step": step}, write=is_main)
                history.add(values)
                if "score" in values and history.has_stalled():
                    console.print(history.stall_warning())
                if due.say or elapsed - printed > PRINT_EVERY or console.is_terminal:
                    printed = elapsed
                    console.print(f"{run.name}: {log_line(values, step, progress, elapsed)}")
                if due.save:
                    state = {"step": step, "elapsed": elapsed, "finished": progress >= 1}
                    # no name for the copies of the moments, which would stay in memory
                    checkpoint.save(
                        run, model, moments_by_name(model, optimizer), state, write=is_main
                    )
            if progress >= 1 or is_stopped:
                break

            # -- a step: the batch is divided among the processes, and there into micro-batches --
            rate = scheduled_learning_rate(config.optim, step, progress)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            # Dropout is drawn from a seed of the step and the process, so that no state of a
            # generator is saved. torch takes 64 bits.
            rank = accelerator.process_index
            torch.manual_seed(((config.seed * 1_000_003 + step) * num_processes + rank) % 2**63)
            embodiment = mixture.draw_embodiment(shares_by_embodiment, config.seed, step)
            window = data[embodiment].sampler(step)
            num_targets = max(window.loss_mask.sum(), 1)
            num_parts = num_processes * config.optim.accumulate
            for part in range(rank, num_parts, num_processes):
                batch = make_batch(embodiment, window, rows_of_part(window, part, num_parts))
                terms = loss_terms(wrapped_model, batch, embodiment)
                # every training target has the same weight
                share = batch.loss_mask.sum() * num_processes / num_targets
                accelerator.backward(sum(terms.values()) * share)
                for term, value in terms.items():
                    loss_sums[term] = loss_sums[term] + value.detach() * share / num_processes
            if config.optim.clip:
                accelerator.clip_grad_norm_(wrapped_model.parameters(), config.optim.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for member in members(model).values():
                member.objective.after_step(accelerator.reduce)
            step += 1
            num_summed += 1

    if progress < 1:
        again = "the same command without fresh=true" if config.fresh else "the same command"
        raise KeyboardInterrupt(f"stopped at step {step:,} and saved; {again} continues from there")
    return run


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


def tracker_options(config: TrainConfig, step: int) -> dict[str, Json]:
    """Return the options of each tracker of accelerate. step: that a run continues from, or 0."""
    described = {"name": Path(config.run).name, "config": asdict(config)}
    return {
        # TensorBoard drops the later points of an interrupted run, which come again
        "tensorboard": {"purge_step": step + 1},
        "wandb": described | {"dir": config.run},
        "trackio": described,
    }


def has_checkpoint(config: TrainConfig, accelerator: Accelerator) -> bool:
    """Return whether a run goes on from a checkpoint; a ValueError if only some of its processes
    see one.

    Those would train on from its step and its moments, the others from the first step.
    """
    is_seen = checkpoint.find(config.run) is not None and not config.fresh
    if accelerator.num_processes == 1:
        return is_seen
    share = float(
        accelerator.reduce(torch.tensor(float(is_seen), device=accelerator.device), "mean")
    )
    if 0 < share < 1:
        raise ValueError(
            f"run: expected a checkpoint that all processes see, or none, got one in {config.run} "
            "that some do not; take an absolute path on a file system that all machines share"
        )
    return is_seen


def has_equal_steps(config: TrainConfig, stores: Mapping[str, Store]) -> bool:
    """Return whether every step uses the same parameters, see `distributed.wrap_model`."""
    has_text = {bool(task) for store in stores.values() for task in store.tasks}
    return len(stores) == 1 and len(has_text) == 1 and one_agent_reads(config)


def check_sharded_texts(stores: Mapping[str, Store]) -> None:
    """Raise a ValueError if some rows of a step may have a text and others none.

    Sharded, all processes must read a block at the same time. One whose rows have no text would read
    none, and the others would wait for it.
    """
    for store in stores.values():
        if any(store.tasks) and not all(store.tasks):
            raise ValueError(
                "FSDP2: expected a text in every episode or in none, got some without; give each "
                "part a text, or take configs/accelerate/ddp.yaml"
            )


def rows_of_part(window: Window, part: int, num_parts: int) -> slice | np.ndarray:
    """Return the index of the rows of a window that are in one of its parts; the rows of a team
    stay together.
    """
    if window.team is None:
        return slice(part, None, num_parts)
    is_in_part: np.ndarray = window.team % num_parts == part
    return is_in_part


@dataclass(frozen=True, kw_only=True)
class Due:
    """The tasks that are due after a step."""

    log: bool  # a log line is written
    held_out: bool  # with the loss on held-out windows
    roll_out: bool  # with the score of a rollout
    save: bool  # a checkpoint
    say: bool  # the line is printed, however short ago the last one was


def due_after(log: LogOptions, step: int, progress: float, *, stopped: bool) -> Due:
    """Return the tasks that are due after a step.

    Args:
        log: the options.
        step: its number.
        progress: share of the run that is done; 1: its end.
        stopped: the run is interrupted. That is no reason for a rollout or for held-out windows: a
            continued run has the same ones, and so the same best weights, as one that was never
            interrupted.
    """

    def is_due(every: int) -> bool:
        return every > 0 and step % every == 0

    is_over = progress >= 1 or stopped
    roll_out = progress >= 1 or is_due(log.rollout_every)
    save = is_due(log.save_every)
    held_out = roll_out or save or is_due(log.every)
    return Due(
        log=held_out or is_over,
        held_out=held_out,
        roll_out=roll_out,
        save=save or is_over,
        say=is_over,
    )


def check_finite(
    run: Path, model: nn.Module, values: Mapping[str, float], *, step: int, num_steps: int
) -> None:
    """Raise a FloatingPointError if a term of the loss or a trained weight is not finite.

    Args:
        run: the run directory.
        model: the model.
        values: mean terms of the loss.
        step: the steps trained so far.
        num_steps: the last of them, over which the terms are means.
    """
    weights = (weight for weight in model.parameters() if weight.requires_grad)
    if all(map(math.isfinite, values.values())) and all(w.isfinite().all() for w in weights):
        return
    state = "there is no checkpoint yet"
    if checkpoint.find(run):
        state = f"the last good checkpoint is kept in {run}"
    raise FloatingPointError(
        f"loss or weights are not finite ({dict(values)}) after the {num_steps} steps before step "
        f"{step}; {state}. Try a lower optim.lr or optim.clip; `decisionllm data` checks the log"
    )


def log_line(values: Mapping[str, float], step: int, progress: float, elapsed: float) -> str:
    """Return a log line for the console."""
    terms = []
    for name, value in values.items():
        if name not in ("lr", "seconds"):
            terms.append(f"{name} {value:.4f}")
    percent = f"{100 * min(progress, 1):3.0f} %"
    return f"step {step:>7,}  {percent}  {elapsed:6.0f} s  {'  '.join(terms)}"


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
