"""The game of the permutation dataset, many at once: the score is the percentage in which all agents agreed."""

import numpy as np

from decisionllm.datasets.permutation import sizes
from decisionllm.registry import register


@register("env", "permutation", agents="${dataset.agents}")
class Permutation:
    """One row an agent; num_episodes games of each number of agents, which are over after one step."""

    horizon, protocol, text, unit = 1, "standard", "none", "games in which all agree, %"

    def __init__(self, num_episodes, *, agents: str = "3"):
        numbers = np.repeat(sizes(agents), num_episodes)
        self.groups = np.repeat(np.arange(len(numbers)), numbers)
        self.tasks = [""] * len(self.groups)
        self.action_masks = np.arange(numbers.max()) < numbers[self.groups, None]

    def reset(self, seed):
        return np.ones((len(self.groups), 1))

    def step(self, actions):
        """(N, 1) -> observations (N, 1), rewards (N,), ended (N,), truncated (N,)"""
        taken = np.zeros(self.action_masks.shape, int)[np.unique(self.groups)]
        np.add.at(taken, (self.groups, actions[:, 0].astype(int)), 1)
        agreed = taken.max(1)[self.groups] == 1
        over = np.ones(len(actions), bool)
        return self.reset(0), agreed.astype(float), over, ~over

    def score(self, episodes):
        return np.array([100 * e.rewards.sum() for e in episodes])
