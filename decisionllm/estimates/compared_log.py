"""The log that policies are compared on: opened, checked against each run, and split."""

import reprlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from decisionllm.config import merge
from decisionllm.datasets import sampling
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store import Store, find_text_option, has_texts
from decisionllm.datasets.store_cache import NO_TRANSFORM, prepare_store
from decisionllm.estimates.compare_options import CompareConfig
from decisionllm.estimates.logged_episodes import FEWEST_GROUPS
from decisionllm.estimates.networks import has_shared_texts
from decisionllm.estimates.support import sample_rows
from decisionllm.files import explain_errors
from decisionllm.policy.open_runs import OpenedRun
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Logged
from decisionllm.runs import directory
from decisionllm.schema import Spec


def open_log(first: OpenedRun, options: CompareConfig) -> tuple[Store, bool]:
    """Open the store of the log; also return whether it is another one than the first run's."""
    dataset = first.config["dataset"]
    overrides = dict(options.dataset)
    transform = first.config.get("transform", NO_TRANSFORM)
    cache = first.config["cache_dir"]
    if not overrides:
        return prepare_store(dataset, cache, transform), False
    if "_target_" not in overrides:
        node = merge(dataset, overrides)
    else:
        node = overrides
        if node.get("text", "") is None:
            node["text"] = options.text or first.config["text"]
    return prepare_store(node, cache), True


def check_one_space(paths: Sequence[Path]) -> None:
    """Raise a ValueError if a run has a head for each of several spaces."""
    for path in paths:
        _, info = directory.read(path)
        if ONLY not in info["embodiments"]:
            names = ", ".join(info["embodiments"])
            raise ValueError(
                f"{path}: expected a run of one space, got one of dataset=embodiments "
                f"({names}); leave it out"
            )


def check_run(run: OpenedRun, store: Store) -> None:
    """Raise a ValueError if a run acts for a team, or reads other spaces or texts than those of the
    data.
    """
    if isinstance(run.policy, Policy):
        if run.policy.model.team is not None:
            raise ValueError(f"{run.path}: expected a run of single agents, got one of teams")
        text = find_text_option(store.info, has_texts=has_texts([store]))
        own_text = directory.find_data_text(run.info)
        if own_text != text:
            raise ValueError(
                f"{run.path}: expected a run of text={text}, as the log is read, got "
                f"text={own_text}; compare runs of one text at a time"
            )
    own, data = Spec.of(run.info["spec"]), store.spec
    names = ("observation_dim", "action_dim", "num_actions", "entity_schema", "categorical")
    for name in names:
        got, expected = vars(own)[name], vars(data)[name]
        if got != expected:
            raise ValueError(
                f"{run.path}: expected a run of {name}={reprlib.repr(expected)}, as "
                f"{store.info['name']} has, got {reprlib.repr(got)}; leave it out, or give "
                "dataset= of its own"
            )


def split_episodes(
    store: Store, first: OpenedRun, options: CompareConfig, *, other: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Split the episodes: those that estimators are fitted to, and the held-out ones, (e,) int
    each.

    Args:
        store: of the log.
        first: the first run, whose held-out episodes are judged on unless another share is given.
        options: of the command.
        other: the log is not the first run's own.
    """
    share = options.held_out
    seed = options.seed
    if share is None and other:
        share = 0.5
    elif share is None:
        share = first.config["data"].get("held_out", 0.0)
        seed = first.config["data"]["seed"]
    with explain_errors("held_out", ValueError):
        fitting, held_out = sampling.select(store, held_out=share, seed=seed)
    rng = np.random.default_rng(options.seed)
    fitting = sample_rows(fitting, options.fit_episodes, rng)
    held_out = sample_rows(held_out, options.episodes, rng)
    if len(held_out) < options.least_episodes:
        raise ValueError(
            f"held_out: expected {options.least_episodes} held-out episodes or more "
            f"(least_episodes), got {len(held_out)} of {len(store.lengths)} in "
            f"{store.info['name']}; give a larger held_out=, or dataset= of another log"
        )
    return fitting, held_out


def print_overlap(console: Console, run: OpenedRun, store: Store, held_out: np.ndarray) -> None:
    """Print how many of the held-out episodes a run was trained on, if any."""
    if run.info.get("fingerprint") != store.fingerprint:
        return
    options = run.config["data"]
    names = ("fraction", "min_return_quantile", "held_out", "seed")
    data = {name: options[name] for name in names if name in options}
    trained_on, _ = sampling.select(store, **data)
    num_read = len(np.intersect1d(trained_on, held_out))
    if num_read:
        console.print(
            f"note: {run.path} was trained on {num_read} of the {len(held_out)} held-out episodes, "
            "its estimates may be too high"
        )


def print_log(console: Console, store: Store, log: Logged) -> None:
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
        effect = "intervals resample groups"
        if groups < FEWEST_GROUPS:
            effect = (
                "too few to resample, so that intervals take each episode as one of its own, and "
                "are too narrow where those of a group are alike"
            )
        console.print(
            f"note: the {held_out:,} held-out episodes are of {groups:,} groups, such as days; "
            f"{effect}"
        )
    if len(set(log.tasks)) > 1 and not has_shared_texts(log):
        console.print("note: estimators do not read the task texts, which are not the same in both")
