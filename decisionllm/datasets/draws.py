"""The random numbers of a training step: one stream for each thing that is drawn."""

from enum import IntEnum

import numpy as np


class Draw(IntEnum):
    """What is drawn. To numpy the seeds (seed, step) and (seed, step, 0) are one."""

    ROWS = 0
    WORDINGS = 1
    SYMMETRIES = 2
    EMBODIMENT = 3


def of_step(seed: int, step: int, what: Draw) -> np.random.Generator:
    """The random numbers of one step for one purpose, independent of those for any other."""
    return np.random.default_rng((seed, step, what))
