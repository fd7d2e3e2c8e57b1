"""One language model for several spaces of observations and actions: a normaliser, tokenizer and
head for each, one backbone for all.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.models.sequence import SequenceModel
from decisionllm.schema import Batch


class Generalist(nn.Module):
    """Models of several embodiments on one backbone, which is trained by all of them and saved
    once.

    Args:
        models: {name of the embodiment: its model}, all of one backbone.
    """

    def __init__(self, models: Mapping[str, SequenceModel]) -> None:
        super().__init__()
        # the first of its names, by which it is trained and saved
        self.backbone = next(iter(models.values())).backbone
        self.models = nn.ModuleDict(models)

    def forward(self, batch: Batch, embodiment: str) -> dict[str, Tensor]:
        """Return the terms of the loss of a batch of one embodiment, see `SequenceModel.forward`."""
        terms: dict[str, Tensor] = self.models[embodiment](batch)
        return terms


Model = SequenceModel | Generalist  # of a run


def members(model: Model) -> dict[str, SequenceModel]:
    """Return {embodiment: its model}; of a model of one space {ONLY: model}."""
    return {ONLY: model} if isinstance(model, SequenceModel) else dict(model.models.items())  # type: ignore[arg-type]
