"""Play a PettingZoo environment and record a Log."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.spaces import Discrete

from decisionllm.checks import check_at_least, check_one_of
from decisionllm.schema import Json
from decisionllm.teams.formats.team_log import TABLES, Log
from decisionllm.teams.pettingzoo.calls import EVALUATION_SEEDS, reset_env, step_env
from decisionllm.teams.pettingzoo.spaces import (
    AgentViews,
    action_limits,
    agent_types,
    as_parallel,
    check_common_actions,
    to_vector,
)

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

Act = Callable[[Json, Json], Json]
Rows = list[Json]


def collect(
    env: "ParallelEnv | AECEnv",
    act: Act | Mapping[str, Act],
    *,
    episodes: int,
    seed: int = 0,
    teams: Mapping[str, int] = {},
    **meta: object,
) -> Log:
    """Play a PettingZoo parallel environment and record a Log.

        log = collect(simple_spread_v3.parallel_env(), act, episodes=100)
        write("spread", log)

    Args:
        env: a parallel environment, or an AEC environment that may be played as one. Observations
            are laid out as those of Gymnasium, see `spaces.flatten`. A mask of the allowed actions
            is found as `action_mask` in an observation that is a dict beside `observation`, or in
            infos. Agent `wolf_0` is of type `wolf`.
        act: (observations, infos) -> actions, dicts by agent; or several by name, which play one
            group each in turn.
        episodes: number of groups, reset with seed, seed + 1, ...
        teams: {type: team}; types without one are in team 0.
        meta: see `log_meta`; task, name, ...

    Returns:
        A Log in which the reward of a team is the mean of its agents' rewards over all agents that
        it began with.

    Raises:
        ValueError: a space, an option, or what the environment or `act` returns cannot be recorded;
            nothing is returned.
    """
    env = as_parallel(env)
    limits = action_limits(env)
    for kind in teams:
        check_one_of("teams", kind, limits)
    check_common_actions(env, limits)
    discrete = all("num_actions" in limit for limit in limits.values())
    types: Mapping[str, Json] = meta.get("types", {})  # type: ignore[assignment]
    views = AgentViews(
        env, {agent: types.get(kind, {}) for agent, kind in agent_types(env).items()}
    )
    fixed = _fixed_columns(env, list(limits), teams)
    acts = _list_behaviours(act)
    check_at_least("episodes", episodes, 1)
    if not 0 <= seed <= EVALUATION_SEEDS - episodes:
        most = EVALUATION_SEEDS - episodes
        raise ValueError(f"seed: expected 0 .. {most}, since evaluations have more, got {seed}")

    steps: Rows = []
    agents: Rows = []
    for group in range(episodes):
        sizes: Counter[int] = Counter()  # agents that each team begins with
        for moment in _play(env, acts[group % len(acts)], seed + group, views):
            team_of = {agent: fixed[agent]["team"] for agent in moment.views}
            if not sizes:
                sizes.update(team_of.values())
            key = {"group": group, "step": moment.step}
            for team, size in sizes.items():
                reward = moment.team_reward(team, team_of) / size
                steps.append({**key, "team": team, "reward": reward, **moment.end()})
            for agent in moment.views:
                agents.append(key | fixed[agent] | moment.row(agent, env, discrete=discrete))

    columns = _stack_agent_columns(agents)
    types_with_layouts = dict(types or limits)
    for agent, layout in views.layouts().items():
        kind = agent_types(env)[agent]
        if kind in types_with_layouts and not types_with_layouts[kind].get("observations"):
            types_with_layouts[kind] = {"observation_parts": layout} | types_with_layouts[kind]
    log_meta = {
        "name": str(env),
        "teams": dict(teams),
        "horizon": max(row["step"] for row in steps) + 1,
        "seed": seed,
        "generator": "collect",
    }
    if isinstance(act, Mapping):
        columns["behaviour"] = columns["group"] % len(acts)
        log_meta["behaviours"] = list(act)
    return Log(log_meta | meta | {"types": types_with_layouts}, _stack_columns(steps), columns)


def _list_behaviours(act: Act | Mapping[str, Act]) -> list[Act]:
    """Return the behaviours that play in turn; a ValueError if a log can't number them."""
    acts = list(act.values()) if isinstance(act, Mapping) else [act]
    most = np.iinfo(TABLES["agents"]["behaviour"]).max + 1
    if not 1 <= len(acts) <= most:
        raise ValueError(f"act: expected 1 to {most} behaviours, got {len(acts)}")
    return acts


def _fixed_columns(
    env: "ParallelEnv", types: list[str], teams: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Return the columns of each agent that are the same in all of its rows, by agent."""
    fixed = {}
    for number, (agent, kind) in enumerate(agent_types(env).items()):
        fixed[agent] = {
            "agent": number,
            "agent_type": types.index(kind),
            "team": teams.get(kind, 0),
        }
    return fixed


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """A step of an environment.

    Attributes:
        step: of the episode.
        views: {agent: (observation, action mask)} of those present, see `split_observation`.
        actions, rewards, terminated, truncated: {agent: value}.
        over: whether the episode ends with this step.
    """

    step: int
    views: dict[str, tuple[np.ndarray, np.ndarray | None]]
    actions: Json
    rewards: Json
    terminated: Json
    truncated: Json
    over: bool

    def end(self) -> dict[str, bool]:
        """Return the end of the episode, for the table `steps`."""
        by_clock = any(self.truncated.values())
        return {"terminated": self.over and not by_clock, "truncated": self.over and by_clock}

    def team_reward(self, team: int, team_of: Mapping[str, int]) -> float:
        """Return the sum of the rewards of the agents of a team that are present."""
        total = 0.0
        for agent, its_team in team_of.items():
            if its_team == team:
                total += self.rewards[agent]
        return total

    def row(self, agent: str, env: "ParallelEnv", *, discrete: bool) -> Json:
        """Return the observation, action and results of an agent, for the table `agents`."""
        observation, mask = self.views[agent]
        action = self.actions[agent]
        action_columns: Json
        if not discrete:
            action_columns = {"action_values": to_vector(action), "available": np.ones(0, bool)}
        else:
            space = env.action_space(agent)
            allowed = np.ones(space.n, bool) if mask is None else mask
            action_columns = {"action": to_action_index(action, agent, space), "available": allowed}
        reward = self.rewards[agent]
        terminated = bool(self.terminated[agent])
        return action_columns | {
            "reward": reward,
            "terminated": terminated,
            "observation": observation,
        }


def to_action_index(action: object, agent: str, space: Discrete) -> int:
    """A value of a space, or an array that holds one alone, counted from 0.

    Raises:
        ValueError: it is no value of the space. The environment may take it, but the log would not
            hold it: -1 is an action that was not recorded.
    """
    value = np.asarray(action)
    if value.size != 1 or value.item() not in range(space.start, space.start + space.n):
        raise ValueError(f"act: expected an action of {agent} in {space}, got {action!r}")
    return int(value.item() - space.start)


def _play(
    env: "ParallelEnv", act: Act, seed: int, agent_views: "AgentViews"
) -> Iterator[PlayedStep]:
    """Play one episode."""
    observations, infos = reset_env(env, seed)
    step = 0
    while env.agents:
        present = list(env.agents)
        views_by_agent = {agent: agent_views.split(agent, observations, infos) for agent in present}
        actions = act(observations, infos)
        for agent in present:
            if agent not in actions:
                raise ValueError(
                    f"act: expected an action of {agent}, got those of "
                    f"{', '.join(map(str, actions)) or 'none'}"
                )
        acted = {agent: actions[agent] for agent in present}
        observations, rewards, terminated, truncated, infos = step_env(env, acted)
        yield PlayedStep(
            step=step,
            views=views_by_agent,
            actions=acted,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            over=not env.agents,
        )
        step += 1


def _stack_agent_columns(agents: Rows) -> dict[str, np.ndarray]:
    """Return the table of agents: observations end to end, and masks only if an action is
    forbidden.
    """
    observations = [row.pop("observation") for row in agents]
    masks = [row.pop("available") for row in agents]
    columns = _stack_columns(agents)
    columns["observation"] = np.concatenate(observations)
    columns["observation_offsets"] = np.cumsum([0, *map(len, observations)])
    if "action" in columns and not all(mask.all() for mask in masks):
        width = max(map(len, masks))
        padded = [np.pad(mask, (0, width - len(mask))) for mask in masks]
        columns["available"] = np.array(padded)
    return columns


def _stack_columns(rows: Rows) -> dict[str, np.ndarray]:
    columns = {}
    for name in rows[0]:
        columns[name] = np.array([row[name] for row in rows])
    return columns
