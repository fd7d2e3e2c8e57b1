"""The world simple_spread, E worlds of up to N agents at once: as many agents as landmarks, which they are to cover without bumping.

Facts from mpe2 1.1.1, `simple_spread_v3` (MIT): discs of radius 0.15 and mass 1 with damped velocities, pushed by their motors and by
soft contacts. Each is paid half of what all share, minus the distance of every landmark to the agent nearest to it, and loses half a
point for each other agent it touches. A world runs for 25 steps. `tests/test_worlds_spread.py` holds it against mpe2.

Letters: E worlds, N places for agents and for landmarks, of which a world may use fewer. A push is (x, y) within -1 .. 1: mpe2's
continuous action in two numbers in place of five. A discrete action is mpe2's index: stay, left, right, down, up.
"""

from itertools import permutations

import numpy as np
from scipy.optimize import linear_sum_assignment

HORIZON = 25  # steps
TIME_STEP = 0.1
DAMPING = 0.25  # share of the velocity lost in a step
FORCE = 5.0  # of a push of 1
TOUCH = 0.3  # distance at which two agents touch
CONTACT_FORCE, CONTACT_MARGIN = 100.0, 1e-3
COVERED = 0.1  # a landmark with an agent within this distance is covered
PUSHES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], float)  # of the discrete actions
TEACHERS = ("expert", "medium", "random", "convention")


class Spread:
    """E worlds side by side. Each changes in place with `step`.

    seeds: (E,), world e starts as mpe2's `reset(seed=seeds[e])`. agents: (E,) how many each has.
    reward: `mpe2`; or `omar`, the reward of OMAR's published logs: min(1 / distance, 10) a landmark, minus 5 a contact.
    integrator: `mpe2`, which moves first and then changes the velocity, or `omar`, the other way round.
    """

    def __init__(self, seeds, agents, *, reward="mpe2", integrator="mpe2"):
        for name, value in (("reward", reward), ("integrator", integrator)):
            if value not in ("mpe2", "omar"):
                raise ValueError(f"{name}: expected mpe2 or omar, got {value!r}")
        self.reward, self.integrator = reward, integrator
        agents = np.broadcast_to(agents, len(seeds))
        E, N = len(seeds), int(agents.max())
        self.there = np.arange(N) < agents[:, None]  # (E, N) agents
        self.marked = self.there.copy()  # (E, N) landmarks
        self.crashed = np.zeros(
            (E, N), bool
        )  # whose motor is dead: they are in the way, can be pushed, and cover what they lie on
        start = np.zeros((E, 2, N, 2))
        for e, (seed, n) in enumerate(zip(seeds, agents, strict=True)):
            start[e, :, :n] = np.random.default_rng(int(seed)).uniform(-1, 1, (2, n, 2))
        self.positions, self.landmarks = start[:, 0].copy(), start[:, 1]
        self.velocities = np.zeros((E, N, 2))
        self._measure()

    def _measure(self):
        """What forces and rewards are made of: where others are (E, N, N, 2), how far, and how far each landmark is (E, N, N)."""
        self.apart = self.positions[:, :, None] - self.positions[:, None]
        self.distance = np.sqrt(np.square(self.apart).sum(-1))
        self.to_landmark = np.sqrt(np.square(self.positions[:, :, None] - self.landmarks[:, None]).sum(-1))
        self.both = self.there[:, :, None] & self.there[:, None] & ~np.eye(self.there.shape[1], dtype=bool)

    def lose(self, agents):
        """These are gone from now on: nobody sees, touches or counts them. (E, N) bool"""
        self.there = self.there & ~agents
        self._measure()

    def step(self, pushes):
        """(E, N, 2) -> what each agent is paid (E, N), 0 where there is none."""
        pushes = np.where((self.there & ~self.crashed)[..., None], np.clip(np.asarray(pushes, np.float64), -1, 1), 0)
        distance = np.where(self.both, self.distance, 1.0)
        depth = np.logaddexp(0, -(distance - TOUCH) / CONTACT_MARGIN) * CONTACT_MARGIN
        contact = np.where(self.both[..., None], CONTACT_FORCE * self.apart / distance[..., None] * depth[..., None], 0)
        force = FORCE * pushes
        for other in range(contact.shape[2]):  # in mpe2's order, so that sums are equal to the last bit
            force = force + contact[:, :, other]
        before = self.velocities
        self.velocities = np.where(self.there[..., None], before * (1 - DAMPING) + force * TIME_STEP, 0)
        self.positions = self.positions + TIME_STEP * (before if self.integrator == "mpe2" else self.velocities)
        self._measure()
        return self.rewards()

    def rewards(self):
        """(E, N)"""
        nearest = np.where(self.marked, self.nearest(), np.inf)
        touches = (self.both & (self.distance < TOUCH)).sum(2)
        if self.reward == "omar":
            with np.errstate(divide="ignore"):
                gains = np.minimum(1 / nearest, 10).sum(1)[:, None] - 5.0 * touches
        else:
            gains = -0.5 * np.where(self.marked, nearest, 0).sum(1)[:, None] - 0.5 * touches
        return np.where(self.there, gains, 0)

    def nearest(self):
        """How far from each landmark the nearest agent is: (E, N)"""
        return np.where(self.there[:, :, None], self.to_landmark, np.inf).min(1)

    def covered(self):
        """The share of a world's landmarks with an agent on them: (E,)"""
        return ((self.nearest() < COVERED) & self.marked).sum(1) / self.marked.sum(1)

    def observe(self, worlds=slice(None), *, sees=0):
        """What each agent of these worlds sees, in mpe2's order: velocity, position, where the landmarks and the other agents are, and
        two zeros for each other agent, who does not speak. (rows, S) float32, agents of a world one after the other; these worlds
        must have equal numbers of agents and of landmarks. sees: only so many landmarks and agents, nearest first; 0: all."""
        there, marked = self.there[worlds], self.marked[worlds]
        E, n, m = len(there), int(there[0].sum()), int(marked[0].sum())
        if not ((there.sum(1) == n) & (marked.sum(1) == m)).all():
            raise ValueError("observe: expected worlds with equal numbers of agents and of landmarks")
        position, velocity = (x[worlds][there].reshape(E, n, 2) for x in (self.positions, self.velocities))
        landmarks = self.landmarks[worlds][marked].reshape(E, 1, m, 2) - position[:, :, None]
        others = position[:, None] - position[:, :, None]  # (E, n, n, 2), from each to each
        others = others[:, ~np.eye(n, dtype=bool)].reshape(E, n, n - 1, 2)
        if sees:
            landmarks, others = (_nearest(x, sees) for x in (landmarks, others))
        parts = velocity, position, landmarks, others, np.zeros_like(others)
        return np.concatenate([x.reshape(E * n, -1) for x in parts], 1).astype(np.float32)


def _nearest(places, count):
    """The nearest of places seen from where one is, nearest first, zeros where there are too few: (E, n, m, 2) -> (E, n, count, 2)"""
    order = np.argsort(np.linalg.norm(places, axis=-1), axis=-1, kind="stable")[..., :count]
    chosen = np.take_along_axis(places, order[..., None], 2)
    return np.pad(chosen, ((0, 0), (0, 0), (0, count - chosen.shape[2]), (0, 0)))


class Teacher:
    """Scripted players of E worlds. Each agent needs no more than what it sees: all see the same places, so all come to the same plan.

    expert: the assignment of agents to landmarks with the least way, solved again at every step. medium: everyone walks to its own
    nearest landmark. convention: a plan that is drawn once for each world and told to nobody. random: uniform actions.
    kinds: (E,) indices into TEACHERS. noise: the share of actions that are uniform, so that a log covers more than the way itself.
    """

    def __init__(self, world, kinds, rng, *, noise=0.0, discrete=True):
        E, N = world.there.shape
        self.kinds, self.rng, self.discrete = np.broadcast_to(kinds, E), rng, discrete
        self.noise = np.where(self.kinds == TEACHERS.index("random"), 1.0, noise)
        self.drawn = np.argsort(np.where(world.marked, rng.random((E, N)), 2), 1)  # of the convention

    def targets(self, world):
        """The landmark that each agent walks to: (E, N) int"""
        kind = np.array(TEACHERS)[self.kinds]
        found = self.drawn.copy()
        found[kind == "medium"] = np.where(world.marked[:, None], world.to_landmark, np.inf)[kind == "medium"].argmin(2)
        expert = kind == "expert"
        found[expert] = assignment(world.to_landmark[expert], world.there[expert], world.marked[expert])
        return found

    def act(self, world):
        """-> discrete actions (E, N, 1), or pushes (E, N, 2)"""
        E, N = world.there.shape
        goal = np.take_along_axis(world.landmarks, self.targets(world)[..., None], 1)
        actions = steer(goal - world.positions, world.velocities, discrete=self.discrete)
        astray = self.rng.random((E, N, 1)) < self.noise[:, None, None]
        return np.where(astray, uniform(self.rng, (E, N), discrete=self.discrete), actions)


def uniform(rng, shape, *, discrete):
    return rng.integers(len(PUSHES), size=(*shape, 1)).astype(float) if discrete else rng.uniform(-1, 1, (*shape, 2))


def pushes(actions):
    """What actions do: indices (..., 1) or pushes (..., 2) -> (..., 2)"""
    return PUSHES[actions[..., 0].astype(int)] if actions.shape[-1] == 1 else actions


def steer(way, velocity, *, discrete):
    """Towards a place and to a stop there: the way that is left (..., 2), velocity (..., 2) -> an action."""
    if not discrete:
        return np.clip(12 * (way - 0.22 * velocity), -1, 1)
    wanted = way - 0.25 * velocity
    axis = np.abs(wanted).argmax(-1)[..., None]
    along = np.take_along_axis(wanted, axis, -1)
    return np.where(np.abs(along) < 0.03, 0, 1 + 2 * axis + (along > 0)).astype(float)


def assignment(distance, there, marked):
    """Who goes where, so that the way of all is the least: (E, N, N), agents (E, N), landmarks (E, N) -> (E, N) landmark of each."""
    E, N = there.shape
    cost = np.where(there[:, :, None], np.where(marked[:, None], distance, 1e3), 0)
    if N > 6:
        return np.array([linear_sum_assignment(c)[1] for c in cost]).reshape(E, N)
    plans = np.array(list(permutations(range(N))))  # (P, N)
    total = np.zeros((E, len(plans)))
    for i in range(N):
        total += cost[:, i, plans[:, i]]
    return plans[total.argmin(1)]
