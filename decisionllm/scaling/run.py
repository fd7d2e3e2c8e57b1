"""One run of a study: train, measure on held-out groups, roll out; and what a model of this size costs."""

import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decisionllm.config import flat
from decisionllm.datasets import windows
from decisionllm.datasets.batches import to_batch, wordings
from decisionllm.datasets.store import Store, prepare
from decisionllm.evaluate import evaluate
from decisionllm.policy import checkpoint
from decisionllm.policy.policy import Policy
from decisionllm.scaling import executors
from decisionllm.schema import Report, Spec
from decisionllm.train import train

BATCH = 128  # windows in one forward pass of the held-out loss
FLOPS = "(4 N + 2 trained + 6 layers x width x window tokens) per token of a window, N parameters without embeddings; without the text"


def execute(
    folder: Path, job: dict[str, Any], *, cache_dir: str, device: str, keep: bool, processes: int, threads: int
) -> dict[str, Any]:
    """Train one run of a study in its folder, measure it on the held-out groups and roll it out.

    Args:
        folder: of the run in the ledger.
        job: everything that the result depends on, see `Grid.job`.
        cache_dir: where data stores are kept.
        device: cpu, cuda or auto.
        keep: keep the checkpoints.
        processes: that train the run, see `launch`.
        threads: of the run; 0: one for each core.

    Returns:
        The result, JSON values: a row of the report beside the axes of the job.

    Raises:
        ValueError: the data, or the weights that the run begins with, have changed since it was planned.
    """
    threads = threads or executors.cores()
    torch.set_num_threads(threads)
    began, budget, best = time.monotonic(), job["budget"], None
    config = job["train"] | {"cache_dir": cache_dir, "device": device, "fresh": False}
    store, reference = prepare(config["dataset"], cache_dir, config["transform"]), prepare(job["reference"], cache_dir)
    if store.fingerprint != job["data"]:
        raise ValueError(f"the data is {store.fingerprint}, this run was planned for {job['data']}: plan again")
    if changed := [place for name, place in starts(config).items() if weights_digest(place) != job.get(name)]:
        raise ValueError(f"{changed[0]}: other weights than this run was planned for: plan again")
    for doubling in range(budget.get("doublings", 0) + 1):  # only rule=converged has doublings
        steps = config["steps"] * 2**doubling
        run = launch(config | {"steps": steps, "run": str(folder / f"run-{doubling}")}, processes, threads)
        policy, trained, _ = checkpoint.load(run, device=device)
        measured = measure(policy, trained, reference, job["windows"])
        gained = math.inf if best is None else best[0]["held_out"] - measured["held_out"]
        if best is None or gained > 0:
            best = measured, run, trained
        converged = gained < budget["tolerance"] if budget["rule"] == "converged" else None
        if converged:
            break
    assert best is not None
    measured, run, trained = best
    metrics: dict[str, float] = {}
    score: dict[str, float | None] = {"score": None, "low": None, "high": None}
    parts = checkpoint.read(run)[1].get("parts", {})
    if all(each["env"]["_target_"] != "none" for each in parts.values() or [trained]):
        where = {"run": str(run), "out": str(folder), "device": device, "baselines": False, "report": False}
        rows = [json.loads(line) for line in evaluate(job["evaluate"] | where).read_text().splitlines()]
        last = {row.get("part"): row for row in rows if row["headline"]}.values()  # of each part of a mixture
        score = {key: float(np.mean([row[key] for row in last])) for key in score}
        if not parts:  # what else the env measures, such as the share of wordings that are understood
            further, known = flat(next(iter(last))), {"return", *(f.name for f in fields(Report))}
            metrics = {key: x for key, x in further.items() if isinstance(x, float) and key.partition(".")[0] not in known}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if not keep:
        for path in (*folder.glob("run-*/checkpoint*"), *folder.glob("run-*/best")):
            shutil.rmtree(path)
    size, data = count(config, store.spec), {key: config["data"][key] for key in ("min_return_quantile", "held_out", "seed")}
    chosen, kept = (windows.select(store, fraction=f, **data)[0] for f in (config["data"]["fraction"], 1.0))
    usual = windows.select(reference, held_out=data["held_out"], seed=data["seed"])[0]
    return measured | score | {
        "metrics": metrics, "parameters": size["total"], "trained": size["trained"], "non_embedding": size["non_embedding"], "steps": trained["steps"],
        "data_steps": int(store.lengths[chosen].sum()), "data_episodes": len(chosen), "converged": converged,
        "quality": data_quality(store, kept, reference, usual),
        "tokens": trained["steps"] * trained["optim"]["batch_size"] * size["tokens"], "flops": trained["steps"] * flops(trained, size),
        "train_seconds": lines[-1]["seconds"], "all_seconds": time.monotonic() - began,
        "curve": [[line["step"], line["nll"], line.get("held_out_nll")] for line in lines],
    }  # fmt: skip


def launch(config: dict[str, Any], processes: int, threads: int) -> Path:
    """Train in this process, or as torchrun would in several of this machine, which share each batch. Returns the run directory."""
    if processes == 1:
        return train(config)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    options = LaunchConfig(1, 1, processes, run_id=config["run"], rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    options.max_restarts = 0  # the ledger tries again
    try:
        return Path(elastic_launch(options, rank)(config, max(threads // processes, 1))[0])
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        raise RuntimeError(f"process {number} of {processes}: {failure.message}") from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def rank(config: dict[str, Any], threads: int) -> Path:
    """Train as one of several processes; it ends with the worker that started it. Returns the run directory."""
    torch.set_num_threads(threads)
    with Path(f"{config['run']}.txt").open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        if os.environ["RANK"] == "0":
            fcntl.flock(log, fcntl.LOCK_EX)  # the processes of a killed worker may still be saving
        return train(config)


@torch.no_grad()
def measure(policy: Policy, config: dict[str, Any], store: Store, count: int) -> dict[str, float]:
    """Losses on windows of the held-out groups, the same windows for every run of a study.

    Args:
        policy: a trained policy.
        config: of its run.
        store: the reference data of the study.
        count: windows, at least.

    Returns:
        held_out: negative log-likelihood, nats an action. floor: the least that the head can have. action_error: root mean
        square difference to the mode of the policy, in the model's units (-1 .. 1 a dimension); of discrete actions the share
        that differs.
    """
    model, data = policy.model.eval(), config["data"]
    _, episodes = windows.select(store, held_out=data["held_out"], seed=data["seed"])
    steps = windows.of_store(store, return_horizon=config["model"]["return_horizon"])
    episodes = episodes[steps.end[episodes] > steps.first[episodes]]
    sampler = windows.sampler(data.get("rows_per_text", 1), store.task)
    draw: Any = sampler(steps, episodes, T=config["window"], batch_size=BATCH, seed=0)
    tasks: Sequence[str] = store.tasks
    sums = np.zeros(3)
    if words := wordings(store, config.get("text_wordings", 0)):
        tasks, draw = words, words.sampler(draw, task=store.task, seed=0, texts=draw.texts)
    for i in range(-(-count // BATCH)):
        batch = to_batch(draw(i), slice(None), store=store, tasks=tasks, encode=model.backbone.encode, device=policy.device)
        distribution = model.distribution(model.read(batch), batch.action_masks, batch.observations)
        actions, real = model.normalizer.actions(batch.actions), batch.loss_mask
        difference = distribution.mode != actions if store.spec.num_actions else (distribution.mode - actions).square()
        each = -distribution.log_prob(actions)[real], difference.float().mean(-1)[real]
        sums += [float(each[0].sum()), float(each[1].sum()), int(real.sum())]
    loss, error = (sums[:2] / sums[2]).tolist()
    return {"held_out": loss, "floor": model.head.loss_floor, "action_error": error if store.spec.num_actions else error**0.5}


def data_quality(store: Store, kept: np.ndarray, reference: Store, usual: np.ndarray) -> float:
    """(mean return of the `kept` episodes - min) / (reference mean - min), of the `usual` episodes of the reference; > 0.

    Where all of these have one return: their mean length over that of the `kept` episodes.
    """
    returns = reference.returns[usual]
    if not np.ptp(returns):
        return float(reference.lengths[usual].mean() / store.lengths[kept].mean())
    return max(float((store.returns[kept].mean() - returns.min()) / (returns.mean() - returns.min())), 1e-3)


def count(config: dict[str, Any], spec: Spec) -> dict[str, int]:
    """The size of a config's model: parameters in total, trained and non_embedding; layers, width; tokens of a window."""
    model = checkpoint.make_model(config, spec)
    embedding = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"total": total, "trained": trained, "non_embedding": total - embedding, "layers": model.backbone.depth,
            "width": model.backbone.width, "tokens": config["window"] * model.tokenizer.tokens}  # fmt: skip


def flops(config: dict[str, Any], size: dict[str, int]) -> int:
    """FLOPs of one training step, by FLOPS: forward 2 N; backward 2 N, and 2 for each trained parameter."""
    trained = min(size["trained"], size["non_embedding"])
    attention = 6 * size["layers"] * size["tokens"] * size["width"]
    return int(config["optim"]["batch_size"] * size["tokens"] * (4 * size["non_embedding"] + 2 * trained + attention))


def seconds_per_step(config: dict[str, Any], steps: int) -> float:
    """Seconds of a training step, measured over these steps in a temporary folder, without output."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        log = {"every": steps, "save_every": steps, "validation_batches": 0, "keep_best": False, "tracker": "none"}
        run = train(config | {"run": folder, "steps": steps, "fresh": True, "log": config["log"] | log})
        return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["seconds"] / steps)


def starts(config: dict[str, Any]) -> dict[str, str]:
    """The folders or files of the weights that a training begins with, by the key of their digest in a job; empty: none."""
    return {"backbone": config["backbone"].get("folder", ""), "init_from": config["init_from"]}


def weights_digest(folder: str | None) -> str | None:
    """A digest of the safetensors in the folder of a model or a run, or of a GGUF file; None without weights."""
    place = Path(folder or "").expanduser()
    files = [place] if place.suffix == ".gguf" else sorted(place.rglob("*.safetensors")) if folder else []
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest() if files else None
