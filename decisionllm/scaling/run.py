"""One run of a study: train, measure on held-out groups, roll out; and the cost of a model."""

import fcntl
import hashlib
import io
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch

from decisionllm import executors
from decisionllm.backbones.cut import blocks_of
from decisionllm.commands.evaluate import evaluate
from decisionllm.commands.train import train
from decisionllm.config import flat, train_config
from decisionllm.datasets import sampling, windows
from decisionllm.datasets.batches import read_windows, to_batch
from decisionllm.datasets.store import Store, prepare
from decisionllm.files import read_lines
from decisionllm.models.generalist import Model, members
from decisionllm.models.sequence import SequenceModel
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.registry import Node, is_none
from decisionllm.runs import directory
from decisionllm.runs.model import make_model
from decisionllm.scaling import ledger
from decisionllm.schema import Batch, Json, Report, Spec, Window
from decisionllm.trust import trusting

BATCH = 128  # windows in one forward pass of the held-out loss
FLOPS = (
    "(4 N + 2 trained + 6 layers x width x window tokens) per token of a window, N parameters "
    "that it passes, without embeddings; without the text"
)


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
    threads = threads or executors.cores()
    torch.set_num_threads(threads)
    options = {"cache_dir": cache_dir, "device": device, "fresh": False, "trust": list(trust)}
    # here, since a worker is another process than the command
    with trusting(trust, typed=job):
        return train_and_measure(folder, job, job["train"] | options, keep, processes, threads)


def train_and_measure(
    folder: Path, job: Json, config: Node, keep: bool, processes: int, threads: int
) -> Json:
    """See `execute`. config: of the training."""
    began = time.monotonic()
    cache_dir = config["cache_dir"]
    store = prepare(config["dataset"], cache_dir, config["transform"])
    reference = prepare(job["reference"], cache_dir)
    check_unchanged(job, config, store)
    run = launch(config | {"run": str(folder / "run-0")}, processes, threads)
    policy = loading.load_policy(run, device=config["device"])
    losses = measure(policy, policy.config, reference, job["windows"])
    score, metrics = roll_out(run, job, config["device"])
    lines = read_lines(run / "metrics.jsonl")
    if not keep:
        for path in (*run.glob("checkpoint*"), *run.glob("best")):
            shutil.rmtree(path)
    return {
        **losses,
        **score,
        "metrics": metrics,
        **compute(config, store.spec),
        **data_used(config["data"], store, reference),
        "train_seconds": lines[-1]["seconds"],
        "all_seconds": time.monotonic() - began,
        "curve": [[line["step"], line["nll"], line.get("held_out_nll")] for line in lines],
        "versions": directory.versions(),
    }


def compute(config: Node, spec: Spec) -> Json:
    """The size of a config's model, and the steps, tokens and FLOPs of its training."""
    size = count(config, spec)
    steps = config["steps"]
    windows_read = steps * config["optim"]["batch_size"]
    return {
        "parameters": size["total"],
        "trained": size["trained"],
        "non_embedding": size["non_embedding"],
        "steps": steps,
        "tokens": windows_read * size["tokens"],
        "flops": steps * flops(config, size),
    }


def data_used(data: Node, store: Store, reference: Store) -> Json:
    """How much of the data was trained on, and its quality, see `data_quality`.

    Args:
        data: `config.DataOptions` as a dict.
        store: what was trained on.
        reference: the reference data of the study.
    """
    groups = {"held_out": data["held_out"], "seed": data["seed"]}
    usual, _ = sampling.select(reference, **groups)
    groups["min_return_quantile"] = data["min_return_quantile"]
    whole, _ = sampling.select(store, fraction=1.0, **groups)
    chosen, _ = sampling.select(store, fraction=data["fraction"], **groups)
    return {
        "data_steps": int(store.lengths[chosen].sum()),
        "data_episodes": len(chosen),
        "quality": data_quality(store, whole, reference, usual),
    }


def check_unchanged(job: Json, config: Node, store: Store) -> None:
    """Raise a ValueError if the data or the weights are not those that the job was planned for."""
    if store.fingerprint != job["data"]:
        planned = f"this run was planned for {job['data']}"
        raise ValueError(f"the data is {store.fingerprint}, {planned}: plan again")
    for name, place in starts(config).items():
        if weights_digest(place) != job.get(name):
            raise ValueError(f"{place}: other weights than this run was planned for: plan again")


def roll_out(
    run: Path,
    job: Json,
    device: str,
) -> tuple[dict[str, float | None], dict[str, float]]:
    """Evaluate a run in its environment.

    Returns:
        score: with its interval; of a mixture the means over its parts, and of an environment of
            several conditions, such as budgets, those over the conditions; None without environment.
        metrics: further measurements of the environment; {} where there are several rows.
    """
    score: dict[str, float | None] = {"score": None, "low": None, "high": None}
    config, info = directory.read(run)
    parts = info.get("parts", {})
    if any(is_none(each["env"]) for each in parts.values() or [config]):
        return score, {}

    place = {"run": str(run), "out": str(run.parent), "device": device}
    rows = read_lines(evaluate(job["evaluate"] | place | {"baselines": False, "report": False}))
    # the last of each part and condition: an attempt before may have left its own
    headlines = {(row.get("part"), row["protocol"]): row for row in rows if row["headline"]}
    for key in score:
        score[key] = float(np.mean([row[key] for row in headlines.values()]))
    if parts or len(headlines) > 1:
        return score, {}
    (row,) = headlines.values()
    return score, measurements(row)


def measurements(row: Json) -> dict[str, float]:
    """The numbers of a row of results that are not columns of every row."""
    columns = {"return", *(field.name for field in fields(Report))}
    found = {}
    for key, value in flat(row).items():
        if isinstance(value, float) and key.partition(".")[0] not in columns:
            found[key] = value
    return found


def launch(config: Node, processes: int, threads: int) -> Path:
    """Train in this process, or as torchrun would in several of this machine that share each batch.

    Returns:
        The run directory.
    """
    if processes == 1:
        return train(config)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    options = LaunchConfig(
        1,
        1,
        processes,
        run_id=config["run"],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # the ledger tries again
    )
    train_all = elastic_launch(options, rank)
    try:
        return Path(train_all(config, max(threads // processes, 1))[0])
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        raise RuntimeError(f"process {number} of {processes}: {failure.message}") from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def rank(config: Node, threads: int) -> Path:
    """Train as one of several processes. Returns the run directory."""
    torch.set_num_threads(threads)
    with (
        Path(f"{config['run']}.txt").open("a", buffering=1, encoding="utf-8") as log,
        redirect_stdout(log),
        redirect_stderr(log),
        ledger.print_traceback(),
    ):
        if os.environ["RANK"] == "0":
            fcntl.flock(log, fcntl.LOCK_EX)  # the processes of a killed worker may still be saving
        return train(config)


@torch.no_grad()
def measure(policy: Policy, config: Node, store: Store, count: int) -> dict[str, float]:
    """Losses on windows of the held-out groups, the same windows for every run of a study.

    Args:
        policy: a trained policy.
        config: of its run.
        store: the reference data of the study.
        count: windows, at least.

    Returns:
        held_out: negative log-likelihood, nats an action. floor: the least that the head can have.
        action_error: root mean square difference to the mode of the policy, in the model's units
        (-1 .. 1 a dimension); of discrete actions the share that differs.
    """
    model = policy.model.eval()
    draw, tasks = held_out_windows(config, store)
    reading: Json = {"store": store, "tasks": tasks, "encode": model.backbone.encode}
    sums = np.zeros(3)  # loss, error, actions
    for i in range(math.ceil(count / BATCH)):
        sums += errors(model, to_batch(draw(i), slice(None), device=policy.device, **reading))
    if not sums[2]:
        raise ValueError(f"windows={count}: expected held-out actions to measure, found none")
    mean_loss, mean_error = (sums[:2] / sums[2]).tolist()
    if not store.spec.num_actions:
        mean_error = mean_error**0.5
    return {"held_out": mean_loss, "floor": model.head.loss_floor, "action_error": mean_error}


def held_out_windows(config: Node, store: Store) -> tuple[Callable[[int], Window], Sequence[str]]:
    """number -> windows of the held-out groups, as a run reads them, and the texts of their rows.

    The windows are the same for every training seed.
    """
    own = train_config(config)
    options = replace(own, seed=0, optim=replace(own.optim, batch_size=BATCH))
    data = options.data
    _, episodes = sampling.select(store, held_out=data.held_out, seed=data.seed)
    steps = windows.of_store(store, return_horizon=options.model.return_horizon)
    episodes = episodes[steps.end[episodes] > steps.first[episodes]]
    return read_windows(options, store, steps, episodes)


def errors(model: SequenceModel, batch: Batch) -> list[float]:
    """Sums over the actions of a batch: the loss; the squared difference to the mode, or of
    discrete actions whether they differ; the number of actions.
    """
    hidden = model.read(batch)
    distribution = model.distribution(hidden, batch.action_masks, batch.observations)
    actions = model.normalizer.actions(batch.actions)
    mode = distribution.mode
    error = mode != actions if model.spec.num_actions else (mode - actions).square()
    real = batch.loss_mask
    loss = -distribution.log_prob(actions)[real].sum()
    return [float(loss), float(error.float().mean(-1)[real].sum()), int(real.sum())]


def data_quality(
    store: Store,
    kept: np.ndarray,
    reference: Store,
    usual: np.ndarray,
) -> float:
    """(mean return of the `kept` episodes - min) / (reference mean - min), > 0.

    The minimum and the reference mean are of the `usual` episodes of the reference. Where all of
    these have one return: their mean length over that of the `kept` episodes.
    """
    returns = reference.returns[usual]
    if not np.ptp(returns):
        return float(reference.lengths[usual].mean() / store.lengths[kept].mean())
    least = returns.min()
    quality = (store.returns[kept].mean() - least) / (returns.mean() - least)
    return max(float(quality), 1e-3)


def count(config: Node, spec: Spec) -> dict[str, int]:
    """The size of a config's model.

    Returns:
        Parameters in total, trained and non_embedding; passed and passed_trained: those of
        non_embedding and trained that the tokens of a trajectory pass; layers, width; tokens of a
        window, with those of as many entities as its observations can have.
    """
    model = make_model(train_config(config), spec)
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = trained_of(parameters)
    non_embedding = total - sum(m.weight.numel() for m in embeddings)
    beside = [p for module in beside_trajectories(model) for p in module.parameters()]
    tokenizer = members(model)[""].tokenizer
    return {
        "total": total,
        "trained": trained,
        "non_embedding": non_embedding,
        "passed": non_embedding - sum(p.numel() for p in beside),
        "passed_trained": trained - trained_of(beside),
        "layers": model.backbone.depth,
        "width": model.backbone.width,
        "tokens": config["window"] * (tokenizer.tokens + tokenizer.most_entities),
    }


def trained_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    """How many of these parameters are trained."""
    return sum(p.numel() for p in parameters if p.requires_grad)


def beside_trajectories(model: Model) -> list[torch.nn.Module]:
    """The parts of a model that no token of a trajectory enters: those that read texts, and
    planners, which are fitted before the training.
    """
    backbone = model.backbone
    found: list[torch.nn.Module] = []
    if backbone.text_layers:
        found += blocks_of(backbone.core)[: backbone.text_layers]
        found += [backbone.summary] if backbone.summary is not None else []
    elif isinstance(backbone.features, torch.nn.Module):
        found.append(backbone.features)
    for member in members(model).values():
        if isinstance(member.planner, torch.nn.Module):
            found.append(member.planner)
    return found


def flops(config: Node, size: dict[str, int]) -> int:
    """FLOPs of one training step, see FLOPS.

    Forward 2 N; backward 2 N, and 2 for each trained parameter.
    """
    trained = min(size["passed_trained"], size["passed"])
    attention = 6 * size["layers"] * size["tokens"] * size["width"]
    each = 4 * size["passed"] + 2 * trained + attention
    return int(config["optim"]["batch_size"] * size["tokens"] * each)


def seconds_per_step(config: Node, steps: int) -> float:
    """Seconds of a training step, measured over these steps without output."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        log = {
            "every": steps,
            "save_every": steps,
            "validation_batches": 0,
            "keep_best": "",
            "rollout_every": 0,
            "tracker": "none",
        }
        changes = {"run": folder, "steps": steps, "fresh": True, "log": config["log"] | log}
        run = train(config | changes)
        return float(read_lines(run / "metrics.jsonl")[-1]["seconds"] / steps)


def starts(config: Node) -> dict[str, str]:
    """The weights that a training begins with: {key of their digest in a job: folder or file}.

    An empty place means none.
    """
    return {"backbone": config["backbone"].get("folder", ""), "init_from": config["init_from"]}


def weights_digest(folder: str | None) -> str | None:
    """A digest of weights; None without any.

    Args:
        folder: of a model or a run, with safetensors, or a GGUF file.
    """
    if not folder:
        return None
    place = Path(folder).expanduser()
    files = [place] if place.suffix == ".gguf" else sorted(place.rglob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
