"""simple_spread, E worlds of up to N agents at once: cover the landmarks, do not touch each other.

Facts from mpe2 1.1.1, `simple_spread_v3` (MIT): discs of radius 0.15 and mass 1 with damped
velocities, pushed by their motors and by soft contacts. The reward of an agent is half of the
shared reward, minus the distance of every landmark to its nearest agent, and minus half a point for
each other agent it touches. A world runs for 25 steps. `tests/teams/spread/test_world.py` compares
it with mpe2.

Letters: E worlds, N slots for agents and for landmarks, of which a world may use fewer. A push is
(x, y) within -1 .. 1: mpe2's continuous action in two numbers in place of five. A discrete action
is mpe2's index: stay, left, right, down, up.

`rules="omar"` is the world of OMAR's published logs (arXiv 2111.11188): the velocity changes first
and moves the agent in the same step, and the reward of an agent is min(1 / distance, 10) for each
landmark and its nearest agent, minus 5 for each other agent it touches.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from scipy.optimize import linear_sum_assignment

from decisionllm.checks import check_one_of

HORIZON = 25  # steps
TIME_STEP = 0.1
DAMPING = 0.25  # share of the velocity lost in a step
FORCE = 5.0  # by a push of 1
TOUCH = 0.3  # distance at which two agents touch
CONTACT_FORCE = 100.0
CONTACT_MARGIN = 1e-3
COVERED = 0.1  # a landmark with an agent within this distance is covered
PUSHES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], float)  # the discrete actions
TEACHERS = ("expert", "medium", "random", "convention")
RULES = ("mpe2", "omar")


class Spread:
    """E worlds side by side. Each changes in place with `step`.

    Args:
        seeds: (E,), world e starts as mpe2's `reset(seed=seeds[e])`.
        agents: (E,) number of agents of each world, or one number for all.
        rules: one of RULES.

    Attributes:
        alive: (E, N) which slots hold an agent, and a landmark.
        both: (E, N, N) pairs of different agents.
        crashed: (E, N) agents whose motor is dead: they can be touched and pushed, and cover the
            landmark they lie on.
        positions, velocities, landmarks: (E, N, 2).
    """

    def __init__(
        self,
        seeds: Sequence[int] | np.ndarray,
        agents: int | np.ndarray,
        rules: str = "mpe2",
    ) -> None:
        check_one_of("rules", rules, RULES)
        self.omar = rules == "omar"
        agents = np.broadcast_to(agents, len(seeds))
        E, N = len(seeds), int(agents.max())
        self.alive = np.arange(N) < agents[:, None]
        self.both = self.alive[:, :, None] & self.alive[:, None] & ~np.eye(N, dtype=bool)
        self.crashed = np.zeros((E, N), bool)
        start = np.zeros((E, 2, N, 2))
        for e, (seed, n) in enumerate(zip(seeds, agents, strict=True)):
            rng = np.random.default_rng(int(seed))
            start[e, :, :n] = rng.uniform(-1, 1, (2, n, 2))
        self.positions = start[:, 0].copy()
        self.landmarks = start[:, 1]
        self.velocities = np.zeros((E, N, 2))
        self._measure()

    def _measure(self) -> None:
        """Offsets between agents (E, N, N, 2), their distances and those from agents to landmarks
        (E, N, N)."""
        self.apart = self.positions[:, :, None] - self.positions[:, None]
        self.distance = np.sqrt(np.square(self.apart).sum(-1))
        to_landmark = self.positions[:, :, None] - self.landmarks[:, None]
        self.to_landmark = np.sqrt(np.square(to_landmark).sum(-1))

    def step(self, pushes: np.ndarray) -> np.ndarray:
        """Pushes (E, N, 2) -> the reward of each agent (E, N), 0 in empty slots."""
        moved = (self.alive & ~self.crashed)[..., None]
        pushes = np.where(moved, np.clip(np.asarray(pushes, np.float64), -1, 1), 0)
        distance = np.where(self.both, self.distance, 1.0)
        depth = np.logaddexp(0, -(distance - TOUCH) / CONTACT_MARGIN) * CONTACT_MARGIN
        contact = CONTACT_FORCE * self.apart / distance[..., None] * depth[..., None]
        contact = np.where(self.both[..., None], contact, 0)  # (E, N, N, 2)
        force = FORCE * pushes
        # In mpe2's order, so that sums are equal to the last bit
        for other in range(contact.shape[2]):
            force = force + contact[:, :, other]
        velocities = self.velocities
        next_velocities = velocities * (1 - DAMPING) + force * TIME_STEP
        self.velocities = np.where(self.alive[..., None], next_velocities, 0)
        # mpe2 moves before the velocity changes
        moving = self.velocities if self.omar else velocities
        self.positions = self.positions + TIME_STEP * moving
        self._measure()
        return self.rewards()

    def rewards(self) -> np.ndarray:
        """(E, N)"""
        touches = (self.both & (self.distance < TOUCH)).sum(2)
        if self.omar:
            near = np.where(self.alive, 1 / self.nearest().clip(min=0.1), 0).sum(1)[:, None]
            return np.where(self.alive, near - 5.0 * touches, 0)
        nearest = np.where(self.alive, self.nearest(), 0).sum(1)[:, None]
        return np.where(self.alive, -0.5 * nearest - 0.5 * touches, 0)

    def nearest(self) -> np.ndarray:
        """Return the distance of each landmark to its nearest agent: (E, N)"""
        return np.asarray(np.where(self.alive[:, :, None], self.to_landmark, np.inf).min(1))

    def covered_landmarks(self) -> np.ndarray:
        """Return the share of a world's landmarks with an agent on them: (E,)"""
        covered = (self.nearest() < COVERED) & self.alive
        return np.asarray(covered.sum(1) / self.alive.sum(1))

    def worlds_by_size(self) -> list[np.ndarray]:
        """Worlds with equal numbers of agents: arrays of indices."""
        agents = self.alive.sum(1)
        return [np.flatnonzero(agents == n) for n in np.unique(agents)]

    def observe(self, worlds: slice | list[int] | np.ndarray = slice(None)) -> np.ndarray:
        """Return the observation of each agent of these worlds, in mpe2's order.

        Its velocity and position, the offsets of the landmarks and of the other agents, and two
        zeros (mpe2's communication) for each other agent.

        Args:
            worlds: indices of worlds with equal numbers of agents.

        Returns:
            (rows, S) float32, world by world.
        """
        alive = self.alive[worlds]
        E = len(alive)
        n = int(alive[0].sum())
        if (alive.sum(1) != n).any():
            raise ValueError(
                "observe: expected worlds with equal numbers of agents; see Spread.worlds_by_size"
            )
        position = self.positions[worlds][alive].reshape(E, n, 2)
        velocity = self.velocities[worlds][alive].reshape(E, n, 2)
        landmarks = self.landmarks[worlds][alive].reshape(E, 1, n, 2)
        to_landmarks = landmarks - position[:, :, None]  # (E, n, n, 2)
        others = position[:, None] - position[:, :, None]  # (E, n, n, 2), from each to each
        others = others[:, ~np.eye(n, dtype=bool)].reshape(E, n, n - 1, 2)
        parts = (velocity, position, to_landmarks, others, np.zeros_like(others))
        return np.concatenate([x.reshape(E * n, -1) for x in parts], 1).astype(np.float32)


class Teacher:
    """Scripted players of E worlds. Each agent needs its own observation alone: all agents compute
    the same assignment from it.

    expert: the assignment of agents to landmarks with the shortest total distance, solved again at
    every step. medium: every agent walks to its own nearest landmark. convention: an assignment
    drawn once for each world, which no observation shows. random: uniform actions.

    Args:
        world: the worlds to act in.
        kinds: (E,) indices into TEACHERS, or one for all.
        noise: share of actions that are uniform, so that a log covers more than the teacher's own
            states.
        discrete: discrete actions, otherwise pushes.
    """

    def __init__(
        self,
        world: Spread,
        kinds: int | np.ndarray,
        rng: np.random.Generator,
        *,
        noise: float = 0.0,
        discrete: bool = True,
    ) -> None:
        E, N = world.alive.shape
        self.kinds = np.broadcast_to(kinds, E)
        self.rng = rng
        self.discrete = discrete
        self.noise = np.where(self.kinds == TEACHERS.index("random"), 1.0, noise)
        # The assignment of the convention
        self.drawn = np.argsort(np.where(world.alive, rng.random((E, N)), 2), 1)

    def choose_landmarks(self, world: Spread) -> np.ndarray:
        """Return the landmark that each agent walks to: (E, N) int"""
        kind = np.array(TEACHERS)[self.kinds]
        landmarks = self.drawn.copy()
        distance = np.where(world.alive[:, None], world.to_landmark, np.inf)
        medium, expert = kind == "medium", kind == "expert"
        landmarks[medium] = distance[medium].argmin(2)
        landmarks[expert] = assign_landmarks(world.to_landmark[expert], world.alive[expert])
        return landmarks

    def act(self, world: Spread) -> np.ndarray:
        """Discrete actions (E, N, 1), or pushes (E, N, 2)."""
        E, N = world.alive.shape
        goal = np.take_along_axis(world.landmarks, self.choose_landmarks(world)[..., None], 1)
        actions = steer(goal - world.positions, world.velocities, discrete=self.discrete)
        random = self.rng.random((E, N, 1)) < self.noise[:, None, None]
        if self.discrete:
            return np.where(random, self.rng.integers(len(PUSHES), size=(E, N, 1)), actions)
        return np.where(random, self.rng.uniform(-1, 1, (E, N, 2)), actions)


def to_pushes(actions: np.ndarray) -> np.ndarray:
    """Actions as pushes: indices (..., 1) or pushes (..., 2) -> (..., 2)"""
    if actions.shape[-1] == 1:
        return np.asarray(PUSHES[actions[..., 0].astype(int)])
    return actions


def steer(offset: np.ndarray, velocity: np.ndarray, *, discrete: bool) -> np.ndarray:
    """Return the action (..., 1 or 2) that moves to a place and stops there.

    Args:
        offset: (..., 2) of the place.
        velocity: (..., 2) of the agent.
        discrete: an index, otherwise a push.
    """
    if not discrete:
        return np.clip(12 * (offset - 0.22 * velocity), -1, 1)
    correction = offset - 0.25 * velocity
    axis = np.abs(correction).argmax(-1)[..., None]
    along = np.take_along_axis(correction, axis, -1)
    return np.where(np.abs(along) < 0.03, 0, 1 + 2 * axis + (along > 0)).astype(float)


def assign_landmarks(distance: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Return the landmark of each agent (E, N) so that the total distance is least.

    Args:
        distance: (E, N, N) from agents to landmarks.
        alive: (E, N) bool, which slots hold an agent and a landmark.
    """
    E, N = alive.shape
    cost = np.where(alive[:, :, None], np.where(alive[:, None], distance, 1e3), 0)
    if N > 6:
        return np.array([linear_sum_assignment(c)[1] for c in cost]).reshape(E, N)
    # All worlds at once, many times as fast as scipy world by world
    plans = np.array(list(permutations(range(N))))  # (P, N)
    total = np.zeros((E, len(plans)))
    for i in range(N):
        total += cost[:, i, plans[:, i]]
    return np.asarray(plans[total.argmin(1)])
