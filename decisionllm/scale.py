"""The verb `scale`: plan a study of model size, data volume and data quality, run what is missing, fit a law, write a report."""

import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from decisionllm.config import one_of
from decisionllm.datasets import windows
from decisionllm.datasets.store import prepare
from decisionllm.datasets.windows import collate
from decisionllm.evaluate import evaluate
from decisionllm.policy import checkpoint
from decisionllm.scaling import executors, ledger
from decisionllm.scaling import report as paper
from decisionllm.tokenizers import bins, text
from decisionllm.train import train

ACTIONS = ("plan", "run", "status", "retry", "report")
AXES = ("size", "fraction", "quality")
RULES = {  # the keys that each rule reads
    "budget": {"steps": ("steps",), "compute": ("flops",), "converged": ("steps", "doublings", "tolerance")},
    "lr": {"fixed": (), "sweep": ("values",)},
}
NOT_THE_RUNS = ("run", "cache_dir", "device", "fresh")  # of a config: where it is made, not what is made
BATCH = 128  # windows at once, where the held-out loss is measured
FLOPS = "(4 N + 2 trained + 6 layers x width x tokens of a window) a token; N: parameters without embeddings, 6 N where all are trained; the text is not counted"


def scale(config):
    """Do config["action"] to config["study"] (plain dicts, see configs/scale.yaml). Returns the path of the report, or of the ledger."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    one_of("action", config["action"], ACTIONS)
    if config["read"]:
        return paper.write(Path(config["read"]).parent, paper.read(config["read"]), say=console.print)
    study, out = check(config["study"]), Path(config["out"])
    begins = config["action"] in ("run", "retry")
    with executors.opened(config) if begins else nullcontext() as executor:  # told first, if it is not there
        grid = Grid(study, config["cache_dir"])
        if config["action"] == "retry":
            again = ledger.retry(out, grid.everything(out))
            console.print(f"{len(again)} failed runs are planned again")
        if executor:
            start, workers, threads = executor
            run = partial(
                execute, **{key: config[key] for key in ("cache_dir", "device", "keep", "processes")}, threads=threads
            )
            for jobs in (grid.tuning(), lambda: grid.jobs(grid.tuned(out))):
                ledger.drive(out, ledger.plan(out, jobs()), run, start, workers, progress=Progress(out, console.print))
    if config["action"] == "plan":
        estimate(grid, config, console.print)
        return out
    jobs = grid.everything(out)
    if config["action"] == "status":
        tell(out, list(jobs), console.print)
        return out
    found = {
        "study": study,
        "versions": checkpoint.versions(),
        "flops": FLOPS,
        "tuned": grid.told(out),
        "runs": collect(out, jobs),
    }
    return paper.write(out, found, say=console.print)


def check(study):
    """A study whose every part is there and can be; anything else is one error."""
    if lacking := [
        key for key in ("name", "train", "evaluate", "axes", "seeds", "exclude", "budget", "lr", "windows") if key not in study
    ]:
        raise ValueError(f"study: expected {lacking[0]}, found none; configs/study/smoke.yaml has one of each")
    axes = study["axes"]
    if unknown := [name for name in axes if name not in AXES]:
        raise ValueError(f"study.axes: no axis {unknown[0]!r}; there are {', '.join(AXES)}")
    for name, values in {**{axis: axes.get(axis) for axis in AXES}, "seeds": study["seeds"]}.items():
        if not values:
            raise ValueError(f"study: an empty grid, {name} has no values; give it at least one")
    there = {name: spelled(list(values)) for name, values in (*axes.items(), ("seed", study["seeds"]))}
    for rule in study["exclude"]:
        if not isinstance(rule, dict) or not rule or any(set(spelled(v)) - set(there.get(k, [])) for k, v in rule.items()):
            raise ValueError(
                f"study.exclude: expected axes and values of the grid, such as {{size: x, seed: 1}}, got {rule}; there is {there}"
            )
    if min(axes["fraction"]) <= 0 or max(axes["fraction"]) > 1:
        raise ValueError(f"study.axes.fraction: expected shares within 0 .. 1, got {axes['fraction']}")
    for part, rules in RULES.items():
        one_of(f"study.{part}.rule", rule := study[part].get("rule"), rules)
        for key in rules[rule]:
            if not study[part].get(key):
                raise ValueError(
                    f"study.{part}.{key}: rule={rule} needs it, expected more than nothing, got {study[part].get(key)}"
                )
    return study


def spelled(values):
    """A value or several of an axis, as a list of words."""
    return [
        f"{value:g}" if isinstance(value, float) else str(value) for value in (values if isinstance(values, list) else [values])
    ]


def configs(study):
    """{(size, quality): config of train} of a study, plain dicts, as a command line would make them."""
    quality, found = study["axes"]["quality"], {}
    mixtures = {f"{q:g}": ([], q) for q in quality} if isinstance(quality, list) else {n: (w, 0.0) for n, w in quality.items()}
    for (size, words), (name, (mixed, share)) in product(study["axes"]["size"].items(), mixtures.items()):
        config = compose("train", [*study["train"], *words, *mixed, f"name='{size}'", "run=x", "log.tracker=none"])
        if config["team"]["execution"] != "per_agent":
            raise ValueError(
                f"study.train: expected team.execution=per_agent, got {config['team']['execution']}; a study counts single agents"
            )
        config = {key: value for key, value in config.items() if key not in NOT_THE_RUNS}
        found[size, name] = merged(config, {"data": {"min_return_quantile": float(share)}})
    return found


class Grid:
    """The runs of a study: configs are composed once a size and quality, data opened once, models counted once."""

    def __init__(self, study, cache_dir):
        self.study, self.cache_dir = study, cache_dir
        self.budget = {key: study["budget"][key] for key in ("rule", *RULES["budget"][study["budget"]["rule"]])}
        self.rates = study["lr"]["values"] if study["lr"]["rule"] == "sweep" else []
        self.configs, self.acting = configs(study), compose("evaluate", ["run=x", *study["evaluate"]])
        self.sizes, self.qualities = (list(dict.fromkeys(column)) for column in zip(*self.configs, strict=True))
        self.fractions, self.stores = sorted(study["axes"]["fraction"]), {}
        self.reference = self.configs[self.sizes[0], self.qualities[0]]["dataset"]
        for config in self.configs.values():
            enough(
                self.store(config["dataset"]),
                config["data"]["held_out"],
                self.fractions[0],
                config["data"]["min_return_quantile"],
            )
        digest = cache(trunk)  # of a folder, which all qualities of a size have in common
        self.trunks = {cell: digest(config["backbone"].get("folder")) for cell, config in self.configs.items()}
        self.data = {cell: self.store(config["dataset"]).fingerprint for cell, config in self.configs.items()}
        self.count = cache(
            lambda size, name: count(self.configs[size, name], self.store(self.configs[size, name]["dataset"]).spec)
        )

    def store(self, dataset):
        key = json.dumps(dataset)
        if key not in self.stores:
            self.stores[key] = prepare(dataset, self.cache_dir)
        return self.stores[key]

    def job(self, size, quality, fraction, seed, lr):
        """What one run is: everything that its result depends on."""
        config = self.configs[size, quality]
        rates = {"lr": lr, "lr_backbone": config["optim"]["lr_backbone"] * lr / config["optim"]["lr"]}
        config = merged(config, {"seed": seed, "data": {"fraction": float(fraction)}, "optim": rates})
        if self.budget["rule"] == "compute":
            config["steps"] = max(round(self.budget["flops"] / flops(config, self.count(size, quality))), 1)
        else:
            config["steps"] = self.budget["steps"]
        return {
            "axes": {"size": size, "fraction": float(fraction), "mixture": quality, "seed": seed, "lr": lr},
            "train": config, "budget": self.budget, "evaluate": {k: v for k, v in self.acting.items() if k not in ("run", "out", "device")},
            "reference": self.reference, "windows": self.study["windows"], "data": self.data[size, quality],
        } | ({"trunk": self.trunks[size, quality]} if self.trunks[size, quality] else {})  # fmt: skip

    def tuning(self):
        """The runs that choose a learning rate a size, as a function to call: on the smallest data, of the first quality and seed."""
        first = self.qualities[0], self.fractions[0], self.study["seeds"][0]
        return lambda: [self.job(size, *first, float(lr)) for size, lr in product(self.sizes, self.rates)]

    def told(self, out):
        """What tuning said: {size: {rate: held-out loss, of those that are done}}"""
        said = {size: {} for size in self.sizes}
        for job in self.tuning()():
            name, _ = ledger.encode(job)
            if (out / name / "done.json").exists():
                said[job["axes"]["size"]][job["axes"]["lr"]] = ledger.result(out / name)["held_out"]
        return said

    def tuned(self, out):
        """{size: learning rate}, None where tuning is not over."""
        if self.study["lr"]["rule"] == "fixed":
            return {size: self.configs[size, self.qualities[0]]["lr"] for size in self.sizes}
        over = set(ledger.status(out, named(self.tuning()())).values()) <= {"done", "failed"}
        said = self.told(out)
        if over and not all(said.values()):
            lacking = next(size for size, losses in said.items() if not losses)
            raise ValueError(
                f"every run that was to tune size {lacking} failed: action=status says why, action=retry tries again"
            )
        return {size: min(losses, key=losses.get) if over else None for size, losses in said.items()}

    def jobs(self, tuned):
        """Every run of the grid, the small ones first."""
        return [self.job(size, *rest, tuned[size]) for size, *rest in self.cells()]

    def cells(self):
        """The (size, quality, fraction, seed) of every run: all of the grid but what a line of `exclude` fits."""
        axes = list(product(self.sizes, self.qualities, self.fractions, self.study["seeds"]))
        lines = [{axis: spelled(values) for axis, values in line.items()} for line in self.study["exclude"]]
        named = [dict(zip(("size", "quality", "fraction", "seed"), spelled(list(cell)), strict=True)) for cell in axes]
        return [cell for cell, name in zip(axes, named, strict=True)
                if not any(all(name[axis] in values for axis, values in line.items()) for line in lines)]  # fmt: skip

    def everything(self, out):
        """Every run that is known by now, those that tune first: {name: job}"""
        tuned = self.tuned(out)
        known = self.tuning()() + (self.jobs(tuned) if None not in tuned.values() else [])
        return dict(zip(named(known), known, strict=True))


def compose(verb, words):
    """The config of a verb as its command line would make it, plain dicts."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(hydra.compose(verb, [str(word) for word in words]), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(
            f"study: `decisionllm {verb} {' '.join(map(str, words))}` does not compose: {str(error).splitlines()[0]}"
        ) from error


def merged(config, changes):
    """A config with these changes, nested dicts merged."""
    nested = {key: merged(config[key], value) for key, value in changes.items() if isinstance(value, dict) and key in config}
    return config | changes | nested


def select(store, data):
    """windows.select with the options of a config's `data`."""
    data = {key: data[key] for key in ("fraction", "min_return_quantile", "held_out", "seed")}
    return windows.select(store, **data)


def enough(store, held_out, fraction, quality):
    """Data that leaves something to hold out, and to train on at the smallest fraction, and of which a quality drops something;
    anything less is an error."""
    groups = len(np.unique(store.group))
    out = round(held_out * groups)
    if not out:
        raise ValueError(
            f"data.held_out={held_out} of {groups} groups holds none out: a study needs some; give study.train data.held_out=..."
        )
    if fraction * (groups - out) < 1:
        raise ValueError(
            f"study.axes.fraction: {fraction:g} of {groups - out} groups is less than one; the least is {1 / (groups - out):.3g}, or take more data"
        )
    if quality and len(windows.select(store, min_return_quantile=quality)[0]) == len(store.lengths):
        raise ValueError(
            f"study.axes.quality: {quality:g} drops no episode, so many have the return {store.returns.min():g}; take another quality, or mixtures"
        )


def trunk(folder):
    """A digest of the weights in a folder that a backbone is read from; none where it is from nowhere or has none."""
    files = sorted(Path(folder).expanduser().rglob("*.safetensors")) if folder else []
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest() if files else None


def named(jobs):
    return [ledger.encode(job)[0] for job in jobs]


def count(config, spec):
    """The parameters of a config's model: {"total", "trained", "non_embedding"}, and {"layers", "width", "tokens"}: of a window."""
    model = checkpoint.make_model(config, spec)
    embedding = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"total": total, "trained": trained, "non_embedding": total - embedding, "layers": model.backbone.config.num_hidden_layers,
            "width": model.backbone.width, "tokens": config["window"] * model.tokenizer.tokens}  # fmt: skip


def flops(config, size):
    """What one training step costs, by FLOPS: forward 2 N, backward 2 N for what comes before and 2 for each trained parameter."""
    trained = min(size["trained"], size["non_embedding"])
    attention = 6 * size["layers"] * size["tokens"] * size["width"]
    return config["optim"]["batch_size"] * size["tokens"] * (4 * size["non_embedding"] + 2 * trained + attention)


def execute(folder, job, *, cache_dir, device, keep, processes, threads):
    """One run, in its folder: train in so many processes, measure on what was held out, roll out. -> its result, for JSON"""
    torch.set_num_threads(threads := threads or executors.cores())
    began, budget, config = (
        time.monotonic(),
        job["budget"],
        job["train"] | {"cache_dir": cache_dir, "device": device, "fresh": False},
    )
    store, compared, best = prepare(config["dataset"], cache_dir), prepare(job["reference"], cache_dir), None
    if store.fingerprint != job["data"]:
        raise ValueError(f"the data is {store.fingerprint}, this run was planned for {job['data']}: plan again")
    if trunk(config["backbone"].get("folder")) != job.get("trunk"):
        raise ValueError(f"{config['backbone']['folder']}: other weights than this run was planned for: plan again")
    for doubling in range(budget.get("doublings", 0) + 1):  # only the rule `converged` has any
        run = torchrun(
            config | {"steps": config["steps"] * 2**doubling, "run": str(folder / f"run-{doubling}")}, processes, threads
        )
        policy, trained, _ = checkpoint.load(run, device=device)
        measured = measure(policy, trained, compared, job["windows"])
        if best is None or measured["held_out"] < best[0]["held_out"]:
            gained, best = math.inf if best is None else best[0]["held_out"] - measured["held_out"], (measured, run, trained)
        else:
            gained = 0.0
        converged = gained < budget["tolerance"] if budget["rule"] == "converged" else None
        if converged:
            break
    measured, run, trained = best
    score = {"score": None, "low": None, "high": None}
    if trained["env"]["_target_"] != "none":
        evaluate(job["evaluate"] | {"run": str(run), "out": str(folder), "device": device, "baselines": False, "report": False})
        rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        score = {key: [row for row in rows if row["headline"]][-1][key] for key in score}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    size = count(config, store.spec)
    chosen, kept = (select(store, config["data"] | {"fraction": f})[0] for f in (config["data"]["fraction"], 1.0))
    usual = windows.select(compared, held_out=config["data"]["held_out"], seed=config["data"]["seed"])[0]
    if not keep:
        for path in (*folder.glob("run-*/checkpoint*"), *folder.glob("run-*/best")):
            shutil.rmtree(path)
    return measured | score | {
        "parameters": size["total"], "trained": size["trained"], "non_embedding": size["non_embedding"], "steps": trained["steps"],
        "data_steps": int(store.lengths[chosen].sum()), "data_episodes": len(chosen), "converged": converged,
        "quality": goodness(store, kept, compared, usual),
        "tokens": trained["steps"] * trained["optim"]["batch_size"] * size["tokens"], "flops": trained["steps"] * flops(trained, size),
        "train_seconds": lines[-1]["seconds"], "all_seconds": time.monotonic() - began,
        "curve": [[line["step"], line["nll"], line.get("held_out_nll")] for line in lines],
    }  # fmt: skip


def torchrun(config, processes, threads):
    """Train in this process, or as torchrun would in several of this machine, which share each batch. -> the run directory"""
    if processes == 1:
        return train(config)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    launch = LaunchConfig(
        1, 1, processes, run_id=config["run"], rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )  # the ledger tries again
    try:
        return elastic_launch(launch, rank)(config, max(threads // processes, 1))[0]
    except ChildFailedError as error:
        at, failure = error.get_first_failure()
        raise RuntimeError(f"process {at} of {processes}: {failure.message}") from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def rank(config, threads):
    """What one of several processes does, which dies with the worker that started it."""
    torch.set_num_threads(threads)
    with Path(f"{config['run']}.txt").open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        if os.environ["RANK"] == "0":
            fcntl.flock(log, fcntl.LOCK_EX)  # those of a worker that was killed may still be saving
        return train(config)


@torch.no_grad()
def measure(policy, config, store, count):
    """On so many windows of groups never trained on, the same for every run of a study: {"held_out", "floor", "action_error"}

    held_out: negative log-likelihood, nats an action; floor: the least that the head can say. action_error: the root mean square
    of the difference to the policy's likeliest action, in the model's units (-1 .. 1 a dimension); of discrete actions, the share that differs.
    """
    model, (_, episodes) = (
        policy.model.eval(),
        windows.select(store, held_out=config["data"]["held_out"], seed=config["data"]["seed"]),
    )
    steps = windows.of_store(store, return_horizon=config["model"]["return_horizon"])
    episodes = episodes[steps.end[episodes] > steps.first[episodes]]
    draw = windows.Sampler(steps, episodes, T=config["window"] + config["model"]["dynamics"], batch_size=BATCH, seed=0)
    texts, sums = text.encode(model.backbone.tokenizer, store.tasks), np.zeros(3)
    for i in range(-(-count // BATCH)):
        window = draw(i)
        batch = collate(window, texts, store.task[window.episodes]).to(policy.device)
        known = batch.until(-1) if config["model"]["dynamics"] else batch
        distribution = model.distribution(model.read(known), known.action_masks, known.observations)
        actions, real = model.normalizer.actions(known.actions), known.loss_mask
        apart = distribution.mode != actions if store.spec.num_actions else (distribution.mode - actions).square()
        each = -distribution.log_prob(actions)[real], apart.float().mean(-1)[real]
        sums += [float(each[0].sum()), float(each[1].sum()), int(real.sum())]
    loss, error = (sums[:2] / sums[2]).tolist()
    return {
        "held_out": loss,
        "floor": floor(model),
        "action_error": error if store.spec.num_actions else error**0.5,
    }


def goodness(store, kept, compared, usual):
    """The mean return of these episodes above the least of the usual ones, as a share of what those have; where those all have one
    return, in how few steps it was had. > 0"""
    returns = compared.returns[usual]
    if not np.ptp(returns):
        return float(compared.lengths[usual].mean() / store.lengths[kept].mean())
    return max(float((store.returns[kept].mean() - returns.min()) / (returns.mean() - returns.min())), 1e-3)


def floor(model):
    """The least negative log-likelihood that a head can reach, nats an action: what it says of an action it is sure of."""
    head, A = model.head, model.spec.action_dim
    if hasattr(head, "num_bins"):
        return A * math.log(bins.width(head.num_bins))
    return A * math.log(head.deviation * math.sqrt(2 * math.pi)) if hasattr(head, "deviation") else 0.0


def collect(out, jobs):
    """Every run of {name: job} as study.json has it: its axes, its state, and what came of it or why nothing did."""
    return [
        {"run": name, "state": state} | jobs[name]["axes"] | (ledger.result(out / name) if state in ("done", "failed") else {})
        for name, state in ledger.status(out, jobs).items()
    ]


def tell(out, names, say):
    """Print how many runs are in which state, and each failed one with the last lines of its error."""
    states = ledger.status(out, names)
    counts = {state: sum(s == state for s in states.values()) for state in ledger.STATES}
    say(f"{out}: {len(names):,} runs; " + ", ".join(f"{n:,} {state}" for state, n in counts.items()))
    for name in (name for name, state in states.items() if state == "failed"):
        blame(out, name, say)


def blame(out, name, say):
    failure = ledger.result(out / name)
    say(f"failed: {out / name}: {failure['reason']}\n" + "\n".join(f"    {line}" for line in failure["lines"][-4:]))


class Progress:
    """Says how far a study is: each failed run at once, the counts when they changed and ten seconds passed."""

    def __init__(self, out, say):
        self.out, self.say, self.failed, self.said, self.last = out, say, None, -1e9, None

    def __call__(self, states):
        failed = {name for name, state in states.items() if state == "failed"}
        for name in sorted(failed - (self.failed or set())):
            blame(self.out, name, self.say)
        counts = {state: sum(s == state for s in states.values()) for state in ledger.STATES}
        over = counts["done"] + counts["failed"] == len(states)
        if states and counts != self.last and (over or time.monotonic() - self.said > 10):
            self.say(f"{self.out.name}: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n))
            self.said, self.last = time.monotonic(), counts
        self.failed = failed


def estimate(grid, config, say):
    """Print what a study would take: runs, parameters, tokens, FLOPs, hours by a few steps of each size, and disk."""
    say(
        f"{'size':>10s} {'parameters':>12s} {'trained':>12s} {'runs':>6s} {'steps a run':>12s} {'tokens':>9s} {'FLOPs':>9s} {'hours':>8s} {'disk':>9s}"
    )
    total = np.zeros(5)
    each = Counter(size for size, *_ in grid.cells())
    for size in grid.sizes:
        job = grid.job(size, grid.qualities[0], grid.fractions[-1], grid.study["seeds"][0], 1e-3)
        counted, runs = (
            grid.count(size, grid.qualities[0]),
            each[size] + max(len(grid.rates) - 1, 0),
        )  # one of those that tune is in the grid
        steps = job["train"]["steps"] * (2 ** (job["budget"].get("doublings", 0) + 1) - 1)  # at the most
        tokens, work = (
            runs * steps * job["train"]["batch_size"] * counted["tokens"],
            runs * steps * flops(job["train"], counted),
        )
        hours = runs * steps * probe(job["train"], config) / 3600 if config["probe"] else math.nan
        disk = runs * (12 * counted["trained"] * config["keep"] + 60e3)
        total += [runs, tokens, work, hours, disk]
        say(
            f"{size:>10s} {counted['total']:12,} {counted['trained']:12,} {runs:6,} {steps:12,} {tokens:9.2g} {work:9.2g} {hours:8.2f} {disk / 1e6:6,.0f} MB"
        )
    say(
        f"{total[0]:,.0f} runs, {total[1]:.2g} tokens, {total[2]:.2g} FLOPs ({FLOPS}); {total[3]:.2f} hours of one worker's training, "
        f"roll-outs not counted; {total[4] / 1e6:,.0f} MB on disk"
    )


def probe(train_config, config):
    """Seconds a step, by a few steps in a folder that goes again. Training prints nothing meanwhile."""
    import io

    steps = config["probe"]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        log = {"every": steps, "save_every": steps, "validation_batches": 0, "keep_best": False, "tracker": "none"}
        where = {"run": folder, "cache_dir": config["cache_dir"], "device": config["device"]}
        run = train(merged(train_config, {"steps": steps, "fresh": True, "log": log} | where))
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["seconds"] / steps
