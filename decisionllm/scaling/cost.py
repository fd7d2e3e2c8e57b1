"""The cost of a study: parameters, tokens, FLOPs, hours, disk."""

import math
from collections import Counter
from collections.abc import Callable

import pandas as pd

from decisionllm.registry import Node
from decisionllm.scaling.grid import Grid
from decisionllm.scaling.model_size import FLOPS, flops_per_step, seconds_per_step
from decisionllm.schema import Json


def print_cost(grid: Grid, config: Node, say: Callable[[str], None]) -> None:
    """Print the cost of a study.

    Runs, parameters, tokens, FLOPs, disk, and the hours that a few steps of each size predict.
    """
    runs = Counter(size for size, *_ in grid.cells())
    table = pd.DataFrame([estimate_size(grid, config, size, runs[size]) for size in grid.sizes])
    total = table.sum(numeric_only=True, skipna=False)
    hours = f"{total['hours']:.2f} hours of training by one worker"
    if not config["probe"]:
        table = table.drop(columns="hours")
        hours = "hours are not estimated with probe=0"
    say(table.to_string(index=False, float_format="{:,.2f}".format))
    disk = f"{total['MB on disk']:,.0f} MB on disk"
    say(
        f"{total['runs']:,.0f} runs, {total['tokens']:.2g} tokens, {total['FLOPs']:.2g} FLOPs "
        f"({FLOPS}); {hours}; {disk}; rollouts not counted"
    )


def estimate_size(grid: Grid, config: Node, size: str, runs: int) -> Json:
    """Estimate the cost of the runs of a size, a row of the table of `print_cost`."""
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
        "FLOPs": all_steps * flops_per_step(train, counted),
        "hours": all_steps * seconds / 3600,
        "MB on disk": runs * bytes_kept / 1e6,
    }
