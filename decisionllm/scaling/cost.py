"""The cost of a study: parameters, tokens, FLOPs, hours, disk."""

import math
from collections import Counter
from collections.abc import Callable

import pandas as pd

from decisionllm.scaling.grid import Grid
from decisionllm.scaling.model_size import FLOPS, flops_per_step, seconds_per_step
from decisionllm.scaling.study_options import ScaleConfig
from decisionllm.schema import Json


def print_cost(grid: Grid, options: ScaleConfig, say: Callable[[str], None]) -> None:
    """Print the cost of a study.

    Runs, parameters, tokens, FLOPs, disk, and the hours that a few steps of each size predict.
    """
    runs = Counter(size for size, *_ in grid.cells())
    table = pd.DataFrame([estimate_size(grid, options, size, runs[size]) for size in grid.sizes])
    total = table.sum(numeric_only=True, skipna=False)
    hours = f"{total['hours']:.2f} hours of training by one worker"
    if not options.probe:
        table = table.drop(columns="hours")
        hours = "hours are not estimated with probe=0"
    say(table.to_string(index=False, float_format="{:,.2f}".format))
    disk = f"{total['MB on disk']:,.0f} MB on disk"
    say(
        f"{total['runs']:,.0f} runs, {total['tokens']:.2g} tokens, {total['FLOPs']:.2g} FLOPs "
        f"({FLOPS}); {hours}; {disk}; rollouts not counted"
    )


def estimate_size(grid: Grid, options: ScaleConfig, size: str, runs: int) -> Json:
    """Estimate the cost of the runs of a size, a row of the table of `print_cost`."""
    job = grid.job(size, grid.qualities[0], grid.fractions[-1], grid.study["seeds"][0], 1e-3)
    train = job["train"]
    counted = grid.count(size, grid.qualities[0])
    runs += max(len(grid.rates) - 1, 0)  # one of the tuning runs is in the grid
    steps = train["steps"]
    seconds = math.nan
    if options.probe:
        where = {"cache_dir": options.cache_dir, "device": options.device}
        seconds = seconds_per_step(train | where, options.probe)
    bytes_kept = 12 * counted["trained"] * options.keep + 60e3
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
