"""Scripted players of a PettingZoo environment, and the functions that options name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from decisionllm.datasets.spaces import cast_to_dtype
from decisionllm.teams.pettingzoo.spaces import as_parallel, to_vector

if TYPE_CHECKING:
    from gymnasium.spaces import Box, Discrete
    from pettingzoo import ParallelEnv


def load_function(option: str, path: str) -> Callable[..., Any]:
    """Load the function of a dotted path."""
    module, _, name = path.rpartition(".")
    try:
        function: Callable[..., Any] = vars(import_module(module))[name]
        return function
    except ImportError as error:
        raise ImportError(
            f"{option}: cannot import {module} ({error}); install its package, for mpe2: pip "
            "install -e '.[marl]'"
        ) from error
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{option}: expected the path of a function, but {module or 'no module'} has no {name}"
        ) from error


def make_copies(id: str, arguments: Mapping[str, object], count: int) -> list["ParallelEnv"]:
    """Make `count` PettingZoo environments, by the function `parallel_env` of a module, or by `env`
    if it has AEC environments alone.
    """
    try:
        create = load_function("env.id", f"{id}.parallel_env")
    except ValueError:
        if not id or "env" not in vars(import_module(id)):
            raise
        create = load_function("env.id", f"{id}.env")
    try:
        return [as_parallel(create(**arguments)) for _ in range(count)]
    except (TypeError, AssertionError) as error:
        raise ValueError(f"env.arguments={arguments}: {error}") from error


def to_space(space: "Box | Discrete", action: np.ndarray) -> int | np.ndarray:
    """Convert a policy's action (A,) to a value of the space."""
    from gymnasium.spaces import Discrete

    if isinstance(space, Discrete):
        return int(action[0]) + int(space.start)
    clipped = np.clip(action.reshape(space.shape), space.low, space.high)
    return cast_to_dtype(clipped, space.dtype)


def choose_scripted_action(
    space: "Box | Discrete", mask: np.ndarray | None, rng: np.random.Generator | None
) -> np.ndarray:
    """Return a uniform random action (A,) that is allowed; without rng the first one, or zeros."""
    from gymnasium.spaces import Discrete

    if isinstance(space, Discrete):
        allowed = np.arange(space.n)
        if mask is not None and mask.any():
            allowed = np.flatnonzero(mask)
        index = allowed[0] if rng is None else rng.choice(allowed)
        return np.array([index])
    values = np.zeros(space.shape) if rng is None else rng.uniform(space.low, space.high)
    return to_vector(values)
