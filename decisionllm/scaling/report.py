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
from decisionllm.files import explain_errors, write_json
from decisionllm.scaling import figures, law
from decisionllm.scaling.grid import best_rate
from decisionllm.scaling.study_options import is_excluded
from decisionllm.schema import Json

AXES = ["size", "fraction", "mixture", "seed"]
COMPARABLE = [*AXES, "reference"]  # what two runs have in common, but for the axis that is compared
COLUMNS = {  # of the table of runs, with their headings
    "run": "run",
    "state": "state",
    "size": "size",
    "fraction": "share of the data",
    "mixture": "quality",
    "seed": "seed",
    "lr": "learning rate",
    "held_out": "held-out loss",
    "action_error": "action error",
    "score": "score",
    "low": "95 % from",
    "high": "95 % to",
    "parameters": "parameters",
    "trained": "trained parameters",
    "non_embedding": "parameters without embeddings",
    "data_steps": "steps of data",
    "steps": "training steps",
    "tokens": "tokens",
    "flops": "FLOPs",
    "train_seconds": "seconds of training",
    "reason": "reason of a failure",
}


def read_study(path: str | Path) -> Json:
    """Read study.json as it was written, without what `write_report` derives; the runs are not
    needed.
    """
    with explain_errors(
        f"{path}: expected the study.json of a study, could not read it",
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        return {key: content[key] for key in ("study", "versions", "flops", "tuned", "runs")}


def write_report(folder: str | Path, study: Json, say: Callable[[str], object] = print) -> Path:
    """Write study.json, the figures as PNG, and report.html with the figures in it.

    Args:
        folder: where to.
        study: what `read_study` returns: the study, its versions, the losses of the tuning runs,
            and every run.
        say: prints the sentences about laws and comparisons.

    Returns:
        The path of report.html.

    Raises:
        ValueError: no run of the grid is done with a finite held-out loss.
    """
    folder = Path(folder)
    grid = select_finished_runs(study)
    if grid.empty:
        raise ValueError(
            f"{folder}: expected at least one run of the grid that is done, found none"
        )
    fits = fit_law(grid)
    values = collect_metrics(study, grid)
    sentences = {
        "laws": describe_fits(fits),
        "findings": [*describe_comparisons(grid), *describe_metrics(values)],
        "tuning": describe_tuning(study),
    }
    law_row = fits["law"] and fits["law"].row()
    derived = {"fits": fits | {"law": law_row}, "sentences": sentences}
    write_json(folder / "study.json", study | derived)
    images = []
    for name, figure in figures.draw_figures(grid, fits, values).items():
        images.append(f"{name}.png")
        figure.savefig(folder / f"{name}.png")
    page = write_page(
        folder,
        Path(__file__).parent / "study.html",
        images,
        captions=figures.CAPTIONS,
        **study,
        sentences=sentences,
        columns=COLUMNS,
        power_of_ten=power_of_ten,
        counts=Counter(run["state"] for run in study["runs"]),
    )
    say("\n".join([*sentences["laws"], *sentences["findings"], f"report: {page}"]))
    return page


def power_of_ten(number: float) -> tuple[str, int]:
    """Return a positive number as digits and a power of ten: 3.14e13 -> ("3.14", 13)."""
    digits, _, exponent = f"{number:.2e}".partition("e")
    return digits, int(exponent)


def select_finished_runs(study: Json) -> pd.DataFrame:
    """Select the runs of the grid that are done, at the learning rate that was chosen for their
    size.

    `excess` is the held-out loss above the least that the head can have: laws are fitted to it,
    since the zero of a density has no meaning.
    """
    rate_by_size = {
        size: float(best_rate(rates)) for size, rates in study["tuned"].items() if rates
    }
    done = []
    for run in study["runs"]:
        # a tuning run may stand where the grid has no run
        cell = run["size"], run["mixture"], run["fraction"], run["seed"]
        is_in_grid = not is_excluded(study["study"], *cell)
        is_chosen = rate_by_size.get(run["size"], run["lr"]) == run["lr"]
        if has_loss(run) and is_in_grid and is_chosen:
            done.append({"reference": "", "curve": []} | run)  # earlier reports lack these
    grid = pd.DataFrame(done, columns=[*COLUMNS, "reference", "floor", "quality", "curve"])
    return grid.astype({"score": float}).assign(excess=grid["held_out"] - grid["floor"])


def has_loss(run: Json) -> bool:
    """Return whether a run is done and its held-out loss is a finite number."""
    loss = run.get("held_out") if run["state"] == "done" else None
    return loss is not None and math.isfinite(loss)


def trend_p_values(grid: pd.DataFrame) -> dict[str, float]:
    """Test the trends: p that the loss falls with size and data, and the score with the loss."""
    p = law.trend_p_values(
        grid["non_embedding"], grid["data_steps"], grid["excess"], grid["quality"]
    )
    scored = grid.dropna(subset="score")
    if len(scored):
        p["score"] = law.falling_p_value(scored["excess"], scored["score"], scored["reference"])
    return p


def fit_law(grid: pd.DataFrame) -> Json:
    """Test the trends, and fit the law to the runs of the first quality.

    The law has no term for quality, so that it would be wrong for several qualities at once.
    """
    p = trend_p_values(grid)
    base = grid[grid["mixture"] == grid["mixture"].iloc[0]]
    columns = ("non_embedding", "data_steps", "excess")
    N, D, loss = (base[name].to_numpy(np.float64) for name in columns)
    return {"p": p, **law.describe(N, D, loss, p)}


def describe_fits(fits: Json) -> list[str]:
    """Describe the fits in sentences."""
    fit: law.Law | None = fits["law"]
    lines = []
    for name, what in (("size", "parameters"), ("data", "data")):
        p = fits["p"][name]
        trend = "the loss falls" if p <= law.CERTAIN else "no trend, the loss does not fall"
        lines.append(
            f"Held-out loss and {what}: {trend} with more {what} (rank test within the other "
            f"axes, p = {p:.2g})."
        )
    if fit is None:
        return [*lines, "No law is fitted: there is no trend, or too few runs or values."]
    lines += describe_law(fit)
    left_out = fits["left_out"]
    if left_out:
        size = f"{left_out['parameters']:,.0f} parameters"
        lines.append(
            f"Fitted without the largest model ({size}), the law misses its losses by "
            f"{left_out['missed']:+.1%} on average and {left_out['worst']:+.1%} at worst."
        )
    if "score" in fits["p"]:
        p = fits["p"]["score"]
        trend = "the score rises as the loss falls" if p <= law.CERTAIN else "no trend"
        lines.append(f"Score and loss: {trend} (p = {p:.2g}).")
    return lines


def describe_law(fit: law.Law) -> list[str]:
    """Describe the formula of a law, its intervals, and the exponents that are not determined."""
    formula = f"L = {fit.E:.3g}"
    if fit.A:
        formula += f" + {fit.A:.3g} / N^{fit.alpha:.3f}"
    if fit.B:
        formula += f" + {fit.B:.3g} / D^{fit.beta:.3f}"
    formula += ", nats an action above the floor of the head"
    ranges = [f"{name} {low:.3g} .. {high:.3g}" for name, (low, high) in fit.intervals.items()]
    lines = [f"{formula}.", f"95 % intervals: {', '.join(ranges)}."]
    undetermined = law.undetermined_exponents(fit)
    if undetermined:
        lines.append(
            f"These runs do not determine {', '.join(undetermined)}: the interval is "
            "wide, or reaches the bounds of the fit."
        )
    return lines


def describe_comparisons(grid: pd.DataFrame) -> list[str]:
    """Describe paired comparisons in sentences.

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
                pairs = paired_differences(part, metric, "size", size, smallest)
                lines += describe_difference(f"{what}: {size} against {smallest}", pairs, sign)
            lines += describe_best_size(what, part[part["mixture"] == first], metric, sizes, sign)
        for quality in others:
            pairs = paired_differences(whole, metric, "mixture", quality, first)
            lines += describe_difference(
                f"{name}, all data: quality {quality} against {first}", pairs, sign
            )
    return lines


def describe_best_size(
    what: str, grid: pd.DataFrame, metric: str, sizes: list[str], sign: int
) -> list[str]:
    """Name the best size in a sentence, or the sizes that cannot be told from the best mean.

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
    pairs = {size: paired_differences(grid, metric, "size", size, best) for size in sizes}
    if all(len(pairs[size]) < 2 for size in sizes if size != best):
        return [f"{what}: {best} has the best mean; one run of a size tells it from no other."]
    alike = []
    for size in sizes:
        low, high = over_runs(pairs[size]) if len(pairs[size]) > 1 else (0.0, 0.0)
        if low <= 0 <= high:
            alike.append(size)
    if len(alike) == 1:
        return [f"{what}: the best size is {best}."]
    return [
        f"{what}: no size is the best beyond chance; {', '.join(alike)} cannot be told apart, "
        f"the smallest of them is {alike[0]}."
    ]


def collect_metrics(study: Json, grid: pd.DataFrame) -> pd.DataFrame:
    """Collect further measurements of the evaluations beside the score, on data of the first
    quality.

    Returns:
        Columns metric, size, fraction, value; a row for each run and metric.
    """
    metrics = {run["run"]: run.get("metrics") or {} for run in study["runs"]}
    rows = []
    for run in grid[grid["mixture"] == grid["mixture"].iloc[0]].to_dict("records"):
        for name, value in metrics[run["run"]].items():
            if name.count(".") < 2:
                rows.append((name, run["size"], run["fraction"], value))
    return pd.DataFrame(rows, columns=["metric", "size", "fraction", "value"])


def describe_metrics(values: pd.DataFrame) -> list[str]:
    """Describe mean over runs, least and largest: a sentence for each metric and volume."""
    lines = []
    for (name, fraction), part in values.groupby(["metric", "fraction"], sort=False):
        cells = part.groupby("size", sort=False)["value"]
        means = []
        for size, cell in cells:
            spread = f"{cell.min():.3g} .. {cell.max():.3g}, {len(cell)} runs"
            means.append(f"{size} {cell.mean():.3g} ({spread})")
        lines.append(f"{name}, {fraction:.0%} of the data: {'; '.join(means)}.")
    return lines


def paired_differences(
    grid: pd.DataFrame,
    metric: str,
    axis: str,
    value: object,
    reference: object,
) -> np.ndarray:
    """Return (n,) differences of a metric between runs with a value of an axis and a reference
    value.

    All other axes are equal, and both losses are measured on the same data.
    """
    others = [name for name in COMPARABLE if name != axis]
    columns = [*others, metric]
    ours = grid.loc[grid[axis] == value, columns]
    theirs = grid.loc[grid[axis] == reference, columns]
    both = ours.merge(theirs, on=others)
    return np.asarray((both[f"{metric}_x"] - both[f"{metric}_y"]).dropna())


def describe_difference(what: str, pairs: np.ndarray, sign: int) -> list[str]:
    """Describe at least two differences in a sentence. sign: 1 if more is better, -1 if less."""
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


def describe_tuning(study: Json) -> list[str]:
    """Describe which options were tuned, and what the numbers leave out, in sentences."""
    lines = describe_versions(study)
    without_loss = []
    for run in study["runs"]:
        if run["state"] == "done" and not has_loss(run):
            without_loss.append(run["run"])
    if without_loss:
        names = ", ".join(without_loss)
        lines.append(f"Left out, since their held-out loss is not a finite number: {names}.")
    if any(run["fraction"] < 1 for run in study["runs"]):
        lines.append(
            "All seeds of a size train on the same episodes of a fraction (data.seed): "
            "intervals over seeds leave out the choice of data."
        )
    if study["study"]["lr"]["rule"] == "fixed":
        lines.append(
            "The learning rate was not tuned per size: one value favours some sizes, so this "
            "is no law of size."
        )
    for size, rates in study["tuned"].items():
        if not rates:
            continue
        losses = ", ".join(f"{float(rate):g}: {loss:.4g}" for rate, loss in rates.items())
        how = f"by held-out loss on the smallest data ({losses})"
        rate = float(best_rate(rates))
        tried = [float(rate) for rate in rates]
        line = f"{size}: learning rate {rate:g}, {how}."
        if len(tried) > 1 and rate in (min(tried), max(tried)):
            line += " This is the edge of the values tried: the best value may lie beyond it."
        lines.append(line)
    lines.append(
        "Not tuned: batch size, width against depth, weight decay, warm-up; the learning rate "
        "on larger data."
    )
    budget = study["study"]["budget"]["rule"]
    lines.append(
        f"Budget rule `{budget}`: runs are not trained to convergence, and small data is "
        "repeated many times."
    )
    lines.append("D counts distinct steps of data, C all computation.")
    return lines


def describe_versions(study: Json) -> list[str]:
    """Describe each package, or the commit, that runs had in another version than this report."""
    lines = []
    recorded = [run["versions"] for run in study["runs"] if "versions" in run]
    for name, current in study["versions"].items():
        counts = Counter(versions.get(name) for versions in recorded)
        if counts.keys() - {current}:
            counted = ", ".join(f"{version} ({count} runs)" for version, count in counts.items())
            lines.append(f"{name}: the runs had {counted}, this report {current}.")
    return lines
