"""Short rollouts during training, since a falling loss does not mean a rising score."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from decisionllm.eval.rollout import begin_session, rollout
from decisionllm.models.generalist import Model
from decisionllm.policy.loading import build_policies
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Env
from decisionllm.registry import Node, build
from decisionllm.schema import Json

SEED = 0  # of the starts, the same in each evaluation
PATIENCE = 3  # evaluations in which the loss falls and the score does not rise, until a warning


class EvalCallback:
    """Scores of a model in the environments of its run.

    Args:
        config: of the run, plain dicts.
        info: of the run (run.json).
        episodes: of each evaluation, in each environment.
        device: of the model.
    """

    def __init__(self, config: Node, info: Json, episodes: int, device: str) -> None:
        self.config = config
        self.info = info
        self.episodes = episodes
        self.device = device
        self.envs: dict[str, Env] = {}  # by part; built at the first evaluation

    def look(self, model: Model) -> dict[str, float]:
        """Return the mean score, and of a mixture also those of its parts: {"score": 71.2}.

        The model is left in evaluation mode.
        """
        parts = [*self.info["parts"]]
        acting = {"device": self.device}
        scores = {}
        for policy in build_policies(model, self.config, self.info, parts, acting):
            part = policy.config.get("part", "")
            scores[part] = self._score(policy, part)
        mean_score = {"score": float(np.mean([*scores.values()]))}
        if not parts:
            return mean_score
        return mean_score | {f"score/{part}": score for part, score in scores.items()}

    def _score(self, policy: Policy, part: str) -> float:
        if part not in self.envs:
            self.envs[part] = build(policy.config["env"], self.episodes)
        env = self.envs[part]
        begin = partial(begin_session, policy, env, policy.target_return, SEED)
        episodes = rollout(begin, env, seed=SEED, observation_dim=policy.spec.observation_dim)
        return float(np.mean(env.score(episodes)))


def is_stalled(losses: Sequence[float], scores: Sequence[float]) -> bool:
    """Return whether in the last LOOKS evaluations the loss fell and no score was higher than before
    them. losses, scores: of all evaluations.
    """
    if len(scores) <= PATIENCE:
        return False
    fell = losses[-1] < losses[-1 - PATIENCE]
    return fell and max(scores[-PATIENCE:]) <= max(scores[:-PATIENCE])


def first_stall(losses: Sequence[float], scores: Sequence[float]) -> float:
    """Return the number of evaluations after which a run `is_stalled` for the first time; infinity:
    never.
    """
    for count in range(1, len(scores) + 1):
        if is_stalled(losses[:count], scores[:count]):
            return count
    return math.inf
