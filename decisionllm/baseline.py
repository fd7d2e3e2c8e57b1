"""The command `baseline`: train AWAC, CQL, IQL, ReBRAC or TD3+BC of d3rlpy on our data, into a run
directory that `evaluate` reads.
"""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import save_file

from decisionllm.baselines.d3rlpy import (
    ALGORITHMS,
    READ_NEXT_ACTION,
    actor_mean,
    actor_weights,
    library,
    scales,
    transitions,
)
from decisionllm.checks import one_of
from decisionllm.datasets import sampling
from decisionllm.datasets.store import NO_TRANSFORM, prepare
from decisionllm.files import sealed
from decisionllm.registry import Node
from decisionllm.runs import checkpoint, directory, hardware

if TYPE_CHECKING:
    from d3rlpy.algos import QLearningAlgoBase


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
    # -- check the options --
    run = Path(config["run"])
    console = Console(soft_wrap=True, markup=False, highlight=False)
    batch_size = config["optim"]["batch_size"]
    for key, choices in (
        ("algorithm", tuple(ALGORITHMS)),
        ("time_limits", ("bootstrap", "terminal")),
        ("text", ("none",)),
    ):
        one_of(key, config[key], choices)
    for key, number in (
        ("steps", config["steps"]),
        ("optim.batch_size", batch_size),
        ("log.every", config["log"]["every"]),
    ):
        if not number > 0:
            raise ValueError(f"{key}: expected more than 0, got {number}")
    if checkpoint.find(run) and not config["fresh"]:
        raise ValueError(f"{run} holds a run: choose another run=..., or fresh=true to begin again")
    directory.refuse_foreign(run)
    d3rlpy = library()
    device = hardware.usable(config["device"])

    # -- data and algorithm --
    store = prepare(config["dataset"], config["cache_dir"], config.get("transform", NO_TRANSFORM))
    select = {name: config["data"][name] for name in ("fraction", "min_return_quantile", "seed")}
    chosen, _ = sampling.select(store, **select)
    reads_next = config["algorithm"] in READ_NEXT_ACTION
    known = transitions(
        store, chosen, ends=config["time_limits"] == "terminal", next_actions=reads_next
    )
    scale = scales(store.spec, *known[:2], action_clip_quantile=config["action_clip_quantile"])
    for column in (1, 4):
        known[column] = np.clip(known[column], scale["low"], scale["high"])
    given = {
        "batch_size": batch_size,
        "observation_scaler": d3rlpy.preprocessing.StandardObservationScaler(
            scale["mean"], scale["deviation"], eps=0.0
        ),
        "action_scaler": d3rlpy.preprocessing.MinMaxActionScaler(scale["low"], scale["high"]),
    }
    make = getattr(d3rlpy.algos, f"{ALGORITHMS[config['algorithm']]}Config")
    try:
        algorithm = make(**given | config["options"]).create(f"{device}:0")
    except TypeError as error:
        raise ValueError(f"options: {error}") from error
    torch.manual_seed(config["seed"])  # d3rlpy draws weights and noise from torch's own generator
    algorithm.create_impl((store.spec.observation_dim,), store.spec.action_dim)
    described = config | {"policy": {"_target_": "decisionllm.baselines.d3rlpy.Baseline"}}
    with directory.locked(run):
        directory.describe(
            run,
            described,
            {"": store},
            versions=directory.versions() | {"d3rlpy": d3rlpy.__version__},
        )
        console.print(
            f"data: {store.info['name']}, {len(chosen):,} episodes, {len(known[2]):,} transitions"
        )
        console.print(
            f"training: {config['steps']:,} steps of {batch_size} transitions on {device}, into "
            f"{run}"
        )
        train(algorithm, known, run, config, console)

        # -- save the actor --
        weights = {name: torch.from_numpy(x) for name, x in scale.items()} | actor_weights(
            algorithm.impl.policy
        )
        apart = actor_mean(weights, known[0][:99]) - algorithm.predict(known[0][:99])
        assert (np.abs(apart) < 1e-3 * (scale["high"] - scale["low"])).all(), (
            "the saved actor differs from the trained one"
        )
        with sealed(run / "checkpoint") as partial:
            save_file(weights, partial / "model.safetensors")
    return run


def train(
    algorithm: "QLearningAlgoBase",
    known: list[np.ndarray],
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
    with (run / "losses.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            rows = rng.integers(len(known[2]), size=config["optim"]["batch_size"])
            o, a, r, following, next_actions, terminal = (x[rows] for x in known)
            batch = MiniBatch(o, a, r, following, next_actions, terminal, np.ones_like(r), [])
            losses.append(algorithm.update(batch))
            if step % config["log"]["every"] and step < steps:
                continue
            means = mean_terms(losses)
            if not np.isfinite([*means.values()]).all():
                raise FloatingPointError(
                    f"losses are not finite at step {step} ({means}), nothing is saved; try lower "
                    "rates"
                )
            losses = []
            elapsed = time.monotonic() - began
            file.write(json.dumps({"step": step} | means | {"seconds": elapsed}) + "\n")
            if step == steps or console.is_terminal or elapsed - printed > 10:
                printed = elapsed
                text = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
                console.print(
                    f"{run.name}: step {step:>7,}  {100 * step / steps:3.0f} %  {elapsed:6.0f} s  "
                    f"{text}"
                )


def mean_terms(losses: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each term over the updates that have it, by name."""
    names = sorted(set().union(*losses))
    return {
        name: float(np.mean([terms[name] for terms in losses if name in terms])) for name in names
    }
