"""Logs of simulated worlds: teachers play worlds drawn from a seed, each step is rows of a log."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.randomness import derive_seeds
from decisionllm.schema import Json
from decisionllm.teams.formats.team_log import Log, concat_tables

# Logs draw their worlds with seeds from here on; evaluations stay below
SEEDS = 1_000_000


class World(Protocol):
    """E worlds of N agents side by side, in lock-step. One that is over stays as it ended.

    Attributes:
        time: steps that were played.
        observations, masks: (E, N, S) float32, and (E, N, C) bool, the allowed discrete actions.
        alive: (E, N) agents that have not ended. over, terminated, won: (E,) bool; over also where
            time is up.
    """

    time: int
    alive: np.ndarray
    over: np.ndarray
    won: np.ndarray

    @property
    def observations(self) -> np.ndarray: ...

    @property
    def masks(self) -> np.ndarray: ...

    @property
    def terminated(self) -> np.ndarray: ...

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Take the actions (E, N) of the agents that are alive.

        Returns:
            (E,) reward of each team, 0 where the world was over.
        """
        ...


W = TypeVar("W", bound=World)  # the worlds of a game
PlayedWorld = TypeVar("PlayedWorld", bound=World, contravariant=True)


class Controller(Protocol[PlayedWorld]):
    """Scripted players of E worlds."""

    def act(self, world: PlayedWorld) -> np.ndarray:
        """(E, N) int, each allowed."""
        ...


@dataclass(frozen=True)
class Game(Generic[W]):
    """A kind of world, what is known of it, and its scripted players: what its logs and its
    evaluation share.

    Attributes:
        begin: seeds (E,) -> worlds.
        describe: worlds -> meta of a log of them, without the facts of the log.
        teachers: names of the scripted players.
        teacher: (worlds, kinds, rng, noise=) -> players; kinds (E,), or one for all, are indices
            into `teachers`.
        types: worlds -> (E, N) index of each agent's type in meta["types"]; None: there is one
            type.
    """

    begin: Callable[[np.ndarray], W]
    describe: Callable[[W], Json]
    teachers: Sequence[str]
    teacher: Callable[..., Controller[W]]
    types: Callable[[W], np.ndarray] | None = None


def generate(
    game: Game[W], log: str, *, groups: int = 2000, noise: float = 0.0, seed: int = 0
) -> Log:
    """Play the worlds of a log.

    Args:
        game: that is played.
        log: one of its teachers, or `mixed`: an equal share of the groups each.
        groups, noise, seed: number of worlds, share of the actions that are random, and of all
            draws.
    """
    teachers = list(game.teachers)
    check_one_of("dataset.log", log, (*teachers, "mixed"))
    if not (1 <= groups <= SEEDS and 0 <= noise <= 1):
        raise ValueError(
            f"dataset: expected groups of 1 .. {SEEDS} and noise of 0 .. 1, got {groups} and "
            f"{noise}"
        )
    rng = np.random.default_rng(seed)
    kinds = np.arange(groups) % len(teachers)
    if log == "mixed":
        kinds = rng.permutation(kinds)
    else:
        kinds[:] = teachers.index(log)
    world = game.begin(derive_seeds(seed, groups, first=SEEDS))
    player = game.teacher(world, kinds, rng, noise=noise)
    steps: list[dict[str, np.ndarray]] = []
    agents: list[dict[str, np.ndarray]] = []
    while not world.over.all():
        running = ~world.over
        acting = world.alive & running[:, None]
        rows = observe_agents(game, world, acting, kinds)
        time = world.time
        actions = player.act(world)
        rewards = world.step(actions)
        agents.append(rows | {"action": actions[acting], "terminated": ~world.alive[acting]})
        clock = {
            "group": np.arange(groups),
            "step": np.full(groups, time),
            "reward": rewards,
            "won": world.won,
            "terminated": world.terminated,
            "truncated": world.over & ~world.terminated,
        }
        steps.append({name: column[running] for name, column in clock.items()})
    meta = game.describe(world) | {
        "returns": "team",
        "behaviours": teachers,
        "generator": {"log": log, "noise": noise, "seed": seed},
    }
    return Log(meta, concat_tables(steps), concat_tables(agents))


def observe_agents(
    game: Game[W], world: W, acting: np.ndarray, kinds: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns of the agents that act next, but for what they do.

    Args:
        game, world: that is played.
        acting: (E, N) bool.
        kinds: (E,) teacher of each world.
    """
    group, agent = np.nonzero(acting)
    rows = {
        "group": group,
        "step": np.full(len(group), world.time),
        "agent": agent,
        "behaviour": kinds[group],
        "observation": world.observations[acting],
        "available": world.masks[acting],
    }
    if game.types:
        rows["agent_type"] = game.types(world)[acting]
    return rows
