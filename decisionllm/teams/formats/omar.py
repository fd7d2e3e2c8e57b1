"""OMAR's folders of .npy files, as whole worlds. Source: OMAR (arXiv 2111.11188)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from decisionllm.files import explain_errors
from decisionllm.teams.formats.fixed_team_worlds import BLOCK, Worlds, check_numbers


def read_omar(folder: Path, repairs: Counter[str], *, cut: int) -> Iterator[Worlds]:
    """One seed of OMAR: obs_0.npy, acs_0.npy, rews_0.npy and so on, in worlds of `cut` steps."""
    if cut < 1:
        raise ValueError(f"dataset.cut: expected 1 step or more, got {cut}")
    message = f"{folder}: expected arrays obs_i, acs_i, rews_i of one shape for each agent i"
    files: dict[str, list[np.ndarray]] = {"obs": [], "acs": [], "rews": []}  # an array an agent
    # A file that is not there must not make a smaller team.
    agents = range(max(len(list(folder.glob(f"{name}_*.npy"))) for name in files))
    with explain_errors(message, OSError, ValueError, EOFError):
        for name, arrays in files.items():
            arrays += [np.load(folder / f"{name}_{i}.npy", mmap_mode="r") for i in agents]
    steps = check_equal_lengths(folder, files, cut)
    n = steps - steps % cut
    if steps > n:
        repairs["steps cut at the end"] = steps - n
    numbers = sum(array[0].size for array in files["obs"])  # in one step
    size = cut * max(BLOCK // (cut * numbers), 1)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        blocks = []
        with explain_errors(message, ValueError):
            for arrays in files.values():
                blocks.append(np.stack([array[rows] for array in arrays], 1))
        observations, actions, rewards = blocks
        yield Worlds(
            group=np.arange(start, start + len(rewards)) // cut,
            observations=observations,
            actions=actions,
            rewards=rewards,
            terminals=np.zeros(rewards.shape, bool),
        )


def check_equal_lengths(folder: Path, files: dict[str, list[np.ndarray]], cut: int) -> int:
    """Return the steps of each array of OMAR.

    Raises:
        ValueError: they differ or are fewer than `cut`, a step has several rewards, or an array
            holds no numbers.
    """
    sizes = {}
    for name, arrays in files.items():
        for i, array in enumerate(arrays):
            check_numbers(f"{folder}, {name}_{i}", array)
            sizes[f"{name}_{i}"] = len(np.atleast_1d(array))
    steps = sizes["obs_0"]
    if steps < cut or len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"{folder}: expected as many steps in each array and at least {cut}, got {lengths}"
        )
    for i, array in enumerate(files["rews"]):
        if array.ndim != 1:
            raise ValueError(
                f"{folder}, rews_{i}: expected one number for each step, got the shape "
                f"{array.shape}"
            )
    return steps
