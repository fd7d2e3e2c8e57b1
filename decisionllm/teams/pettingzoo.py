"""Any PettingZoo parallel environment as a TeamEnv: a policy plays one team, partners the
others."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.checks import one_of
from decisionllm.datasets.spaces import as_dtype, in_words
from decisionllm.policy import loading
from decisionllm.registry import build, register
from decisionllm.runs import directory
from decisionllm.schema import Json
from decisionllm.teams.dataset import meta_of
from decisionllm.teams.formats.pettingzoo import (
    EVALUATION_SEEDS,
    Views,
    action_limits,
    agent_types,
    as_parallel,
    flat,
    reset_env,
    step_env,
)
from decisionllm.teams.formats.team_log import LIMITS
from decisionllm.teams.layout import canonical_rows, entity_schema, with_blocks
from decisionllm.teams.partners import SCRIPTED_PARTNERS, is_run
from decisionllm.teams.team_env import TeamEnv, start_seeds
from decisionllm.trust import trusting

if TYPE_CHECKING:
    from gymnasium.spaces import Box, Discrete
    from pettingzoo import ParallelEnv

Actions = dict[tuple[int, str], object]  # by copy and agent, as the environment takes them


class Result(NamedTuple):
    """Results of one step in one copy, by agent."""

    present: list[str]  # agents that took the step
    rewards: Mapping[str, float]
    terminated: Mapping[str, bool]
    truncated: Mapping[str, bool]


@register(
    "env",
    "pettingzoo",
    path="${oc.select:dataset.path,''}",
    meta="${oc.select:dataset.meta,''}",
    team="${oc.select:dataset.team,0}",
    returns="${oc.select:dataset.returns,''}",
    capacity="${oc.select:dataset.capacity,6}",
    text="${text}",
    frames="${text_wordings}",
)
class PettingZooTeams(TeamEnv):
    """num_episodes copies of a parallel environment. Observations, texts and rewards are those of
    `dataset=team` for its log.

    `decisionllm train dataset=team dataset.path=LOG env=pettingzoo env.id=mpe2.simple_tag_v3`
    evaluates a policy in the environment of a log that `collect` recorded. Agents may differ from
    reset to reset and may leave early; none may appear after the start.

    Args:
        id: module with a function `parallel_env`, such as mpe2.simple_tag_v3.
        arguments: of parallel_env.
        path, meta: of the log; its meta says the types, blocks, teams, horizon and sentences.
            Without a path they are derived from the spaces, as `collect` does.
        team: the team that the policy plays.
        teams: {type: team}, over those of the log; types without one are in team 0. An agent
            `wolf_0` is of type `wolf`.
        partners: {type or team: policy} of the agents that the policy does not play, also types of
            its own team: `random` (the default), `noop` (the first allowed action, or zeros), the
            dotted path of a function (observations, infos) -> actions, dicts by agent; or, for a
            whole other team, the folder of a run whose environment, or that of one of its parts,
            has that `team`.
        reference: low and high team returns, such as of random play and of an expert, which score 0
            and 100; none: the score is the mean team return. The team's reward is the mean over the
            agents that it began with.
        winner: [team, return]: a world is won by this team if its return is above that, else by the
            others; the score is the worlds won, in %, and a row has the mean return of each team.
            [0, 0] in simple_tag: won by a touch, the success of its `terminate_on_success`.
        returns, capacity, text: as in the dataset.
        wordings, frames: see TeamEnv.
        horizon: most steps; 0: that of the log.

    Raises:
        ImportError: the module of `id` cannot be imported.
        ValueError: the environment does not fit the log or the options.
    """

    teachers = ("random",)

    def __init__(
        self,
        num_episodes: int,
        *,
        id: str,
        arguments: Mapping[str, object] = {},
        path: str = "",
        meta: str = "",
        team: int = 0,
        teams: Mapping[str, int] = {},
        partners: Mapping[str, str] = {},
        reference: Sequence[float] = [],
        winner: Sequence[float] = [],
        returns: str = "",
        capacity: int = 6,
        horizon: int = 0,
        text: str = "none",
        wordings: str = "trained",
        frames: int = 0,
    ) -> None:
        partners = {str(key): policy for key, policy in partners.items()}
        label = ", ".join(f"{key} {policy}" for key, policy in partners.items())
        super().__init__(num_episodes, [label], text=text, wordings=wordings, frames=frames)

        # -- the environment, and what the log says of it --
        self.name = id
        self.envs = make_copies(id, arguments, num_episodes)
        env = self.envs[0]
        kinds = agent_types(env)
        limits = action_limits(env)
        logged: Json = {"name": str(env), "types": limits}
        if path:
            logged = meta_of(path, meta)
        types = logged["types"]
        self.types_of = types_in_log(id, kinds, limits, types)
        self.num_actions: int = max(each.get("num_actions", 0) for each in types.values())
        self.spaces = {agent: env.action_space(agent) for agent in kinds}
        self.horizon = int(horizon or logged.get("horizon", 0))
        self.returns = str(returns or logged.get("returns") or "team")
        one_of("env.returns", self.returns, ("team", "own", "mean"))

        # -- teams, and who plays them --
        for kind in teams:
            one_of("env.teams", kind, limits)
        teams_by_type = {**logged.get("teams", {}), **teams}
        self.team_of = {agent: int(teams_by_type.get(kind, 0)) for agent, kind in kinds.items()}
        self.team = team
        self.teams = sorted({team, *self.team_of.values()})
        self.own_team = self.teams.index(team)  # a place in `teams`
        self._set_score(reference, winner)
        options = {"id": id, "arguments": arguments, "horizon": self.horizon}
        self._set_partners(partners, kinds, options)

        # -- observations of the team that the policy plays --
        self.reader = views = Views(env, {})
        sizes = {}
        for agent in sorted(kinds):
            if self.team_of[agent] == team:
                agent_type = self.types_of[agent]
                if not types[agent_type].get("observations"):
                    sizes[agent_type] = views.size(agent)
        self.meta = logged | {"horizon": self.horizon, "types": with_blocks(types, sizes)}
        if path:
            for agent in sorted(self.played):
                check_layout(id, agent, views, types[self.types_of[agent]])
        described = self.meta["types"]
        views.types = {agent: described[kind] for agent, kind in self.types_of.items()}
        self.entity_schema = entity_schema(self.meta, capacity)
        self.reset(0)

    def _set_score(self, reference: Sequence[float], winner: Sequence[float]) -> None:
        """How episodes are scored: worlds won, or team returns, normalised if there is a
        reference."""
        given = [*reference]
        if not self.horizon or len(given) not in (0, 2) or len(set(given)) == 1:
            wanted = "horizon (without path) and reference=[low,high]"
            raise ValueError(f"env: expected {wanted}, got {self.horizon} and {given}")
        if len(winner) not in (0, 2) or (winner and given):
            wanted = "winner=[team,return] without reference"
            raise ValueError(f"env: expected {wanted}, got {[*winner]} and {given}")
        if winner and winner[0] not in self.teams:
            wanted = f"a team of {self.teams}"
            raise ValueError(f"env.winner: expected {wanted}, got {winner[0]}")
        self.winner = winner
        self.bounds = np.array(given or [0.0, 100.0], float)
        self.averages = ["agents", "steps"]
        if winner:
            self.unit = "episodes won, %"
            self.averages += ["won", *(f"return_{each}" for each in self.teams)]
        elif not given:
            self.unit = "team return"

    def _set_partners(
        self,
        chosen: Mapping[str, str],
        kinds: Mapping[str, str],
        options: Mapping[str, object],
    ) -> None:
        """Divide the agents between the policy (`played`), scripted partners and rivals.

        Args:
            chosen: {type or team: policy}.
            kinds: {agent: type}.
            options: for the environment of a rival.
        """
        teams = {*self.team_of.values()}
        unknown = sorted(chosen.keys() - {*kinds.values(), *map(str, teams)})
        if unknown:
            known = f"{', '.join(dict.fromkeys(kinds.values()))}, {sorted(teams)}"
            raise ValueError(f"env.partners: expected types or teams, of {known}, got {unknown}")
        self.played: set[str] = set()
        self.partners: dict[str, list[str]] = {}  # policy -> agents
        for agent, kind in kinds.items():
            if self.team_of[agent] == self.team and kind not in chosen:
                self.played.add(agent)
                continue
            policy = chosen.get(kind, chosen.get(str(self.team_of[agent]), "random"))
            self.partners.setdefault(policy, []).append(agent)
        runs = [policy for policy in self.partners if is_run(policy)]
        with trusting([self.name]):  # the environment of the rivals too
            self.rivals = [Rival(run, self.partners.pop(run), options) for run in runs]
        names = self.partners.keys() - set(SCRIPTED_PARTNERS)
        self.functions = {name: resolve("env.partners", name) for name in names}

    def reset(self, seed: int) -> np.ndarray:
        self.rngs = [np.random.default_rng((seed, w)) for w in range(len(self.envs))]
        # Observations and infos by agent, of each copy
        seeds = EVALUATION_SEEDS + start_seeds(seed, len(self.envs))
        self.views = [reset_env(env, int(s)) for s, env in zip(seeds, self.envs, strict=True)]
        for rival in self.rivals:
            rival.begin(self)
        return self.begin()

    def begin(self) -> np.ndarray:
        """(rows, S) observations at the start of `envs`, of which `views` are known."""
        # -- who is there --
        E = len(self.envs)
        self.rows: list[tuple[int, str]] = []  # copy and agent
        self.counts = np.zeros((E, len(self.teams)), int)  # agents of each team
        for w, env in enumerate(self.envs):
            for agent in env.agents:
                self.counts[w, self.teams.index(self.team_of[agent])] += 1
                if agent in self.played:
                    self.rows.append((w, agent))
        self.groups = np.array([w for w, _ in self.rows], int)
        empty = np.flatnonzero(np.bincount(self.groups, minlength=E) == 0)
        if len(empty):
            wanted = "expected an agent to play in every copy"
            raise ValueError(f"env.team={self.team}: {wanted}, got none in copy {empty[0]}")

        # -- the task of each row --
        self.sizes = self.counts[:, self.own_team]
        names = [self.types_of[agent] for _, agent in self.rows]
        types = list(self.meta["types"])
        self.kinds = np.array([types.index(name) for name in names])
        self.tasks = self.texts(self.meta, self.sizes[self.groups].tolist(), names)

        # -- nothing has happened yet --
        self.running = np.ones(len(self.rows), bool)
        self.team_returns = np.zeros((E, len(self.teams)))
        self.steps = np.zeros(E, int)
        self.raw = [np.zeros(0, np.float32)] * len(self.rows)
        self.masks = np.ones((len(self.rows), self.num_actions), bool)
        return self._observe()

    def _observe(self) -> np.ndarray:
        """(rows, S) float32. An agent that has left keeps its last observation."""
        for row in np.flatnonzero(self.running).tolist():
            w, agent = self.rows[row]
            observations, infos = self.views[w]
            if agent in observations:
                self._read(row, agent, observations, infos)
        lengths = np.array([len(raw) for raw in self.raw])
        starts = np.cumsum(lengths) - lengths
        raw = np.concatenate(self.raw)
        types = self.meta["types"]
        return canonical_rows(self.kinds, raw, starts, lengths, types, self.entity_schema)

    def _read(self, row: int, agent: str, observations: Json, infos: Json) -> None:
        """Keep the observation and the action mask of a row."""
        self.raw[row], mask = self.reader.split(agent, observations, infos)
        size = len(self.raw[row])
        each = self.meta["types"][self.types_of[agent]]
        if str(size) not in each["observations"]:
            known = f"{', '.join(each['observations'])} numbers, as in the log"
            raise ValueError(f"{agent}: expected an observation of {known}, got {size}")
        n = each.get("num_actions", 0)
        if n:
            self.masks[row] = np.arange(self.num_actions) < n
            if mask is not None and mask.any():
                self.masks[row, :n] &= mask

    @property
    def action_masks(self) -> np.ndarray | None:
        return self.masks if self.num_actions else None

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        results = self._step_copies(self.chosen(actions))
        # A rollout ends with the last agent of the policy, but the others play on, and the returns
        # of the teams with them.
        while not self.running.any() and self._going():
            self._step_copies({})
        return results

    def _step_copies(
        self, chosen: Actions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Advance the copies that are not over; see `receive`. chosen: by the policy."""
        for rival in self.rivals:
            chosen |= rival.act()
        results = {w: self._advance(w, chosen) for w in self._going()}
        for rival in self.rivals:
            rival.receive(results)
        return self.receive(results)

    def _going(self) -> list[int]:
        """The copies that are not over."""
        return [w for w, env in enumerate(self.envs) if env.agents and self.steps[w] < self.horizon]

    def _advance(self, w: int, chosen: Actions) -> Result:
        """Advance one copy by the chosen actions and those of the scripted partners."""
        env = self.envs[w]
        present = list(env.agents)
        actions = self._partner_actions(w)
        for agent in present:
            if (w, agent) in chosen:
                actions[agent] = chosen[w, agent]
        late = ", ".join(agent for agent in present if agent not in actions)
        if late:
            wanted = "expected no agent of the team to appear or return after the start"
            raise ValueError(f"{env}: {wanted}, got {late}")
        taken = {agent: actions[agent] for agent in present}
        observations, rewards, terminated, truncated, infos = step_env(env, taken)
        self.views[w] = observations, infos
        return Result(present, rewards, terminated, truncated)

    def chosen(self, actions: np.ndarray) -> Actions:
        """The actions (rows, A) of the rows that run."""
        found: Actions = {}
        for row in np.flatnonzero(self.running).tolist():
            w, agent = self.rows[row]
            found[w, agent] = to_space(self.spaces[agent], actions[row])
        return found

    def receive(
        self,
        results: Mapping[int, Result],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Observations, rewards, terminated and truncated of each row, from the result of each
        copy."""
        N = len(self.rows)
        rewards = np.zeros(N)
        terminated = np.zeros(N, bool)
        truncated = np.zeros(N, bool)
        team_rewards = np.zeros_like(self.team_returns)  # (E, teams)
        for w, result in results.items():
            self.steps[w] += 1
            team_rewards[w] = self._team_rewards(w, result)
            timeout = self.steps[w] >= self.horizon
            for row in np.flatnonzero(self.running & (self.groups == w)).tolist():
                agent = self.rows[row][1]
                left = agent not in self.envs[w].agents
                rewards[row] = result.rewards[agent]
                terminated[row] = result.terminated[agent]
                truncated[row] = result.truncated[agent] or timeout or left
        truncated &= ~terminated
        self.team_returns += team_rewards
        after = self._observe()
        self.running &= ~(terminated | truncated)
        if self.returns != "own":
            rewards = team_rewards[self.groups, self.own_team]
        return after, rewards, terminated, truncated

    def _team_rewards(self, w: int, result: Result) -> list[float]:
        """The mean reward of the agents that each team began with, from one step of one copy."""
        found = []
        for t, team in enumerate(self.teams):
            gains = [result.rewards[a] for a in result.present if self.team_of[a] == team]
            found.append(sum(gains) / max(self.counts[w, t], 1))
        return found

    def _partner_actions(self, w: int) -> Json:
        """The actions of the scripted partners in a copy."""
        observations, infos = self.views[w]
        actions: Json = {}
        for policy, agents in self.partners.items():
            present = [agent for agent in agents if agent in self.envs[w].agents]
            if policy not in self.functions:
                rng = self.rngs[w] if policy == "random" else None
                for agent in present:
                    _, mask = self.reader.split(agent, observations, infos)
                    space = self.spaces[agent]
                    actions[agent] = to_space(space, scripted(space, mask, rng))
            elif present:
                seen = {agent: observations[agent] for agent in present}
                beside = {agent: infos.get(agent, {}) for agent in present}
                actions |= self.functions[policy](seen, beside)
        return actions

    def world_outcomes(self) -> dict[str, np.ndarray]:
        found = {
            "team_return": self.team_returns[:, self.own_team],
            "reference": np.tile(self.bounds, (len(self.envs), 1)),
            "agents": self.sizes,
            "steps": self.steps,
        }
        if self.winner:
            winner, least = self.winner
            for t, team in enumerate(self.teams):
                found[f"return_{team}"] = self.team_returns[:, t]
            reached = found[f"return_{int(winner)}"] > least
            found["won"] = reached if winner == self.team else ~reached
        return found

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        return 100.0 * outcome["won"] if self.winner else super().world_scores(outcome)

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        def act() -> np.ndarray:
            actions = []
            for row in np.flatnonzero(self.running).tolist():
                space = self.spaces[self.rows[row][1]]
                actions.append(scripted(space, self.masks[row], rng))
            return np.stack(actions)

        return act


class Rival:
    """A run that plays all of another team in the copies of a PettingZooTeams.

    Its observations are those of the run's own environment, or of the environment of one of its
    parts.

    Args:
        run: its folder.
        agents: that it shall play.
        options: of that environment in place of its own.

    Raises:
        ValueError: the run plays other agents, or was trained for other roles or actions.
    """

    def __init__(self, run: str, agents: Sequence[str], options: Mapping[str, object]) -> None:
        parts = [*directory.read(run)[1].get("parts", {})]
        played = []
        for self.policy in loading.load_parts(run, parts):
            config = self.policy.config
            if config["env"]["_target_"] != f"{__name__}.{PettingZooTeams.__name__}":
                continue
            self.env: PettingZooTeams = build(config["env"] | options | {"partners": {}}, 1)
            if self.env.played == {*agents}:
                return
            played.append(", ".join(sorted(self.env.played)))
        found = f"a run that plays {' or '.join(played) or 'elsewhere'}"
        raise ValueError(f"env.partners: expected {run} to play {', '.join(agents)}, got {found}")

    def begin(self, host: PettingZooTeams) -> None:
        """Start in the copies of `host`."""
        self.env.envs = host.envs
        self.env.views = host.views
        self.observations = self.env.begin()
        self.rewards: np.ndarray | None = None
        env = self.env
        self.player = self.policy.begin(env.tasks, horizon=env.horizon, groups=env.groups)

    def act(self) -> Actions:
        """Actions of the agents that are still there."""
        running = np.flatnonzero(self.env.running)
        if not len(running):
            return {}
        masks = self.env.action_masks
        if masks is not None:
            masks = masks[running]
        decided = self.player.act(self.observations[running], self.rewards, masks)
        actions = np.zeros((len(self.env.rows), decided.shape[1]))
        actions[running] = decided
        return self.env.chosen(actions)

    def receive(self, results: Mapping[int, Result]) -> None:
        """See `PettingZooTeams.receive`."""
        before = self.env.running.copy()
        self.observations, gains, _, _ = self.env.receive(results)
        going = self.env.running[before]
        if going.any() and not going.all():
            self.player.select(going)
        self.rewards = gains[self.env.running]


def resolve(option: str, path: str) -> Callable[..., Any]:
    """The function of a dotted path."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = vars(import_module(module))[name]
        return found
    except ImportError as error:
        needs = "install its package, for mpe2: pip install 'decisionllm[marl]'"
        raise ImportError(f"{option}: cannot import {module} ({error}); {needs}") from error
    except (KeyError, ValueError) as error:
        lacks = f"{module or 'no module'} has no {name}"
        raise ValueError(f"{option}: expected the path of a function, but {lacks}") from error


def make_copies(id: str, arguments: Mapping[str, object], count: int) -> list["ParallelEnv"]:
    """`count` PettingZoo environments, of the function `parallel_env` of a module, or of `env`
    where it has AEC environments alone."""
    try:
        create = resolve("env.id", f"{id}.parallel_env")
    except ValueError:
        if not id or "env" not in vars(import_module(id)):
            raise
        create = resolve("env.id", f"{id}.env")
    try:
        return [as_parallel(create(**arguments)) for _ in range(count)]
    except (TypeError, AssertionError) as error:
        raise ValueError(f"env.arguments={arguments}: {error}") from error


def types_in_log(
    id: str,
    kinds: Mapping[str, str],
    limits: Mapping[str, Json],
    types: Mapping[str, Json],
) -> dict[str, str]:
    """The type of each agent in the log: its own, or the only one, which public logs have for all.

    Args:
        id: of the environment.
        kinds: {agent: type} in the environment.
        limits: {type: limits of its actions} in the environment.
        types: of the log's meta.

    Raises:
        ValueError: the log lacks a type, or has it with other limits.
    """
    found = dict(kinds)
    if len(types) == 1:
        found = dict.fromkeys(kinds, str(*types))
    for agent, kind in kinds.items():
        one_of(f"env.id={id}, type in the log", found[agent], types)
        for key in LIMITS:
            ours = limits[kind].get(key)
            logged = types[found[agent]].get(key)
            if not same_numbers(ours, logged):
                wanted = f"expected {key} {logged} as in the log"
                remedy = "choose env.arguments, or correct the limits of the log by dataset.meta"
                raise ValueError(f"env.id={id}, type {kind}: {wanted}, got {ours}; {remedy}")
    return found


def check_layout(id: str, agent: str, views: Views, logged: Json) -> None:
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
            expected = f"observations of {in_words(parts)}, as in the log"
        fix = "record the log again in this environment"
        raise ValueError(f"env.id={id}, {agent}: expected {expected}, got {in_words(own)}; {fix}")


def same_numbers(a: ArrayLike | None, b: ArrayLike | None) -> bool:
    """Whether both are the same numbers in float32, or both None."""
    # None becomes nan
    return np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), equal_nan=True)


def to_space(space: "Box | Discrete", action: np.ndarray) -> int | np.ndarray:
    """A policy's action (A,) as the environment takes it."""
    from gymnasium.spaces import Discrete

    if isinstance(space, Discrete):
        return int(action[0]) + int(space.start)
    clipped = np.clip(action.reshape(space.shape), space.low, space.high)
    return as_dtype(clipped, space.dtype)


def scripted(
    space: "Box | Discrete", mask: np.ndarray | None, rng: np.random.Generator | None
) -> np.ndarray:
    """A uniform random action (A,) that is allowed; without rng the first one, or zeros."""
    from gymnasium.spaces import Discrete

    if isinstance(space, Discrete):
        allowed = np.arange(space.n)
        if mask is not None and mask.any():
            allowed = np.flatnonzero(mask)
        index = allowed[0] if rng is None else rng.choice(allowed)
        return np.array([index])
    chosen = np.zeros(space.shape) if rng is None else rng.uniform(space.low, space.high)
    return flat(chosen)
