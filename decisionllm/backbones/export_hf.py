"""A backbone as a model folder that transformers reads alone: its adapters merged into the weights
they adapt, or left out.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.text_layers import TRAINED_CUT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ROWS, LENGTH = 2, 16  # of the words that both models read


def save_merged(backbone: Backbone, folder: Path) -> float:
    """Write the language model of a backbone, as it was trained, with its tokenizer. Adapters are
    merged in place.

    With adapters the weights become float32 first, since a sum that is rounded to bfloat16 loses
    small adapters. Without, they keep their type.

    Args:
        backbone: on the CPU; used up by the call where it has adapters.
        folder: to write into; it may be missing.

    Returns:
        The largest difference of the hidden states of the folder's model from those of the
        backbone, as a share of the largest hidden state.

    Raises:
        ValueError: transformers does not read the folder alone.
    """
    backbone.model.eval()
    if backbone.tune == "lora":
        backbone.model.float()
    else:
        backbone.narrow()
    expected = _hidden_states(backbone.model)
    core = backbone.model.merge_and_unload() if backbone.tune == "lora" else backbone.core
    setattr(core.config, TRAINED_CUT, backbone.text_layers)
    core.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    exported = _hidden_states(_load_folder(folder))
    return float((exported - expected).abs().max() / expected.abs().max())


def save_base(backbone: Backbone, folder: Path) -> None:
    """Write the model that a backbone was built from, without its adapters, with its tokenizer; of
    a backbone that was trained whole its config alone, since a run has its weights.

    Args:
        backbone: on the CPU; used up by the call where it has adapters.
        folder: to write into; it may be missing.
    """
    setattr(backbone.config, TRAINED_CUT, backbone.text_layers)
    if backbone.tune == "full":
        backbone.config.save_pretrained(folder)
    else:
        backbone.narrow()
        core = backbone.model.unload() if backbone.tune == "lora" else backbone.core
        core.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)


def _load_folder(folder: Path) -> "PreTrainedModel":
    """Load the model of a folder; raise a ValueError unless the folder has all its weights and no
    others.
    """
    from transformers import AutoModel

    model: PreTrainedModel
    model, loading = AutoModel.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    wrong = {kind: sorted(map(str, names))[:4] for kind, names in loading.items() if names}
    if wrong:
        raise ValueError(
            f"{type(model).__name__}: expected a model that transformers reads back whole, got "
            f"{wrong}"
        )
    return model


@torch.no_grad()
def _hidden_states(model: "PreTrainedModel") -> Tensor:
    """Return the hidden states of some words, (ROWS, LENGTH, D) float32."""
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % model.config.vocab_size
    hidden: Tensor = model.eval()(input_ids=ids, use_cache=False).last_hidden_state
    return hidden.float()
