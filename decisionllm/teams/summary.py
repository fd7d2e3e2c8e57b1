"""The card of a log of many agents."""

from collections.abc import Iterator

import numpy as np

from decisionllm.datasets.store import Store
from decisionllm.schema import row_changes


def summarise_agents(store: Store) -> Iterator[str]:
    """Yield lines of text about a log of many agents for its card; none of another log.

    Joint actions and observations are those of all agents of a group at one step; equal ones are
    equal to the last bit.
    """
    if store.agent is None:
        return
    assert store.start is not None, "a store of many agents has it"
    assert store.loss_mask is not None, "a store of many agents has it"
    assert store.return_after_exit is not None, "a store of many agents has it"
    start = np.repeat(store.start - store.offsets[:-1], store.lengths)
    step = start + np.arange(len(store.rewards))
    group = np.repeat(store.group, store.lengths)
    agent = np.repeat(store.agent, store.lengths)
    order = np.lexsort((agent, step, group))
    first = np.flatnonzero(row_changes(group[order], step[order]))  # row of each joint step
    steps = len(first)

    team_size = np.diff(np.append(first, len(order)))
    shares = []
    for size, count in enumerate(np.bincount(team_size)):
        if count:
            shares.append(f"{size} in {100 * count / steps:.1f} %")
    yield f"  agents       {', '.join(shares)} of the {steps:,} joint steps"
    late_share = 100 * (store.start > 0).mean()
    exited_early = 100 * (store.return_after_exit != 0).mean()
    yield (
        f"  episodes     {late_share:.1f} % begin late, {exited_early:.1f} % have rewards after "
        "their end"
    )
    both = np.concatenate([store.observations, store.actions], 1)
    for name, columns, suffix in (
        ("joint action", store.actions, ""),
        ("joint both  ", both, " (observations and actions)"),
    ):
        counts = count_joint_values(columns[order], agent[order], first)
        repeated = 100 * counts[counts > 1].sum() / steps
        yield f"  {name} {len(counts):,} different, {repeated:.1f} % of steps repeat one{suffix}"
    masked_share = 0.0
    if store.action_masks is not None:
        masked_share = 100 * (1 - store.action_masks.mean())
    no_target = 100 * (1 - store.loss_mask.mean())
    choice = f"{masked_share:.1f} % of actions are masked"
    yield f"  choice       {choice}, {no_target:.1f} % of steps are no training targets"


def count_joint_values(columns: np.ndarray, agent: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Count the joint steps of each distinct joint value: (distinct,) int.

    Args:
        columns: (n, C) of each agent, in the order of joint steps.
        agent: (n,).
        first: where each joint step begins.
    """
    rows = np.ascontiguousarray(columns)
    row_bytes = rows.view(f"V{rows.itemsize * rows.shape[1]}")[:, 0]
    _, number = np.unique(row_bytes, return_inverse=True)  # one number a row, equal for equal rows
    # A joint step is hashed: the sum of its rows' numbers, each times a random number of its agent.
    weights = np.random.default_rng(0).integers(2**64, size=agent.max() + 1, dtype=np.uint64)
    terms = (number.astype(np.uint64) + np.uint64(1)) * weights[agent]
    joint = np.add.reduceat(terms, first)
    return np.unique(joint, return_counts=True)[1]
