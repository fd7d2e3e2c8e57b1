"""The figures of a study."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation

from decisionllm.eval.pictures import figure
from decisionllm.scaling.law import Law
from decisionllm.schema import Json

CAPTIONS = {
    "size": (
        "Loss against parameters, one colour for each volume of data: every run and the mean over "
        "seeds, or the law with its 95 % band."
    ),
    "data": "Loss against data, one colour for each size.",
    "compute": "Loss against compute, one colour for each size.",
    "score": "Score against loss, one colour for each size.",
    "crossover": (
        "Score (or loss, without rollouts) of each size at each volume. Where lines cross, the "
        "best size depends on the data."
    ),
    "quality": ("Score (or loss) by quality of the data at full volume, one colour for each size."),
    "shares": (
        "Shares that the evaluations measured, on all data: mean over runs, least and largest."
    ),
    "curves": "Held-out loss during training, one line for each run. Dashed: not all data.",
}
LOSS = "held-out loss above the head's floor\nnats an action"
MEAN_RETURN = "quality: mean return of the data, 1: that of the whole log"
PARAMETERS = "parameters without embeddings"
STEPS = "steps of training data"
COMPUTE = "training compute, FLOPs"
POINTS: Json = {"s": 14, "alpha": 0.6, "linewidth": 0}
ROOM = 80  # most letters that fit side by side below an axis


def draw_figures(grid: pd.DataFrame, fits: Json, values: pd.DataFrame) -> dict[str, Figure]:
    """Draw the figures of a study by name.

    Where size and volume are shown, the data is of the first quality, so that one thing varies at a
    time.

    Args:
        grid: the runs, see `report.select_finished_runs`.
        fits: of these runs, see `report.fit_law`.
        values: other measurements of the evaluations, see `report.collect_metrics`.
    """
    grid = grid.sort_values("non_embedding", kind="stable")
    base = grid[grid["mixture"] == grid["mixture"].loc[0]]
    law: Law | None = fits["law"]
    panels = Panels()
    if base["non_embedding"].nunique() > 1:
        axes = panels.add("size", PARAMETERS)
        plot_trend(axes, add_volumes(base), "non_embedding", "volume", law)
    if base["fraction"].nunique() > 1:
        plot_trend(panels.add("data", STEPS), base, "data_steps", "size", law)
    plot_scatter(panels.add("compute", COMPUTE), grid, "flops", "excess")
    if grid["score"].notna().any():
        axes = panels.add("score", LOSS.replace("\n", ", "), "score", log="")
        plot_scatter(axes, grid, "excess", "score")
    metric = "excess"
    label = "held-out loss above the floor"
    if grid["score"].notna().all():
        metric = label = "score"
    if base["fraction"].nunique() > 1:
        axes = panels.add("crossover", "share of the data", label, log="x")
        plot_means(axes, base, "fraction", metric)
    everything = grid["fraction"].max()
    if grid["mixture"].nunique() > 1:
        axes = panels.add("quality", "quality", label, log="")
        plot_quality(axes, grid[grid["fraction"] == everything], metric)
    plot_curves(panels.add("curves", "step", "held-out loss, nats an action", log="x"), base)
    is_share = values["value"].between(0, 1).groupby(values["metric"]).transform("all")
    shares = values[(values["fraction"] == everything) & is_share]
    if len(shares):
        plot_bars(panels.add("shares", "share", "", log=""), shares)
    return panels.finish()


class PlainLogFormatter(LogFormatterSciNotation):
    """Write the ticks of a logarithmic axis as 4.6 or 2,000 where they are short, others as 10^8."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        label: str = super().__call__(x, pos)
        is_short = 1e-3 <= abs(x) < 1e6
        return f"{x:,.6g}" if label and is_short else label


class Panels:
    """Figures of one panel each, by name."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.log: dict[str, str] = {}  # which axes of a figure are logarithmic

    def add(self, name: str, x: str, y: str = LOSS, log: str = "xy") -> Axes:
        """Return the axes of a new figure with these labels; log: those that become logarithmic."""
        self.figures[name] = figure(9, 5)
        self.log[name] = log
        axes: Axes = self.figures[name].subplots()
        axes.set(xlabel=x, ylabel=y)
        axes.grid(True, which="both", alpha=0.2)
        return axes

    def finish(self) -> dict[str, Figure]:
        """Return the figures with their scales and legends.

        Scales are set last: on a logarithmic axis seaborn would take means of logarithms.
        """
        for name, drawing in self.figures.items():
            axes = drawing.axes[0]
            for which in self.log[name]:
                axes.set(**{f"{which}scale": "log"})
                axis = axes.xaxis if which == "x" else axes.yaxis
                axis.set_major_formatter(PlainLogFormatter())
                axis.set_minor_formatter(PlainLogFormatter())
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
        return self.figures


def make_palette(values: pd.Series) -> list[tuple[float, float, float]]:
    """A colour for each of the distinct values."""
    count = values.nunique()
    palettes = {10: "tab10", 20: "tab20"}
    palette = next((name for most, name in palettes.items() if count <= most), "husl")
    return list(sns.color_palette(palette, count))


def plot_scatter(axes: Axes, grid: pd.DataFrame, x: str, y: str) -> None:
    """A point for each run, one colour for each size."""
    palette = make_palette(grid["size"])
    sns.scatterplot(grid, x=x, y=y, hue="size", palette=palette, ax=axes, **POINTS)


def add_volumes(grid: pd.DataFrame) -> pd.DataFrame:
    """Sort runs by volume of data; add the column `volume`: share and mean steps, in words."""
    steps = grid.groupby("fraction")["data_steps"].transform("mean")
    pairs = zip(grid["fraction"], steps, strict=True)
    volumes = [f"{share:.0%} of the data, {count:,.0f} steps" for share, count in pairs]
    return grid.assign(volume=volumes).sort_values("fraction", kind="stable")


def plot_trend(axes: Axes, grid: pd.DataFrame, x: str, by: str, law: Law | None) -> None:
    """Loss against x for each value of `by`: points, and the law with its band, or the means."""
    palette = make_palette(grid[by])
    shared: Json = {"x": x, "y": "excess", "hue": by, "palette": palette, "ax": axes}
    sns.scatterplot(grid, legend=law is None, **shared, **POINTS)
    if law is None:
        sns.lineplot(grid, legend=False, errorbar=None, **shared)
        return
    at = np.geomspace(grid[x].min(), grid[x].max(), 60)
    for (label, part), colour in zip(grid.groupby(by, sort=False), palette, strict=True):
        N: float | np.ndarray = part["non_embedding"].mean()
        D: float | np.ndarray = part["data_steps"].mean()
        if x == "non_embedding":
            N = at
        else:
            D = at
        axes.plot(at, law(N, D), color=colour, label=label)
        axes.fill_between(at, *law.band(N, D), color=colour, alpha=0.15)


def plot_means(axes: Axes, grid: pd.DataFrame, x: str, y: str) -> None:
    """Plot the mean over seeds of each size along x, whiskers from the least to the largest."""
    sns.lineplot(
        grid,
        x=x,
        y=y,
        hue="size",
        palette=make_palette(grid["size"]),
        ax=axes,
        errorbar=("pi", 100),
        err_style="bars",
        err_kws={"capsize": 2},
        marker="o",
    )


def plot_quality(axes: Axes, grid: pd.DataFrame, metric: str) -> None:
    """Plot the metric by mean return of the data; by mixture where several have the same mean
    return.
    """
    mixtures = grid["mixture"].unique()
    if grid["quality"].round(6).nunique() == len(mixtures):
        axes.set(xlabel=MEAN_RETURN)
        plot_means(axes, grid, "quality", metric)
        return
    plot_means(axes, grid, "mixture", metric)
    if sum(map(len, mixtures)) > ROOM:
        axes.tick_params("x", rotation=90)


def plot_curves(axes: Axes, grid: pd.DataFrame) -> None:
    """Held-out loss over training steps, one line for each run."""
    # seaborn takes rows by their index, and leaves out those without a loss
    points = grid[["run", "size", "fraction", "curve"]].explode("curve", ignore_index=True)
    points["step"] = points["curve"].str[0].astype(float)
    points["loss"] = points["curve"].str[2].astype(float)
    uses_all_data = points["fraction"] == points["fraction"].max()
    points["data"] = np.where(uses_all_data, "all data", "not all data")
    sns.lineplot(
        points,
        x="step",
        y="loss",
        hue="size",
        palette=make_palette(grid["size"]),
        units="run",
        estimator=None,
        ax=axes,
        style="data",
        style_order=["all data", "not all data"],
        linewidth=0.8,
    )


def plot_bars(axes: Axes, shares: pd.DataFrame) -> None:
    """Plot the mean over runs of each share and size, whiskers from the least to the largest."""
    sns.barplot(
        shares,
        x="value",
        y="metric",
        hue="size",
        palette=make_palette(shares["size"]),
        ax=axes,
        errorbar=("pi", 100),
        capsize=0.2,
        err_kws={"linewidth": 1},
    )
