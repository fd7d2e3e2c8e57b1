"""Whether the observations and actions of an environment are laid out as those of the data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decisionllm.datasets.action_range import CONSTANT
from decisionllm.datasets.spaces import VECTOR, in_words
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
            parts of a discrete action; without them the data name none. One part called `observation` is a vector, whose numbers have no names.
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
        _observation_note(dataset, env, name),
        _action_note(dataset, env, name),
        _range_note(spec, env),
    ]
    said = "; ".join(filter(None, notes))
    return f"{name}: {said}" if said else ""


def _observation_note(dataset: Json, env: Env, name: str) -> str:
    """The note on the parts of an observation, see `check_env`."""
    own = [(str(part), int(size)) for part, size in dataset.get("observation_parts") or ()]
    other = [(str(part), int(size)) for part, size in env.observation_parts]
    declared = dict(dataset.get("categorical") or {})
    if not other or own == other:
        _check_categorical(declared, env, name)
        return ""
    unnamed = _unnamed(own)
    same_size = not own or _size(own) == _size(other)
    if same_size and len(own) < 2 and len(other) == 1 and (unnamed or _unnamed(other)):
        return ""
    if same_size and unnamed:
        return (
            "the data do not name the parts of an observation, the environment lays them out as "
            f"{in_words(other)}; if the data have another order, record them in this one and state "
            "it: from_episodes(..., observation_parts=...)"
        )
    layouts = f"laid out as {in_words(own)}, the environment's as {in_words(other)}"
    fix = LIKE_THE_DATA
    if env.categorical is not None and declared != env.categorical:
        fix = _one_declaration(declared, env.categorical)
    raise ValueError(f"{name}: the data's observations are {layouts}; {fix}")


def _check_categorical(declared: Json, env: Env, name: str) -> None:
    """Raise a ValueError if a part of an observation has other categories in the data than in the
    environment; a part that one of the two has without a declaration is not compared.

    declared: the sizes of the data.
    """
    of_env = env.categorical or {}
    if any(declared[part] != of_env[part] for part in declared.keys() & of_env.keys()):
        categories = f"{_as_option(declared)}, the environment's {_as_option(of_env)}"
        fix = _one_declaration(declared, of_env)
        raise ValueError(f"{name}: the data's categorical parts are {categories}; {fix}")


def _one_declaration(declared: Json, of_env: Mapping[str, Any]) -> str:
    """What to do where the data and the environment are declared categorical otherwise."""
    if declared:
        return f"give env.categorical={_as_option(declared)}, as in the data"
    return (
        "leave env.categorical out, or make the data with the same declaration, "
        f"dataset.categorical={_as_option(of_env)}"
    )


def _as_option(sizes: Mapping[str, Any]) -> str:
    """Sizes by name as the command line reads them: {image: [11, 6, 4]}."""
    return json.dumps(sizes).replace('"', "")


def _size(parts: Sequence[tuple[str, int]]) -> int:
    """How many numbers an observation has."""
    return sum(size for _, size in parts)


def _unnamed(parts: Sequence[tuple[str, int]]) -> bool:
    """Whether an observation is one vector whose numbers have no names."""
    return not parts or [name for name, _ in parts] == [VECTOR]


def _action_note(dataset: Json, env: Env, name: str) -> str:
    """The note on the parts of a discrete action, see `check_env`."""
    own = list(dataset.get("action_parts") or ())
    other = list(env.action_parts)
    if own and other and own != other:
        parts = f"parts of {own} values, the environment's of {other}"
        raise ValueError(f"{name}: the data's actions have {parts}; {LIKE_THE_DATA}")
    if own or len(other) < 2:
        return ""
    return (
        "the data do not name the parts of an action, the environment reads an index as "
        f"np.ravel_multi_index(parts, {other}); state it if the data's are the same: "
        f"from_episodes(..., action_parts={other})"
    )


def _range_note(spec: Spec, env: Env) -> str:
    """The note on actions of the data that the environment does not take, see `check_env`."""
    if env.action_range is None or spec.num_actions:
        return ""
    low, high = np.array(env.action_range)
    # the bounds of a number with one value are on both sides of it, see `separate_bounds`
    apart = 1.1 * CONSTANT * np.maximum(np.abs(low), 1)
    close = np.where(low == high, apart, CLOSE)
    within = np.array(spec.low) >= low - close, np.array(spec.high) <= high + close
    if np.all(within):
        return ""
    own = f"{list(spec.low)} .. {list(spec.high)}"
    taken = f"{low.tolist()} .. {high.tolist()}"
    return f"the data's actions reach from {own}, the environment takes {taken}"


def check_actions(spec: Spec, env: Env, name: str) -> None:
    """Compare the kind and number of the actions of the data with those of an environment.

    Args:
        spec: of the data.
        env: the environment; what its `num_actions` and `action_dim` leave open is not compared.
        name: of the run, to begin a message with.

    Raises:
        ValueError: they differ.
    """
    if env.num_actions in (None, spec.num_actions):
        size = env.action_dim
        if not spec.num_actions and size not in (None, spec.action_dim):
            wanted = f"actions of {spec.action_dim} numbers, as in the data"
            got = f"the environment takes {size}"
            raise ValueError(f"{name}: expected {wanted}, {got}; {LIKE_THE_DATA}")
        return
    own = _kind(spec.num_actions)
    other = _kind(env.num_actions)
    remedy = "evaluate it in one like that of its data"
    if env.num_actions and _are_indices(spec, env.num_actions):
        option = f"num_actions={env.num_actions}"
        remedy += (
            f"; if the log's actions are whole numbers {spec.low[0]:g} .. {spec.high[0]:g} that "
            f"are indices of actions, train again with dataset.{option} (from_episodes: a spec "
            f"with {option})"
        )
    actions = f"trained on {own} actions, the environment has {other} ones"
    raise ValueError(f"{name}: {actions}; {remedy}")


def _kind(num_actions: int | None) -> str:
    return f"{num_actions} discrete" if num_actions else "continuous"


def _are_indices(spec: Spec, num_actions: int) -> bool:
    """Whether continuous actions may be indices of so many actions, as floats, by their bounds."""
    if spec.num_actions or spec.action_dim != 1:
        return False
    low, high = float(spec.low[0]), float(spec.high[0])
    return 0 <= low <= high < num_actions and low.is_integer() and high.is_integer()
