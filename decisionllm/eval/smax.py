"""SMAX's evaluation: E battles under each of several conditions, all of their units in one batch, each until it dies.

A row is a unit, its group a battle. The reward of every unit is its team's, and the score is the battles won, in percent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from decisionllm.config import ranges
from decisionllm.datasets.smax import blocks, describe
from decisionllm.datasets.team import canonical, entity_schema
from decisionllm.envs.smax import HORIZON, SIZE, STOP, TEACHERS, Smax, Teacher, allowed
from decisionllm.eval.team_env import TeamEnv
from decisionllm.registry import register
from decisionllm.schema import Episode

STARTS = 1000  # evaluation `seed` starts its battles with seeds from this times `seed` on; logs begin at a million


@register("env", "smax", text="${text}", map="${dataset.map}", frames="${text_wordings}")
class SmaxTeams(TeamEnv):
    """num_episodes battles under each condition: undisturbed, then with each crash.

    Args:
        map, text: as in the dataset.
        wordings, frames: see TeamEnv.
        crash: steps from which on one unit stands still, such as `20,10,0`; no observation says so.
    """

    horizon, unit, teachers, averages = HORIZON, "battles won, %", TEACHERS, ("deaths", "out_of_time")

    def __init__(
        self, num_episodes: int, *, map: str = "2s3z", crash: str = "", text: str = "none", wordings: str = "trained", frames: int = 0
    ) -> None:  # fmt: skip
        crashes = ranges("env.crash", crash, nothing="none", within=range(HORIZON))
        labels = ["", *(f"crash at {c}" for c in crashes)]
        super().__init__(num_episodes, labels, text=text, wordings=wordings, frames=frames)
        self.map = map
        self.crash = np.array([HORIZON, *crashes])[self.condition]  # the step of the crash
        self.seeds = np.tile(np.arange(num_episodes), len(self.labels))
        self.reset(0)
        self.groups = np.repeat(np.arange(len(self.condition)), self.world.facts.allies)

    def reset(self, seed: int) -> np.ndarray:
        self.world = world = Smax(STARTS * seed + self.seeds, self.map)
        self.meta = describe(self.map, world.facts)
        self.entity_schema = entity_schema(self.meta, world.facts.allies)
        self.kinds = np.searchsorted(world.facts.kinds, world.kinds).ravel()
        (E, N), names = world.alive.shape, np.array([*self.meta["types"]])
        self.tasks = self.texts(self.meta, [N] * len(self.kinds), names[self.kinds].tolist())
        drawn = np.random.default_rng(seed).integers(N, size=int((self.condition == 0).sum()))
        self.struck = np.tile(drawn, len(self.labels))  # the unit that stands still in a crash
        self.returns, self.decisions, self.illegal, self.deaths, self.length = np.zeros((5, E))
        self.history = [(world.places, world.health)]
        return self.observe()

    def observe(self) -> np.ndarray:
        """(rows, S) float32"""
        raw, facts = self.world.observations.reshape(len(self.kinds), -1), self.world.facts
        return canonical(raw, blocks(facts), self.entity_schema, agent_type=self.kinds, types=len(facts.kinds))

    @property
    def action_masks(self) -> np.ndarray:
        return self.world.masks.reshape(len(self.kinds), -1)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        world, acting, each = self.world, self.world.acting, np.arange(len(self.condition))
        chosen = actions.astype(int).reshape(acting.shape)
        self.decisions += acting.sum(1)
        self.illegal += (acting & ~allowed(world.masks, chosen)).sum(1)
        self.length += ~world.over
        crashed = world.time >= self.crash
        chosen[each[crashed], self.struck[crashed]] = STOP
        gains = world.step(chosen)
        self.returns += gains
        self.deaths += (acting & ~world.alive).sum(1)
        self.history.append((world.places, world.health))
        ended, truncated = (~world.alive | world.terminated[:, None]).ravel(), (world.over & ~world.terminated)[self.groups]
        return self.observe(), gains[self.groups], ended, truncated

    def world_outcomes(self) -> dict[str, np.ndarray]:
        return {
            "team_return": self.returns, "won": self.world.won, "deaths": self.deaths, "decisions": self.decisions,
            "illegal": self.illegal, "out_of_time": self.world.over & ~self.world.terminated,
        }  # fmt: skip

    def world_scores(self, outcome: Mapping[str, np.ndarray]) -> np.ndarray:
        return 100.0 * outcome["won"]

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        sums = {name: int(sum(e.outcome[name] for e in episodes)) for name in ("decisions", "illegal")}
        return super().metrics(episodes) | sums

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        teacher = Teacher(self.world, TEACHERS.index(name), rng)
        return lambda: teacher.act(self.world)[self.world.acting][:, None]

    def frames(self, world: int) -> Sequence[int]:
        return [int(step) for step in np.linspace(0, self.length[world], 5).round()]

    def draw_world(self, axis: Any, world: int, step: int) -> None:
        """Allies are blue, enemies red, the paler the weaker."""
        places, health = (x[world] for x in self.history[step])
        colours = np.array(["C0"] * self.world.facts.allies + ["C3"] * self.world.facts.enemies)
        axis.scatter(*places.T, c=colours, alpha=np.clip(health, 0, 1), s=20)
        axis.set(xlim=(0, SIZE), ylim=(0, SIZE))
