"""SMAX, battles of units against a scripted enemy, E of them at once: units die, actions are
masked, units have types.

The environment is `HeuristicEnemySMAX` of jaxmarl 0.2.0 (Apache-2.0), which is called here and not
rewritten. An action is up, right, down, left, stop, or an attack on enemy 0, 1, ..; an attack is
allowed on an enemy in range. A unit observes its allies, then the enemies, in UNIT numbers each
(share of health, offset, ..., type), zeros for units that are dead or out of sight, then itself in
OWN numbers. The team's reward is the share of the enemies' health that it takes, and 1 for a
victory.

Letters: E worlds, N allies, M enemies, S numbers of a view, C = 5 + M actions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.files import explain_errors

if TYPE_CHECKING:
    import jax
    from jaxmarl.environments.smax.heuristic_enemy_smax_env import State

    # views of E battles: observations, masks, places, health, kinds, and who is done
    View = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

HORIZON = 101  # steps: JaxMARL compares its clock with 100 before it advances it
SIZE = 32.0  # width of the field, from wall to wall
UNIT = 13
OWN = 10
MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)], float)  # the first four actions
STOP = 4
TEACHERS = ("expert", "medium", "random")


@dataclass(frozen=True)
class Facts:
    """Facts of a map before a battle."""

    allies: int  # N
    enemies: int  # M
    names: tuple[str, ...]  # names of all types
    kinds: tuple[int, ...]  # the types that an ally may have, indices into names
    health: tuple[float, ...]  # full health of each type
    version: str  # version of jaxmarl


@cache
def compile_map(map: str) -> tuple[Facts, Callable[..., Any], Callable[..., Any]]:
    """Facts of a map, and the start and the step of E of its battles, each compiled once for every
    E."""
    with explain_errors(
        "SMAX needs JaxMARL: pip install -e '.[smax]'", ImportError, raised=ImportError
    ):
        import jax
        import jax.numpy as jnp
        from jaxmarl.environments.smax import HeuristicEnemySMAX
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO
    from importlib.metadata import version

    check_one_of("map", map, MAP_NAME_TO_SCENARIO)
    scenario = MAP_NAME_TO_SCENARIO[map]
    env = HeuristicEnemySMAX(scenario=scenario)
    N = int(scenario.num_allies)
    names = tuple(env.unit_type_names)
    kinds = tuple(range(len(names)))
    if not scenario.smacv2_unit_type_generation:
        kinds = tuple(np.unique(np.asarray(scenario.unit_types)[:N]).tolist())

    def to_strong_types(state: "State") -> "State":
        """A state without weak types, which would be compiled again."""
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)

    def stack(by_agent: dict[str, "jax.Array"]) -> "jax.Array":
        return jnp.stack([by_agent[agent] for agent in env.agents])

    def view(observations: dict[str, "jax.Array"], state: "State") -> "View":
        units = state.state
        health = units.unit_health / env.unit_type_health[units.unit_types]
        masks = stack(env.get_avail_actions(state)) > 0
        return (
            stack(observations),
            masks,
            units.unit_positions,
            health,
            units.unit_types[:N],
            units.done,
        )

    def begin(seed: "jax.Array") -> tuple["State", "View"]:
        observations, state = env.reset(jax.random.fold_in(jax.random.PRNGKey(seed), 0))
        return to_strong_types(state), view(observations, state)

    def step(
        seed: "jax.Array", time: "jax.Array", state: "State", actions: "jax.Array"
    ) -> tuple["State", "View", "jax.Array"]:
        key = jax.random.fold_in(jax.random.PRNGKey(seed), time)
        action_by_agent = {agent: actions[i] for i, agent in enumerate(env.agents)}
        observations, state, rewards, *_ = env.step_env(key, state, action_by_agent)
        return to_strong_types(state), view(observations, state), rewards[env.agents[0]]

    health = tuple(float(x) for x in env.unit_type_health)
    facts = Facts(
        allies=N,
        enemies=int(scenario.num_enemies),
        names=names,
        kinds=kinds,
        health=health,
        version=version("jaxmarl"),
    )
    return facts, jax.jit(jax.vmap(begin)), jax.jit(jax.vmap(step, in_axes=(0, None, 0, 0)))


class Smax:
    """E battles side by side, in lock-step. One that is over stays as it ended.

    Args:
        seeds: (E,); what happens in a battle depends on its seed and the actions alone.
        map: one of JaxMARL's.

    Attributes:
        observations: (E, N, S) float32. masks: (E, N, C) bool. kinds: (E, N) types.
        places, health: (E, N+M, 2) and (E, N+M), shares of full health; allies first.
        alive: (E, N) bool. over, terminated, won: (E,) bool; terminated where a side is dead, over
            also where time is up.
    """

    def __init__(self, seeds: Sequence[int] | np.ndarray, map: str = "3m") -> None:
        self.facts, begin, self._step = compile_map(map)
        self.seeds = np.asarray(seeds, np.uint32)
        self.time = 0
        E = len(seeds)
        self.over = np.zeros(E, bool)
        self.terminated = np.zeros(E, bool)
        self.won = np.zeros(E, bool)
        self.alive = np.ones((E, self.facts.allies), bool)
        self._state, view = begin(self.seeds)
        self._update(view)

    def _update(self, view: "View") -> None:
        arrays = [np.asarray(x) for x in view]
        self.observations, self.masks, self.places, self.health, self.kinds, done = arrays
        going = ~self.over
        N = self.facts.allies
        ours = self.health[:, :N] > 0  # (E, N)
        we_live = ours.any(1)  # (E,)
        they_live = (self.health[:, N:] > 0).any(1)  # (E,)
        self.alive = np.where(going[:, None], ours, self.alive)
        self.terminated |= going & ~(we_live & they_live)
        self.won |= going & we_live & ~they_live
        self.over |= done

    @property
    def acting(self) -> np.ndarray:
        """Units that act next: (E, N) bool"""
        return self.alive & ~self.over[:, None]

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Take the actions (E, N) of the units that are `acting`.

        Returns:
            (E,) reward of each team, 0 where the battle was over.
        """
        going = ~self.over
        self.time += 1
        actions = np.where(self.acting, actions, STOP).astype(np.int32)
        self._state, view, gains = self._step(self.seeds, np.int32(self.time), self._state, actions)
        self._update(view)
        return np.where(going, np.asarray(gains), 0)


class Teacher:
    """Scripted players of E battles. Each unit needs its own observation and action mask alone.

    expert: attacks the enemy in range with the least health, so that fire is focused. medium: the
    closest one. With none in range, both walk to the closest in sight, or to the point opposite to
    their start. random: uniform over the allowed actions.

    Args:
        kinds: (E,) indices into TEACHERS, or one for all.
        noise: share of actions that are random, so that a log covers more than the teacher's own
            states.
    """

    def __init__(
        self,
        world: Smax,
        kinds: int | np.ndarray,
        rng: np.random.Generator,
        *,
        noise: float = 0.0,
    ) -> None:
        self.kinds = np.broadcast_to(kinds, len(world.alive))
        self.rng = rng
        self.noise = np.where(self.kinds == TEACHERS.index("random"), 1.0, noise)
        self.goal = SIZE - self.place(world)

    def place(self, world: Smax) -> np.ndarray:
        """(E, N, 2) own positions, as observed."""
        return world.observations[..., -OWN + 1 : -OWN + 3] * SIZE

    def act(self, world: Smax) -> np.ndarray:
        """(E, N) int, each allowed."""
        E, N = world.alive.shape
        enemies = world.observations[..., UNIT * (N - 1) : -OWN].reshape(E, N, -1, UNIT)
        is_visible = enemies[..., 0] > 0  # neither dead nor out of sight
        distance = np.where(is_visible, np.linalg.norm(enemies[..., 1:3], axis=-1), np.inf)
        in_range = world.masks[..., STOP + 1 :]
        attack = STOP + 1 + self._target(world, enemies, distance, in_range)
        walk = self._walk(world, enemies, distance)
        proposed = np.where(in_range.any(-1), attack, walk)
        random = self.rng.random((E, N)) < self.noise[:, None]
        uniform = np.where(world.masks, self.rng.random(world.masks.shape), -1).argmax(-1)
        proposed = np.where(random, uniform, proposed)
        return np.where(are_allowed(world.masks, proposed), proposed, STOP)

    def _target(
        self, world: Smax, enemies: np.ndarray, distance: np.ndarray, in_range: np.ndarray
    ) -> np.ndarray:
        """Return the enemy in range to attack, (E, N) int, of views (E, N, M, UNIT), distances and
        whether each is in range (E, N, M).
        """
        full_health = np.array(world.facts.health)
        type_of_enemy = enemies[..., -len(full_health) :]  # one-hot
        health = enemies[..., 0] * (type_of_enemy @ full_health)
        is_expert = np.asarray(self.kinds == TEACHERS.index("expert"))[:, None, None]
        cost = np.where(is_expert, health, distance)
        target: np.ndarray = np.where(in_range, cost, np.inf).argmin(-1)
        return target

    def _walk(self, world: Smax, enemies: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Return the step to the closest enemy in sight, else to the goal, (E, N) int; see
        `_target`.
        """
        closest = distance.argmin(-1)[..., None, None]
        to_enemy = np.take_along_axis(enemies[..., 1:3], closest, 2)[..., 0, :]
        in_sight = np.isfinite(distance).any(-1, keepdims=True)
        way = np.where(in_sight, to_enemy, self.goal - self.place(world))
        step: np.ndarray = (way @ MOVES.T).argmax(-1)
        return step


def are_allowed(masks: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Return whether each action is allowed: (E, N, C) bool, (E, N) int -> (E, N) bool"""
    return np.asarray(np.take_along_axis(masks, actions[..., None], -1)[..., 0])
