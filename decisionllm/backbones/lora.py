"""Low-rank adapters (LoRA) by peft, and a fused product for several adapted maps of one input."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

ADAPTER_FILE = "adapter_model.safetensors"  # peft's name


def add_adapters(
    model: Any, *, rank: int, alpha: int, targets: str, seed: int, first: int = 0
) -> Any:
    """Wrap a transformers model with LoRA adapters, drawn from the seed; only they are trained.

    Args:
        model: of transformers.
        rank, alpha: the adapters add (alpha / rank) B A.
        targets: names of the adapted maps, separated by commas, or `all-linear`.
        seed: of A; B begins as zeros.
        first: the first block that is adapted, counted from 0.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    names: str | list[str] = targets if targets == "all-linear" else targets.split(",")
    if first:
        names = names_from(model, names, first)
    # GPT-2 keeps its weights transposed
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        fan_in_fan_out=transposed,
        target_modules=names,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft uses a name that transformers deprecates
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def names_from(model: Any, names: str | list[str], first: int) -> str:
    """A pattern, as peft takes it, of the maps with these names in the blocks from the first one
    on.

    It matches on AutoModel, whose blocks are `layers.0`, and on AutoModelForCausalLM, whose blocks
    are `model.layers.0`.
    """
    if names == "all-linear":
        inside = model.layers[first].named_modules()
        names = sorted(
            {name.rpartition(".")[2] for name, module in inside if isinstance(module, nn.Linear)}
        )
    blocks = "|".join(str(i) for i in range(first, len(model.layers)))
    return rf"(.*\.)?layers\.({blocks})\.(.*\.)?({'|'.join(names)})"


def save_adapter(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
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

    model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
    own = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    others = _names_below_output(own, model.get_base_model())
    # safetensors takes no tensor twice
    again = {others[name]: weight.clone() for name, weight in own.items()}
    save_file(again | own, folder / ADAPTER_FILE, metadata={"format": "pt"})


def by_own_names(
    weights: Mapping[str, Tensor], expected: Iterable[str], core: Any
) -> dict[str, Tensor]:
    """The weights that `save_adapter` wrote, or a version before with one name each, without the
    names on AutoModelForCausalLM.

    Args:
        weights: of a file.
        expected: the names on AutoModel.
        core: the model of transformers inside.
    """
    own = set(expected)
    others = {*_names_below_output(own, core).values()} - own
    return {name: weight for name, weight in weights.items() if name not in others}


def _names_below_output(names: Iterable[str], core: Any) -> dict[str, str]:
    """{name on AutoModel: name on AutoModelForCausalLM}, which holds the same model in an attribute
    beside its output map.
    """
    wrapper, attribute = "base_model.model.", core.base_model_prefix
    inside = f"{wrapper}{attribute}." if attribute else wrapper
    return {name: inside + name.removeprefix(wrapper) for name in names}


def linear(x: Tensor, *layers: Any) -> list[Tensor]:
    """x through each of these maps: (..., in) -> [(..., out), ...], equal to what peft computes."""
    packed = layers[0].__dict__.get("packed")
    if packed is not None and not torch.is_grad_enabled() and packed.serves(x, layers):
        outputs = packed(x.flatten(0, -2))
    elif all(map(_adapted, layers)):
        A, B, scales = _adapters(layers)
        frozen = [(layer.base_layer.weight, layer.base_layer.bias) for layer in layers]
        outputs = _Adapted.apply(x.flatten(0, -2), frozen, scales, *A, *B)  # type: ignore[no-untyped-call]  # of torch
    else:  # a plain map without a module's call, which takes half the time of a small product
        return [
            F.linear(x, layer.weight, layer.bias) if type(layer) is nn.Linear else layer(x)
            for layer in layers
        ]
    return [out.unflatten(0, x.shape[:-1]) for out in outputs]


@torch.inference_mode(False)
@torch.no_grad()
def pack(*layers: Any) -> None:
    """Let `linear` compute these maps of one input by two products where no gradient is wanted,
    equal within rounding.

    Their frozen weights become views of one matrix. Layers without adapters, or of which only some
    have a bias, stay as they are.
    """
    if all(map(_adapted, layers)) and len({layer.base_layer.bias is None for layer in layers}) == 1:
        layers[0].packed = _Packed(layers)


class _Packed:
    """Adapted maps of one input: their frozen weights and the narrow sides of their adapters in one
    matrix, the wide sides in another.
    """

    def __init__(self, layers: tuple[Any, ...]) -> None:
        A, B, _ = _adapters(layers)
        bases, ranks = [layer.base_layer for layer in layers], sum(len(a) for a in A)
        self.layers, self.active, self.sizes = (
            layers,
            [*layers[0].active_adapters],
            [base.out_features for base in bases],
        )
        self.weight = torch.cat(
            [base.weight for base in bases]
            + [bases[0].weight.new_zeros(ranks, bases[0].in_features)]
        )
        self.bias = None if bases[0].bias is None else self.weight.new_zeros(len(self.weight))
        self.wide = self.weight.new_zeros(ranks, sum(self.sizes))
        parts = self.weight.split([*self.sizes, ranks])
        self.pointers = [part.data_ptr() for part in parts[:-1]]
        self.versions: list[Any] = []  # of the adapters and biases in the matrices
        for base, part in zip(bases, parts, strict=False):
            base.weight.data = part

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the layers has weights of its own."""

    def serves(self, x: Tensor, layers: tuple[Any, ...]) -> bool:
        """Whether these are the layers, none of them moved, cast, merged, disabled or given another
        adapter since, and x (..., in) is of their type.
        """
        return (
            layers == self.layers
            and not torch.compiler.is_compiling()  # an exported program has no memory to compare
            and x.dtype == self.weight.dtype
            and not torch.is_autocast_enabled(x.device.type)
            and [layer.base_layer.weight.data_ptr() for layer in layers] == self.pointers
            and not any(
                layer.merged or layer.disable_adapters or layer.active_adapters != self.active
                for layer in layers
            )
        )

    def __call__(self, rows: Tensor) -> tuple[Tensor, ...]:
        A, B, scales = _adapters(self.layers)
        biases = [] if self.bias is None else [layer.base_layer.bias for layer in self.layers]
        versions = [(x.data_ptr(), x._version) for x in (*A, *B, *biases)]
        n = self.wide.shape[1]
        if versions != self.versions:
            self.weight[n:] = torch.cat([a * scale for a, scale in zip(A, scales, strict=True)])
            self.wide.copy_(torch.block_diag(*B).t())
            if self.bias is not None:
                self.bias[:n] = torch.cat(biases)
            self.versions = versions
        out = F.linear(rows, self.weight, self.bias)
        outputs: tuple[Tensor, ...] = out[:, :n].addmm_(out[:, n:], self.wide).split(self.sizes, -1)
        return outputs


def _adapters(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Narrow sides (rank, in), wide sides (out, rank) and scales of the adapters of these
    layers.
    """
    pairs = [(layer, layer.active_adapters[0]) for layer in layers]
    A, B = (
        [getattr(layer, side)[name].weight for layer, name in pairs]
        for side in ("lora_A", "lora_B")
    )
    return A, B, [layer.scaling[name] for layer, name in pairs]


class _Adapted(torch.autograd.Function):
    """Several frozen linear maps with adapters: rows (n, in) -> (n, out) each.

    The products with the narrow sides of all adapters are one, those with the wide sides are added
    in place, and so are the gradients. Casts of adapters have no nodes in the graph.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, frozen: list[Any], scales: list[float], *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        k, device = len(scales), rows.device.type
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        )
        ctx.given, ctx.scales, rows = rows.dtype, scales, rows.to(dtype)
        weights = [weight.to(dtype) for weight, _ in frozen]
        narrow = torch.cat([A * scale for A, scale in zip(adapters[:k], scales, strict=True)]).to(
            dtype
        )
        wide = [B.to(dtype) for B in adapters[k:]]
        inner = F.linear(rows, narrow)
        ctx.save_for_backward(rows, narrow, inner, *wide, *weights)
        outputs = [
            F.linear(rows, w, None if b is None else b.to(dtype))
            for w, (_, b) in zip(weights, frozen, strict=True)
        ]
        for out, part, B in zip(
            outputs, inner.split([B.shape[1] for B in wide], -1), wide, strict=True
        ):
            out.addmm_(part, B.t())
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (rows, narrow, inner, *saved), k = ctx.saved_tensors, len(ctx.scales)
        wide, weights, ranks = saved[:k], saved[k:], [B.shape[1] for B in saved[:k]]
        parts = [g @ B for g, B in zip(gradients, wide, strict=True)]
        of_inner = torch.cat(parts, -1)
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = of_inner @ narrow
            for g, weight in zip(gradients, weights, strict=True):
                of_rows.addmm_(g, weight)
            of_rows = of_rows.to(ctx.given)
        of_A = (of_inner.t() @ rows).split(ranks)
        of_B = [
            (part.t() @ g).t() for part, g in zip(inner.split(ranks, -1), gradients, strict=True)
        ]
        return (
            of_rows,
            None,
            None,
            *(a * scale for a, scale in zip(of_A, ctx.scales, strict=True)),
            *of_B,
        )


def _adapted(layer: Any) -> bool:
    """Whether this is a linear map with one plain LoRA adapter, in use and not merged."""
    if type(layer) is nn.Linear or not (
        hasattr(layer, "lora_A")
        and type(layer.base_layer) is nn.Linear
        and len(layer.active_adapters) == 1
    ):
        return False
    special = layer.merged or layer.disable_adapters or layer.lora_variant
    return not special and isinstance(layer.lora_dropout[layer.active_adapters[0]], nn.Identity)
