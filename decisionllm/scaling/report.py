"""The report of a study from study.json alone: laws, figures and findings in one HTML file."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from decisionllm.eval.intervals import over_runs
from decisionllm.eval.report import write_page
from decisionllm.files import explained, write_json
from decisionllm.scaling import figures, law
from decisionllm.scaling.grid import best_rate, is_excluded
from decisionllm.schema import Json

AXES = ["size", "fraction", "mixture", "seed"]
COMPARABLE = [*AXES, "reference"]  # what two runs have in common, but for the axis that is compared
COLUMNS = [
    "run",
    "state",
    *AXES,
    "lr",
    "held_out",
    "action_error",
    "score",
    "low",
    "high",
    "parameters",
    "trained",
    "non_embedding",
    "data_steps",
    "steps",
    "tokens",
    "flops",
    "train_seconds",
    "reason",
]


def read(path: str | Path) -> Json:
    """study.json as it was written, without what `write` derives; the runs are not needed."""
    wanted = "expected the study.json of a study, could not read it"
    with explained(f"{path}: {wanted}", OSError, ValueError, KeyError, TypeError):
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        return {key: found[key] for key in ("study", "versions", "flops", "tuned", "runs")}


def write(folder: str | Path, found: Json, say: Callable[[str], object] = print) -> Path:
    """Write study.json, the figures as PNG, and report.html with the figures in it.

    Args:
        folder: where to.
        found: what `read` returns: the study, its versions, the losses of the tuning runs, and
            every run.
        say: prints the sentences about laws and comparisons.

    Returns:
        The path of report.html.

    Raises:
        ValueError: no run of the grid is done with a finite held-out loss.
    """
    folder = Path(folder)
    grid = finished(found)
    if grid.empty:
        wanted = "at least one run of the grid that is done"
        raise ValueError(f"{folder}: expected {wanted}, found none")
    fits = fitted(grid)
    values = measured(found, grid)
    sentences = {
        "laws": laws(fits),
        "findings": [*findings(grid), *sentences_of(values)],
        "tuning": tuning(found),
    }
    law_row = fits["law"] and fits["law"].row()
    derived = {"fits": fits | {"law": law_row}, "sentences": sentences}
    write_json(folder / "study.json", found | derived)
    images = []
    for name, figure in figures.draw(grid, fits, values).items():
        images.append(f"{name}.png")
        figure.savefig(folder / f"{name}.png")
    page = write_page(
        folder,
        Path(__file__).parent / "study.html",
        images,
        captions=figures.CAPTIONS,
        **found,
        sentences=sentences,
        columns=COLUMNS,
        counts=Counter(run["state"] for run in found["runs"]),
    )
    say("\n".join([*sentences["laws"], *sentences["findings"], f"report: {page}"]))
    return page


def finished(found: Json) -> pd.DataFrame:
    """The runs of the grid that are done, at the learning rate that was chosen for their size.

    `excess` is the held-out loss above the least that the head can have: laws are fitted to it,
    since the zero of a density has no meaning.
    """
    chosen = {size: float(best_rate(rates)) for size, rates in found["tuned"].items() if rates}
    done = []
    for run in found["runs"]:
        # a tuning run may stand where the grid has no run
        cell = run["size"], run["mixture"], run["fraction"], run["seed"]
        is_of_grid = not is_excluded(found["study"], *cell)
        is_chosen = chosen.get(run["size"], run["lr"]) == run["lr"]
        if has_loss(run) and is_of_grid and is_chosen:
            done.append({"reference": "", "curve": []} | run)  # earlier reports lack these
    grid = pd.DataFrame(done, columns=[*COLUMNS, "reference", "floor", "quality", "curve"])
    return grid.astype({"score": float}).assign(excess=grid["held_out"] - grid["floor"])


def has_loss(run: Json) -> bool:
    """Return whether a run is done and its held-out loss is a finite number."""
    loss = run.get("held_out") if run["state"] == "done" else None
    return loss is not None and math.isfinite(loss)


def fitted(grid: pd.DataFrame) -> Json:
    """The trends of loss and score, and the law of the runs of the first quality.

    The law has no term for quality, so that it would be wrong for several qualities at once.
    """
    p = law.trends(grid["non_embedding"], grid["data_steps"], grid["excess"], grid["quality"])
    scored = grid.dropna(subset="score")
    if len(scored):
        p["score"] = law.falls(scored["excess"], scored["score"], scored["reference"])
    base = grid[grid["mixture"] == grid["mixture"].iloc[0]]
    columns = ("non_embedding", "data_steps", "excess")
    N, D, loss = (base[name].to_numpy(np.float64) for name in columns)
    return {"p": p, **law.describe(N, D, loss, p)}


def laws(fits: Json) -> list[str]:
    """The fits in sentences."""
    fit: law.Law | None = fits["law"]
    lines = []
    for name, what in (("size", "parameters"), ("data", "data")):
        p = fits["p"][name]
        trend = "the loss falls" if p <= law.CERTAIN else "no trend, the loss does not fall"
        test = f"rank test within the other axes, p = {p:.2g}"
        lines.append(f"Held-out loss and {what}: {trend} with more {what} ({test}).")
    if fit is None:
        return [*lines, "No law is fitted: there is no trend, or too few runs or values."]
    lines += law_in_words(fit)
    if left := fits["left_out"]:
        size = f"{left['parameters']:,.0f} parameters"
        missed = f"{left['missed']:+.1%} on average and {left['worst']:+.1%} at worst"
        without = f"Fitted without the largest model ({size})"
        lines.append(f"{without}, the law misses its losses by {missed}.")
    if "score" in fits["p"]:
        p = fits["p"]["score"]
        trend = "the score rises as the loss falls" if p <= law.CERTAIN else "no trend"
        lines.append(f"Score and loss: {trend} (p = {p:.2g}).")
    return lines


def law_in_words(fit: law.Law) -> list[str]:
    """The formula of a law, its intervals, and the exponents that are not determined."""
    formula = f"L = {fit.E:.3g}"
    if fit.A:
        formula += f" + {fit.A:.3g} / N^{fit.alpha:.3f}"
    if fit.B:
        formula += f" + {fit.B:.3g} / D^{fit.beta:.3f}"
    formula += ", nats an action above the floor of the head"
    ranges = [f"{name} {low:.3g} .. {high:.3g}" for name, (low, high) in fit.intervals.items()]
    lines = [f"{formula}.", f"95 % intervals: {', '.join(ranges)}."]
    if loose := law.loose(fit):
        reason = "the interval is wide, or reaches the bounds of the fit"
        lines.append(f"These runs do not determine {', '.join(loose)}: {reason}.")
    return lines


def findings(grid: pd.DataFrame) -> list[str]:
    """Paired comparisons in sentences.

    Is a larger model better on all data, is it worse on little data, does quality matter?
    """
    by_size = grid.sort_values("non_embedding", kind="stable")
    sizes = by_size["size"].unique().tolist()
    smallest, *larger = sizes
    first, *others = grid["mixture"].unique()
    everything = grid["fraction"].max()
    whole = grid[grid["fraction"] == everything]
    volumes = dict.fromkeys([everything, grid["fraction"].min()])
    lines = []
    for metric, name, sign in (("held_out", "held-out loss", -1), ("score", "score", 1)):
        for volume in volumes:
            what = f"{name}, {volume:.0%} of the data"
            part = grid[grid["fraction"] == volume]
            for size in larger:
                pairs = paired(part, metric, "size", size, smallest)
                lines += verdict(f"{what}: {size} against {smallest}", pairs, sign)
            lines += best_size(what, part[part["mixture"] == first], metric, sizes, sign)
        for quality in others:
            pairs = paired(whole, metric, "mixture", quality, first)
            lines += verdict(f"{name}, all data: quality {quality} against {first}", pairs, sign)
    return lines


def best_size(what: str, grid: pd.DataFrame, metric: str, sizes: list[str], sign: int) -> list[str]:
    """A sentence that names the best size, or those that cannot be told from the best mean.

    None if a size has no value.

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
        low, high = over_runs(pairs) if len(pairs) > 1 else (0.0, 0.0)
        if low <= 0 <= high:
            alike.append(size)
    if len(alike) == 1:
        return [f"{what}: the best size is {best}."]
    together = f"{', '.join(alike)} cannot be told apart, the smallest of them is {alike[0]}"
    return [f"{what}: no size is the best beyond chance; {together}."]


def measured(found: Json, grid: pd.DataFrame) -> pd.DataFrame:
    """Further measurements of the evaluations beside the score, on data of the first quality.

    Returns:
        Columns metric, size, fraction, value; a row for each run and metric.
    """
    metrics = {run["run"]: run.get("metrics") or {} for run in found["runs"]}
    rows = []
    for run in grid[grid["mixture"] == grid["mixture"].iloc[0]].to_dict("records"):
        for name, value in metrics[run["run"]].items():
            if name.count(".") < 2:
                rows.append((name, run["size"], run["fraction"], value))
    return pd.DataFrame(rows, columns=["metric", "size", "fraction", "value"])


def sentences_of(values: pd.DataFrame) -> list[str]:
    """Mean over runs, least and largest, a sentence for each metric and volume."""
    lines = []
    for (name, fraction), part in values.groupby(["metric", "fraction"], sort=False):
        cells = part.groupby("size", sort=False)["value"]
        shown = []
        for size, cell in cells:
            spread = f"{cell.min():.3g} .. {cell.max():.3g}, {len(cell)} runs"
            shown.append(f"{size} {cell.mean():.3g} ({spread})")
        lines.append(f"{name}, {fraction:.0%} of the data: {'; '.join(shown)}.")
    return lines


def paired(
    grid: pd.DataFrame,
    metric: str,
    axis: str,
    value: object,
    reference: object,
) -> np.ndarray:
    """(n,) differences of a metric between runs with a value of an axis and a reference value.

    All other axes are equal, and both losses are measured on the same data.
    """
    others = [name for name in COMPARABLE if name != axis]
    columns = [*others, metric]
    ours = grid.loc[grid[axis] == value, columns]
    theirs = grid.loc[grid[axis] == reference, columns]
    both = ours.merge(theirs, on=others)
    return np.asarray((both[f"{metric}_x"] - both[f"{metric}_y"]).dropna())


def verdict(what: str, pairs: np.ndarray, sign: int) -> list[str]:
    """A sentence about at least two differences. sign: 1 if more is better, -1 if less."""
    if len(pairs) < 2:
        return []
    low, high = over_runs(pairs)
    judgement = "worse"
    if low <= 0 <= high:
        judgement = "no difference beyond chance"
    elif sign * low > 0:
        judgement = "better"
    difference = f"{np.mean(pairs):+.3g} ({low:+.3g} .. {high:+.3g}, {len(pairs)} pairs)"
    return [f"{what}: {difference}: {judgement}."]


def tuning(found: Json) -> list[str]:
    """Which options were tuned and which not, and what else the numbers leave out, in sentences."""
    lines = other_versions(found)
    without_loss = []
    for run in found["runs"]:
        if run["state"] == "done" and not has_loss(run):
            without_loss.append(run["run"])
    if without_loss:
        names = ", ".join(without_loss)
        lines.append(f"Left out, since their held-out loss is not a finite number: {names}.")
    if any(run["fraction"] < 1 for run in found["runs"]):
        same = "All seeds of a size train on the same episodes of a fraction (data.seed)"
        lines.append(f"{same}: intervals over seeds leave out the choice of data.")
    if found["study"]["lr"]["rule"] == "fixed":
        untuned = "The learning rate was not tuned per size"
        lines.append(f"{untuned}: one value favours some sizes, so this is no law of size.")
    for size, rates in found["tuned"].items():
        if not rates:
            continue
        losses = ", ".join(f"{float(rate):g}: {loss:.4g}" for rate, loss in rates.items())
        how = f"by held-out loss on the smallest data ({losses})"
        chosen = float(best_rate(rates))
        tried = [float(rate) for rate in rates]
        line = f"{size}: learning rate {chosen:g}, {how}."
        if len(tried) > 1 and chosen in (min(tried), max(tried)):
            line += " This is the edge of the values tried: the best value may lie beyond it."
        lines.append(line)
    shape = "batch size, width against depth, weight decay, warm-up"
    lines.append(f"Not tuned: {shape}; the learning rate on larger data.")
    budget = found["study"]["budget"]["rule"]
    unconverged = "runs are not trained to convergence, and small data is repeated many times"
    lines.append(f"Budget rule `{budget}`: {unconverged}.")
    lines.append("D counts distinct steps of data, C all computation.")
    return lines


def other_versions(found: Json) -> list[str]:
    """A sentence for each package, or the commit, that runs had in another version than this
    report.
    """
    lines = []
    recorded = [run["versions"] for run in found["runs"] if "versions" in run]
    for name, now in found["versions"].items():
        counts = Counter(versions.get(name) for versions in recorded)
        if counts.keys() - {now}:
            shown = ", ".join(f"{version} ({count} runs)" for version, count in counts.items())
            lines.append(f"{name}: the runs had {shown}, this report {now}.")
    return lines
