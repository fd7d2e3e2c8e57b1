"""The command `compare`: rank policies from a log alone, by estimates of their returns on held-out
episodes.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scipy import stats

from decisionllm.baselines.d3rlpy import Baseline
from decisionllm.checks import at_least, unknown
from decisionllm.command_line import with_defaults
from decisionllm.config import merged
from decisionllm.datasets import sampling
from decisionllm.datasets.store import NO_TRANSFORM, Store, prepare
from decisionllm.estimates.acting import policy_actions
from decisionllm.estimates.fitted_q import discounted_returns
from decisionllm.estimates.log import FEWEST_GROUPS, logged, mean_of
from decisionllm.estimates.networks import tells_texts_apart
from decisionllm.estimates.support import Support, some
from decisionllm.eval.pictures import figure
from decisionllm.files import check_writable, explained, write_json
from decisionllm.policy.opening import OpenedRun, open_runs, run_directories
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Candidate, Estimate, Estimator, Logged
from decisionllm.registry import Node, build, function, function_names
from decisionllm.runs import directory
from decisionllm.schema import Spec
from decisionllm.trust import trusting_user

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Judged:
    """A candidate with its estimates by estimator, and the share of its actions far from the log."""

    name: str
    far: float
    estimates: Mapping[str, Estimate]


@trusting_user
def compare(config: Node) -> Path:
    """Estimate the return of each run of config["run"] from a log.

    Args:
        config: plain dicts as configs/compare.yaml; an option left out has its default.

    Returns:
        The path of compare.json.

    Raises:
        ValueError: an option is wrong, a run does not fit the data, or the data cannot be used.
        FileNotFoundError: a run is not there or has no checkpoint.
    """
    config = with_defaults("compare", config)
    check_options(config)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    paths = run_directories(config["run"])
    if not paths:
        raise ValueError(f"run: expected one run directory or more, got {config['run']}")
    check_one_space(paths)
    runs = open_runs(paths, config)
    out = Path(config["out"] or paths[0].parent)
    check_writable(out, "compare.json", "compare.png")  # now, not after estimators are fitted
    store, other = open_log(runs[0], config)
    text = text_of_log(runs[0], config)
    for run in runs:
        check_run(run, store, text)

    # -- the episodes that estimators are fitted to, and those that policies are judged on --
    fitting, held_out = split(store, runs[0], config, other=other)
    for run in runs:
        say_overlap(console, run, store, held_out)
    log = logged(store, fitting, held_out)
    say_log(console, store, log)

    # -- estimates --
    options = {name: config["options"].get(name, {}) for name in config["estimators"]}
    estimators = build_estimators(options, log, config["discount"], config["seed"])
    by_name = dict(zip(candidate_names(runs), runs, strict=True))
    candidates = [candidate(run, log, name) for name, run in by_name.items()]
    judged = judge(candidates, log, estimators, seed=config["seed"])

    # -- results --
    of_log = log_return(log, config["discount"])
    console.print(
        table(judged, log, of_log, store.info["name"], config["discount"]), soft_wrap=False
    )
    for line in warnings(judged, config["most_far"]):
        console.print(line)
    out.mkdir(parents=True, exist_ok=True)
    written = write(out, judged, by_name, log, of_log, store, config)
    if config["picture"]:
        draw(judged, of_log).savefig(out / "compare.png")
    console.print(f"comparison: {written}")
    return written


def check_options(config: Node) -> None:
    """Raise a ValueError if an option cannot be."""
    known = function_names("estimator")
    if not config["estimators"]:
        raise ValueError(f"estimators: expected one or more of {', '.join(known)}, got none")
    for name in config["estimators"]:
        if name not in known:
            raise ValueError(f"estimators: {unknown('estimator', name, known)}")
    unused = [name for name in config["options"] if name not in config["estimators"]]
    if unused:
        wanted = ", ".join(config["estimators"])
        raise ValueError(f"options.{unused[0]}: expected options of {wanted}, which are taken")
    if not 0 < config["discount"] <= 1:
        raise ValueError(f"discount: expected above 0 and at most 1, got {config['discount']}")
    held_out = config["held_out"]
    if held_out is not None and not 0 < held_out < 1:
        raise ValueError(f"held_out: expected a share above 0 and below 1, got {held_out}")
    for key in ("episodes", "fit_episodes", "least_episodes"):
        at_least(key, config[key], 1)


def open_log(first: OpenedRun, config: Node) -> tuple[Store, bool]:
    """The store that policies are judged from, and whether it is another one than the first run's."""
    own = first.config["dataset"]
    given = dict(config["dataset"])
    transform = first.config.get("transform", NO_TRANSFORM)
    cache = first.config["cache_dir"]
    if not given:
        return prepare(own, cache, transform), False
    if "_target_" not in given:
        node = merged(own, given)
    else:
        node = given
        if node.get("text", "") is None:
            node["text"] = config["text"] or first.config["text"]
    return prepare(node, cache), True


def text_of_log(first: OpenedRun, config: Node) -> str:
    """The option `text` that the log of `open_log` is read with."""
    given = config["dataset"]
    if given.get("text"):
        return str(given["text"])
    if "_target_" in given and config["text"]:
        return str(config["text"])
    return str(first.config["text"])


def check_one_space(paths: Sequence[Path]) -> None:
    """Raise a ValueError if a run has a head for each of several spaces."""
    for path in paths:
        _, info = directory.read(path)
        if "embodiments" in info:
            names = ", ".join(info["embodiments"])
            got = f"got one of dataset=embodiments ({names})"
            raise ValueError(f"{path}: expected a run of one space, {got}; leave it out")


def check_run(run: OpenedRun, store: Store, text: str) -> None:
    """Raise a ValueError if a run acts for a team, or reads other spaces or texts than those of the
    data.

    text: option of the log.
    """
    if isinstance(run.policy, Policy):
        if run.policy.model.team is not None:
            raise ValueError(f"{run.path}: expected a run of single agents, got one of teams")
        own_text = run.config["text"]
        if own_text != text:
            what = f"{run.path}: expected a run of text={text}, as the log is read"
            remedy = "compare runs of one text at a time"
            raise ValueError(f"{what}, got text={own_text}; {remedy}")
    own, data = Spec.of(run.info["spec"]), store.spec
    names = ("observation_dim", "action_dim", "num_actions", "entity_schema", "categorical")
    for name in names:
        got, wanted = vars(own)[name], vars(data)[name]
        if got != wanted:
            expected = f"a run of {name}={reprlib.repr(wanted)}, as {store.info['name']} has"
            raise ValueError(
                f"{run.path}: expected {expected}, got {reprlib.repr(got)}; leave it out, or give "
                "dataset= of its own"
            )


def split(
    store: Store, first: OpenedRun, config: Node, *, other: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The episodes that estimators are fitted to, and those that are judged on, two (e,) int.

    Args:
        store: of the log.
        first: the first run, whose held-out episodes are judged on unless another share is given.
        config: of the command.
        other: the log is not the first run's own.
    """
    share = config["held_out"]
    seed = config["seed"]
    if share is None and other:
        share = 0.5
    elif share is None:
        share = first.config["data"].get("held_out", 0.0)
        seed = first.config["data"]["seed"]
    with explained("held_out", ValueError):
        fitting, held_out = sampling.select(store, held_out=share, seed=seed)
    rng = np.random.default_rng(config["seed"])
    fitting = some(fitting, config["fit_episodes"], rng)
    held_out = some(held_out, config["episodes"], rng)
    if len(held_out) < config["least_episodes"]:
        wanted = f"{config['least_episodes']} held-out episodes or more (least_episodes)"
        remedy = "give a larger held_out=, or dataset= of another log"
        got = f"{len(held_out)} of {len(store.lengths)} in {store.info['name']}"
        raise ValueError(f"held_out: expected {wanted}, got {got}; {remedy}")
    return fitting, held_out


def say_overlap(console: Console, run: OpenedRun, store: Store, held_out: np.ndarray) -> None:
    """Print how many of the held-out episodes a run was trained on, if any."""
    if run.info.get("fingerprint") != store.fingerprint:
        return
    options = run.config["data"]
    names = ("fraction", "min_return_quantile", "held_out", "seed")
    data = {name: options[name] for name in names if name in options}
    trained_on, _ = sampling.select(store, **data)
    read = len(np.intersect1d(trained_on, held_out))
    if read:
        what = f"was trained on {read} of the {len(held_out)} held-out episodes"
        console.print(f"note: {run.path} {what}, its estimates may be too high")


def say_log(console: Console, store: Store, log: Logged) -> None:
    """Print how many episodes there are, whether held-out ones share groups, and whether estimators
    disregard task texts that differ.
    """
    held_out = int(log.held_out.sum())
    fitted = len(log.held_out) - held_out
    console.print(
        f"log: {store.info['name']}, {held_out:,} episodes held out, estimators are fitted to "
        f"{fitted:,}"
    )
    groups = len(np.unique(log.held_out_groups))
    if groups < held_out:
        what = f"the {held_out:,} held-out episodes are of {groups:,} groups, such as days"
        effect = "intervals resample groups"
        if groups < FEWEST_GROUPS:
            effect = (
                "too few to resample, so that intervals take each episode as one of its own, and "
                "are too narrow where those of a group are alike"
            )
        console.print(f"note: {what}; {effect}")
    if len(set(log.tasks)) > 1 and not tells_texts_apart(log):
        console.print("note: estimators do not read the task texts, which are not the same in both")


def build_estimators(
    options: Mapping[str, Node], log: Logged, discount: float, seed: int
) -> dict[str, Estimator]:
    """Estimators by name, fitted to what all policies share.

    Args:
        options: of each estimator by its name.
        log: the episodes.
        discount: of a step.
        seed: of weights and batches.
    """
    found: dict[str, Estimator] = {}
    for name, given in options.items():
        made = function("estimator", name)
        assert made is not None, name
        node = {"_target_": f"{made.__module__}.{made.__qualname__}"}
        found[name] = build(node | given, log, discount, seed)
    return found


def candidate_names(runs: Sequence[OpenedRun]) -> list[str]:
    """The name of each policy; the path of a run whose name another one has."""
    given = [run.config["name"] for run in runs]
    names = []
    for name, run in zip(given, runs, strict=True):
        is_unique = given.count(name) == 1
        names.append(name if is_unique else str(run.path))
    return names


def candidate(run: OpenedRun, log: Logged, name: str) -> Candidate:
    """What estimators need of a run's policy."""
    policy = run.policy
    begin = partial(policy.begin, horizon=int(log.lengths.max()))
    if isinstance(policy, Baseline):
        # it has no memory, so that one call decides on all steps of an episode
        actions = []
        for first, end in pairwise(log.offsets):
            actions.append(policy.act(log.observations[first:end]))
        return Candidate(name, np.concatenate(actions), begin)
    with explained(str(run.path), ValueError):
        acted = policy_actions(policy, log)
    # A mode that is always taken has no density: another action never comes. A plan has none either:
    # it replaces what the head would draw.
    draws = policy.decode == "sample" and not policy.planning_horizon
    return Candidate(name, acted.actions, begin, acted.log_prob if draws else None)


def judge(
    candidates: Sequence[Candidate],
    log: Logged,
    estimators: Mapping[str, Estimator],
    *,
    seed: int,
) -> list[Judged]:
    """Estimate each candidate, the best by the first estimator first."""
    support = Support(log, seed)
    judged = []
    for each in candidates:
        estimates = {name: made.estimate(each) for name, made in estimators.items()}
        judged.append(Judged(each.name, support.far(each.actions), estimates))
    first = next(iter(estimators))
    return sorted(judged, key=lambda one: -one.estimates[first].value)


def ranks(judged: Sequence[Judged], name: str) -> list[int]:
    """The rank of each candidate by this estimator, 1 the best; equal values share the better."""
    values = [-one.estimates[name].value for one in judged]
    return [int(rank) for rank in stats.rankdata(values, method="min")]


def log_return(log: Logged, discount: float) -> Estimate:
    """The mean return of the held-out episodes themselves, discounted as the estimates are."""
    returns = discounted_returns(log.rewards, log.offsets, discount)
    return mean_of(returns[log.offsets[:-1]][log.held_out], log)


def table(
    judged: Sequence[Judged], log: Logged, of_log: Estimate, dataset: str, discount: float
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
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("policy", overflow="fold")
    names = list(judged[0].estimates)
    for name in names:
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("far", justify="right", no_wrap=True)
    by_name = {name: ranks(judged, name) for name in names}
    for i, one in enumerate(judged):
        cells = []
        for name in names:
            found = one.estimates[name]
            interval_of = f"{found.low:.4g}..{found.high:.4g}"
            cells.append(f"{by_name[name][i]}. {found.value:.4g}\n{interval_of}")
        made.add_row(one.name, *cells, f"{100 * one.far:.0f} %")
    return made


def warnings(judged: Sequence[Judged], most_far: float) -> list[str]:
    """What a reader must know beside the numbers, a line each."""
    found = []
    for one in judged:
        if one.far > most_far:
            share = f"{100 * one.far:.0f} % of its actions are far from the logged ones nearby"
            found.append(f"warning: {one.name} leaves the log, {share}; its estimates are guesses")
        for name, estimate in one.estimates.items():
            if estimate.note:
                found.append(f"warning: {one.name}, {name}: {estimate.note}")
    return found


def write(
    out: Path,
    judged: Sequence[Judged],
    runs: Mapping[str, OpenedRun],
    log: Logged,
    of_log: Estimate,
    store: Store,
    config: Node,
) -> Path:
    """Write compare.json. Returns its path.

    Args:
        out: the folder.
        judged: the policies.
        runs: by the name of the policy.
        log: the episodes.
        of_log: see `log_return`.
        store: of the log.
        config: of the command.
    """
    places = {name: ranks(judged, name) for name in config["estimators"]}
    rows = []
    for i, one in enumerate(judged):
        estimates = {
            name: asdict(estimate) | {"rank": places[name][i]}
            for name, estimate in one.estimates.items()
        }
        row = {"policy": one.name, "run": str(runs[one.name].path), "far": one.far}
        rows.append(row | {"estimates": estimates})
    content = {
        "dataset": store.info["name"],
        "fingerprint": store.fingerprint,
        "episodes": int(log.held_out.sum()),
        "groups": len(np.unique(log.held_out_groups)),
        "fit_episodes": int((~log.held_out).sum()),
        "log": asdict(of_log),
        "discount": config["discount"],
        "seed": config["seed"],
        "options": config["options"],
        "versions": directory.versions(),
        "rows": rows,
    }
    write_json(out / "compare.json", content)
    return out / "compare.json"


def draw(judged: Sequence[Judged], of_log: Estimate) -> "Figure":
    """A panel for each estimator: policies with their intervals, and the return of the log."""
    names = list(judged[0].estimates)
    made = figure(1.5 + 4 * len(names), 0.35 * len(judged) + 1.2)
    places = np.arange(len(judged))[::-1]
    policies = [one.name for one in judged]
    panels = made.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axis, name in zip(panels, names, strict=True):
        estimates = [one.estimates[name] for one in judged]
        values, lengths = error_bars(estimates)
        axis.errorbar(values, places, xerr=lengths, fmt="o", capsize=3)
        axis.axvline(of_log.value, color="grey", linestyle=":", linewidth=0.8)
        axis.set(title=f"{name} (dotted: the log)", xlabel="estimated return")
        axis.set_yticks(places, policies)
    return made


def error_bars(estimates: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray]:
    """The values of estimates (P,), and how far their intervals reach below and above (2, P)."""
    values = np.array([each.value for each in estimates])
    ends = np.array([[each.low for each in estimates], [each.high for each in estimates]])
    return values, np.abs(ends - values)
