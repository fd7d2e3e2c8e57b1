"""The environment that a Minari dataset names for its evaluation, N copies of it, scored by the dataset's own references."""

import numpy as np

from decisionllm.datasets import minari as adapter
from decisionllm.registry import register


@register("env", "minari", minari_id="${dataset.minari_id}", goal="${dataset.goal}", text="${text}")
class MinariEnv:
    """N Gymnasium environments, stepped one by one; an ended one waits for the others."""

    def __init__(self, num_episodes, *, minari_id: str, goal: str = "fixed", text: str = "none"):
        dataset = adapter.find(minari_id)
        metadata = dataset.storage.metadata
        try:
            self.envs = [dataset.recover_environment(eval_env=True) for _ in range(num_episodes)]
        except (ValueError, ImportError, AttributeError) as error:
            raise ValueError(f"{minari_id}: its environment could not be made ({error}); env=none trains without one") from error
        self.horizon = self.envs[0].spec.max_episode_steps
        if self.horizon is None:
            raise ValueError(f"{minari_id}: expected an environment with a time limit (max_episode_steps), it has none")
        self.space, self.start = self.envs[0].observation_space, getattr(self.envs[0].action_space, "start", None)
        self.inner = "pointmaze" in dataset.id and goal == "fixed"
        self.text, self.protocol = text, "standard"
        words = f"{dataset.id}. {metadata.get('description') or ''}".strip() if text == "constant" else ""
        self.tasks = [words] * num_episodes
        low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
        self.reference = (low, high) if low is not None and high is not None else (0.0, 100.0)  # without them, the raw return

    def _rows(self, observations):
        if self.inner:
            return np.stack([o["observation"] for o in observations])
        stacked = {k: np.stack([o[k] for o in observations]) for k in observations[0]} if isinstance(observations[0], dict) else np.stack(observations)
        return adapter.flatten(stacked, self.space, "env")

    def reset(self, seed):
        self.seen = [env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]
        self.over = np.zeros(len(self.envs), bool)
        return self._rows(self.seen)

    def step(self, actions):
        rewards, ended, truncated = (np.zeros(len(self.envs), kind) for kind in (float, bool, bool))
        for i in np.flatnonzero(~self.over):
            action = actions[i] if self.start is None else int(actions[i, 0]) + int(self.start)
            self.seen[i], rewards[i], ended[i], truncated[i], _ = self.envs[i].step(action)
        self.over |= ended | truncated
        return self._rows(self.seen), rewards, ended, truncated

    def score(self, episodes):
        low, high = self.reference
        return np.array([100 * (e.rewards.sum() - low) / (high - low) for e in episodes])
