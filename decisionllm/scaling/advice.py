"""Advice from a law: N and D for a given compute, the loss and the return to expect, and the run to make next."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from decisionllm.eval.report import figure
from decisionllm.files import explained
from decisionllm.scaling import figures, law, report

COLUMNS = {"params": "non_embedding", "tokens": "data_steps", "loss": "excess"}  # of a table of runs: our names
SHARE = 0.1  # of the given compute that the next run may take
BEYOND = 4.0  # the next run has at most so many times the largest N or D of the runs


def read(path: Path) -> pd.DataFrame:
    """The runs of a CSV table with columns params, tokens and loss, and flops unless it is 6 params tokens."""
    wanted = "a CSV table with the numbers params, tokens and loss"
    with explained(f"{path}: expected {wanted}", OSError, ValueError, KeyError):
        table = pd.read_csv(path).rename(columns=COLUMNS).dropna(axis=1, how="all")
        table = table.assign(**{name: table[name].astype(float) for name in COLUMNS.values()})
    flops = table["flops"] if "flops" in table else 6 * table["non_embedding"] * table["data_steps"]
    return table.assign(flops=flops, quality=1.0, score=np.nan, run=range(len(table)))


def write(path: Path, flops: float, say: Callable[[str], object] = print) -> Path:
    """Advice from the runs of a study.json or a CSV table: print it, write advice.json and advice.png beside the file.

    Returns:
        The path of advice.json.

    Raises:
        ValueError: the file cannot be read, or its runs determine no law.
    """
    study: dict[str, Any] = {"tuned": {}}
    if path.suffix == ".csv":  # no rank test: along a budget the loss falls and rises with size
        grid = read(path)
        fits: dict[str, Any] = {"law": law.fit(*(grid[name] for name in COLUMNS.values())), "score": None}
    else:
        study = report.read(path)
        grid = report.finished(study)
        fits = report.fitted(grid)
    found, out = advise(grid, fits, flops), path.with_name("advice.json")
    if edge := report.at_edge(study):
        found["warnings"].append(f"The learning rate of {', '.join(edge)} is at the edge of the values tried.")
    out.write_text(json.dumps(found, indent=1))
    made = figure(7, 4.2)
    axes = made.subplots()
    figures.isoflop(axes, grid, fits["law"], found["cost"], (flops,))
    axes.set(xlabel=figures.PARAMETERS, ylabel=figures.LOSS, xscale="log", yscale="log")
    made.savefig(out.with_suffix(".png"))
    say("\n".join(sentences(found)))
    return out


def advise(grid: pd.DataFrame, fits: dict[str, Any], flops: float) -> dict[str, Any]:
    """What to train with this compute, as JSON values.

    Args:
        grid: the runs, see `report.finished` and `read`.
        fits: of these runs, see `report.fitted`.
        flops: compute of one run, FLOPs.

    Returns:
        N, D, loss, score: {value, low, high}, 95 % intervals of the bootstrap; score is None without a law of it. cost: FLOPs per
        parameter and step of data. next: the run to make next. warnings: sentences.

    Raises:
        ValueError: the runs determine no law with a term of size and one of data.
    """
    fit: law.Law = fits["law"] or law.Law(E=0.0)
    draws = [draw for draw in fit.draws if draw.A and draw.B]
    if len(draws) <= len(fit.draws) / 2 or not (fit.A and fit.B):
        got = f"E {fit.E:.3g}, A {fit.A:.3g}, B {fit.B:.3g}, both terms in {len(draws)} of {len(fit.draws)} bootstrap samples"
        raise ValueError(f"advise: expected runs whose loss falls with size and with data, got {got}; add sizes and volumes")
    k = law.cost(*(grid[name] for name in ("non_embedding", "data_steps", "flops")))
    drawn = np.array([law.allocate(draw, flops, k) for draw in draws])
    N, D = law.allocate(fit, flops, k)
    losses = np.array([draw(*at) for draw, at in zip(draws, drawn, strict=True)])
    found: dict[str, Any] = {"flops": flops, "cost": k, "score": None}
    for name, value, sample in (("N", N, drawn[:, 0]), ("D", D, drawn[:, 1]), ("loss", fit(N, D), losses)):
        low, high = np.percentile(sample, [2.5, 97.5])
        found[name] = {"value": float(value), "low": float(low), "high": float(high)}
    found["warnings"] = [
        f"{name} = {found[name]['value']:.3g} is outside of the runs, {grid[column].min():.3g} .. {grid[column].max():.3g}."
        for name, column in (("N", "non_embedding"), ("D", "data_steps"))
        if not grid[column].min() <= found[name]["value"] <= grid[column].max()
    ]
    each = grid["flops"] / grid["non_embedding"] / grid["data_steps"]
    if each.max() > 2 * each.min():
        passes = f"{each.min():.3g} .. {each.max():.3g} FLOPs per parameter and step of data"
        found["warnings"].append(f"The runs differ in passes over their data ({passes}); the law does not know of these.")
    if loose := law.loose(fit):
        found["warnings"].append(f"The runs do not determine {', '.join(loose)}.")
    if len(draws) < len(fit.draws):
        found["warnings"].append(f"{len(fit.draws) - len(draws)} of {len(fit.draws)} bootstrap samples lack a term of the law.")
    if fits["score"] and "curve" in (curve := fits["score"]):
        names, at = ("value", "low", "high"), found["loss"]["value"]
        ends = zip(names, [curve["curve"], *curve["band"]], strict=True)
        found["score"] = {name: float(np.interp(at, curve["at"], y)) for name, y in ends}
        if not curve["at"][0] <= at <= curve["at"][-1]:
            found["warnings"].append("The loss is outside of the runs with a score; the score is that of the nearest loss.")
    return found | {"next": next_run(grid, fit, draws, np.log(drawn[:, 0]), flops, k)}


def next_run(
    grid: pd.DataFrame, fit: law.Law, draws: list[law.Law], target: np.ndarray, flops: float, k: float
) -> dict[str, Any]:
    """The cheapest run that narrows the interval of log N nearly as much as the best of a grid of runs.

    The bootstrap samples are read as a joint normal distribution of `target` (draws,) and of a run's log loss: measured with the
    noise of the runs, it leaves 1 - cov^2 / (var target (var loss + noise^2)) of the variance.
    """
    columns = ("non_embedding", "data_steps", "excess", "quality")
    N, D, loss, q = (grid[name].to_numpy(np.float64) for name in columns)
    noise = float(np.std(np.log(fit(N, D, q) / loss)))
    n, d = (np.geomspace(x.min(), x.max() * BEYOND, 16) for x in (N, D))
    n, d = (x.ravel() for x in np.meshgrid(n, d))
    allowed = k * n * d <= max(SHARE * flops, float((k * n * d).min()))
    n, d = n[allowed], d[allowed]
    logs = np.log([draw(n, d) for draw in draws])
    shared = ((logs - logs.mean(0)) * (target - target.mean())[:, None]).mean(0)
    removed = shared**2 / ((logs.var(0) + noise**2) * target.var())
    good = np.flatnonzero(removed >= 0.9 * removed.max())
    best = good[np.argmin(n[good] * d[good])]
    found, hours = {"N": float(n[best]), "D": float(d[best]), "flops": float(k * n[best] * d[best])}, None
    if "train_seconds" in grid:  # at the speed of the nearest size
        near = grid.assign(away=abs(np.log(N / found["N"]))).nsmallest(1, "away", keep="all")
        hours = found["flops"] * float((near["train_seconds"] / near["flops"]).median()) / 3600
    return found | {"narrower": float(1 - np.sqrt(1 - removed[best])), "hours": hours}


def sentences(found: dict[str, Any]) -> list[str]:
    """Advice in sentences."""

    def shown(name: str) -> str:
        return "{value:.3g} ({low:.3g} .. {high:.3g})".format(**found[name])

    after = found["next"]
    hours = "" if after["hours"] is None else f", {after['hours']:.3g} hours at the speed of the nearest size"
    return [
        f"{found['flops']:.3g} FLOPs: N = {shown('N')} parameters, D = {shown('D')} steps; loss {shown('loss')}.",
        f"Counted as {found['cost']:.3g} FLOPs per parameter and step of data.",
        *([f"Score to expect at this loss: {shown('score')}."] if found["score"] else []),
        f"Next run: N = {after['N']:.3g}, D = {after['D']:.3g}: {after['flops']:.3g} FLOPs{hours}; it narrows the interval of N "
        f"by about {after['narrower']:.0%}.",
        *(f"Warning: {line}" for line in found["warnings"]),
    ]
