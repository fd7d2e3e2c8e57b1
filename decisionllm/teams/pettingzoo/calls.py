"""`reset` and `step` of a PettingZoo environment, whose results are checked."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from decisionllm.eval.env_results import (
    ERRORS,
    describe_result,
    explain_call,
    read_flag,
    read_reward,
)
from decisionllm.files import explain_errors
from decisionllm.schema import Json

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

# Seeds of the worlds of an evaluation begin here, so that no log has them
EVALUATION_SEEDS = 2_000_000_000
RESET = "reset(seed=None, options=None) to return (observations, infos), dicts by agent"
STEP = (
    "step(actions) to return (observations, rewards, terminations, truncations, infos), dicts by "
    "agent with a value for each agent that acted"
)


def reset_env(env: "ParallelEnv", seed: int) -> tuple[Json, Json]:
    """Return the observations and infos of all agents at the start.

    Raises:
        ValueError: the environment does not take the seed, or returns something else.
    """
    with explain_call(env, f"reset(seed={seed})", RESET):
        result = env.reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"expected two values, got {describe_result(result)}")
        observations, infos = result
        check_agents("an observation", observations, env.agents)
        check_agents("an info", infos, ())
    return observations, infos


def step_env(env: "ParallelEnv", actions: Json) -> tuple[Json, Json, Json, Json, Json]:
    """Take a step. Returns observations, rewards, terminated, truncated and infos; rewards and ends
    of the agents that acted.

    Raises:
        ValueError: the environment returns something else.
    """
    with explain_call(env, "step", STEP):
        observations, rewards, terminated, truncated, infos = env.step(actions)
        ends = {"a termination": terminated, "a truncation": truncated}
        for name, values in {"a reward": rewards, **ends}.items():
            check_agents(name, values, actions)
        check_agents("an observation", observations, env.agents)
        check_agents("an info", infos, ())
        reward_of, has_terminated, is_truncated = {}, {}, {}
        for agent in actions:
            with explain_errors(agent, *ERRORS):
                reward_of[agent] = read_reward(rewards[agent])
                has_terminated[agent] = read_flag("termination", terminated[agent])
                is_truncated[agent] = read_flag("truncation", truncated[agent])
    return observations, reward_of, has_terminated, is_truncated, infos


def check_agents(value_name: str, values: object, agents: Iterable[str]) -> None:
    """Raise a ValueError if an environment returned no value for an agent.

    value_name: in words.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"expected {value_name} by agent, got {type(values).__name__}")
    for agent in agents:
        if agent not in values:
            raise ValueError(
                f"expected {value_name} of {agent}, got those of "
                f"{', '.join(map(str, values)) or 'none'}"
            )
