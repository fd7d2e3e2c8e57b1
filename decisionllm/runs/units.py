"""The units of a model, fitted to its training steps."""

from collections.abc import Iterator

import numpy as np

from decisionllm.datasets.action_range import measure_recorded_actions
from decisionllm.datasets.batches import Data
from decisionllm.datasets.store import get_columns, next_rows
from decisionllm.models.normalizer import Normalizer

NUMBERS = 1 << 24  # of observations that the normaliser reads at a time


def fit_units(normalizer: Normalizer, data: Data) -> None:
    """Fit units to the observations and returns of the training steps, and to the actions of all
    steps.
    """
    observations = data.store.observations
    returns_to_go = data.steps.returns_to_go
    normalizer.fit((observations[rows], returns_to_go[rows]) for rows in training_rows(data))
    normalizer.fit_actions(data.store.spec, measure_recorded_actions(get_columns(data.store)))


def widen_returns(normalizer: Normalizer, data: Data) -> None:
    """Widen the range of returns to that of the training steps; the units stay those of the
    weights.
    """
    for rows in training_rows(data):
        normalizer.widen(data.steps.returns_to_go[rows])


def observation_changes(data: Data) -> Iterator[np.ndarray]:
    """Yield the changes of the observation from one training step to the next, blocks (m, S)."""
    observations = data.store.observations
    for rows in training_rows(data):
        after, is_last = next_rows(rows, data.steps.end)
        change = observations[after] - observations[rows]
        yield change[~is_last]


def training_rows(data: Data) -> Iterator[np.ndarray]:
    """Yield the rows of the training steps, in blocks (m,)."""
    return data.steps.blocks(data.episodes, NUMBERS // data.store.spec.observation_dim)
