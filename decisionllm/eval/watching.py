"""Short rollouts of a policy while it is trained, since a loss that falls does not say that the score
rises.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from decisionllm.eval.rollout import begin_in, rollout
from decisionllm.models.generalist import Model
from decisionllm.policy.loading import policies_of
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Env
from decisionllm.registry import Node, build
from decisionllm.schema import Json

SEED = 0  # of the starts, the same in each look
LOOKS = 3  # in which the loss falls and the score does not rise, until the user is warned


class ScoreWatch:
    """The score of a model in the environments of its run.

    Args:
        config: of the run, plain dicts.
        info: of the run (run.json).
        episodes: of each look, in each environment.
        device: of the model.
    """

    def __init__(self, config: Node, info: Json, episodes: int, device: str) -> None:
        self.config = config
        self.info = info
        self.episodes = episodes
        self.device = device
        self.envs: dict[str, Env] = {}  # by part; built at the first look

    def look(self, model: Model) -> dict[str, float]:
        """The mean score, and of a mixture also those of its parts: {"score": 71.2}.

        The model is left in evaluation mode.
        """
        parts = [*self.info.get("parts", {})]
        acting = {"device": self.device}
        scores = {}
        for policy in policies_of(model, self.config, self.info, parts, acting):
            part = policy.config.get("part", "")
            scores[part] = self._score(policy, part)
        found = {"score": float(np.mean([*scores.values()]))}
        if parts:
            found |= {f"score/{part}": score for part, score in scores.items()}
        return found

    def _score(self, policy: Policy, part: str) -> float:
        if part not in self.envs:
            self.envs[part] = build(policy.config["env"], self.episodes)
        env = self.envs[part]
        begin = partial(begin_in, policy, env, policy.target_return, SEED)
        episodes = rollout(begin, env, seed=SEED, observation_dim=policy.spec.observation_dim)
        return float(np.mean(env.score(episodes)))


def stalled(losses: Sequence[float], scores: Sequence[float]) -> bool:
    """Whether in the last LOOKS looks the loss fell below what it was and no score was higher than
    before them. losses, scores: of all looks.
    """
    if len(scores) <= LOOKS:
        return False
    fell = losses[-1] < losses[-1 - LOOKS]
    return fell and max(scores[-LOOKS:]) <= max(scores[:-LOOKS])


def first_stall(losses: Sequence[float], scores: Sequence[float]) -> float:
    """The number of looks after which the run was `stalled` for the first time; infinity: never."""
    for looks in range(1, len(scores) + 1):
        if stalled(losses[:looks], scores[:looks]):
            return looks
    return math.inf
