"""The command `baseline`: train AWAC, CQL, IQL, ReBRAC or TD3+BC of d3rlpy on our data, into a run
directory that `evaluate` reads.
"""

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import save_file

from decisionllm import hardware
from decisionllm.baselines.d3rlpy import (
    ALGORITHMS,
    READ_NEXT_ACTION,
    Transitions,
    actor_mean,
    actor_weights,
    build_transitions,
    fit_scales,
    import_d3rlpy,
)
from decisionllm.commands.options import more_than, read_options, seed_number, word
from decisionllm.datasets import sampling
from decisionllm.datasets.action_range import action_widths
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.files import append_line, atomic_folder, write_lines
from decisionllm.registry import Node
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Spec
from decisionllm.trust import trust_user_modules

if TYPE_CHECKING:
    from d3rlpy.algos import QLearningAlgoBase


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The episodes that are trained on, as in `train`."""

    fraction: float
    min_return_quantile: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """The optimiser."""

    batch_size: int = more_than(0)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The log."""

    every: int = more_than(0)  # steps


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """The options of `baseline`; configs/baseline.yaml explains them and has their defaults."""

    algorithm: str = word(*ALGORITHMS)
    time_limits: str = word("bootstrap", "terminal")
    text: str = word("auto")
    steps: int = more_than(0)
    optim: OptimOptions
    log: LogOptions
    seed: int = seed_number()
    options: Node  # of the algorithm
    run: str
    cache_dir: str
    dataset: Node
    transform: Node
    data: DataOptions
    action_clip_quantile: float
    device: str
    fresh: bool


@trust_user_modules
def baseline(config: Node) -> Path:
    """Train config["algorithm"] on config["dataset"].

    Args:
        config: plain dicts, see configs/baseline.yaml.

    Returns:
        The run directory.

    Raises:
        ValueError: an option is wrong, the data has discrete actions, or the directory holds a run.
        FloatingPointError: a loss is not finite; nothing is saved.
    """
    options = read_options(BaselineConfig, config)
    run = Path(options.run)
    if checkpoint.find(run) and not options.fresh:
        raise ValueError(f"{run} holds a run: choose another run=..., or fresh=true to begin again")
    directory.refuse_foreign(run)
    d3rlpy = import_d3rlpy()
    device = hardware.resolve_device(options.device)
    with directory.lock_run(run):
        return fit(options, config, d3rlpy, device)


def fit(options: BaselineConfig, config: Node, d3rlpy: ModuleType, device: str) -> Path:
    """Run the training in a run directory that is locked for it. config: the options as plain dicts,
    which the run directory keeps.
    """
    console = Console(soft_wrap=True, markup=False, highlight=False)
    run = Path(options.run)

    # -- data and algorithm --
    store = prepare_store(options.dataset, options.cache_dir, options.transform)
    episodes, _ = sampling.select(store, **asdict(options.data))
    raw = build_transitions(
        store,
        episodes,
        ends=options.time_limits == "terminal",
        next_actions=options.algorithm in READ_NEXT_ACTION,
    )
    scale = fit_scales(
        store.spec,
        raw.observations,
        raw.actions,
        action_clip_quantile=options.action_clip_quantile,
    )
    clip = partial(np.clip, a_min=scale["low"], a_max=scale["high"])
    log = raw._replace(actions=clip(raw.actions), next_actions=clip(raw.next_actions))
    algorithm = make_algorithm(options, store.spec, scale, device)

    run_config = config | {"policy": {"_target_": "decisionllm.baselines.d3rlpy.Baseline"}}
    versions = directory.versions() | {"d3rlpy": d3rlpy.__version__}
    directory.create(run, run_config, {ONLY: store}, {}, versions=versions)
    count = f"{len(episodes):,} episodes, {len(log.rewards):,} transitions"
    console.print(f"data: {store.info['name']}, {count}")
    if len(store.tasks) > 1:
        texts = f"{len(store.tasks):,} different task texts"
        console.print(f"note: a baseline reads no text, and the log has {texts}")
    batches = f"{options.steps:,} steps of {options.optim.batch_size} transitions"
    console.print(f"training: {batches} on {device}, into {run}")
    train(algorithm, log, options, console)

    # -- save the actor --
    weights = {name: torch.from_numpy(x) for name, x in scale.items()}
    weights |= actor_weights(algorithm.impl.policy)
    observations = log.observations[:99]
    predicted = clip(algorithm.predict(observations))
    apart = np.abs(actor_mean(weights, observations) - predicted)
    is_same = (apart < 1e-3 * action_widths(scale["low"], scale["high"])).all()
    assert is_same, "the saved actor differs from the trained one"
    with atomic_folder(run / "checkpoint") as partial_folder:
        save_file(weights, partial_folder / "model.safetensors")
    return run


def make_algorithm(
    options: BaselineConfig, spec: Spec, scale: dict[str, np.ndarray], device: str
) -> "QLearningAlgoBase":
    """Make the untrained algorithm of d3rlpy; a ValueError if it has no such option."""
    d3rlpy = import_d3rlpy()
    preprocessing = d3rlpy.preprocessing
    scalers = {
        "observation_scaler": preprocessing.StandardObservationScaler(
            scale["mean"], scale["deviation"], eps=0.0
        ),
        "action_scaler": preprocessing.MinMaxActionScaler(
            scale["low"], scale["low"] + action_widths(scale["low"], scale["high"])
        ),
    }
    arguments = {"batch_size": options.optim.batch_size} | scalers | options.options
    make = getattr(d3rlpy.algos, f"{ALGORITHMS[options.algorithm]}Config")
    try:
        algorithm = make(**arguments).create(f"{device}:0")
    except TypeError as error:
        raise ValueError(f"options: {error}") from error
    torch.manual_seed(options.seed)  # d3rlpy draws weights and noise from torch's own generator
    algorithm.create_impl((spec.observation_dim,), spec.action_dim)
    return algorithm


def train(
    algorithm: "QLearningAlgoBase", log: Transitions, options: BaselineConfig, console: Console
) -> None:
    """Update the algorithm with batches of these transitions; write mean losses to losses.jsonl."""
    run = Path(options.run)
    steps = options.steps
    MiniBatch = import_d3rlpy().dataset.TransitionMiniBatch
    rng = np.random.default_rng(options.seed)
    began = time.monotonic()
    printed = -math.inf  # seconds, of the last line on the console
    losses: list[dict[str, float]] = []  # since the last log line
    file = run / "losses.jsonl"
    write_lines(file, [])
    for step in range(1, steps + 1):
        rows = rng.integers(len(log.rewards), size=options.optim.batch_size)
        batch = Transitions(*(column[rows] for column in log))
        one_step = np.ones_like(batch.rewards)  # the steps from state to next state
        losses.append(algorithm.update(MiniBatch(*batch, one_step, [])))
        if step % options.log.every and step < steps:
            continue
        means = mean_terms(losses)
        if not np.isfinite([*means.values()]).all():
            raise FloatingPointError(
                f"losses are not finite at step {step} ({means}), nothing is saved; try lower rates"
            )
        losses = []
        elapsed = time.monotonic() - began
        append_line(file, {"step": step} | means | {"seconds": elapsed})
        if step == steps or console.is_terminal or elapsed - printed > 10:
            printed = elapsed
            text = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
            progress = f"step {step:>7,}  {100 * step / steps:3.0f} %  {elapsed:6.0f} s"
            console.print(f"{run.name}: {progress}  {text}")


def mean_terms(losses: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each term over the updates that have it, by name."""
    means = {}
    for name in sorted(set().union(*losses)):
        values = [terms[name] for terms in losses if name in terms]
        means[name] = float(np.mean(values))
    return means
