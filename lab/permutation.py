"""The permutation game: each of N agents takes one of N places, once, without observing the others;
they win if no place is taken twice.

Acting alone, agents win N! / N^N of the games at best (0.222 for three); in turn, each conditioned
on those before it, all of them:
`decisionllm train dataset._target_=lab.permutation.load
env._target_=lab.permutation.PermutationGame head=discrete model.condition_on=none
tokenizer.timesteps=none window=1 team.execution=both`. More agents: `+dataset.agents=2-5
+env.agents=2-5`.
"""

from collections.abc import Sequence

import numpy as np

from decisionllm.protocols import Env, Source
from decisionllm.schema import Episode, Spec


def load(*, agents: str = "3", games: int = 2000, seed: int = 0) -> Source:
    """Won games, each arrangement equally likely. An observation is a 1.

    agents: how many play; `2-5`: each number in turn, with an action mask of the places of the
        game.
    """
    rng = np.random.default_rng(seed)
    numbers = sizes(agents)
    one, episodes = np.ones(1, np.float32), []
    for g in range(games):
        n = numbers[g % len(numbers)]
        for i, place in enumerate(rng.permutation(n)):
            episodes.append(
                Episode(
                    one[:, None],
                    np.array([[place]], np.float32),
                    one,
                    terminated=True,
                    truncated=False,
                    group=g,
                    action_masks=np.arange(max(numbers))[None] < n,
                    agent=i,
                    start=0,
                    return_after_exit=0.0,
                )
            )
    info = {
        "name": f"permutation-{agents}",
        "env": "none",
        "text": "none",
        "agents": agents,
        "seed": seed,
    }
    return Source(
        Spec(observation_dim=1, action_dim=1, horizon=1, num_actions=max(numbers)), episodes, info
    )


def sizes(agents: str) -> range:
    """`2-5` -> 2, 3, 4, 5"""
    low, _, high = str(agents).partition("-")
    if not (low.isdigit() and (high or low).isdigit() and 0 < int(low) <= int(high or low)):
        raise ValueError(
            f"agents: expected a number above 0 or a range such as 2-5, got {agents!r}"
        )
    return range(int(low), int(high or low) + 1)


class PermutationGame(Env):
    """num_episodes games of each number of agents, one row an agent; a game is over after
    one step.
    """

    horizon, unit = 1, "games in which all agree, %"
    groups: np.ndarray

    def __init__(self, num_episodes: int, *, agents: str = "3") -> None:
        numbers = np.repeat(sizes(agents), num_episodes)
        self.groups = np.repeat(np.arange(len(numbers)), numbers)
        self.tasks = [""] * len(self.groups)
        self.places = np.arange(numbers.max()) < numbers[self.groups, None]

    @property
    def action_masks(self) -> np.ndarray:
        return self.places

    def reset(self, seed: int) -> np.ndarray:
        return np.ones((len(self.groups), 1))

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        taken = np.zeros((self.groups[-1] + 1, self.places.shape[1]), int)
        np.add.at(taken, (self.groups, actions[:, 0].astype(int)), 1)
        agreed = taken.max(1)[self.groups] == 1
        over = np.ones(len(actions), bool)
        return self.reset(0), agreed.astype(float), over, ~over

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        return np.array([100 * e.rewards.sum() for e in episodes])
