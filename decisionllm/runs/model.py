"""The model that the config of a run describes."""

from collections.abc import Mapping

from decisionllm.backbones.text_encoders import attach_text_encoder
from decisionllm.config import TrainConfig
from decisionllm.datasets.mixture import embodiment_parts
from decisionllm.datasets.mixture_parts import Part
from decisionllm.models.generalist import Generalist, Model
from decisionllm.models.sequence import SequenceModel
from decisionllm.randomness import temporary_seed
from decisionllm.registry import build, get_function
from decisionllm.schema import Spec


def make_model(config: TrainConfig, spec: Spec | Mapping[str, Spec]) -> Model:
    """Build the model that a config describes, for data of this spec; random weights are drawn from
    the seed.

    Returns:
        A `SequenceModel`; a `Generalist` where `spec` holds those of several embodiments by name.
    """
    backbone = build(config.backbone, config.seed)
    model_class = get_function("model", config.team.execution, "team.execution")

    def make_sequence_model(spec: Spec, part: Part) -> SequenceModel:
        head = part.head or config.head
        tokenizer = config.tokenizer | (part.tokenizer or {})
        objective = config.objective
        planner = config.planner
        model: SequenceModel = model_class(
            spec, backbone, head, tokenizer, config.model, objective, planner
        )
        return model

    with temporary_seed(config.seed):
        model: Model
        if isinstance(spec, Spec):
            model = make_sequence_model(spec, Part(dataset=config.dataset))
        else:
            parts = embodiment_parts(config.dataset)
            by_name = {}
            for name, own_spec in spec.items():
                by_name[name] = make_sequence_model(own_spec, parts[name])
            model = Generalist(by_name)
        attach_text_encoder(backbone, config.text_encoder, config.seed)
    return model
