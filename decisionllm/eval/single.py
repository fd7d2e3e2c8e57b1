"""Environments of this package as Gymnasium environments, so that an exported Minari dataset names the one it is scored in."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from decisionllm.eval.gymnasium import GymnasiumEnv
from decisionllm.protocols import Env
from decisionllm.registry import build
from decisionllm.schema import Spec


class Single(gymnasium.Env[np.ndarray, Any]):
    """One episode of an `Env`.

    Args:
        env: config node, see registry.choice.
        observation_dim, num_actions, low, high: as in `schema.Spec`.
    """

    def __init__(
        self, *, env: dict[str, Any], observation_dim: int, num_actions: int, low: list[float], high: list[float]
    ) -> None:
        self.env: Env = build(env, 1)
        self.observation_space = spaces.Box(-np.inf, np.inf, (observation_dim,), np.float32)
        self.action_space = spaces.Discrete(num_actions) if num_actions else spaces.Box(*np.array([low, high], np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.env.reset(int(self.np_random.integers(2**31)) if seed is None else seed)[0].astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        after, rewards, ended, truncated = self.env.step(np.reshape(action, (1, -1)))
        return after[0].astype(np.float32), float(rewards[0]), bool(ended[0]), bool(truncated[0]), {}


def exported(node: dict[str, Any], spec: Spec) -> dict[str, Any]:
    """What an exported Minari dataset says of its environment: `env`, a Gymnasium EnvSpec, and `reference`, returns of a random policy
    and an expert; empty without an environment, or where agents share a world.

    Args:
        node: config node of the environment.
        spec: of the data.
    """
    if node["_target_"] == "none":
        return {}
    env: Env = build(node, 1)
    if env.groups is not None:
        return {}
    space = {"observation_dim": spec.observation_dim, "num_actions": spec.num_actions, "low": [*spec.low], "high": [*spec.high]}
    made = env.envs[0].spec if isinstance(env, GymnasiumEnv) else EnvSpec(
        f"decisionllm/{type(env).__name__}-v0", f"{__name__}:Single", max_episode_steps=env.horizon, kwargs={"env": node, **space}
    )  # fmt: skip
    return {"env": made, "reference": env.reference}
