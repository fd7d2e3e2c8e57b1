"""Logs of PettingZoo environments, and the actions and observations of their agents."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import ArrayLike

from decisionllm.checks import at_least, one_of
from decisionllm.datasets.formats.team_log import TABLES, Log
from decisionllm.schema import Json

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

Act = Callable[[Json, Json], Json]
Rows = list[Json]
Part = TypeVar("Part")  # of an observation, or its space


def agent_types(env: "ParallelEnv") -> dict[str, str]:
    """The type of each possible agent: its name without its number, `wolf` for `wolf_0`."""
    names = env.possible_agents
    return {name: name.rstrip("0123456789").rstrip("_-") or name for name in names}


def action_limits(env: "ParallelEnv") -> dict[str, Json]:
    """The actions of each type, as in meta["types"]: {type: {num_actions}} or {type: {low,
    high}}.

    Raises:
        ValueError: another kind of space, or agents of one type with other limits.
    """
    found: dict[str, Json] = {}
    for agent, kind in agent_types(env).items():
        space = env.action_space(agent)
        limits: Json
        if isinstance(space, Discrete):
            limits = {"num_actions": int(space.n)}
        elif isinstance(space, Box):
            limits = {"low": flat(space.low).tolist(), "high": flat(space.high).tolist()}
        else:
            wanted = "expected a Discrete or a Box action space"
            raise ValueError(f"{env}, {agent}: {wanted}, got {space}")
        known = found.setdefault(kind, limits)
        if limits != known:
            wanted = f"expected the actions of type {kind}, {known}"
            remedy = "agents whose names differ by a number alone are of one type: rename this one"
            raise ValueError(f"{env}, {agent}: {wanted}, got {limits}; {remedy}")
    return found


def flat(numbers: ArrayLike) -> np.ndarray:
    """(n,) float32, a copy: an environment may write its next observation into the same array."""
    return np.array(numbers, np.float32).reshape(-1)


def split_observation(
    observation: object,
    info: Mapping[str, Any],
) -> tuple[np.ndarray, np.ndarray | None]:
    """An agent's observation (R,) float32 and its action mask (C,) bool, or None without one.

    The mask is in an observation that is a dict, or in the info.
    """
    view = dict(info)
    if isinstance(observation, dict):
        view |= observation
    else:
        view["observation"] = observation
    mask = view.get("action_mask")
    if mask is not None:
        mask = np.asarray(mask) != 0
    return flat(numbers_of(view)), mask


def numbers_of(parts: Mapping[str, Part]) -> Part:
    """The part of an observation, or of its space, that holds the numbers: `observation`."""
    if "observation" not in parts:
        wanted = "numbers, or a dict of observation and action_mask"
        got = f"a dict of {', '.join(map(str, parts)) or 'nothing'}"
        raise ValueError(f"expected an observation to be {wanted}, got {got}; flatten it")
    return parts["observation"]


def collect(
    env: "ParallelEnv",
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
        env: a parallel environment. A mask of the allowed actions is found as `action_mask` in an
            observation that is a dict beside `observation`, or in infos. Agent `wolf_0` is of type
            `wolf`.
        act: (observations, infos) -> actions, dicts by agent; or several by name, which play one
            group each in turn.
        episodes: number of groups, reset with seed, seed + 1, ...
        teams: {type: team}; types without one are in team 0.
        meta: see `team_log`; task, name, ...

    Returns:
        A Log in which the reward of a team is the mean of its agents' rewards over all agents that
        it began with.
    """
    limits = action_limits(env)
    for kind in teams:
        one_of("teams", kind, limits)
    discrete = all("num_actions" in limit for limit in limits.values())
    fixed = _fixed_columns(env, list(limits), teams)
    acts = _behaviours(act)
    at_least("episodes", episodes, 1)

    steps: Rows = []
    agents: Rows = []
    for group in range(episodes):
        sizes: Counter[int] = Counter()  # agents that each team begins with
        for moment in _play(env, acts[group % len(acts)], seed + group):
            team_of = {agent: fixed[agent]["team"] for agent in moment.views}
            if not sizes:
                sizes.update(team_of.values())
            key = {"group": group, "step": moment.step}
            for team, size in sizes.items():
                reward = moment.team_reward(team, team_of) / size
                steps.append({**key, "team": team, "reward": reward, **moment.end()})
            for agent in moment.views:
                agents.append(key | fixed[agent] | moment.row(agent, env, discrete=discrete))

    columns = _agent_columns(agents)
    found = {
        "name": str(env),
        "types": limits,
        "teams": dict(teams),
        "horizon": max(row["step"] for row in steps) + 1,
        "seed": seed,
        "generator": "collect",
    }
    if isinstance(act, Mapping):
        columns["behaviour"] = columns["group"] % len(acts)
        found["behaviours"] = list(act)
    return Log(found | meta, _columns(steps), columns)


def _behaviours(act: Act | Mapping[str, Act]) -> list[Act]:
    """The behaviours that play in turn; a ValueError if a log can't number them."""
    acts = list(act.values()) if isinstance(act, Mapping) else [act]
    most = np.iinfo(TABLES["agents"]["behaviour"]).max + 1
    if not 1 <= len(acts) <= most:
        raise ValueError(f"act: expected 1 to {most} behaviours, got {len(acts)}")
    return acts


def _fixed_columns(
    env: "ParallelEnv", types: list[str], teams: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """The columns of each agent that are the same in all of its rows, by agent."""
    fixed = {}
    for number, (agent, kind) in enumerate(agent_types(env).items()):
        fixed[agent] = {
            "agent": number,
            "agent_type": types.index(kind),
            "team": teams.get(kind, 0),
        }
    return fixed


@dataclass(frozen=True, kw_only=True)
class Moment:
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
        """The end of the episode, for the table `steps`."""
        by_clock = any(self.truncated.values())
        return {"terminated": self.over and not by_clock, "truncated": self.over and by_clock}

    def team_reward(self, team: int, team_of: Mapping[str, int]) -> float:
        """The sum of the rewards of the agents of a team that are present."""
        total = 0.0
        for agent, its_team in team_of.items():
            if its_team == team:
                total += self.rewards[agent]
        return total

    def row(self, agent: str, env: "ParallelEnv", *, discrete: bool) -> Json:
        """The observation, action and results of an agent, for the table `agents`."""
        observation, mask = self.views[agent]
        action = self.actions[agent]
        taken: Json
        if not discrete:
            taken = {"action_values": flat(action), "available": np.ones(0, bool)}
        else:
            space = env.action_space(agent)
            allowed = np.ones(space.n, bool) if mask is None else mask
            taken = {"action": index_of(action, agent, space), "available": allowed}
        reward = self.rewards[agent]
        terminated = bool(self.terminated[agent])
        return taken | {"reward": reward, "terminated": terminated, "observation": observation}


def index_of(action: object, agent: str, space: Discrete) -> int:
    """A value of a space, or an array that holds one alone, counted from 0.

    Raises:
        ValueError: it is no value of the space. The environment may take it, but the log would not
            hold it: -1 is an action that was not recorded.
    """
    value = np.asarray(action)
    if value.size != 1 or value.item() not in range(space.start, space.start + space.n):
        raise ValueError(f"act: expected an action of {agent} in {space}, got {action!r}")
    return int(value.item() - space.start)


def _play(env: "ParallelEnv", act: Act, seed: int) -> Iterator[Moment]:
    """Play one episode."""
    observations, infos = env.reset(seed=seed)
    step = 0
    while env.agents:
        actions = act(observations, infos)
        views = {a: split_observation(observations[a], infos.get(a, {})) for a in env.agents}
        taken = {agent: actions[agent] for agent in env.agents}
        observations, rewards, terminated, truncated, infos = env.step(taken)
        yield Moment(
            step=step,
            views=views,
            actions=taken,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            over=not env.agents,
        )
        step += 1


def _agent_columns(agents: Rows) -> dict[str, np.ndarray]:
    """The table of agents: observations end to end, and masks only if an action is forbidden."""
    observations = [row.pop("observation") for row in agents]
    masks = [row.pop("available") for row in agents]
    columns = _columns(agents)
    columns["observation"] = np.concatenate(observations)
    columns["observation_offsets"] = np.cumsum([0, *map(len, observations)])
    if "action" in columns and not all(mask.all() for mask in masks):
        width = max(map(len, masks))
        padded = [np.pad(mask, (0, width - len(mask))) for mask in masks]
        columns["available"] = np.array(padded)
    return columns


def _columns(rows: Rows) -> dict[str, np.ndarray]:
    columns = {}
    for name in rows[0]:
        columns[name] = np.array([row[name] for row in rows])
    return columns
