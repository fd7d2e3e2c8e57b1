"""One training: its data, model and optimiser, a step, a log line.

`train` runs the loop over them.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import Tensor, nn

from decisionllm import distributed
from decisionllm.commands.train_history import History
from decisionllm.commands.train_schedule import Due
from decisionllm.config import TrainConfig, one_agent_reads
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

ALL_ROWS = slice(None)
PRINT_EVERY = 10  # seconds between printed lines where nobody watches a terminal
MOST_SILENCE = 60  # seconds without a printed line


class Training:
    """A training in a run directory that is locked for it: a new one, or the rest of an
    interrupted one.

    Args:
        config: the options.
        accelerator: of this process.

    Attributes:
        step: how many steps are done.
        data: the store and the sampler of windows of each embodiment.
        model: the policy.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        self.config = config
        self.accelerator = accelerator
        self.run = Path(config.run)
        self.is_main = accelerator.is_main_process  # this process writes files and prints
        self.console = Console(
            soft_wrap=True, markup=False, highlight=False, quiet=not self.is_main
        )
        is_resumed = has_checkpoint(config, accelerator)
        stores = self._open_stores(is_resumed)
        shares = mixture.part_shares(config.dataset, stores)
        self.data = {}
        for name, store in stores.items():
            options = mixture.embodiment_config(config, name)
            self.data[name] = open_data(options, store, shares[name])
        self._shares = {name: each.shares for name, each in self.data.items()}
        self._build_model(stores, is_resumed)
        self.step = 0
        self.elapsed = 0.0  # seconds of training, over all continuations
        if is_resumed:
            self._load_progress()
        self._open_logs()

    def _open_stores(self, is_resumed: bool) -> dict[str, Store]:
        """Open the store of each embodiment; a new training compares it with its options."""
        config = self.config
        with self.accelerator.main_process_first():
            stores = mixture.open_stores(config.dataset, config.cache_dir, config.transform)
        if self.is_main and not is_resumed:
            check_texts(config.text, stores.values(), config.dataset)
            check_text_readers(config, stores)
            for line in check_environments(config, stores):
                self.console.print(f"note: {line}")
        return stores

    def _build_model(self, stores: dict[str, Store], is_resumed: bool) -> None:
        """Build the model and its optimiser: new ones, or with the weights of the last checkpoint."""
        config, accelerator = self.config, self.accelerator
        model: Model = (unfitted_model if is_resumed else new_model)(config, self.data)
        optimizer = make_optimizer(model, config.optim)
        if is_resumed:
            info = directory.check_same_run(self.run, config, stores)
            checkpoint.restore(self.run, model, info)
        elif self.is_main:
            create_folder(config, stores, self.data, model)
        if accelerator.is_fsdp2:
            check_sharded_texts(stores)
        self._wrapped_model, self._optimizer = distributed.wrap_model(
            accelerator, model, optimizer, alike=has_equal_steps(config, stores)
        )
        self.model: Model = accelerator.unwrap_model(self._wrapped_model)
        if accelerator.device.type == "cuda" and accelerator.num_processes == 1:
            self.model.backbone.record()  # CUDA graphs

    def _load_progress(self) -> None:
        """Load the moments of the optimiser, the step and the time of the last checkpoint."""
        folder = checkpoint.checkpoint_folder(self.run)
        moments = directory.read_file(folder / "trainer.safetensors")
        load_moments(self.model, self._optimizer, moments)
        state = directory.read_file(folder / "trainer.json")
        self.step = state["step"]
        self.elapsed = state["elapsed"]

    def _open_logs(self) -> None:
        """Open the logs, without the lines after the last checkpoint, and print what is trained."""
        config, accelerator = self.config, self.accelerator
        self._rate = 0.0  # learning rate of the last step
        # sums of the loss terms since the last log line
        self._loss_sums: defaultdict[str, Tensor | float] = defaultdict(float)
        self._num_summed = 0  # over so many steps
        self._last_print = -math.inf  # `elapsed` at the last printed line
        self._score_watch = None
        if config.log.rollout_every:
            accelerator.wait_for_everyone()  # until run.json is written
            _, info = directory.read(self.run)
            self._score_watch = EvalCallback(
                asdict(config), info, config.log.rollout_episodes, str(accelerator.device)
            )
            # as each rollout does, so that held-out losses before and after the first have equal
            # bits
            self.model.backbone.pack()
        self._history = History()
        if self.is_main:
            for values in directory.trim_log(self.run / "metrics.jsonl", self.step):
                self._history.add(values)
        if config.log.tracker != "none":
            options = tracker_options(config, self.step)
            accelerator.init_trackers("decisionllm", init_kwargs=options)
        precision = accelerator.mixed_precision
        number_type = "float32" if precision == "no" else precision
        devices = f"{number_type}, {accelerator.num_processes} x {accelerator.device}"
        summary = training_summary(config, self.data, self.model, devices=devices, step=self.step)
        for line in summary:
            self.console.print(line)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clock while the block trains, and close the trackers at its end."""
        with ExitStack() as stack:
            # on a CPU a float32 product with denormal numbers takes a hundred times as long
            torch.set_flush_denormal(True)
            stack.callback(torch.set_flush_denormal, False)
            stack.callback(self.accelerator.end_training)
            self._wrapped_model.train()
            self._began = time.monotonic() - self.elapsed
            self._start = self.elapsed, self.measure_progress(False)[0]
            yield

    def measure_progress(self, stopped: bool) -> tuple[float, bool]:
        """Return the share of the training that is done, in steps or in time, whichever is further,
        and whether any process was stopped; all processes get the same.
        """
        self.elapsed = time.monotonic() - self._began
        progress = self.step / self.config.steps
        if self.config.minutes:
            progress = max(progress, self.elapsed / 60 / self.config.minutes)
        if self.accelerator.num_processes > 1:
            own = torch.tensor(
                [progress, stopped], dtype=torch.float64, device=self.accelerator.device
            )
            agreed = self.accelerator.reduce(own, "mean")
            progress = float(agreed[0])
            stopped = float(agreed[1]) > 0
        return progress, stopped

    def take_step(self, progress: float) -> None:
        """Train on one batch, divided among the processes, and there into micro-batches.

        progress: see `measure_progress`.
        """
        config, accelerator = self.config, self.accelerator
        self._rate = scheduled_learning_rate(config.optim, self.step, progress)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * group["scale"]
        # Dropout is drawn from a seed of the step and the process, so that no state of a generator
        # is saved. torch takes 64 bits.
        rank, num_processes = accelerator.process_index, accelerator.num_processes
        drawn = (config.seed * 1_000_003 + self.step) * num_processes + rank
        torch.manual_seed(drawn % 2**63)
        embodiment = mixture.draw_embodiment(self._shares, config.seed, self.step)
        window = self.data[embodiment].sampler(self.step)
        num_targets = max(window.loss_mask.sum(), 1)
        num_parts = num_processes * config.optim.accumulate
        for part in range(rank, num_parts, num_processes):
            batch = self._make_batch(embodiment, window, rows_of_part(window, part, num_parts))
            terms = self._loss_terms(self._wrapped_model, batch, embodiment)
            # every training target has the same weight
            share = batch.loss_mask.sum() * num_processes / num_targets
            accelerator.backward(sum(terms.values()) * share)
            for term, value in terms.items():
                added = value.detach() * share / num_processes
                self._loss_sums[term] = self._loss_sums[term] + added
        if config.optim.clip:
            accelerator.clip_grad_norm_(self._wrapped_model.parameters(), config.optim.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for member in members(self.model).values():
            member.objective.after_step(accelerator.reduce)
        self.step += 1
        self._num_summed += 1

    def print_progress(self, progress: float) -> None:
        """Print the step and the time that is left, if no line was printed for a minute.

        progress: see `measure_progress`.
        """
        began, progress_then = self._start
        silence = self.elapsed - max(self._last_print, began)
        if silence < MOST_SILENCE or progress <= progress_then:
            return
        self._last_print = self.elapsed
        left = (1 - progress) * (self.elapsed - began) / (progress - progress_then)
        line = log_line({}, self.step, progress, self.elapsed)
        self.console.print(f"{self.run.name}: {line}about {left / 60:.0f} min left")

    def log(self, due: Due, progress: float) -> None:
        """Write a log line of the steps since the last one, if there are any, and save what is due.

        Args:
            due: what else belongs to it.
            progress: see `measure_progress`.
        """
        if not self._num_summed:
            return
        values = self._measure(due)
        self.accelerator.log(values, step=self.step)
        if self.is_main:
            append_line(self.run / "metrics.jsonl", {"step": self.step, **values})
        # the main process decides: it alone has read the lines of an earlier start
        is_best = self._history.is_best(values, self.config.log.keep_best)
        (is_best,) = broadcast_object_list([is_best])
        if is_best:
            best = self.run / "best"
            checkpoint.save(best, self.model, {}, {"step": self.step}, write=self.is_main)
        self._history.add(values)
        if "score" in values and self._history.has_stalled():
            self.console.print(self._history.stall_warning())
        is_late = self.elapsed - self._last_print > PRINT_EVERY
        if due.say or is_late or self.console.is_terminal:
            self._last_print = self.elapsed
            line = log_line(values, self.step, progress, self.elapsed)
            self.console.print(f"{self.run.name}: {line}")
        if due.save:
            state = {"step": self.step, "elapsed": self.elapsed, "finished": progress >= 1}
            # no name for the copies of the moments, which would stay in memory
            checkpoint.save(
                self.run,
                self.model,
                moments_by_name(self.model, self._optimizer),
                state,
                write=self.is_main,
            )

    def _measure(self, due: Due) -> dict[str, float]:
        """Return the mean loss terms since the last log line, and what is due of held-out loss terms
        and the scores of a rollout.
        """
        values = {}
        for term, total in self._loss_sums.items():
            values[term] = float(self.accelerator.reduce(total)) / self._num_summed
        batches = self.config.log.validation_batches
        if due.held_out and batches:
            self._wrapped_model.eval()
            values |= validation_terms(self.data, self._held_out_terms, batches)
            self._wrapped_model.train()
            distributed.reshard_weights(self.model)
        check_finite(self.run, self.model, values, step=self.step, num_steps=self._num_summed)
        values |= {"lr": self._rate, "seconds": self.elapsed}
        self._loss_sums.clear()
        self._num_summed = 0
        if due.roll_out and self._score_watch is not None:
            self._wrapped_model.eval()
            distributed.gather_weights(self.model)
            values |= self._score_watch.look(self.model)
            self._wrapped_model.train()
            distributed.reshard_weights(self.model)
        return values

    def _make_batch(
        self, embodiment: str, window: Window, rows: slice | np.ndarray = ALL_ROWS
    ) -> Batch:
        """Return rows of a window as a batch on the device."""
        data = self.data[embodiment]
        return to_batch(
            window,
            rows,
            store=data.store,
            tasks=data.tasks,
            encode=self.model.backbone.encode,
            device=self.accelerator.device,
        )

    def _loss_terms(self, module: nn.Module, batch: Batch, embodiment: str) -> dict[str, Tensor]:
        """Return the terms of the loss of a batch."""
        with self.accelerator.autocast():
            terms: dict[str, Tensor] = module(batch, embodiment)
        return terms

    def _held_out_terms(self, embodiment: str, window: Window) -> dict[str, Tensor]:
        """Return the terms of the loss of a window that is not trained on."""
        # The batch is made outside of autocast: it may read a text for the first time.
        batch = self._make_batch(embodiment, window)
        return self._loss_terms(self.model, batch, embodiment)


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
