"""Advice from a law: N and D for a given compute, what to expect of them, and the next run."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from decisionllm.eval.pictures import figure
from decisionllm.files import explained
from decisionllm.registry import Node
from decisionllm.scaling import figures, law, report
from decisionllm.schema import Json

# the columns of a table of runs by their names in ours
COLUMNS = {"params": "non_embedding", "tokens": "data_steps", "loss": "excess"}
SHARE = 0.1  # of the given compute that the next run may take
BEYOND = 4.0  # the next run has at most so many times the largest N or D of the runs


def read(path: Path) -> pd.DataFrame:
    """The runs of a CSV table: params, tokens and loss, and flops unless it is 6 params tokens."""
    wanted = "a CSV table with the numbers params, tokens and loss"
    with explained(f"{path}: expected {wanted}", OSError, ValueError, KeyError):
        table = pd.read_csv(path).rename(columns=COLUMNS).dropna(axis=1, how="all")
        for name in COLUMNS.values():
            table[name] = table[name].astype(float)
    if "flops" not in table:
        table["flops"] = 6 * table["non_embedding"] * table["data_steps"]
    return table.assign(quality=1.0, score=np.nan, run=range(len(table)))


def write(path: Path, flops: float, say: Callable[[str], object] = print) -> Path:
    """Advice from the runs of a study.json or a CSV table.

    It is printed, and written to advice.json and advice.png beside the file.

    Returns:
        The path of advice.json.

    Raises:
        ValueError: the file cannot be read, or its runs determine no law.
    """
    study: Node = {"tuned": {}}
    if path.suffix == ".csv":
        grid = read(path)
        # no rank test: along a budget the loss falls and rises with size
        fit = law.fit(grid["non_embedding"], grid["data_steps"], grid["excess"])
        fits: Json = {"law": fit, "score": None}
    else:
        study = report.read(path)
        grid = report.finished(study)
        fits = report.fitted(grid)
    found = advise(grid, fits, flops)
    if edge := report.at_edge(study):
        warning = f"The learning rate of {', '.join(edge)} is at the edge of the values tried."
        found["warnings"].append(warning)
    out = path.with_name("advice.json")
    out.write_text(json.dumps(found, indent=1))
    made = figure(7, 4.2)
    axes = made.subplots()
    figures.isoflop(axes, grid, fits["law"], found["cost"], (flops,))
    axes.set(xlabel=figures.PARAMETERS, ylabel=figures.LOSS, xscale="log", yscale="log")
    made.savefig(out.with_suffix(".png"))
    say("\n".join(sentences(found)))
    return out


def advise(grid: pd.DataFrame, fits: Json, flops: float) -> Json:
    """What to train with this compute, as JSON values.

    Args:
        grid: the runs, see `report.finished` and `read`.
        fits: of these runs, see `report.fitted`.
        flops: compute of one run, FLOPs.

    Returns:
        N, D, loss, score: {value, low, high}, 95 % intervals of the bootstrap; score is None
        without a law of it. cost: FLOPs per parameter and step of data. next: the run to make next.
        warnings: sentences.

    Raises:
        ValueError: the runs determine no law with a term of size and one of data.
    """
    fit: law.Law = fits["law"] or law.Law(E=0.0)
    draws = [draw for draw in fit.draws if draw.A and draw.B]
    if len(draws) <= len(fit.draws) / 2 or not (fit.A and fit.B):
        factors = f"E {fit.E:.3g}, A {fit.A:.3g}, B {fit.B:.3g}"
        samples = f"both terms in {len(draws)} of {len(fit.draws)} bootstrap samples"
        wanted = "runs whose loss falls with size and with data"
        got = f"{factors}, {samples}"
        raise ValueError(f"advise: expected {wanted}, got {got}; add sizes and volumes")
    k = law.cost(grid["non_embedding"], grid["data_steps"], grid["flops"])
    N, D = law.allocate(fit, flops, k)
    drawn = np.array([law.allocate(draw, flops, k) for draw in draws])  # (draws, 2)
    losses = np.array([draw(*at) for draw, at in zip(draws, drawn, strict=True)])
    loss = spread_of(fit(N, D), losses)
    score = expected_score(fits["score"], loss["value"])
    found: Json = {
        "flops": flops,
        "cost": k,
        "score": score,
        "N": spread_of(N, drawn[:, 0]),
        "D": spread_of(D, drawn[:, 1]),
        "loss": loss,
    }
    warnings = warnings_of(grid, found)
    if loose := law.loose(fit):
        warnings.append(f"The runs do not determine {', '.join(loose)}.")
    lacking = len(fit.draws) - len(draws)
    if lacking:
        of = f"{lacking} of {len(fit.draws)} bootstrap samples"
        warnings.append(f"{of} lack a term of the law.")
    if score and not fits["score"]["at"][0] <= loss["value"] <= fits["score"]["at"][-1]:
        nearest = "the score is that of the nearest loss"
        warnings.append(f"The loss is outside of the runs with a score; {nearest}.")
    found["warnings"] = warnings
    found["next"] = next_run(grid, fit, draws, np.log(drawn[:, 0]), flops, k)
    return found


def spread_of(value: float, sample: np.ndarray) -> dict[str, float]:
    """A value with the 95 % interval of its bootstrap sample."""
    low, high = np.percentile(sample, [2.5, 97.5])
    return {"value": float(value), "low": float(low), "high": float(high)}


def expected_score(curve: Json | None, loss: float) -> dict[str, float] | None:
    """The score at a loss with its band, by the logistic of `law.saturate`; None without one."""
    if not curve or "curve" not in curve:
        return None
    low, high = curve["band"]
    lines = {"value": curve["curve"], "low": low, "high": high}
    return {name: float(np.interp(loss, curve["at"], line)) for name, line in lines.items()}


def warnings_of(grid: pd.DataFrame, found: Json) -> list[str]:
    """Warnings: N or D is outside of the runs; runs differ in passes over their data."""
    warnings = []
    for name, column in (("N", "non_embedding"), ("D", "data_steps")):
        value = found[name]["value"]
        low, high = grid[column].min(), grid[column].max()
        if not low <= value <= high:
            runs = f"{low:.3g} .. {high:.3g}"
            warnings.append(f"{name} = {value:.3g} is outside of the runs, {runs}.")
    each = grid["flops"] / grid["non_embedding"] / grid["data_steps"]
    if each.max() > 2 * each.min():
        costs = f"{each.min():.3g} .. {each.max():.3g} FLOPs per parameter and step of data"
        unknown = "the law does not know of these"
        warnings.append(f"The runs differ in passes over their data ({costs}); {unknown}.")
    return warnings


def next_run(
    grid: pd.DataFrame,
    fit: law.Law,
    draws: list[law.Law],
    target: np.ndarray,
    flops: float,
    k: float,
) -> Json:
    """The cheapest run of a grid of runs that narrows the interval of log N nearly as the best.

    The bootstrap samples are read as a joint normal distribution of `target` (draws,) and of a
    run's log loss: measured with the noise of the runs, it leaves 1 - cov^2 / (var target (var loss
    + noise^2)) of the variance.
    """
    columns = ("non_embedding", "data_steps", "excess", "quality")
    N, D, loss, q = (grid[name].to_numpy(np.float64) for name in columns)
    noise = float(np.std(np.log(fit(N, D, q) / loss)))
    n, d = (np.geomspace(x.min(), x.max() * BEYOND, 16) for x in (N, D))
    n, d = (x.ravel() for x in np.meshgrid(n, d))  # (256,) runs that could be made
    compute = k * n * d
    allowed = compute <= max(SHARE * flops, float(compute.min()))
    n, d = n[allowed], d[allowed]
    logs = np.log([draw(n, d) for draw in draws])  # (draws, runs)
    covariance = ((logs - logs.mean(0)) * (target - target.mean())[:, None]).mean(0)
    removed = covariance**2 / ((logs.var(0) + noise**2) * target.var())
    good = np.flatnonzero(removed >= 0.9 * removed.max())
    best = good[np.argmin(n[good] * d[good])]
    found: Json = {"N": float(n[best]), "D": float(d[best])}
    found["flops"] = float(k * n[best] * d[best])
    found["narrower"] = float(1 - np.sqrt(1 - removed[best]))
    found["hours"] = None
    if "train_seconds" in grid:  # at the speed of the nearest size
        near = grid.assign(away=abs(np.log(N / found["N"]))).nsmallest(1, "away", keep="all")
        speed = float((near["train_seconds"] / near["flops"]).median())
        found["hours"] = found["flops"] * speed / 3600
    return found


def sentences(found: Json) -> list[str]:
    """Advice in sentences."""
    shown = {}
    for name in ("N", "D", "loss", "score"):
        if found[name]:
            shown[name] = "{value:.3g} ({low:.3g} .. {high:.3g})".format(**found[name])
    choice = f"N = {shown['N']} parameters, D = {shown['D']} steps; loss {shown['loss']}"
    lines = [
        f"{found['flops']:.3g} FLOPs: {choice}.",
        f"Counted as {found['cost']:.3g} FLOPs per parameter and step of data.",
    ]
    if found["score"]:
        lines.append(f"Score to expect at this loss: {shown['score']}.")
    after = found["next"]
    run = f"N = {after['N']:.3g}, D = {after['D']:.3g}: {after['flops']:.3g} FLOPs"
    if after["hours"] is not None:
        run += f", {after['hours']:.3g} hours at the speed of the nearest size"
    narrower = f"it narrows the interval of N by about {after['narrower']:.0%}"
    lines.append(f"Next run: {run}; {narrower}.")
    lines += [f"Warning: {warning}" for warning in found["warnings"]]
    return lines
