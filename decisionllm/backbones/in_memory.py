"""A language model in memory as the backbone of a run, by way of a folder that the run names."""

from pathlib import Path
from typing import TYPE_CHECKING

from decisionllm.backbones.build import DTYPES, refuse_without_words
from decisionllm.backbones.hf_loading import refuse_all_but_decoders
from decisionllm.files import atomic_folder, new_path
from decisionllm.registry import Node, choice

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ADAPTER = "adapter"  # below the folder


def save_backbone(
    model: "PreTrainedModel | PeftModel",
    tokenizer: "PreTrainedTokenizerBase",
    folder: str | Path,
    **options: object,
) -> Node:
    """Write a model in memory as a new folder and return the config node of a backbone that is read
    from it, public as `decisionllm.save_backbone`.

    A run records its backbone as a folder, so that it resumes, loads and exports in another process.

    Args:
        model: a decoder of transformers, with or without its output map; or one with a LoRA adapter
            of peft, whose options and weights the run trains further, in all blocks. It is not
            changed.
        tokenizer: of the model.
        folder: for the model, its tokenizer and its adapter.
        options: of `backbone=pretrained`, such as tune, lora_rank or text_layers.

    Raises:
        FileExistsError: the folder is there already.
        ValueError: no language model of transformers, one with several adapters, or no tokenizer.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    core = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(core, PreTrainedModel):
        raise ValueError(
            f"save_backbone: expected a model of transformers or peft, got {type(model).__name__}"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            "save_backbone: expected the model's tokenizer of transformers, got "
            f"{type(tokenizer).__name__}"
        )
    refuse_all_but_decoders("in memory", core)
    refuse_without_words("in memory", core)
    path = new_path(folder)
    names = {dtype: name for name, dtype in DTYPES.items()}
    defaults: Node = {"folder": str(path), "dtype": names.get(core.dtype, "float32")}
    with atomic_folder(path) as partial:
        weights = None  # all, by their own names
        if isinstance(model, PeftModel):
            if len(model.peft_config) != 1:
                raise ValueError(
                    f"save_backbone: expected one adapter, got {', '.join(model.peft_config)}"
                )
            (name,) = model.peft_config
            # peft puts an adapter of another name into a folder of that name
            model.save_pretrained(str(partial / ADAPTER), save_embedding_layers=False)
            defaults |= {"text_layers": 0, "layers": 0}
            defaults["adapter"] = str(path / ADAPTER / ("" if name == "default" else name))
            weights = {}
            for key, weight in core.state_dict().items():
                if "lora_" not in key:
                    weights[key.replace(".base_layer.", ".")] = weight
        core.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
    return choice("backbone", "pretrained", **defaults | options)
