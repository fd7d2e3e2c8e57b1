"""Scores with intervals, a table over seeds, and one HTML file with its pictures that needs no other file."""

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from decisionllm.eval import identity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Published = Mapping[str, Mapping[str, float]]  # {dataset: {name: score}}

# rows that agree in these, in their configuration and in how they were evaluated are one result, over seeds: see `identity.pools`
KEYS = ("dataset", "protocol", "policy", "text", "target_return", "headline", "decode", "changed")
COLUMNS = [*KEYS[:5], "score", "iqm", "low", "high", "return", "latched", "seeds", "n", "seconds", "headline"]
LINE = "{:34s} {:36s} {:{}s} {:>7s} {:>7s}  {:>16s} {:>8s} {:>8s}  {}"
TITLES = ("dataset", "protocol", "policy", "target", "score", "95 % interval", "return", "latched", "seeds x episodes")
NORMALISED = "normalised score (0: random policy, 100: reference controller)"


def interval(values: Any, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean: (low, high). Percentile method, 10,000 resamples."""
    values = np.asarray(values, np.float64)
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    found = stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(seed))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def read_rows(folder: str | Path) -> list[Row]:
    """The rows of results.jsonl; of rows about the same run, protocol and seed of the environment, the last."""
    rows: dict[tuple[str, ...], Row] = {}
    for line in (Path(folder) / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        key = tuple(str(row.get(name)) for name in (*KEYS, "seed", "run"))
        if "options" in row:
            # a row of an earlier version has no options; it is replaced like any other
            if key in rows and rows[key].get("env_seed") in (None, row.get("env_seed")):
                del rows[key]
            key += (str(row.get("env_seed")), str(row.get("part")))
        rows[key] = row
    return list(rows.values())


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One result for the rows of several seeds: mean, interquartile mean (one lucky seed moves it less than the mean, one bad seed less
    than the median), interval over seeds, or over the episodes of one seed. Results that look alike are named by what differs."""
    groups = identity.pools(rows, KEYS)
    results = []
    for members, policy in zip(groups, identity.names(groups), strict=True):
        first, scores = members[0], [row["score"] for row in members]
        latched = [row["latched_score"] for row in members if "latched_score" in row]  # Maze2D: see its metrics
        low, high = interval(scores) if len(members) > 1 else (first["low"], first["high"])
        results.append({
            "latched": float(np.mean(latched)) if latched else None,
            **{key: first.get(key) for key in KEYS}, "policy": policy, "protocol": ", ".join(filter(None, (first["protocol"], first.get("changed")))),
            "score": float(np.mean(scores)), "iqm": float(stats.trim_mean(scores, 0.25)),
            "low": low, "high": high, "return": float(np.mean([row["return"] for row in members])), "seeds": len(members),
            "n": sum(row["n"] for row in members), "seconds": sum(row["seconds"] for row in members),
        })  # fmt: skip
    return sorted(results, key=lambda r: (r["dataset"], not r["headline"], -r["score"]))


def policy_names(rows: Sequence[Row]) -> list[str]:
    """The policy of each row as `summarise` names its result."""
    groups = identity.pools(rows, KEYS)
    named = {id(row): name for members, name in zip(groups, identity.names(groups), strict=True) for row in members}
    return [named[id(row)] for row in rows]


def table(results: Sequence[Row]) -> str:
    """Results as text, one line for each."""
    width = max([24, *(len(r["policy"]) for r in results)])
    lines = [LINE.format(*TITLES[:3], width, *TITLES[3:])]
    for r in results:
        latched = "-" if r["latched"] is None else f"{r['latched']:.1f}"
        target = "-" if r["target_return"] is None else f"{r['target_return']:.1f}"
        scores = f"{r['score']:.1f}", f"{r['low']:.1f} .. {r['high']:5.1f}", f"{r['return']:.1f}", latched
        count = f"{r['seeds']} x {r['n'] // r['seeds']}" + "  (sweep)" * (not r["headline"])
        lines.append(LINE.format(r["dataset"], r["protocol"], r["policy"], width, target, *scores, count))
    return "\n".join(lines)


def write_report(folder: str | Path, published: Published, units: Mapping[str, str]) -> Path:
    """Write report.html of results.jsonl, with its pictures as PNG beside it.

    Args:
        folder: of results.jsonl.
        published: scores of other work, on other data: {dataset: {name: score}}.
        units: of the scores: {dataset: unit}; empty for normalised scores. A dataset that is missing has an unknown unit.

    Returns:
        The path of report.html.
    """
    folder = Path(folder)
    rows = read_rows(folder)
    results, policies = summarise(rows), policy_names(rows)
    datasets = list(dict.fromkeys(r["dataset"] for r in results))
    labels = {name: units[name] or NORMALISED if name in units else "score" for name in datasets}
    published = {name: scores for name, scores in published.items() if name in labels and scores}
    pictures = {"scores.png": draw_scores([r for r in results if r["headline"]], published, labels)}
    runs = {row["run"]: policies[i] for i, row in enumerate(rows) if row.get("run")}
    curves = {run: policy for run, policy in runs.items() if (Path(run) / "metrics.jsonl").is_file()}
    if curves:
        pictures["learning.png"] = draw_curves(curves)
    tables: dict[str, Any] = {}
    for row, policy in zip(rows, policies, strict=True):
        for name, table in row.items():  # a probe is in all rows of its run
            if isinstance(table, dict) and "shares" in table and table not in tables.values():
                tables[f"{policy}, {row['protocol']}, seed {row['seed']}: {name}"] = table
    if tables:
        pictures["tables.png"] = draw_tables(tables)
    for name, made in pictures.items():
        made.savefig(folder / name)
    images = [*pictures, *sorted(path.name for kind in ("rollout", "attention") for path in folder.glob(f"{kind}-*.png"))]
    return write_page(
        folder, Path(__file__).parent / "report.html", images, columns=COLUMNS, results=results, published=published, labels=labels,
        rows=[json.dumps(row) for row in rows], versions=sorted({json.dumps(row.get("versions", {})) for row in rows}),
    )  # fmt: skip


def write_page(folder: Path, template: Path, images: Sequence[str], **values: Any) -> Path:
    """Write report.html of a template with these values and, as base64, these PNG of the folder. Returns its path."""
    from jinja2 import Template

    encoded = [(name, base64.b64encode((folder / name).read_bytes()).decode()) for name in images]
    page = folder / "report.html"
    page.write_text(Template(template.read_text(), autoescape=True).render(values, images=encoded))
    return page


def figure(width: float, height: float, title: str = "") -> "Figure":
    """A figure that needs no display and changes no global state. width, height: inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=110, layout="constrained")
    if title:
        made.suptitle(title, fontsize=9)
    FigureCanvasAgg(made)
    return made


def draw_scores(results: Sequence[Row], published: Published, labels: Mapping[str, str]) -> "Figure":
    """One panel for each dataset: the policies, best mean on top, with a dot and interval for each protocol; published scores in grey."""
    rows: dict[str, dict[str, list[float]]] = {r["dataset"]: defaultdict(list) for r in results}
    for r in results:
        rows[r["dataset"]][r["policy"]].append(r["score"])
    protocols = list(dict.fromkeys(r["protocol"] for r in results))
    heights = [0.35 * (len(policies) + len(published.get(name, {}))) + 1.2 for name, policies in rows.items()]
    made = figure(8, sum(heights))
    panels = made.subplots(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (dataset, policies) in zip(panels, rows.items(), strict=True):
        names, other = sorted(policies, key=lambda name: -np.mean(policies[name])), published.get(dataset, {})
        for k, protocol in enumerate(protocols):
            if members := [r for r in results if (r["dataset"], r["protocol"]) == (dataset, protocol)]:
                y = [names.index(r["policy"]) + 0.5 * ((k + 1) / (len(protocols) + 1) - 0.5) for r in members]
                axis.hlines(y, [r["low"] for r in members], [r["high"] for r in members], color=f"C{k % 10}", linewidth=1)
                axis.plot([r["score"] for r in members], y, "o", markersize=4, color=f"C{k % 10}", label=protocol)
        axis.plot(list(other.values()), range(len(names), len(names) + len(other)), "o", color="lightgrey")
        axis.set_yticks(range(len(names) + len(other)), [*names, *(f"{name}, published" for name in other)], fontsize=7)
        axis.invert_yaxis()
        axis.grid(axis="x", linewidth=0.3)
        for at in (0, 100) if labels[dataset] == NORMALISED else (0,):
            axis.axvline(at, color="black", linewidth=0.5, linestyle=":" if at else "-")
        axis.set(xlabel=labels[dataset], title=dataset)
        axis.legend(fontsize=7)
    return made


def draw_tables(tables: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """A heat map of each table of shares within 0 .. 1: {title: {rows, columns, shares}}."""
    widest = max(len(table["columns"]) for table in tables.values())
    made = figure(1.5 + 0.4 * widest, sum(1.2 + 0.3 * len(table["rows"]) for table in tables.values()))
    panels = made.subplots(len(tables), squeeze=False, height_ratios=[4 + len(table["rows"]) for table in tables.values()])
    for axis, (title, table) in zip(panels[:, 0], tables.items(), strict=True):
        image = axis.imshow(table["shares"], cmap="viridis", vmin=0, vmax=1)
        axis.set_xticks(range(len(table["columns"])), table["columns"], fontsize=7, rotation=60)
        axis.set_yticks(range(len(table["rows"])), table["rows"], fontsize=7)
        axis.set_title(title, fontsize=7)
        axis.set_ylabel("goal in the text", fontsize=7)
        made.colorbar(image, ax=axis)
    return made


def draw_curves(runs: Mapping[str, str]) -> "Figure":
    """The loss of each run over its steps, on training data and held out."""
    made = figure(8, 3.5)
    axis = made.subplots()
    for i, (run, policy) in enumerate(sorted(runs.items())):
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        axis.plot(steps, [line["nll"] for line in lines], color=f"C{i % 10}", alpha=0.35)
        held_out = [line.get("held_out_nll", np.nan) for line in lines]
        axis.plot(steps, held_out, color=f"C{i % 10}", label=f"{policy} ({Path(run).name})")
    axis.set(xlabel="step", ylabel="negative log-likelihood, nats an action\n(faint: training, full: held out)")
    axis.legend(fontsize=7)
    return made
