"""Whether a policy understands a wording: do its actions fit the task that the text means?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from decisionllm.datasets.wordings import KINDS, Facts, spread
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
    texts: list[str] = []
    kinds: list[str] = []
    tasks: list[int] = []
    for held_out in (False, True):
        made = spread(facts, held_out=held_out, frames=frames)
        for number, task in enumerate(facts):
            for kind, text in made[task]:
                texts.append(text)
                kinds.append(kind)
                tasks.append(number)
    kind_of, task_of = np.array(kinds), np.array(tasks)  # (texts,)
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
    shares |= {kind: right[kind_of == kind].mean() for kind in KINDS}
    table = []
    for number in range(len(facts)):
        found = nearest[~is_trained & (task_of == number)]
        table.append([float((found == other).mean()) for other in range(len(facts))])
    return {
        "understood": {name: round(float(share), 4) for name, share in shares.items()},
        "nearest": {"rows": [*labels], "columns": [*labels], "shares": table},
    }


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
