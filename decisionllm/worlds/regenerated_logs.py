"""Logs of mazes that others published: read from their files, or made again by their protocol."""

import hashlib
from pathlib import Path

import numpy as np

NOISE = 0.5  # standard deviation of the noise on the actions of the published logs


def check_noise(noise: float) -> None:
    """Raise a ValueError if the option `noise` of a log that is made again cannot be."""
    if not 0 <= noise < np.inf:
        raise ValueError(
            f"dataset.noise: expected a deviation of actions within -1 .. 1, 0 or more, got {noise}"
        )


def regenerated_name(published: str, *, count: int, noise: float, seed: int) -> str:
    """Return the name of a log that is made again, with its differences from the published one.

    count: of its steps or episodes; 0: as many as published.
    """
    name = f"{published}@regen-seed{seed}"
    if count:
        name += f"-{count}"
    if noise != NOISE:
        name += f"-noise{noise:g}"
    return name


def file_digest(file: Path) -> str:
    """Return the digest of the bytes of a file (blake2b, 16 bytes)."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
