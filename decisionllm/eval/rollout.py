"""N episodes played in lock-step by one player."""

from collections.abc import Callable, Sequence

import numpy as np

from decisionllm.protocols import Begin, Env, Player
from decisionllm.schema import Episode


def rollout(
    begin: Begin, env: Env, *, seed: int, progress: Callable[[int], None] = lambda steps: None, observation_dim: int = 0
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
    observations = np.array(env.reset(seed), np.float32)
    N = len(env.tasks)
    if observations.shape != (N, observation_dim or observations.shape[-1]):
        wanted = (
            f"observations of shape ({N}, {observation_dim or 'S'}), N episodes and the size that this policy was trained on"
        )
        remedy = "evaluate it in an environment like that of its data"
        raise ValueError(f"env: expected {wanted}, got {observations.shape}; {remedy}")
    player, rewards, running = begin(env.tasks), None, np.arange(N)
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # of all N, ended or not
    lengths, terminated, final = np.zeros(N, int), np.zeros(N, bool), np.zeros_like(observations)
    while len(running):
        masks = env.action_masks
        chosen = np.asarray(player.act(observations[running], rewards, None if masks is None else masks[running]), np.float32)
        actions = np.zeros((N, chosen.shape[1]), np.float32)
        actions[running] = chosen
        after, gains, ended, truncated = env.step(actions)
        steps.append((observations, actions, np.array(gains, np.float32)))
        lengths[running] += 1
        terminated[running] |= ended[running]
        over = (ended | truncated)[running]
        observations = np.array(after, np.float32)
        final[running[over]] = observations[running[over]]
        if over.any() and not over.all():
            player.select(~over)
        running = running[~over]
        rewards = gains[running]
        progress(1)
    seen, taken, received = (np.stack(column, 1) for column in zip(*steps, strict=True))  # (N, steps, ...)
    groups, outcomes = np.arange(N) if env.groups is None else env.groups, env.outcomes()
    return [
        Episode(
            seen[i, :n], taken[i, :n], received[i, :n], task=env.tasks[i], group=int(groups[i]), final_observation=final[i],
            terminated=bool(terminated[i]), truncated=not terminated[i], outcome={name: x[i] for name, x in outcomes.items()},
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


class ScriptedPlayer(Player):
    """A player without memory. choose: observations (M, S) of the running episodes, and their numbers (M,) -> actions (M, A)."""

    def __init__(self, choose: Callable[[np.ndarray, np.ndarray], np.ndarray], tasks: Sequence[str]) -> None:
        self.choose, self.rows = choose, np.arange(len(tasks))

    def act(
        self, observations: np.ndarray, rewards: np.ndarray | None = None, action_masks: np.ndarray | None = None
    ) -> np.ndarray:
        return self.choose(observations, self.rows)

    def select(self, rows: np.ndarray) -> None:
        self.rows = self.rows[rows]
