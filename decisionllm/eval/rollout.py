"""Rollouts: one player plays N episodes in lock-step."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.files import explain_errors
from decisionllm.protocols import Begin, Env, Player
from decisionllm.schema import Episode, Targets, is_numeric, raise_for_first

if TYPE_CHECKING:
    from decisionllm.baselines.d3rlpy import Baseline
    from decisionllm.policy.policy import Policy

LARGE = 1e37  # numbers whose squares add up to less are finite in float32
# observations (N, S), actions (N, A), rewards (N,), action masks (N, C) or None
Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


def rollout(
    begin: Begin,
    env: Env,
    *,
    seed: int,
    progress: Callable[[int], None] = lambda steps: None,
    observation_dim: int = 0,
) -> list[Episode]:
    """Play N episodes to their ends.

    Args:
        begin: makes a player for the env's task texts, see `protocols.Player`.
        env: see `protocols.Env`.
        seed: of the env's starts.
        progress: called with 1 after each step.
        observation_dim: S of the player; 0: any.

    Returns:
        N episodes, of the type that training reads, with the env's outcomes.

    Raises:
        ValueError: the env's observations have another size than the player's.
    """
    observations = checked_reset(env, seed)  # (N, S)
    N, S = observations.shape
    check_shape(observations, N, observation_dim)
    player = begin(env.tasks)
    rewards = None
    running = np.arange(N)
    terminated = np.zeros(N, bool)
    lengths = np.zeros(N, int)
    final = np.zeros_like(observations)
    steps: list[Step] = []  # of all N, ended or not
    while len(running):
        masks = env.action_masks
        allowed = masks
        if masks is not None:
            masks = np.array(masks)  # a copy: the env may write the next ones into its own
            allowed = masks[running]
        taken = np.asarray(player.act(observations[running], rewards, allowed), np.float32)
        actions = np.zeros((N, taken.shape[1]), np.float32)  # zeros of episodes that ended
        actions[running] = taken
        after, new_rewards, ended, truncated = checked_step(env, actions, S, running)
        steps.append((observations, actions, np.array(new_rewards, np.float32), masks))
        observations = after
        lengths[running] += 1
        terminated[running] |= ended[running]
        over = (ended | truncated)[running]
        final[running[over]] = observations[running[over]]
        if over.any() and not over.all():
            player.select(~over)
        running = running[~over]
        rewards = new_rewards[running]
        progress(1)

    return to_episodes(env, steps, lengths, terminated, final)


def to_episodes(
    env: Env, steps: Sequence[Step], lengths: np.ndarray, terminated: np.ndarray, final: np.ndarray
) -> list[Episode]:
    """Return the N episodes of a rollout.

    Args:
        env: after the last step.
        steps: of all episodes, ended or not.
        lengths: (N,) steps of each.
        terminated: (N,) bool, ended by the task.
        final: (N, S) the observations after the last step of each.
    """
    observations, actions, rewards, masks_by_step = zip(*steps, strict=True)
    seen = np.stack(observations, 1)
    taken = np.stack(actions, 1)
    received = np.stack(rewards, 1)
    masks = stack_masks(masks_by_step)
    groups = np.arange(len(lengths)) if env.groups is None else env.groups
    outcomes = env.outcomes()
    episodes = []
    for i, n in enumerate(lengths):
        episode = Episode(
            seen[i, :n],
            taken[i, :n],
            received[i, :n],
            action_masks=None if masks is None else masks[i, :n],
            task=env.tasks[i],
            group=int(groups[i]),
            final_observation=final[i],
            terminated=bool(terminated[i]),
            truncated=not terminated[i],
            outcome={name: values[i] for name, values in outcomes.items()},
        )
        episodes.append(episode)
    return episodes


def stack_masks(masks_by_step: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the action masks of N episodes (N, T, C); a step without masks allows all. None: no step
    has masks.
    """
    masks = [step for step in masks_by_step if step is not None]
    if not masks:
        return None
    everything = np.ones_like(masks[0], dtype=bool)
    return np.stack([everything if step is None else step for step in masks_by_step], 1)


def checked_reset(env: Env, seed: int) -> np.ndarray:
    """Call `Env.reset`, and return its observations (N, S) as float32, a copy.

    Raises:
        ValueError: they are not as the protocol says.
    """
    result = env.reset(seed)
    if isinstance(result, tuple):
        got = f"a tuple of {len(result)}"
        raise ValueError(f"{_place(env, 'reset')}: expected observations alone, got {got}")
    place = _place(env, "reset")
    rows = np.arange(len(env.tasks))
    return _observations(place, result, (len(rows), None), rows)


def checked_step(
    env: Env, actions: np.ndarray, size: int, running: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Call `Env.step`, and return its results; observations are float32, a copy.

    Args:
        env: that takes the step.
        actions: (N, A).
        size: S, numbers of an observation at the start.
        running: (M,) rows of the episodes that have not ended before; what the others return is
            ignored.

    Raises:
        ValueError: they are not as the protocol says.
    """
    place = _place(env, "step")
    result = env.step(actions)
    if not isinstance(result, tuple) or len(result) != 4:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"{place}: expected observations, rewards, terminated, truncated, got {got}"
        )
    N = len(actions)
    observations = _observations(place, result[0], (N, size), running)
    columns = []
    for name, values in zip(("rewards", "terminated", "truncated"), result[1:], strict=True):
        column = np.asarray(values)
        if column.shape != (N,):
            refuse_shape(place, name, f"({N},)", column)
        columns.append(column)
    rewards, terminated, truncated = columns
    if not is_numeric(rewards.dtype):
        raise ValueError(f"{place}: expected rewards of numbers, got {rewards.dtype}")
    if not are_surely_finite(rewards):
        with np.errstate(over="ignore"):
            unknown = ~np.isfinite(rewards[running].astype(np.float32))
        finite = "expected finite rewards, got {} in episode {}"
        raise_for_first(f"{place}: ", unknown, finite, rewards[running], running)
    for name, flags in {"terminated": terminated, "truncated": truncated}.items():
        if flags.dtype != bool:
            raise ValueError(f"{place}: expected {name} of bool, got {flags.dtype}")
    return observations, rewards, terminated, truncated


def _place(env: Env, method: str) -> str:
    """Name a method of an environment, to begin a message with."""
    return f"env {env.name}, {method}" if env.name else f"env.{method}"


def _observations(
    place: str, values: object, shape: tuple[int, int | None], running: np.ndarray
) -> np.ndarray:
    """Return observations as float32, a copy.

    Args:
        place: to begin a message with.
        values: that the environment returned.
        shape: (N, S); S of None: any.
        running: (M,) rows that are finite.

    Raises:
        ValueError: they are not numbers of this shape, or not finite.
    """
    observations = values
    if not isinstance(observations, np.ndarray):
        with explain_errors(f"{place}: expected observations as one array", ValueError, TypeError):
            observations = np.asarray(values)
    N, size = shape
    if observations.ndim != 2 or len(observations) != N:
        refuse_shape(place, "observations", f"({N}, S)", observations)
    if size not in (None, observations.shape[1]):
        refuse_shape(place, "observations", f"({N}, {size}) as at the start", observations)
    if not is_numeric(observations.dtype):
        raise ValueError(f"{place}: expected observations of numbers, got {observations.dtype}")
    if are_surely_finite(observations):
        return observations.astype(np.float32)
    with np.errstate(over="ignore"):
        rows = observations.astype(np.float32)
    episode, column = np.broadcast_arrays(running[:, None], np.arange(rows.shape[1]))
    finite = "expected finite observations, got {} in episode {}, number {}"
    unknown = ~np.isfinite(rows[running])
    raise_for_first(f"{place}: ", unknown, finite, observations[running], episode, column)
    return rows


def are_surely_finite(numbers: np.ndarray) -> bool:
    """Return whether the squares of numbers have a sum within float32: the short way at each step;
    of others some may not be finite.
    """
    flat = numbers.reshape(-1)
    return bool(np.dot(flat, flat) < LARGE)


def refuse_shape(place: str, name: str, expected: str, got: np.ndarray) -> None:
    """Raise a ValueError about a result of another shape."""
    raise ValueError(f"{place}: expected {name} of shape {expected}, got {got.shape}")


def begin_session(
    policy: "Policy | Baseline", env: Env, target_returns: Targets, seed: int, tasks: Sequence[str]
) -> Player:
    """Begin a session of a `Policy`, or of a baseline, in an environment.

    Its samples are drawn from the seed, whatever was played before. The groups are read here, since
    a reset may change them.
    """
    policy.reseed(seed)
    player: Player = policy.begin(
        tasks, horizon=env.horizon, target_returns=target_returns, groups=env.groups
    )
    return player


def check_shape(observations: np.ndarray, N: int, size: int) -> None:
    """Raise a ValueError unless observations are (N, size), or (N, any) for size 0."""
    if observations.shape != (N, size or observations.shape[-1]):
        raise ValueError(
            f"env: expected observations of shape ({N}, {size or 'S'}), N episodes and the size "
            f"that this policy was trained on, got {observations.shape}; evaluate it in an "
            "environment like that of its data"
        )


class ScriptedPlayer(Player):
    """A player without memory.

    Args:
        choose: observations (M, S) of the running episodes, their numbers (M,) -> actions (M, A).
        tasks: N task texts.
    """

    def __init__(
        self,
        choose: Callable[[np.ndarray, np.ndarray], np.ndarray],
        tasks: Sequence[str],
    ) -> None:
        self.choose = choose
        self.rows = np.arange(len(tasks))

    def act(
        self,
        observations: np.ndarray,
        rewards: np.ndarray | None = None,
        action_masks: np.ndarray | None = None,
    ) -> np.ndarray:
        return self.choose(observations, self.rows)

    def select(self, rows: np.ndarray) -> None:
        self.rows = self.rows[rows]


def uniform_player(seed: int, action_dim: int) -> Begin:
    """Return the player that draws its actions uniformly within -1 .. 1."""

    def begin(tasks: Sequence[str]) -> ScriptedPlayer:
        rng = np.random.default_rng(seed)

        def draw(observations: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return rng.uniform(-1, 1, (len(observations), action_dim))

        return ScriptedPlayer(draw, tasks)

    return begin
