"""Any PettingZoo parallel environment as an environment of teams: N copies, the agents of one team as rows, partners for the others."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets.formats.team_log import action_limits, agent_types, flat, split_observation
from decisionllm.datasets.team import Meta, canonical_rows, entity_schema, meta_of, with_blocks
from decisionllm.eval.team_env import TeamEnv
from decisionllm.policy import checkpoint
from decisionllm.registry import build, register

FIRST, STARTS = 2_000_000_000, 1000  # copy n of evaluation `seed` is reset with FIRST + STARTS * seed + n, as no log is
AVERAGES: Sequence[str] = ("agents", "steps")  # columns of a row


@register(
    "env", "pettingzoo", path="${oc.select:dataset.path,''}", meta="${oc.select:dataset.meta,''}", team="${oc.select:dataset.team,0}",
    returns="${oc.select:dataset.returns,''}", capacity="${oc.select:dataset.capacity,6}", text="${text}",
    frames="${text_wordings}",
)  # fmt: skip
class PettingZooTeams(TeamEnv):
    """num_episodes copies of a parallel environment. Observations, texts and rewards are those of `dataset=team` for its log.

    `decisionllm train dataset=team dataset.path=LOG env=pettingzoo env.id=mpe2.simple_tag_v3` evaluates a policy in the environment of
    a log that `collect` recorded. Agents may differ from reset to reset and may leave early; none may appear after the start.

    Args:
        id: module with a function `parallel_env`, such as mpe2.simple_tag_v3.
        arguments: of parallel_env.
        path, meta: of the log; its meta says the types, blocks, teams, horizon and sentences. Without a path they are derived from
            the spaces, as `collect` does.
        team: the team that the policy plays.
        teams: {type: team}, over those of the log; types without one are in team 0. An agent `wolf_0` is of type `wolf`.
        partners: {type or team: policy} of the agents that the policy does not play, also types of its own team: `random` (the
            default), `noop` (the first allowed action, or zeros), the dotted path of a function (observations, infos) -> actions, dicts
            by agent; or, for a whole other team, the folder of a run whose environment, or that of one of its parts, has that `team`.
        reference: low and high team returns, such as of random play and of an expert, which score 0 and 100; none: the score is the
            mean team return. The team's reward is the mean over the agents that it began with.
        winner: [team, return]: a world is won by this team if its return is above that, else by the others; the score is the worlds won, in
            %, and a row has the mean return of each team. [0, 0] in simple_tag: won by a touch, the success of its `terminate_on_success`.
        returns, capacity, text: as in the dataset.
        wordings, frames: see TeamEnv.
        horizon: most steps; 0: that of the log.

    Raises:
        ImportError: the module of `id` cannot be imported.
        ValueError: the environment does not fit the log or the options.
    """

    teachers, averages = ("random",), AVERAGES

    def __init__(
        self, num_episodes: int, *, id: str, arguments: Mapping[str, Any] = {}, path: str = "", meta: str = "", team: int = 0,
        teams: Mapping[str, int] = {}, partners: Mapping[str, str] = {}, reference: Sequence[float] = [],
        winner: Sequence[float] = [], returns: str = "", capacity: int = 6, horizon: int = 0, text: str = "none", wordings: str = "trained", frames: int = 0,
    ) -> None:  # fmt: skip
        chosen = {str(key): policy for key, policy in partners.items()}
        labels = [", ".join(f"{key} {policy}" for key, policy in chosen.items())]
        super().__init__(num_episodes, labels, text=text, wordings=wordings, frames=frames)
        self.team, self.winner, create = team, winner, resolve("env.id", f"{id}.parallel_env")
        try:
            self.envs = [create(**arguments) for _ in range(num_episodes)]
        except TypeError as error:
            raise ValueError(f"env.arguments={arguments}: {error}") from error
        kinds, limits = agent_types(self.envs[0]), action_limits(self.envs[0])
        meta_found: Meta = meta_of(path, meta) if path else {"name": str(self.envs[0]), "types": limits}
        self.horizon = int(horizon or meta_found.get("horizon", 0))
        self.returns = str(returns or meta_found.get("returns") or "team")
        one_of("env.returns", self.returns, ("team", "own", "mean"))
        if not self.horizon or len(reference) not in (0, 2) or len({*reference}) == 1:
            raise ValueError(f"env: expected horizon (without path) and reference=[low,high], got {horizon} and {[*reference]}")
        if len(winner) not in (0, 2) or (winner and reference):
            raise ValueError(f"env: expected winner=[team,return] without reference, got {[*winner]} and {[*reference]}")
        self.unit = "episodes won, %" if winner else "" if reference else "team return"
        self.bounds = np.array([*reference] or [0.0, 100.0], float)
        types = meta_found["types"]
        self.named = kinds if len(types) > 1 else dict.fromkeys(kinds, str(*types))  # a public log has one type for all agents
        for agent, kind in kinds.items():
            one_of(f"env.id={id}, type in the log", self.named[agent], types)
            if (logged := types[self.named[agent]].get("num_actions")) != (n := limits[kind].get("num_actions")):
                raise ValueError(f"env.id={id}, type {kind}: expected num_actions {logged} as in the log, got {n}")
        self.num_actions: int = max(each.get("num_actions", 0) for each in types.values())

        team_of = {agent: int({**meta_found.get("teams", {}), **teams}.get(kind, 0)) for agent, kind in kinds.items()}
        self.team_of, self.teams = team_of, sorted({team, *team_of.values()})
        self.members = {agent for agent in kinds if team_of[agent] == team}
        self.averages = [*AVERAGES, *(["won", *(f"return_{each}" for each in self.teams)] if winner else [])]
        if unknown := sorted(chosen.keys() - {*limits, *map(str, team_of.values())}):
            known = f"{', '.join(limits)}, {sorted({*team_of.values()})}"
            raise ValueError(f"env.partners: expected types or teams, of {known}, got {unknown}")
        self.partners: dict[str, list[str]] = {}  # policy -> agents
        for agent, kind in kinds.items():
            if agent not in self.members or kind in chosen:
                self.partners.setdefault(chosen.get(kind, chosen.get(str(team_of[agent]), "random")), []).append(agent)
        own = {"id": id, "arguments": arguments, "horizon": self.horizon}
        self.rivals = [Rival(run, self.partners.pop(run), own) for run in [*self.partners] if is_run(run)]
        self.functions = {name: resolve("env.partners", name) for name in self.partners.keys() - {"random", "noop"}}
        self.played = {agent for agent in self.members if kinds[agent] not in chosen}  # by the policy
        self.spaces = {agent: self.envs[0].action_space(agent) for agent in kinds}
        sizes = {self.named[agent]: observation_size(self.envs[0].observation_space(agent)) for agent in sorted(self.members)}
        self.meta = meta_found | {"horizon": self.horizon, "types": with_blocks(types, sizes)}
        self.entity_schema = entity_schema(self.meta, capacity)
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        self.rngs = [np.random.default_rng((seed, w)) for w in range(len(self.envs))]
        self.views = [env.reset(seed=FIRST + STARTS * seed + w) for w, env in enumerate(self.envs)]  # observations, infos
        for rival in self.rivals:
            rival.begin(self)
        return self.begin()

    def begin(self) -> np.ndarray:
        """(rows, S) observations at the start of `envs`, of which `views` are known."""
        E = len(self.envs)
        self.rows = [(w, agent) for w, env in enumerate(self.envs) for agent in env.agents if agent in self.played]
        self.groups = np.array([w for w, _ in self.rows], int)
        if empty := sorted({*range(E)} - {*self.groups.tolist()}):
            raise ValueError(f"env.team={self.team}: expected an agent to play in every copy, got none in copy {empty[0]}")
        self.counts = np.array(
            [[sum(self.team_of[agent] == team for agent in env.agents) for team in self.teams] for env in self.envs]
        )
        self.sizes = self.counts[:, self.teams.index(self.team)]
        names = [self.named[agent] for _, agent in self.rows]
        self.kinds = np.array([[*self.meta["types"]].index(name) for name in names])
        self.tasks = self.texts(self.meta, self.sizes[self.groups].tolist(), names)
        self.running = np.ones(len(self.rows), bool)
        self.team_returns, self.steps = np.zeros((E, len(self.teams))), np.zeros(E, int)
        self.raw, self.masks = [np.zeros(0, np.float32)] * len(self.rows), np.ones((len(self.rows), self.num_actions), bool)
        return self._observe()

    def _observe(self) -> np.ndarray:
        """(rows, S) float32. An agent that has left keeps its last observation."""
        for row in np.flatnonzero(self.running):
            w, agent = self.rows[row]
            observations, infos = self.views[w]
            if agent not in observations:
                continue
            self.raw[row], mask = split_observation(observations[agent], infos.get(agent, {}))
            each = self.meta["types"][self.named[agent]]
            if str(len(self.raw[row])) not in each["observations"]:
                known = f"{', '.join(each['observations'])} numbers, as in the log"
                raise ValueError(f"{agent}: expected an observation of {known}, got {len(self.raw[row])}")
            if n := each.get("num_actions", 0):
                self.masks[row] = np.arange(self.num_actions) < n
                self.masks[row, :n] &= mask is None or not mask.any() or mask
        flat, lengths = np.concatenate(self.raw), np.array([len(raw) for raw in self.raw])
        starts = np.cumsum(lengths) - lengths
        return canonical_rows(self.kinds, flat, starts, lengths, self.meta["types"], self.entity_schema)

    @property
    def action_masks(self) -> np.ndarray | None:
        return self.masks if self.num_actions else None

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        chosen = self.chosen(actions)
        for rival in self.rivals:
            chosen |= rival.act()
        results = {}
        for w in np.unique(self.groups[self.running]):
            env, present = self.envs[w], list(self.envs[w].agents)
            own = self._partner_actions(w) | {agent: chosen[w, agent] for agent in present if (w, agent) in chosen}
            if late := ", ".join(agent for agent in present if agent not in own):
                raise ValueError(f"{env}: expected no agent of the team to appear or return after the start, got {late}")
            observations, rewards, over, by_clock, infos = env.step({agent: own[agent] for agent in present})
            self.views[w], results[w] = (observations, infos), (present, rewards, over, by_clock)
        for rival in self.rivals:
            rival.receive(results)
        return self.receive(results)

    def chosen(self, actions: np.ndarray) -> dict[tuple[int, str], Any]:
        """The actions (rows, A) of the rows that run, by copy and agent, as the environment takes them."""
        running = np.flatnonzero(self.running).tolist()
        return {self.rows[row]: to_space(self.spaces[self.rows[row][1]], actions[row]) for row in running}

    def receive(self, results: Mapping[int, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What `step` returns, by {copy: (agents that were present, rewards, terminated, truncated)}."""
        N, E = len(self.rows), len(self.envs)
        own, teams, ended, truncated = np.zeros(N), np.zeros((E, len(self.teams))), np.zeros(N, bool), np.zeros(N, bool)
        for w, (present, rewards, over, by_clock) in results.items():
            for t in range(len(self.teams)):
                gains = [rewards[agent] for agent in present if self.team_of[agent] == self.teams[t]]
                teams[w, t] = sum(gains) / max(self.counts[w, t], 1)
            self.steps[w] += 1
            timeout = self.steps[w] >= self.horizon
            for row in np.flatnonzero(self.running & (self.groups == w)):
                agent = self.rows[row][1]
                own[row], ended[row] = rewards[agent], over[agent]
                truncated[row] = not over[agent] and (by_clock[agent] or timeout or agent not in self.envs[w].agents)
        self.team_returns += teams
        after, team = self._observe(), teams[:, self.teams.index(self.team)]
        self.running &= ~(ended | truncated)
        return after, own if self.returns == "own" else team[self.groups], ended, truncated

    def _partner_actions(self, w: int) -> dict[str, Any]:
        """The actions of the agents of a copy that the policy does not play."""
        (observations, infos), chosen = self.views[w], dict[str, Any]()
        for policy, agents in self.partners.items():
            present = [agent for agent in agents if agent in self.envs[w].agents]
            seen, beside = ({agent: x.get(agent, {}) for agent in present} for x in (observations, infos))
            if policy in self.functions:
                chosen |= self.functions[policy](seen, beside) if present else {}
                continue
            for agent, space in ((agent, self.spaces[agent]) for agent in present):
                mask = split_observation(seen[agent], beside[agent])[1]
                chosen[agent] = to_space(space, scripted(space, mask, self.rngs[w] if policy == "random" else None))
        return chosen

    def world_outcomes(self) -> dict[str, np.ndarray]:
        reference, team = np.tile(self.bounds, (len(self.envs), 1)), self.team_returns[:, self.teams.index(self.team)]
        found = {"team_return": team, "reference": reference, "agents": self.sizes, "steps": self.steps}
        if self.winner:
            winner, least = self.winner
            found |= {f"return_{each}": self.team_returns[:, t] for t, each in enumerate(self.teams)}
            found["won"] = (found[f"return_{int(winner)}"] > least) == (winner == self.team)
        return found

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        return 100.0 * outcome["won"] if self.winner else super().world_scores(outcome)

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        def act() -> np.ndarray:
            running = np.flatnonzero(self.running).tolist()
            return np.stack([scripted(self.spaces[self.rows[row][1]], self.masks[row], rng) for row in running])

        return act


class Rival:
    """A run that plays all of another team, by the environment of the run or of one of its parts, in the copies of a PettingZooTeams.

    Args:
        run: its folder.
        agents: that it shall play.
        options: of that environment in place of its own.

    Raises:
        ValueError: the run plays other agents, or was trained for other roles or actions.
    """

    def __init__(self, run: str, agents: Sequence[str], options: Mapping[str, Any]) -> None:
        parts, played = [*checkpoint.read(run)[1].get("parts", {})], []
        for self.policy, config, _ in checkpoint.load_parts(run, parts):
            if config["env"]["_target_"] == f"{__name__}.{PettingZooTeams.__name__}":
                self.env: PettingZooTeams = build(config["env"] | options | {"partners": {}}, 1)
                if self.env.played == {*agents}:
                    return
                played.append(", ".join(sorted(self.env.played)))
        raise ValueError(
            f"env.partners: expected {run} to play {', '.join(agents)}, got a run that plays {' or '.join(played) or 'elsewhere'}"
        )

    def begin(self, host: PettingZooTeams) -> None:
        """Start in the copies of `host`."""
        self.env.envs, self.env.views = host.envs, host.views
        self.observations = self.env.begin()
        self.rewards: np.ndarray | None = None
        self.player = self.policy.begin(self.env.tasks, horizon=self.env.horizon, groups=self.env.groups)

    def act(self) -> dict[tuple[int, str], Any]:
        """Actions by copy and agent, see `PettingZooTeams.chosen`."""
        running, masks = np.flatnonzero(self.env.running), self.env.action_masks
        if not len(running):
            return {}
        decided = self.player.act(self.observations[running], self.rewards, None if masks is None else masks[running])
        actions = np.zeros((len(self.env.rows), decided.shape[1]))
        actions[running] = decided
        return self.env.chosen(actions)

    def receive(self, results: Mapping[int, Any]) -> None:
        """See `PettingZooTeams.receive`."""
        before = self.env.running.copy()
        self.observations, gains, _, _ = self.env.receive(results)
        going = self.env.running[before]
        if going.any() and not going.all():
            self.player.select(going)
        self.rewards = gains[self.env.running]


def is_run(policy: str) -> bool:
    """Whether the policy of a partner is the folder of a run, not a dotted path."""
    return "/" in policy or Path(policy, "run.json").is_file()


def resolve(option: str, path: str) -> Any:
    """The function of a dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return vars(import_module(module))[name]
    except ImportError as error:
        needs = "install its package, for mpe2: pip install 'decisionllm[marl]'"
        raise ImportError(f"{option}: cannot import {module} ({error}); {needs}") from error
    except (KeyError, ValueError) as error:
        raise ValueError(f"{option}: expected the path of a function, but {module or 'no module'} has no {name}") from error


def observation_size(space: Any) -> int:
    """Numbers of an observation, which in a dict space is `observation`."""
    from gymnasium.spaces import Dict

    part: Any = space["observation"] if isinstance(space, Dict) else space
    return int(np.prod(part.shape))


def to_space(space: Any, action: np.ndarray) -> Any:
    """A policy's action (A,) as the environment takes it."""
    from gymnasium.spaces import Discrete

    if isinstance(space, Discrete):
        return int(action[0]) + int(space.start)
    return np.clip(action.reshape(space.shape), space.low, space.high).astype(space.dtype)


def scripted(space: Any, mask: np.ndarray | None, rng: np.random.Generator | None) -> np.ndarray:
    """A uniform random action (A,) that is allowed; without rng the first one, or zeros."""
    from gymnasium.spaces import Discrete

    if isinstance(space, Discrete):
        allowed = np.arange(space.n) if mask is None or not mask.any() else np.flatnonzero(mask)
        return np.array([allowed[0] if rng is None else rng.choice(allowed)])
    return flat(np.zeros(space.shape) if rng is None else rng.uniform(space.low, space.high))
