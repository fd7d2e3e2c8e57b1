"""The model that the config of a run describes."""

from collections.abc import Mapping
from typing import Any

import torch

from decisionllm.backbones.readers import attach
from decisionllm.config import ModelOptions, TeamOptions, one_of
from decisionllm.datasets.mixture import of_embodiments
from decisionllm.files import explained
from decisionllm.models.generalist import Generalist
from decisionllm.models.sequence import SequenceModel
from decisionllm.models.team import TeamSequenceModel
from decisionllm.registry import build
from decisionllm.runs.directory import UPGRADE
from decisionllm.schema import Spec


def make_model(config: dict[str, Any], spec: Spec | Mapping[str, Spec]) -> Any:
    """The model that a config describes, for data of this spec; new parts and random weights are
    drawn from the seed.

    Returns:
        A `SequenceModel`; a `Generalist` where `spec` holds those of several embodiments by name.
    """
    # First, since the options of a backbone of an earlier version may be others too.
    with explained(
        "the options of this run are not those of this version", TypeError, KeyError, remedy=UPGRADE
    ):
        options, team = ModelOptions(**config["model"]), TeamOptions(**config["team"])
        parts = config["objective"], config["planner"]
    backbone = build(config["backbone"], config["seed"])
    one_of("team.execution", team.execution, ("per_agent", "joint", "both"))
    kind = SequenceModel if team.execution == "per_agent" else TeamSequenceModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        if isinstance(spec, Spec):
            model: Any = kind(spec, backbone, config["head"], options, *parts)
        else:
            heads = {
                name: part.get("head", config["head"])
                for name, part in of_embodiments(config["dataset"]).items()
            }
            model = Generalist(
                {name: kind(s, backbone, heads[name], options, *parts) for name, s in spec.items()}
            )
        attach(backbone, config)
    return model
