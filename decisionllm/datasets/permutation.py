"""A game in which agents must agree: each of N takes one of N places, once, unseen, and all are paid if no place is taken twice."""

import numpy as np

from decisionllm.datasets.store import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec


@register("dataset", "permutation")
def load(*, agents: int = 3, games: int = 2000, seed: int = 0) -> Source:
    """Games that went well, each arrangement as often as any other. There is nothing to see: an observation is a 1.

    Who chooses alone agrees in N! / N^N of the games at best (0.222 for three); who knows what those before chose, in all.
    """
    rng = np.random.default_rng(seed)
    places = rng.random((games, agents)).argsort(1)
    one = np.ones(1, np.float32)
    episodes = (
        Episode(one[:, None], np.array([[place]], np.float32), one, True, False, "", g, agent=i, start=0, later=0.0)
        for g in range(games)
        for i, place in enumerate(places[g])
    )
    info = {"name": f"permutation-{agents}", "env": "permutation", "text": "none", "agents": agents, "seed": seed}
    return Source(Spec(observation_dim=1, action_dim=1, horizon=1, num_actions=agents), episodes, info)
