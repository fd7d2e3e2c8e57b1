"""PyMARL's padded .h5 files, as whole worlds. Source: PyMARL `episode_buffer.py`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from decisionllm.datasets.row_blocks import Columns, to_flags
from decisionllm.files import AGAIN, explain_errors
from decisionllm.schema import Json, raise_for_first
from decisionllm.teams.formats.fixed_team_worlds import BLOCK, Worlds, check_numbers

PYMARL = ("obs", "actions", "reward", "terminated", "filled")
MORE_OF_PYMARL = ("avail_actions", "state")


def read_pymarl(file: Path, repairs: Counter[str]) -> Iterator[Worlds]:
    """A PyMARL file: arrays of (worlds, time, agents, numbers); `filled` says which steps are real.

    As in PyMARL's learner, a world is over after its first `terminated`, and the last column, which
    has no action, is no step unless a world terminated there.
    """
    with (
        explain_errors(f"{file}: not a readable HDF5 file, perhaps cut", OSError, fix=AGAIN),
        h5py.File(file) as source,
    ):
        names = [name for name in (*PYMARL, *MORE_OF_PYMARL) if name in source]
        columns = {name: source[name] for name in names}
        check_columns(file, columns)
        worlds, _, N, _ = columns["obs"].shape
        size = max(BLOCK // int(np.prod(columns["obs"].shape[1:])), 1)
        ended_late = columns["terminated"][:, -1].any()
        for start in range(0, worlds, size):
            block = {name: column[start : start + size] for name, column in columns.items()}
            for name in ("terminated", "filled"):
                block[name] = to_flags(f"{file}, {name}", block[name], start)
            is_step = find_played_steps(block, ended_late)
            check_filled(file, start, is_step)
            steps = {name: column[is_step] for name, column in block.items()}
            terminated = steps["terminated"].reshape(-1, 1)
            actions = steps["actions"]
            if "avail_actions" in steps:
                actions = to_indices(file, actions)
            yield Worlds(
                group=start + np.nonzero(is_step)[0],
                observations=steps["obs"],
                actions=actions,
                rewards=np.repeat(steps["reward"].reshape(-1, 1), N, 1),
                terminals=np.repeat(terminated, N, 1),
                available=steps.get("avail_actions"),
                state=steps.get("state"),
            )


def find_played_steps(block: Columns, ended_late: bool) -> np.ndarray:
    """Return the steps of a block of a PyMARL file that were played, (worlds, time) bool.

    Args:
        block: the columns of some worlds.
        ended_late: whether the last column of the file may be a step.
    """
    shape = block["obs"].shape[:2]
    terminated = block["terminated"].reshape(shape)
    is_step: np.ndarray = block["filled"].reshape(shape).copy()
    is_step &= terminated.cumsum(1) - terminated == 0
    is_step[:, -1] &= ended_late
    return is_step


def to_indices(file: Path, actions: np.ndarray) -> np.ndarray:
    """Return the actions of a PyMARL file beside `avail_actions`, which are discrete, as whole
    numbers.

    Some files hold them as floats.
    """
    is_whole = actions == np.rint(actions)
    raise_for_first(
        f"{file}, actions: ",
        ~is_whole,
        "expected an index, since there are avail_actions, got {}",
        actions,
    )
    return actions.astype(np.int64)


def check_columns(file: Path, columns: Json) -> None:
    """Raise a ValueError if a PyMARL file lacks a column, or if their shapes do not fit."""
    missing = ", ".join(name for name in PYMARL if name not in columns)
    if missing:
        raise ValueError(
            f"{file}: expected PyMARL's keys, {missing} not among {', '.join(columns)}"
        )
    sizes = {name: column.shape[:2] for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{file}: expected as many worlds and steps under each key, got {sizes}")
    agents = columns["obs"].shape[2:3]
    for name, column in columns.items():
        check_numbers(f"{file}, {name}", column)
        shape_of_step = column.shape[2:]
        if name in ("obs", "avail_actions"):
            expected = "(worlds, steps, agents, numbers)"
            fits = len(shape_of_step) == 2 and shape_of_step[:1] == agents
        elif name == "actions":
            expected = "(worlds, steps, agents) or (worlds, steps, agents, numbers)"
            fits = len(shape_of_step) in (1, 2) and shape_of_step[:1] == agents
        else:
            expected = "one number for each world and step"
            fits = name == "state" or np.prod(shape_of_step) == 1
        if not fits:
            raise ValueError(f"{file}, {name}: expected {expected}, got the shape {column.shape}")


def check_filled(file: Path, start: int, is_step: np.ndarray) -> None:
    """Raise a ValueError unless the real steps of each world are the first ones.

    Args:
        file: its path.
        start: number of the first world.
        real: (worlds, time) bool.
    """
    gap = is_step[:, 1:] & ~is_step[:, :-1]
    if is_step[:, 0].all() and not gap.any():
        return
    world = np.argwhere(gap)[0, 0] if gap.any() else np.argmin(is_step[:, 0])
    raise ValueError(
        f"{file}, world {start + world}: expected filled steps from the first on without a gap"
    )
