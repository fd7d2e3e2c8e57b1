"""The environment that a Minari dataset names for its evaluation, N copies of it, scored by the dataset's own references."""

import numpy as np

from decisionllm.datasets import minari as adapter
from decisionllm.eval.report import normalised
from decisionllm.registry import register


@register("env", "minari", minari_id="${dataset.minari_id}", goal="${dataset.goal}", text="${text}")
class MinariEnv:
    """N Gymnasium environments, stepped one by one; an ended one waits for the others."""

    def __init__(self, num_episodes, *, minari_id: str, goal: str = "fixed", text: str = "none"):
        from gymnasium.error import Error

        self.dataset, self.goal, self.text, self.protocol = adapter.find(minari_id), goal, text, "standard"
        try:
            self.envs = [self.dataset.recover_environment(eval_env=True) for _ in range(num_episodes)]
        except (ValueError, ImportError, AttributeError, Error) as error:
            raise ValueError(
                f"{minari_id}: its environment could not be made ({error}); env=none trains without one"
            ) from error
        self.horizon = self.envs[0].spec.max_episode_steps
        if self.horizon is None:
            raise ValueError(f"{minari_id}: expected an environment with a time limit (max_episode_steps), it has none")
        self.tasks = [adapter.description(self.dataset) if text == "constant" else ""] * num_episodes
        metadata = self.dataset.storage.metadata
        low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
        self.reference = (low, high) if low is not None and high is not None else (0.0, 100.0)  # without them, the raw return

    def reset(self, seed):
        self.seen = [env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]
        self.over = np.zeros(len(self.envs), bool)
        return adapter.shown(self.dataset, stack(self.seen), self.goal)

    def step(self, actions):
        """(N, A) -> observations (N, S), rewards (N,), ended (N,), truncated (N,)"""
        rewards, ended, truncated = (np.zeros(len(self.envs), kind) for kind in (float, bool, bool))
        space = self.envs[0].action_space
        for i in np.flatnonzero(~self.over):
            action = (
                int(actions[i, 0] + space.start)
                if hasattr(space, "start")
                else actions[i].astype(space.dtype).reshape(space.shape)
            )
            self.seen[i], rewards[i], ended[i], truncated[i], _ = self.envs[i].step(action)
        self.over |= ended | truncated
        return adapter.shown(self.dataset, stack(self.seen), self.goal), rewards, ended, truncated

    def score(self, episodes):
        """Minari's normalised score of each episode, in hundredths: 100 (return - random) / (expert - random)."""
        return normalised(episodes, self.reference)


def stack(observations):
    """N observations as one: arrays with N in front, dicts of them for dicts."""
    first = observations[0]
    return {key: stack([o[key] for o in observations]) for key in first} if isinstance(first, dict) else np.stack(observations)
