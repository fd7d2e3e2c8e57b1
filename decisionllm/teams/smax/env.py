"""SMAX's evaluation: E battles under each of several conditions, all of their units in one batch,
each until it dies.

A row is a unit, its group a battle. The reward of every unit is its team's, and the score is the
battles won, in percent.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.checks import parse_ranges
from decisionllm.schema import Episode, Json
from decisionllm.teams.smax.dataset import game
from decisionllm.teams.smax.world import HORIZON, SIZE, STOP, Smax, are_allowed
from decisionllm.teams.team_env import WorldTeams

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class SmaxTeams(WorldTeams[Smax]):
    """num_episodes battles under each condition: undisturbed, then with each crash.

    Args:
        map, text: as in the dataset.
        wordings, frames: see `WorldTeams`.
        crash: steps from which on one unit stands still, such as `20,10,0`; no observation says so.
    """

    unit = "battles won, %"
    averages = ("deaths", "out_of_time")

    def __init__(
        self,
        num_episodes: int,
        *,
        map: str = "2s3z",
        crash: str = "",
        text: str = "none",
        wordings: str = "trained",
        frames: int = 0,
    ) -> None:
        crashes = parse_ranges("env.crash", crash, nothing="none", within=range(HORIZON))
        labels = ["", *(f"crash at {c}" for c in crashes)]
        self.name = f"smax-{map}"
        super().__init__(
            game(map), num_episodes, labels, text=text, wordings=wordings, frames=frames
        )
        self.crash = np.array([HORIZON, *crashes])[self.condition]  # the step of the crash

    def reset(self, seed: int) -> np.ndarray:
        observations = super().reset(seed)
        E, N = self.world.alive.shape
        undisturbed = int((self.condition == 0).sum())
        units = np.random.default_rng(seed).integers(N, size=undisturbed)
        self.struck = np.tile(units, len(self.labels))  # the unit that stands still in a crash
        self.decisions, self.illegal, self.deaths, self.length = np.zeros((4, E))
        self.history = [(self.world.places, self.world.health)]
        return observations

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        world = self.world
        acting = world.acting
        taken_actions = actions.astype(int).reshape(acting.shape)
        self.decisions += acting.sum(1)
        self.illegal += (acting & ~are_allowed(world.masks, taken_actions)).sum(1)
        self.length += ~world.over
        crashed = np.flatnonzero(world.time >= self.crash)
        taken_actions[crashed, self.struck[crashed]] = STOP
        result = super().step(taken_actions)
        self.deaths += (acting & ~world.alive).sum(1)
        self.history.append((world.places, world.health))
        return result

    def world_outcomes(self) -> dict[str, np.ndarray]:
        return super().world_outcomes() | {
            "deaths": self.deaths,
            "decisions": self.decisions,
            "illegal": self.illegal,
            "out_of_time": self.world.over & ~self.world.terminated,
        }

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        means = super().metrics(episodes)
        for name in ("decisions", "illegal"):
            means[name] = int(sum(e.outcome[name] for e in episodes))
        return means

    def frames_to_draw(self, world: int) -> Sequence[int]:
        return [int(step) for step in np.linspace(0, self.length[world], 5).round()]

    def draw_world(self, axis: "Axes", world: int, step: int) -> None:
        """Allies are blue, enemies red, the paler the weaker."""
        places, health = self.history[step]
        facts = self.world.facts
        colours = np.array(["C0"] * facts.allies + ["C3"] * facts.enemies)
        x, y = places[world].T
        axis.scatter(x, y, c=colours, alpha=np.clip(health[world], 0, 1), s=20)
        axis.set(xlim=(0, SIZE), ylim=(0, SIZE))
