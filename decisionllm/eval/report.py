"""The report: scores with intervals over seeds as tables, and one HTML file with its pictures, see
`pictures`.
"""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from scipy import stats

from decisionllm.eval import intervals, result_groups, word_probe
from decisionllm.eval.conclusions import conclusions, format_interval, format_number
from decisionllm.eval.pictures import (
    NORMALISED,
    Published,
    draw_curves,
    draw_scores,
    draw_tables,
    group_by,
)
from decisionllm.files import read_lines
from decisionllm.schema import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Row = Json

# rows that agree in these, in their configuration and in how they were evaluated are one result,
# over seeds: see `result_groups.group_rows`
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
METRIC_SCORE = "_score"  # a metric whose name ends so is a column of the report
# of the page's table: columns of a result with their headings
HEADINGS = {
    "policy": "policy",
    "score": "mean score",
    "low": "95 % interval",
    "iqm": "interquartile mean",
    "world": "environment",
    "protocol": "protocol",
    "target_return": "target return",
    "text": "task text",
    "dataset": "training data",
    "return": "mean return",
    "log_return": "mean return of the log",
    "seeds": "training seeds",
    "n": "episodes",
}
LABELS = (
    "world",
    "protocol",
    "dataset",
    "text",
    "target_return",
    "log_return",
    "seeds",
    "n",
)
CELL = 10  # letters of a table's narrowest column of scores: 32.3..34.3


def read_rows(folder: str | Path, name: str = "results.jsonl") -> list[Row]:
    """Read the rows of results.jsonl, or of another file of such rows.

    Of rows about the same run, however its path is written, and the same protocol and seed of the
    environment, only the last is returned; of a scripted player, which has no run, the last of
    those about the same options of the environment.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for row in read_lines(Path(folder) / name):
        player = row.get("options")
        if row.get("run"):
            player = Path(row["run"]).resolve()
        columns = (*KEYS, "seed", "env_seed", "part")
        key = (*(str(row.get(column)) for column in columns), str(player))
        rows[key] = row
    return list(rows.values())


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Pool the rows of several seeds to one result; results that look alike are named by what
    differs.

    Returns:
        Results with their mean score, the interquartile mean (`iqm`: one lucky seed moves it less
        than the mean, one bad seed less than the median), and an interval over seeds, or over the
        episodes of one seed, see `intervals`.
    """
    results = []
    for policy, members in named_groups(rows):
        last_of_each_seed = {row["seed"]: row for row in members}
        results.append(pool_seeds(policy, list(last_of_each_seed.values())))
    return sorted(results, key=lambda r: (r["world"], not r["headline"], -r["score"]))


def pool_seeds(policy: str, rows: Sequence[Row]) -> Row:
    """Return the result of a policy's rows, one of each seed; see `summarise`."""
    first = rows[0]
    scores = [row["score"] for row in rows]
    low, high = first["low"], first["high"]
    if len(rows) > 1:
        low, high = intervals.over_runs(scores)
    labels = (first["protocol"], first.get("changed"))
    result = {key: first.get(key) for key in KEYS} | {
        "policy": policy,
        "target_return": mean_target(rows),
        "protocol": ", ".join(filter(None, labels)),
        "score": float(np.mean(scores)),
        "iqm": float(stats.trim_mean(scores, 0.25)),
        "low": low,
        "high": high,
        "return": float(np.mean([row["return"] for row in rows])),
        "log_return": first.get("log_return"),
        "seeds": len(rows),
        "n": sum(row["n"] for row in rows),
    }
    for key in first:
        values = [row[key] for row in rows if key in row]
        if key.endswith(METRIC_SCORE):
            result[key] = float(np.mean(values))
    return result


def mean_target(rows: Sequence[Row]) -> float | None:
    """Return the target return of one result; of headline targets, which may differ, the mean."""
    targets = [row["target_return"] for row in rows]
    return None if None in targets else float(np.mean(targets))


def policy_names(rows: Sequence[Row]) -> list[str]:
    """Return the policy of each row as `summarise` names its result."""
    names: dict[int, str] = {}
    for name, members in named_groups(rows):
        names |= {id(row): name for row in members}
    return [names[id(row)] for row in rows]


def named_groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the name and the rows of each result."""
    groups = result_groups.group_rows(rows, [key for key in KEYS if key != "target_return"])
    groups = join_equal_players(groups)
    return list(zip(result_groups.name_results(groups), groups, strict=True))


def join_equal_players(groups: Sequence[list[Row]]) -> list[list[Row]]:
    """Join the groups of a scripted player that did the same in a world under several options of its
    environment, such as with and without a text, which it does not read.
    """
    joined: dict[str, list[Row]] = {}
    for i, members in enumerate(groups):
        key = str(i)
        if not members[0].get("run"):
            columns = ("world", "protocol", "policy", "changed", "seed", "env_seed", "n")
            outcome = ("score", "low", "high", "return")
            key = str([[row.get(name) for name in (*columns, *outcome)] for row in members])
        joined.setdefault(key, []).extend(members)
    return list(joined.values())


def read_probes(folder: str | Path) -> list[word_probe.WorldProbe]:
    """Read the shares of word_probe.jsonl, one table for each world; none without the file."""
    if not (Path(folder) / word_probe.FILE).is_file():
        return []
    return word_probe.group_by_world(named_groups(read_rows(folder, word_probe.FILE)))


def tables(results: Sequence[Row]) -> list["Table"]:
    """Return a table for each world: a row for each policy, a column for each protocol or condition,
    such as a share of the budget. They fit into the width of the terminal.
    """
    return [world_table(world, members) for world, members in group_by(results, "world").items()]


def world_table(world: str, results: Sequence[Row]) -> "Table":
    """Return the table of one world, the best policies first; see `tables`.

    A cell has the mean score and, below it, its 95 % interval. Where each policy has one protocol,
    such as a policy beside scripted players, the protocol is a column and the scores are another.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    protocols = sorted({result["protocol"] for result in results}, key=by_number)
    shared = shared_prefix(protocols)
    cells = score_cells(results)
    policies, targets, counts = zip(*cells, strict=True)

    # What all rows have alike needs no column.
    labels = {}
    title = [world, shared]
    if set(targets) != {"-"}:
        labels["target"] = targets
    if len(set(counts)) > 1:
        labels["seeds x episodes"] = counts
    else:
        title.append(f"seeds x episodes: {counts[0]}")
    has_one_protocol_each = all(len(scores) == 1 for scores in cells.values())
    if has_one_protocol_each and len(protocols) > 1:
        labels["protocol"] = tuple(next(iter(scores)) for scores in cells.values())
        cells = {key: {"": next(iter(scores.values()))} for key, scores in cells.items()}
        protocols = [""]
    title_line = ", ".join(filter(None, title))
    table = Table(
        title=title_line,
        title_justify="left",
        caption="mean score, below it its 95 % interval",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("policy", overflow="fold")
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    for protocol in protocols:
        name = protocol.removeprefix(shared).lstrip(", ")
        # a long number is broken, not cut
        table.add_column(name or "score", justify="right", min_width=CELL, overflow="fold")
    for *names, scores in zip(policies, *labels.values(), cells.values(), strict=True):
        table.add_row(*names, *(scores.get(protocol, "") for protocol in protocols))
    return table


def score_cells(results: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the rows of a table: the cell of each protocol, by policy, target and episodes."""
    cells: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    targets = {result["target_return"] for result in results}
    for result in results:
        policy = result["policy"]
        if not result["headline"]:
            policy += " (sweep)"
        count = f"{result['seeds']} x {result['n'] // result['seeds']}"
        row = cells[policy, distinct_target(result["target_return"], targets), count]
        interval = f"{format_number(result['low'])}..{format_number(result['high'])}"
        row[result["protocol"]] = f"{format_number(result['score'])}\n{interval}"
    return cells


def by_number(protocol: str) -> tuple[str, float, str]:
    """Return the key that sorts protocols by the number after their last comma, those without one
    first.
    """
    begin, _, last = protocol.rpartition(", ")
    number = re.match(r"[\d.]+", last)
    if number is None:
        return protocol, -np.inf, ""
    return begin, float(number[0]), last


def shared_prefix(protocols: Sequence[str]) -> str:
    """Return the words up to a comma that all protocols begin with; the whole of a single one."""
    parts = [protocol.split(", ") for protocol in protocols]
    return ", ".join(commonprefix(parts))


def format_target(target: float | None) -> str:
    """Format a target return; "-" for None."""
    return "-" if target is None else format_number(target)


def distinct_target(target: float | None, others: Iterable[float | None]) -> str:
    """Format a target return with as many digits as tell it from the others."""
    words = format_target(target)
    is_shared = any(format_target(other) == words for other in others if other != target)
    return f"{target:.7g}" if is_shared else words


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
    for name, picture in pictures.items():
        picture.savefig(folder / name)
    images = list(pictures)
    for kind in ("rollout", "attention"):
        images += sorted(path.name for path in folder.glob(f"{kind}-*.png"))
    return write_page(
        folder,
        Path(__file__).parent / "report.html",
        images,
        worlds=list(labels),
        words={name: picture_words(folder / name) for name in images},
        conclusions=conclusions(results, scripted_players(rows)),
        table=result_table(results),
        published=published,
        labels=labels,
        probes=probes,
        rows=[json.dumps(row) for row in rows],
        versions=sorted({format_versions(row["versions"]) for row in rows if row.get("versions")}),
    )


def format_versions(versions: Mapping[str, str | None]) -> str:
    """Format the versions of a row: "decisionllm 0.3.0, torch 2.9.0, commit 0123456789ab"."""
    return ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())


@dataclass(frozen=True)
class ResultTable:
    """The table of a page.

    Attributes:
        headings: of the columns.
        rows: (bold or not, the cells) of each result. Headline targets are bold beside others.
        shared: what all results have in common and no column says, "task text: none".
        has_sweep: a policy was also asked for other targets than its headline target.
        num_protocols: of the results.
    """

    headings: list[str]
    rows: list[tuple[bool, list[str]]]
    shared: list[str]
    has_sweep: bool
    num_protocols: int


def result_table(results: Sequence[Row]) -> ResultTable:
    """Return the results in words; a column of labels with one value is said once, above."""
    metrics = {key for result in results for key in result if key.endswith(METRIC_SCORE)}
    columns = HEADINGS | {key: key.replace("_", " ") for key in sorted(metrics)}
    if all(result["seeds"] == 1 for result in results):
        del columns["iqm"]  # the mean itself
    if all(table_cell(result, "return") == table_cell(result, "score") for result in results):
        del columns["return"]  # the score is the return
    cells = {}
    shared = []
    for key, heading in columns.items():
        values = [table_cell(result, key) for result in results]
        if key not in LABELS or len({*values}) > 1:
            cells[heading] = values
        elif values[0] != "-":
            shared.append(f"{heading}: {values[0]}")
    has_sweep = not all(result["headline"] for result in results)
    rows = []
    for i, result in enumerate(results):
        is_bold = has_sweep and result["headline"] and result["target_return"] is not None
        rows.append((is_bold, [values[i] for values in cells.values()]))
    return ResultTable(
        headings=[*cells],
        rows=rows,
        shared=shared,
        has_sweep=has_sweep,
        num_protocols=len({result["protocol"] for result in results}),
    )


def table_cell(result: Row, key: str) -> str:
    """Return the text of a cell of the page's table."""
    if key == "low":
        return format_interval(result["low"], result["high"])
    value = result.get(key)
    if value is None:
        return "-"
    return format_number(value) if isinstance(value, float) else str(value)


PICTURES = {  # headings and captions
    "scores.png": (
        "Scores",
        "Mean score of each policy with its 95 % interval, the best on top. Grey dots, if any, are of "
        "other work.",
    ),
    "learning.png": (
        "Learning curves",
        "Loss of each run, on training data (faint) and held out (full), and the score of its "
        "rollouts in training where it has any.",
    ),
    "tables.png": ("Tables of shares", "Where the policy went, for each task in the text."),
    "word_probe.png": (
        "Instruction probe",
        "Share of episodes in which an action changes when the text is replaced.",
    ),
}


def picture_words(path: Path) -> tuple[str, str]:
    """Return the heading and the caption of a picture, of `PICTURES` or saved in its file."""
    if path.name in PICTURES:
        return PICTURES[path.name]
    with Image.open(path) as picture:
        saved = dict(picture.info)
    kind, _, label = path.stem.partition("-")
    return saved.get("Title", f"{kind.capitalize()}: {label}"), saved.get("Description", "")


def scripted_players(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """Return (world, name in results) of the players that are no runs."""
    names = zip(rows, policy_names(rows), strict=True)
    return {(row["world"], name) for row, name in names if not row.get("run")}


def draw_pictures(
    rows: Sequence[Row],
    results: Sequence[Row],
    published: Published,
    labels: Mapping[str, str],
) -> dict[str, "Figure"]:
    """Draw the scores, the learning curves and the tables of shares: {file name: figure}."""
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
    """Return the runs whose losses are there, with the name of their policy."""
    curves = {}
    for row, policy in zip(rows, policies, strict=True):
        run = row.get("run")
        if run and (Path(run) / "metrics.jsonl").is_file():
            curves[run] = policy
    return curves


def probe_tables(rows: Sequence[Row], policies: Sequence[str]) -> Json:
    """Return the tables of shares in the rows by their titles; one that is in all rows of a run, once."""
    tables: Json = {}
    for row, policy in zip(rows, policies, strict=True):
        for name, value in row.items():
            is_table = isinstance(value, dict) and "shares" in value
            if is_table and value not in tables.values():
                tables[f"{policy}, {row['protocol']}, seed {row['seed']}: {name}"] = value
    return tables


def write_page(folder: Path, template: Path, images: Sequence[str], **values: object) -> Path:
    """Write report.html of a template with these values and images, and return its path."""
    from jinja2 import Template

    encoded = []
    for name in images:
        content = (folder / name).read_bytes()
        encoded.append((name, base64.b64encode(content).decode()))
    page = folder / "report.html"
    source = Template(template.read_text(encoding="utf-8"), autoescape=True)
    page.write_text(source.render(values, images=encoded), encoding="utf-8")
    return page
