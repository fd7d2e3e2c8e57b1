"""Recognise D4RL's Maze2D files by what is publicly known of their content; no digests of them are
published.

Sources, issues of Farama-Foundation/D4RL: the keys (176), the rewards, each of the position in its
own row (194), rows of umaze with timeouts (85); the numbers of rows are in its wiki, "Tasks".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decisionllm.files import AGAIN, explain_errors
from decisionllm.schema import Json
from decisionllm.worlds.maze2d.simulator import GOAL_RADIUS, Maze, reward

KEYS = [
    "actions",
    "infos/goal",
    "infos/qpos",
    "infos/qvel",
    "observations",
    "rewards",
    "terminals",
    "timeouts",
]
# rows with timeouts: the first ones and the last ones
TIMEOUTS = {"maze2d-umaze-v1": ((91, 144, 230), (999592, 999702, 999868))}
Columns = Mapping[str, np.ndarray]
BORDER = 1e-6  # a distance so near to the radius is within or beyond it by rounding
ROUNDING = 1e-4  # allowed difference of rewards


@dataclass(frozen=True)
class Published:
    """Known facts of one of D4RL's files."""

    dataset: str  # such as maze2d-umaze-v1
    file: str  # its name
    rows: int
    dense: bool  # rewards are exp(-distance)


def recognise_file(
    path: Path,
    blocks: Iterable[Columns],
    simulator: Maze,
    published: Published,
) -> Json:
    """Compare a Maze2D file with D4RL's by its content.

    Args:
        path: the file.
        blocks: its columns, see `dataset.read_hdf5`.
        simulator: the maze.
        published: D4RL's file.

    Returns:
        "recognised": whether nothing that is known of D4RL's file differs; "content": that, or the
        first difference, in words.
    """
    difference = first_difference(path, blocks, simulator, published)
    if difference:
        return {"recognised": False, "content": f"not known to be D4RL's: {difference}"}
    alike = "rows and rewards"
    if published.dataset in TIMEOUTS:
        alike = "rows, rewards and timeouts"
    same = f"like D4RL's in name, keys, {published.rows:,} {alike}"
    return {"recognised": True, "content": f"{same}; its bytes could not be compared"}


def first_difference(
    path: Path,
    blocks: Iterable[Columns],
    simulator: Maze,
    published: Published,
) -> str:
    """Return the first difference of a file from D4RL's, "" without one; arguments as in
    `recognise_file`.
    """
    if path.name != published.file:
        return f"name: expected {published.file}, got {path.name}"
    keys, name = read_outline(path)
    if keys != KEYS:
        return f"keys: expected {', '.join(KEYS)}, got {', '.join(keys)}"
    if name:  # `dataset.write_hdf5` names what it writes
        return f"attributes: expected no name, got {name}"
    count = 0
    timeouts: list[int] = []
    for block in blocks:
        wrong = wrong_rewards(block, simulator, dense=published.dense)
        if len(wrong):
            row = int(wrong[0])
            position = block["observations"][row, :2]
            earned = reward(position, simulator.goal, dense=published.dense)
            got = f"row {count + row} has {block['rewards'][row]:g}"
            return f"rewards: {got}, its position earns {earned:g}"
        timeouts += (count + np.flatnonzero(block["ends"])).tolist()
        count += len(block["rewards"])
    if count != published.rows:
        return f"rows: expected {published.rows:,}, got {count:,}"
    return wrong_timeouts(timeouts, published.dataset)


def read_outline(path: Path) -> tuple[list[str], str]:
    """Read the sorted keys of the arrays in an HDF5 file, and the name that is its attribute.

    Keys in groups have slashes; without a name it is "".
    """
    import h5py

    keys: list[str] = []

    def collect(key: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            keys.append(key)

    unreadable = f"{path}: not a readable HDF5 file, perhaps truncated"
    with explain_errors(unreadable, OSError, fix=AGAIN), h5py.File(path) as file:
        file.visititems(collect)
        return sorted(keys), str(file.attrs.get("name", ""))


def wrong_rewards(block: Columns, simulator: Maze, *, dense: bool) -> np.ndarray:
    """Return the rows of a block, (n,) int, whose reward is not that of their own position."""
    positions = block["observations"][:, :2]
    wrong = np.abs(block["rewards"] - reward(positions, simulator.goal, dense=dense)) > ROUNDING
    if not dense:
        distance = np.linalg.norm(positions - simulator.goal, axis=1)
        wrong &= np.abs(distance - GOAL_RADIUS) > BORDER
    return np.flatnonzero(wrong)


def wrong_timeouts(timeouts: list[int], dataset: str) -> str:
    """Describe how the rows with timeouts differ from those of a published log, "" if they don't."""
    if dataset not in TIMEOUTS:
        return ""
    first, last = (list(rows) for rows in TIMEOUTS[dataset])
    if timeouts[: len(first)] == first and timeouts[-len(last) :] == last:
        return ""
    got = f"{timeouts[: len(first)]} and {timeouts[-len(last) :]}"
    return f"timeouts: expected the first in rows {first} and the last in {last}, got {got}"
