"""Instruction-following accuracy: the share of wordings of a task under which a policy acts as under
the trained ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from decisionllm.datasets.paraphrases import Facts, held_out_kinds, render_frames
from decisionllm.eval.instruction_probe import act_in_batches
from decisionllm.policy.policy import Policy
from decisionllm.schema import History, Json

TEXTS = 32  # in one forward pass


def measure_wording_accuracy(
    policy: Policy,
    observations: np.ndarray,
    facts: Mapping[str, Facts],
    labels: Sequence[str],
    *,
    frames: int = 0,
) -> Json:
    """Measure the share of texts under which a policy acts as under the trained wordings of their
    task.

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
    rows: list[tuple[int, str, str]] = []  # number of a task, kind of frame, text
    for held_out in (False, True):
        wordings = render_frames(facts, held_out=held_out, frames=frames)
        for number, task in enumerate(facts):
            rows += [(number, kind, text) for kind, text in wordings[task]]
    tasks, kinds, texts = zip(*rows, strict=True)
    task_of, kind_of = np.array(tasks), np.array(kinds)  # (texts,)
    is_trained = kind_of == "trained"

    acting = replace(policy, planning_horizon=0, decode="mode")
    actions = first_actions(acting, texts, observations)  # (texts, K, A)
    distances = []
    for number in range(len(facts)):
        centre = actions[is_trained & (task_of == number)].mean(0)  # (K, A)
        distances.append(np.square(actions - centre).mean((1, 2)))
    nearest = np.argmin(distances, axis=0)  # (texts,)

    is_right = nearest == task_of
    shares = {"chance": 1 / len(facts)}
    shares |= {"trained": is_right[is_trained].mean(), "held_out": is_right[~is_trained].mean()}
    for kind in held_out_kinds(facts.values()):
        shares[kind] = is_right[kind_of == kind].mean()
    names = np.array(labels)
    in_text, in_actions = names[task_of[~is_trained]], names[nearest[~is_trained]]
    return {
        "understood": {name: round(float(share), 4) for name, share in shares.items()},
        "nearest": confusion_table(in_text, in_actions, rows=labels, columns=labels),
    }


def confusion_table(
    expected: np.ndarray, got: np.ndarray, *, rows: Sequence[str], columns: Sequence[str]
) -> Json:
    """Return a table of shares: of M names that were expected (rows), how many came out as each name
    (columns).

    Args:
        expected, got: (M,) names.
        rows, columns: names in the order of the table.
    """
    shares = []
    for row in rows:
        own = got[expected == row]
        shares.append([float((own == column).mean()) for column in columns])
    return {"rows": [*rows], "columns": [*columns], "shares": shares}


def first_actions(policy: Policy, texts: Sequence[str], observations: np.ndarray) -> np.ndarray:
    """Return the first action of each observation under each text: (texts, K, A), raw units."""
    empty = np.zeros((0, policy.model.spec.action_dim), np.float32)
    rewards = np.zeros(0, np.float32)
    firsts = [row[None].astype(np.float32) for row in observations]
    pairs = product(texts, firsts)
    histories = [History(first, empty, rewards, task=text) for text, first in pairs]
    actions = act_in_batches(policy, histories, TEXTS * len(firsts))
    return actions.reshape(len(texts), len(firsts), -1)
