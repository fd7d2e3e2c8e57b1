"""Export to Minari, with the environment of this package that scores the dataset as one of
Gymnasium.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import ArrayLike

from decisionllm.datasets import minari_export
from decisionllm.datasets.action_spaces import contains_actions
from decisionllm.datasets.space_parts import text_parts
from decisionllm.datasets.spaces import contains_observations
from decisionllm.datasets.store import Store, iterate_blocks
from decisionllm.eval.env_layout import check_env
from decisionllm.eval.gymnasium import GymnasiumEnv
from decisionllm.files import explain_errors
from decisionllm.protocols import Env
from decisionllm.registry import Node, build, find_function, is_none
from decisionllm.schema import Json, Spec

if TYPE_CHECKING:
    from minari import MinariDataset

BLOCK = 1 << 14  # rows that are compared at a time


class Single(gymnasium.Env[np.ndarray, ArrayLike]):
    """One episode of an `Env`.

    Args:
        env: config node, see registry.choice.
        observation_dim, num_actions, low, high: as in `schema.Spec`.
    """

    def __init__(
        self,
        *,
        env: Node,
        observation_dim: int,
        num_actions: int,
        low: list[float],
        high: list[float],
    ) -> None:
        self.env: Env = build(env, 1)
        self.observation_space = spaces.Box(-np.inf, np.inf, (observation_dim,), np.float32)
        if num_actions:
            self.action_space = spaces.Discrete(num_actions)
        else:
            self.action_space = spaces.Box(*np.array([low, high], np.float32))

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Node | None = None,
    ) -> tuple[np.ndarray, Json]:
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        return self.env.reset(seed)[0].astype(np.float32), {}

    def step(self, action: ArrayLike) -> tuple[np.ndarray, float, bool, bool, Json]:
        after, rewards, ended, truncated = self.env.step(np.reshape(action, (1, -1)))
        observation = after[0].astype(np.float32)
        return observation, float(rewards[0]), bool(ended[0]), bool(truncated[0]), {}


def export(
    minari_id: str, store: Store, *, env: Node, say: Callable[[str], None]
) -> "MinariDataset":
    """Write a store as a Minari dataset that names the environment which scores it.

    Args:
        minari_id: of the new dataset, see `minari_export.export_store`.
        store: the data.
        env: config node of the environment.
        say: prints a line for the user.
    """
    with explain_errors(
        "export=minari: the environment could not be made",
        ValueError,
        OSError,
        fix="env=none exports without one",
    ):
        options, note = describe_environment(env, store)
    if note:
        say(note)
    final_observations = find_function("final_observations", store.info.get("env", ""))
    if final_observations is not None:
        options["final"] = final_observations(store)
    return minari_export.export_store(minari_id, store, **options)


def describe_environment(node: Node, store: Store) -> tuple[Json, str]:
    """Return the environment that an exported Minari dataset names.

    Args:
        node: config node of the environment.
        store: the data.

    Returns:
        Options of `minari_export.export_store`: `env`, a Gymnasium EnvSpec, its spaces, and `reference`, returns
        of a random policy and an expert; empty without an environment, or where agents share a
        world. And a line for the user, or "": why the dataset names no environment, or what the
        data do not say of its layout.
    """
    if is_none(node):
        return {}, ""
    env: Env = build(node, 1)
    if env.groups is not None:
        return {}, ""
    options: Json = {"reference": env.reference}
    if not isinstance(env, GymnasiumEnv):
        return options | {"env": _as_gymnasium(node, env, store.spec)}, ""
    try:
        note = check_exportable(store, env)
    except ValueError as error:
        return options, f"{error}; the dataset names no environment"
    spaces_of = {"observation_space": env.observation_space, "action_space": env.space}
    return options | {"env": env.envs[0].spec} | spaces_of, note


def _as_gymnasium(node: Node, env: Env, spec: Spec) -> EnvSpec:
    """Return the Gymnasium spec of an environment of this package."""
    options = {
        "env": node,
        "observation_dim": spec.observation_dim,
        "num_actions": spec.num_actions,
        "low": list(spec.low),
        "high": list(spec.high),
    }
    name = f"decisionllm/{type(env).__name__}-v0"
    entry = f"{__name__}:Single"
    return EnvSpec(name, entry, max_episode_steps=env.horizon, kwargs=options)


def check_exportable(store: Store, env: GymnasiumEnv) -> str:
    """Check that every observation and action of a store is one of an environment's spaces.

    Returns:
        The note of `check_env`.

    Raises:
        ValueError: one is not.
    """
    name = str(store.info["name"])
    note = check_env(store.spec, store.info, env, name)
    if env.part:
        raise ValueError(
            f"{name}: the data hold the part {env.part} alone of the observations of "
            f"{env.envs[0].observation_space}"
        )
    texts = text_parts(env.observation_space)
    if len(texts) > 1:
        raise ValueError(f"{name}: expected one text in an observation, got {', '.join(texts)}")
    size = sum(numbers for _, numbers in env.observation_parts)
    if size != store.spec.observation_dim:
        raise ValueError(
            f"{name}: expected observations of {size} numbers, got {store.spec.observation_dim}"
        )
    for episodes, rows in iterate_blocks(store, BLOCK):
        observations = [store.observations[rows]]
        if store.final_observation is not None:
            observations.append(store.final_observation[episodes])
        if not all(contains_observations(each, env.observation_space) for each in observations):
            raise ValueError(f"{name}: an observation is not in {env.observation_space}")
        if not contains_actions(store.actions[rows], env.space):
            raise ValueError(f"{name}: an action is not in {env.space}")
    return note
