"""N episodes played in lock-step by one player."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.protocols import Begin, Env, Player
from decisionllm.schema import Episode, Targets

if TYPE_CHECKING:
    from decisionllm.baselines.d3rlpy import Baseline
    from decisionllm.policy.policy import Policy

Step = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # observations (N, S), actions (N, A), rewards (N,)


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
    observations = np.array(env.reset(seed), np.float32)  # (N, S)
    N = len(env.tasks)
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
        if masks is not None:
            masks = masks[running]
        chosen = np.asarray(player.act(observations[running], rewards, masks), np.float32)
        actions = np.zeros((N, chosen.shape[1]), np.float32)
        actions[running] = chosen
        after, gains, ended, truncated = checked_step(env, actions)
        steps.append((observations, actions, np.array(gains, np.float32)))
        observations = np.array(after, np.float32)
        lengths[running] += 1
        terminated[running] |= ended[running]
        over = (ended | truncated)[running]
        final[running[over]] = observations[running[over]]
        if over.any() and not over.all():
            player.select(~over)
        running = running[~over]
        rewards = gains[running]
        progress(1)

    return to_episodes(env, steps, lengths, terminated, final)


def to_episodes(
    env: Env, steps: Sequence[Step], lengths: np.ndarray, terminated: np.ndarray, final: np.ndarray
) -> list[Episode]:
    """The N episodes of a rollout.

    Args:
        env: after the last step.
        steps: of all episodes, ended or not.
        lengths: (N,) steps of each.
        terminated: (N,) bool, ended by the task.
        final: (N, S) the observations after the last step of each.
    """
    seen, taken, received = (np.stack(column, 1) for column in zip(*steps, strict=True))
    groups = np.arange(len(lengths)) if env.groups is None else env.groups
    outcomes = env.outcomes()
    episodes = []
    for i, n in enumerate(lengths):
        episode = Episode(
            seen[i, :n],
            taken[i, :n],
            received[i, :n],
            task=env.tasks[i],
            group=int(groups[i]),
            final_observation=final[i],
            terminated=bool(terminated[i]),
            truncated=not terminated[i],
            outcome={name: values[i] for name, values in outcomes.items()},
        )
        episodes.append(episode)
    return episodes


def checked_step(
    env: Env, actions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`Env.step`, whose results are as the protocol says.

    Raises:
        ValueError: they are not.
    """
    result = env.step(actions)
    if not isinstance(result, tuple) or len(result) != 4:
        wanted = "observations, rewards, terminated, truncated"
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(f"env.step: expected {wanted}, got {got}")
    observations, rewards, terminated, truncated = map(np.asarray, result)
    N = len(actions)
    if observations.ndim != 2 or len(observations) != N:
        refuse_shape("observations", f"({N}, S)", observations)
    for name, each in {
        "rewards": rewards,
        "terminated": terminated,
        "truncated": truncated,
    }.items():
        if each.shape != (N,):
            refuse_shape(name, f"({N},)", each)
    for name, flags in {"terminated": terminated, "truncated": truncated}.items():
        if flags.dtype != bool:
            raise ValueError(f"env.step: expected {name} of bool, got {flags.dtype}")
    return observations, rewards, terminated, truncated


def refuse_shape(name: str, wanted: str, got: np.ndarray) -> None:
    """Raise the ValueError of a result of `Env.step` that has another shape."""
    raise ValueError(f"env.step: expected {name} of shape {wanted}, got {got.shape}")


def begin_in(
    policy: "Policy | Baseline", env: Env, target_returns: Targets, seed: int, tasks: Sequence[str]
) -> Player:
    """A session of a `Policy`, or of a baseline, in an environment.

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
    """The player that draws its actions uniformly within -1 .. 1."""

    def begin(tasks: Sequence[str]) -> ScriptedPlayer:
        rng = np.random.default_rng(seed)

        def draw(observations: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return rng.uniform(-1, 1, (len(observations), action_dim))

        return ScriptedPlayer(draw, tasks)

    return begin
