"""The verb `baseline`: CQL, IQL or TD3+BC, as d3rlpy trains them, on our data; a run directory that `evaluate` reads like any other."""

import io
import json
import time
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import save_file

from decisionllm.config import flat
from decisionllm.datasets import windows
from decisionllm.datasets.store import prepare
from decisionllm.policy import checkpoint

ALGORITHMS = {"cql": "CQLConfig", "iql": "IQLConfig", "td3bc": "TD3PlusBCConfig"}


def baseline(config):
    """Train config["algorithm"] on config["dataset"] (see configs/baseline.yaml). Returns the run directory."""
    run, console = Path(config["run"]), Console(soft_wrap=True, markup=False, highlight=False)
    for key, choices in (("algorithm", tuple(ALGORITHMS)), ("time_limits", ("bootstrap", "terminal")), ("text", ("none",))):
        if config[key] not in choices:
            raise ValueError(f"{key}: expected {' or '.join(choices)} of a baseline, got {config[key]!r}")
    options = flat(config)
    for key in ("steps", "optim.batch_size", "log.every"):
        if not options[key] > 0:
            raise ValueError(f"{key}: expected more than 0, got {options[key]}")
    if checkpoint.find(run) and not config["fresh"]:
        raise ValueError(f"{run} holds a run: choose another run=..., or fresh=true to begin again")
    d3rlpy, device = library(), checkpoint.usable(config["device"])
    store = prepare(config["dataset"], config["cache_dir"])
    chosen, _ = windows.select(
        store,
        fraction=config["data"]["fraction"],
        min_return_quantile=config["data"]["min_return_quantile"],
        seed=config["data"]["seed"],
    )
    known = transitions(store, chosen, ends=config["time_limits"] == "terminal")
    scales = scaled(store.spec, *known[:2], action_clip_quantile=config["action_clip_quantile"])
    known[1] = np.clip(known[1], scales["low"], scales["high"])
    given = {
        "batch_size": config["optim"]["batch_size"],
        "observation_scaler": d3rlpy.preprocessing.StandardObservationScaler(scales["mean"], scales["deviation"], eps=0.0),
        "action_scaler": d3rlpy.preprocessing.MinMaxActionScaler(scales["low"], scales["high"]),
    }
    try:
        algorithm = getattr(d3rlpy.algos, ALGORITHMS[config["algorithm"]])(**given | config["options"]).create(f"{device}:0")
    except TypeError as error:
        raise ValueError(f"options: {error}") from error
    torch.manual_seed(config["seed"])  # the library draws weights and noise from torch's own generator
    algorithm.create_impl((store.spec.observation_dim,), store.spec.action_dim)
    described = config | {"policy": {"_target_": "decisionllm.baseline.Baseline"}}
    checkpoint.describe(run, described, store, versions=checkpoint.versions() | {"d3rlpy": d3rlpy.__version__})
    console.print(f"data: {store.info['name']}, {len(chosen):,} episodes, {len(known[2]):,} transitions")
    console.print(f"training: {config['steps']:,} steps of {config['optim']['batch_size']} transitions on {device}, into {run}")

    rng, began, said, losses = np.random.default_rng(config["seed"]), time.monotonic(), -1e9, []
    with (run / "losses.jsonl").open("w") as file:
        for step in range(1, config["steps"] + 1):
            rows = rng.integers(len(known[2]), size=config["optim"]["batch_size"])
            o, a, r, following, terminal = (x[rows] for x in known)
            # each is one step of time; of the next action, which is not given, no algorithm here takes notice
            batch = d3rlpy.dataset.TransitionMiniBatch(o, a, r, following, a, terminal, np.ones_like(r), [])
            losses.append(algorithm.update(batch))
            if step % config["log"]["every"] and step < config["steps"]:
                continue
            means = {name: float(np.mean([x[name] for x in losses if name in x])) for name in sorted(set().union(*losses))}
            if not np.isfinite([*means.values()]).all():
                raise FloatingPointError(f"losses are not finite at step {step} ({means}), nothing is saved; try lower rates")
            losses, elapsed = [], time.monotonic() - began
            file.write(json.dumps({"step": step} | means | {"seconds": elapsed}) + "\n")
            if step == config["steps"] or console.is_terminal or elapsed - said > 10:
                said, shown = elapsed, "  ".join(f"{name} {value:.4f}" for name, value in means.items())
                console.print(f"{run.name}: step {step:>7,}  {100 * step / config['steps']:3.0f} %  {elapsed:6.0f} s  {shown}")

    weights = {name: torch.from_numpy(x) for name, x in scales.items()} | layers(algorithm.impl.policy)
    apart = answers(weights, known[0][:99]) - algorithm.predict(known[0][:99])
    assert (np.abs(apart) < 1e-3 * (scales["high"] - scales["low"])).all(), "what is saved does not act as what was trained"
    (run / "checkpoint").mkdir()
    save_file(weights, run / "checkpoint" / "model.safetensors")
    return run


def transitions(store, episodes, *, ends=False):
    """What a value can be learned from: M steps of these episodes of a store, without those that lead nobody knows where.

    -> [observations (M, S), actions (M, A), rewards (M, 1), the following observations (M, S), terminal (M, 1): 1 where nothing
    more can be earned]. A terminated episode's last step is terminal. A truncated one's leads to the final observation; a
    store that has none leaves the step out. ends: to be truncated is an end too, as where the clock is a part of the task.
    """
    if store.spec.num_actions:
        raise ValueError(
            f"{store.info['name']}: a baseline needs continuous actions, these are one of {store.spec.num_actions}"
        )
    last, after = store.offsets[1:] - 1, np.arange(len(store.rewards)) + 1
    terminal, known = np.zeros(len(after), np.float32), np.ones(len(after), bool)
    terminal[last], after[last] = store.terminated | ends, last
    following = store.observations[after]
    if store.final_observation is None:
        known[last] = terminal[last] > 0
    else:
        following[last] = store.final_observation
    rows = np.concatenate([np.arange(*store.offsets[e : e + 2]) for e in episodes])
    rows = rows[known[rows]]
    if not len(rows):
        raise ValueError(
            f"{store.info['name']}: expected steps that lead to others, got {len(episodes)} truncated episodes of one"
        )
    columns = store.observations, store.actions, store.rewards[:, None], following, terminal[:, None]
    return [x[rows] for x in columns]


def scaled(spec, observations, actions, *, action_clip_quantile=0.0):
    """What the actor is built on: mean and deviation of the observations (S,), low and high of the actions (A,), float32."""
    if not 0 <= action_clip_quantile < 0.5:
        raise ValueError(
            f"action_clip_quantile: expected a share of the actions from 0 to less than 0.5, got {action_clip_quantile}"
        )
    mean, deviation = (f(observations, 0, dtype=np.float64) for f in (np.mean, np.std))
    deviation = np.where(deviation > 1e-6 * np.abs(mean), deviation, 1.0)  # a column that never changes stays 0
    low, high = (
        np.quantile(actions, [action_clip_quantile, 1 - action_clip_quantile], axis=0)
        if action_clip_quantile
        else (spec.low, spec.high)
    )
    if np.equal(low, high).any():
        raise ValueError(
            f"action_clip_quantile: expected actions that differ, at action_clip_quantile={action_clip_quantile} all are {low}; take less"
        )
    return {
        name: np.array(x, np.float32) for name, x in (("mean", mean), ("deviation", deviation), ("low", low), ("high", high))
    }


class Baseline:
    """A trained baseline as a policy: it answers each observation by itself, and is asked for no return."""

    return_conditioned, target_return, planning_horizon, decode, execution = False, None, 0, "mode", "per_agent"

    def __init__(self, run, facts, device):
        folder = checkpoint.find(run)
        if folder is None:
            raise FileNotFoundError(f"{run}: expected a run with a checkpoint, found none; train it first")
        self.weights = {name: x.to(device) for name, x in checkpoint.content(folder / "model.safetensors").items()}

    def begin(self, tasks, horizon, target_returns=None, groups=None):
        return self

    def act(self, observations, rewards=None):
        return answers(self.weights, observations)

    def select(self, rows):
        """Nothing is remembered of any episode."""


def layers(actor):
    """What a library's actor computes its mean with: {"0.weight": ..., "0.bias": ..., "1.weight": ...}"""
    linear = [m for name, m in actor.named_modules() if isinstance(m, torch.nn.Linear) and not name.endswith("logstd")]
    return {f"{i}.{name}": x.detach().cpu() for i, m in enumerate(linear) for name, x in m.named_parameters()}


@torch.inference_mode()
def answers(weights, observations):
    """The actor's mean: observations (N, S) -> actions (N, A), raw units. The library is not needed for it."""
    seen = torch.as_tensor(observations, dtype=torch.float32, device=weights["mean"].device)
    hidden, last = (seen - weights["mean"]) / weights["deviation"], sum(name.endswith("weight") for name in weights) - 1
    for i in range(last + 1):
        hidden = torch.nn.functional.linear(hidden, weights[f"{i}.weight"], weights[f"{i}.bias"])
        hidden = hidden.relu() if i < last else hidden.tanh()
    return (weights["low"] + (weights["high"] - weights["low"]) * (hidden + 1) / 2).cpu().numpy()


def library():
    """d3rlpy, without what gym, which it imports, has to say to those who write environments."""
    try:
        with redirect_stderr(io.StringIO()):
            import d3rlpy
    except ImportError as error:
        raise ImportError(f"a baseline is trained by d3rlpy: pip install 'decisionllm[baselines]' ({error})") from error
    return d3rlpy
