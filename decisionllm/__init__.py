"""Offline decision-sequence modelling: trajectories read by a language model beside a task text.

    import decisionllm

    policy = decisionllm.load("runs/x")  # -> decisionllm.Policy
    actions = policy.act([decisionllm.History(observations, actions, rewards, target_return=90.0)])

The public names are imported at their first use, so that `import decisionllm` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decisionllm.backbones.in_memory import save_backbone
    from decisionllm.commands.evaluate import evaluate
    from decisionllm.commands.train import train
    from decisionllm.config import TrainConfig
    from decisionllm.eval.rollout import rollout
    from decisionllm.policy.loading import load
    from decisionllm.policy.policy import Policy
    from decisionllm.registry import choice
    from decisionllm.schema import Episode, History, Spec

__version__ = "0.3.0"
__all__ = [
    "Episode",
    "History",
    "Policy",
    "Spec",
    "TrainConfig",
    "choice",
    "evaluate",
    "load",
    "rollout",
    "save_backbone",
    "train",
]

PUBLIC = {  # name -> where it is defined
    "Episode": "schema:Episode",
    "History": "schema:History",
    "Policy": "policy.policy:Policy",
    "Spec": "schema:Spec",
    "TrainConfig": "config:TrainConfig",
    "choice": "registry:choice",
    "evaluate": "commands.evaluate:evaluate",
    "load": "policy.loading:load",
    "rollout": "eval.rollout:rollout",
    "save_backbone": "backbones.in_memory:save_backbone",
    "train": "commands.train:train",
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'decisionllm' has no attribute {name!r}")
    module, _, attribute = PUBLIC[name].partition(":")
    value = globals()[name] = vars(import_module(f"decisionllm.{module}"))[attribute]
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
