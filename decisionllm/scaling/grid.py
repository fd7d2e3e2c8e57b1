"""The runs of a study: its options are checked, and each cell of the grid becomes one job."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from decisionllm.config import UsageError, merged, one_of, settle, train_config
from decisionllm.datasets import windows
from decisionllm.datasets.mixture import same_space
from decisionllm.datasets.store import Store, prepare
from decisionllm.eval.before import check_environments
from decisionllm.scaling import ledger
from decisionllm.scaling.run import FLOPS, count, flops, seconds_per_step, starts, weights_digest

KEYS = ("name", "train", "evaluate", "axes", "seeds", "exclude", "budget", "lr", "windows")
AXES = ("size", "fraction", "quality")
RULES = {  # the keys that each rule reads
    "budget": {"steps": ("steps",), "compute": ("flops",), "converged": ("steps", "doublings", "tolerance")},
    "lr": {"fixed": (), "sweep": ("values",)},
}
NOT_THE_RUNS = ("run", "cache_dir", "device", "fresh")  # keys of a config that a result does not depend on

Job = dict[str, Any]


def check(study: dict[str, Any]) -> dict[str, Any]:
    """The study, if it is complete and its values are possible; the first fault is a ValueError."""
    if missing := [key for key in KEYS if key not in study]:
        raise ValueError(f"study: expected {missing[0]}, found none; configs/study/smoke.yaml has every key")
    axes = study["axes"]
    if unknown := [name for name in axes if name not in AXES]:
        raise ValueError(f"study.axes: expected axes among {', '.join(AXES)}, got {unknown[0]!r}")
    for name, values in {**{axis: axes.get(axis) for axis in AXES}, "seeds": study["seeds"]}.items():
        if not values:
            raise ValueError(f"study: an empty grid, {name} has no values; give it at least one")
    known = {name: as_words(list(values)) for name, values in (*axes.items(), ("seed", study["seeds"]))}
    for rule in study["exclude"]:
        if not isinstance(rule, dict) or not rule or any(set(as_words(v)) - set(known.get(k, [])) for k, v in rule.items()):
            raise ValueError(f"study.exclude: expected axes and values of the grid, got {rule}; the grid has {known}")
    if min(axes["fraction"]) <= 0 or max(axes["fraction"]) > 1:
        raise ValueError(f"study.axes.fraction: expected shares within 0 .. 1, got {axes['fraction']}")
    for part, rules in RULES.items():
        one_of(f"study.{part}.rule", rule := study[part].get("rule"), rules)
        for key in rules[rule]:
            if not (given := study[part].get(key)):
                raise ValueError(f"study.{part}.{key}: rule={rule} needs it, expected a value above 0, got {given}")
    return study


def as_words(values: Any) -> list[str]:
    """One value or several values of an axis, as words."""
    return [f"{v:g}" if isinstance(v, float) else str(v) for v in (values if isinstance(values, list) else [values])]


def train_configs(study: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """{(size, quality): config of `train`} of a study, as the command line composes it."""
    quality, found = study["axes"]["quality"], {}
    mixtures = {f"{q:g}": ([], q) for q in quality} if isinstance(quality, list) else {n: (w, 0.0) for n, w in quality.items()}
    for (size, words), (name, (mixture, quantile)) in product(study["axes"]["size"].items(), mixtures.items()):
        given = [*study["train"], *words, *mixture]
        if followed := next(
            (word for word in given if re.search(r"\$\{(seed|steps|data\.fraction|optim\.lr)\}", str(word))), None
        ):
            raise ValueError(f"study: {followed} would be the same in every run, since options are composed once for each size; "
                             "expected a size for each value")  # fmt: skip
        config = compose("train", [*given, f"name='{size}'", "run=x", "log.tracker=none"])
        if (execution := config["team"]["execution"]) != "per_agent":
            raise ValueError(f"study.train: expected team.execution=per_agent, got {execution}; a study counts single agents")
        config = {key: value for key, value in config.items() if key not in NOT_THE_RUNS}
        found[size, name] = merged(config, {"data": {"min_return_quantile": float(quantile)}})
    return found


def compose(command: str, words: list[Any]) -> dict[str, Any]:
    """The config of a command as its command line composes it."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    line = [str(word) for word in words]
    try:
        config = hydra.compose(command, line, return_hydra_config=True)
        OmegaConf.set_struct(config, False)
        return settle(config, command, config.pop("hydra").runtime.choices, line)
    except (HydraException, OmegaConfBaseException, UsageError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"study: `decisionllm {command} {' '.join(line)}` does not compose: {reason}") from error


def check_data(store: Store, data: dict[str, Any], fraction: float) -> None:
    """A ValueError if no group is held out, the smallest fraction is less than one group, or a quality drops no episode."""
    groups, held_out, quantile = len(np.unique(store.group)), data["held_out"], data["min_return_quantile"]
    train = groups - round(held_out * groups)
    if train == groups:
        raise ValueError(f"data.held_out={held_out} of {groups} groups holds none out: give study.train a larger data.held_out")
    if fraction * train < 1:
        least = f"the least is {1 / train:.3g}, or take more data"
        raise ValueError(f"study.axes.fraction: {fraction:g} of {train} groups is less than one; {least}")
    if quantile and len(windows.select(store, min_return_quantile=quantile)[0]) == len(store.lengths):
        why = f"so many have the return {store.returns.min():g}; take another quality, or mixtures"
        raise ValueError(f"study.axes.quality: {quantile:g} drops no episode, {why}")


class Grid:
    """The jobs of a study. Configs are composed once for each size and quality, stores opened once, models counted once."""

    def __init__(self, study: dict[str, Any], cache_dir: str | Path) -> None:
        self.study = study
        self.budget = {key: study["budget"][key] for key in ("rule", *RULES["budget"][study["budget"]["rule"]])}
        self.rates = study["lr"]["values"] if study["lr"]["rule"] == "sweep" else []
        self.configs, acting = train_configs(study), compose("evaluate", ["run=x", *study["evaluate"]])
        self.evaluate = {key: value for key, value in acting.items() if key not in ("run", "out", "device")}
        self.sizes, self.qualities = (list(dict.fromkeys(column)) for column in zip(*self.configs, strict=True))
        self.fractions = sorted(study["axes"]["fraction"])
        opened, digest = cache(lambda node: prepare(*json.loads(node))), cache(weights_digest)
        self.stores = {
            cell: opened(json.dumps([c["dataset"], str(cache_dir), c["transform"]])) for cell, c in self.configs.items()
        }
        for cell, config in self.configs.items():
            check_data(self.stores[cell], config["data"], self.fractions[0])
            check_environments(train_config(config), {"": self.stores[cell]})
        first = next(iter(self.configs))
        self.references = {  # where held-out losses are measured: the first cell's data, or a cell's own if its space is another one
            cell: self.configs[first if same_space(self.stores[first].spec, store.spec) else cell]["dataset"]
            for cell, store in self.stores.items()
        }
        self.weights = {
            cell: {name: found for name, place in starts(config).items() if (found := digest(place))}
            for cell, config in self.configs.items()
        }
        self.count = cache(lambda *cell: count(self.configs[cell], self.stores[cell].spec))

    def job(self, size: str, quality: str, fraction: float, seed: int, lr: float) -> Job:
        """One run: everything that its result depends on."""
        cell, config = (size, quality), self.configs[size, quality]
        rates = {"lr": lr, "lr_backbone": config["optim"]["lr_backbone"] * lr / config["optim"]["lr"]}
        config = merged(config, {"seed": seed, "data": {"fraction": float(fraction)}, "optim": rates})
        if "flops" in self.budget:
            config["steps"] = max(round(self.budget["flops"] / flops(config, self.count(*cell))), 1)
        else:
            config["steps"] = self.budget["steps"]
        return {
            "axes": {"size": size, "fraction": float(fraction), "mixture": quality, "seed": seed, "lr": lr},
            "train": config, "budget": self.budget, "evaluate": self.evaluate, "reference": self.references[cell],
            "windows": self.study["windows"], "data": self.stores[cell].fingerprint,
        } | self.weights[cell]  # fmt: skip

    def tuning(self) -> list[Job]:
        """The runs that choose the learning rate of each size: on the smallest data, of the first quality and seed."""
        quality, fraction, seed = self.qualities[0], self.fractions[0], self.study["seeds"][0]
        return [self.job(size, quality, fraction, seed, float(lr)) for size, lr in product(self.sizes, self.rates)]

    def tuning_losses(self, out: Path) -> dict[str, dict[float, float]]:
        """{size: {learning rate: held-out loss}} of the tuning runs that are done."""
        losses: dict[str, dict[float, float]] = {size: {} for size in self.sizes}
        for job in self.tuning():
            name, _ = ledger.encode(job)
            if (out / name / "done.json").exists():
                losses[job["axes"]["size"]][job["axes"]["lr"]] = ledger.result(out / name)["held_out"]
        return losses

    def jobs(self, out: Path) -> list[Job]:
        """Every run of the grid, the small ones first, at the learning rate of the least loss; none until the tuning runs are over."""
        rates = {size: self.configs[size, self.qualities[0]]["optim"]["lr"] for size in self.sizes}
        if self.study["lr"]["rule"] == "sweep":
            if not set(ledger.status(out, names(self.tuning())).values()) <= {"done", "failed"}:
                return []
            losses = self.tuning_losses(out)
            if failed := [size for size in self.sizes if not losses[size]]:
                raise ValueError(f"every tuning run of size {failed[0]} failed: see action=status, then action=retry")
            rates = {size: min(each, key=lambda lr: each[lr]) for size, each in losses.items()}
        return [self.job(*cell, rates[cell[0]]) for cell in self.cells()]

    def cells(self) -> list[tuple[str, str, float, int]]:
        """The (size, quality, fraction, seed) of every run: the whole grid without what an entry of `exclude` matches."""
        entries = [{axis: as_words(values) for axis, values in entry.items()} for entry in self.study["exclude"]]

        def excluded(cell: tuple[Any, ...]) -> bool:
            words = dict(zip(("size", "quality", "fraction", "seed"), as_words(list(cell)), strict=True))
            return any(all(words[axis] in values for axis, values in entry.items()) for entry in entries)

        cells = product(self.sizes, self.qualities, self.fractions, self.study["seeds"])
        return [cell for cell in cells if not excluded(cell)]

    def all_jobs(self, out: Path) -> dict[str, Job]:
        """Every run that is known by now, tuning runs first: {name: job}"""
        known = self.tuning() + self.jobs(out)
        return dict(zip(names(known), known, strict=True))


def names(jobs: list[Job]) -> list[str]:
    """The ledger's names of these jobs."""
    return [ledger.encode(job)[0] for job in jobs]


def estimate(grid: Grid, config: dict[str, Any], say: Callable[[str], None]) -> None:
    """Print what a study would take: runs, parameters, tokens, FLOPs, disk, and hours as a few steps of each size predict them."""
    rows, runs = [], Counter(size for size, *_ in grid.cells())
    for size in grid.sizes:
        job = grid.job(size, grid.qualities[0], grid.fractions[-1], grid.study["seeds"][0], 1e-3)
        train, counted = job["train"], grid.count(size, grid.qualities[0])
        each = runs[size] + max(len(grid.rates) - 1, 0)  # one of the tuning runs is in the grid
        steps = train["steps"] * (2 ** (job["budget"].get("doublings", 0) + 1) - 1)  # at the most
        where = {"cache_dir": config["cache_dir"], "device": config["device"]}
        seconds = seconds_per_step(train | where, config["probe"]) if config["probe"] else math.nan
        rows.append({
            "size": size, "parameters": counted["total"], "trained": counted["trained"], "runs": each, "steps a run": steps,
            "tokens": each * steps * train["optim"]["batch_size"] * counted["tokens"], "FLOPs": each * steps * flops(train, counted),
            "hours": each * steps * seconds / 3600, "MB on disk": each * (12 * counted["trained"] * config["keep"] + 60e3) / 1e6,
        })  # fmt: skip
    table = pd.DataFrame(rows)
    total = table.sum(numeric_only=True, skipna=False)
    shown = table if config["probe"] else table.drop(columns="hours")
    say(shown.to_string(index=False, float_format="{:,.2f}".format))
    work = f"{total['runs']:,.0f} runs, {total['tokens']:.2g} tokens, {total['FLOPs']:.2g} FLOPs ({FLOPS})"
    hours = (
        f"{total['hours']:.2f} hours of training by one worker" if config["probe"] else "hours are not estimated with probe=0"
    )
    say(f"{work}; {hours}; {total['MB on disk']:,.0f} MB on disk; rollouts not counted")
