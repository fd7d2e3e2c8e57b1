"""The model that the config of a run describes."""

from collections.abc import Mapping

from decisionllm.backbones.text_encoders import attach_text_encoder
from decisionllm.config import TrainConfig
from decisionllm.datasets.mixture import embodiment_parts
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.models.generalist import Generalist, Model
from decisionllm.models.sequence import SequenceModel
from decisionllm.randomness import temporary_seed
from decisionllm.registry import build, get_function
from decisionllm.schema import Spec


def make_model(config: TrainConfig, specs: Mapping[str, Spec]) -> Model:
    """Build the model that a config describes, for data of these specs; random weights are drawn
    from the seed.

    Args:
        config: of the run.
        specs: by embodiment, see `mixture.open_stores`.

    Returns:
        A `SequenceModel` for a dataset of one space; a `Generalist` for dataset=embodiments.
    """
    backbone = build(config.backbone, config.seed)
    model_class = get_function("model", config.team.execution, "team.execution")
    parts = embodiment_parts(config.dataset)
    models: dict[str, SequenceModel] = {}
    with temporary_seed(config.seed):
        for name, spec in specs.items():
            head = parts[name].head or config.head
            tokenizer = config.tokenizer | (parts[name].tokenizer or {})
            models[name] = model_class(
                spec, backbone, head, tokenizer, config.model, config.objective, config.planner
            )
        attach_text_encoder(backbone, config.text_encoder, config.seed)
    return models.get(ONLY) or Generalist(models)
