"""Scores with intervals, a table over seeds, and one HTML file with pictures in it that needs nothing else."""

import base64
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
from scipy import stats

# what makes rows of several seeds one result
KEYS = ("dataset", "protocol", "policy", "text", "target_return", "headline", "decode")


def interval(values, seed=0):
    """The 95 % bootstrap interval of a mean: (low, high). Percentile method, 10,000 resamples."""
    values = np.asarray(values, np.float64)
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    found = stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(seed))
    return tuple(map(float, found.confidence_interval))


def normalised(episodes, reference):
    """The normalised score of each episode, reference: (random, expert) returns: 100 (return - random) / (expert - random)."""
    low, high = reference
    return np.array([100 * (e.rewards.sum() - low) / (high - low) for e in episodes])


def interquartile_mean(values):
    """The mean of the middle half: less moved by one lucky seed than the mean, by one bad one less than the median."""
    return float(stats.trim_mean(values, 0.25))


def read_rows(folder):
    """The rows of results.jsonl; of rows about the same run and protocol, the last."""
    rows = {}
    for line in (Path(folder) / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[tuple(map(str, [*(row.get(key) for key in KEYS), row["seed"], row.get("run")]))] = row
    return list(rows.values())


def summarise(rows):
    """Rows of several seeds -> one result each: mean, interquartile mean and interval over seeds, or over the episodes of one."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(key)) for key in KEYS), []).append(row)
    results = []
    for members in groups.values():
        scores = [row["score"] for row in members]
        low, high = interval(scores) if len(members) > 1 else (members[0]["low"], members[0]["high"])
        shared = {key: members[0].get(key) for key in KEYS}
        results.append(
            shared
            | {
                "score": float(np.mean(scores)),
                "iqm": interquartile_mean(scores),
                "low": low,
                "high": high,
                "return": float(np.mean([r["return"] for r in members])),
            }
            | {"seeds": len(members), "n": sum(row["n"] for row in members), "seconds": sum(row["seconds"] for row in members)}
        )
    return sorted(results, key=lambda r: (r["dataset"], not r["headline"], -r["score"]))


def table(results):
    """Results as lines of text, one each."""
    lines = [
        f"{'dataset':34s} {'protocol':16s} {'policy':24s} {'target':>7s} {'score':>7s}  {'95 % interval':>16s} {'return':>8s}  seeds x episodes"
    ]
    for r in results:
        target = "-" if r["target_return"] is None else f"{r['target_return']:.1f}"
        lines.append(
            f"{r['dataset']:34s} {r['protocol']:16s} {r['policy']:24s} {target:>7s} {r['score']:7.1f}  "
            f"{r['low']:7.1f} .. {r['high']:5.1f} {r['return']:8.1f}  {r['seeds']} x {r['n'] // r['seeds']}{'' if r['headline'] else '  (sweep)'}"
        )
    return "\n".join(lines)


def write_report(folder, published, unit=""):
    """folder/report.html and its pictures as PNG. published: {name: score} on other data, or {}. unit: of scores that are not normalised. -> path"""
    folder = Path(folder)
    rows = read_rows(folder)
    results = summarise(rows)
    pictures = {"scores.png": draw_scores([r for r in results if r["headline"]], published, unit)}
    curves = {row["run"]: row["policy"] for row in rows if row.get("run") and (Path(row["run"]) / "metrics.jsonl").is_file()}
    if curves:
        pictures["learning.png"] = draw_curves(curves)
    for name, figure in pictures.items():
        save(folder / name, figure)
    images = [*pictures, *sorted(p.name for p in folder.glob("rollout-*.png"))]
    columns = [*KEYS[:5], "score", "iqm", "low", "high", "return", "seeds", "n", "seconds", "headline"]

    from jinja2 import Template

    template = Template((Path(__file__).parent / "report.html").read_text(), autoescape=True)
    page = template.render(
        title=f"decisionllm: {', '.join(sorted({r['dataset'] for r in results}))}", columns=columns, results=results, published=published, unit=unit,
        images=[(name, base64.b64encode((folder / name).read_bytes()).decode()) for name in images],
        facts=sorted({json.dumps(row.get("versions", {})) for row in rows}), rows=[json.dumps(row) for row in rows],
    )  # fmt: skip
    path = folder / "report.html"
    path.write_text(page)
    return path


def figure(width=7.0, height=4.0):
    """A figure that needs no display and leaves no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(path, made):
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", dpi=110)
    path.write_bytes(buffer.getvalue())


def draw_conditions(axis, scores, title):
    """Scores by what disturbed the world: {words: score}, in their order."""
    axis.plot(list(scores.values()), "o-", color="black", markersize=3)
    axis.set_xticks(range(len(scores)), scores, rotation=60, ha="right", fontsize=6)
    axis.set_title(title, fontsize=8)


def draw_scores(results, published, unit=""):
    """A line a policy, the best in the mean on top, and on it a dot with its interval for each protocol; published scores in grey below."""
    pairs = Counter(
        (r["policy"], r["protocol"]) for r in {(r["policy"], r["protocol"], r["score"]): r for r in results}.values()
    )
    named = lambda r: r["policy"] if pairs[r["policy"], r["protocol"]] == 1 else f"{r['policy']}\n{r['dataset']}"  # noqa: E731
    scores = {}
    for r in results:
        scores.setdefault(named(r), []).append(r["score"])
    names = [*sorted(scores, key=lambda name: -np.mean(scores[name])), *(f"{name}, elsewhere" for name in published)]
    protocols = list(dict.fromkeys(r["protocol"] for r in results))
    made = figure(8, 0.35 * len(names) + 1.2)
    axis, row = made.subplots(), {name: y for y, name in enumerate(names)}
    for k, protocol in enumerate(protocols):
        members = [r for r in results if r["protocol"] == protocol]
        y = [row[named(r)] + 0.5 * ((k + 1) / (len(protocols) + 1) - 0.5) for r in members]
        axis.hlines(y, [r["low"] for r in members], [r["high"] for r in members], color=f"C{k % 10}", linewidth=1)
        axis.plot([r["score"] for r in members], y, "o", markersize=4, color=f"C{k % 10}", label=protocol)
    axis.plot(published.values(), range(len(scores), len(names)), "o", color="lightgrey")
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.grid(axis="x", linewidth=0.3)
    axis.axvline(0, color="black", linewidth=0.5)
    if not unit:
        axis.axvline(100, color="black", linewidth=0.5, linestyle=":")
    axis.set_xlabel(unit or "normalised score (0: random policy, 100: reference controller)")
    axis.legend(fontsize=7)
    return made


def draw_curves(runs):
    """The loss of each run over its steps, training and held out."""
    made = figure(8, 3.5)
    axis = made.subplots()
    for i, (run, policy) in enumerate(sorted(runs.items())):
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        axis.plot(steps, [line["nll"] for line in lines], color=f"C{i % 10}", alpha=0.35)
        held_out = [line.get("held_out_nll", np.nan) for line in lines]
        axis.plot(steps, held_out, color=f"C{i % 10}", label=f"{policy} ({Path(run).name})")
    axis.set_xlabel("step")
    axis.set_ylabel("negative log-likelihood, nats an action\n(faint: training, full: held out)")
    axis.legend(fontsize=7)
    return made
