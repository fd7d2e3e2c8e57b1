"""What all evaluation environments of teams share: worlds under several conditions, results that count worlds, drawings."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from decisionllm.datasets.team import Meta, canonical, entity_schema, task_text, team_facts
from decisionllm.datasets.team_worlds import Game
from decisionllm.datasets.wordings import is_held_out, turns
from decisionllm.eval.report import figure
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.protocols import Begin, Env
from decisionllm.schema import Episode

STARTS = 1000  # evaluation `seed` draws its worlds with seeds from this times `seed` on; logs begin at a million


class TeamEnv(Env):
    """E worlds in lock-step, num_episodes under each condition. A row is an agent; `groups` is the world of each row, in order.

    A subclass sets `tasks` and `groups`, and writes `reset`, `step`, `world_outcomes` and `controller`; `world_scores`, `frames`
    and `draw_world` have defaults. A result row has one episode a world, that of its first agent.

    Args:
        num_episodes, labels: of each condition.
        text: as in the dataset.
        wordings: with text=paraphrased, `trained` or `held_out`: which frames the texts have, each in turn.
        frames: how many frames were trained on, see `text_wordings`; 0: all.

    Attributes:
        labels: of each condition; "" where nothing is changed.
        condition: (E,) of each world.
        teachers: names of the scripted players.
        averages: names of the outcomes whose means are columns of a result row.
    """

    groups: np.ndarray
    teachers: Sequence[str] = ()
    averages: Sequence[str] = ()

    def __init__(
        self, num_episodes: int, labels: Sequence[str] = ("",), *, text: str = "none", wordings: str = "trained", frames: int = 0
    ) -> None:  # fmt: skip
        self.labels, self.condition = labels, np.repeat(np.arange(len(labels)), num_episodes)
        self.text, self.held_out, self.text_wordings = text, is_held_out(wordings, text), frames

    def texts(self, meta: Meta, sizes: Sequence[int], types: Sequence[str]) -> list[str]:
        """The task text of each row, of the sizes of their teams and their types of agent."""
        rows = [*zip(sizes, types, strict=True)]
        tasks = [task_text(meta, n, name, self.text) for n, name in rows]
        if self.text != "paraphrased":
            return tasks
        facts = {task: team_facts(meta, n, name) for task, (n, name) in zip(tasks, rows, strict=True)}
        return [words for _, words in turns(tasks, facts, held_out=self.held_out, frames=self.text_wordings)]

    def world_outcomes(self) -> dict[str, np.ndarray]:
        """What happened, (E, ...) arrays: `team_return`, and what `world_scores` and `averages` need."""
        raise NotImplementedError

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        """A scripted player: a function that returns the actions (M, A) of the agents that act next."""
        raise NotImplementedError

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        """(M,) normalised scores: 0 and 100 where the team return is the outcome `reference`, (M, 2), low and high."""
        low, high = outcome["reference"].T
        return np.asarray(100 * (outcome["team_return"] - low) / (high - low))

    def frames(self, world: int) -> Sequence[int]:
        """Steps of the last rollout that are drawn; none: no drawing."""
        return ()

    def draw_world(self, axis: Any, world: int, step: int) -> None:
        """Draw a world at one of its frames."""

    def conditions(self, execution: str, scripted: bool) -> dict[str, Sequence[int]]:
        first = np.searchsorted(self.groups, np.arange(len(self.condition)))
        decides = "per agent" if scripted else execution.replace("_", " ")
        wording = "held-out wordings" * self.held_out
        names = [", ".join(filter(None, (decides, label, wording))) for label in self.labels]
        return {name: first[self.condition == c].tolist() for c, name in enumerate(names)}

    def outcomes(self) -> dict[str, np.ndarray]:
        return {name: values[self.groups] for name, values in self.world_outcomes().items()}

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        return self.world_scores({name: np.array([e.outcome[name] for e in episodes]) for name in episodes[0].outcome})

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Mean team return and other mean outcomes; the rewards of an episode end with its agent, the team's do not."""
        names = {"return": "team_return"} | {name: name for name in self.averages}
        return {key: round(float(np.mean([e.outcome[name] for e in episodes])), 4) for key, name in names.items()}

    def draw(self, episodes: Sequence[Episode], title: str) -> Any:
        """A world of the last rollout as a strip of frames; with several conditions, also their mean scores."""
        world, several = episodes[0].group, len(self.labels) > 1
        if not (steps := self.frames(world)):
            return None
        made = figure(2.1 * len(steps) + 3 * several, 2.6, title)
        axes = made.subplots(1, len(steps) + several, width_ratios=[2] * len(steps) + [3] * several)
        for axis, step in zip(axes, steps, strict=False):
            self.draw_world(axis, world, step)
            axis.set(xticks=[], yticks=[], aspect="equal")
            axis.set_title(f"step {step}", fontsize=8)
        if several:
            scores = self.world_scores(self.world_outcomes())
            means = {label or "undisturbed": scores[self.condition == c].mean() for c, label in enumerate(self.labels)}
            axes[-1].plot(list(means.values()), "o-", color="black", markersize=3)
            axes[-1].set_xticks(range(len(means)), list(means), rotation=60, ha="right", fontsize=6)
            axes[-1].set_title(self.unit or "normalised score", fontsize=8)
        return made

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Each teacher as the player of all agents."""

        def begin(name: str, tasks: Sequence[str]) -> ScriptedPlayer:
            choose = self.controller(name, np.random.default_rng((seed, self.teachers.index(name))))
            return ScriptedPlayer(lambda observations, rows: choose(), tasks)

        return {name: partial(begin, name) for name in self.teachers}


class WorldTeams(TeamEnv):
    """Worlds as of `team_worlds`, which a team wins or loses. Each of its agents plays until it ends, and has the team's reward.

    Args:
        game: that is played.
        given: see TeamEnv.

    Attributes:
        world, meta: the worlds of the last reset, and their meta.
    """

    unit = "worlds won, %"
    world: Any

    def __init__(self, game: Game, num_episodes: int, labels: Sequence[str] = ("",), **given: Any) -> None:
        super().__init__(num_episodes, labels, **given)
        self.game, self.teachers = game, game.teachers
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        E = int((self.condition == 0).sum())
        self.world = world = self.game.begin(STARTS * seed + np.tile(np.arange(E), len(self.labels)))
        (_, N), self.meta = world.alive.shape, self.game.describe(world)
        self.kinds = (self.game.types(world) if self.game.types else np.zeros(world.alive.shape, int)).ravel()
        self.groups, self.horizon = np.repeat(np.arange(len(self.condition)), N), self.meta["horizon"]
        self.entity_schema = entity_schema(self.meta, N)
        self.tasks = self.texts(self.meta, [N] * len(self.kinds), np.array([*self.meta["types"]])[self.kinds].tolist())
        self.returns = np.zeros(len(self.condition))
        return self.observe()

    def observe(self) -> np.ndarray:
        """(rows, S) float32"""
        raw, types = self.world.observations.reshape(len(self.kinds), -1), self.meta["types"]
        ((blocks, *_), *_) = ([*each["observations"].values()] for each in types.values())
        return canonical(raw, blocks, self.entity_schema, agent_type=self.kinds, types=len(types))

    @property
    def action_masks(self) -> np.ndarray:
        return np.asarray(self.world.masks.reshape(len(self.kinds), -1))

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        gains = self.world.step(actions.astype(int).reshape(self.world.alive.shape))
        self.returns += gains
        ended = (~self.world.alive | self.world.terminated[:, None]).ravel()
        truncated = (self.world.over & ~self.world.terminated)[self.groups]
        return self.observe(), gains[self.groups], ended, truncated

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        player = self.game.teacher(self.world, self.teachers.index(name), rng)
        return lambda: player.act(self.world)[self.world.alive & ~self.world.over[:, None]][:, None]

    def world_outcomes(self) -> dict[str, np.ndarray]:
        return {"team_return": self.returns, "won": self.world.won}

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        return 100.0 * outcome["won"]
