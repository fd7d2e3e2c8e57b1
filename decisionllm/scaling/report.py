"""The report of a study: laws, figures and findings from study.json alone, one HTML file that needs no other file."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from decisionllm.eval.report import interval, write_page
from decisionllm.files import explained
from decisionllm.scaling import figures, law

AXES = ["size", "fraction", "mixture", "seed"]
COLUMNS = ["run", "state", *AXES, "lr", "held_out", "action_error", "score", "low", "high", "parameters", "trained", "non_embedding",
           "data_steps", "steps", "tokens", "flops", "train_seconds", "converged", "reason"]  # fmt: skip


def read(path: str | Path) -> dict[str, Any]:
    """study.json as it was written, without what `write` derives; the runs are not needed."""
    with explained(f"{path}: expected the study.json of a study, could not read it", OSError, ValueError, KeyError):
        found = json.loads(Path(path).read_text())
        return {key: found[key] for key in ("study", "versions", "flops", "tuned", "runs")}


def write(folder: str | Path, found: dict[str, Any], say: Callable[[str], object] = print) -> Path:
    """Write study.json, the figures as PNG, and report.html with the figures in it.

    Args:
        folder: where to.
        found: what `read` returns: the study, its versions, the losses of the tuning runs, and every run.
        say: prints the sentences about laws and comparisons.

    Returns:
        The path of report.html.

    Raises:
        ValueError: no run of the grid is done.
    """
    folder, grid = Path(folder), finished(found)
    if grid.empty:
        raise ValueError(f"{folder}: expected at least one run of the grid that is done, found none")
    fits, values = fitted(grid), measured(found, grid)
    sentences = {"laws": laws(fits), "findings": [*findings(grid), *sentences_of(values)], "tuning": tuning(found)}
    derived = {"fits": fits | {"law": fits["law"] and fits["law"].row()}, "sentences": sentences}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(found | derived, indent=1))
    drawn = {f"{name}.png": figure for name, figure in figures.draw(grid, fits, values).items()}
    for name, figure in drawn.items():
        figure.savefig(folder / name)
    page = write_page(
        folder, Path(__file__).parent / "study.html", list(drawn), captions=figures.CAPTIONS, **found, sentences=sentences,
        columns=COLUMNS, counts=Counter(run["state"] for run in found["runs"]),
    )  # fmt: skip
    say("\n".join([*sentences["laws"], *sentences["findings"], f"report: {page}"]))
    return page


def finished(found: dict[str, Any]) -> pd.DataFrame:
    """The runs of the grid that are done: those at the learning rate that was chosen for their size.

    `excess` is the held-out loss above the least that the head can have: laws are fitted to it, since the zero of a density has
    no meaning.
    """
    chosen = {size: float(min(rates, key=rates.get)) for size, rates in found["tuned"].items() if rates}
    done = [run for run in found["runs"] if run["state"] == "done" and chosen.get(run["size"], run["lr"]) == run["lr"]]
    grid = pd.DataFrame(done, columns=[*COLUMNS, "floor", "quality", "curve"]).astype({"score": float})
    return grid.assign(excess=grid["held_out"] - grid["floor"])


def fitted(grid: pd.DataFrame) -> dict[str, Any]:
    """The law, the frontier, and score against loss where there are scores."""
    columns = ("non_embedding", "data_steps", "excess", "quality", "flops")
    N, D, loss, q, C = (grid[name].to_numpy(np.float64) for name in columns)
    best, power = law.frontier(C, loss)
    scored = grid.dropna(subset="score")
    return law.describe(N, D, loss, q) | {
        "frontier": {"runs": grid["run"].iloc[best].tolist(), "power": power},
        "score": law.saturate(scored["excess"], scored["score"]) if len(scored) else None,
        "intrinsic": intrinsic(scored),
    }


def intrinsic(scored: pd.DataFrame) -> list[tuple[float, float]]:
    """The steps (score, least FLOPs that reach it), of means over seeds; each costs more than the one before."""
    if scored.empty:
        return []
    keys = [name for name in AXES if name != "seed"]
    cells = scored.groupby(keys).agg(score=("score", "mean"), flops=("flops", "mean"), runs=("run", "size"))
    cells = cells[cells["runs"] == cells["runs"].max()]  # the mean of fewer seeds is luckier
    cells["least"] = law.intrinsic(cells["flops"], cells["score"])
    return [(float(score), float(flops)) for flops, score in cells.groupby("least")["score"].max().reset_index().to_numpy()]


def laws(fits: dict[str, Any]) -> list[str]:
    """The fits in sentences."""
    p, fit = fits["p"], fits["law"]
    lines = [
        f"Held-out loss and {what}: {'the loss falls' if p[name] <= law.CERTAIN else 'no trend, the loss does not fall'} with more "
        f"{what} (rank test within the other axes, p = {p[name]:.2g})."
        for name, what in (("size", "parameters"), ("data", "data"))
    ]
    if fits["intrinsic"]:
        reached = "; ".join(f"{score:.3g} with {flops:.2g}" for score, flops in fits["intrinsic"])
        lines.append(f"Intrinsic performance, the least FLOPs whose runs reach a score, means over seeds: {reached}.")
    if fit is None:
        return [*lines, "No law is fitted: there is no trend, or too few runs or values."]
    size = f" + {fit.A:.3g} / N^{fit.alpha:.3f}" if fit.A else ""
    data = f" + {fit.B:.3g} / D^{fit.beta:.3f}" if fit.B else ""
    quality = f"; D is multiplied by quality^{fit.gamma:.2f}." if fit.gamma else "."
    lines.append(f"L = {fit.E:.3g}{size}{data}, nats an action above the floor of the head{quality}")
    lines.append(f"95 % intervals: {', '.join(f'{name} {a:.3g} .. {b:.3g}' for name, (a, b) in fit.intervals.items())}.")
    if loose := law.loose(fit):
        lines.append(f"These runs do not determine {', '.join(loose)}: the interval is wide, or reaches the bounds of the fit.")
    if left := fits["left_out"]:
        missed = f"the law misses its losses by {left['missed']:+.1%} on average and {left['worst']:+.1%} at worst"
        lines.append(f"Fitted without the largest model ({left['parameters']:,.0f} parameters), {missed}.")
    if fits["frontier"]["power"]:
        lines.append("Compute frontier: L = {:.3g} + {:.3g} / C^{:.3f}.".format(*fits["frontier"]["power"]))
    if fits["score"]:
        p = fits["score"]["p"]
        trend = "the score rises as the loss falls" if p <= law.CERTAIN else "no trend"
        lines.append(f"Score and loss: {trend} (p = {p:.2g}).")
    return lines


def findings(grid: pd.DataFrame) -> list[str]:
    """Is a larger model better on all data, is it worse on little data, does quality matter: paired comparisons, in sentences."""
    sizes, qualities = grid.sort_values("non_embedding", kind="stable")["size"].unique(), grid["mixture"].unique()
    everything, least, lines = grid["fraction"].max(), grid["fraction"].min(), []
    for metric, name, sign in (("held_out", "held-out loss", -1), ("score", "score", 1)):
        for volume in dict.fromkeys([everything, least]):
            part = grid[grid["fraction"] == volume]
            for size in sizes[1:]:
                pairs = paired(part, metric, "size", size, sizes[0])
                lines += verdict(f"{name}, {volume:.0%} of the data: {size} against {sizes[0]}", pairs, sign)
            usual = part[part["mixture"] == qualities[0]]
            lines += best_size(f"{name}, {volume:.0%} of the data", usual, metric, sizes.tolist(), sign)
        for quality in qualities[1:]:
            pairs = paired(grid[grid["fraction"] == everything], metric, "mixture", quality, qualities[0])
            lines += verdict(f"{name}, all data: quality {quality} against {qualities[0]}", pairs, sign)
    return lines


def best_size(what: str, grid: pd.DataFrame, metric: str, sizes: list[str], sign: int) -> list[str]:
    """A sentence that names the best size, or those that cannot be told from the best mean; none if a size has no value.

    Args:
        what: is compared, the first words of the sentence.
        grid: runs that differ in size and seed.
        metric: column of the grid.
        sizes: at least two, the smallest first.
        sign: 1 if more is better, -1 if less.
    """
    means = sign * grid.groupby("size")[metric].mean().reindex(sizes)
    if len(sizes) < 2 or means.isna().any():
        return []
    best = means.idxmax()
    alike = []
    for size in sizes:
        pairs = paired(grid, metric, "size", size, best)
        low, high = interval(pairs) if len(pairs) > 1 else (0.0, 0.0)
        if low <= 0 <= high:
            alike.append(size)
    if len(alike) == 1:
        return [f"{what}: the best size is {best}."]
    together = f"{', '.join(alike)} cannot be told apart, the smallest of them is {alike[0]}"
    return [f"{what}: no size is the best beyond chance; {together}."]


def measured(found: dict[str, Any], grid: pd.DataFrame) -> pd.DataFrame:
    """What the evaluations measured beside the score, on data of the first quality: a row for each run and metric.

    Returns:
        Columns metric, size, fraction, value.
    """
    grid = grid[grid["mixture"] == grid["mixture"].iloc[0]]
    metrics = {run["run"]: run.get("metrics") or {} for run in found["runs"]}
    rows = [(name, size, fraction, value) for run, size, fraction in zip(grid["run"], grid["size"], grid["fraction"], strict=True)
            for name, value in metrics[run].items() if name.count(".") < 2]  # fmt: skip
    return pd.DataFrame(rows, columns=["metric", "size", "fraction", "value"])


def sentences_of(values: pd.DataFrame) -> list[str]:
    """Mean over runs, least and largest, a sentence for each metric and volume."""
    lines = []
    for (name, fraction), part in values.groupby(["metric", "fraction"], sort=False):
        cells = part.groupby("size", sort=False)["value"]
        shown = [f"{size} {v.mean():.3g} ({v.min():.3g} .. {v.max():.3g}, {len(v)} runs)" for size, v in cells]
        lines.append(f"{name}, {fraction:.0%} of the data: {'; '.join(shown)}.")
    return lines


def paired(grid: pd.DataFrame, metric: str, axis: str, value: Any, reference: Any) -> np.ndarray:
    """(n,) differences of a metric between runs with this value of an axis and with the reference value, all other axes equal."""
    others = [name for name in AXES if name != axis]
    ours, theirs = (grid.loc[grid[axis] == chosen, [*others, metric]] for chosen in (value, reference))
    both = ours.merge(theirs, on=others)
    return np.asarray((both[f"{metric}_x"] - both[f"{metric}_y"]).dropna())


def verdict(what: str, pairs: np.ndarray, sign: int) -> list[str]:
    """A sentence about at least two differences. sign: 1 if more is better, -1 if less."""
    if len(pairs) < 2:
        return []
    low, high = interval(pairs)
    said = "no difference beyond chance" if low <= 0 <= high else "better" if sign * low > 0 else "worse"
    return [f"{what}: {np.mean(pairs):+.3g} ({low:+.3g} .. {high:+.3g}, {len(pairs)} pairs): {said}."]


def at_edge(found: dict[str, Any]) -> list[str]:
    """The sizes whose learning rate is the least or the largest that was tried."""
    tuned = {size: pd.Series(rates).rename(float) for size, rates in found["tuned"].items() if len(rates) > 1}
    return [size for size, sweep in tuned.items() if sweep.idxmin() in (min(sweep.index), max(sweep.index))]


def tuning(found: dict[str, Any]) -> list[str]:
    """What was tuned and what was not, in sentences."""
    lines, budget, edge = [], found["study"]["budget"]["rule"], at_edge(found)
    if found["study"]["lr"]["rule"] == "fixed":
        lines.append("The learning rate was not tuned per size: one value favours some sizes, so this is no law of size.")
    for size, rates in found["tuned"].items():
        if rates:
            chosen = min(rates, key=rates.get)
            losses = ", ".join(f"{float(rate):g}: {loss:.4g}" for rate, loss in rates.items())
            lines.append(f"{size}: learning rate {float(chosen):g}, by held-out loss on the smallest data ({losses}).")
            lines[-1] += " This is the edge of the values tried: the best value may lie beyond it." * (size in edge)
    lines.append("Not tuned: batch size, width against depth, weight decay, warm-up; the learning rate on larger data.")
    if budget == "converged":
        early = sum(run.get("converged") is False for run in found["runs"])
        lines.append(f"Trained until twice the steps gained less than the tolerance; {early} runs ended before that.")
    else:
        lines.append(f"Budget rule `{budget}`: runs are not trained to convergence, and small data is repeated many times.")
        lines.append("D counts distinct steps of data, C all computation.")
    return lines
