"""Pictures of results: scores of policies, curves of scores and losses, tables of shares."""

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.files import read_lines
from decisionllm.schema import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Published = Mapping[str, Mapping[str, float]]  # {world: {name: score}}
NORMALISED = "normalised score (0: random policy, 100: reference controller)"
FEWEST_PERCENTAGES = 3  # in the protocols of a world, which are drawn as lines
STYLES = ("-", "--", ":")
MARKERS = "ovs^D<>pP*X"
NAME = 40  # letters of a line of a policy's name beside a picture
LINE = 0.16  # inches, of a line of a legend


def figure(width: float, height: float, title: str = "") -> "Figure":
    """Make a figure that needs no display and changes no global state. width, height: inches."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), dpi=110, layout="constrained")
    if title:
        picture.suptitle(title, fontsize=9)
    return picture


def wrap_name(name: str, letters: int = NAME) -> str:
    """Break a name into lines of so many letters: a long one leaves the picture its place."""
    return "\n".join(textwrap.wrap(name, letters)) or name


def count_lines(names: Iterable[str]) -> int:
    """Count the lines of the wrapped names of a legend."""
    return sum(name.count("\n") + 1 for name in names)


def draw_scores(
    results: Sequence[Json],
    published: Published,
    labels: Mapping[str, str],
) -> "Figure":
    """Draw a panel for each world: policies, best mean on top, and published scores in grey."""
    by_world = group_by(results, "world")
    protocols = list(group_by(results, "protocol"))
    heights = []
    for name, members in by_world.items():
        policies = [wrap_name(policy) for policy in group_by(members, "policy")]
        beside = count_lines([*policies, *published.get(name, {})])
        if has_curves(members):
            heights.append(max(4.5, LINE * beside + 0.5))
            continue
        lines = max(len(policies) + len(published.get(name, {})), beside / 2)
        heights.append(0.35 * lines + 1.2)
    picture = figure(8, sum(heights))
    panels = picture.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, members) in zip(panels, by_world.items(), strict=True):
        if has_curves(members):
            draw_score_curves(axis, members, published.get(name, {}))
            axis.set(xlabel="protocol, %", ylabel=labels[name], title=name)
            continue
        draw_policies(axis, members, protocols, published.get(name, {}))
        axis.grid(axis="x", linewidth=0.3)
        axis.axvline(0, color="black", linewidth=0.5)
        if labels[name] == NORMALISED:
            axis.axvline(100, color="black", linewidth=0.5, linestyle=":")
        protocol, *others = group_by(members, "protocol")
        axis.set(xlabel=labels[name], title=name if others else f"{name}, {protocol}")
        if others:  # beside the points, which it would hide
            axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return picture


def group_by(results: Sequence[Json], key: str) -> dict[str, list[Json]]:
    """Group results by one of their values, in the order in which the values come."""
    groups: dict[str, list[Json]] = defaultdict(list)
    for result in results:
        groups[result[key]].append(result)
    return dict(groups)


def values(results: Sequence[Json], key: str) -> list[float]:
    return [result[key] for result in results]


def percentages(results: Sequence[Json]) -> dict[str, float]:
    """Return the percentage at the end of each protocol, "replay 7-8, 50 %" -> 50; 100 where there
    is none. Empty if the protocols differ in more than that.
    """
    by_protocol: dict[str, float] = {}
    names = set()
    for protocol in {result["protocol"] for result in results}:
        name, percentage = protocol, "100"
        match = re.fullmatch(r"(.*), ([\d.]+) %", protocol)
        if match:
            name, percentage = match.groups()
        names.add(name)
        by_protocol[protocol] = float(percentage)
    return by_protocol if len(names) == 1 else {}


def has_curves(results: Sequence[Json]) -> bool:
    """Return whether the results of a world are drawn over the percentages of their protocols."""
    return len(percentages(results)) >= FEWEST_PERCENTAGES


def draw_score_curves(
    axis: "Axes", results: Sequence[Json], published: Mapping[str, float]
) -> None:
    """Draw a line for each policy over the percentages, with its interval as a band; published scores
    are points at 100 %.
    """
    percentage = percentages(results)
    by_policy = group_by(results, "policy").values()
    best_first = sorted(by_policy, key=lambda rows: max(values(rows, "score")), reverse=True)
    for k, rows in enumerate(best_first):
        rows = sorted(rows, key=lambda row: percentage[row["protocol"]])
        x = [percentage[row["protocol"]] for row in rows]
        color = f"C{k % 10}"
        style = STYLES[k // 10 % len(STYLES)]
        label = wrap_name(rows[0]["policy"])
        low = values(rows, "low")
        high = values(rows, "high")
        axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        score = values(rows, "score")
        axis.plot(x, score, color=color, linestyle=style, marker=".", label=label)
    for k, (name, at_whole) in enumerate(published.items()):
        marker = MARKERS[k % len(MARKERS)]
        label = f"{name}, published"
        axis.plot(100, at_whole, marker, color="grey", markersize=4, label=label, linestyle="none")
    axis.grid(linewidth=0.3)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5))  # beside the lines


def draw_policies(
    axis: "Axes",
    results: Sequence[Json],
    protocols: Sequence[str],
    published: Mapping[str, float],
) -> None:
    """Draw a line for each policy with a dot and interval for each protocol; published scores below."""
    means = {}
    for name, rows in group_by(results, "policy").items():
        means[name] = np.mean(values(rows, "score"))
    names = sorted(means, key=means.__getitem__, reverse=True)
    by_protocol = group_by(results, "protocol")
    for k, protocol in enumerate(protocols):
        rows = by_protocol.get(protocol, [])
        if not rows:
            continue
        offset = 0.5 * ((k + 1) / (len(protocols) + 1) - 0.5)  # protocols beside each other
        y = [names.index(row["policy"]) + offset for row in rows]
        color = f"C{k % 10}"
        axis.hlines(y, values(rows, "low"), values(rows, "high"), color=color, linewidth=1)
        axis.plot(values(rows, "score"), y, "o", markersize=4, color=color, label=protocol)
    count = len(names) + len(published)
    axis.plot(list(published.values()), range(len(names), count), "o", color="lightgrey")
    names += [f"{name}, published" for name in published]
    axis.set_yticks(range(count), [wrap_name(name) for name in names], fontsize=7)
    axis.invert_yaxis()


def draw_tables(tables: Mapping[str, Json]) -> "Figure":
    """Draw a heat map of each table of shares within 0 .. 1: {title: {rows, columns, shares}}."""
    widest = max(len(table["columns"]) for table in tables.values())
    counts = [len(table["rows"]) for table in tables.values()]
    picture = figure(1.5 + 0.4 * widest, sum(1.2 + 0.3 * count for count in counts))
    panels = picture.subplots(len(tables), squeeze=False, height_ratios=[4 + n for n in counts])
    for axis, (title, table) in zip(panels[:, 0], tables.items(), strict=True):
        columns, rows = table["columns"], table["rows"]
        image = axis.imshow(table["shares"], cmap="viridis", vmin=0, vmax=1)
        axis.set_xticks(range(len(columns)), columns, fontsize=7, rotation=60)
        axis.set_yticks(range(len(rows)), rows, fontsize=7)
        axis.set_title(title, fontsize=7)
        axis.set_ylabel("task in the text", fontsize=7)
        picture.colorbar(image, ax=axis)
    return picture


def draw_curves(runs: Mapping[str, str]) -> "Figure":
    """Draw the loss of each run over its steps, on training data and held out, and below it the score
    of its rollouts where it has any.
    """
    logs = {run: read_lines(Path(run) / "metrics.jsonl") for run in sorted(runs)}
    has_scores = any("score" in line for line in chain(*logs.values()))
    count, height = (2, 6.0) if has_scores else (1, 3.5)
    labels = [wrap_name(f"{runs[run]} ({Path(run).name})", 2 * NAME) for run in logs]
    # the legend is below the panels: of many runs it would hide the curves
    picture = figure(8, height + LINE * count_lines(labels))
    panels = [*picture.subplots(count, squeeze=False, sharex=True)[:, 0]]
    for i, (lines, label) in enumerate(zip(logs.values(), labels, strict=True)):
        style = STYLES[i // 10 % len(STYLES)]
        draw_log(panels, lines, color=f"C{i % 10}", style=style, label=label)
    unit = "negative log-likelihood, nats an action"
    panels[0].set(ylabel=f"{unit}\n(faint: training, full: held out)")
    if has_scores:
        panels[1].set(ylabel="score of the rollouts in training")
    panels[-1].set(xlabel="step")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=7)
    return picture


def draw_log(
    panels: Sequence["Axes"], lines: Sequence[Json], *, color: str, style: str, label: str
) -> None:
    """Draw the curves of one run: its losses in the first panel, its scores, if any, in the second."""
    panels[0].plot(*curve_of(lines, "nll"), color=color, alpha=0.35)
    panels[0].plot(*curve_of(lines, "held_out_nll"), color=color, linestyle=style, label=label)
    steps, scores = curve_of(lines, "score")
    if scores:
        panels[1].plot(steps, scores, color=color, linestyle=style, marker=".")


def curve_of(lines: Sequence[Json], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of the log lines that have this key.

    The line of an interruption has no held-out loss, and few lines have a score.
    """
    measured = [line for line in lines if key in line]
    return [line["step"] for line in measured], values(measured, key)
