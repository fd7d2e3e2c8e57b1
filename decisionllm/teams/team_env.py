"""Base classes of the evaluation environments of teams: worlds under several conditions, results
that count worlds, drawings.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic

import numpy as np

from decisionllm.datasets.paraphrases import assign_texts, uses_held_out_frames
from decisionllm.eval.pictures import figure
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.protocols import Begin, Env
from decisionllm.schema import Episode, Json
from decisionllm.teams.entity_layout import build_entity_schema, to_entity_layout
from decisionllm.teams.simulated_logs import Game, W
from decisionllm.teams.texts import task_text, team_facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STARTS = 1000  # of each evaluation seed
# seeds of worlds from 900,000 on measure the returns of references, those from a million make logs
REFERENCE_STARTS = 900_000


def make_start_seeds(seed: int, worlds: int) -> np.ndarray:
    """(worlds,) seeds of the worlds of an evaluation, which no log and no other evaluation has.

    Raises:
        ValueError: there are none for this evaluation seed, or not as many.
    """
    most = REFERENCE_STARTS // STARTS - 1
    if not 0 <= seed <= most:
        raise ValueError(f"seed: expected 0 .. {most}, so that no start is in a log, got {seed}")
    if worlds > STARTS:
        raise ValueError(
            f"episodes: expected at most {STARTS}, so that no other seed= has the same starts, "
            f"got {worlds}"
        )
    return STARTS * seed + np.arange(worlds)


class TeamEnv(Env):
    """E worlds in lock-step, num_episodes under each condition. A row is an agent; `groups` is the
    world of each row, in order.

    A subclass sets `tasks` and `groups`, and writes `reset`, `step`, `world_outcomes` and
    `controller`; `world_scores`, `frames` and `draw_world` have defaults. A result row has one
    episode a world, that of its first agent.

    Args:
        num_episodes, labels: of each condition.
        text: as in the dataset.
        wordings: with text=paraphrased, `trained` or `held_out`: which frames the texts have, each
            in turn.
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
        self,
        num_episodes: int,
        labels: Sequence[str] = ("",),
        *,
        text: str = "none",
        wordings: str = "trained",
        frames: int = 0,
    ) -> None:
        self.labels = labels
        self.condition = np.repeat(np.arange(len(labels)), num_episodes)
        self.text = text
        self.held_out = uses_held_out_frames(wordings, text)
        self.text_wordings = frames

    def write_texts(self, meta: Json, sizes: Sequence[int], types: Sequence[str]) -> list[str]:
        """Write the task text of each row, of the sizes of their teams and their types of agent."""
        rows = list(zip(sizes, types, strict=True))
        tasks = [task_text(meta, n, name, self.text) for n, name in rows]
        if self.text != "paraphrased":
            return tasks
        facts = {}
        for task, (n, name) in zip(tasks, rows, strict=True):
            facts[task] = team_facts(meta, n, name)
        self.facts = facts
        wordings = assign_texts(tasks, facts, held_out=self.held_out, frames=self.text_wordings)
        return [wording for _, wording in wordings]

    def world_outcomes(self) -> dict[str, np.ndarray]:
        """Return (E, ...) arrays of what happened: `team_return`, and those that `world_scores` and
        `averages` need.
        """
        raise NotImplementedError

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        """A scripted player: a function that returns the actions (M, A) of the agents that act
        next."""
        raise NotImplementedError

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        """(M,) normalised scores of team returns: 0 and 100 are those of the outcome `reference`
        (M, 2)."""
        low, high = outcome["reference"].T
        return np.asarray(100 * (outcome["team_return"] - low) / (high - low))

    def frames_to_draw(self, world: int) -> Sequence[int]:
        """Steps of the last rollout that are drawn; none: no drawing."""
        return ()

    def draw_world(self, axis: "Axes", world: int, step: int) -> None:
        """Draw a world at one of its frames."""

    def conditions(self, execution: str, scripted: bool) -> dict[str, Sequence[int]]:
        first = np.searchsorted(self.groups, np.arange(len(self.condition)))
        decides = "per agent" if scripted else execution.replace("_", " ")
        wording = "held-out wordings" if self.held_out else ""
        rows_by_name: dict[str, Sequence[int]] = {}
        for c, label in enumerate(self.labels):
            name = ", ".join(filter(None, (decides, label, wording)))
            rows_by_name[name] = first[self.condition == c].tolist()
        return rows_by_name

    def outcomes(self) -> dict[str, np.ndarray]:
        return {name: values[self.groups] for name, values in self.world_outcomes().items()}

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        names = episodes[0].outcome
        outcome = {}
        for name in names:
            outcome[name] = np.array([episode.outcome[name] for episode in episodes])
        return self.world_scores(outcome)

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        """Mean team return and other mean outcomes.

        The rewards of an episode end with its agent, the team's do not.
        """
        names = {"return": "team_return"} | {name: name for name in self.averages}
        means = {}
        for key, name in names.items():
            mean = np.mean([e.outcome[name] for e in episodes])
            means[key] = round(float(mean), 4)
        return means

    def draw(self, episodes: Sequence[Episode], title: str) -> "Figure | None":
        """A world of the last rollout as a strip of frames; with several conditions, also their
        mean scores."""
        world = episodes[0].group
        steps = self.frames_to_draw(world)
        if not steps:
            return None
        several = len(self.labels) > 1
        widths = [2] * len(steps)
        width = 2.1 * len(steps)
        if several:
            widths.append(3)
            width += 3
        drawing = figure(width, 2.6, title)
        axes = drawing.subplots(1, len(widths), width_ratios=widths)
        for axis, step in zip(axes, steps, strict=False):
            self.draw_world(axis, world, step)
            axis.set(xticks=[], yticks=[], aspect="equal")
            axis.set_title(f"step {step}", fontsize=8)
        if several:
            self._draw_scores(axes[-1])
        return drawing

    def _draw_scores(self, axis: "Axes") -> None:
        """Draw the mean score under each condition."""
        scores = self.world_scores(self.world_outcomes())
        means = {}
        for c, label in enumerate(self.labels):
            means[label or "undisturbed"] = scores[self.condition == c].mean()
        axis.plot(list(means.values()), "o-", color="black", markersize=3)
        axis.set_xticks(range(len(means)), list(means), rotation=60, ha="right", fontsize=6)
        axis.set_title(self.unit or "normalised score", fontsize=8)

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Each teacher as the player of all agents."""

        def begin(name: str, tasks: Sequence[str]) -> ScriptedPlayer:
            rng = np.random.default_rng((seed, self.teachers.index(name)))
            choose = self.controller(name, rng)
            return ScriptedPlayer(lambda observations, rows: choose(), tasks)

        return {name: partial(begin, name) for name in self.teachers}


class WorldTeams(TeamEnv, Generic[W]):
    """Worlds as of `simulated_logs`, which a team wins or loses.

    Each agent of the team plays until it ends, and has the team's reward.

    Args:
        game: that is played.
        labels, text, wordings, frames: see `TeamEnv`.

    Attributes:
        world, meta: the worlds of the last reset, and their meta.
    """

    unit = "worlds won, %"
    world: W

    def __init__(
        self,
        game: Game[W],
        num_episodes: int,
        labels: Sequence[str] = ("",),
        *,
        text: str = "none",
        wordings: str = "trained",
        frames: int = 0,
    ) -> None:
        super().__init__(num_episodes, labels, text=text, wordings=wordings, frames=frames)
        self.game = game
        self.teachers = game.teachers
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        E = int((self.condition == 0).sum())
        seeds = np.tile(make_start_seeds(seed, E), len(self.labels))
        self.world = self.game.begin(seeds)
        self.meta = self.game.describe(self.world)
        self.num_actions = self.world.masks.shape[-1]
        kinds: np.ndarray = np.zeros(self.world.alive.shape, int)
        if self.game.types:
            kinds = self.game.types(self.world)
        N = kinds.shape[1]
        self.kinds = kinds.ravel()
        self.groups = np.repeat(np.arange(len(self.condition)), N)
        self.horizon = self.meta["horizon"]
        self.entity_schema = build_entity_schema(self.meta, N)
        names = np.array(list(self.meta["types"]))[self.kinds]
        self.tasks = self.write_texts(self.meta, [N] * len(self.kinds), names.tolist())
        self.returns = np.zeros(len(self.condition))
        return self.observe()

    def observe(self) -> np.ndarray:
        """(rows, S) float32"""
        raw = self.world.observations.reshape(len(self.kinds), -1)
        types = list(self.meta["types"].values())
        blocks, *_ = types[0]["observations"].values()  # of all types alike
        schema = self.entity_schema
        return to_entity_layout(raw, blocks, schema, agent_type=self.kinds, types=len(types))

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

        def act() -> np.ndarray:
            acting = self.world.alive & ~self.world.over[:, None]
            return np.asarray(player.act(self.world)[acting][:, None])

        return act

    def world_outcomes(self) -> dict[str, np.ndarray]:
        return {"team_return": self.returns, "won": self.world.won}

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        return 100.0 * outcome["won"]
