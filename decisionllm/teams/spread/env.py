"""simple_spread's evaluation: E worlds under each of several conditions, all of their agents in one
batch.

A row is an agent, its group a world. The reward of every agent is the mean of its team. The score
is normalised by random play and by the expert teacher with the same number of agents and kind of
actions, undisturbed.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.checks import check_one_of, parse_ranges
from decisionllm.schema import Episode, Json
from decisionllm.teams.entity_layout import build_entity_schema, to_entity_layout
from decisionllm.teams.spread.dataset import describe, observation_blocks
from decisionllm.teams.spread.world import (
    HORIZON,
    PUSHES,
    RULES,
    TEACHERS,
    TOUCH,
    Spread,
    Teacher,
    to_pushes,
)
from decisionllm.teams.team_env import TeamEnv, make_start_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OMAR = (159.8, 516.8)  # S_random and S_expert of its paper: three agents, continuous actions
# Mean returns of random play and of the expert teacher by number of agents, over 1,000 worlds each,
# with seeds from team_env.REFERENCE_STARTS on; tests measure them again
REFERENCE = {
    "discrete": {
        2: (-21.2067, -5.8211),
        3: (-26.2337, -7.2657),
        4: (-30.7352, -8.9167),
        5: (-34.8587, -10.6418),
        6: (-39.1584, -12.5556),
    },
    "continuous": {
        2: (-21.155, -4.5151),
        3: (-25.7473, -5.6297),
        4: (-29.883, -6.9833),
        5: (-34.5545, -8.4735),
        6: (-38.6039, -10.0586),
    },
}


def label(agents: int, crash: int, *, usual: bool) -> str:
    """Name of a condition; the usual number of agents is not said."""
    parts = [] if usual else [f"{agents} agents"]
    if crash < HORIZON:
        parts.append(f"crash at {crash}")
    return ", ".join(parts)


class SpreadTeams(TeamEnv):
    """num_episodes worlds under each condition: every number of agents, undisturbed, then with each
    crash.

    Args:
        text, actions, capacity: as in the dataset.
        wordings, frames: see `TeamEnv`.
        agents: such as `3`, `2-6` or `3,5`.
        crash: steps from which on the motor of one agent is dead, such as `0,2,4,8`; no observation
            says so.
        rules: `mpe2`, or `omar`, the world of OMAR's logs, which has its score.
    """

    horizon = HORIZON
    action_dim = 2  # of continuous actions
    teachers = TEACHERS[:3]
    averages = ("covered", "touches")

    def __init__(
        self,
        num_episodes: int,
        *,
        agents: str = "3",
        actions: str = "discrete",
        crash: str = "",
        text: str = "none",
        capacity: int = 6,
        wordings: str = "trained",
        frames: int = 0,
        rules: str = "mpe2",
    ) -> None:
        numbers = parse_ranges("env.agents", agents, within=range(2, capacity + 1))
        crashes = parse_ranges("env.crash", crash, nothing="none", within=range(HORIZON))
        check_one_of("env.actions", actions, ("discrete", "continuous"))
        check_one_of("env.rules", rules, RULES)
        most = max(REFERENCE[actions])
        if max(numbers) > most:
            raise ValueError(
                f"env.agents: expected at most {most}, whose returns of random and expert "
                f"play are known, got {agents}; give fewer, or train with env=none"
            )
        if rules == "omar" and (numbers != [3] or actions != "continuous"):
            raise ValueError(
                "env.rules=omar: expected agents=3 and actions=continuous, as in its paper, "
                f"got {agents} and {actions}"
            )

        self.name = "spread-omar" if rules == "omar" else f"spread-{actions}"
        # of each condition: the number of agents, and the step from which one of them is dead
        conditions = [*product(numbers, (HORIZON, *crashes))]
        labels = [label(n, step, usual=numbers == [3]) for n, step in conditions]
        super().__init__(num_episodes, labels, text=text, wordings=wordings, frames=frames)
        self.agents, self.crash = np.array(conditions)[self.condition].T
        self.discrete = actions == "discrete"
        self.num_actions = len(PUSHES) if self.discrete else 0
        self.groups = np.repeat(np.arange(len(self.agents)), self.agents)
        meta = describe(sorted(numbers), actions)
        self.entity_schema = build_entity_schema(meta, capacity)
        types = ["agent"] * len(self.groups)
        self.tasks = self.write_texts(meta, self.agents[self.groups].tolist(), types)
        self.rules = rules
        bounds = {3: OMAR} if rules == "omar" else REFERENCE[actions]
        self.bounds = np.array([bounds[n] for n in self.agents])  # (E, 2)

    def reset(self, seed: int) -> np.ndarray:
        E = int((self.condition == 0).sum())
        several = len(self.labels)
        seeds = np.tile(make_start_seeds(seed, E), several)
        self.world = Spread(seeds, self.agents, self.rules)
        self.time = 0
        uniform = np.random.default_rng(seed).random((E, self.world.alive.shape[1]))
        uniform = np.tile(uniform, (several, 1))
        # the agent that is dead after a crash
        self.struck = np.where(self.world.alive, uniform, -1).argmax(1)
        self.returns = np.zeros(len(self.agents))
        self.touches = np.zeros(len(self.agents))
        self.history = [self.world.positions]
        return self.observe()

    def observe(self) -> np.ndarray:
        """(rows, S) float32"""
        S = sum(width * count for _, width, count in self.entity_schema)
        observations = np.zeros((len(self.groups), S), np.float32)
        for worlds in self.world.worlds_by_size():
            n = int(self.agents[worlds[0]])
            raw = self.world.observe(worlds)
            rows = np.isin(self.groups, worlds)
            observations[rows] = to_entity_layout(raw, observation_blocks(n), self.entity_schema)
        return observations

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        world = self.world
        taken_actions = np.zeros((*world.alive.shape, actions.shape[1]))
        taken_actions[world.alive] = actions
        world.crashed[np.arange(len(self.agents)), self.struck] = self.time >= self.crash
        gains = world.step(to_pushes(taken_actions)).sum(1) / self.agents
        self.time += 1
        self.returns += gains
        self.touches += (world.both & (world.distance < TOUCH)).sum((1, 2)) / 2
        self.history.append(world.positions)
        over = np.full(len(self.groups), self.time >= HORIZON)
        return self.observe(), gains[self.groups], np.zeros_like(over), over

    def world_outcomes(self) -> dict[str, np.ndarray]:
        return {
            "team_return": self.returns,
            "reference": self.bounds,
            "agents": self.agents,
            "covered": self.world.covered_landmarks(),
            "touches": self.touches,
        }

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        first = episodes[0].outcome
        facts = {"agents": int(first["agents"]), "reference": first["reference"].tolist()}
        return super().metrics(episodes) | facts

    def controller(self, name: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
        teacher = Teacher(self.world, TEACHERS.index(name), rng, discrete=self.discrete)
        return lambda: teacher.act(self.world)[self.world.alive]

    def frames_to_draw(self, world: int) -> Sequence[int]:
        return (0, 4, 8, 12, 16, 25)

    def draw_world(self, axis: "Axes", world: int, step: int) -> None:
        """Agents with the way behind them, landmarks as crosses."""
        from matplotlib.patches import Circle

        n = int(self.agents[world])
        places = np.stack(self.history)[:, world]  # (steps, N, 2)
        axis.plot(*self.world.landmarks[world, :n].T, "k+", markersize=9)
        for i, position in enumerate(places[step, :n]):
            axis.add_patch(Circle(position, TOUCH / 2, color=f"C{i}", alpha=0.6))
            axis.plot(*places[: step + 1, i].T, color=f"C{i}", linewidth=0.8)
        axis.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6))
