"""A game in which agents must agree: each of N takes one of N places, once, unseen, and all are paid if no place is taken twice."""

import numpy as np

from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec


@register("dataset", "permutation")
def load(*, agents: str = "3", games: int = 2000, seed: int = 0) -> Source:
    """Games that went well, each arrangement as often as any other. There is nothing to see: an observation is a 1.

    agents: how many play; `2-5`: as many in turn, and an action mask says which places there are. Who chooses alone agrees in
    N! / N^N of the games at best (0.222 for three); who knows what those before chose, in all.
    """
    rng, numbers = np.random.default_rng(seed), sizes(agents)
    one, episodes = np.ones(1, np.float32), []
    for g in range(games):
        n = numbers[g % len(numbers)]
        for i, place in enumerate(rng.permutation(n)):
            episodes.append(Episode(
                one[:, None], np.array([[place]], np.float32), one, terminated=True, truncated=False, group=g,
                action_masks=np.arange(max(numbers))[None] < n, agent=i, start=0, return_after_exit=0.0,
            ))  # fmt: skip
    info = {"name": f"permutation-{agents}", "env": "permutation", "text": "none", "agents": agents, "seed": seed}
    return Source(Spec(observation_dim=1, action_dim=1, horizon=1, num_actions=max(numbers)), episodes, info)


def sizes(agents):
    """`2-5` -> 2, 3, 4, 5"""
    low, _, high = str(agents).partition("-")
    if not (low.isdigit() and (high or low).isdigit() and 0 < int(low) <= int(high or low)):
        raise ValueError(f"agents: expected a number above 0 or a range such as 2-5, got {agents!r}")
    return range(int(low), int(high or low) + 1)
