"""The runs of a study: one job for each cell of the grid."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import TypeVar

from decisionllm.config import merge
from decisionllm.datasets.mixture import is_same_space
from decisionllm.registry import Node
from decisionllm.scaling import ledger
from decisionllm.scaling.initial_weights import digest_weights, list_initial_weights
from decisionllm.scaling.model_size import count_parameters, flops_per_step
from decisionllm.scaling.study_data import Cell, check_held_out, open_stores
from decisionllm.scaling.study_options import RULES, is_excluded
from decisionllm.scaling.train_configs import compose, compose_train_configs
from decisionllm.schema import Json

Job = Json

Rate = TypeVar("Rate", str, float)  # a learning rate, in a JSON file as text


class Grid:
    """The jobs of a study.

    Configs are composed once for each size and quality, stores opened once, models counted once.
    """

    def __init__(self, study: Node, cache_dir: str | Path) -> None:
        self.study = study
        budget = study["budget"]
        self.budget = {key: budget[key] for key in ("rule", *RULES["budget"][budget["rule"]])}
        self.rates = study["lr"]["values"] if study["lr"]["rule"] == "sweep" else []
        self.configs = compose_train_configs(study)
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
            reference = self.stores[self.find_reference_cell(cell)]
            check_held_out(cell, self.stores[cell], reference, config["data"], self.fractions[-1])
        self.weights = digest_cell_weights(self.configs)
        self.count = cache(
            lambda *cell: count_parameters(self.configs[cell], self.stores[cell].spec)
        )

    def reference(self, cell: Cell) -> Node:
        """Return the data that held-out losses of a cell are measured on: those of the first cell
        of its space, in the texts that the cell itself is trained on.
        """
        dataset: Node = dict(self.configs[self.find_reference_cell(cell)]["dataset"])
        own = self.configs[cell]["dataset"]
        if "text" in dataset and "text" in own:
            dataset["text"] = own["text"]
        return dataset

    def find_reference_cell(self, cell: Cell) -> Cell:
        """Return the first cell whose observations and actions have the space of this one."""
        spec = self.stores[cell].spec
        return next(
            other for other, store in self.stores.items() if is_same_space(store.spec, spec)
        )

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
        config = merge(config, changes)
        if "flops" in self.budget:
            steps = self.budget["flops"] / flops_per_step(config, self.count(*cell))
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

    def tuning_jobs(self) -> list[Job]:
        """Return the runs that choose the learning rate of each size.

        On the smallest data, of the first quality and seed.
        """
        cell = (self.qualities[0], self.fractions[0], self.study["seeds"][0])
        pairs = product(self.sizes, self.rates)
        return [self.job(size, *cell, float(lr)) for size, lr in pairs]

    def is_tuned(self, out: Path) -> bool:
        """Return whether the tuning runs are over."""
        states = ledger.status(out, job_names(self.tuning_jobs()))
        return set(states.values()) <= {"done", "failed"}

    def tuning_losses(self, out: Path) -> dict[str, dict[float, float]]:
        """{size: {learning rate: held-out loss}} of the tuning runs that are done."""
        losses: dict[str, dict[float, float]] = {size: {} for size in self.sizes}
        for job in self.tuning_jobs():
            name, _ = ledger.encode(job)
            if (out / name / "done.json").exists():
                axes = job["axes"]
                losses[axes["size"]][axes["lr"]] = ledger.load_result(out / name)["held_out"]
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
                raise ValueError(
                    f"every tuning run of size {size} failed: see action=status, then action=retry"
                )

    def cells(self) -> list[tuple[str, str, float, int]]:
        """Return the (size, quality, fraction, seed) of every run that no entry of `exclude`
        matches.
        """
        all_cells = product(self.sizes, self.qualities, self.fractions, self.study["seeds"])
        return [cell for cell in all_cells if not is_excluded(self.study, *cell)]

    def all_jobs(self, out: Path) -> dict[str, Job]:
        """Every run that is known by now, tuning runs first: {name: job}"""
        jobs = self.tuning_jobs() + self.jobs(out)
        return dict(zip(job_names(jobs), jobs, strict=True))


def job_names(jobs: list[Job]) -> list[str]:
    """Return the ledger's names of these jobs."""
    return [ledger.encode(job)[0] for job in jobs]


def best_rate(losses: Mapping[Rate, float]) -> Rate:
    """Return the learning rate of the least held-out loss; one that is not a number is the worst.

    losses: by learning rate, at least one.
    """
    return min(losses, key=lambda rate: (not math.isfinite(losses[rate]), losses[rate]))


def digest_cell_weights(configs: dict[Cell, Node]) -> dict[Cell, dict[str, str]]:
    """Digest the weights that the runs of each cell begin with, see `list_initial_weights`."""
    digest = cache(digest_weights)
    digests: dict[Cell, dict[str, str]] = {cell: {} for cell in configs}
    for cell, config in configs.items():
        for name, place in list_initial_weights(config).items():
            digest_of_place = digest(place)
            if digest_of_place:
                digests[cell][name] = digest_of_place
    return digests
