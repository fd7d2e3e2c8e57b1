"""A log of a team whose agents are all present at every step, as arrays of joint steps."""

from dataclasses import dataclass

import numpy as np

from decisionllm.schema import Json
from decisionllm.teams.agent_episodes import build_agent_episodes
from decisionllm.teams.formats.team_log import Log, TableRows
from decisionllm.tokenizers.entities import EntitySchema


@dataclass(frozen=True)
class JointSteps:
    """W worlds of N agents in T steps, raw units.

    Attributes:
        observations: (W, T, N, O).
        actions: (W, T, N, A).
        rewards: (W, T, N) of each agent, or its team's where the log has no other.
        blocks: of an observation, see `log_meta`.
        low, high: (A,) bounds of actions.
        plane: whether an observation is pairs of numbers throughout, each a vector in a plane.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    blocks: EntitySchema
    low: np.ndarray
    high: np.ndarray
    plane: bool

    @classmethod
    def from_log(cls, log: Log) -> "JointSteps":
        """Build the joint steps of a log.

        Raises:
            ValueError: a row that cannot be, see `build_agent_episodes`; several types or teams of
                agents, discrete or missing actions, or worlds that differ in agents, steps or sizes
                of observations.
        """
        kind = get_only_type(log)
        agents = log.sort_rows("agents", "group", "step", "agent")
        returns = detect_reward_kind(log)
        check_rows(agents, returns)
        shape = check_joint_shape(agents)
        observations = stack_observations(log)[agents.numbers].reshape(*shape, -1)
        actions = agents["action_values"].astype(np.float32).reshape(*shape, -1)
        if np.isnan(actions).any():
            raise ValueError(f"{log.path}: expected every action recorded, got missing ones")
        size = str(observations.shape[-1])
        blocks = kind.get("observations", {}).get(size)
        if blocks is None:
            raise ValueError(
                f"{log.path}: expected blocks of observations of {size} numbers, got none; "
                "describe them in dataset.meta, see docs/data.md"
            )
        return cls(
            observations=observations,
            actions=actions,
            rewards=stack_rewards(agents, shape, returns),
            blocks=blocks,
            low=np.array(kind["low"], np.float32),
            high=np.array(kind["high"], np.float32),
            plane=bool(log.meta.get("plane")),
        )


def get_only_type(log: Log) -> Json:
    """Return the only type of agent in meta; raise a ValueError if there are several, or discrete
    actions.
    """
    types: dict[str, Json] = log.meta["types"]
    if len(types) > 1:
        raise ValueError(f"{log.path}: expected one type of agent, got {', '.join(types)}")
    kind: Json = next(iter(types.values()))
    if "num_actions" in kind or "action_values" not in log.agents:
        raise ValueError(f"{log.path}: expected continuous actions, got discrete ones")
    return kind


def detect_reward_kind(log: Log) -> str:
    """`own` if a log has the reward of each agent, else `team`; a ValueError if it has neither."""
    rewards = log.agents.get("reward")
    if rewards is not None and not np.isnan(rewards).any():
        return "own"
    if "reward" not in log.steps:
        raise ValueError(f"{log.path}: expected rewards of agents or of teams, got none")
    return "team"


def check_rows(agents: TableRows, returns: str) -> None:
    """Raise a ValueError if a row cannot be in a dataset of the log, or if it has several teams."""
    teams = np.unique(agents["team"]).tolist()
    if len(teams) > 1:
        raise ValueError(f"{agents.log.path}: expected one team, got {teams}")
    N = len(np.unique(agents["agent"]))
    build_agent_episodes(agents.log, capacity=N, returns=returns, team=teams[0])


def check_joint_shape(agents: TableRows) -> tuple[int, int, int]:
    """(W, T, N) of the rows of a log, by group, step and agent.

    Raises:
        ValueError: worlds that differ in agents or steps.
    """
    group, step = agents["group"], agents["step"]
    W, T, N = (len(np.unique(column)) for column in (group, step, agents["agent"]))
    is_complete = len(group) == W * T * N
    if is_complete:
        steps = step.reshape(W, T, N)
        is_complete = bool((group.reshape(W, T * N) == group[:: T * N, None]).all())
        is_complete = is_complete and bool((steps == np.arange(T)[:, None]).all())
    if not is_complete:
        raise ValueError(
            f"{agents.log.path}: expected worlds of as many steps, in which all agents are "
            f"always present, got {len(group):,} rows of {W:,} worlds, up to {T} steps and "
            f"{N} agents"
        )
    return W, T, N


def stack_observations(log: Log) -> np.ndarray:
    """Return the observations of a log, (n, O) float32; a ValueError if their sizes differ."""
    flat = np.asarray(log.agents["observation"], np.float32)
    offsets = log.agents.get("observation_offsets")
    if offsets is None:
        return flat
    sizes = np.unique(np.diff(offsets))
    if len(sizes) > 1:
        got = ", ".join(map(str, sizes.tolist()))
        raise ValueError(f"{log.path}: expected observations of one size, got sizes {got}")
    return flat.reshape(len(offsets) - 1, -1)


def stack_rewards(agents: TableRows, shape: tuple[int, int, int], kind: str) -> np.ndarray:
    """Return the reward of each agent or its team, (W, T, N). kind: see `detect_reward_kind`."""
    if kind == "own":
        rewards: np.ndarray = agents["reward"].astype(np.float32).reshape(shape)
        return rewards
    clock = agents.log.sort_rows("steps", "group", "step")
    team_rewards = clock["reward"].astype(np.float32).reshape(shape[:2])
    return np.asarray(np.repeat(team_rewards[..., None], shape[2], -1))
