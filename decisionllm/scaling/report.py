"""The report of a study: laws, figures and findings from study.json alone, one HTML file that needs nothing else."""

import base64
import json
from pathlib import Path

import numpy as np

from decisionllm.eval.report import figure, interval, save
from decisionllm.scaling import law

AXES = ("size", "fraction", "mixture", "seed")
COLUMNS = ("run", "state", *AXES, "lr", "held_out", "action_error", "score", "low", "high", "parameters", "trained", "non_embedding",
           "data_steps", "steps", "tokens", "flops", "train_seconds", "converged", "reason")  # fmt: skip


def read(path):
    """study.json, as it was written; the runs are not needed."""
    try:
        found = json.loads(Path(path).read_text())
        return {key: found[key] for key in ("study", "versions", "flops", "tuned", "runs")}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: expected the study.json of a study, could not read it ({error!r})") from error


def write(folder, found, say=print):
    """folder/study.json, the figures as PNG, and report.html with them inside. found: what `read` gives. -> path of report.html"""
    folder, grid = Path(folder), rows(found)
    if not grid:
        raise ValueError(f"{folder}: expected at least one run of the grid that is done, found none")
    fits = fitted(grid)
    said = {"laws": told(fits), "findings": findings(grid, found["study"]), "tuning": tuning(found)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(found | {"fits": plain(fits), "said": said}, indent=1))
    drawn = draw(grid, fits)
    for name, made in drawn.items():
        save(folder / f"{name}.png", made)

    from jinja2 import Template

    template = Template((Path(__file__).parent / "study.html").read_text(), autoescape=True)
    page = template.render(
        title=f"Study {found['study']['name']}", study=found["study"], said=said, flops=found["flops"], columns=COLUMNS, runs=found["runs"],
        counts={state: sum(run["state"] == state for run in found["runs"]) for state in ("done", "failed", "planned", "running")},
        images=[(name, CAPTIONS[name], base64.b64encode((folder / f"{name}.png").read_bytes()).decode()) for name in drawn],
        versions=json.dumps(found["versions"]),
    )  # fmt: skip
    (folder / "report.html").write_text(page)
    say("\n".join([*said["laws"], *said["findings"], f"report: {folder / 'report.html'}"]))
    return folder / "report.html"


def rows(found):
    """The runs of the grid that are done: those at the learning rate that was chosen."""
    chosen = {size: min(rates, key=rates.get) for size, rates in found["tuned"].items() if rates}
    done = [run for run in found["runs"] if run["state"] == "done"]
    return [run for run in done if float(chosen.get(run["size"], run["lr"])) == run["lr"]]


def by_size(grid):
    """The sizes, smallest first: {size: parameters without embeddings}"""
    return dict(sorted({run["size"]: run["non_embedding"] for run in grid}.items(), key=lambda item: item[1]))


def column(grid, name):
    return np.array([np.nan if run[name] is None else run[name] for run in grid], np.float64)


def excess(grid):
    """Held-out loss above what the head can say at the least: what laws are of, since a density's own zero means nothing. (n,)"""
    return column(grid, "held_out") - column(grid, "floor")


def fitted(grid):
    """Everything that is fitted: the law, the frontier, and score against loss where there are scores."""
    N, D, q, C = (column(grid, name) for name in ("non_embedding", "data_steps", "quality", "flops"))
    fits = law.describe(N, D, excess(grid), q)
    best, power = law.frontier(C, excess(grid))
    fits |= {"frontier": {"runs": [grid[i]["run"] for i in best], "power": power}, "best": best}
    scored = np.isfinite(column(grid, "score"))
    return fits | {"score": law.saturate(excess(grid)[scored], column(grid, "score")[scored]) if scored.any() else None}


def told(fits):
    """What the fits say, a sentence each."""
    said, p = [], fits["p"]
    for name, what in (("size", "parameters"), ("data", "data")):
        falls = "falls with" if p[name] <= law.CERTAIN else "no trend: loss does not fall with"
        said.append(f"Held-out loss: {falls} {what} (rank test within the other axes, p = {p[name]:.2g}).")
    if fits["law"] is None:
        return [*said, "No law is fitted: there is no trend, or too few runs or values to tell."]
    E, parts = fits["law"], []
    for factor, name in (("A", "alpha"), ("B", "beta")):
        if getattr(E, factor):
            parts.append(f" + {getattr(E, factor):.3g} / {'N' if factor == 'A' else 'D'}^{getattr(E, name):.3f}")
    said.append(f"L = {E.E:.3g}{''.join(parts)}, nats an action above the head's floor" + (f"; D counts times quality^{E.gamma:.2f}." if E.gamma else "."))  # fmt: skip
    said.append(
        "95 % intervals: " + ", ".join(f"{name} {low:.3g} .. {high:.3g}" for name, (low, high) in E.intervals.items()) + "."
    )
    loose = [
        n for n in ("alpha", "beta", "gamma") for at in E.intervals.get(n, ()) if np.isclose(at, law.BOUNDS[n], rtol=0.02).any()
    ]
    if loose:
        said.append(
            f"Not determined by these runs: {', '.join(dict.fromkeys(loose))}; the interval reaches the bounds of what was tried."
        )
    if fits["left_out"]:
        left = fits["left_out"]
        said.append(f"Fitted without the largest model ({left['parameters']:,.0f} parameters), the law misses its losses by {left['missed']:+.1%} on average, {left['worst']:+.1%} at the worst.")  # fmt: skip
    if fits["frontier"]["power"]:
        E, K, gamma = fits["frontier"]["power"]
        said.append(f"On the compute frontier: L = {E:.3g} + {K:.3g} / C^{gamma:.3f}.")
    if fits["score"]:
        p = fits["score"]["p"]
        said.append(f"Score against loss: {'rises as loss falls' if p <= law.CERTAIN else 'no trend'} (p = {p:.2g}).")
    return said


def findings(grid, study):
    """The three claims against these runs: is bigger better with enough data, can large be worse on little, does quality matter."""
    sizes = list(by_size(grid))
    volumes, said = sorted({run["fraction"] for run in grid}), []
    qualities = list(dict.fromkeys(run["mixture"] for run in grid))
    metrics = {"held_out": ("held-out loss", -1), "score": ("score", 1)}
    for key, (name, sign) in metrics.items():
        known = {tuple(run[axis] for axis in AXES): run[key] for run in grid if run[key] is not None}
        for volume in dict.fromkeys([volumes[-1], volumes[0]]):
            for size in sizes[1:]:
                pairs = difference(known, (size, volume, None, None), (sizes[0], volume, None, None))
                said += sentence(f"{name}, {volume:.0%} of the data: {size} against {sizes[0]}", pairs, sign)
            means = {s: np.mean([v for k, v in known.items() if k[:3] == (s, volume, qualities[0])] or [np.nan]) for s in sizes}
            if np.isfinite(list(means.values())).all():
                said.append(f"{name}, {volume:.0%} of the data: the best size is {max(means, key=lambda s: sign * means[s])}.")
        for quality in qualities[1:]:
            pairs = difference(known, (None, volumes[-1], quality, None), (None, volumes[-1], qualities[0], None))
            said += sentence(f"{name}, all data: quality {quality} against {qualities[0]}", pairs, sign)
    return said


def difference(known, ours, theirs):
    """Paired differences of runs that agree where None stands: a list."""
    found = []
    for key, value in known.items():
        if all(want is None or want == have for want, have in zip(ours, key, strict=True)):
            other = tuple(have if want is None else want for want, have in zip(theirs, key, strict=True))
            found += [value - known[other]] if other in known and other != key else []
    return found


def sentence(what, pairs, sign):
    if len(pairs) < 2:
        return []
    low, high = interval(pairs)
    verdict = "no difference beyond chance" if low <= 0 <= high else "better" if sign * low > 0 else "worse"
    return [f"{what}: {np.mean(pairs):+.3g} ({low:+.3g} .. {high:+.3g}, {len(pairs)} pairs): {verdict}."]


def tuning(found):
    """What was tuned, and what was not."""
    said, rule = [], found["study"]["lr"]
    if rule["rule"] == "fixed":
        said.append(
            "The learning rate was not tuned per size: one value for all. Sizes that suit it are favoured, so this is no law of size."
        )
    for size, rates in found["tuned"].items():
        if not rates:
            continue
        chosen = min(rates, key=rates.get)
        at = sorted(map(float, rates))
        edge = (
            " It is the edge of what was tried: the best may lie beyond."
            if float(chosen) in (at[0], at[-1]) and len(at) > 1
            else ""
        )
        losses = ", ".join(f"{float(rate):g}: {loss:.4g}" for rate, loss in rates.items())
        said.append(f"{size}: learning rate {float(chosen):g}, by held-out loss on the smallest data ({losses}).{edge}")
    said.append("Not tuned: batch size, width against depth, weight decay, warm-up; the learning rate on larger data.")
    budget = found["study"]["budget"]["rule"]
    if budget == "converged":
        open_ = sum(run.get("converged") is False for run in found["runs"])
        said.append(f"Trained until twice the steps gained less than the tolerance; {open_} runs ended before that.")
    else:
        said.append(f"Budget rule `{budget}`: runs are not trained to convergence, and small data is seen many times over. D counts different steps of data, C all that is computed.")  # fmt: skip
    return said


def plain(fits):
    """The fits for JSON."""
    kept = {key: value for key, value in fits.items() if key != "best"}
    return kept | {"law": fits["law"] and fits["law"].row()}


CAPTIONS = {
    "size": "Loss against parameters, a colour a volume of data: the mean over seeds and every run; the law with its 95 % band, where there is one.",
    "data": "Loss against data, a colour a size.",
    "compute": "Loss against compute; ringed: the frontier, which no cheaper run beats.",
    "contours": "Where the law says losses are equal; points are runs, darker is less loss.",
    "score": "Score against loss, a colour a size, with the saturating logistic where there is a trend.",
    "crossover": "Score (or loss, where nothing is rolled out) of each size at each volume: lines that cross say that the best size depends on the data.",
    "quality": "What quality of data brings at full volume, a colour a size.",
    "curves": "Held-out loss over training, a run a line.",
}


def draw(grid, fits):
    """{name: figure}. Data of the first quality where size and volume are shown, so that one thing varies at a time."""
    first = grid[0]["mixture"]
    base = [run for run in grid if run["mixture"] == first]
    sizes = by_size(grid).items()
    colours = {size: f"C{i % 10}" for i, (size, _) in enumerate(sizes)}
    N, D, L = column(base, "non_embedding"), column(base, "data_steps"), excess(base)
    quality, made = base[0]["quality"], {}

    def axis(name, x, y="held-out loss above the head's floor\nnats an action", *, log="xy"):
        made[name] = figure(7, 4.2)
        here = made[name].subplots()
        here.set_xlabel(x)
        here.set_ylabel(y)
        for which in log:
            getattr(here, f"set_{which}scale")("log")
        here.grid(True, which="both", alpha=0.2)
        return here

    def lines(here, x, y, by, label, curve):
        """Points, their means, and the law, for each value of `by`."""
        for i, value in enumerate(sorted(set(by))):
            rows, colour = by == value, f"C{i % 10}"
            levels = np.unique(np.round(x[rows], 6))
            here.scatter(x[rows], y[rows], s=12, alpha=0.5, color=colour)
            if fits["law"] is None or curve is None:
                here.plot(
                    levels, [y[rows & np.isclose(x, level)].mean() for level in levels], color=colour, label=label(value, rows)
                )
            else:
                at = np.geomspace(x.min(), x.max(), 60)
                here.plot(at, curve(fits["law"], at, value, rows), color=colour, label=label(value, rows))
                if fits["law"].draws:
                    low, high = np.percentile([curve(d, at, value, rows) for d in fits["law"].draws], [2.5, 97.5], axis=0)
                    here.fill_between(at, low, high, color=colour, alpha=0.15)
        here.legend(fontsize=7)

    fraction = column(base, "fraction")
    lines(axis("size", "parameters without embeddings"), N, L, fraction, lambda f, r: f"{f:.0%} of the data, {D[r].mean():,.0f} steps",
          lambda fit, at, f, r: fit(at, D[r].mean(), quality))  # fmt: skip
    name_of = {n: size for size, n in sizes}
    lines(
        axis("data", "steps of training data"), D, L, N, lambda n, r: f"{name_of[n]}", lambda fit, at, n, r: fit(n, at, quality)
    )

    here, C = axis("compute", "training compute, FLOPs"), column(grid, "flops")
    for size, colour in colours.items():
        rows = np.array([run["size"] == size for run in grid])
        here.scatter(C[rows], excess(grid)[rows], s=12, alpha=0.6, color=colour, label=size)
    best = fits["best"]
    here.scatter(C[best], excess(grid)[best], s=70, facecolors="none", edgecolors="black", label="frontier")
    if fits["frontier"]["power"]:
        E, K, gamma = fits["frontier"]["power"]
        at = np.geomspace(C[best].min(), C[best].max(), 60)
        here.plot(at, E + K / at**gamma, color="black", linewidth=1)
    here.legend(fontsize=7)

    if fits["law"] and fits["law"].A and fits["law"].B:
        here = axis("contours", "parameters without embeddings", "steps of training data")
        n, d = (np.geomspace(x.min() / 1.3, x.max() * 1.3, 60) for x in (N, D))
        here.clabel(here.contour(n, d, fits["law"](n[None], d[:, None], quality), 10, cmap="viridis"), fontsize=7)
        here.scatter(N, D, c=L, cmap="viridis", edgecolors="black", linewidths=0.3)

    score, scored = column(grid, "score"), np.isfinite(column(grid, "score"))
    if scored.any():
        here = axis("score", "held-out loss above the head's floor, nats an action", "score", log="")
        for size, colour in colours.items():
            rows = np.array([run["size"] == size for run in grid]) & scored
            here.scatter(excess(grid)[rows], score[rows], s=12, color=colour, label=size)
        if "curve" in fits["score"]:
            here.plot(fits["score"]["at"], fits["score"]["curve"], color="black", linewidth=1)
            here.fill_between(fits["score"]["at"], *fits["score"]["band"], color="black", alpha=0.1)
        here.legend(fontsize=7)

    what, values = ("score", column(base, "score")) if scored.all() else ("held-out loss above the floor", L)
    spread(axis("crossover", "share of the data", what, log="x"), base, fraction, values, colours)
    if len({run["mixture"] for run in grid}) > 1:
        full = [run for run in grid if run["fraction"] == max(fraction)]
        values = column(full, "score") if scored.all() else excess(full)
        spread(axis("quality", "quality: mean return of the data, 1 that of the whole log", what, log=""), full, column(full, "quality"), values, colours)  # fmt: skip

    here = axis("curves", "step", "held-out loss, nats an action", log="x")
    for run in base:
        points = np.array([[step, loss] for step, _, loss in run["curve"] if loss is not None])
        if len(points):
            here.plot(
                *points.T, color=colours[run["size"]], alpha=0.3 + 0.6 * (run["fraction"] == max(fraction)), linewidth=0.8
            )
    for size, colour in colours.items():
        here.plot([], [], color=colour, label=size)
    here.plot([], [], color="grey", alpha=0.3, label="pale: not all data")
    here.legend(fontsize=7)
    return made


def spread(here, grid, x, y, colours):
    """The mean over seeds of each size along x, with whiskers from the least to the most."""
    for i, (size, colour) in enumerate(colours.items()):
        rows = np.array([run["size"] == size for run in grid])
        levels = np.unique(x[rows])
        each = [y[rows & (x == level)] for level in levels]
        at = levels * (1.02**i if here.get_xscale() == "log" else 1)
        means = np.array([values.mean() for values in each])
        whiskers = [means - [v.min() for v in each], [v.max() for v in each] - means]
        here.errorbar(at, means, np.maximum(whiskers, 0), color=colour, capsize=2, marker="o", markersize=3, label=size)
    here.legend(fontsize=7)
