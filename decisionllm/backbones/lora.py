"""Low-rank adapters (LoRA) by peft, and a fused product for several adapted maps of one input."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.backbones.hf_types import AdaptedLinear, Saved
from decisionllm.backbones.text_layers import get_blocks
from decisionllm.checks import check_at_least, check_positive, split_list, unknown_name_message
from decisionllm.files import explain_errors
from decisionllm.randomness import temporary_seed

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


ADAPTER_FILE = "adapter_model.safetensors"  # peft's name


def add_adapters(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: int,
    targets: str,
    seed: int,
    first: int,
    options: Mapping[str, Any],
) -> PeftModel:
    """Wrap a transformers model with LoRA adapters, drawn from the seed; only they are trained.

    Args:
        model: of transformers.
        rank, alpha: the adapters add (alpha / rank) B A.
        targets: names of the adapted maps, separated by commas, or `all-linear`.
        seed: of A; B begins as zeros.
        first: the first block that is adapted, counted from 0.
        options: of peft.LoraConfig, in place of these; see `lora_options.check_lora_options`.

    Raises:
        ValueError: the model has no map of such a name, peft does not adapt it, the rank is no
            rank, or peft refuses the options.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    check_at_least("backbone.lora_rank", rank, 1)
    check_positive("backbone.lora_alpha", alpha)
    names: str | list[str] = targets if targets == "all-linear" else split_list(targets)
    # a text is a pattern here, as peft takes it
    names = options.get("target_modules", names)
    if isinstance(names, list):
        _check_names(names, get_blocks(model)[first:] if first else model)
    changes = {**options, "target_modules": names}
    if first:
        blocks = _adapted_blocks(model, first, changes.pop("layers_to_transform", None))
        changes["target_modules"] = adapter_pattern(model, names, blocks)
    # GPT-2 keeps its weights transposed
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    by_default = {"r": rank, "lora_alpha": alpha, "fan_in_fan_out": transposed}
    with explain_errors("backbone.lora: peft refuses these options", ValueError, TypeError):
        config = LoraConfig(**by_default | changes)
    refused = explain_errors(
        f"backbone.lora_targets={targets}: peft does not adapt these maps of the model",
        ValueError,
        fix=f"name others of {', '.join(sorted(linear_names(model)))}",
    )
    with refused, temporary_seed(seed), warnings.catch_warnings():
        # peft uses a name that transformers deprecates
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config)


def _check_names(names: list[str], adapted: nn.Module) -> None:
    """Raise a ValueError unless each name is that of a module in here, or the end of its path."""
    paths = [f".{path}" for path, _ in adapted.named_modules()]
    for name in names or [""]:
        if not name or not any(path.endswith(f".{name}") for path in paths):
            message = unknown_name_message("module", name, sorted(linear_names(adapted)))
            raise ValueError(f"backbone.lora_targets: {message}")


def linear_names(model: nn.Module) -> set[str]:
    """Return the names of the linear maps in a model, without the paths before them."""
    from transformers.pytorch_utils import Conv1D

    names = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            names.add(path.rpartition(".")[2])
    return names


def _adapted_blocks(
    model: PreTrainedModel, first: int, selected: int | list[int] | None
) -> range | list[int]:
    """Return the blocks that are adapted, counted from 0; a ValueError for one below the first.

    selected: peft's option layers_to_transform; None: all from the first one on.
    """
    upper = range(first, len(get_blocks(model)))
    if selected is None:
        return upper
    blocks = [selected] if isinstance(selected, int) else selected
    if not set(blocks) <= set(upper):
        raise ValueError(
            f"backbone.lora.layers_to_transform: expected blocks within {first} .. {upper[-1]} "
            f"(counted from 0), since those below read texts alone, got {blocks}"
        )
    return blocks


def adapter_pattern(
    model: PreTrainedModel, names: str | list[str], blocks: range | list[int]
) -> str:
    """Return a pattern, as peft takes it, of the maps with these names in these blocks.

    It matches on AutoModel, whose blocks are `layers.0`, and on AutoModelForCausalLM, whose blocks
    are `model.layers.0`.

    Args:
        model: of transformers.
        names: of maps; `all-linear`; or another text: a pattern of their whole paths.
        blocks: counted from 0.
    """
    block = rf"(.*\.)?layers\.({'|'.join(map(str, blocks))})\."
    if isinstance(names, str) and names != "all-linear":
        return f"(?={block})({names})"
    if names == "all-linear":
        linear_names = set()
        for path, module in get_blocks(model)[blocks[0]].named_modules():
            if isinstance(module, nn.Linear):
                linear_names.add(path.rpartition(".")[2])
        names = sorted(linear_names)
    return rf"{block}(.*\.)?({'|'.join(names)})"


def save_adapter(model: PeftModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter as peft does, its weights by their names on AutoModel and again by those on
    AutoModelForCausalLM.

    A backbone is an AutoModel, but people load adapters on either class. peft finds weights by
    their names and ignores a name that the model does not have: with both names one folder serves
    both classes, with one peft warns and leaves the adapter out.

    Args:
        model: a model of transformers wrapped by peft.
        weights: of its adapter, by the names of its parameters.
        folder: to write into.
    """
    from peft import get_peft_model_state_dict

    model.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=False)
    own = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    others = _names_below_output(own, model.get_base_model())
    # safetensors takes no tensor twice
    again = {others[name]: weight.clone() for name, weight in own.items()}
    save_file(again | own, folder / ADAPTER_FILE, metadata={"format": "pt"})


def load_adapter(model: PeftModel, folder: str) -> None:
    """Give the adapter of a model the weights of one that peft saved, of AutoModel or of
    AutoModelForCausalLM.

    Raises:
        ValueError: the file is damaged, or has other weights than this adapter.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    file = Path(folder).expanduser() / ADAPTER_FILE
    with explain_errors(f"{file} is damaged or missing", OSError, SafetensorError):
        saved = load_file(file)
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    others = _names_below_output(expected, model.get_base_model())
    weights = {}
    for name, other in others.items():
        weight = saved.get(name, saved.get(other))
        if weight is not None and weight.shape == expected[name].shape:
            weights[name] = weight
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(saved.keys() - expected.keys() - set(others.values()))
    if missing or unknown:
        raise ValueError(
            f"{file}: expected the weights of the adapted maps; missing or of another size: "
            f"{missing[:2]}, unknown: {unknown[:2]}; backbone.text_layers=0 backbone.layers=0 adapts "
            "all blocks"
        )
    set_peft_model_state_dict(model, weights)


def select_own_names(
    weights: Mapping[str, Tensor], expected: Iterable[str], core: nn.Module
) -> dict[str, Tensor]:
    """Return the weights that `save_adapter` wrote, or a version before with one name each, without
    the names on AutoModelForCausalLM.

    Args:
        weights: of a file.
        expected: the names on AutoModel.
        core: the model of transformers inside.
    """
    own = set(expected)
    others = {*_names_below_output(own, core).values()} - own
    return {name: weight for name, weight in weights.items() if name not in others}


def _names_below_output(names: Iterable[str], core: nn.Module) -> dict[str, str]:
    """Return {name on AutoModel: name on AutoModelForCausalLM}, which holds the same model in an
    attribute beside its output map.
    """
    wrapper = "base_model.model."
    inside = wrapper
    if core.base_model_prefix:
        inside = f"{wrapper}{core.base_model_prefix}."
    return {name: inside + name.removeprefix(wrapper) for name in names}


def linear(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return x through each of these maps: (..., in) -> [(..., out), ...], equal to what peft
    computes.
    """
    packed = _packed_for(x, layers)
    if packed is not None:
        outputs = packed(x.flatten(0, -2))
    elif _all_adapted(layers):
        A, B, scales = _adapters(layers)
        frozen = [(layer.base_layer.weight, layer.base_layer.bias) for layer in layers]
        outputs = _Adapted.apply(x.flatten(0, -2), frozen, scales, *A, *B)  # type: ignore[no-untyped-call]  # of torch
    else:
        return [_plain(x, layer) for layer in layers]
    return [out.unflatten(0, x.shape[:-1]) for out in outputs]


def _packed_for(x: Tensor, layers: tuple[nn.Module, ...]) -> _Packed | None:
    """Return the packed weights of these maps; None while they may be trained, or have none that
    fit.
    """
    packed: _Packed | None = layers[0].__dict__.get("packed")
    if packed is None:
        return None
    if torch.is_grad_enabled():
        # torch's fused AdamW counts no new version of what it changes
        packed.versions = []
        return None
    return packed if packed.serves(x, layers) else None


def _plain(x: Tensor, layer: nn.Module) -> Tensor:
    """Return x through one map. A module's call takes half the time of a small product."""
    if type(layer) is nn.Linear:
        return F.linear(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out


@torch.inference_mode(False)
@torch.no_grad()
def pack(*layers: nn.Module) -> None:
    """Let `linear` compute these maps of one input by two products where no gradient is wanted,
    equal within rounding.

    Their frozen weights become views of one matrix. Layers without adapters, or of which only some
    have a bias, stay as they are. So do those that are packed: recorded kernels read their weights
    where they are.
    """
    if not _all_adapted(layers):
        return
    packed: _Packed | None = layers[0].__dict__.get("packed")
    if packed is not None and packed.holds(layers):
        return
    biased = {layer.base_layer.bias is not None for layer in layers}
    if len(biased) == 1:
        layers[0].packed = _Packed(layers)


class _Packed:
    """Adapted maps of one input: their frozen weights and the narrow sides of their adapters in one
    matrix, the wide sides in another.
    """

    def __init__(self, layers: tuple[AdaptedLinear, ...]) -> None:
        A, _, _ = _adapters(layers)
        bases = [layer.base_layer for layer in layers]
        ranks = sum(len(a) for a in A)
        self.layers = layers
        self.active = [*layers[0].active_adapters]
        self.sizes = [base.out_features for base in bases]
        narrow = bases[0].weight.new_zeros(ranks, bases[0].in_features)
        self.weight = torch.cat([*(base.weight for base in bases), narrow])
        self.bias = None
        if bases[0].bias is not None:
            self.bias = self.weight.new_zeros(len(self.weight))
        self.wide = self.weight.new_zeros(ranks, sum(self.sizes))
        self.versions: list[tuple[int, int]] = []  # of the adapters and biases in the matrices
        self.pointers = []
        parts = self.weight.split([*self.sizes, ranks])
        for base, part in zip(bases, parts[:-1], strict=True):
            base.weight.data = part
            self.pointers.append(part.data_ptr())

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the layers has weights of its own."""

    def holds(self, layers: tuple[object, ...]) -> bool:
        """Return True if these are the layers, none of them moved, cast or adapted anew since."""
        if layers != self.layers:
            return False
        for layer, pointer in zip(self.layers, self.pointers, strict=True):
            if layer.base_layer.weight.data_ptr() != pointer:
                return False
            if layer.active_adapters != self.active:
                return False
        return True

    def serves(self, x: Tensor, layers: tuple[object, ...]) -> bool:
        """Return True if it holds these layers, none of them merged or disabled, and x (..., in) is
        of their type.
        """
        if torch.compiler.is_compiling():  # an exported program has no memory to compare
            return False
        if x.dtype != self.weight.dtype or torch.is_autocast_enabled(x.device.type):
            return False
        if not self.holds(layers):
            return False
        return not any(layer.merged or layer.disable_adapters for layer in self.layers)

    def __call__(self, rows: Tensor) -> tuple[Tensor, ...]:
        A, B, scales = _adapters(self.layers)
        biases: list[Tensor] = []
        if self.bias is not None:
            biases = [layer.base_layer.bias for layer in self.layers]
        versions = [(x.data_ptr(), x._version) for x in (*A, *B, *biases)]
        n = self.wide.shape[1]  # numbers of all outputs
        if versions != self.versions:
            self.weight[n:] = torch.cat(_scale(A, scales))
            self.wide.copy_(torch.block_diag(*B).t())
            if self.bias is not None:
                self.bias[:n] = torch.cat(biases)
            self.versions = versions
        out = F.linear(rows, self.weight, self.bias)
        inner = out[:, n:]
        outputs: tuple[Tensor, ...] = out[:, :n].addmm_(inner, self.wide).split(self.sizes, -1)
        return outputs


def _scale(tensors: Iterable[Tensor], scales: Iterable[float]) -> list[Tensor]:
    return [tensor * scale for tensor, scale in zip(tensors, scales, strict=True)]


def _adapters(layers: Sequence[AdaptedLinear]) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Return the narrow sides (rank, in), wide sides (out, rank) and scales of the adapters of
    these layers.
    """
    A, B, scales = [], [], []
    for layer in layers:
        name = layer.active_adapters[0]
        A.append(layer.lora_A[name].weight)
        B.append(layer.lora_B[name].weight)
        scales.append(layer.scaling[name])
    return A, B, scales


class _Scales(Saved):
    input_dtype: torch.dtype
    scales: list[float]


class _Adapted(torch.autograd.Function):
    """Several frozen linear maps with adapters: rows (n, in) -> (n, out) each.

    The products with the narrow sides of all adapters are one, those with the wide sides are added
    in place, and so are the gradients. Casts of adapters have no nodes in the graph.
    """

    @staticmethod
    def forward(
        ctx: _Scales,
        rows: Tensor,
        frozen: list[tuple[Tensor, Tensor | None]],
        scales: list[float],
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        device = rows.device.type
        dtype = rows.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        ctx.input_dtype = rows.dtype
        ctx.scales = scales
        rows = rows.to(dtype)
        k = len(scales)
        narrow = torch.cat(_scale(adapters[:k], scales)).to(dtype)
        wide = [B.to(dtype) for B in adapters[k:]]
        weights = [weight.to(dtype) for weight, _ in frozen]
        inner = F.linear(rows, narrow)
        ctx.save_for_backward(rows, narrow, inner, *wide, *weights)
        parts = inner.split([B.shape[1] for B in wide], -1)
        outputs = []
        for weight, (_, bias), part, B in zip(weights, frozen, parts, wide, strict=True):
            if bias is not None:
                bias = bias.to(dtype)
            outputs.append(F.linear(rows, weight, bias).addmm_(part, B.t()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Scales, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, narrow, inner, *saved = ctx.saved_tensors
        k = len(ctx.scales)
        wide, weights = saved[:k], saved[k:]
        ranks = [B.shape[1] for B in wide]
        of_inner = torch.cat([g @ B for g, B in zip(gradients, wide, strict=True)], -1)
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = of_inner @ narrow
            for g, weight in zip(gradients, weights, strict=True):
                of_rows.addmm_(g, weight)
            of_rows = of_rows.to(ctx.input_dtype)
        of_A = _scale((of_inner.t() @ rows).split(ranks), ctx.scales)
        of_B = []
        for part, g in zip(inner.split(ranks, -1), gradients, strict=True):
            of_B.append((part.t() @ g).t())
        return of_rows, None, None, *of_A, *of_B


def _all_adapted(layers: tuple[nn.Module, ...]) -> TypeGuard[tuple[AdaptedLinear, ...]]:
    """Return True if each of these is a linear map with one plain LoRA adapter."""
    return all(map(_is_adapted, layers))


def _is_adapted(layer: Any) -> bool:
    """Return True if this is a linear map with one plain LoRA adapter, in use and not merged. peft
    computes all others: with DoRA, dropout or a bias.
    """
    if type(layer) is nn.Linear or not hasattr(layer, "lora_A"):
        return False
    if type(layer.base_layer) is not nn.Linear or len(layer.active_adapters) != 1:
        return False
    if layer.merged or layer.disable_adapters or layer.lora_variant:
        return False
    name = layer.active_adapters[0]
    if layer.lora_B[name].bias is not None:
        return False
    return isinstance(layer.lora_dropout[name], nn.Identity)
