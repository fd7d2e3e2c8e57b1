"""simple_spread: 400 worlds of 3 agents in lock-step against mpe2, one world after the other, 25
steps each.

Both get the same random actions; `observed` also makes the observations, as a policy's rollout
needs them and as mpe2 always does. The
gate: returns are equal to the last bit.
"""

from collections.abc import Iterator

import numpy as np

from benchmarks import measure
from decisionllm.teams.spread.world import HORIZON, Spread, to_pushes


class Play:
    def __init__(self, *, worlds: int = 400, agents: int = 3) -> None:
        from mpe2 import simple_spread_v3

        self.worlds, self.agents = worlds, agents
        self.peer_env = simple_spread_v3.parallel_env(N=agents)
        self.actions = (
            np.random.default_rng(0).integers(5, size=(HORIZON, worlds, agents, 1)).astype(float)
        )

    def ours(self, *, observed: bool = True) -> np.ndarray:
        """(worlds, N) returns"""
        world = Spread(range(self.worlds), self.agents)
        returns = np.zeros((self.worlds, self.agents))
        for actions in self.actions:
            if observed:
                world.observe()
            returns = returns + world.step(to_pushes(actions))
        return returns

    def peer(self, worlds: int) -> np.ndarray:
        returns = np.zeros((worlds, self.agents))
        for seed in range(worlds):
            self.peer_env.reset(seed=seed)
            names = self.peer_env.possible_agents
            for actions in self.actions[:, seed, :, 0]:
                _, rewards, *_ = self.peer_env.step(
                    dict(zip(names, actions.astype(int).tolist(), strict=True))
                )
                returns[seed] += list(rewards.values())
        return returns


def gates(*, worlds: int = 8, **size: int) -> dict[str, float]:
    play = Play(worlds=worlds, **size)
    return measure.gate("returns", np.abs(play.ours() - play.peer(worlds)).max(), 0)


def cases(*, worlds: int = 400, **size: int) -> Iterator[measure.Case]:
    play = Play(worlds=worlds, **size)
    alone = min(worlds, 10)
    work = HORIZON * play.agents
    for name, observed, target in (("observed", True, 10), ("world alone", False, None)):
        yield measure.Case(
            name,
            lambda o=observed: play.ours(observed=o),
            lambda: play.peer(alone),
            worlds * work,
            alone * work,
            "us/agent decision",
            target=target,
        )


if __name__ == "__main__":
    measure.main("benchmarks.spread_world")
