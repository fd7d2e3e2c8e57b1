"""Warnings about an evaluation that its scores do not show."""

from collections.abc import Mapping, Sequence

import numpy as np

from decisionllm.baselines.d3rlpy import Baseline
from decisionllm.eval import eval_callback
from decisionllm.policy.open_runs import OpenedRun
from decisionllm.protocols import Env
from decisionllm.registry import Node
from decisionllm.schema import Episode


def option_warnings(run: OpenedRun, acting: Mapping[str, Node], seed: int) -> list[str]:
    """Return warnings before the rollouts: weights that were selected by the score that is measured,
    options that have no effect on a baseline.

    Args:
        run: the run.
        acting: the groups act and team of `evaluate`.
        seed: of the environment.
    """
    warnings = []
    keep_best = run.config.get("log", {}).get("keep_best")
    if keep_best == "score" and seed == eval_callback.SEED:
        warnings.append(
            f"{run.path}: rollouts of seed={eval_callback.SEED} chose its weights "
            "(log.keep_best=score), so that this score is too high; give another seed="
        )
    ignored = []
    for options in acting.values():
        ignored += [key for key, value in options.items() if value is not None]
    if isinstance(run.policy, Baseline) and ignored:
        warnings.append(
            f"{run.path}: a baseline acts by its network's mean; {', '.join(ignored)} of act and "
            "team have no effect on it"
        )
    return warnings


def rollout_warnings(run: OpenedRun, env: Env, episodes: Sequence[Episode]) -> list[str]:
    """Return warnings about the episodes of a policy: task texts that it was not trained on, notes
    of the environment, columns of continuous actions that never change.
    """
    warnings = []
    trained_tasks = run.info.get("tasks", env.tasks)
    unread = sorted({episode.task for episode in episodes}.difference(trained_tasks))
    if unread:
        warnings.append(
            f"{run.path}: {len(unread)} task texts of the environment were not in its data, such as "
            f"{unread[0]!r}"
        )
    warnings += [f"{run.path}: {note}" for note in env.notes()]
    return warnings + constant_action_warnings(run, episodes)


def constant_action_warnings(run: OpenedRun, episodes: Sequence[Episode]) -> list[str]:
    """Return a warning if columns of continuous actions never change: such a policy has learned to
    ignore what it observes, and its loss does not say so.
    """
    if run.info["spec"]["num_actions"]:
        return []  # one discrete action may be the best everywhere
    actions = np.concatenate([episode.actions for episode in episodes])
    constant = np.flatnonzero((actions == actions[0]).all(0)).tolist()
    if not constant or len(actions) == 1:
        return []
    return [
        f"{run.path}: columns {constant} of the action are {actions[0, constant].tolist()} at every "
        "step; at a bound the mean of head=gaussian has no gradient, a lower optim.lr keeps it away "
        "from there"
    ]
