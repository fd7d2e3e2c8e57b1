"""Whether a policy understands a wording: do its actions fit the task that the text means?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from decisionllm.datasets.wordings import Facts, held_out_kinds, spread
from decisionllm.policy.policy import Policy
from decisionllm.schema import History, Json

TEXTS = 32  # in one forward pass


def understood(
    policy: Policy,
    observations: np.ndarray,
    facts: Mapping[str, Facts],
    labels: Sequence[str],
    *,
    frames: int = 0,
) -> Json:
    """The share of texts under which a policy acts as under the trained wordings of their task.

    The actions under a text are compared with the mean actions under the trained wordings of each
    task; a text is understood if its own task is the nearest.

    Args:
        policy: acts by the mode of its distribution, without planning.
        observations: (K, S) first observations of episodes, raw units.
        facts: of the n tasks that were trained on, {task text: facts}.
        labels: short names of the tasks.
        frames: how many frames were trained on; 0: all.

    Returns:
        understood: shares of the trained texts, all held-out ones and each kind of them, and by
        chance, 1 / n. nearest: for the held-out texts of each task (rows), the share that is
        nearest to each task (columns).
    """
    worded: list[tuple[int, str, str]] = []  # number of a task, kind of frame, text
    for held_out in (False, True):
        made = spread(facts, held_out=held_out, frames=frames)
        for number, task in enumerate(facts):
            worded += [(number, kind, text) for kind, text in made[task]]
    tasks, kinds, texts = zip(*worded, strict=True)
    task_of, kind_of = np.array(tasks), np.array(kinds)  # (texts,)
    is_trained = kind_of == "trained"
    acting = replace(policy, planning_horizon=0, decode="mode")
    taken = actions(acting, texts, observations)  # (texts, K, A)
    distances = []
    for number in range(len(facts)):
        centre = taken[is_trained & (task_of == number)].mean(0)  # (K, A)
        distances.append(np.square(taken - centre).mean((1, 2)))
    nearest = np.argmin(distances, axis=0)  # (texts,)

    right = nearest == task_of
    shares = {"chance": 1 / len(facts)}
    shares |= {"trained": right[is_trained].mean(), "held_out": right[~is_trained].mean()}
    kinds_of_frames = held_out_kinds(facts.values())
    shares |= {kind: right[kind_of == kind].mean() for kind in kinds_of_frames}
    names = np.array(labels)
    meant, taken_as = names[task_of[~is_trained]], names[nearest[~is_trained]]
    return {
        "understood": {name: round(float(share), 4) for name, share in shares.items()},
        "nearest": confusion(meant, taken_as, rows=labels, columns=labels),
    }


def confusion(
    meant: np.ndarray, found: np.ndarray, *, rows: Sequence[str], columns: Sequence[str]
) -> Json:
    """A table of shares: of M names that were meant (rows), how many were found as each name
    (columns).

    Args:
        meant, found: (M,) names.
        rows, columns: names in the order of the table.
    """
    shares = []
    for row in rows:
        own = found[meant == row]
        shares.append([float((own == column).mean()) for column in columns])
    return {"rows": [*rows], "columns": [*columns], "shares": shares}


def actions(policy: Policy, texts: Sequence[str], observations: np.ndarray) -> np.ndarray:
    """The first action of each observation under each text: (texts, K, A), raw units."""
    empty = np.zeros((0, policy.model.spec.action_dim), np.float32)
    rewards = np.zeros(0, np.float32)
    firsts = [row[None].astype(np.float32) for row in observations]
    pairs = product(texts, firsts)
    histories = [History(first, empty, rewards, task=text) for text, first in pairs]
    size = TEXTS * len(firsts)
    parts = [policy.act(histories[k : k + size]) for k in range(0, len(histories), size)]
    return np.concatenate(parts).reshape(len(texts), len(firsts), -1)
