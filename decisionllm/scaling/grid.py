"""The runs of a study: its options are checked, and each cell of the grid becomes one job."""

import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from decisionllm.checks import one_of
from decisionllm.command_line import UsageError, checked_options
from decisionllm.config import merged, train_config
from decisionllm.datasets import sampling
from decisionllm.datasets.mixture import same_space
from decisionllm.datasets.store import Store, prepare
from decisionllm.eval.before import check_environments
from decisionllm.registry import Node
from decisionllm.scaling import ledger
from decisionllm.scaling.run import FLOPS, count, flops, seconds_per_step, starts, weights_digest
from decisionllm.schema import Json

KEYS = ("name", "train", "evaluate", "axes", "seeds", "exclude", "budget", "lr", "windows")
AXES = ("size", "fraction", "quality")
RULES: dict[str, dict[str, tuple[str, ...]]] = {  # the keys that each rule reads
    "budget": {"steps": ("steps",), "compute": ("flops",)},
    "lr": {"fixed": (), "sweep": ("values",)},
}
TINY = sys.float_info.min  # the least number above 0
MOST = sys.float_info.max  # all but infinity
FOLLOWS = re.compile(r"\$\{(seed|steps|data\.fraction|optim\.lr)\}")  # options that the grid sets
# the same, and what of a study says their values
SET_BY = {"seed": "study.seeds", "steps": "study.budget", "data.fraction": "study.axes.fraction"}
# keys of a config that a result does not depend on
NOT_THE_RUNS = (
    "run",
    "cache_dir",
    "device",
    "fresh",
    "trust",
)

Job = Json
Rate = TypeVar("Rate", str, float)  # a learning rate, in a JSON file as text
Cell = tuple[str, str]  # size and quality


def check(study: Node) -> Node:
    """The study, if it is complete and its values are possible; the first fault is a ValueError."""
    for key in KEYS:
        if key not in study:
            example = "configs/study/smoke.yaml has every key"
            raise ValueError(f"study: expected {key}, found none; {example}")
    check_axes(study["axes"], study["seeds"])
    known = {name: as_words(list(values)) for name, values in study["axes"].items()}
    known["seed"] = as_words(list(study["seeds"]))
    for entry in study["exclude"]:
        if not is_of_grid(entry, known):
            wanted = "axes and values of the grid"
            raise ValueError(f"study.exclude: expected {wanted}, got {entry}; the grid has {known}")
    for part in RULES:
        check_rule(part, study[part])
    if not is_number(study["windows"], TINY, whole=True):
        wanted = "a whole number above 0"
        raise ValueError(f"study.windows: expected {wanted}, got {study['windows']}")
    return study


def check_axes(axes: Node, seeds: list[int]) -> None:
    """Raise a ValueError if an axis is unknown, has no values, or values that cannot be."""
    for name in axes:
        if name not in AXES:
            wanted = f"axes among {', '.join(AXES)}"
            raise ValueError(f"study.axes: expected {wanted}, got {name!r}")
    given = {**axes, "seeds": seeds}
    for name in (*AXES, "seeds"):
        if not given.get(name):
            raise ValueError(f"study: an empty grid, {name} has no values; give it at least one")
    shares = "a list of shares above 0, at most 1"
    check_numbers("study.axes.fraction", axes["fraction"], shares, TINY, 1)
    if not isinstance(axes["quality"], dict):
        quantiles = "a list of quantiles within 0 .. 1, or {name: [dataset options]}"
        check_numbers("study.axes.quality", axes["quality"], quantiles, 0, 1)
    check_numbers("study.seeds", seeds, "a list of whole numbers, 0 or more", 0, whole=True)


def check_numbers(
    name: str, given: object, wanted: str, low: float, high: float = MOST, *, whole: bool = False
) -> None:
    """Raise a ValueError unless an option is a list of numbers within low .. high.

    wanted: such a list, in words.
    """
    numbers = given if isinstance(given, list) else []
    if not numbers or not all(is_number(each, low, high, whole=whole) for each in numbers):
        raise ValueError(f"{name}: expected {wanted}, got {given}")


def is_number(given: object, low: float, high: float = MOST, *, whole: bool = False) -> bool:
    """Whether a value of a study is a number within low .. high, or a whole one."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return low <= given <= high and not (whole and isinstance(given, float))


def is_of_grid(entry: object, known: dict[str, list[str]]) -> bool:
    """Whether an entry of `exclude` names axes of the grid and their values, `known` as words."""
    if not isinstance(entry, dict) or not entry:
        return False
    return all(set(as_words(values)) <= {*known.get(axis, [])} for axis, values in entry.items())


def check_rule(part: str, options: Node) -> None:
    """Raise a ValueError if a rule of the study is unknown or lacks a value that it reads."""
    rule: str = options.get("rule", "")
    one_of(f"study.{part}.rule", rule, RULES[part])
    for key in RULES[part][rule]:
        given = options.get(key)
        if key == "values":
            check_numbers(f"study.{part}.{key}", given, "a list of rates above 0", TINY)
        elif not is_number(given, TINY, whole=key == "steps"):
            kind = "a whole number" if key == "steps" else "a number"
            wanted = f"rule={rule} needs it, expected {kind} above 0"
            raise ValueError(f"study.{part}.{key}: {wanted}, got {given}")


def as_words(values: object) -> list[str]:
    """One value or several values of an axis, as words."""
    if not isinstance(values, list):
        values = [values]
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in values]


def train_configs(study: Node) -> dict[Cell, Node]:
    """{(size, quality): config of `train`} of a study, as the command line composes it."""
    found = {}
    sizes = study["axes"]["size"].items()
    for (size, words), quality in product(sizes, qualities(study["axes"]["quality"])):
        name, mixture, quantile = quality
        given = [*study["train"], *words, *mixture]
        for word in given:
            if FOLLOWS.search(str(word)):
                raise ValueError(
                    f"study: {word} would be the same in every run, since options are composed "
                    "once for each size; expected a size for each value"
                )
        refuse_what_is_set(given, SET_BY)
        refuse_what_is_set(mixture, SET_BY | {"optim.lr": "study.lr, or each size,"})
        config = compose("train", [*given, f"name='{size}'", "run=x", "log.tracker=none"])
        execution = config["team"]["execution"]
        if execution != "per_agent":
            wanted = "team.execution=per_agent"
            reason = "a study counts single agents"
            raise ValueError(f"study.train: expected {wanted}, got {execution}; {reason}")
        config = {key: value for key, value in config.items() if key not in NOT_THE_RUNS}
        if quantile is not None:
            config = merged(config, {"data": {"min_return_quantile": quantile}})
        found[size, name] = config
    return found


def refuse_what_is_set(words: Iterable[object], set_by: Mapping[str, str]) -> None:
    """Raise a ValueError for a word of `train` whose option the grid sets in each run.

    set_by: what of a study says the values of an option.
    """
    for word in words:
        key = str(word).lstrip("+").partition("=")[0]
        if key in set_by:
            raise ValueError(f"study: {word} would have no effect; {set_by[key]} says {key}")


def qualities(
    given: list[float] | dict[str, list[str]],
) -> list[tuple[str, list[str], float | None]]:
    """(name, words of `train`, least quantile of returns) of each quality: a quantile, or words,
    which may name one.
    """
    if isinstance(given, list):
        return [(f"{quantile:g}", [], float(quantile)) for quantile in given]
    return [(name, words, None) for name, words in given.items()]


def compose(command: str, words: Iterable[object]) -> Node:
    """The config of a command as its command line composes it."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    line = [str(word) for word in words]
    try:
        config = hydra.compose(command, line, return_hydra_config=True)
        OmegaConf.set_struct(config, False)
        return checked_options(config, command, config.pop("hydra").runtime.choices, line)
    except (HydraException, OmegaConfBaseException, UsageError) as error:
        reason = str(error).splitlines()[0]
        what = f"`decisionllm {command} {' '.join(line)}` does not compose"
        raise ValueError(f"study: {what}: {reason}") from error


def check_data(store: Store, data: Node, fraction: float) -> None:
    """Raise a ValueError if the data is too little for the study.

    No group is held out, the smallest fraction is less than one group, or a quality drops no
    episode.
    """
    groups = len(np.unique(store.group))
    held_out = data["held_out"]
    train = groups - round(held_out * groups)
    if train == groups:
        none = f"data.held_out={held_out} of {groups} groups holds none out"
        raise ValueError(f"{none}: give study.train a larger data.held_out")
    if fraction * train < 1:
        less = f"{fraction:g} of {train} groups is less than one"
        least = f"the least is {1 / train:.3g}, or take more data"
        raise ValueError(f"study.axes.fraction: {less}; {least}")
    quantile = data["min_return_quantile"]
    if quantile and not drops_episodes(store, quantile):
        why = f"so many have the return {store.returns.min():g}; take another quality, or mixtures"
        raise ValueError(f"study.axes.quality: {quantile:g} drops no episode, {why}")


def check_held_out(cell: Cell, store: Store, reference: Store, data: Node, fraction: float) -> None:
    """Raise a ValueError if a cell trains on episodes that its loss is measured on.

    Args:
        cell: its size and quality.
        store: the data of the cell.
        reference: the data whose held-out episodes are measured.
        data: options of the cell.
        fraction: the largest of the study.
    """
    if store.path == reference.path:
        return
    groups = {"held_out": data["held_out"], "seed": data["seed"]}
    usual, held_out = sampling.select(reference, **groups)
    # an episode that a log has twice may be on both sides whatever is chosen
    measured = episode_digests(reference, held_out) - episode_digests(reference, usual)
    least = data["min_return_quantile"]
    chosen, _ = sampling.select(store, fraction=fraction, min_return_quantile=least, **groups)
    leaked = len(measured & episode_digests(store, chosen))
    if leaked:
        size, quality = cell
        what = f"size {size} with quality {quality} trains on {leaked} of the {len(measured)}"
        remedy = "give data that share no episode, or all of them from one log by a quantile"
        raise ValueError(f"study.axes: {what} episodes that its loss is measured on; {remedy}")


def episode_digests(store: Store, episodes: np.ndarray) -> set[bytes]:
    """Digests of the observations and actions of these episodes."""
    found = set()
    for e in episodes:
        rows = slice(store.offsets[e], store.offsets[e + 1])
        digest = hashlib.blake2b(store.observations[rows].tobytes(), digest_size=16)
        digest.update(store.actions[rows].tobytes())
        found.add(digest.digest())
    return found


def drops_episodes(store: Store, quantile: float) -> bool:
    """Whether a least quantile of the returns leaves out any episode."""
    kept, _ = sampling.select(store, min_return_quantile=quantile)
    return len(kept) < len(store.lengths)


class Grid:
    """The jobs of a study.

    Configs are composed once for each size and quality, stores opened once, models counted once.
    """

    def __init__(self, study: Node, cache_dir: str | Path) -> None:
        self.study = study
        budget = study["budget"]
        self.budget = {key: budget[key] for key in ("rule", *RULES["budget"][budget["rule"]])}
        self.rates = study["lr"]["values"] if study["lr"]["rule"] == "sweep" else []
        self.configs = train_configs(study)
        acting = compose("evaluate", ["run=x", *study["evaluate"]])
        for key in ("run", "out", "device"):
            del acting[key]
        self.evaluate = acting
        sizes, qualities = zip(*self.configs, strict=True)
        self.sizes = list(dict.fromkeys(sizes))
        self.qualities = list(dict.fromkeys(qualities))
        self.fractions = sorted(study["axes"]["fraction"])
        if not self.cells():
            raise ValueError("study.exclude: it leaves no run of the grid; exclude less")
        self.stores = open_stores(self.configs, cache_dir, self.fractions[0])
        for cell, config in self.configs.items():
            reference = self.stores[self.first_like(cell)]
            check_held_out(cell, self.stores[cell], reference, config["data"], self.fractions[-1])
        self.weights = weights(self.configs)
        self.count = cache(lambda *cell: count(self.configs[cell], self.stores[cell].spec))

    def reference(self, cell: Cell) -> Node:
        """The data that held-out losses of a cell are measured on: those of the first cell of its
        space, in the texts that the cell itself is trained on.
        """
        found: Node = dict(self.configs[self.first_like(cell)]["dataset"])
        own = self.configs[cell]["dataset"]
        if "text" in found and "text" in own:
            found["text"] = own["text"]
        return found

    def first_like(self, cell: Cell) -> Cell:
        """The first cell whose observations and actions have the space of this one."""
        spec = self.stores[cell].spec
        return next(other for other, store in self.stores.items() if same_space(store.spec, spec))

    def job(self, size: str, quality: str, fraction: float, seed: int, lr: float) -> Job:
        """One run: everything that its result depends on."""
        cell = (size, quality)
        config = self.configs[cell]
        share = config["optim"]["lr_backbone"] * lr / config["optim"]["lr"]
        changes = {
            "seed": seed,
            "data": {"fraction": float(fraction)},
            "optim": {"lr": lr, "lr_backbone": share},
        }
        config = merged(config, changes)
        if "flops" in self.budget:
            steps = self.budget["flops"] / flops(config, self.count(*cell))
            config["steps"] = max(round(steps), 1)
        else:
            config["steps"] = self.budget["steps"]
        axes = {
            "size": size,
            "fraction": float(fraction),
            "mixture": quality,
            "seed": seed,
            "lr": lr,
        }
        return {
            "axes": axes,
            "train": config,
            "budget": self.budget,
            "evaluate": self.evaluate,
            "reference": self.reference(cell),
            "windows": self.study["windows"],
            "data": self.stores[cell].fingerprint,
            **self.weights[cell],
        }

    def tuning(self) -> list[Job]:
        """The runs that choose the learning rate of each size.

        On the smallest data, of the first quality and seed.
        """
        cell = (self.qualities[0], self.fractions[0], self.study["seeds"][0])
        pairs = product(self.sizes, self.rates)
        return [self.job(size, *cell, float(lr)) for size, lr in pairs]

    def is_tuned(self, out: Path) -> bool:
        """Whether the tuning runs are over."""
        states = ledger.status(out, names(self.tuning()))
        return set(states.values()) <= {"done", "failed"}

    def tuning_losses(self, out: Path) -> dict[str, dict[float, float]]:
        """{size: {learning rate: held-out loss}} of the tuning runs that are done."""
        losses: dict[str, dict[float, float]] = {size: {} for size in self.sizes}
        for job in self.tuning():
            name, _ = ledger.encode(job)
            if (out / name / "done.json").exists():
                axes = job["axes"]
                losses[axes["size"]][axes["lr"]] = ledger.result(out / name)["held_out"]
        return losses

    def jobs(self, out: Path) -> list[Job]:
        """Every run of the grid, the small ones first, at the learning rate of the least loss.

        None until the tuning runs are over, or where all those of one size failed.
        """
        rates = {size: self.configs[size, self.qualities[0]]["optim"]["lr"] for size in self.sizes}
        if self.rates:
            if not self.is_tuned(out):
                return []
            for size, losses in self.tuning_losses(out).items():
                if not losses:
                    return []
                rates[size] = best_rate(losses)
        return [self.job(*cell, rates[cell[0]]) for cell in self.cells()]

    def check_rates(self, out: Path) -> None:
        """Raise a ValueError if the tuning runs are over and all those of one size failed."""
        if not self.rates or not self.is_tuned(out):
            return
        for size, losses in self.tuning_losses(out).items():
            if not losses:
                remedy = "see action=status, then action=retry"
                raise ValueError(f"every tuning run of size {size} failed: {remedy}")

    def cells(self) -> list[tuple[str, str, float, int]]:
        """The (size, quality, fraction, seed) of every run that no entry of `exclude` matches."""
        every = product(self.sizes, self.qualities, self.fractions, self.study["seeds"])
        return [cell for cell in every if not is_excluded(self.study, *cell)]

    def all_jobs(self, out: Path) -> dict[str, Job]:
        """Every run that is known by now, tuning runs first: {name: job}"""
        known = self.tuning() + self.jobs(out)
        return dict(zip(names(known), known, strict=True))


def open_stores(
    configs: dict[Cell, Node], cache_dir: str | Path, fraction: float
) -> dict[Cell, Store]:
    """The data of each cell, opened once and checked. fraction: the smallest of the study."""
    opened = cache(lambda node: prepare(*json.loads(node)))
    stores = {}
    for cell, config in configs.items():
        store = opened(json.dumps([config["dataset"], str(cache_dir), config["transform"]]))
        check_data(store, config["data"], fraction)
        check_environments(train_config(config), {"": store})
        stores[cell] = store
    return stores


def names(jobs: list[Job]) -> list[str]:
    """The ledger's names of these jobs."""
    return [ledger.encode(job)[0] for job in jobs]


def best_rate(losses: Mapping[Rate, float]) -> Rate:
    """Return the learning rate of the least held-out loss; one that is not a number is the worst.

    losses: by learning rate, at least one.
    """
    return min(losses, key=lambda rate: (not math.isfinite(losses[rate]), losses[rate]))


def is_excluded(study: Node, size: str, quality: str, fraction: float, seed: int) -> bool:
    """Whether an entry of `exclude` has this value on each of its axes."""
    cell = {"size": size, "quality": quality, "fraction": fraction, "seed": seed}
    words = {axis: as_words(value)[0] for axis, value in cell.items()}
    for entry in study["exclude"]:
        if all(words[axis] in as_words(values) for axis, values in entry.items()):
            return True
    return False


def weights(configs: dict[Cell, Node]) -> dict[Cell, dict[str, str]]:
    """The digests of the weights that the runs of each cell begin with, see `run.starts`."""
    digest = cache(weights_digest)
    found: dict[Cell, dict[str, str]] = {cell: {} for cell in configs}
    for cell, config in configs.items():
        for name, place in starts(config).items():
            if of_place := digest(place):
                found[cell][name] = of_place
    return found


def estimate(grid: Grid, config: Node, say: Callable[[str], None]) -> None:
    """Print what a study would take.

    Runs, parameters, tokens, FLOPs, disk, and hours as a few steps of each size predict them.
    """
    runs = Counter(size for size, *_ in grid.cells())
    table = pd.DataFrame([size_cost(grid, config, size, runs[size]) for size in grid.sizes])
    total = table.sum(numeric_only=True, skipna=False)
    hours = f"{total['hours']:.2f} hours of training by one worker"
    if not config["probe"]:
        table = table.drop(columns="hours")
        hours = "hours are not estimated with probe=0"
    say(table.to_string(index=False, float_format="{:,.2f}".format))
    work = f"{total['runs']:,.0f} runs, {total['tokens']:.2g} tokens, {total['FLOPs']:.2g} FLOPs"
    disk = f"{total['MB on disk']:,.0f} MB on disk"
    say(f"{work} ({FLOPS}); {hours}; {disk}; rollouts not counted")


def size_cost(grid: Grid, config: Node, size: str, runs: int) -> Json:
    """What the runs of a size would take, a row of the table that `estimate` prints."""
    job = grid.job(size, grid.qualities[0], grid.fractions[-1], grid.study["seeds"][0], 1e-3)
    train = job["train"]
    counted = grid.count(size, grid.qualities[0])
    runs += max(len(grid.rates) - 1, 0)  # one of the tuning runs is in the grid
    steps = train["steps"]
    seconds = math.nan
    if config["probe"]:
        where = {"cache_dir": config["cache_dir"], "device": config["device"]}
        seconds = seconds_per_step(train | where, config["probe"])
    bytes_kept = 12 * counted["trained"] * config["keep"] + 60e3
    all_steps = runs * steps
    return {
        "size": size,
        "parameters": counted["total"],
        "trained": counted["trained"],
        "runs": runs,
        "steps a run": steps,
        "tokens": all_steps * train["optim"]["batch_size"] * counted["tokens"],
        "FLOPs": all_steps * flops(train, counted),
        "hours": all_steps * seconds / 3600,
        "MB on disk": runs * bytes_kept / 1e6,
    }
