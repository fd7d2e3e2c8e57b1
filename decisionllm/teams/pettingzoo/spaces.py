"""The agents of a PettingZoo environment: their types, actions, observations and action masks."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import ArrayLike

from decisionllm.datasets.space_parts import AnySpace, observation_parts, text_parts
from decisionllm.datasets.spaces import flatten_one
from decisionllm.eval.env_results import (
    ERRORS,
)
from decisionllm.files import explain_errors
from decisionllm.schema import Json

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

MASK = "action_mask"  # key of the allowed actions, in an observation that is a dict or in an info
NUMBERS = "observation"  # key of the numbers beside the mask


def as_parallel(env: "ParallelEnv | AECEnv") -> "ParallelEnv":
    """Return the environment if its agents act at once; convert an AEC environment.

    Raises:
        ValueError: its agents must act one after the other.
    """
    if not hasattr(env, "agent_iter"):
        return env
    from pettingzoo.utils.conversions import aec_to_parallel

    with explain_errors(
        f"env {env}: expected a parallel environment, or an AEC environment that may be played "
        "as one, its metadata do not say is_parallelizable=True",
        AssertionError,
    ):
        return aec_to_parallel(env)


def agent_types(env: "ParallelEnv") -> dict[str, str]:
    """Return the type of each possible agent: its name without its number, `wolf` for `wolf_0`."""
    with explain_errors(f"env {env}", AttributeError, fix="give the environment possible_agents"):
        names = env.possible_agents
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"env {env}: expected names of agents as text, got {name!r}")
    return {name: name.rstrip("0123456789").rstrip("_-") or name for name in names}


def action_limits(env: "ParallelEnv") -> dict[str, Json]:
    """Return the actions of each type, as in meta["types"]: {type: {num_actions}} or {type: {low,
    high}}.

    Raises:
        ValueError: another kind of space, or agents of one type with other limits.
    """
    limits_by_type: dict[str, Json] = {}
    for agent, kind in agent_types(env).items():
        space = env.action_space(agent)
        limits: Json
        if isinstance(space, Discrete):
            limits = {"num_actions": int(space.n)}
        elif isinstance(space, Box):
            limits = {"low": to_vector(space.low).tolist(), "high": to_vector(space.high).tolist()}
        else:
            raise ValueError(
                f"{env}, {agent}: expected a Discrete or a Box action space, got {space}"
            )
        expected = limits_by_type.setdefault(kind, limits)
        if limits != expected:
            raise ValueError(
                f"{env}, {agent}: expected the actions of type {kind}, {expected}, got "
                f"{limits}; agents whose names differ by a number alone are of one type: "
                "rename this one"
            )
    return limits_by_type


def check_common_actions(env: "ParallelEnv", limits: Mapping[str, Json]) -> None:
    """Raise a ValueError unless all types have discrete actions, or all continuous ones within the
    same bounds, which a log is read with.

    limits: see `action_limits`.
    """
    first, *others = limits
    if all("num_actions" in limit for limit in limits.values()):
        return
    for kind in others:
        if limits[kind] != limits[first]:
            raise ValueError(
                f"env {env}, type {kind}: expected discrete actions of all types, or all "
                f"{first}'s bounds {limits[first]}, got {limits[kind]}"
            )


def to_vector(numbers: ArrayLike) -> np.ndarray:
    """(n,) float32, a copy: an environment may write its next observation into the same array."""
    return np.array(numbers, np.float32).reshape(-1)


def observation_spaces(env: "ParallelEnv") -> dict[str, AnySpace | None]:
    """Return the space of the numbers that each possible agent observes, without its action mask;
    None where the environment declares none.

    Raises:
        ValueError: a space that has no layout, see `space_parts.observation_parts`.
    """
    spaces: dict[str, AnySpace | None] = dict.fromkeys(env.possible_agents)
    if not hasattr(env, "observation_space"):
        return spaces
    for agent in spaces:
        with explain_errors(f"env {env}, {agent}", ValueError):
            space = env.observation_space(agent)
            if isinstance(space, Dict):
                parts = drop_mask(space.spaces)
                space = Dict(parts) if isinstance(parts, dict) else parts
            observation_parts(space)  # refuses other spaces
            texts = text_parts(space)
            if texts:
                raise ValueError(
                    "expected observations without texts, since the task of a team is in the "
                    f"meta of its log, got {', '.join(texts)}; leave them out by a wrapper"
                )
        spaces[agent] = space
    return spaces


def drop_mask(parts: Mapping[str, Any]) -> Any:
    """Return the parts of an observation, or of its space, without the action mask; `observation`
    alone where nothing else is left.
    """
    others = {key: part for key, part in parts.items() if key != MASK}
    return others[NUMBERS] if list(others) == [NUMBERS] else others


def split_observation(
    observation: Any,
    info: Mapping[str, Any],
    space: AnySpace | None = None,
    lengths: Collection[str] = (),
) -> tuple[np.ndarray, np.ndarray | None]:
    """An agent's observation (R,) float32 and its action mask (C,) bool, or None without one.

    Args:
        observation: of the agent; the mask may be in one that is a dict.
        info: of the agent; the mask may be here.
        space: see `observation_spaces`; the layout is that of `spaces.flatten`.
        lengths: numbers that an observation may have beside those of a Box, as texts.

    Raises:
        ValueError: it is not of the space, or not finite.
    """
    mask = info.get(MASK)
    if isinstance(observation, Mapping):
        mask = observation.get(MASK, mask)
        observation = drop_mask(observation)
    if mask is not None:
        mask = np.asarray(mask) != 0
    if isinstance(observation, Mapping) and not isinstance(space, Dict):
        observation = get_numbers(observation)
    if space is None or (isinstance(space, Box) and str(np.size(observation)) in lengths):
        numbers = to_vector(observation)
    else:
        numbers = flatten_one(observation, space)
    if not np.isfinite(numbers).all():
        raise ValueError(f"expected finite observations, got {numbers.tolist()}")
    return numbers, mask


class AgentViews:
    """Reads the observations of an environment's agents as rows of numbers and masks.

    Args:
        env: the environment.
        types: of each agent, described in the meta of a log, whose `observations` may have further
            lengths.
    """

    def __init__(self, env: "ParallelEnv", types: Mapping[str, Json]) -> None:
        self.name = str(env)
        self.spaces = observation_spaces(env)
        self.types = types
        self.num_actions: dict[str, int] = {}
        for agent in env.possible_agents:
            space = env.action_space(agent)
            self.num_actions[agent] = int(space.n) if isinstance(space, Discrete) else 0

    def size(self, agent: str) -> int:
        """Numbers of an agent's observation; a ValueError if its environment does not say them."""
        space = self.spaces[agent]
        if space is None:
            raise ValueError(f"env {self.name}, {agent}: expected an observation_space, got none")
        return sum(size for _, size in observation_parts(space))

    def is_vector(self, agent: str) -> bool:
        """Return whether an agent observes a vector, or its environment declares no space."""
        return self.spaces[agent] is None or isinstance(self.spaces[agent], Box)

    def layouts(self) -> dict[str, list[list[str | int]]]:
        """`space_parts.observation_parts` of each agent whose environment declares its space."""
        layouts: dict[str, list[list[str | int]]] = {}
        for agent, space in self.spaces.items():
            if space is not None:
                layouts[agent] = [[name, size] for name, size in observation_parts(space)]
        return layouts

    def split(
        self, agent: str, observations: Json, infos: Json
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """`split_observation` of an agent, whose mask has an entry for each discrete action."""
        with explain_errors(f"env {self.name}, {agent}", *ERRORS):
            info = infos.get(agent) or {}
            lengths = self.types.get(agent, {}).get("observations") or ()
            space = self.spaces[agent]
            numbers, mask = split_observation(observations[agent], info, space, lengths)
            n = self.num_actions[agent]
            if n and mask is not None and mask.shape != (n,):
                raise ValueError(f"expected an {MASK} of shape ({n},), got {mask.shape}")
        return numbers, mask


def get_numbers(parts: Mapping[str, Any]) -> Any:
    """Return the part of an observation without declared parts that holds the numbers:
    `observation`.
    """
    if NUMBERS not in parts:
        raise ValueError(
            "expected an observation to be numbers, or a dict of observation and "
            f"action_mask, got a dict of {', '.join(map(str, parts)) or 'nothing'}; "
            "declare a Dict observation_space"
        )
    return parts[NUMBERS]
