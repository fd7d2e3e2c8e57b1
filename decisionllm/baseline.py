"""The verb `baseline`: CQL, IQL or TD3+BC, as d3rlpy trains them, on our data; a run directory that `evaluate` reads like any other."""

import io
import json
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import save_file

from decisionllm import checkpoint
from decisionllm.datasets import windows
from decisionllm.datasets.store import prepare

ALGORITHMS = {"cql": "CQLConfig", "iql": "IQLConfig", "td3bc": "TD3PlusBCConfig"}


def baseline(config):
    """Train config["algorithm"] on config["dataset"] (see configs/baseline.yaml). Returns the run directory."""
    run, console = Path(config["run"]), Console(soft_wrap=True, markup=False, highlight=False)
    for key, known in (("algorithm", tuple(ALGORITHMS)), ("truncated", ("goes-on", "ends")), ("text", ("none",))):
        if config[key] not in known:
            raise ValueError(f"{key}: expected {' or '.join(known)} of a baseline, got {config[key]!r}")
    for key in ("steps", "batch_size", "log_every"):
        if not config[key] > 0:
            raise ValueError(f"{key}: expected more than 0, got {config[key]}")
    if checkpoint.find(run) and not config["fresh"]:
        raise ValueError(f"{run} holds a run: choose another run=..., or fresh=true to begin again")
    d3rlpy, device = library(), checkpoint.usable(config["device"])
    store = prepare(config["dataset"], config["home"])
    chosen, _ = windows.select(store, fraction=config["fraction"], quality=config["quality"], seed=config["data_seed"])
    known = transitions(store, chosen, ends=config["truncated"] == "ends")
    scales = scaled(store, known, edge=config["edge"])
    given = {
        "batch_size": config["batch_size"],
        "observation_scaler": d3rlpy.preprocessing.StandardObservationScaler(scales["mean"], scales["deviation"], eps=0.0),
        "action_scaler": d3rlpy.preprocessing.MinMaxActionScaler(scales["low"], scales["high"]),
    }
    try:
        algorithm = getattr(d3rlpy.algos, ALGORITHMS[config["algorithm"]])(**given | config["options"]).create(device)
    except TypeError as error:
        raise ValueError(f"options: {error}") from error
    torch.manual_seed(config["seed"])  # the library draws weights and noise from torch's own generator
    algorithm.create_impl((store.spec.observation_dim,), store.spec.action_dim)
    checkpoint.describe(
        run, config | {"policy": {"_target_": "decisionllm.baseline.Baseline"}}, store,
        versions=checkpoint.versions() | {"d3rlpy": d3rlpy.__version__},
    )  # fmt: skip
    console.print(f"data: {store.info['name']}, {len(chosen):,} episodes, {len(known.rewards):,} transitions")
    console.print(
        f"training: {config['algorithm']}, {config['steps']:,} steps of {config['batch_size']} transitions on {device}, into {run}"
    )

    rng, began, said, seen = np.random.default_rng(config["seed"]), time.monotonic(), -1e9, []
    actions = np.clip(known.actions, scales["low"], scales["high"])
    with (run / "losses.jsonl").open("w") as file:
        for step in range(1, config["steps"] + 1):
            rows = rng.integers(len(actions), size=config["batch_size"])
            batch = d3rlpy.dataset.TransitionMiniBatch(
                known.observations[rows], actions[rows], known.rewards[rows, None], known.following[rows],
                actions[rows],  # the next actions, which none of these algorithms reads
                known.terminal[rows, None], np.ones((len(rows), 1), np.float32), [],
            )  # fmt: skip
            seen.append(algorithm.update(batch))
            if step % config["log_every"] and step < config["steps"]:
                continue
            means = {name: float(np.mean([x[name] for x in seen if name in x])) for name in sorted(set().union(*seen))}
            if not np.isfinite([*means.values()]).all():
                raise FloatingPointError(
                    f"losses are not finite ({means}) before step {step}; nothing was saved; try lower learning rates"
                )
            seen, elapsed = [], time.monotonic() - began
            file.write(json.dumps({"step": step} | means | {"seconds": elapsed}) + "\n")
            if step == config["steps"] or console.is_terminal or elapsed - said > 10:
                said = elapsed
                shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
                console.print(f"{run.name}: step {step:>7,}  {100 * step / config['steps']:3.0f} %  {elapsed:6.0f} s  {shown}")
    weights = {name: torch.from_numpy(x) for name, x in scales.items()} | layers(algorithm.impl.policy)
    few = known.observations[:256]
    assert np.allclose(answers(weights, few), algorithm.predict(few), rtol=1e-3, atol=1e-3), (
        "what is saved is not what was trained"
    )
    (run / "checkpoint").mkdir()
    save_file(weights, run / "checkpoint" / "model.safetensors")
    return run


class Transitions(NamedTuple):
    """M steps whose outcome is known, in raw units."""

    observations: np.ndarray  # (M, S)
    actions: np.ndarray  # (M, A)
    rewards: np.ndarray  # (M,)
    following: np.ndarray  # (M, S), what was seen next; of no meaning where terminal
    terminal: np.ndarray  # (M,) float32, 1 where nothing more can be earned


def transitions(store, episodes, *, ends=False):
    """What a value can be learned from: the steps of these episodes of a store, without those that lead nobody knows where.

    A terminated episode's last step is terminal. A truncated one's leads to its final observation; a log that does not hold
    that leaves the step out. ends: being truncated is an end as well, as where the clock is a part of the task.
    """
    if store.spec.num_actions:
        raise ValueError(
            f"{store.info['name']}: a baseline needs continuous actions, these are one of {store.spec.num_actions}"
        )
    last, after = store.offsets[1:] - 1, np.arange(len(store.rewards)) + 1
    terminal, whole = np.zeros(len(after), np.float32), np.ones(len(after), bool)
    terminal[last], after[last] = store.terminated | ends, last
    following = store.observations[after]
    if store.final_observation is None:
        whole[last] = terminal[last] > 0
    else:
        following[last] = store.final_observation
    rows = np.concatenate([np.arange(*store.offsets[e : e + 2]) for e in episodes])
    rows = rows[whole[rows]]
    if not len(rows):
        raise ValueError(f"{store.info['name']}: expected steps that lead to another, all episodes are of one")
    return Transitions(store.observations[rows], store.actions[rows], store.rewards[rows], following[rows], terminal[rows])


def scaled(store, known, *, edge=0.0):
    """What observations and actions are divided by: mean and deviation (S,), low and high (A,)."""
    if not 0 <= edge < 0.5:
        raise ValueError(f"edge: expected a share from 0 to below 0.5, got {edge}")
    mean, deviation = known.observations.mean(0, dtype=np.float64), known.observations.std(0, dtype=np.float64)
    deviation = np.where(deviation > 1e-6 * np.abs(mean), deviation, 1.0)  # a column that never changes
    low, high = np.quantile(known.actions, [edge, 1 - edge], axis=0) if edge else (store.spec.low, store.spec.high)
    return {
        name: np.array(x, np.float32) for name, x in (("mean", mean), ("deviation", deviation), ("low", low), ("high", high))
    }


class Baseline:
    """A trained baseline as a policy: it answers each observation by itself and is asked for no return."""

    asks, target_return, plan, decode = False, None, 0, "mode"

    def __init__(self, run, facts, device):
        folder = checkpoint.find(run)
        if folder is None:
            raise FileNotFoundError(f"{run}: expected a run with a checkpoint, found none; train it first")
        self.weights = {name: x.to(device) for name, x in checkpoint.content(folder / "model.safetensors").items()}

    def begin(self, tasks, horizon, target_returns=None):
        return self

    def act(self, observations, rewards=None):
        return answers(self.weights, observations)

    def keep(self, rows):
        """Nothing is remembered of any episode."""


def layers(actor):
    """The weights of a library's actor: {"0.weight": ..., "0.bias": ..., ...}"""
    linear = [m for name, m in actor.named_modules() if isinstance(m, torch.nn.Linear) and not name.endswith("logstd")]
    return {f"{i}.{name}": x.detach().cpu() for i, m in enumerate(linear) for name, x in m.named_parameters()}


@torch.inference_mode()
def answers(weights, observations):
    """The actor's most likely actions: observations (N, S) -> (N, A), both in raw units."""
    seen = torch.as_tensor(observations, dtype=torch.float32, device=weights["mean"].device)
    hidden, last = (seen - weights["mean"]) / weights["deviation"], len(weights) // 2 - 3
    for i in range(last + 1):
        hidden = torch.nn.functional.linear(hidden, weights[f"{i}.weight"], weights[f"{i}.bias"])
        hidden = hidden.relu() if i < last else hidden.tanh()
    return (weights["low"] + (weights["high"] - weights["low"]) * (hidden + 1) / 2).cpu().numpy()


def library():
    """d3rlpy, without what importing it says and sets for the whole process."""
    precision = torch.get_float32_matmul_precision()
    try:
        with redirect_stderr(io.StringIO()):  # gym, which it imports, has a word for those who write environments
            import d3rlpy
    except ImportError as error:
        raise ImportError(f"a baseline is trained by d3rlpy: pip install 'decisionllm[baselines]' ({error})") from error
    torch.set_float32_matmul_precision(precision)
    return d3rlpy
