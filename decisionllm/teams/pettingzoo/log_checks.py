"""Checks that a PettingZoo environment fits the log that a policy was trained on."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.checks import check_one_of
from decisionllm.datasets.space_parts import describe_parts
from decisionllm.schema import Json
from decisionllm.teams.formats.log_meta import LIMITS
from decisionllm.teams.pettingzoo.spaces import AgentViews


def match_log_types(
    id: str,
    kinds: Mapping[str, str],
    limits: Mapping[str, Json],
    types: Mapping[str, Json],
) -> dict[str, str]:
    """Return the type of each agent in the log: its own, or the only one, which public logs have
    for all.

    Args:
        id: of the environment.
        kinds: {agent: type} in the environment.
        limits: {type: limits of its actions} in the environment.
        types: of the log's meta.

    Raises:
        ValueError: the log lacks a type, or has it with other limits.
    """
    type_in_log = dict(kinds)
    if len(types) == 1:
        type_in_log = dict.fromkeys(kinds, str(*types))
    for agent, kind in kinds.items():
        check_one_of(f"env.id={id}, type in the log", type_in_log[agent], types)
        for key in LIMITS:
            ours = limits[kind].get(key)
            logged = types[type_in_log[agent]].get(key)
            if not are_same_numbers(ours, logged):
                raise ValueError(
                    f"env.id={id}, type {kind}: expected {key} {logged} as in the log, got "
                    f"{ours}; choose env.arguments, or correct the limits of the log by "
                    "dataset.meta"
                )
    return type_in_log


def check_layout(id: str, agent: str, views: AgentViews, logged: Json) -> None:
    """Raise a ValueError if an agent's observation is laid out otherwise than in the log.

    A log that says neither its parts nor its lengths has vectors: earlier versions recorded a
    Discrete as a number. Where it says lengths, these are compared with what is observed.

    Args:
        id: of the environment.
        agent: that the policy plays.
        views: of the environment.
        logged: its type in the meta of the log.
    """
    own = views.layouts().get(agent)
    parts = logged.get("observation_parts")
    if own is None or logged.get("observations") or (parts is None and views.is_vector(agent)):
        return
    if parts != own:
        expected = "observations without parts, as an earlier version recorded the log"
        if parts is not None:
            expected = f"observations of {describe_parts(parts)}, as in the log"
        raise ValueError(
            f"env.id={id}, {agent}: expected {expected}, got {describe_parts(own)}; record the log "
            "again in this environment"
        )


def are_same_numbers(a: ArrayLike | None, b: ArrayLike | None) -> bool:
    """Return whether both are the same numbers in float32, or both None."""
    # None becomes nan
    return np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), equal_nan=True)
