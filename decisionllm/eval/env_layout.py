"""Checks of the layout: observations and actions of an environment against those of the data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decisionllm.datasets.action_range import CONSTANT
from decisionllm.datasets.space_parts import VECTOR, describe_parts
from decisionllm.protocols import Env
from decisionllm.schema import Json, Spec

CLOSE = 1e-5  # rounding of a bound in float32
LIKE_THE_DATA = "give an environment like that of the data"


def check_env(spec: Spec, dataset: Json, env: Env, name: str) -> str:
    """Compare the actions and the layout of a dataset with those of an environment.

    Args:
        spec: of the data.
        dataset: their info. `observation_parts` has (name, numbers) of each part of an observation,
            `categorical` the sizes of those declared categorical, `action_parts` the sizes of the
            parts of a discrete action; without them the data name none. One part called
            `observation` is a vector, whose numbers have no names.
        env: the environment; parts that it leaves empty are not compared.
        name: of the run, to begin a message with.

    Returns:
        A note of one line for the user where the environment has several parts and the data name
        none; else "".

    Raises:
        ValueError: they differ.
    """
    check_actions(spec, env, name)
    notes = [
        _compare_observation_parts(dataset, env, name),
        _compare_action_parts(dataset, env, name),
        _compare_action_range(spec, env),
    ]
    note = "; ".join(filter(None, notes))
    return f"{name}: {note}" if note else ""


def _compare_observation_parts(dataset: Json, env: Env, name: str) -> str:
    """Return the note on the parts of an observation, see `check_env`."""
    of_data = [(str(part), int(size)) for part, size in dataset.get("observation_parts") or ()]
    of_env = [(str(part), int(size)) for part, size in env.observation_parts]
    declared = dict(dataset.get("categorical") or {})
    if not of_env or of_data == of_env:
        _check_categorical(declared, env, name)
        return ""
    is_unnamed = _has_no_names(of_data)
    is_same_size = not of_data or _total_size(of_data) == _total_size(of_env)
    are_vectors = len(of_data) < 2 and len(of_env) == 1 and (is_unnamed or _has_no_names(of_env))
    if is_same_size and are_vectors:
        return ""
    if is_same_size and is_unnamed:
        return (
            "the data do not name the parts of an observation, the environment lays them out as "
            f"{describe_parts(of_env)}; if the data have another order, record them in this one and state "
            f"it: 'dataset.observation_parts={_as_option(dict(of_env))}' of dataset=arrays, "
            "from_episodes(..., observation_parts=...)"
        )
    fix = LIKE_THE_DATA
    if sorted(of_data) == sorted(of_env):
        fix = "bring the columns of the data into the order of the environment"
    if env.categorical is not None and declared != env.categorical:
        fix = _declare_alike(declared, env.categorical)
    raise ValueError(
        f"{name}: the data's observations are laid out as {describe_parts(of_data)}, the environment's as "
        f"{describe_parts(of_env)}; {fix}"
    )


def _check_categorical(declared: Json, env: Env, name: str) -> None:
    """Raise a ValueError if a part of an observation has other categories in the data than in the
    environment; a part that only one of the two declares is not compared.

    declared: the sizes of the data.
    """
    of_env = env.categorical or {}
    if any(declared[part] != of_env[part] for part in declared.keys() & of_env.keys()):
        raise ValueError(
            f"{name}: the data's categorical parts are {_as_option(declared)}, the environment's "
            f"{_as_option(of_env)}; {_declare_alike(declared, of_env)}"
        )


def _declare_alike(declared: Json, of_env: Mapping[str, Any]) -> str:
    """Say what to do where the data and the environment declare other categories."""
    if declared:
        return f"give env.categorical={_as_option(declared)}, as in the data"
    return (
        "leave env.categorical out, or make the data with the same declaration, "
        f"dataset.categorical={_as_option(of_env)}"
    )


def _as_option(sizes: Mapping[str, Any]) -> str:
    """Write sizes by name as the command line reads them: {image: [11, 6, 4]}."""
    return json.dumps(sizes).replace('"', "")


def _total_size(parts: Sequence[tuple[str, int]]) -> int:
    """Return how many numbers an observation has."""
    return sum(size for _, size in parts)


def _has_no_names(parts: Sequence[tuple[str, int]]) -> bool:
    """Return whether an observation is one vector whose numbers have no names."""
    return not parts or [name for name, _ in parts] == [VECTOR]


def _compare_action_parts(dataset: Json, env: Env, name: str) -> str:
    """Return the note on the parts of a discrete action, see `check_env`."""
    of_data = list(dataset.get("action_parts") or ())
    of_env = list(env.action_parts)
    if of_data and of_env and of_data != of_env:
        raise ValueError(
            f"{name}: the data's actions have parts of {of_data} values, the environment's of "
            f"{of_env}; {LIKE_THE_DATA}"
        )
    if of_data or len(of_env) < 2:
        return ""
    return (
        "the data do not name the parts of an action, the environment reads an index as "
        f"np.ravel_multi_index(parts, {of_env}); state it if the data's are the same: "
        f"dataset.action_parts={of_env} of dataset=arrays, from_episodes(..., action_parts={of_env})"
    )


def _compare_action_range(spec: Spec, env: Env) -> str:
    """Return the note on actions of the data that the environment does not take, see `check_env`."""
    if env.action_range is None or spec.num_actions:
        return ""
    low, high = np.array(env.action_range)
    # the bounds of a number with one value are on both sides of it, see `separate_bounds`
    apart = 1.1 * CONSTANT * np.maximum(np.abs(low), 1)
    close = np.where(low == high, apart, CLOSE)
    within = np.array(spec.low) >= low - close, np.array(spec.high) <= high + close
    if np.all(within):
        return ""
    return (
        f"the data's actions reach from {list(spec.low)} .. {list(spec.high)}, the environment "
        f"takes {low.tolist()} .. {high.tolist()}"
    )


def check_actions(spec: Spec, env: Env, name: str) -> None:
    """Compare the kind and number of the actions of the data with those of an environment.

    Args:
        spec: of the data.
        env: the environment; where its `num_actions` or `action_dim` is None, nothing is compared.
        name: of the run, to begin a message with.

    Raises:
        ValueError: they differ.
    """
    if env.num_actions in (None, spec.num_actions):
        size = env.action_dim
        if not spec.num_actions and size not in (None, spec.action_dim):
            raise ValueError(
                f"{name}: expected actions of {spec.action_dim} numbers, as in the data, the "
                f"environment takes {size}; {LIKE_THE_DATA}"
            )
        return
    fix = "evaluate it in one like that of its data"
    if env.num_actions and _are_indices(spec, env.num_actions):
        option = f"num_actions={env.num_actions}"
        fix += (
            f"; if the log's actions are whole numbers {spec.low[0]:g} .. {spec.high[0]:g} that "
            f"are indices of actions, train again with dataset.{option} (from_episodes: a spec "
            f"with {option})"
        )
    if _are_parts(spec, env.action_parts):
        fix += (
            "; if the log's actions are the parts of a MultiDiscrete action, train again with "
            f"dataset.action_parts={list(env.action_parts)} of dataset=arrays"
        )
    raise ValueError(
        f"{name}: trained on {_kind(spec.num_actions)} actions, the environment has "
        f"{_kind(env.num_actions)} ones; {fix}"
    )


def _kind(num_actions: int | None) -> str:
    return f"{num_actions} discrete" if num_actions else "continuous"


def _are_indices(spec: Spec, num_actions: int) -> bool:
    """Return whether continuous actions may be indices of so many actions, as floats, by their
    bounds.
    """
    if spec.num_actions or spec.action_dim != 1:
        return False
    low, high = float(spec.low[0]), float(spec.high[0])
    return 0 <= low <= high < num_actions and low.is_integer() and high.is_integer()


def _are_parts(spec: Spec, action_parts: Sequence[int]) -> bool:
    """Return whether continuous actions may be the parts of a MultiDiscrete action, as floats, by
    their bounds.
    """
    if spec.num_actions or spec.action_dim != len(action_parts):
        return False
    low, high = np.array(spec.low), np.array(spec.high)
    are_whole = np.array_equal(low, np.rint(low)) and np.array_equal(high, np.rint(high))
    return are_whole and bool(np.all(low >= 0) and np.all(high < np.array(action_parts)))
