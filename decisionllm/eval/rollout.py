"""N episodes played in lock-step by one player."""

from collections.abc import Callable

import numpy as np

from decisionllm.protocols import Begin, Env
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
    observations = np.asarray(env.reset(seed), np.float32)
    N = len(env.tasks)
    if observations.shape != (N, observation_dim or observations.shape[-1]):
        raise ValueError(
            f"env: expected observations of shape ({N}, {observation_dim or 'S'}), N episodes and the size that this policy was "
            f"trained on, got {observations.shape}; evaluate it in an environment like that of its data"
        )
    player, rewards, running = begin(env.tasks), None, np.arange(N)
    log: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in range(N)] for name in ("observations", "actions", "rewards")}
    terminated, final = np.zeros(N, bool), np.zeros_like(observations)
    while len(running):
        masks = env.action_masks
        masks = None if masks is None else masks[running]
        chosen = np.asarray(player.act(observations[running], rewards, masks), np.float32)
        actions = np.zeros((N, chosen.shape[1]), np.float32)
        actions[running] = chosen
        after, gains, ended, truncated = env.step(actions)
        for i in running:
            log["observations"][i].append(observations[i])
            log["actions"][i].append(actions[i])
            log["rewards"][i].append(gains[i])
        terminated[running] |= ended[running]
        over = (ended | truncated)[running]
        observations = np.asarray(after, np.float32)
        final[running[over]] = observations[running[over]]
        if over.any() and not over.all():
            player.select(~over)
        running = running[~over]
        rewards = gains[running]
        progress(1)
    groups = np.arange(N) if env.groups is None else env.groups
    outcomes = env.outcomes()
    return [
        Episode(
            **{name: np.array(log[name][i], np.float32) for name in log},
            terminated=bool(terminated[i]), truncated=not terminated[i], task=env.tasks[i], group=int(groups[i]),
            final_observation=final[i], outcome={name: values[i] for name, values in outcomes.items()},
        )
        for i in range(N)
    ]  # fmt: skip


class RandomPlayer:
    """Draws the actions of every step anew. draw: number of episodes -> actions (M, A)."""

    def __init__(self, draw: Callable[[int], np.ndarray]) -> None:
        self.draw = draw

    def act(
        self, observations: np.ndarray, rewards: np.ndarray | None = None, action_masks: np.ndarray | None = None
    ) -> np.ndarray:
        return self.draw(len(observations))

    def select(self, rows: np.ndarray) -> None:
        pass
