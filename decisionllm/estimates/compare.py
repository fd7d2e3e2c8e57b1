"""The command `compare`: rank policies from a log alone, by estimates of their returns on held-out
episodes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console

from decisionllm.baselines.d3rlpy import Baseline
from decisionllm.command_line import fill_defaults
from decisionllm.commands.options import read_options
from decisionllm.estimates.compare_options import CompareConfig
from decisionllm.estimates.compared_log import (
    check_one_space,
    check_run,
    open_log,
    print_log,
    print_overlap,
    split_episodes,
)
from decisionllm.estimates.comparison_report import (
    ComparedPolicy,
    draw_estimates,
    list_warnings,
    make_table,
    write_comparison,
)
from decisionllm.estimates.fitted_q import discounted_returns
from decisionllm.estimates.logged_episodes import build_logged, estimate_mean
from decisionllm.estimates.policy_actions import policy_actions
from decisionllm.estimates.support import Support
from decisionllm.files import check_writable, explain_errors
from decisionllm.policy.open_runs import OpenedRun, open_runs, run_directories
from decisionllm.protocols import Candidate, Estimate, Estimator, Logged
from decisionllm.registry import Node, build, find_function
from decisionllm.trust import trust_user_modules


@trust_user_modules
def compare(config: Node) -> Path:
    """Estimate the return of each run of the option `run` from a log.

    Args:
        config: plain dicts as configs/compare.yaml; an option left out has its default.

    Returns:
        The path of compare.json.

    Raises:
        ValueError: an option is wrong, a run does not fit the data, or the data cannot be used.
        FileNotFoundError: a run is not there or has no checkpoint.
    """
    options = read_options(CompareConfig, fill_defaults("compare", config))
    unused = [name for name in options.options if name not in options.estimators]
    if unused:
        raise ValueError(
            f"options.{unused[0]}: expected options of {', '.join(options.estimators)}, which "
            "are taken"
        )
    console = Console(soft_wrap=True, markup=False, highlight=False)
    paths = run_directories(options.run)
    if not paths:
        raise ValueError(f"run: expected one run directory or more, got {options.run}")
    check_one_space(paths)
    runs = open_runs(paths, device=options.device, seed=options.seed, acting=options.act)
    out = Path(options.out or paths[0].parent)
    check_writable(out, "compare.json", "compare.png")  # now, not after estimators are fitted
    store, is_other_log = open_log(runs[0], options)
    for run in runs:
        check_run(run, store)

    # -- the episodes that estimators are fitted to, and those that policies are judged on --
    fitting, held_out = split_episodes(store, runs[0], options, other=is_other_log)
    for run in runs:
        print_overlap(console, run, store, held_out)
    log = build_logged(store, fitting, held_out)
    print_log(console, store, log)

    # -- estimates --
    estimator_options = {name: options.options.get(name, {}) for name in options.estimators}
    estimators = build_estimators(estimator_options, log, options.discount, options.seed)
    by_name = dict(zip(name_candidates(runs), runs, strict=True))
    candidates = [make_candidate(run, log, name) for name, run in by_name.items()]
    judged = estimate_candidates(candidates, log, estimators, seed=options.seed)

    # -- results --
    of_log = log_return(log, options.discount)
    console.print(
        make_table(judged, log, of_log, store.info["name"], options.discount), soft_wrap=False
    )
    for line in list_warnings(judged, options.most_far):
        console.print(line)
    out.mkdir(parents=True, exist_ok=True)
    path = write_comparison(out, judged, by_name, log, of_log, store, options)
    if options.picture:
        draw_estimates(judged, of_log).savefig(out / "compare.png")
    console.print(f"comparison: {path}")
    return path


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
    estimators: dict[str, Estimator] = {}
    for name, estimator_options in options.items():
        estimator_class = find_function("estimator", name)
        assert estimator_class is not None, name
        node = {"_target_": f"{estimator_class.__module__}.{estimator_class.__qualname__}"}
        estimators[name] = build(node | estimator_options, log, discount, seed)
    return estimators


def name_candidates(runs: Sequence[OpenedRun]) -> list[str]:
    """Return the name of each policy; the path of a run whose name another one has."""
    run_names = [run.config["name"] for run in runs]
    names = []
    for name, run in zip(run_names, runs, strict=True):
        is_unique = run_names.count(name) == 1
        names.append(name if is_unique else str(run.path))
    return names


def make_candidate(run: OpenedRun, log: Logged, name: str) -> Candidate:
    """Make the candidate of a run: its actions at the steps of the log."""
    policy = run.policy
    begin = partial(policy.begin, horizon=int(log.lengths.max()))
    if isinstance(policy, Baseline):
        # it has no memory, so that one call decides on all steps of an episode
        actions = []
        for first, end in pairwise(log.offsets):
            actions.append(policy.act(log.observations[first:end]))
        return Candidate(name, np.concatenate(actions), begin)
    with explain_errors(str(run.path), ValueError):
        acted = policy_actions(policy, log)
    # A mode that is always taken has no density: another action never comes. A plan has none
    # either: it replaces the head's sample.
    draws = policy.decode == "sample" and not policy.planning_horizon
    return Candidate(name, acted.actions, begin, acted.log_prob if draws else None)


def estimate_candidates(
    candidates: Sequence[Candidate],
    log: Logged,
    estimators: Mapping[str, Estimator],
    *,
    seed: int,
) -> list[ComparedPolicy]:
    """Estimate each candidate, the best by the first estimator first."""
    support = Support(log, seed)
    judged = []
    for candidate in candidates:
        estimates = {name: estimator.estimate(candidate) for name, estimator in estimators.items()}
        judged.append(
            ComparedPolicy(candidate.name, support.far_share(candidate.actions), estimates)
        )
    first = next(iter(estimators))
    return sorted(judged, key=lambda policy: -policy.estimates[first].value)


def log_return(log: Logged, discount: float) -> Estimate:
    """Return the mean return of the held-out episodes, discounted as the estimates are."""
    returns = discounted_returns(log.rewards, log.offsets, discount)
    return estimate_mean(returns[log.offsets[:-1]][log.held_out], log)
