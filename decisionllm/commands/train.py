"""The command `train`: one loop, read from top to bottom.

The same command continues an interrupted run.
"""

import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import nn

from decisionllm import distributed, hardware
from decisionllm.config import LogOptions, TrainConfig, one_agent_reads, train_config
from decisionllm.datasets import mixture
from decisionllm.datasets.batches import Data, open_data, to_batch
from decisionllm.datasets.faults import reported
from decisionllm.datasets.store import Store, check_texts
from decisionllm.eval.before import check_environments
from decisionllm.eval.watching import LOOKS, ScoreWatch, first_stall
from decisionllm.files import append_line, read_lines, write_lines
from decisionllm.models.generalist import Model, members
from decisionllm.runs import checkpoint, directory
from decisionllm.runs.optimizer import make_optimizer, moments, restore_moments
from decisionllm.runs.start import (
    check_text_readers,
    create_folder,
    new_model,
    unfitted_model,
)
from decisionllm.schema import Batch, Json, Window
from decisionllm.trust import trusting_user

ALL = slice(None)
SCHEDULE_FLOOR = 0.05  # of the peak learning rate, at the end


@dataclass
class Loop:
    """Where the loop is: what is saved with a checkpoint, and the sums since the last log line."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training, over all continuations
    rate: float = 0.0  # learning rate
    lowest: float = math.inf  # held-out loss
    # after each rollout: the score, and the held-out loss, or that of training without held-out data
    scores: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    printed: float = -math.inf  # `elapsed` at the last line on the console
    # since the last log line: the steps, and the sums of the loss terms over them
    count: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Due:
    """What is done after a step."""

    log: bool  # a log line is written
    held_out: bool  # with the loss on held-out windows
    roll_out: bool  # with the score of a rollout
    save: bool  # a checkpoint
    say: bool  # the line is printed, however short ago the last one was


@dataclass
class Training:
    """All that the loop works on.

    Attributes:
        config: the options.
        accelerator: of accelerate, which knows the processes and the device.
        console: of the main process; None in others, which print nothing.
        data: by embodiment, "" where there is one space of observations and actions.
        model: as accelerate wraps it; its forward gives the terms of the loss.
        inner: the model itself.
        optimizer: as accelerate wraps it.
        watch: of the score, with log.rollout_every.
    """

    config: TrainConfig
    accelerator: Accelerator
    console: Console | None
    data: dict[str, Data]
    model: nn.Module
    inner: Model
    optimizer: AcceleratedOptimizer
    loop: Loop
    watch: ScoreWatch | None

    @property
    def main(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.console is not None

    def say(self, line: str) -> None:
        if self.console is not None:
            self.console.print(line)

    def batch(self, embodiment: str, window: Window, rows: slice | np.ndarray = ALL) -> Batch:
        """These rows of a window of an embodiment, with their texts, on the device."""
        data = self.data[embodiment]
        encode = self.inner.backbone.encode
        return to_batch(
            window,
            rows,
            store=data.store,
            tasks=data.tasks,
            encode=encode,
            device=self.accelerator.device,
        )

    def terms(self, model: nn.Module, batch: Batch, embodiment: str) -> dict[str, torch.Tensor]:
        """The terms of the loss of a batch of an embodiment."""
        arguments = (batch, embodiment) if embodiment else (batch,)
        with self.accelerator.autocast():
            terms: dict[str, torch.Tensor] = model(*arguments)
        return terms


@trusting_user
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
    reports = distributed.counter(accelerator)
    with ExitStack() as held:
        try:
            if accelerator.is_main_process:
                held.enter_context(directory.locked(config.run))
                directory.refuse_foreign(config.run)
            return fit(config, accelerator)
        except RuntimeError as error:
            if not distributed.lost(error):
                raise
            if reports() > 1:  # one of those that are left reports it
                raise SystemExit(1) from error
            step = checkpoint.trained_steps(config.run) if checkpoint.find(config.run) else 0
            remedy = f"the same command continues from step {step:,}"
            raise ConnectionError(f"a process of this run was lost ({error}); {remedy}") from error


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of this run; a ValueError if a batch cannot be divided among its
    processes.
    """
    # accelerate would warn alone, and train without a tracker
    if config.log.tracker == "wandb" and find_spec("wandb") is None:
        remedy = "pip install 'decisionllm[track]', or take log.tracker=tensorboard"
        raise ImportError(f"log.tracker=wandb: expected the package wandb, found none; {remedy}")
    accelerator = distributed.begin(
        hardware.precision(config.device, config.optim.precision),
        cpu=hardware.usable(config.device) == "cpu",
        project_dir=config.run,
        log_with=None if config.log.tracker == "none" else config.log.tracker,
    )
    world = accelerator.num_processes
    if config.optim.batch_size % (world * config.optim.accumulate):
        raise ValueError(
            f"optim.batch_size: expected a multiple of {world} processes x "
            f"optim.accumulate={config.optim.accumulate}, "
            f"got {config.optim.batch_size}"
        )
    return accelerator


def fit(config: TrainConfig, accelerator: Accelerator) -> Path:
    """`train` in a run directory that is locked for this run."""
    training = begin(config, accelerator)
    loop = training.loop
    training.model.train()
    with interruptible() as stop, ExitStack() as stack:
        # on a CPU a float32 product with denormal numbers takes a hundred times as long
        torch.set_flush_denormal(True)
        stack.callback(torch.set_flush_denormal, False)
        stack.callback(accelerator.end_training)
        began = time.monotonic() - loop.elapsed
        while True:
            loop.elapsed = time.monotonic() - began
            progress, stopped = position(training, bool(stop))
            due = due_after(config.log, loop.step, progress, stopped=stopped)
            if due.log and loop.count:
                values = measure(training, held_out=due.held_out)
                if due.roll_out and training.watch is not None:
                    values |= scores_now(training, training.watch)
                record(training, values, progress, due)
            if progress >= 1 or stopped:
                break
            loop.rate = learning_rate(config, loop.step, progress)
            train_step(training)
    if progress < 1:
        again = "the same command without fresh=true" if config.fresh else "the same command"
        raise KeyboardInterrupt(
            f"stopped at step {loop.step:,} and saved; {again} continues from there"
        )
    return Path(config.run)


def begin(config: TrainConfig, accelerator: Accelerator) -> Training:
    """Data, model and optimiser of a run: a new one, or one that goes on from its last
    checkpoint.
    """
    if has_begun(config, accelerator):
        training = continue_run(config, accelerator)
    else:
        training = begin_new(config, accelerator)
    if training.watch is not None:
        # as each rollout does, so that held-out losses before and after the first have equal bits
        training.inner.backbone.pack()
    if training.main:
        for values in trim(Path(config.run) / "metrics.jsonl", training.loop.step):
            remember(training.loop, values)
    if config.log.tracker != "none":
        # TensorBoard drops the later points of an interrupted run, which come again
        tensorboard = {"purge_step": training.loop.step + 1}
        accelerator.init_trackers("decisionllm", init_kwargs={"tensorboard": tensorboard})
    announce(training)
    return training


def has_begun(config: TrainConfig, accelerator: Accelerator) -> bool:
    """Whether a run goes on from a checkpoint; a ValueError if only some of its processes see one.

    Those would train on from its step and its moments, the others from the first step.
    """
    begun = checkpoint.find(config.run) is not None and not config.fresh
    if accelerator.num_processes == 1:
        return begun
    seen = torch.tensor(float(begun), device=accelerator.device)
    share = float(accelerator.reduce(seen, "mean"))
    if 0 < share < 1:
        remedy = "take an absolute path on a file system that all machines share"
        raise ValueError(
            f"run: expected a checkpoint that all processes see, or none, got one in {config.run} "
            f"that some do not; {remedy}"
        )
    return begun


def begin_new(config: TrainConfig, accelerator: Accelerator) -> Training:
    """A run before its first step. Texts and environments are compared with its data, and its folder
    is written.
    """
    stores = open_stores(config, accelerator)
    console = console_of(accelerator)
    if console is not None:
        check_texts(config.text, stores.values(), config.dataset)
        check_text_readers(config, stores)
        for note in check_environments(config, stores):
            console.print(f"note: {note}")
    data = open_windows(config, stores)
    model = new_model(config, data)
    optimizer = make_optimizer(model, config.optim)
    if accelerator.is_main_process:
        create_folder(config, stores, data, model)
    return prepared(config, accelerator, data, model, optimizer)


def continue_run(config: TrainConfig, accelerator: Accelerator) -> Training:
    """A run at its last checkpoint; a ValueError if its folder holds another run."""
    run = Path(config.run)
    stores = open_stores(config, accelerator)
    data = open_windows(config, stores)
    model = unfitted_model(config, data)
    optimizer = make_optimizer(model, config.optim)
    checkpoint.restore(run, model, directory.same_run(run, config, stores))
    training = prepared(config, accelerator, data, model, optimizer)
    resume(training.loop, run, training.inner, training.optimizer)
    return training


def open_stores(config: TrainConfig, accelerator: Accelerator) -> dict[str, Store]:
    """The stores of a run by embodiment, which the main process makes first."""
    with accelerator.main_process_first():
        return mixture.stores(config.dataset, config.cache_dir, config.transform)


def open_windows(config: TrainConfig, stores: Mapping[str, Store]) -> dict[str, Data]:
    """The samplers of windows of a run, by embodiment."""
    shares = mixture.part_shares(config.dataset, stores)
    return {
        name: open_data(mixture.embodiment_config(config, name), store, shares[name])
        for name, store in stores.items()
    }


def prepared(
    config: TrainConfig,
    accelerator: Accelerator,
    data: dict[str, Data],
    model: Model,
    optimizer: torch.optim.Optimizer,
) -> Training:
    """A run whose model and optimiser are divided among the processes."""
    stores = {name: each.store for name, each in data.items()}
    if accelerator.is_fsdp2:
        check_sharded_texts(stores)
    alike = has_equal_steps(config, stores)
    wrapped_model, wrapped_optimizer = distributed.prepare(
        accelerator, model, optimizer, alike=alike
    )
    inner: Model = accelerator.unwrap_model(wrapped_model)
    if accelerator.device.type == "cuda" and accelerator.num_processes == 1:
        inner.backbone.record()
    return Training(
        config=config,
        accelerator=accelerator,
        console=console_of(accelerator),
        data=data,
        model=wrapped_model,
        inner=inner,
        optimizer=wrapped_optimizer,
        loop=Loop(),
        watch=watch_of(config, accelerator),
    )


def console_of(accelerator: Accelerator) -> Console | None:
    """The console of the main process; None in others, which print nothing."""
    if not accelerator.is_main_process:
        return None
    return Console(soft_wrap=True, markup=False, highlight=False)


def has_equal_steps(config: TrainConfig, stores: Mapping[str, Store]) -> bool:
    """Whether every step uses the same parameters, see `distributed.prepare`."""
    with_texts = {bool(task) for store in stores.values() for task in store.tasks}
    is_one_kind = len(stores) == 1 and len(with_texts) == 1
    return is_one_kind and one_agent_reads(config)


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


def watch_of(config: TrainConfig, accelerator: Accelerator) -> ScoreWatch | None:
    """The rollouts while a run trains; None where it has none."""
    if not config.log.rollout_every:
        return None
    accelerator.wait_for_everyone()  # until run.json is written
    _, info = directory.read(config.run)
    device = str(accelerator.device)
    return ScoreWatch(asdict(config), info, config.log.rollout_episodes, device)


def train_step(training: Training) -> None:
    """One step of the optimiser: a batch, divided among the processes, and there into
    micro-batches.
    """
    config = training.config
    loop = training.loop
    accelerator = training.accelerator
    world = accelerator.num_processes
    rank = accelerator.process_index
    for group in training.optimizer.param_groups:
        group["lr"] = loop.rate * group["scale"]
    # Dropout is drawn from a seed of the step and the process, so that no state of a generator is
    # saved. torch takes 64 bits.
    torch.manual_seed(((config.seed * 1_000_003 + loop.step) * world + rank) % 2**63)
    shares = {name: data.shares for name, data in training.data.items()}
    embodiment = mixture.drawn_embodiment(shares, config.seed, loop.step)
    window = training.data[embodiment].sampler(loop.step)
    parts = world * config.optim.accumulate
    for part in range(rank, parts, world):
        batch = training.batch(embodiment, window, rows_of_part(window, part, parts))
        terms = training.terms(training.model, batch, embodiment)
        # every training target has the same weight
        share = batch.loss_mask.sum() * world / max(window.loss_mask.sum(), 1)
        accelerator.backward(sum(terms.values()) * share)
        for name, term in terms.items():
            loop.sums[name] = loop.sums.get(name, 0.0) + term.detach() * share / world
    if config.optim.clip:
        accelerator.clip_grad_norm_(training.model.parameters(), config.optim.clip)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    for member in members(training.inner).values():
        member.objective.after_step(accelerator.reduce)
    loop.step += 1
    loop.count += 1


def rows_of_part(window: Window, part: int, parts: int) -> slice | np.ndarray:
    """Index of the rows of a window that are one of its parts; the rows of a team stay together."""
    return slice(part, None, parts) if window.team is None else window.team % parts == part


def announce(training: Training) -> None:
    """Print what is trained on what."""
    config = training.config
    accelerator = training.accelerator
    model = training.inner
    for data in training.data.values():
        announce_data(training, data)
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    mixed = accelerator.mixed_precision
    precision = "float32" if mixed == "no" else mixed
    where = f"{precision}, {accelerator.num_processes} x {accelerator.device}"
    training.say(f"model: {size:,} parameters, {trained:,} of them trained; {where}")
    limit = f"{config.steps:,} steps"
    if config.minutes:
        limit += f" or {config.minutes} minutes"
    windows = f"{config.optim.batch_size} windows x {config.window} steps"
    training.say(
        f"training: {limit} of {windows}, from step {training.loop.step:,}, into {config.run}"
    )


def announce_data(training: Training, data: Data) -> None:
    """Print the size of a log, its faults, and how many of its actions are known."""
    held = held_out_words(data, training.config.data.held_out)
    lengths = (data.steps.end - data.steps.first)[data.episodes]
    training.say(
        f"data: {data.store.info['name']}, {len(data.episodes):,} episodes, "
        f"{lengths.sum():,} steps; {held}"
    )
    if data.window > lengths.max():  # padding costs as much as steps
        training.say(
            f"note: no episode has more than {lengths.max():,} steps, and windows have "
            f"{data.window:,}, the rest of which is padding; window={lengths.max()} reads as much"
        )
    for fault in reported(data.store.info):
        training.say(f"fault: {fault}")
    unread = reported(data.store.info, "unread")
    if unread:
        training.say(f"note: not read of the log: {', '.join(unread)}")
    weights = data.steps.action_weight
    if data.store.action_weight is None or weights is None:
        return
    recorded = data.store.action_weight > 0
    filled = weights[~recorded & (weights > 0)]
    line = f"actions: {recorded.sum():,} of {recorded.size:,} recorded"
    if filled.size:
        line += f", {filled.size:,} filled in, weight {filled.mean():.2f} on average"
    training.say(line)


def held_out_words(data: Data, share: float) -> str:
    """How many episodes are held out of the data, and why none is where a share above 0 was
    wanted.
    """
    why = ""
    if share and not len(data.held_out):
        groups = len(np.unique(data.store.group))
        why = f" (data.held_out={share:g} of {groups:,} groups leaves none)"
    return f"{len(data.held_out):,} episodes held out{why}"


def position(training: Training, stop: bool) -> tuple[float, bool]:
    """How far the run is, in steps or in time, whichever is further, and whether it is interrupted;
    all processes agree.
    """
    config = training.config
    loop = training.loop
    accelerator = training.accelerator
    progress = loop.step / config.steps
    if config.minutes:
        progress = max(progress, loop.elapsed / 60 / config.minutes)
    if accelerator.num_processes == 1:
        return progress, stop
    agreed = accelerator.reduce(
        torch.tensor([progress, stop], dtype=torch.float64, device=accelerator.device), "mean"
    )
    return float(agreed[0]), float(agreed[1]) > 0


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to SCHEDULE_FLOOR of the peak."""
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return (
        config.optim.lr
        * min((step + 1) / max(config.optim.warmup, 1), 1)
        * (SCHEDULE_FLOOR + (1 - SCHEDULE_FLOOR) * cosine)
    )


def due_after(log: LogOptions, step: int, progress: float, *, stopped: bool) -> Due:
    """What is due after a step.

    Args:
        log: the options.
        step: its number.
        progress: how far the run is; 1: its end.
        stopped: the run is interrupted. That is no reason for a rollout or for held-out windows: a
            continued run has the same ones, and so the same best weights, as one that was never
            interrupted.
    """
    over = progress >= 1 or stopped
    roll_out = progress >= 1 or is_due(step, log.rollout_every)
    saves = is_due(step, log.save_every)
    held_out = roll_out or saves or is_due(step, log.every)
    return Due(
        log=held_out or over, held_out=held_out, roll_out=roll_out, save=saves or over, say=over
    )


def measure(training: Training, *, held_out: bool) -> dict[str, float]:
    """Mean loss terms since the last log line, and on held-out windows.

    Raises:
        FloatingPointError: a term or a weight is not finite.
    """
    loop, accelerator = training.loop, training.accelerator
    values = {
        name: float(accelerator.reduce(total)) / loop.count for name, total in loop.sums.items()
    }
    if held_out and training.config.log.validation_batches:
        values |= validated(training)
    check_finite(training, values)
    values |= {"lr": loop.rate, "seconds": loop.elapsed}
    loop.sums = {}
    loop.count = 0
    return values


@torch.no_grad()
def validated(training: Training) -> dict[str, float]:
    """Mean loss terms on held-out windows, over the parts of a mixture and, the likelihood, of each
    part.
    """
    values: dict[str, float] = {}
    of_parts: dict[str, list[float]] = defaultdict(list)  # by term
    training.model.eval()
    for embodiment, data in training.data.items():
        for label, draw in data.validators.items():
            terms = validation_terms(training, embodiment, draw)
            for name, value in terms.items():
                of_parts[name].append(value)
            part = label if data.store.is_mixture else embodiment
            if part:
                values[f"held_out_nll/{part}"] = terms["nll"]
    training.model.train()
    distributed.reshard(training.inner)
    for name, parts in of_parts.items():
        values[f"held_out_{name}"] = float(np.mean(parts))
    return values


def validation_terms(
    training: Training, embodiment: str, draw: Callable[[int], Window]
) -> dict[str, float]:
    """Mean loss terms on held-out windows of one part."""
    found: dict[str, list[float]] = defaultdict(list)
    for i in range(training.config.log.validation_batches):
        # The batch is made outside of autocast: it may read a text for the first time.
        batch = training.batch(embodiment, draw(i))
        for name, term in training.terms(training.inner, batch, embodiment).items():
            found[name].append(float(term))
    return {name: float(np.mean(values)) for name, values in found.items()}


def check_finite(training: Training, values: Mapping[str, float]) -> None:
    """Raise a FloatingPointError if a term of the loss or a trained weight is not finite."""
    config, loop = training.config, training.loop
    trained = (weight for weight in training.inner.parameters() if weight.requires_grad)
    if all(map(math.isfinite, values.values())) and all(w.isfinite().all() for w in trained):
        return
    kept = "there is no checkpoint yet"
    if checkpoint.find(config.run):
        kept = f"the last good checkpoint is kept in {config.run}"
    when = f"after the {loop.count} steps before step {loop.step}; {kept}"
    remedy = "Try a lower optim.lr or optim.clip; `decisionllm data` checks the log"
    raise FloatingPointError(f"loss or weights are not finite ({dict(values)}) {when}. {remedy}")


def record(training: Training, values: dict[str, float], progress: float, due: Due) -> None:
    """Write a log line, to the tracker too; save the best weights and the checkpoint, print, when it
    is time.

    The main process writes, all gather.
    """
    loop = training.loop
    training.accelerator.log(values, step=loop.step)
    if training.main:
        write_line(training, values)
    (is_kept,) = broadcast_object_list([is_best(training, values)])
    if is_kept:
        save_best(training)
    remember(loop, values)
    if "score" in values:
        warn_of_a_stall(training)
    is_time_to_print = loop.elapsed - loop.printed > 10
    if due.say or is_time_to_print or prints_often(training.console):
        say_values(training, values, progress)
    if due.save:
        save(training, finished=progress >= 1)


def write_line(training: Training, values: Mapping[str, float]) -> None:
    """Add a line to metrics.jsonl."""
    log = Path(training.config.run) / "metrics.jsonl"
    append_line(log, {"step": training.loop.step, **values})


def save_best(training: Training) -> None:
    """Keep these weights as the best so far."""
    folder = Path(training.config.run) / "best"
    state = {"step": training.loop.step}
    checkpoint.save(folder, training.inner, {}, state, write=training.main)


def save(training: Training, *, finished: bool) -> None:
    """Write a checkpoint from which training goes on."""
    loop = training.loop
    state = {"step": loop.step, "elapsed": loop.elapsed, "finished": finished}
    tensors = moments(training.inner, training.optimizer)
    checkpoint.save(Path(training.config.run), training.inner, tensors, state, write=training.main)


def prints_often(console: Console | None) -> bool:
    """Whether each log line is printed: a terminal shows it to somebody who waits."""
    return console is not None and console.is_terminal


def say_values(training: Training, values: Mapping[str, float], progress: float) -> None:
    """Print a log line."""
    loop = training.loop
    loop.printed = loop.elapsed
    terms = {name: value for name, value in values.items() if name not in ("lr", "seconds")}
    shown = "  ".join(f"{name} {value:.4f}" for name, value in terms.items())
    percent = f"{100 * min(progress, 1):3.0f} %"
    name = Path(training.config.run).name
    training.say(f"{name}: step {loop.step:>7,}  {percent}  {loop.elapsed:6.0f} s  {shown}")


def is_due(step: int, every: int) -> bool:
    """Whether something is done after this step; never if `every` is 0."""
    return every > 0 and step % every == 0


def is_best(training: Training, values: Mapping[str, float]) -> bool:
    """Whether a log line has the lowest held-out loss, or the highest score, as log.keep_best says."""
    loop = training.loop
    if training.config.log.keep_best == "loss":
        return values.get("held_out_nll", math.inf) < loop.lowest
    if training.config.log.keep_best == "score" and "score" in values:
        return values["score"] > max(loop.scores, default=-math.inf)
    return False


def remember(loop: Loop, values: Mapping[str, float]) -> None:
    """Keep the lowest held-out loss, and the loss and score after each rollout."""
    loop.lowest = min(loop.lowest, values.get("held_out_nll", math.inf))
    if "score" in values:
        loop.losses.append(values.get("held_out_nll", values["nll"]))
        loop.scores.append(values["score"])


def scores_now(training: Training, watch: ScoreWatch) -> dict[str, float]:
    """The scores of a rollout of the policy as it is now."""
    training.model.eval()
    distributed.gather(training.inner)
    found = watch.look(training.inner)
    training.model.train()
    distributed.reshard(training.inner)
    return found


def warn_of_a_stall(training: Training) -> None:
    """Say once that the loss falls and the score does not rise."""
    losses = training.loop.losses
    scores = training.loop.scores
    if first_stall(losses, scores) != len(scores):
        return
    since = f"the loss fell from {losses[-1 - LOOKS]:.4f} to {losses[-1]:.4f}"
    score = f"the score did not rise above {max(scores[:-LOOKS]):.1f}"
    remedy = "log.keep_best=score keeps the weights of the highest score"
    training.say(f"warning: in the last {LOOKS} rollouts {since}, and {score}; {remedy}")


@contextmanager
def interruptible() -> Iterator[list[bool]]:
    """A list that is not empty once SIGINT or SIGTERM came."""
    stop: list[bool] = []
    handlers = {}
    for s in (signal.SIGINT, signal.SIGTERM):
        handlers[s] = signal.signal(s, lambda *_: stop.append(True))
    try:
        yield stop
    except RuntimeError as error:
        if distributed.lost(error):
            # the launcher ends those that are left by it: the message comes first
            del handlers[signal.SIGTERM]
        raise
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


def resume(loop: Loop, run: Path, model: Model, optimizer: AcceleratedOptimizer) -> None:
    """Load the optimiser of a run's last checkpoint, and where its loop was."""
    folder = checkpoint.checkpoint_folder(run)
    restore_moments(model, optimizer, directory.content(folder / "trainer.safetensors"))
    state = directory.content(folder / "trainer.json")
    loop.step = state["step"]
    loop.elapsed = state["elapsed"]


def trim(path: Path, step: int) -> list[Json]:
    """Remove log lines after this step, which a continued run writes again, and a line that was cut
    short. Returns those that stay.
    """
    lines = read_lines(path) if path.is_file() and step else []
    kept = [line for line in lines if line["step"] <= step]
    write_lines(path, kept)
    return kept
