"""The figures of a study."""

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decisionllm.eval.report import figure
from decisionllm.scaling.law import Law, allocate, cost

CAPTIONS = {
    "size": "Loss against parameters, one colour for each volume of data: every run and the mean over seeds, or the law with its 95 % band.",
    "data": "Loss against data, one colour for each size.",
    "compute": "Loss against compute. Ringed: the frontier, the runs that no cheaper run beats.",
    "isoflop": "Loss against parameters at equal compute, by the law; a cross marks the least. Points are runs, coloured by compute.",
    "intrinsic": "Score against compute, one colour for each size. Black: the most that a run of so much compute reaches, means over seeds.",
    "score": "Score against loss, one colour for each size, with the fitted logistic where there is a trend.",
    "crossover": "Score (or loss, without rollouts) of each size at each volume. Where lines cross, the best size depends on the data.",
    "quality": "Score (or loss) by quality of the data at full volume, one colour for each size.",
    "shares": "Shares that the evaluations measured, on all data: mean over runs, least and largest.",
    "curves": "Held-out loss during training, one line for each run. Dashed: not all data.",
}
LOSS = "held-out loss above the head's floor\nnats an action"
MEAN_RETURN = "quality: mean return of the data, 1: that of the whole log"
PARAMETERS, STEPS = "parameters without embeddings", "steps of training data"
POINTS: dict[str, Any] = {"s": 14, "alpha": 0.6, "linewidth": 0}
ROOM = 80  # most letters that fit side by side below an axis


def draw(grid: pd.DataFrame, fits: dict[str, Any], values: pd.DataFrame) -> dict[str, Figure]:
    """{name: figure} of the runs of a grid, and of the values that `report.measured` finds. Where size and volume are shown, data of the first quality, so that one thing varies at a time."""
    grid = grid.sort_values("non_embedding", kind="stable")
    base = grid[grid["mixture"] == grid["mixture"].loc[0]]
    made: dict[str, Figure] = {}
    scales: dict[str, dict[str, Any]] = {}  # set at the end, since seaborn takes means of logarithms on log axes

    def axis(name: str, x: str, y: str = LOSS, log: str = "xy") -> Axes:
        made[name] = figure(7, 4.2)
        axes: Axes = made[name].subplots()
        axes.set(xlabel=x, ylabel=y)
        axes.grid(True, which="both", alpha=0.2)
        scales[name] = {f"{which}scale": "log" for which in log}
        return axes

    sizes, fractions = base["non_embedding"].nunique(), base["fraction"].nunique()
    if sizes > 1:
        volumes = base.groupby("fraction")["data_steps"].transform("mean")
        each = zip(base["fraction"], volumes, strict=True)
        by_volume = base.assign(volume=[f"{share:.0%} of the data, {steps:,.0f} steps" for share, steps in each])
        by_volume = by_volume.sort_values("fraction", kind="stable")
        trend(axis("size", PARAMETERS), by_volume, "non_embedding", "volume", fits["law"])
    if fractions > 1:
        trend(axis("data", STEPS), base, "data_steps", "size", fits["law"])
    compute(axis("compute", "training compute, FLOPs"), grid, fits["frontier"])
    if fits["law"] and fits["law"].A and fits["law"].B:
        k = cost(*(base[name] for name in ("non_embedding", "data_steps", "flops")))
        isoflop(axis("isoflop", PARAMETERS), base, fits["law"], k)
    if grid["score"].notna().any():
        axes = axis("intrinsic", "training compute, FLOPs", "score", log="x")
        sns.scatterplot(grid, x="flops", y="score", hue="size", palette=colours(grid["size"]), ax=axes, **POINTS)
        scores, flops = zip(*fits["intrinsic"], strict=True)
        axes.step([*flops, grid["flops"].max()], [*scores, scores[-1]], where="post", color="black", linewidth=1)
        axes = axis("score", LOSS.replace("\n", ", "), "score", log="")
        sns.scatterplot(grid, x="excess", y="score", hue="size", palette=colours(grid["size"]), ax=axes, **POINTS)
        if "curve" in fits["score"]:
            axes.plot(fits["score"]["at"], fits["score"]["curve"], color="black", linewidth=1)
            axes.fill_between(fits["score"]["at"], *fits["score"]["band"], color="black", alpha=0.1)
    metric = "score" if grid["score"].notna().all() else "excess"
    what = "score" if metric == "score" else "held-out loss above the floor"
    if fractions > 1:
        means(axis("crossover", "share of the data", what, log="x"), base, "fraction", metric)
    if (qualities := grid["mixture"].nunique()) > 1:
        full = grid[grid["fraction"] == grid["fraction"].max()]
        returns = full["quality"].round(6).nunique() == qualities
        axes = axis("quality", MEAN_RETURN if returns else "quality", what, log="")
        means(axes, full, "quality" if returns else "mixture", metric)
        if not returns and sum(map(len, full["mixture"].unique())) > ROOM:
            axes.tick_params("x", rotation=90)
    curves(axis("curves", "step", "held-out loss, nats an action", log="x"), base)
    within = values["value"].between(0, 1).groupby(values["metric"]).transform("all")
    shares = values[(values["fraction"] == grid["fraction"].max()) & within]
    if len(shares):
        bars: dict[str, Any] = {
            "errorbar": ("pi", 100),
            "capsize": 0.2,
            "err_kws": {"linewidth": 1},
            "palette": colours(shares["size"]),
        }
        sns.barplot(shares, x="value", y="metric", hue="size", ax=axis("shares", "share", "", log=""), **bars)
    for name, scale in scales.items():
        axes = made[name].axes[0]
        axes.set(**scale)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    return made


def colours(values: pd.Series) -> list[Any]:
    """A colour for each of the distinct values."""
    count = values.nunique()
    return sns.color_palette("tab10" if count <= 10 else "tab20" if count <= 20 else "husl", count)  # type: ignore[no-any-return]  # of seaborn


def trend(axes: Axes, grid: pd.DataFrame, x: str, by: str, law: Law | None) -> None:
    """Loss against x for each value of `by`: points, and the law with its band, or without a law the means."""
    shared: dict[str, Any] = {"x": x, "y": "excess", "hue": by, "palette": colours(grid[by]), "ax": axes}
    sns.scatterplot(grid, legend=law is None, **shared, **POINTS)
    if law is None:
        sns.lineplot(grid, legend=False, errorbar=None, **shared)
        return
    at = np.geomspace(grid[x].min(), grid[x].max(), 60)
    for i, (label, part) in enumerate(grid.groupby(by, sort=False)):
        where = {name: part[name].mean() for name in ("non_embedding", "data_steps")} | {x: at}
        point = where["non_embedding"], where["data_steps"], grid["quality"].iloc[0]
        axes.plot(at, law(*point), color=shared["palette"][i], label=label)
        if law.draws:
            axes.fill_between(at, *law.band(*point), color=shared["palette"][i], alpha=0.15)


def compute(axes: Axes, grid: pd.DataFrame, frontier: dict[str, Any]) -> None:
    """Loss against compute, with the frontier and its power law."""
    sns.scatterplot(grid, x="flops", y="excess", hue="size", palette=colours(grid["size"]), ax=axes, **POINTS)
    best = grid[grid["run"].isin(frontier["runs"])]
    axes.scatter(best["flops"], best["excess"], s=70, facecolors="none", edgecolors="black", label="frontier")
    if frontier["power"]:
        E, K, gamma = frontier["power"]
        at = np.geomspace(best["flops"].min(), best["flops"].max(), 60)
        axes.plot(at, E + K / at**gamma, color="black", linewidth=1)


def isoflop(axes: Axes, grid: pd.DataFrame, law: Law, k: float, also: tuple[float, ...] = ()) -> None:
    """Loss against parameters at the budgets of the runs, or six, and of `also`, each D = budget / (k N), with its least."""
    N, D, loss = grid["non_embedding"], grid["data_steps"], grid["excess"]
    C = k * N * D
    shown = axes.scatter(N, loss, c=C, norm="log", cmap="viridis", **POINTS)
    budgets = 10 ** np.unique(np.log10(C).round(2))  # those of the runs, unless there are many
    for budget in (*(budgets if len(budgets) <= 12 else np.geomspace(C.min(), C.max(), 8)[1:-1]), *also):
        best = allocate(law, budget, k)
        low, high = max(N.min() / 2, budget / k / D.max() / 2), min(N.max() * 2, budget / k / D.min() * 2)
        n = np.geomspace(min(low, best[0] / 2), max(high, best[0] * 2), 60)
        axes.plot(n, law(n, budget / k / n), color=shown.cmap(shown.norm(budget)), linewidth=1)
        axes.plot(best[0], law(*best), "x", color=shown.cmap(shown.norm(budget)))
    axes.figure.colorbar(shown, ax=axes, label="FLOPs")


def means(axes: Axes, grid: pd.DataFrame, x: str, y: str) -> None:
    """The mean over seeds of each size along x, with whiskers from the least to the largest."""
    whiskers: dict[str, Any] = {"errorbar": ("pi", 100), "err_style": "bars", "err_kws": {"capsize": 2}, "marker": "o"}
    sns.lineplot(grid, x=x, y=y, hue="size", palette=colours(grid["size"]), ax=axes, **whiskers)


def curves(axes: Axes, grid: pd.DataFrame) -> None:
    """Held-out loss over training steps, one line for each run."""
    points = grid[["run", "size", "fraction", "curve"]].explode("curve")
    points = points.assign(step=points["curve"].str[0].astype(float), loss=points["curve"].str[2].astype(float))
    points["data"] = np.where(points["fraction"] == points["fraction"].max(), "all data", "not all data")
    style: dict[str, Any] = {"style": "data", "style_order": ["all data", "not all data"], "linewidth": 0.8}
    sns.lineplot(
        points, x="step", y="loss", hue="size", palette=colours(grid["size"]), units="run", estimator=None, ax=axes, **style
    )
