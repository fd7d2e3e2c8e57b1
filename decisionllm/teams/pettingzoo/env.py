"""Any PettingZoo parallel environment as a TeamEnv: a policy plays one team, partners the
others."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.schema import Json
from decisionllm.teams.dataset import load_meta
from decisionllm.teams.entity_layout import (
    build_entity_schema,
    fill_in_blocks,
    rows_to_entity_layout,
)
from decisionllm.teams.pettingzoo.calls import EVALUATION_SEEDS, reset_env, step_env
from decisionllm.teams.pettingzoo.log_checks import check_layout, match_log_types
from decisionllm.teams.pettingzoo.partners import SCRIPTED_PARTNERS, is_run
from decisionllm.teams.pettingzoo.rival import Rival
from decisionllm.teams.pettingzoo.scripted import (
    choose_scripted_action,
    load_function,
    make_copies,
    to_space,
)
from decisionllm.teams.pettingzoo.spaces import AgentViews, action_limits, agent_types
from decisionllm.teams.team_env import TeamEnv, make_start_seeds
from decisionllm.trust import trust_modules

Actions = dict[tuple[int, str], object]  # by copy and agent, as the environment takes them


class Result(NamedTuple):
    """Results of one step in one copy, by agent."""

    present: list[str]  # agents that took the step
    rewards: Mapping[str, float]
    terminated: Mapping[str, bool]
    truncated: Mapping[str, bool]


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
        wordings, frames: see `TeamEnv`.
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
            logged = load_meta(path, meta)
        types = logged["types"]
        self.types_of = match_log_types(id, kinds, limits, types)
        self.num_actions: int = max(each.get("num_actions", 0) for each in types.values())
        self.spaces = {agent: env.action_space(agent) for agent in kinds}
        self.horizon = int(horizon or logged.get("horizon", 0))
        self.returns = str(returns or logged.get("returns") or "team")
        check_one_of("env.returns", self.returns, ("team", "own", "mean"))

        # -- teams, and who plays them --
        for kind in teams:
            check_one_of("env.teams", kind, limits)
        teams_by_type = {**logged.get("teams", {}), **teams}
        self.team_of = {agent: int(teams_by_type.get(kind, 0)) for agent, kind in kinds.items()}
        self.team = team
        self.teams = sorted({team, *self.team_of.values()})
        self.own_team = self.teams.index(team)  # a place in `teams`
        self._set_score(reference, winner)
        options = {"id": id, "arguments": arguments, "horizon": self.horizon}
        self._set_partners(partners, kinds, options)

        # -- observations of the team that the policy plays --
        self.reader = views = AgentViews(env, {})
        sizes = {}
        for agent in sorted(kinds):
            if self.team_of[agent] == team:
                agent_type = self.types_of[agent]
                if not types[agent_type].get("observations"):
                    sizes[agent_type] = views.size(agent)
        self.meta = logged | {"horizon": self.horizon, "types": fill_in_blocks(types, sizes)}
        if path:
            for agent in sorted(self.played):
                check_layout(id, agent, views, types[self.types_of[agent]])
        described = self.meta["types"]
        views.types = {agent: described[kind] for agent, kind in self.types_of.items()}
        self.entity_schema = build_entity_schema(self.meta, capacity)
        self.reset(0)

    def _set_score(self, reference: Sequence[float], winner: Sequence[float]) -> None:
        """Set how episodes are scored: worlds won, or team returns, normalised if there is a
        reference.
        """
        bounds = [*reference]
        if not self.horizon or len(bounds) not in (0, 2) or len(set(bounds)) == 1:
            raise ValueError(
                "env: expected horizon (without path) and reference=[low,high], got "
                f"{self.horizon} and {bounds}"
            )
        if len(winner) not in (0, 2) or (winner and bounds):
            raise ValueError(
                f"env: expected winner=[team,return] without reference, got {[*winner]} and "
                f"{bounds}"
            )
        if winner and winner[0] not in self.teams:
            raise ValueError(f"env.winner: expected a team of {self.teams}, got {winner[0]}")
        self.winner = winner
        self.bounds = np.array(bounds or [0.0, 100.0], float)
        self.averages = ["agents", "steps"]
        if winner:
            self.unit = "episodes won, %"
            self.averages += ["won", *(f"return_{each}" for each in self.teams)]
        elif not bounds:
            self.unit = "team return"

    def _set_partners(
        self,
        policy_by_key: Mapping[str, str],
        kinds: Mapping[str, str],
        options: Mapping[str, object],
    ) -> None:
        """Divide the agents between the policy (`played`), scripted partners and rivals.

        Args:
            policy_by_key: {type or team: policy}.
            kinds: {agent: type}.
            options: for the environment of a rival.
        """
        teams = {*self.team_of.values()}
        unknown_keys = sorted(policy_by_key.keys() - {*kinds.values(), *map(str, teams)})
        if unknown_keys:
            raise ValueError(
                "env.partners: expected types or teams, of "
                f"{', '.join(dict.fromkeys(kinds.values()))}, {sorted(teams)}, got {unknown_keys}"
            )
        self.played: set[str] = set()
        self.partners: dict[str, list[str]] = {}  # policy -> agents
        for agent, kind in kinds.items():
            if self.team_of[agent] == self.team and kind not in policy_by_key:
                self.played.add(agent)
                continue
            policy = policy_by_key.get(kind, policy_by_key.get(str(self.team_of[agent]), "random"))
            self.partners.setdefault(policy, []).append(agent)
        runs = [policy for policy in self.partners if is_run(policy)]
        with trust_modules([self.name]):  # the environment of the rivals too
            self.rivals = [Rival(run, self.partners.pop(run), options) for run in runs]
        names = self.partners.keys() - set(SCRIPTED_PARTNERS)
        self.functions = {name: load_function("env.partners", name) for name in names}

    def reset(self, seed: int) -> np.ndarray:
        self.rngs = [np.random.default_rng((seed, w)) for w in range(len(self.envs))]
        # Observations and infos by agent, of each copy
        seeds = EVALUATION_SEEDS + make_start_seeds(seed, len(self.envs))
        self.views = [reset_env(env, int(s)) for s, env in zip(seeds, self.envs, strict=True)]
        for rival in self.rivals:
            rival.begin(self)
        return self.begin()

    def begin(self) -> np.ndarray:
        """Start in `envs`, whose observations are in `views`; return observations (rows, S)."""
        # -- the agents at the start --
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
            raise ValueError(
                f"env.team={self.team}: expected an agent to play in every copy, got none in "
                f"copy {empty[0]}"
            )

        # -- the task of each row --
        self.sizes = self.counts[:, self.own_team]
        names = [self.types_of[agent] for _, agent in self.rows]
        types = list(self.meta["types"])
        self.kinds = np.array([types.index(name) for name in names])
        self.tasks = self.write_texts(self.meta, self.sizes[self.groups].tolist(), names)

        # -- results so far --
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
                self._read_view(row, agent, observations, infos)
        lengths = np.array([len(raw) for raw in self.raw])
        starts = np.cumsum(lengths) - lengths
        raw = np.concatenate(self.raw)
        types = self.meta["types"]
        return rows_to_entity_layout(self.kinds, raw, starts, lengths, types, self.entity_schema)

    def _read_view(self, row: int, agent: str, observations: Json, infos: Json) -> None:
        """Store the observation and the action mask of a row."""
        self.raw[row], mask = self.reader.split(agent, observations, infos)
        size = len(self.raw[row])
        agent_type = self.meta["types"][self.types_of[agent]]
        if str(size) not in agent_type["observations"]:
            raise ValueError(
                f"{agent}: expected an observation of {', '.join(agent_type['observations'])} "
                f"numbers, as in the log, got {size}"
            )
        n = agent_type.get("num_actions", 0)
        if n:
            self.masks[row] = np.arange(self.num_actions) < n
            if mask is not None and mask.any():
                self.masks[row, :n] &= mask

    @property
    def action_masks(self) -> np.ndarray | None:
        return self.masks if self.num_actions else None

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        results = self._step_copies(self.to_env_actions(actions))
        # A rollout ends with the last agent of the policy, but the others play on, and the returns
        # of the teams with them.
        while not self.running.any() and self._running_copies():
            self._step_copies({})
        return results

    def _step_copies(
        self, actions: Actions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Advance the copies that are not over; see `receive`. actions: of the policy."""
        for rival in self.rivals:
            actions |= rival.act()
        results = {w: self._advance(w, actions) for w in self._running_copies()}
        for rival in self.rivals:
            rival.receive(results)
        return self.receive(results)

    def _running_copies(self) -> list[int]:
        """List the copies that are not over."""
        return [w for w, env in enumerate(self.envs) if env.agents and self.steps[w] < self.horizon]

    def _advance(self, w: int, decided: Actions) -> Result:
        """Advance one copy by the chosen actions and those of the scripted partners."""
        env = self.envs[w]
        present = list(env.agents)
        actions = self._choose_partner_actions(w)
        for agent in present:
            if (w, agent) in decided:
                actions[agent] = decided[w, agent]
        newcomers = ", ".join(agent for agent in present if agent not in actions)
        if newcomers:
            raise ValueError(
                f"{env}: expected no agent of the team to appear or return after the start, "
                f"got {newcomers}"
            )
        joint_action = {agent: actions[agent] for agent in present}
        observations, rewards, terminated, truncated, infos = step_env(env, joint_action)
        self.views[w] = observations, infos
        return Result(present, rewards, terminated, truncated)

    def to_env_actions(self, actions: np.ndarray) -> Actions:
        """Convert the actions (rows, A) of the rows that run."""
        by_agent: Actions = {}
        for row in np.flatnonzero(self.running).tolist():
            w, agent = self.rows[row]
            by_agent[w, agent] = to_space(self.spaces[agent], actions[row])
        return by_agent

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
            team_rewards[w] = self._mean_team_rewards(w, result)
            timeout = self.steps[w] >= self.horizon
            for row in np.flatnonzero(self.running & (self.groups == w)).tolist():
                agent = self.rows[row][1]
                has_left = agent not in self.envs[w].agents
                rewards[row] = result.rewards[agent]
                terminated[row] = result.terminated[agent]
                truncated[row] = result.truncated[agent] or timeout or has_left
        truncated &= ~terminated
        self.team_returns += team_rewards
        observations = self._observe()
        self.running &= ~(terminated | truncated)
        if self.returns != "own":
            rewards = team_rewards[self.groups, self.own_team]
        return observations, rewards, terminated, truncated

    def _mean_team_rewards(self, w: int, result: Result) -> list[float]:
        """Return the mean reward of the agents that each team began with, from one step of one
        copy.
        """
        means = []
        for t, team in enumerate(self.teams):
            gains = [result.rewards[a] for a in result.present if self.team_of[a] == team]
            means.append(sum(gains) / max(self.counts[w, t], 1))
        return means

    def _choose_partner_actions(self, w: int) -> Json:
        """Return the actions of the scripted partners in a copy."""
        observations, infos = self.views[w]
        actions: Json = {}
        for policy, agents in self.partners.items():
            present = [agent for agent in agents if agent in self.envs[w].agents]
            if policy not in self.functions:
                rng = self.rngs[w] if policy == "random" else None
                for agent in present:
                    _, mask = self.reader.split(agent, observations, infos)
                    space = self.spaces[agent]
                    actions[agent] = to_space(space, choose_scripted_action(space, mask, rng))
            elif present:
                partner_observations = {agent: observations[agent] for agent in present}
                partner_infos = {agent: infos.get(agent, {}) for agent in present}
                actions |= self.functions[policy](partner_observations, partner_infos)
        return actions

    def world_outcomes(self) -> dict[str, np.ndarray]:
        outcomes = {
            "team_return": self.team_returns[:, self.own_team],
            "reference": np.tile(self.bounds, (len(self.envs), 1)),
            "agents": self.sizes,
            "steps": self.steps,
        }
        if self.winner:
            winner, least = self.winner
            for t, team in enumerate(self.teams):
                outcomes[f"return_{team}"] = self.team_returns[:, t]
            reached = outcomes[f"return_{int(winner)}"] > least
            outcomes["won"] = reached if winner == self.team else ~reached
        return outcomes

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        return 100.0 * outcome["won"] if self.winner else super().world_scores(outcome)

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        def act() -> np.ndarray:
            actions = []
            for row in np.flatnonzero(self.running).tolist():
                space = self.spaces[self.rows[row][1]]
                actions.append(choose_scripted_action(space, self.masks[row], rng))
            return np.stack(actions)

        return act
