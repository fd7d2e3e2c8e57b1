"""Low-rank adapters (LoRA) by peft, and a fused product for several adapted maps of one input."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def add_adapters(model: Any, *, rank: int, alpha: int, targets: str, seed: int) -> Any:
    """Wrap a transformers model with LoRA adapters, drawn from the seed; only they are trained.

    Args:
        model: of transformers.
        rank, alpha: the adapters add (alpha / rank) B A.
        targets: names of the adapted maps, separated by commas, or `all-linear`.
        seed: of A; B begins as zeros.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2 keeps its weights transposed
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, fan_in_fan_out=transposed,
        target_modules=targets if targets == "all-linear" else targets.split(","),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a name that transformers deprecates
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def linear(x: Tensor, *layers: Any) -> list[Tensor]:
    """x through each of these maps: (..., in) -> [(..., out), ...], equal to what peft computes.

    The products with the narrow sides of all adapters are one, and those with the wide sides are added in place.
    """
    if not all(map(_adapted, layers)):
        return [layer(x) for layer in layers]
    names, rows = [layer.active_adapters[0] for layer in layers], x.flatten(0, -2)
    narrow = torch.cat([layer.lora_A[name].weight * layer.scaling[name] for layer, name in zip(layers, names, strict=True)])
    inner = F.linear(rows, narrow.to(x.dtype)).split([layer.r[name] for layer, name in zip(layers, names, strict=True)], -1)
    outputs = [layer.base_layer(rows) for layer in layers]
    for out, part, layer, name in zip(outputs, inner, layers, names, strict=True):
        out.addmm_(part, layer.lora_B[name].weight.to(out.dtype).t())
    return [out.unflatten(0, x.shape[:-1]) for out in outputs]


def _adapted(layer: Any) -> bool:
    """Whether this is a linear map with one plain LoRA adapter, in use and not merged."""
    if not (hasattr(layer, "lora_A") and isinstance(layer.base_layer, nn.Linear) and len(layer.active_adapters) == 1):
        return False
    special = layer.merged or layer.disable_adapters or layer.lora_variant
    return not special and isinstance(layer.lora_dropout[layer.active_adapters[0]], nn.Identity)
