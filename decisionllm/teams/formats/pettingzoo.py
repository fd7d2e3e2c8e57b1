"""Logs of PettingZoo environments, and the actions and observations of their agents."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import ArrayLike

from decisionllm.checks import at_least, one_of
from decisionllm.datasets.env_results import (
    ERRORS,
    explain_call,
    in_short,
    read_flag,
    read_reward,
)
from decisionllm.datasets.spaces import AnySpace, flatten_one, observation_parts, text_parts
from decisionllm.files import explained
from decisionllm.schema import Json
from decisionllm.teams.formats.team_log import TABLES, Log

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

Act = Callable[[Json, Json], Json]
Rows = list[Json]
MASK = "action_mask"  # key of the allowed actions, in an observation that is a dict or in an info
NUMBERS = "observation"  # key of the numbers beside the mask
# Seeds of the worlds of an evaluation begin here, so that no log has them
EVALUATION_SEEDS = 2_000_000_000
RESET = "reset(seed=None, options=None) to return (observations, infos), dicts by agent"
STEP = (
    "step(actions) to return (observations, rewards, terminations, truncations, infos), dicts by "
    "agent with a value for each agent that acted"
)


def as_parallel(env: "ParallelEnv | AECEnv") -> "ParallelEnv":
    """The environment itself if its agents act at once; an AEC environment is converted.

    Raises:
        ValueError: its agents must act one after the other.
    """
    if not hasattr(env, "agent_iter"):
        return env
    from pettingzoo.utils.conversions import aec_to_parallel

    expected = "expected a parallel environment, or an AEC environment that may be played as one"
    reason = "its metadata do not say is_parallelizable=True"
    with explained(f"env {env}: {expected}, {reason}", AssertionError):
        return aec_to_parallel(env)


def agent_types(env: "ParallelEnv") -> dict[str, str]:
    """The type of each possible agent: its name without its number, `wolf` for `wolf_0`."""
    with explained(f"env {env}", AttributeError, remedy="give the environment possible_agents"):
        names = env.possible_agents
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"env {env}: expected names of agents as text, got {name!r}")
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


def check_alike(env: "ParallelEnv", limits: Mapping[str, Json]) -> None:
    """Raise a ValueError unless all types have discrete actions, or all continuous ones within the
    same bounds, which a log is read with.

    limits: see `action_limits`.
    """
    first, *others = limits
    if all("num_actions" in limit for limit in limits.values()):
        return
    for kind in others:
        if limits[kind] != limits[first]:
            expected = f"discrete actions of all types, or all {first}'s bounds {limits[first]}"
            raise ValueError(f"env {env}, type {kind}: expected {expected}, got {limits[kind]}")


def flat(numbers: ArrayLike) -> np.ndarray:
    """(n,) float32, a copy: an environment may write its next observation into the same array."""
    return np.array(numbers, np.float32).reshape(-1)


def observation_spaces(env: "ParallelEnv") -> dict[str, AnySpace | None]:
    """The space of the numbers that each possible agent observes, without its action mask; None
    where the environment declares none.

    Raises:
        ValueError: a space that has no layout, see `spaces.observation_parts`.
    """
    spaces: dict[str, AnySpace | None] = dict.fromkeys(env.possible_agents)
    if not hasattr(env, "observation_space"):
        return spaces
    for agent in spaces:
        with explained(f"env {env}, {agent}", ValueError):
            space = env.observation_space(agent)
            if isinstance(space, Dict):
                rest = without_mask(space.spaces)
                space = Dict(rest) if isinstance(rest, dict) else rest
            observation_parts(space)  # refuses other spaces
            texts = text_parts(space)
            if texts:
                raise ValueError(
                    f"expected observations without texts, since the task of a team is in the meta of "
                    f"its log, got {', '.join(texts)}; leave them out by a wrapper"
                )
        spaces[agent] = space
    return spaces


def without_mask(parts: Mapping[str, Any]) -> Any:
    """The parts of an observation, or of its space, without the action mask; `observation` alone
    where nothing else is left."""
    rest = {key: part for key, part in parts.items() if key != MASK}
    return rest[NUMBERS] if list(rest) == [NUMBERS] else rest


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
        observation = without_mask(observation)
    if mask is not None:
        mask = np.asarray(mask) != 0
    if isinstance(observation, Mapping) and not isinstance(space, Dict):
        observation = numbers_of(observation)
    if space is None or (isinstance(space, Box) and str(np.size(observation)) in lengths):
        numbers = flat(observation)
    else:
        numbers = flatten_one(observation, space)
    if not np.isfinite(numbers).all():
        raise ValueError(f"expected finite observations, got {numbers.tolist()}")
    return numbers, mask


class Views:
    """What the agents of an environment observe, as rows of numbers and masks.

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
        """Whether an agent observes numbers alone, or an environment does not say what."""
        return self.spaces[agent] is None or isinstance(self.spaces[agent], Box)

    def layouts(self) -> dict[str, list[list[str | int]]]:
        """`spaces.observation_parts` of each agent whose environment declares its space."""
        layouts: dict[str, list[list[str | int]]] = {}
        for agent, space in self.spaces.items():
            if space is not None:
                layouts[agent] = [[name, size] for name, size in observation_parts(space)]
        return layouts

    def split(
        self, agent: str, observations: Json, infos: Json
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """`split_observation` of an agent, whose mask has an entry for each discrete action."""
        with explained(f"env {self.name}, {agent}", *ERRORS):
            info = infos.get(agent) or {}
            lengths = self.types.get(agent, {}).get("observations") or ()
            space = self.spaces[agent]
            numbers, mask = split_observation(observations[agent], info, space, lengths)
            n = self.num_actions[agent]
            if n and mask is not None and mask.shape != (n,):
                raise ValueError(f"expected an {MASK} of shape ({n},), got {mask.shape}")
        return numbers, mask


def numbers_of(parts: Mapping[str, Any]) -> Any:
    """The part of an observation without declared parts that holds the numbers: `observation`."""
    if NUMBERS not in parts:
        wanted = "numbers, or a dict of observation and action_mask"
        got = f"a dict of {', '.join(map(str, parts)) or 'nothing'}"
        raise ValueError(
            f"expected an observation to be {wanted}, got {got}; declare a Dict observation_space"
        )
    return parts[NUMBERS]


def reset_env(env: "ParallelEnv", seed: int) -> tuple[Json, Json]:
    """The observations and infos of all agents at the start.

    Raises:
        ValueError: the environment does not take the seed, or returns something else.
    """
    with explain_call(env, f"reset(seed={seed})", RESET):
        result = env.reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"expected two values, got {in_short(result)}")
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
        paid, died, cut = {}, {}, {}
        for agent in actions:
            with explained(agent, *ERRORS):
                paid[agent] = read_reward(rewards[agent])
                died[agent] = read_flag("termination", terminated[agent])
                cut[agent] = read_flag("truncation", truncated[agent])
    return observations, paid, died, cut, infos


def check_agents(what: str, values: object, agents: Iterable[str]) -> None:
    """Raise a ValueError if an environment returned no value for an agent.

    what: the value, in words.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"expected {what} by agent, got {type(values).__name__}")
    for agent in agents:
        if agent not in values:
            got = f"those of {', '.join(map(str, values)) or 'none'}"
            raise ValueError(f"expected {what} of {agent}, got {got}")


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
        meta: see `team_log`; task, name, ...

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
        one_of("teams", kind, limits)
    check_alike(env, limits)
    discrete = all("num_actions" in limit for limit in limits.values())
    types: Mapping[str, Json] = meta.get("types", {})  # type: ignore[assignment]
    views = Views(env, {agent: types.get(kind, {}) for agent, kind in agent_types(env).items()})
    fixed = _fixed_columns(env, list(limits), teams)
    acts = _behaviours(act)
    at_least("episodes", episodes, 1)
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

    columns = _agent_columns(agents)
    described = dict(types or limits)
    for agent, layout in views.layouts().items():
        kind = agent_types(env)[agent]
        if kind in described and not described[kind].get("observations"):
            described[kind] = {"observation_parts": layout} | described[kind]
    found = {
        "name": str(env),
        "teams": dict(teams),
        "horizon": max(row["step"] for row in steps) + 1,
        "seed": seed,
        "generator": "collect",
    }
    if isinstance(act, Mapping):
        columns["behaviour"] = columns["group"] % len(acts)
        found["behaviours"] = list(act)
    return Log(found | meta | {"types": described}, _columns(steps), columns)


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


def _play(env: "ParallelEnv", act: Act, seed: int, views: "Views") -> Iterator[Moment]:
    """Play one episode."""
    observations, infos = reset_env(env, seed)
    step = 0
    while env.agents:
        present = list(env.agents)
        seen = {agent: views.split(agent, observations, infos) for agent in present}
        actions = act(observations, infos)
        for agent in present:
            if agent not in actions:
                got = f"those of {', '.join(map(str, actions)) or 'none'}"
                raise ValueError(f"act: expected an action of {agent}, got {got}")
        taken = {agent: actions[agent] for agent in present}
        observations, rewards, terminated, truncated, infos = step_env(env, taken)
        yield Moment(
            step=step,
            views=seen,
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
