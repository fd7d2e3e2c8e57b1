"""Checks of the results of a Gymnasium or PettingZoo environment."""

import math
from contextlib import AbstractContextManager

import numpy as np
from gymnasium.error import Error

from decisionllm.files import explain_errors
from decisionllm.schema import is_numeric

# errors of an environment that does not follow the interface, or of a wrapper around it
ERRORS = (ValueError, TypeError, AssertionError, AttributeError, LookupError, Error)


def explain_call(env: object, method: str, expected: str) -> AbstractContextManager[None]:
    """Raise a ValueError that names the environment in place of an error of its method.

    Args:
        env: the environment, or its name.
        method: `reset` or `step`, to begin the message with.
        expected: the method as the interface says, with what it returns.
    """
    return explain_errors(f"env {env}: {method} failed", *ERRORS, fix=f"expected {expected}")


def describe_result(value: object) -> str:
    """Return the type and size of a result, for a message: "a tuple of 4" or "a float"."""
    size = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"a {type(value).__name__}{size}"


def read_reward(value: object) -> float:
    """Return a reward as a number, also from an array of one number.

    Raises:
        ValueError: it is no finite number.
    """
    if isinstance(value, int | float) and math.isfinite(value):  # at each step, so the short way
        return float(value)
    array = np.asarray(value)
    if array.size != 1 or not is_numeric(array.dtype) or not np.isfinite(array).all():
        raise ValueError(f"expected a reward of one finite number, got {value!r}")
    return float(array.item())


def read_flag(name: str, value: object) -> bool:
    """Return the value of `terminated` or `truncated`, also from an array of one value.

    Raises:
        ValueError: it is neither true nor false, 1 nor 0.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    array = np.asarray(value)
    if array.size != 1 or not is_numeric(array.dtype) or array.item() not in (0, 1):
        raise ValueError(f"expected {name} to be true or false, got {value!r}")
    return bool(array.item())
