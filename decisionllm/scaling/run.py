"""One run of a study: train, measure on held-out groups, roll out."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from decisionllm import executors
from decisionllm.commands.evaluate import evaluate_runs
from decisionllm.config import flatten
from decisionllm.datasets import sampling
from decisionllm.datasets.store import Store
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.files import read_lines
from decisionllm.policy import loading
from decisionllm.registry import Node, is_none
from decisionllm.runs import directory
from decisionllm.scaling.held_out_loss import measure_losses
from decisionllm.scaling.initial_weights import digest_weights, list_initial_weights
from decisionllm.scaling.launch import launch
from decisionllm.scaling.model_size import count_parameters, flops_per_step
from decisionllm.schema import Json, Report, Spec
from decisionllm.trust import trust_modules


def execute(
    folder: Path,
    job: Json,
    *,
    cache_dir: str,
    device: str,
    keep: bool,
    processes: int,
    threads: int,
    trust: Sequence[str] = (),
) -> Json:
    """Train one run of a study in its folder, measure it on the held-out groups and roll it out.

    Args:
        folder: of the run in the ledger.
        job: everything that the result depends on, see `Grid.job`.
        cache_dir: where data stores are kept.
        device: cpu, cuda or auto.
        keep: keep the checkpoints.
        processes: that train the run, see `launch`.
        threads: of the run; 0: one for each core.
        trust: modules whose code other runs that this one reads may execute.

    Returns:
        The result, JSON values: a row of the report beside the axes of the job.

    Raises:
        ValueError: the data, or the weights that the run begins with, changed since it was planned.
    """
    threads = threads or executors.count_cores()
    torch.set_num_threads(threads)
    options = {"cache_dir": cache_dir, "device": device, "fresh": False, "trust": list(trust)}
    # here, since a worker is another process than the command
    with trust_modules(trust, typed=job):
        return train_and_measure(folder, job, job["train"] | options, keep, processes, threads)


def train_and_measure(
    folder: Path, job: Json, config: Node, keep: bool, processes: int, threads: int
) -> Json:
    """Train and measure a run, see `execute`. config: of the training."""
    began = time.monotonic()
    cache_dir = config["cache_dir"]
    store = prepare_store(config["dataset"], cache_dir, config["transform"])
    reference = prepare_store(job["reference"], cache_dir)
    check_unchanged(job, config, store)
    run = launch(config | {"run": str(folder / "run-0")}, processes, threads)
    policy = loading.load_policy(run, device=config["device"])
    losses = measure_losses(policy, policy.config, reference, job["windows"])
    score, metrics = roll_out(run, job, config["device"])
    lines = read_lines(run / "metrics.jsonl")
    if not keep:
        for path in (*run.glob("checkpoint*"), *run.glob("best")):
            shutil.rmtree(path)
    return {
        **losses,
        **score,
        "metrics": metrics,
        **measure_compute(config, store.spec),
        **describe_data(config["data"], store, reference),
        "train_seconds": lines[-1]["seconds"],
        "all_seconds": time.monotonic() - began,
        "curve": [[line["step"], line["nll"], line.get("held_out_nll")] for line in lines],
        "versions": directory.versions(),
    }


def measure_compute(config: Node, spec: Spec) -> Json:
    """Return the size of a config's model, and the steps, tokens and FLOPs of its training."""
    size = count_parameters(config, spec)
    steps = config["steps"]
    windows_read = steps * config["optim"]["batch_size"]
    return {
        "parameters": size["total"],
        "trained": size["trained"],
        "non_embedding": size["non_embedding"],
        "steps": steps,
        "tokens": windows_read * size["tokens"],
        "flops": steps * flops_per_step(config, size),
    }


def describe_data(data: Node, store: Store, reference: Store) -> Json:
    """Return how much of the data was trained on, and its quality, see `data_quality`.

    Args:
        data: `config.DataOptions` as a dict.
        store: what was trained on.
        reference: the reference data of the study.
    """
    groups = {"held_out": data["held_out"], "seed": data["seed"]}
    reference_episodes, _ = sampling.select(reference, **groups)
    groups["min_return_quantile"] = data["min_return_quantile"]
    all_episodes, _ = sampling.select(store, fraction=1.0, **groups)
    selected, _ = sampling.select(store, fraction=data["fraction"], **groups)
    return {
        "data_steps": int(store.lengths[selected].sum()),
        "data_episodes": len(selected),
        "quality": data_quality(store, all_episodes, reference, reference_episodes),
    }


def check_unchanged(job: Json, config: Node, store: Store) -> None:
    """Raise a ValueError if the data or the weights are not those that the job was planned for."""
    if store.fingerprint != job["data"]:
        raise ValueError(
            f"the data is {store.fingerprint}, this run was planned for {job['data']}: plan again"
        )
    for name, place in list_initial_weights(config).items():
        if digest_weights(place) != job.get(name):
            raise ValueError(f"{place}: other weights than this run was planned for: plan again")


def roll_out(
    run: Path,
    job: Json,
    device: str,
) -> tuple[dict[str, float | None], dict[str, float]]:
    """Evaluate a run in its environment.

    Returns:
        score: with its interval; of a mixture the means over its parts, and of an environment of
            several conditions, such as budgets, those over the conditions; None without
            environment.
        metrics: further measurements of the environment; {} where there are several rows.
    """
    score: dict[str, float | None] = {"score": None, "low": None, "high": None}
    config, info = directory.read(run)
    parts = info["parts"]
    if any(is_none(each["env"]) for each in parts.values() or [config]):
        return score, {}

    place = {"run": str(run), "out": str(run.parent), "device": device}
    rows = read_lines(
        evaluate_runs(job["evaluate"] | place | {"baselines": False, "report": False})
    )
    # the last of each part and condition: an attempt before may have left its own
    headlines = {(row.get("part"), row["protocol"]): row for row in rows if row["headline"]}
    for key in score:
        score[key] = float(np.mean([row[key] for row in headlines.values()]))
    if parts or len(headlines) > 1:
        return score, {}
    (row,) = headlines.values()
    return score, extract_metrics(row)


def extract_metrics(row: Json) -> dict[str, float]:
    """Return the numbers of a row of results that are not columns of every row."""
    columns = {"return", *(field.name for field in fields(Report))}
    metrics = {}
    for key, value in flatten(row).items():
        if isinstance(value, float) and key.partition(".")[0] not in columns:
            metrics[key] = value
    return metrics


def data_quality(
    store: Store,
    episodes: np.ndarray,
    reference: Store,
    reference_episodes: np.ndarray,
) -> float:
    """(mean return of the `episodes` - min) / (reference mean - min), > 0.

    The minimum and the reference mean are of the `reference_episodes`. Where all of
    these have one return: their mean length over that of the `episodes`.
    """
    returns = reference.returns[reference_episodes]
    if not np.ptp(returns):
        return float(reference.lengths[reference_episodes].mean() / store.lengths[episodes].mean())
    least = returns.min()
    quality = (store.returns[episodes].mean() - least) / (returns.mean() - least)
    return max(float(quality), 1e-3)
