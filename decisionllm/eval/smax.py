"""SMAX's evaluation: E battles under each of several conditions, all of their units in one batch, each until it dies.

A row is a unit, its group a battle. The reward of every unit is its team's, and the score is the battles won, in percent.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decisionllm.config import ranges
from decisionllm.datasets.smax import game
from decisionllm.envs.smax import HORIZON, SIZE, STOP, allowed
from decisionllm.eval.team_env import WorldTeams
from decisionllm.registry import register
from decisionllm.schema import Episode


@register("env", "smax", text="${text}", map="${dataset.map}", frames="${text_wordings}")
class SmaxTeams(WorldTeams):
    """num_episodes battles under each condition: undisturbed, then with each crash.

    Args:
        map, text: as in the dataset.
        wordings, frames: see TeamEnv.
        crash: steps from which on one unit stands still, such as `20,10,0`; no observation says so.
    """

    unit, averages = "battles won, %", ("deaths", "out_of_time")

    def __init__(
        self, num_episodes: int, *, map: str = "2s3z", crash: str = "", text: str = "none", wordings: str = "trained", frames: int = 0
    ) -> None:  # fmt: skip
        crashes = ranges("env.crash", crash, nothing="none", within=range(HORIZON))
        labels = ["", *(f"crash at {c}" for c in crashes)]
        super().__init__(game(map), num_episodes, labels, text=text, wordings=wordings, frames=frames)
        self.crash = np.array([HORIZON, *crashes])[self.condition]  # the step of the crash

    def reset(self, seed: int) -> np.ndarray:
        observations, (E, N) = super().reset(seed), self.world.alive.shape
        drawn = np.random.default_rng(seed).integers(N, size=int((self.condition == 0).sum()))
        self.struck = np.tile(drawn, len(self.labels))  # the unit that stands still in a crash
        self.decisions, self.illegal, self.deaths, self.length = np.zeros((4, E))
        self.history = [(self.world.places, self.world.health)]
        return observations

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        world, acting, each = self.world, self.world.acting, np.arange(len(self.condition))
        chosen = actions.astype(int).reshape(acting.shape)
        self.decisions += acting.sum(1)
        self.illegal += (acting & ~allowed(world.masks, chosen)).sum(1)
        self.length += ~world.over
        crashed = world.time >= self.crash
        chosen[each[crashed], self.struck[crashed]] = STOP
        made = super().step(chosen)
        self.deaths += (acting & ~world.alive).sum(1)
        self.history.append((world.places, world.health))
        return made

    def world_outcomes(self) -> dict[str, np.ndarray]:
        late = self.world.over & ~self.world.terminated
        return super().world_outcomes() | {
            "deaths": self.deaths, "decisions": self.decisions, "illegal": self.illegal, "out_of_time": late,
        }  # fmt: skip

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        sums = {name: int(sum(e.outcome[name] for e in episodes)) for name in ("decisions", "illegal")}
        return super().metrics(episodes) | sums

    def frames(self, world: int) -> Sequence[int]:
        return [int(step) for step in np.linspace(0, self.length[world], 5).round()]

    def draw_world(self, axis: Any, world: int, step: int) -> None:
        """Allies are blue, enemies red, the paler the weaker."""
        places, health = (x[world] for x in self.history[step])
        colours = np.array(["C0"] * self.world.facts.allies + ["C3"] * self.world.facts.enemies)
        axis.scatter(*places.T, c=colours, alpha=np.clip(health, 0, 1), s=20)
        axis.set(xlim=(0, SIZE), ylim=(0, SIZE))
