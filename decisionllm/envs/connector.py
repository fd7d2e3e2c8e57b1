"""Connector, a routing game on a grid, E boards at once: each agent draws a path to its target, and no path may cross another.

The environment is `Connector` of jumanji 1.1 (Apache-2.0), which is called here and not rewritten. An action is to stay, up, right,
down or left. A cell that was entered stays taken, so that a careless agent cuts off the others; of two that enter one cell at once,
one stays where it is. An agent has ended where it is connected or can move no more. Each is paid 1 for its connection, and loses
0.03 for each step before; a team has the mean. It wins where all are connected.

Boards are jumanji's, drawn by random walks (`walk`), or lanes of three rows in which two agents face each other with their targets
behind them (`facing`): one must pass above and the other below. Both orders are equally good, and both must choose at once, so that
agents who choose independently fail in half of the lanes.

Letters: E boards of G x G cells, N agents, W = 2G - 1.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.files import explained

MOVES = 5  # stay, up, right, down, left
TRIES = 4  # plans of which the expert takes the best
TEACHERS = ("expert", "random")
BOARDS = ("facing", "walk")


@cache
def compiled(boards: str, grid: int, agents: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The start and the step of E boards, each compiled once for every E."""
    with explained("Connector needs jumanji: pip install 'decisionllm[connector]'", ImportError, raised=ImportError):
        import jax
        from jax import numpy as jnp
        from jumanji.environments.routing.connector.env import Connector as Board
        from jumanji.environments.routing.connector.generator import RandomWalkGenerator
        from jumanji.environments.routing.connector.types import Agent, State
        from jumanji.environments.routing.connector.utils import get_action_masks, get_position, get_target

    class Facing:
        """Lanes with two agents each, turned by a multiple of 90 degrees, agents in random order."""

        grid_size, num_agents = grid, agents

        def __call__(self, key: Any) -> Any:
            where, turn, order = jax.random.split(key, 3)
            lane, number = jnp.divmod(jax.random.permutation(order, agents), 2)  # of each agent, and which of the two it is
            left = jax.random.randint(where, (agents // 2,), 0, grid - 3)[lane]  # columns from here on: target, agents, target
            columns = jnp.stack([left + 1 + number, left + 3 - 3 * number])  # of the agents, and of their targets
            row, column = jnp.broadcast_to(3 * lane + 1, columns.shape), columns
            turns = jax.random.randint(turn, (), 0, 4)
            row, column = jax.lax.fori_loop(0, turns, lambda _, at: (at[1], grid - 1 - at[0]), (row, column))
            (start, target), number = jnp.stack([row, column], -1), jnp.arange(agents)
            cells = jnp.zeros((grid, grid), jnp.int32)
            cells = cells.at[tuple(start.T)].set(get_position(number)).at[tuple(target.T)].set(get_target(number))
            each = jax.vmap(Agent)(id=number, start=start, target=target, position=start)
            masks = get_action_masks(each, cells)
            return State(key=key, grid=cells, step_count=jnp.array(0, jnp.int32), agents=each, action_mask=masks)

    made: Any = Facing() if boards == "facing" else RandomWalkGenerator(grid_size=grid, num_agents=agents)
    env = Board(made, time_limit=horizon(grid))

    def begin(seed: Any) -> Any:
        return env.reset(jax.random.PRNGKey(seed))[0]

    def step(state: Any, actions: Any) -> tuple[Any, Any]:
        state, timestep = env.step(state, actions)
        return state, timestep.reward.mean()

    return jax.jit(jax.vmap(begin)), jax.jit(jax.vmap(step))


def horizon(grid: int) -> int:
    """Most steps of a board."""
    return 3 * grid


class Connector:
    """E boards side by side, a `World` of `team_worlds`. Every board can be solved.

    Args:
        seeds: (E,); what happens on a board depends on its seed and the actions alone.
        boards: one of BOARDS.
        grid, agents: G and N; facing: two agents a lane, at most grid // 3 lanes.

    Attributes:
        taken: (E, G, G) bool, cells that hold a path, an agent or a target.
        positions, targets: (E, N, 2) row and column.
    """

    def __init__(self, seeds: Sequence[int] | np.ndarray, boards: str = "facing", grid: int = 6, agents: int = 4) -> None:
        one_of("boards", boards, BOARDS)
        if boards == "facing" and not (agents % 2 == 0 and 0 < agents <= grid // 3 * 2):
            most = f"{grid // 3 * 2} on facing boards of {grid} cells"
            raise ValueError(f"agents: expected an even number up to {most}, got {agents}")
        begin, self._step = compiled(boards, grid, agents)
        self.time = 0
        self._update(begin(np.asarray(seeds, np.uint32)))

    def _update(self, state: Any) -> None:
        self._state, self.taken, self.masks = state, np.asarray(state.grid) > 0, np.asarray(state.action_mask)
        self.positions, self.targets = np.asarray(state.agents.position), np.asarray(state.agents.target)
        connected = np.asarray((self.positions == self.targets).all(-1))
        self.alive = np.asarray(self.masks[..., 1:].any(-1))
        self.connected = connected.mean(1)
        self.won, self.terminated = np.asarray(connected.all(1)), np.asarray(~self.alive.any(1))
        self.over = self.terminated | (self.time >= horizon(self.taken.shape[1]))

    @property
    def observations(self) -> np.ndarray:
        """(E, N, W*W + 2 + 5(N-1)) float32: the taken cells with the agent in their midst, its target, and for each other agent where
        it and its target are, and a 1; offsets in cells, over G."""
        (E, N), G = self.alive.shape, self.taken.shape[1]
        walled = np.pad(self.taken, ((0, 0), (G - 1, G - 1), (G - 1, G - 1)), constant_values=True)
        row, column = (self.positions[..., k, None] + np.arange(2 * G - 1) for k in (0, 1))
        cells = walled[np.arange(E)[:, None, None, None], row[..., None], column[:, :, None]].reshape(E, N, -1)
        offsets = (np.concatenate([self.positions, self.targets], -1)[:, None] - np.tile(self.positions, 2)[:, :, None]) / G
        others = np.concatenate([offsets, np.ones((E, N, N, 1))], -1)[:, ~np.eye(N, dtype=bool)].reshape(E, N, -1)
        return np.concatenate([cells, (self.targets - self.positions) / G, others], -1).astype(np.float32)

    def step(self, actions: np.ndarray) -> np.ndarray:
        """(E, N) actions -> the reward of each team (E,), 0 where the board was over."""
        going, self.time = ~self.over, self.time + 1
        state, gains = self._step(self._state, np.where(self.alive & going[:, None], actions, 0).astype(np.int32))
        self._update(state)
        return np.asarray(np.where(going, np.asarray(gains), 0))


def plan(world: Connector, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Shortest paths for one agent after another, in random order, each around the cells of those before it; ties at random.

    Returns:
        The first move of each agent, 0 without a path (E, N), and the cost of the plan: cells, and 1000 for each agent without
        a path (E,).
    """
    (E, N), W = world.alive.shape, world.taken.shape[1] + 2
    free = np.pad(~world.taken, ((0, 0), (1, 1), (1, 1))).reshape(E, -1)
    each, around = np.arange(E), np.array([-W, 1, W, -1])  # up, right, down, left in the flat board
    place, goal = (((x + 1) * (W, 1)).sum(-1) for x in (world.positions, world.targets))
    moves, cost = np.zeros((E, N), int), np.zeros(E)
    for agent in rng.random((E, N)).argsort(1).T:
        here, end, acting = place[each, agent], goal[each, agent], world.alive[each, agent]
        far = np.full(free.shape, np.inf)
        far[each, end] = 0
        while True:
            nearer = np.minimum(far, np.where(free, 1 + np.min([np.roll(far, -k, 1) for k in around], 0), np.inf))
            if (nearer == far).all():
                break
            far = nearer
        going, first = acting & np.isfinite(far[each[:, None], here[:, None] + around].min(1)), True
        cost += 1000.0 * (acting & ~going)
        while going.any():
            to = (far[each[:, None], here[:, None] + around] + 0.5 * rng.random((E, 4))).argmin(1)
            if first:
                moves[each[going], agent[going]], first = 1 + to[going], False
            here = np.where(going, here + around[to], here)
            cost += going
            free[each[going], here[going]] = False
            going = going & (here != end)
    return moves, cost


class Teacher:
    """Scripted players of E boards. expert: the first moves of the best of TRIES plans, drawn again at every step. random: uniform
    over the allowed actions.

    Args:
        kinds: (E,) indices into TEACHERS, or one for all.
        noise: share of the actions that are random.
    """

    def __init__(self, world: Connector, kinds: int | np.ndarray, rng: np.random.Generator, *, noise: float = 0.0) -> None:
        self.rng = rng
        self.noise = np.where(np.broadcast_to(kinds, len(world.over)) == TEACHERS.index("random"), 1.0, noise)

    def act(self, world: Connector) -> np.ndarray:
        """(E, N) int, each allowed."""
        moves, costs = (np.stack(parts) for parts in zip(*(plan(world, self.rng) for _ in range(TRIES)), strict=True))
        best = moves[costs.argmin(0), np.arange(len(world.over))]
        random = self.rng.random(best.shape) < self.noise[:, None]
        return np.asarray(np.where(random, np.where(world.masks, self.rng.random(world.masks.shape), -1).argmax(-1), best))
