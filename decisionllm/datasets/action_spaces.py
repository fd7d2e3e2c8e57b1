"""Actions of Gymnasium spaces as rows of numbers of a policy, and back."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from decisionllm.datasets.space_parts import AnySpace, value_counts
from decisionllm.datasets.spaces import is_within_bounds, to_box, to_indices
from decisionllm.schema import Json

ActionSpace = spaces.Box | spaces.Discrete | spaces.MultiDiscrete
MAX_ACTIONS = 4096  # combinations of a MultiDiscrete; a head has a logit for each


def action_spec(space: AnySpace, least: ArrayLike = -np.inf, most: ArrayLike = np.inf) -> Json:
    """Return the action fields of a Spec. A Box without finite bounds has those of the data, `least`
    and `most`.
    """
    if isinstance(space, spaces.Box):
        low = space.low.reshape(-1).astype(float)
        high = space.high.reshape(-1).astype(float)
        low = np.where(np.isfinite(low), low, least)
        high = np.where(np.isfinite(high), high, most)
        return {"action_dim": len(low), "low": tuple(low.tolist()), "high": tuple(high.tolist())}
    return {"action_dim": 1, "num_actions": prod(action_parts(space))}


def action_parts(space: AnySpace) -> list[int]:
    """Return the number of values of each part of a discrete action: [n] of a Discrete, the sizes of
    a MultiDiscrete, [] of a Box.

    Raises:
        ValueError: the space is of another kind, or a MultiDiscrete has more than `MAX_ACTIONS`
            combinations.
    """
    if isinstance(space, spaces.Box):
        return []
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        raise ValueError(
            f"action space: expected a Box, a Discrete or a MultiDiscrete, got {space}"
        )
    sizes: list[int] = value_counts(space).tolist()
    if isinstance(space, spaces.MultiDiscrete) and prod(sizes) > MAX_ACTIONS:
        raise ValueError(
            f"action space {space}: expected at most {MAX_ACTIONS} combinations, each of which is one "
            f"discrete action, got {prod(sizes)}; give it fewer parts or values"
        )
    return sizes


def encode_actions(actions: Any, space: AnySpace) -> np.ndarray:
    """Return actions of a space, stacked, as rows of a policy: (n, A) float32; a discrete action is
    one index, counted from 0.

    An action of a MultiDiscrete is the index of its combination, `np.ravel_multi_index`, the last
    part counting fastest.
    """
    if isinstance(space, spaces.MultiDiscrete):
        parts = to_indices(actions, space, "action").T  # one row a part
        index = np.ravel_multi_index(tuple(parts), tuple(action_parts(space)))
        return np.asarray(index, np.float32)[:, None]
    rows = np.asarray(actions, np.float32).reshape(len(actions), -1)
    if isinstance(space, spaces.Discrete):
        rows = rows - np.float32(space.start)
    return rows


def decode_actions(rows: np.ndarray, space: ActionSpace) -> np.ndarray:
    """Return rows of a policy (n, A) as actions of a space, stacked, in its type: the inverse of
    `encode_actions`.
    """
    if isinstance(space, spaces.Box):
        return to_box(rows, space)
    index = rows[:, 0].astype(np.int64)
    if isinstance(space, spaces.Discrete):
        return np.asarray(index + space.start)
    parts = np.unravel_index(index, tuple(action_parts(space)))
    values = np.stack(parts, axis=1).reshape(len(rows), *space.nvec.shape)
    return np.asarray(values + space.start, space.dtype)


def contains_actions(rows: np.ndarray, space: ActionSpace) -> bool:
    """Return whether every row (n, A) is an action of the space, which `encode_actions` turns into
    the same row.
    """
    actions = decode_actions(rows, space)
    return is_within_bounds(actions, space) and np.array_equal(encode_actions(actions, space), rows)


def check_action_parts(parts: Sequence[int], num_actions: int) -> list[int]:
    """Return the sizes that a user states for the parts of a discrete action; a ValueError unless
    their product is `num_actions`.
    """
    sizes = [int(size) for size in parts]
    if prod(sizes) != num_actions:
        raise ValueError(
            f"action_parts: expected sizes whose product is {num_actions}, the discrete actions, got "
            f"{sizes}"
        )
    return sizes
