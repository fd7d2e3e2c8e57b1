"""Scores with intervals, a table over seeds, and one HTML file with its pictures, see `pictures`."""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from decisionllm.eval import identity, intervals, word_probe
from decisionllm.eval.pictures import (
    NORMALISED,
    Published,
    draw_curves,
    draw_scores,
    draw_tables,
    grouped,
)
from decisionllm.files import read_lines
from decisionllm.schema import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Row = Json

# rows that agree in these, in their configuration and in how they were evaluated are one result,
# over seeds: see `identity.pools`
KEYS = (
    "world",
    "dataset",
    "protocol",
    "policy",
    "text",
    "target_return",
    "headline",
    "decode",
    "changed",
)
SCORES = ["score", "iqm", "low", "high", "return", "latched", "seeds", "n", "seconds"]
COLUMNS = [*KEYS[:6], *SCORES, "headline"]
CELL = 10  # letters of a table's narrowest column of scores: 32.3..34.3


def read_rows(folder: str | Path, name: str = "results.jsonl") -> list[Row]:
    """The rows of results.jsonl, or of another file of such rows.

    Of rows about the same run, however its path is written, and the same protocol and seed of the
    environment, only the last; of a scripted player, which has no run, those about the same options
    of the environment. A row of an earlier version names no world; its dataset stands for it.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for row in read_lines(Path(folder) / name):
        row.setdefault("world", row["dataset"])
        player = row.get("options")
        if row.get("run"):
            player = Path(row["run"]).resolve()
        key = (*(str(row.get(name)) for name in (*KEYS, "seed")), str(player))
        if "options" in row:
            # a row of an earlier version has no options; it is replaced like any other
            if key in rows and rows[key].get("env_seed") in (None, row.get("env_seed")):
                del rows[key]
            key += (str(row.get("env_seed")), str(row.get("part")))
        rows[key] = row
    return list(rows.values())


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One result for the rows of several seeds; results that look alike are named by what differs.

    Returns:
        Results with their mean score, the interquartile mean (`iqm`: one lucky seed moves it less
        than the mean, one bad seed less than the median), and an interval over seeds, or over the
        episodes of one seed, see `intervals`.
    """
    results = []
    for policy, members in named_pools(rows):
        last_of_each_seed = {row["seed"]: row for row in members}
        results.append(over_seeds(policy, list(last_of_each_seed.values())))
    return sorted(results, key=lambda r: (r["world"], not r["headline"], -r["score"]))


def over_seeds(policy: str, rows: Sequence[Row]) -> Row:
    """One result for the rows of a policy, one of each seed; see `summarise`."""
    first = rows[0]
    scores = [row["score"] for row in rows]
    low, high = first["low"], first["high"]
    if len(rows) > 1:
        low, high = intervals.over_runs(scores)
    labels = (first["protocol"], first.get("changed"))
    latched_scores = [row["latched_score"] for row in rows if "latched_score" in row]
    latched = float(np.mean(latched_scores)) if latched_scores else None  # of Maze2D alone
    return {key: first.get(key) for key in KEYS} | {
        "policy": policy,
        "target_return": mean_target(rows),
        "protocol": ", ".join(filter(None, labels)),
        "score": float(np.mean(scores)),
        "iqm": float(stats.trim_mean(scores, 0.25)),
        "low": low,
        "high": high,
        "return": float(np.mean([row["return"] for row in rows])),
        "latched": latched,
        "seeds": len(rows),
        "n": sum(row["n"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
    }


def mean_target(rows: Sequence[Row]) -> float | None:
    """The target return of rows of one result; of headline targets, which may differ, the mean."""
    targets = [row["target_return"] for row in rows]
    return None if None in targets else float(np.mean(targets))


def policy_names(rows: Sequence[Row]) -> list[str]:
    """The policy of each row as `summarise` names its result."""
    named: dict[int, str] = {}
    for name, members in named_pools(rows):
        named |= {id(row): name for row in members}
    return [named[id(row)] for row in rows]


def named_pools(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The name and the rows of each result."""
    groups = identity.pools(rows, [key for key in KEYS if key != "target_return"])
    return list(zip(identity.names(groups), groups, strict=True))


def read_probes(folder: str | Path) -> list[word_probe.WorldProbe]:
    """The shares of word_probe.jsonl, one table for each world; none without the file."""
    if not (Path(folder) / word_probe.FILE).is_file():
        return []
    return word_probe.group_by_world(named_pools(read_rows(folder, word_probe.FILE)))


def tables(results: Sequence[Row]) -> list["Table"]:
    """Results as one table for each world: a row for each policy, a column for each protocol or
    condition, such as a share of the budget. They fit into the width of the terminal.
    """
    found = []
    for world, members in grouped(results, "world").items():
        found.append(table(world, members))
    return found


def table(world: str, results: Sequence[Row]) -> "Table":
    """The table of one world, the best policies first; see `tables`.

    A cell has the mean score and, below it, its 95 % interval.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    protocols = sorted({result["protocol"] for result in results}, key=by_number)
    shared = shared_words(protocols)
    cells = cells_of(results)
    policies, targets, counts = zip(*cells, strict=True)

    # What all rows have alike needs no column.
    labels = {}
    title = [world, shared]
    if set(targets) != {"-"}:
        labels["target"] = targets
    if len(set(counts)) > 1:
        labels["episodes"] = counts
    else:
        title.append(f"{counts[0]} episodes")
    title_line = ", ".join(filter(None, title))
    made = Table(title=title_line, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("policy", overflow="fold")
    for label in labels:
        made.add_column(label, justify="right", no_wrap=True)
    for protocol in protocols:
        name = protocol.removeprefix(shared).lstrip(", ")
        # a long number is broken, not cut
        made.add_column(name or "score", justify="right", min_width=CELL, overflow="fold")
    for *names, scores in zip(policies, *labels.values(), cells.values(), strict=True):
        made.add_row(*names, *(scores.get(protocol, "") for protocol in protocols))
    return made


def cells_of(results: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, str]]:
    """The rows of a table: the cell of each protocol, by policy, target and episodes."""
    cells: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    targets = {result["target_return"] for result in results}
    for result in results:
        policy = result["policy"]
        if not result["headline"]:
            policy += " (sweep)"
        count = f"{result['seeds']} x {result['n'] // result['seeds']}"
        row = cells[policy, told_apart(result["target_return"], targets), count]
        interval_of = f"{number(result['low'])}..{number(result['high'])}"
        row[result["protocol"]] = f"{number(result['score'])}\n{interval_of}"
    return cells


def by_number(protocol: str) -> tuple[str, float, str]:
    """The key that sorts protocols by the number after their last comma; first one without any."""
    begin, _, last = protocol.rpartition(", ")
    number = re.match(r"[\d.]+", last)
    if number is None:
        return protocol, -np.inf, ""
    return begin, float(number[0]), last


def shared_words(protocols: Sequence[str]) -> str:
    """What several protocols begin with, up to a comma; the whole of a single one."""
    parts = [protocol.split(", ") for protocol in protocols]
    return ", ".join(commonprefix(parts))


def target_words(target: float | None) -> str:
    """A target return; "-" for None."""
    return "-" if target is None else number(target)


def told_apart(target: float | None, others: Iterable[float | None]) -> str:
    """A target return with as many digits as tell it from the others."""
    words = target_words(target)
    is_shared = any(target_words(other) == words for other in others if other != target)
    return f"{target:.7g}" if is_shared else words


def number(x: float) -> str:
    """A number with one digit after the point; one below 1, of which that leaves little, with three
    significant digits.
    """
    return f"{x:.1f}" if abs(x) >= 1 or x == 0 else f"{x:.3g}"


def write_report(folder: str | Path, published: Published, units: Mapping[str, str]) -> Path:
    """Write report.html of results.jsonl, with its pictures as PNG beside it.

    Args:
        folder: of results.jsonl.
        published: scores of other work, on other data: {world: {name: score}}.
        units: of the scores: {world: unit}; empty for normalised scores. A world that is missing
            has an unknown unit.

    Returns:
        The path of report.html.
    """
    folder = Path(folder)
    rows = read_rows(folder)
    results = summarise(rows)
    worlds = [result["world"] for result in results]
    labels = {name: units.get(name, "score") or NORMALISED for name in worlds}
    published = {name: scores for name, scores in published.items() if name in labels and scores}
    pictures = draw_pictures(rows, results, published, labels)
    probes = read_probes(folder)
    if probes:
        pictures["word_probe.png"] = word_probe.draw(probes)
    for name, made in pictures.items():
        made.savefig(folder / name)
    images = list(pictures)
    for kind in ("rollout", "attention"):
        images += sorted(path.name for path in folder.glob(f"{kind}-*.png"))
    return write_page(
        folder,
        Path(__file__).parent / "report.html",
        images,
        columns=COLUMNS,
        number=number,
        results=results,
        published=published,
        labels=labels,
        probes=probes,
        rows=[json.dumps(row) for row in rows],
        versions=sorted({json.dumps(row.get("versions", {})) for row in rows}),
    )


def draw_pictures(
    rows: Sequence[Row],
    results: Sequence[Row],
    published: Published,
    labels: Mapping[str, str],
) -> dict[str, "Figure"]:
    """The scores, the learning curves and the tables of shares: {file name: figure}."""
    policies = policy_names(rows)
    headlines = [result for result in results if result["headline"]]
    pictures = {"scores.png": draw_scores(headlines, published, labels)}
    curves = learning_curves(rows, policies)
    if curves:
        pictures["learning.png"] = draw_curves(curves)
    tables = probe_tables(rows, policies)
    if tables:
        pictures["tables.png"] = draw_tables(tables)
    return pictures


def learning_curves(rows: Sequence[Row], policies: Sequence[str]) -> dict[str, str]:
    """The runs whose losses are there, with the name of their policy."""
    curves = {}
    for row, policy in zip(rows, policies, strict=True):
        run = row.get("run")
        if run and (Path(run) / "metrics.jsonl").is_file():
            curves[run] = policy
    return curves


def probe_tables(rows: Sequence[Row], policies: Sequence[str]) -> Json:
    """The tables of shares in the rows by their titles; one that is in all rows of a run, once."""
    tables: Json = {}
    for row, policy in zip(rows, policies, strict=True):
        for name, value in row.items():
            is_table = isinstance(value, dict) and "shares" in value
            if is_table and value not in tables.values():
                tables[f"{policy}, {row['protocol']}, seed {row['seed']}: {name}"] = value
    return tables


def write_page(folder: Path, template: Path, images: Sequence[str], **values: object) -> Path:
    """Write report.html of a template with these values and images. Returns its path."""
    from jinja2 import Template

    encoded = []
    for name in images:
        content = (folder / name).read_bytes()
        encoded.append((name, base64.b64encode(content).decode()))
    page = folder / "report.html"
    made = Template(template.read_text(encoding="utf-8"), autoescape=True)
    page.write_text(made.render(values, images=encoded), encoding="utf-8")
    return page
