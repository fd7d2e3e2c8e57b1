"""The command `baseline`: train AWAC, CQL, IQL, ReBRAC or TD3+BC of d3rlpy on our data, into a run
directory that `evaluate` reads.
"""

import math
import time
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
    library,
    scales,
    transitions,
)
from decisionllm.checks import check_seed, more_than_0, one_of
from decisionllm.datasets import sampling
from decisionllm.datasets.action_range import widths
from decisionllm.datasets.store import NO_TRANSFORM, prepare
from decisionllm.files import append_line, sealed, write_lines
from decisionllm.registry import Node
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Spec
from decisionllm.trust import trusting_user

if TYPE_CHECKING:
    from d3rlpy.algos import QLearningAlgoBase


@trusting_user
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
    check_options(config)
    run = Path(config["run"])
    d3rlpy = library()
    device = hardware.usable(config["device"])
    with directory.locked(run):
        return fit(config, run, d3rlpy, device)


def fit(config: Node, run: Path, d3rlpy: ModuleType, device: str) -> Path:
    """`baseline` in a run directory that is locked for this run."""
    console = Console(soft_wrap=True, markup=False, highlight=False)

    # -- data and algorithm --
    store = prepare(config["dataset"], config["cache_dir"], config.get("transform", NO_TRANSFORM))
    select = {name: config["data"][name] for name in ("fraction", "min_return_quantile", "seed")}
    chosen, _ = sampling.select(store, **select)
    known = transitions(
        store,
        chosen,
        ends=config["time_limits"] == "terminal",
        next_actions=config["algorithm"] in READ_NEXT_ACTION,
    )
    quantile = config["action_clip_quantile"]
    scale = scales(store.spec, known.observations, known.actions, action_clip_quantile=quantile)
    clip = partial(np.clip, a_min=scale["low"], a_max=scale["high"])
    known = known._replace(actions=clip(known.actions), next_actions=clip(known.next_actions))
    algorithm = make_algorithm(config, store.spec, scale, device)

    described = config | {"policy": {"_target_": "decisionllm.baselines.d3rlpy.Baseline"}}
    versions = directory.versions() | {"d3rlpy": d3rlpy.__version__}
    directory.create(run, described, {"": store}, versions=versions)
    count = f"{len(chosen):,} episodes, {len(known.rewards):,} transitions"
    console.print(f"data: {store.info['name']}, {count}")
    if len(store.tasks) > 1:
        texts = f"{len(store.tasks):,} different task texts"
        console.print(f"note: a baseline reads no text, and the log has {texts}")
    batches = f"{config['steps']:,} steps of {config['optim']['batch_size']} transitions"
    console.print(f"training: {batches} on {device}, into {run}")
    train(algorithm, known, run, config, console)

    # -- save the actor --
    weights = {name: torch.from_numpy(x) for name, x in scale.items()}
    weights |= actor_weights(algorithm.impl.policy)
    some = known.observations[:99]
    predicted = clip(algorithm.predict(some))
    apart = np.abs(actor_mean(weights, some) - predicted)
    is_same = (apart < 1e-3 * widths(scale["low"], scale["high"])).all()
    assert is_same, "the saved actor differs from the trained one"
    with sealed(run / "checkpoint") as partial_folder:
        save_file(weights, partial_folder / "model.safetensors")
    return run


def check_options(config: Node) -> None:
    """Raise a ValueError if an option cannot be, or if the run directory is taken."""
    one_of("algorithm", config["algorithm"], ALGORITHMS)
    one_of("time_limits", config["time_limits"], ("bootstrap", "terminal"))
    one_of("text", config["text"], ("none",))
    more_than_0("steps", config["steps"])
    more_than_0("optim.batch_size", config["optim"]["batch_size"])
    more_than_0("log.every", config["log"]["every"])
    check_seed("seed", config["seed"])
    run = Path(config["run"])
    if checkpoint.find(run) and not config["fresh"]:
        raise ValueError(f"{run} holds a run: choose another run=..., or fresh=true to begin again")
    directory.refuse_foreign(run)


def make_algorithm(
    config: Node, spec: Spec, scale: dict[str, np.ndarray], device: str
) -> "QLearningAlgoBase":
    """The untrained algorithm of d3rlpy; a ValueError if it has no such option."""
    d3rlpy = library()
    preprocessing = d3rlpy.preprocessing
    scaled = {
        "observation_scaler": preprocessing.StandardObservationScaler(
            scale["mean"], scale["deviation"], eps=0.0
        ),
        "action_scaler": preprocessing.MinMaxActionScaler(
            scale["low"], scale["low"] + widths(scale["low"], scale["high"])
        ),
    }
    options = {"batch_size": config["optim"]["batch_size"]} | scaled | config["options"]
    make = getattr(d3rlpy.algos, f"{ALGORITHMS[config['algorithm']]}Config")
    try:
        algorithm = make(**options).create(f"{device}:0")
    except TypeError as error:
        raise ValueError(f"options: {error}") from error
    torch.manual_seed(config["seed"])  # d3rlpy draws weights and noise from torch's own generator
    algorithm.create_impl((spec.observation_dim,), spec.action_dim)
    return algorithm


def train(
    algorithm: "QLearningAlgoBase",
    known: Transitions,
    run: Path,
    config: Node,
    console: Console,
) -> None:
    """Update the algorithm with batches of these transitions; write mean losses to losses.jsonl."""
    steps = config["steps"]
    MiniBatch = library().dataset.TransitionMiniBatch
    rng = np.random.default_rng(config["seed"])
    began = time.monotonic()
    printed = -math.inf  # seconds, of the last line on the console
    losses: list[dict[str, float]] = []  # since the last log line
    log = run / "losses.jsonl"
    write_lines(log, [])
    for step in range(1, steps + 1):
        rows = rng.integers(len(known.rewards), size=config["optim"]["batch_size"])
        drawn = Transitions(*(column[rows] for column in known))
        one_step = np.ones_like(drawn.rewards)  # the steps from state to next state
        losses.append(algorithm.update(MiniBatch(*drawn, one_step, [])))
        if step % config["log"]["every"] and step < steps:
            continue
        means = mean_terms(losses)
        if not np.isfinite([*means.values()]).all():
            raise FloatingPointError(
                f"losses are not finite at step {step} ({means}), nothing is saved; try lower rates"
            )
        losses = []
        elapsed = time.monotonic() - began
        append_line(log, {"step": step} | means | {"seconds": elapsed})
        if step == steps or console.is_terminal or elapsed - printed > 10:
            printed = elapsed
            text = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
            progress = f"step {step:>7,}  {100 * step / steps:3.0f} %  {elapsed:6.0f} s"
            console.print(f"{run.name}: {progress}  {text}")


def mean_terms(losses: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each term over the updates that have it, by name."""
    means = {}
    for name in sorted(set().union(*losses)):
        values = [terms[name] for terms in losses if name in terms]
        means[name] = float(np.mean(values))
    return means
