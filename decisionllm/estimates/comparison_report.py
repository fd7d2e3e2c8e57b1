"""The results of a comparison: a table, warnings, compare.json and a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from scipy import stats

from decisionllm.datasets.store import Store
from decisionllm.estimates.compare_options import CompareConfig
from decisionllm.eval.pictures import figure
from decisionllm.files import write_json
from decisionllm.policy.open_runs import OpenedRun
from decisionllm.protocols import Estimate, Logged
from decisionllm.runs import directory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ComparedPolicy:
    """A candidate, its estimates by estimator, and the share of its actions far from the log."""

    name: str
    far: float
    estimates: Mapping[str, Estimate]


def rank_policies(judged: Sequence[ComparedPolicy], name: str) -> list[int]:
    """Return the rank of each candidate by this estimator, 1 the best; equal values share the
    better.
    """
    values = [-policy.estimates[name].value for policy in judged]
    return [int(rank) for rank in stats.rankdata(values, method="min")]


def make_table(
    judged: Sequence[ComparedPolicy], log: Logged, of_log: Estimate, dataset: str, discount: float
) -> Table:
    """Candidates by estimator: rank and value, and below them the 95 % interval.

    of_log: see `log_return`.
    """
    title = (
        f"{dataset}\nestimated returns, {int(log.held_out.sum())} held-out episodes\n"
        f"the log itself: {of_log.value:.4g} ({of_log.low:.4g}..{of_log.high:.4g})"
    )
    if discount < 1:
        title += f"; discount {discount:g}"
    title += "\nfar: share of actions far from the logged ones nearby"
    results = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    results.add_column("policy", overflow="fold")
    names = list(judged[0].estimates)
    for name in names:
        results.add_column(name, justify="right", no_wrap=True)
    results.add_column("far", justify="right", no_wrap=True)
    by_name = {name: rank_policies(judged, name) for name in names}
    for i, policy in enumerate(judged):
        cells = []
        for name in names:
            estimate = policy.estimates[name]
            cells.append(
                f"{by_name[name][i]}. {estimate.value:.4g}\n{estimate.low:.4g}..{estimate.high:.4g}"
            )
        results.add_row(policy.name, *cells, f"{100 * policy.far:.0f} %")
    return results


def list_warnings(judged: Sequence[ComparedPolicy], most_far: float) -> list[str]:
    """List what a reader must know beside the numbers, a line each."""
    lines = []
    for policy in judged:
        if policy.far > most_far:
            lines.append(
                f"warning: {policy.name} leaves the log, {100 * policy.far:.0f} % of its actions "
                "are far from the logged ones nearby; its estimates are guesses"
            )
        for name, estimate in policy.estimates.items():
            if estimate.note:
                lines.append(f"warning: {policy.name}, {name}: {estimate.note}")
    return lines


def write_comparison(
    out: Path,
    judged: Sequence[ComparedPolicy],
    runs: Mapping[str, OpenedRun],
    log: Logged,
    of_log: Estimate,
    store: Store,
    options: CompareConfig,
) -> Path:
    """Write compare.json. Returns its path.

    Args:
        out: the folder.
        judged: the policies.
        runs: by the name of the policy.
        log: the episodes.
        of_log: see `log_return`.
        store: of the log.
        options: of the command.
    """
    places = {name: rank_policies(judged, name) for name in options.estimators}
    rows = []
    for i, policy in enumerate(judged):
        estimates = {
            name: asdict(estimate) | {"rank": places[name][i]}
            for name, estimate in policy.estimates.items()
        }
        row = {"policy": policy.name, "run": str(runs[policy.name].path), "far": policy.far}
        rows.append(row | {"estimates": estimates})
    content = {
        "dataset": store.info["name"],
        "fingerprint": store.fingerprint,
        "episodes": int(log.held_out.sum()),
        "groups": len(np.unique(log.held_out_groups)),
        "fit_episodes": int((~log.held_out).sum()),
        "log": asdict(of_log),
        "discount": options.discount,
        "seed": options.seed,
        "options": options.options,
        "versions": directory.versions(),
        "rows": rows,
    }
    write_json(out / "compare.json", content)
    return out / "compare.json"


def draw_estimates(judged: Sequence[ComparedPolicy], of_log: Estimate) -> "Figure":
    """A panel for each estimator: policies with their intervals, and the return of the log."""
    names = list(judged[0].estimates)
    drawing = figure(1.5 + 4 * len(names), 0.35 * len(judged) + 1.2)
    places = np.arange(len(judged))[::-1]
    policies = [policy.name for policy in judged]
    panels = drawing.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axis, name in zip(panels, names, strict=True):
        estimates = [policy.estimates[name] for policy in judged]
        values, lengths = error_bars(estimates)
        axis.errorbar(values, places, xerr=lengths, fmt="o", capsize=3)
        axis.axvline(of_log.value, color="grey", linestyle=":", linewidth=0.8)
        axis.set(title=f"{name} (dotted: the log)", xlabel="estimated return")
        axis.set_yticks(places, policies)
    return drawing


def error_bars(estimates: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of estimates (P,), and how far their intervals reach below and above (2,
    P).
    """
    values = np.array([estimate.value for estimate in estimates])
    ends = np.array(
        [[estimate.low for estimate in estimates], [estimate.high for estimate in estimates]]
    )
    return values, np.abs(ends - values)
