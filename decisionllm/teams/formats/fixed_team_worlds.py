"""Whole worlds of a fixed team, read from a public log, and the Log of them."""

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from decisionllm.schema import Json, is_numeric
from decisionllm.teams.formats.team_log import Log

BLOCK = 1 << 22  # numbers of the observations that are read at a time


@dataclass(frozen=True)
class Worlds:
    """Worlds of a fixed team of N agents, s steps end to end.

    Attributes:
        group: (s,) world, ascending without a gap.
        observations: (s, N, O).
        actions: (s, N) or (s, N, A).
        rewards: (s, N).
        terminals: (s, N) bool.
        available: (s, N, C).
        state: (s, ...).
    """

    group: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminals: np.ndarray
    available: np.ndarray | None = None
    state: np.ndarray | None = None


def check_numbers(where: str, column: np.ndarray | h5py.Dataset) -> None:
    """Raise a ValueError for an array of texts or of Python objects."""
    if not is_numeric(column.dtype):
        raise ValueError(f"{where}: expected numbers, got {column.dtype}")


def to_log(path: Path, repairs: dict[str, int], worlds: Worlds) -> Log:
    """Make a Log of worlds that were read from `path`, with `repairs` in its meta."""
    group = worlds.group
    s = len(group)
    last = np.append(np.diff(group) != 0, True)  # (s,) steps that end a world
    first = np.flatnonzero(np.append(True, last[:-1]))  # (worlds,) row of each start
    world = group - group[0]  # (s,)
    step = np.arange(s) - first[world]

    # An agent is present until its last choice, or until it terminates before
    available, choice = find_choices(worlds)
    row = np.arange(s)[:, None]
    last_choice = np.maximum.reduceat(np.where(choice, row, -1), first)
    end = np.minimum.reduceat(np.where(worlds.terminals, row, s), first)
    until = np.minimum(last_choice, end)[world]  # (s, N)
    alive = row <= until
    step_row, agent = np.nonzero(alive)

    rewards = worlds.rewards
    shared = (rewards == rewards[:, :1]).all(1)
    ended = worlds.terminals.all(1)
    steps = {
        "group": group,
        "step": step,
        "reward": np.where(shared, rewards[:, 0], rewards.mean(1)),
        "terminated": last & ended,
        "truncated": last & ~ended,
    }
    agents = {
        "group": group[step_row],
        "step": step[step_row],
        "agent": agent,
        "observation": worlds.observations[alive].reshape(len(step_row), -1),
        "loss_mask": choice[alive],
        "terminated": (row == until)[alive] & ~last[step_row],
        "reward": rewards[alive],
    }
    actions = worlds.actions[alive].reshape(len(step_row), -1)
    if is_discrete(worlds):
        width = actions.shape[1]
        if width != 1:
            raise ValueError(
                f"{path}, actions: expected one index for each agent, got {width} numbers; "
                "store the index in place of one-hot or several numbers"
            )
        agents["action"] = actions[:, 0]
        limits: Json = {"num_actions": int(actions.max()) + 1}
    else:
        agents["action_values"] = actions
        bound = np.maximum(1, np.abs(actions).max(0))
        limits = {"low": (-bound).tolist(), "high": bound.tolist()}
    if available is not None:
        agents["available"] = available[alive]
        limits["num_actions"] = available.shape[2]
    if worlds.state is not None:
        steps["state"] = np.asarray(worlds.state, np.float32).reshape(s, -1)
    meta = {
        "types": {"agent": limits},
        "horizon": int(step.max()) + 1,
        "repairs": repairs,
        "shared_reward": bool(shared.all()),
    }
    return Log(meta, steps, agents, str(path))


def is_discrete(worlds: Worlds) -> bool:
    return worlds.actions.dtype.kind in "iu"


def find_choices(worlds: Worlds) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the allowed discrete actions, (s, N, C) bool or None, and whether an agent may take
    more than action 0, (s, N) bool.
    """
    if worlds.available is None or not is_discrete(worlds):
        return None, np.ones(worlds.rewards.shape, bool)
    available = worlds.available != 0
    return available, ~available[..., 0] | (available.sum(2) > 1)
