"""The game of the permutation dataset, many at once: the score is the percentage in which all agents agreed."""

import numpy as np

from decisionllm.registry import register


@register("env", "permutation", agents="${dataset.agents}")
class Permutation:
    """One row an agent, `agents` rows a game; a game is over after one step."""

    horizon, protocol, text, unit = 1, "standard", "none", "games in which all agree, %"

    def __init__(self, num_episodes, *, agents: int = 3):
        self.agents, self.groups = agents, np.repeat(np.arange(num_episodes), agents)
        self.tasks = [""] * len(self.groups)

    def reset(self, seed):
        return np.ones((len(self.groups), 1))

    def step(self, actions):
        """(N, 1) -> observations (N, 1), rewards (N,), ended (N,), truncated (N,)"""
        places = np.sort(actions[:, 0].astype(int).reshape(-1, self.agents))
        agreed = (places == np.arange(self.agents)).all(1)
        over = np.ones(len(actions), bool)
        return self.reset(0), np.repeat(agreed, self.agents).astype(float), over, ~over

    def score(self, episodes):
        return np.array([100 * e.rewards.sum() for e in episodes])
