"""Augmentation of training windows by the symmetries of a world."""

from collections.abc import Callable
from itertools import product

import numpy as np

from decisionllm.datasets.rng import Stream, make_step_rng
from decisionllm.datasets.store import Store
from decisionllm.schema import Window

# The four quarter turns of a plane, each with and without a mirror.
SIGNS = list(product((1, -1), repeat=2))
TURNS = np.array(
    [[[x, 0], [0, y]] for x, y in SIGNS] + [[[0, x], [y, 0]] for x, y in SIGNS], np.float32
)
EXPECTED = "augment=symmetries: expected"


def symmetries(
    sampler: Callable[[int], Window], store: Store, seed: int, among: np.ndarray
) -> Callable[[int], Window]:
    """Turn windows by quarter turns and mirror them at random, all members of a team alike.

    In a world with these eight symmetries, the turned trajectory is possible too.

    Args:
        sampler: step -> Window.
        store: of the episodes. `vectors` in its info names the vectors of an observation.
        seed: of the draws.
        among: (E,) bool, the episodes whose windows are turned.

    Returns:
        step -> Window, a pure function of (seed, step).

    Raises:
        ValueError: the log does not say which numbers are vectors, or its actions are none.
    """
    vectors = find_vectors(store, among)
    check_actions(store)
    action_pair = np.array([[0, 1]])

    def draw_window(step: int) -> Window:
        window = sampler(step)
        rng = make_step_rng(seed, step, Stream.SYMMETRIES)
        symmetry = rng.integers(len(TURNS), size=len(window.mask))
        if window.team is not None:
            symmetry = symmetry[window.team]
        turns = TURNS[symmetry][:, None]
        for first_columns, is_of_part in vectors:
            rows = np.flatnonzero(is_of_part[window.episodes])
            observation_pairs = first_columns[:, None] + np.arange(2)
            turn_vectors(window.observations, rows, observation_pairs, turns[rows])
            turn_vectors(window.actions, rows, action_pair, turns[rows])
        return window

    return draw_window


def turn_vectors(
    column: np.ndarray, rows: np.ndarray, pairs: np.ndarray, turns: np.ndarray
) -> None:
    """Turn vectors in place.

    Args:
        column: (B, T, S) or (B, T, A).
        rows: (R,) of the windows that are turned.
        pairs: (V, 2) columns of the two numbers of each vector.
        turns: (R, 1, 2, 2) matrices.
    """
    selected = column[rows]
    selected[..., pairs] = selected[..., pairs] @ turns
    column[rows] = selected


def check_actions(store: Store) -> None:
    """Raise a ValueError if the actions are not vectors in a plane."""
    spec = store.spec
    limits = {*spec.high, *(-x for x in spec.low)}
    if len(limits) == 1 and spec.action_dim == 2:
        return
    got = f"{spec.low} .. {spec.high}"
    if spec.num_actions:
        got = f"{spec.num_actions} discrete ones"
    raise ValueError(
        f"{EXPECTED} actions that are vectors in a plane, of the same limits in all directions, got "
        f"{got}"
    )


def find_vectors(store: Store, among: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Find the vectors of an observation, part by part of a mixture.

    Args:
        store: of the episodes.
        among: (E,) bool, the episodes that are turned.

    Returns:
        For each part that is turned, (V,) the first column of each vector, and (E,) bool, its
        episodes.

    Raises:
        ValueError: the log does not say which numbers are vectors.
    """
    vectors = []
    for label, info in store.part_infos.items():
        episodes = store.parts[label]
        is_of_part = np.zeros(len(among), bool)
        is_of_part[episodes] = among[episodes]
        if not is_of_part.any():
            continue
        first_columns = np.array(info.get("vectors", ()), int)
        if not len(first_columns):
            raise ValueError(
                f"{EXPECTED} a log that says which numbers of an observation are vectors in a plane "
                "(`plane` in a team log's meta, `vectors` in a store's info), got none for "
                f"{info.get('name', store.path)}"
            )
        vectors.append((first_columns, is_of_part))
    return vectors
