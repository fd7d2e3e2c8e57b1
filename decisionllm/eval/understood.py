"""Does a policy understand a wording? Its actions under a text, compared with its actions under the trained wordings of each task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from decisionllm.datasets.wordings import KINDS, Facts, spread
from decisionllm.schema import History

TEXTS = 32  # in one forward pass


def understood(
    policy: Any, observations: np.ndarray, facts: Mapping[str, Facts], labels: Sequence[str], *, frames: int = 0
) -> dict[str, Any]:
    """The share of texts whose actions are nearest to the mean actions under the trained wordings of their own task.

    Args:
        policy: a `Policy`; it acts by the mode of its distribution, without planning.
        observations: (K, S) first observations of episodes, raw units.
        facts: of the n tasks that were trained on, {task text: facts}.
        labels: short names of the tasks.
        frames: how many frames were trained on; 0: all.

    Returns:
        understood: shares of the trained texts, all held-out ones and each kind of them, and by chance, 1 / n. nearest: for the
        held-out texts of each task (rows), the share that is nearest to each task (columns).
    """
    texts = [spread(facts, held_out=False, frames=frames), spread(facts, held_out=True)]
    rows = [(t, kind, text) for made in texts for t, task in enumerate(facts) for kind, text in made[task]]
    task, kind = np.array([t for t, _, _ in rows]), np.array([kind for _, kind, _ in rows])
    acting = replace(policy, planning_horizon=0, decode="mode")
    taken = actions(acting, [text for _, _, text in rows], observations)  # (texts, K, A)
    centres = np.stack([taken[(kind == "trained") & (task == t)].mean(0) for t in range(len(facts))])
    nearest = np.stack([np.square(taken - centre).mean((1, 2)) for centre in centres]).argmin(0)
    right, held_out = nearest == task, kind != "trained"
    shares = {"chance": 1 / len(facts), "trained": right[~held_out].mean(), "held_out": right[held_out].mean()}
    shares |= {name: right[kind == name].mean() for name in KINDS}
    table = [[float((nearest[held_out & (task == t)] == c).mean()) for c in range(len(facts))] for t in range(len(facts))]
    return {"understood": {name: round(float(x), 4) for name, x in shares.items()},
            "nearest": {"rows": [*labels], "columns": [*labels], "shares": table}}  # fmt: skip


def actions(policy: Any, texts: Sequence[str], observations: np.ndarray) -> np.ndarray:
    """The first action of each observation under each text: (texts, K, A), raw units."""
    empty = np.zeros((0, policy.model.spec.action_dim), np.float32)
    firsts = [row[None].astype(np.float32) for row in observations]
    parts = []
    for k in range(0, len(texts), TEXTS):
        part = texts[k : k + TEXTS]
        histories = [History(first, empty, np.zeros(0, np.float32), task=text) for text in part for first in firsts]
        parts.append(policy.act(histories).reshape(len(part), len(firsts), -1))
    return np.concatenate(parts)
