"""The random numbers of a training step: an independent stream for each purpose."""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The purpose of a stream. To numpy the seeds (seed, step) and (seed, step, 0) are one."""

    ROWS = 0
    WORDINGS = 1
    SYMMETRIES = 2
    EMBODIMENT = 3


def make_step_rng(seed: int, step: int, stream: Stream) -> np.random.Generator:
    """Return the generator of one step for one purpose, independent of all others."""
    return np.random.default_rng((seed, step, stream))
