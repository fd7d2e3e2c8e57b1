"""Augmentation of training windows by the symmetries of a world."""

from collections.abc import Callable
from itertools import product

import numpy as np

from decisionllm.datasets.draws import Draw, of_step
from decisionllm.datasets.store import Store
from decisionllm.registry import register
from decisionllm.schema import Window

# The four quarter turns of a plane, each with and without a mirror.
SIGNS = list(product((1, -1), repeat=2))
TURNS = np.array(
    [[[x, 0], [0, y]] for x, y in SIGNS] + [[[0, x], [y, 0]] for x, y in SIGNS], np.float32
)
EXPECTED = "augment=symmetries: expected"


@register("augment", "symmetries")
def symmetries(
    sampler: Callable[[int], Window], store: Store, seed: int, among: np.ndarray
) -> Callable[[int], Window]:
    """Turn windows by quarter turns and mirror them at random, all members of a team alike.

    A world that looks the same in these eight ways has shown the turned trajectory as well.

    Args:
        sampler: step -> Window.
        store: of the episodes. Its info says which numbers of an observation are vectors.
        seed: of the draws.
        among: (E,) bool, the episodes whose windows are turned.

    Returns:
        step -> Window, a pure function of (seed, step).

    Raises:
        ValueError: the log does not say which numbers are vectors, or its actions are none.
    """
    vectors = vectors_of(store, among)
    check_actions(store)
    of_actions = np.array([[0, 1]])

    def drawn(step: int) -> Window:
        window = sampler(step)
        rng = of_step(seed, step, Draw.SYMMETRIES)
        number = rng.integers(len(TURNS), size=len(window.mask))
        if window.team is not None:
            number = number[window.team]
        turns = TURNS[number][:, None]
        for first, of_part in vectors:
            rows = np.flatnonzero(of_part[window.episodes])
            of_observations = first[:, None] + np.arange(2)
            turn(window.observations, rows, of_observations, turns[rows])
            turn(window.actions, rows, of_actions, turns[rows])
        return window

    return drawn


def turn(column: np.ndarray, rows: np.ndarray, pairs: np.ndarray, turns: np.ndarray) -> None:
    """Turn vectors in place.

    Args:
        column: (B, T, S) or (B, T, A).
        rows: (R,) of the windows that are turned.
        pairs: (V, 2) columns of the two numbers of each vector.
        turns: (R, 1, 2, 2) matrices.
    """
    part = column[rows]
    part[..., pairs] = part[..., pairs] @ turns
    column[rows] = part


def check_actions(store: Store) -> None:
    """Raise a ValueError if the actions are not vectors in a plane."""
    spec = store.spec
    limits = {*spec.high, *(-x for x in spec.low)}
    if len(limits) == 1 and spec.action_dim == 2:
        return
    got = f"{spec.low} .. {spec.high}"
    if spec.num_actions:
        got = f"{spec.num_actions} discrete ones"
    wanted = "actions that are vectors in a plane, of the same limits in all directions"
    raise ValueError(f"{EXPECTED} {wanted}, got {got}")


def vectors_of(store: Store, among: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
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
    found = []
    for label, info in store.part_infos.items():
        episodes = store.parts[label]
        of_part = np.zeros(len(among), bool)
        of_part[episodes] = among[episodes]
        if not of_part.any():
            continue
        first = np.array(info.get("vectors", ()), int)
        if not len(first):
            wanted = "a log that says which numbers of an observation are vectors in a plane"
            where = "`plane` in a team log's meta, `vectors` in a store's info"
            name = info.get("name", store.path)
            raise ValueError(f"{EXPECTED} {wanted} ({where}), got none for {name}")
        found.append((first, of_part))
    return found
