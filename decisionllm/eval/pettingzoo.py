"""Any PettingZoo parallel environment as an environment of teams: N copies, the agents of one team as rows, partners for the others."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets.formats.team_log import action_limits, agent_types, flat, split_observation
from decisionllm.datasets.team import Meta, canonical_rows, entity_schema, meta_of, with_blocks
from decisionllm.eval.team_env import TeamEnv
from decisionllm.registry import register

FIRST, STARTS = 2_000_000_000, 1000  # copy n of evaluation `seed` is reset with FIRST + STARTS * seed + n, as no log is


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
            default), `noop` (the first allowed action, or zeros), or the dotted path of a function (observations, infos) -> actions, dicts by agent.
        reference: low and high team returns, such as of random play and of an expert, which score 0 and 100; none: the score is the
            mean team return. The team's reward is the mean over the agents that it began with.
        returns, capacity, text: as in the dataset.
        wordings, frames: see TeamEnv.
        horizon: most steps; 0: that of the log.

    Raises:
        ImportError: the module of `id` cannot be imported.
        ValueError: the environment does not fit the log or the options.
    """

    teachers, averages = ("random",), ("agents", "steps")

    def __init__(
        self, num_episodes: int, *, id: str, arguments: Mapping[str, Any] = {}, path: str = "", meta: str = "", team: int = 0,
        teams: Mapping[str, int] = {}, partners: Mapping[str, str] = {}, reference: Sequence[float] = [], returns: str = "",
        capacity: int = 6, horizon: int = 0, text: str = "none", wordings: str = "trained", frames: int = 0,
    ) -> None:  # fmt: skip
        chosen = {str(key): policy for key, policy in partners.items()}
        labels = [", ".join(f"{key} {policy}" for key, policy in chosen.items())]
        super().__init__(num_episodes, labels, text=text, wordings=wordings, frames=frames)
        self.team, create = team, resolve("env.id", f"{id}.parallel_env")
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
        self.unit, self.bounds = "" if reference else "team return", np.array([*reference] or [0.0, 100.0], float)
        types = meta_found["types"]
        self.named = kinds if len(types) > 1 else dict.fromkeys(kinds, str(*types))  # a public log has one type for all agents
        for agent, kind in kinds.items():
            one_of(f"env.id={id}, type in the log", self.named[agent], types)
            if (logged := types[self.named[agent]].get("num_actions")) != (n := limits[kind].get("num_actions")):
                raise ValueError(f"env.id={id}, type {kind}: expected num_actions {logged} as in the log, got {n}")
        self.num_actions = max(each.get("num_actions", 0) for each in types.values())

        team_of = {agent: int({**meta_found.get("teams", {}), **teams}.get(kind, 0)) for agent, kind in kinds.items()}
        self.members = {agent for agent in kinds if team_of[agent] == team}
        if unknown := sorted(chosen.keys() - {*limits, *map(str, team_of.values())}):
            known = f"{', '.join(limits)}, {sorted({*team_of.values()})}"
            raise ValueError(f"env.partners: expected types or teams, of {known}, got {unknown}")
        self.partners: dict[str, list[str]] = {}  # policy -> agents
        for agent, kind in kinds.items():
            if agent not in self.members or kind in chosen:
                self.partners.setdefault(chosen.get(kind, chosen.get(str(team_of[agent]), "random")), []).append(agent)
        self.functions = {name: resolve("env.partners", name) for name in self.partners.keys() - {"random", "noop"}}
        self.played = self.members.difference(*self.partners.values())  # by the policy
        self.spaces = {agent: self.envs[0].action_space(agent) for agent in kinds}
        sizes = {self.named[agent]: observation_size(self.envs[0].observation_space(agent)) for agent in sorted(self.members)}
        self.meta = meta_found | {"horizon": self.horizon, "types": with_blocks(types, sizes)}
        self.entity_schema = entity_schema(self.meta, capacity)
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        E = len(self.envs)
        self.rngs = [np.random.default_rng((seed, w)) for w in range(E)]
        self.views = [env.reset(seed=FIRST + STARTS * seed + w) for w, env in enumerate(self.envs)]  # observations, infos
        self.rows = [(w, agent) for w, env in enumerate(self.envs) for agent in env.agents if agent in self.played]
        self.groups = np.array([w for w, _ in self.rows], int)
        if empty := sorted({*range(E)} - {*self.groups.tolist()}):
            raise ValueError(f"env.team={self.team}: expected an agent to play in every copy, got none in copy {empty[0]}")
        self.sizes = np.array([len(self.members & {*env.agents}) for env in self.envs])
        names = [self.named[agent] for _, agent in self.rows]
        self.kinds = np.array([[*self.meta["types"]].index(name) for name in names])
        self.tasks = self.texts(self.meta, self.sizes[self.groups].tolist(), names)
        self.running = np.ones(len(self.rows), bool)
        self.team_returns, self.steps = np.zeros(E), np.zeros(E, int)
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
        N, E = len(self.rows), len(self.envs)
        own, team, ended, truncated = np.zeros(N), np.zeros(E), np.zeros(N, bool), np.zeros(N, bool)
        for w in np.unique(self.groups[self.running]):
            env, rows = self.envs[w], np.flatnonzero(self.running & (self.groups == w))
            agents, present = [self.rows[row][1] for row in rows], list(env.agents)
            chosen = self._partner_actions(w)
            chosen |= {a: to_space(self.spaces[a], actions[r]) for a, r in zip(agents, rows, strict=True)}
            if late := ", ".join(agent for agent in present if agent not in chosen):
                raise ValueError(f"{env}: expected no agent of the team to appear or return after the start, got {late}")
            observations, rewards, over, by_clock, infos = env.step({agent: chosen[agent] for agent in present})
            self.views[w] = observations, infos
            team[w] = sum(rewards[agent] for agent in present if agent in self.members) / self.sizes[w]
            self.steps[w] += 1
            timeout = self.steps[w] >= self.horizon
            for row, agent in zip(rows, agents, strict=True):
                own[row], ended[row] = rewards[agent], over[agent]
                truncated[row] = not over[agent] and (by_clock[agent] or timeout or agent not in env.agents)
        self.team_returns += team
        after = self._observe()
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
        reference = np.tile(self.bounds, (len(self.envs), 1))
        return {"team_return": self.team_returns, "reference": reference, "agents": self.sizes, "steps": self.steps}

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        def act() -> np.ndarray:
            running = np.flatnonzero(self.running).tolist()
            return np.stack([scripted(self.spaces[self.rows[row][1]], self.masks[row], rng) for row in running])

        return act


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
