"""A T-maze for teams, E of them at once: a cue says left or right, each agent takes another room
there.

N agents walk side by side through a corridor, then each takes one of N rooms on the left or N on
the right, all at once. The cue is in the first observation alone. Which of the N! orders is meant,
no observation shows: each is right if the whole team means it. So agents that remember the cue and
choose independently are right in N!/N^N of the worlds, and a team that agrees and has forgotten the
cue in half of them. After the T-maze of Bakker, Reinforcement Learning with Long Short-Term Memory
(2001).

Action 0 is a step ahead, the only one allowed in the corridor; 1 .. N are the rooms on the left and
N+1 .. 2N those on the right, allowed at its end. An observation is the share of the corridor behind
the agent, and the cue in two numbers, zeros after the first step. The team is paid 1 where it was
right.
"""

from collections.abc import Sequence

import numpy as np

TEACHERS = ("expert", "random")


class TMaze:
    """E worlds side by side, a `World` of `simulated_logs`.

    Args:
        seeds: (E,), which draw the cues.
        agents, length: N, and the steps of the corridor.

    Attributes:
        cue: (E,) 0: left, 1: right.
    """

    def __init__(
        self,
        seeds: Sequence[int] | np.ndarray,
        agents: int = 3,
        length: int = 8,
    ) -> None:
        self.length = length
        self.time = 0
        E = len(seeds)
        self.cue = np.array([np.random.default_rng(int(seed)).integers(2) for seed in seeds])
        self.over = np.zeros(E, bool)
        self.won = np.zeros(E, bool)
        self.alive = np.ones((E, agents), bool)

    @property
    def terminated(self) -> np.ndarray:
        return self.over

    @property
    def observations(self) -> np.ndarray:
        """(E, N, 3) float32"""
        E, N = self.alive.shape
        observed = np.zeros((E, 3), np.float32)
        observed[:, 0] = self.time / self.length
        if self.time == 0:
            observed[np.arange(E), 1 + self.cue] = 1
        return np.repeat(observed[:, None], N, 1)

    @property
    def masks(self) -> np.ndarray:
        """(E, N, 2N+1) bool"""
        E, N = self.alive.shape
        is_room = np.arange(2 * N + 1) > 0
        allowed = is_room if self.time >= self.length else ~is_room
        return np.broadcast_to(allowed, (E, N, 2 * N + 1))

    def step(self, actions: np.ndarray) -> np.ndarray:
        """(E, N) actions -> the reward of each team (E,)."""
        self.time += 1
        if self.time != self.length + 1:
            return np.zeros(len(self.cue))
        self.won = (np.sort(actions, 1) == goal_rooms(self)).all(1)
        self.over = np.ones_like(self.over)
        self.alive = np.zeros_like(self.alive)
        return self.won.astype(float)


def goal_rooms(world: TMaze) -> np.ndarray:
    """Return the actions that a team shares out, in any order: (E, N)"""
    N = world.alive.shape[1]
    return np.asarray(1 + np.arange(N) + N * world.cue[:, None])


class Teacher:
    """Scripted players of E worlds.

    expert: one of the orders, each equally likely. random: uniform over the allowed actions.

    Args:
        kinds: (E,) indices into TEACHERS, or one for all.
        noise: share of the actions that are random.
    """

    def __init__(
        self,
        world: TMaze,
        kinds: int | np.ndarray,
        rng: np.random.Generator,
        *,
        noise: float = 0.0,
    ) -> None:
        self.rng = rng
        self.plan = rng.permuted(goal_rooms(world), axis=1)
        kinds = np.broadcast_to(kinds, len(self.plan))
        self.noise = np.where(kinds == TEACHERS.index("random"), 1.0, noise)

    def act(self, world: TMaze) -> np.ndarray:
        """(E, N) int, each allowed."""
        E, N = self.plan.shape
        random = self.rng.random((E, N)) < self.noise[:, None]
        uniform = self.rng.integers(1, 2 * N + 1, (E, N))
        if world.time != world.length:
            return np.zeros((E, N), int)
        return np.where(random, uniform, self.plan)
