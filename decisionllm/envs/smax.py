"""SMAX, battles of units against a scripted enemy, E of them at once: units die, actions are not always allowed, types differ.

Facts from jaxmarl 0.2.0, `HeuristicEnemySMAX` (Apache-2.0), which is the world itself: nothing of it is written again here. An action
is up, right, down, left, stop, or to attack enemy 0, 1, ..; the last are allowed where one is in reach. A unit sees its allies, then
the enemies, in UNIT numbers each (share of health, place from here, ..., type), zeros for who is dead or out of sight, then itself in
OWN. A team is paid the share of the enemies' health that it takes, and 1 for winning.

Letters: E worlds, N allies, M enemies, S numbers of a view, C = 5 + M actions.
"""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from decisionllm.config import one_of

HORIZON = 101  # steps: the clock of 100 is looked at before it moves on
SIZE = 32.0  # of the field, from wall to wall
UNIT, OWN = 13, 10
MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)], float)  # of the first actions
STOP = 4
TEACHERS = ("expert", "medium", "random")


@dataclass(frozen=True)
class Facts:
    """What is known of a map before a battle."""

    allies: int  # N
    enemies: int  # M
    names: tuple  # of all types
    kinds: tuple  # those of them that an ally may be, as indices
    health: tuple  # of each type, full
    version: str  # of jaxmarl


@cache
def compiled(map):
    """Facts of a map, and the beginning and the step of E of its battles, each compiled once for every E."""
    try:
        import jax
        import jax.numpy as jnp
        from jaxmarl.environments.smax import HeuristicEnemySMAX
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO
    except ImportError as error:
        raise ImportError(f"SMAX is JaxMARL's: pip install 'decisionllm[smax]' ({error})") from error
    from importlib.metadata import version

    one_of("map", map, MAP_NAME_TO_SCENARIO)
    scenario = MAP_NAME_TO_SCENARIO[map]
    env, N = HeuristicEnemySMAX(scenario=scenario), int(scenario.num_allies)
    known, types = tuple(env.unit_type_names), np.asarray(scenario.unit_types)[:N]
    kinds = tuple(range(len(known))) if scenario.smacv2_unit_type_generation else tuple(np.unique(types).tolist())
    strong = partial(jax.tree.map, lambda x: jax.lax.convert_element_type(x, x.dtype))  # weak types would be compiled again
    each = lambda named: jnp.stack([named[agent] for agent in env.agents])  # noqa: E731

    def shown(seen, state):
        units = state.state
        health = units.unit_health / env.unit_type_health[units.unit_types]
        masks = each(env.get_avail_actions(state)) > 0
        return each(seen), masks, units.unit_positions, health, units.unit_types[:N], units.done

    def begin(seed):
        seen, state = env.reset(jax.random.fold_in(jax.random.PRNGKey(seed), 0))
        return strong(state), shown(seen, state)

    def step(seed, time, state, actions):
        key = jax.random.fold_in(jax.random.PRNGKey(seed), time)
        seen, state, rewards, *_ = env.step_env(key, state, {agent: actions[i] for i, agent in enumerate(env.agents)})
        return strong(state), shown(seen, state), rewards[env.agents[0]]

    health = tuple(float(x) for x in env.unit_type_health)
    facts = Facts(N, int(scenario.num_enemies), known, kinds, health, version("jaxmarl"))
    return facts, jax.jit(jax.vmap(begin)), jax.jit(jax.vmap(step, in_axes=(0, None, 0, 0)))


class Smax:
    """E battles side by side, in lock-step. One that is over stays as it ended.

    seeds: (E,); what happens in a battle depends on its seed and the actions alone. After every step:
    seen (E, N, S) float32, masks (E, N, C) bool, kinds (E, N) types; places (E, N+M, 2) and health (E, N+M), shares, allies first;
    alive (E, N); over, terminated, won (E,): terminated where a side is dead, over also where time is up.
    """

    def __init__(self, seeds, map="3m"):
        self.facts, begin, self._step = compiled(map)
        self.seeds, self.time, E = np.asarray(seeds, np.uint32), 0, len(seeds)
        self.over, self.terminated, self.won = np.zeros((3, E), bool)
        self.alive = np.ones((E, self.facts.allies), bool)
        self._state, shown = begin(self.seeds)
        self._see(shown)

    def _see(self, shown):
        self.seen, self.masks, self.places, self.health, self.kinds, done = (np.asarray(x) for x in shown)
        going, N = ~self.over, self.facts.allies
        ours, theirs = self.health[:, :N] > 0, (self.health[:, N:] > 0).any(1)
        self.alive = np.where(going[:, None], ours, self.alive)
        self.terminated |= going & ~(ours.any(1) & theirs)
        self.won |= going & ours.any(1) & ~theirs
        self.over |= done

    @property
    def there(self):
        """Who is to act: (E, N) bool"""
        return self.alive & ~self.over[:, None]

    def step(self, actions):
        """(E, N), of those who are there -> what each team is paid: (E,), 0 where it was over"""
        going, self.time = ~self.over, self.time + 1
        actions = np.where(self.there, actions, STOP).astype(np.int32)
        self._state, shown, gains = self._step(self.seeds, np.int32(self.time), self._state, actions)
        self._see(shown)
        return np.where(going, np.asarray(gains), 0)


class Teacher:
    """Scripted players of E battles. Each unit needs no more than what it sees.

    expert: attacks the enemy in reach with the least health, so that fire is focused. medium: the closest one. With none in reach, both
    walk to the closest in sight, or to the point opposite to where they began. random: whatever is allowed. kinds: (E,) indices into
    TEACHERS. noise: the share of actions that are random, so that a log covers more than the way itself.
    """

    def __init__(self, world, kinds, rng, *, noise=0.0):
        self.kinds, self.rng = np.broadcast_to(kinds, len(world.alive)), rng
        self.noise = np.where(self.kinds == TEACHERS.index("random"), 1.0, noise)
        self.goal = SIZE - self.place(world)

    def place(self, world):
        return world.seen[..., -OWN + 1 : -OWN + 3] * SIZE

    def act(self, world):
        """-> (E, N) int, each allowed"""
        E, N = world.alive.shape
        enemies = world.seen[..., UNIT * (N - 1) : -OWN].reshape(E, N, -1, UNIT)
        away = np.where(enemies[..., 0] > 0, np.linalg.norm(enemies[..., 1:3], axis=-1), np.inf)
        health = enemies[..., 0] * (enemies[..., -len(world.facts.health) :] @ np.array(world.facts.health))
        reach = world.masks[..., STOP + 1 :]
        worth = np.where((self.kinds == TEACHERS.index("expert"))[:, None, None], health, away)
        target = np.where(reach, worth, np.inf).argmin(-1)
        nearest = np.take_along_axis(enemies, away.argmin(-1)[..., None, None], 2)[..., 0, 1:3]
        way = np.where(np.isfinite(away).any(-1)[..., None], nearest, self.goal - self.place(world))
        proposed = np.where(reach.any(-1), STOP + 1 + target, (way @ MOVES.T).argmax(-1))
        astray = self.rng.random((E, N)) < self.noise[:, None]
        proposed = np.where(astray, np.where(world.masks, self.rng.random(world.masks.shape), -1).argmax(-1), proposed)
        return np.where(allowed(world.masks, proposed), proposed, STOP)


def allowed(masks, actions):
    """(E, N, C) bool, (E, N) int -> (E, N) bool"""
    return np.take_along_axis(masks, actions[..., None], -1)[..., 0]
