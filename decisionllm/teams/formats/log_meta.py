"""The meta of a log of many agents, which describes it: checks, and the meta of several parts.

`types` and `horizon` are required:

- `name`; `task` and `reward_rule`, sentences; `world`: {id, version, arguments}
- `horizon`: most steps of a world
- `types`: {name: {role, num_actions or low and high, observations: {length: blocks},
  observation_parts: [[name, numbers], ...]}}
- `teams`: {type: team}
- `returns`: see `team.source`
- `shared_reward`: whether the reward of each agent is its team's
- `plane`: whether an observation is pairs of numbers throughout, each a vector in a plane (for
  `augment=symmetries`)
- further facts that a result must report

Blocks [[kind, width, count], ...] of an observation follow each other. Kind `own` is the agent
itself, "" is left out, any other kind is `count` entities of `width` numbers; an entity of zeros is
absent. A type without blocks has one `own` block.
"""

import numpy as np

from decisionllm.checks import is_number_list
from decisionllm.schema import Json

BLOCKS = "{length: [[kind, width, count], ...]} of whole numbers"  # of observations, in messages


def check_meta(where: str, meta: Json) -> None:
    """Raise a ValueError if the meta of a log lacks a key, or has a value of another type.

    where: the log, to begin a message with.
    """
    if not meta.get("types") or "horizon" not in meta:
        raise ValueError(
            f"{where}: expected meta to have types and horizon, got {', '.join(meta) or 'nothing'}"
        )
    _check_count(f"{where}, meta, horizon", meta["horizon"])
    for key in ("name", "task", "reward_rule"):
        _check_sentence(f"{where}, meta, {key}", meta.get(key, ""))
    types = meta["types"]
    if not isinstance(types, dict):
        raise ValueError(f"{where}, meta, types: expected {{NAME: DESCRIPTION}}, got {types!r}")
    for name, agent_type in types.items():
        _check_agent_type(f"{where}, meta, type {name}", agent_type)


def _check_agent_type(where: str, agent_type: object) -> None:
    """Raise a ValueError if the description of a type of agents cannot be."""
    if not isinstance(agent_type, dict):
        raise ValueError(f"{where}: expected {{KEY: VALUE}}, got {agent_type!r}")
    if "num_actions" in agent_type:
        _check_count(f"{where}, num_actions", agent_type["num_actions"])
    bounds = [agent_type[key] for key in ("low", "high") if key in agent_type]
    for bound in bounds:
        if not is_number_list(bound) or len(bound) != len(bounds[0]):
            got = " and ".join(map(repr, bounds))
            raise ValueError(
                f"{where}, low, high: expected [NUMBER, ...] each, of one length, got {got}"
            )
    observations = agent_type.get("observations") or {}
    if not isinstance(observations, dict):
        raise ValueError(f"{where}, observations: expected {BLOCKS}, got {observations!r}")
    for length, blocks in observations.items():
        if not _are_blocks(length, blocks):
            entry = {length: blocks}
            raise ValueError(f"{where}, observations: expected {BLOCKS}, got {entry!r}")
    _check_sentence(f"{where}, role", agent_type.get("role", ""))


def _are_blocks(length: object, blocks: object) -> bool:
    """Return whether an entry of `observations` has the form of BLOCKS."""
    if not str(length).isdigit() or not isinstance(blocks, list | tuple):
        return False
    for block in blocks:
        if not isinstance(block, list | tuple) or len(block) != 3:
            return False
        kind, width, count = block
        if not isinstance(kind, str) or not isinstance(width, int) or not isinstance(count, int):
            return False
        if width < 1 or count < 0:
            return False
    return True


def _check_sentence(where: str, value: object) -> None:
    """Raise a ValueError unless a value of meta is text."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text, got {value!r}")


def _check_count(where: str, value: object) -> None:
    """Raise a ValueError unless a value of meta is a whole number above 0."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: expected a whole number above 0, got {value!r}")


# Limits of the actions of a type, and which of several is the widest
LIMITS = {"num_actions": np.max, "low": np.min, "high": np.max}


def merge_meta(meta: Json, part_meta: Json) -> Json:
    """Merge the meta of some parts of a log and of the next one: the longest horizon, the widest
    limits.

    Args:
        meta: of the parts so far; {}: none.
        part_meta: of the next part.
    """
    if not meta:
        return part_meta
    types = {name: dict(each) for name, each in meta["types"].items()}
    for name, each in types.items():
        for key in LIMITS.keys() & each:
            each[key] = LIMITS[key]([each[key], part_meta["types"][name][key]], 0).tolist()
    shared = meta.get("shared_reward", False) and part_meta.get("shared_reward", False)
    horizon = max(meta["horizon"], part_meta["horizon"])
    return part_meta | {"types": types, "horizon": horizon, "shared_reward": shared}
