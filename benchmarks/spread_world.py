"""simple_spread: 400 worlds of 3 agents in lock-step against mpe2, one world after the other, 25 steps each.

Both are given the same random actions; `observed` also makes what every agent sees, as a policy's rollout needs it, which mpe2 always
does. The gate holds the returns equal to the last bit.
"""

import numpy as np

from benchmarks import measure
from decisionllm.envs.spread import HORIZON, Spread, pushes, uniform


class Play:
    def __init__(self, *, worlds=400, agents=3):
        from mpe2 import simple_spread_v3

        self.worlds, self.agents = worlds, agents
        self.peer_env = simple_spread_v3.parallel_env(N=agents)
        self.actions = uniform(np.random.default_rng(0), (HORIZON, worlds, agents), discrete=True)

    def ours(self, *, observed=True):
        """(worlds, N) returns"""
        world, returns = Spread(range(self.worlds), self.agents), 0
        for actions in self.actions:
            if observed:
                world.observe()
            returns = returns + world.step(pushes(actions))
        return returns

    def peer(self, worlds):
        returns = np.zeros((worlds, self.agents))
        for seed in range(worlds):
            self.peer_env.reset(seed=seed)
            names = self.peer_env.possible_agents
            for actions in self.actions[:, seed, :, 0]:
                _, paid, *_ = self.peer_env.step(dict(zip(names, actions.astype(int).tolist(), strict=True)))
                returns[seed] += list(paid.values())
        return returns


def gates(*, worlds=8, **size):
    play = Play(worlds=worlds, **size)
    return measure.gate("returns", np.abs(play.ours() - play.peer(worlds)).max(), 0)


def cases(*, worlds=400, **size):
    play, alone = Play(worlds=worlds, **size), min(worlds, 10)
    work = HORIZON * play.agents
    for name, observed, target in (("observed", True, 10), ("world alone", False, None)):
        yield measure.Case(
            name, lambda o=observed: play.ours(observed=o), lambda: play.peer(alone), worlds * work, alone * work,
            "us/agent decision", target=target,
        )  # fmt: skip


if __name__ == "__main__":
    measure.main("spread_world")
