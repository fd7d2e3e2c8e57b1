"""The verb `train`: one loop, read from top to bottom. The same command goes on where an interrupted run stopped."""

import json
import math
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from rich.console import Console

from decisionllm.backbones.build import fingerprint
from decisionllm.datasets import team_windows as teams
from decisionllm.datasets import windows
from decisionllm.datasets.store import prepare
from decisionllm.datasets.windows import collate
from decisionllm.policy import checkpoint
from decisionllm.tokenizers import text

SCHEDULE_FLOOR = 0.05  # of the peak learning rate, at the end


def train(config):
    """Fit a policy to a dataset, as `config` (plain dicts, see configs/train.yaml) says. Returns the run directory."""
    run, console = Path(config["run"]), Console(soft_wrap=True, markup=False, highlight=False)
    options = checkpoint.flat(config)
    if options["data.return_weighting_temperature"] < 0:
        raise ValueError(
            f"data.return_weighting_temperature: expected 0 or more, got {options['data.return_weighting_temperature']}"
        )
    for key in ("window", "steps", "optim.batch_size", "optim.accumulate", "optim.lr", "log.every", "log.save_every"):
        if not options[key] > 0:
            raise ValueError(f"{key}: expected more than 0, got {options[key]}")
    if config["log"]["keep_best"] and not (config["data"]["held_out"] and config["log"]["validation_batches"]):
        raise ValueError(
            "best: needs held-out groups to tell which weights are best; expected held_out and validation_batches above 0"
        )
    AcceleratorState._reset_state(reset_partial_state=True)  # the runs of a sweep share a process, not a precision or device
    accelerator = Accelerator(
        mixed_precision=precision(config), cpu=checkpoint.usable(config["device"]) == "cpu", project_dir=run,
        log_with=None if config["log"]["tracker"] == "none" else config["log"]["tracker"],
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],  # word vectors, where there is no text
    )  # fmt: skip
    main, world, me = accelerator.is_main_process, accelerator.num_processes, accelerator.process_index
    say = console.print if main else lambda *_: None
    parts = world * config["optim"]["accumulate"]  # each batch is dealt out to the processes, and there to micro-batches
    if config["optim"]["batch_size"] % parts:
        raise ValueError(
            f"batch_size: expected a multiple of {world} processes x optim.accumulate={config['optim']['accumulate']}, got {config['optim']['batch_size']}"
        )

    # the data: windows of the chosen episodes
    with accelerator.main_process_first():
        store = prepare(config["dataset"], config["cache_dir"])
    chosen, held_out = windows.select(
        store,
        **{key: config["data"][key] for key in ("fraction", "min_return_quantile", "held_out")},
        seed=config["data"]["seed"],
    )
    steps = windows.of_store(store, return_horizon=config["model"]["return_horizon"])
    chosen, held_out = (e[steps.end[e] > steps.first[e]] for e in (chosen, held_out))
    if not len(chosen):
        raise ValueError(
            f"ahead: expected episodes of at least {config['model']['return_horizon']} steps, the longest has {store.lengths.max()}"
        )
    preferred = (
        windows.return_weights(store.returns, config["data"]["return_weighting_temperature"])
        if config["data"]["return_weighting_temperature"]
        else None
    )
    options = {"T": config["window"] + config["model"]["dynamics"], "batch_size": config["optim"]["batch_size"]}
    draw = partial(windows.Sampler, steps, **options)
    if config["team"]["execution"] != "per_agent":
        options |= {
            "alone": 0.5 * (config["team"]["execution"] == "both"),
            **{key: config["team"][key] for key in ("drop_agents", "order")},
        }
        draw = partial(teams.TeamSampler, steps, store, **options)
    sampler, validator = (
        draw(episodes, seed=seed, weights=weights) if len(episodes) else None
        for episodes, seed, weights in ((chosen, config["seed"], preferred), (held_out, 0, None))
    )
    rows = np.concatenate([np.arange(steps.first[e], steps.end[e]) for e in chosen])
    returns = steps.returns_to_go[rows] if config["model"]["return_horizon"] else store.returns[chosen]

    # the model, and its parameters in named groups
    model = checkpoint.make_model(config, store.spec)
    model.normalizer.fit(store.observations[rows], steps.returns_to_go[rows])
    if config["model"]["dynamics"]:
        pairs = np.concatenate([np.arange(steps.first[e], steps.end[e] - 1) for e in chosen])  # rows whose next is known
        model.normalizer.fit_dynamics(store.observations[pairs + 1] - store.observations[pairs], store.rewards[rows])
    texts = text.encode(model.backbone.tokenizer, getattr(sampler, "tasks", store.tasks))
    optimizer = torch.optim.AdamW(parameter_groups(model, config), betas=(0.9, 0.95), fused=True)

    # a new run is described before its first step; one that was begun must be the same run
    step, elapsed = 0, 0.0
    if checkpoint.find(run) and not config["fresh"]:
        facts = checkpoint.same_run(run, config, store)
        step, elapsed = resume(run, model, optimizer, facts)
    elif main:
        targets = {
            str(q): float(np.quantile(returns, q))
            for q in sorted({0.5, 0.9, 0.99, 1.0, float(config["act"]["target_quantile"])})
        }
        checkpoint.describe(run, config, store, targets=targets, frozen=fingerprint(model.backbone))
    lowest = trim(run / "metrics.jsonl", step) if main else math.inf
    model, wrapped = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(model)
    if config["log"]["tracker"] != "none":
        accelerator.init_trackers("decisionllm")

    size, trained = (
        sum(p.numel() for p in inner.parameters() if p.requires_grad or everything) for everything in (True, False)
    )
    say(f"data: {store.info['name']}, {len(chosen):,} episodes, {len(rows):,} steps; {len(held_out):,} episodes held out")
    say(
        f"model: {size:,} parameters, {trained:,} of them trained; {accelerator.mixed_precision} precision, {world} x {accelerator.device}"
    )
    limit = f"{config['steps']:,} steps" + (f" or {config['minutes']} minutes" if config["minutes"] else "")
    say(
        f"training: {limit} of {config['optim']['batch_size']} windows x {config['window']} steps, from step {step:,}, into {run}"
    )

    def collated(window, rows):
        window = replace(window, **{name: part[rows] for name, part in vars(window).items() if part is not None})
        told = store.task[window.episodes] if window.text_index is None else window.text_index
        return collate(window, texts, told).to(accelerator.device)

    @torch.no_grad()
    def validate():
        model.eval()
        terms = [inner(collated(validator(i), slice(None))) for i in range(config["log"]["validation_batches"])]
        model.train()
        return {f"held_out_{name}": float(np.mean([float(t[name]) for t in terms])) for name in terms[0]}

    stop = []
    handlers = {s: signal.signal(s, lambda *_: stop.append(True)) for s in (signal.SIGINT, signal.SIGTERM)}
    began, said, sums, count, rate = time.monotonic() - elapsed, -1e9, {}, 0, 0.0
    model.train()
    torch.set_flush_denormal(True)  # on a CPU a float32 product with denormal operands takes a hundred times as long
    try:
        while True:
            # how far: in steps or in time, whichever is further; all processes agree
            elapsed = time.monotonic() - began
            progress, stopped = (
                max(step / config["steps"], elapsed / 60 / config["minutes"] if config["minutes"] else 0.0),
                bool(stop),
            )
            if world > 1:
                agreed = accelerator.reduce(
                    torch.tensor([progress, stopped], dtype=torch.float64, device=accelerator.device), "mean"
                )
                progress, stopped = float(agreed[0]), float(agreed[1]) > 0
            over = progress >= 1 or stopped

            if count and (over or step % config["log"]["every"] == 0 or step % config["log"]["save_every"] == 0):
                values = {name: float(accelerator.reduce(total)) / count for name, total in sums.items()}
                values |= validate() if validator and config["log"]["validation_batches"] else {}
                if not all(map(math.isfinite, values.values())) or not all(
                    w.isfinite().all() for w in inner.parameters() if w.requires_grad
                ):
                    kept = (
                        f"the last good checkpoint is kept in {run}" if checkpoint.find(run) else "there is no checkpoint yet"
                    )
                    raise FloatingPointError(
                        f"loss or weights are not finite ({values}) after the {count} steps before step {step}; {kept}. Try a lower lr or clip"
                    )
                values |= {"lr": rate, "seconds": elapsed}
                sums, count = {}, 0
                accelerator.log(values, step=step)
                if main:
                    with (run / "metrics.jsonl").open("a") as file:
                        file.write(json.dumps({"step": step} | values) + "\n")
                    if config["log"]["keep_best"] and values["held_out_nll"] < lowest:
                        lowest = values["held_out_nll"]
                        checkpoint.save(run / "best", inner, {}, {"step": step})
                    if over or console.is_terminal or elapsed - said > 10:
                        said = elapsed
                        shown = "  ".join(
                            f"{name} {value:.4f}" for name, value in values.items() if name not in ("lr", "seconds")
                        )
                        say(f"{run.name}: step {step:>7,}  {100 * min(progress, 1):3.0f} %  {elapsed:6.0f} s  {shown}")
                    if over or step % config["log"]["save_every"] == 0:
                        checkpoint.save(
                            run,
                            inner,
                            trainer_state(inner, optimizer),
                            {"step": step, "elapsed": elapsed, "finished": progress >= 1},
                        )
            if over:
                break

            cosine = (1 + math.cos(math.pi * progress)) / 2
            rate = (
                config["optim"]["lr"]
                * min((step + 1) / max(config["optim"]["warmup"], 1), 1)
                * (SCHEDULE_FLOOR + (1 - SCHEDULE_FLOOR) * cosine)
            )
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            torch.manual_seed((config["seed"] * 1_000_003 + step) * world + me)  # of dropout: nothing to save
            window = sampler(step)
            for part in range(me, parts, world):
                batch = collated(window, slice(part, None, parts) if window.team is None else window.team % parts == part)
                with accelerator.autocast():
                    terms = model(batch)
                share = (
                    batch.loss_mask.sum() * world / window.loss_mask.sum()
                )  # each has the same weight, whoever it is dealt to
                accelerator.backward(sum(terms.values()) * share)
                for name, term in terms.items():
                    sums[name] = sums.get(name, 0.0) + term.detach() * share / world
            if config["optim"]["clip"]:
                accelerator.clip_grad_norm_(model.parameters(), config["optim"]["clip"])
            wrapped.step()
            wrapped.zero_grad(set_to_none=True)
            step, count = step + 1, count + 1
    finally:
        torch.set_flush_denormal(False)
        for s, handler in handlers.items():
            signal.signal(s, handler)
        accelerator.end_training()
    if progress < 1:
        again = "the same command without fresh=true" if config["fresh"] else "the same command"
        raise KeyboardInterrupt(f"stopped at step {step:,} and saved; {again} goes on from there")
    return run


def parameter_groups(model, config):
    """Named groups for the optimiser, each trained parameter in exactly one: what is new or in the backbone, decayed or not."""
    groups = {(new, decay): [] for new in (True, False) for decay in (True, False)}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            groups[not name.startswith("backbone."), weight.ndim > 1].append(weight)
    assert sum(map(len, groups.values())) == sum(p.requires_grad for p in model.parameters()), (
        "a parameter is in no group, or in two"
    )
    return [
        {"name": f"{'new' if new else 'backbone'}{'' if decay else ', no decay'}", "params": weights,
         "scale": 1.0 if new else config["optim"]["lr_backbone"] / config["optim"]["lr"], "weight_decay": config["optim"]["weight_decay"] * decay}
        for (new, decay), weights in groups.items() if weights
    ]  # fmt: skip


def trainer_state(model, optimizer):
    """The optimiser's state as named tensors: {parameter/moment: tensor}."""
    names = {weight: name for name, weight in model.named_parameters()}
    return {
        f"{names[weight]}/{key}": value.detach().cpu()
        for weight, state in optimizer.state.items()
        for key, value in state.items()
    }


def resume(run, model, optimizer, facts):
    """Weights and optimiser as they were: (step, seconds spent)."""
    checkpoint.restore(run, model, facts)
    folder = checkpoint.find(run)
    weights = dict(model.named_parameters())
    for name, value in checkpoint.content(folder / "trainer.safetensors").items():
        weight, _, key = name.rpartition("/")
        optimizer.state[weights[weight]][key] = value
    state = checkpoint.content(folder / "trainer.json")
    return state["step"], state["elapsed"]


def trim(path, step):
    """Forget what a resumed run logged after its last checkpoint: it comes again. A line cut short is one of those.
    Returns the lowest held-out loss of what is left, infinity without any."""
    lines = path.read_text().splitlines() if path.is_file() and step else []
    rows = [(line, json.loads(line)) for line in lines if line.endswith("}")]
    kept = [(line, row) for line, row in rows if row["step"] <= step]
    path.write_text("".join(line + "\n" for line, _ in kept))
    return min((row.get("held_out_nll", math.inf) for _, row in kept), default=math.inf)


def precision(config):
    """`bf16` where the processor multiplies it faster than float32, if the choice is left to us."""
    device = checkpoint.usable(config["device"])
    if config["optim"]["precision"] not in ("auto", "no", "bf16"):
        raise ValueError(f"precision: expected auto, no or bf16, got {config['optim']['precision']!r}")
    if config["optim"]["precision"] != "auto":
        return config["optim"]["precision"]
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    fast = any(getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("avx512_bf16", "amx_tile"))
    return "bf16" if fast else "no"
