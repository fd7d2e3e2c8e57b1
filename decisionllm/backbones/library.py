"""The transformers library's own forward of a backbone: the reference of ours, and the reader of
architectures whose blocks ours does not support.

Letters: U texts, L their tokens, B rows, n tokens of a trajectory, D width.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from decisionllm.backbones.cut import only_blocks
from decisionllm.backbones.families import layout_of
from decisionllm.backbones.layouts import GPT2, Llama, drop
from decisionllm.files import explained
from decisionllm.schema import Json

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from decisionllm.backbones.cache import KVCache
    from decisionllm.backbones.forward import Backbone

# By which hidden states may differ that are equal but for rounding, as a share of the largest.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
# Of the comparison in training: the size of weights and inputs, and how many positions it has, spread
# up to the last one, or to the one beyond which a rotation has few correct digits.
LARGE = 3.0
SPREAD = 16
MOST_POSITIONS = 2**17


def plain(
    backbone: Backbone, tokens: Tensor, text_ids: Tensor, text_mask: Tensor, text_index: Tensor
) -> Tensor:
    """The same as `Backbone.forward`, the text repeated for every row: (B, n, D)."""
    out, places = _read(backbone, tokens, text_ids, text_mask, text_index)
    hidden: Tensor = out.last_hidden_state.take_along_dim(places[..., None], 1)
    return hidden.to(tokens.dtype)


def attention_to_text(
    backbone: Backbone, tokens: Tensor, text_ids: Tensor, text_mask: Tensor, text_index: Tensor
) -> Tensor:
    """How much each of the tokens attends to each token of its text, mean over the heads: (layers,
    B, n, L), of the layers with softmax attention.
    """
    core = backbone.core
    before = core.config._attn_implementation
    core.set_attn_implementation("eager")  # the only one that returns its weights
    try:
        out, places = _read(
            backbone, tokens, text_ids, text_mask, text_index, output_attentions=True
        )
    finally:
        core.set_attn_implementation(before)
    B, n = tokens.shape[:2]
    L = text_ids.shape[1]
    no_word = ~text_mask[text_index][:, None]  # (B, 1, L)
    found = tokens.new_zeros(0, B, n, L)
    for weights in out.get("attentions") or ():  # Mamba has none
        if weights.ndim != 4:  # of RWKV other numbers
            continue
        of_tokens = weights.float().mean(1).take_along_dim(places[..., None], 1)
        of_words = of_tokens[..., : backbone.text_places(L)]
        if backbone.summary is not None:
            shares = backbone.summary.shares(backbone.embed(text_ids), text_mask)
            of_words = of_words @ shares[text_index]
        of_words = of_words.masked_fill(no_word, 0.0)
        found = torch.cat([found, of_words[None]])
    return found


def _read(
    backbone: Backbone,
    tokens: Tensor,
    text_ids: Tensor,
    text_mask: Tensor,
    text_index: Tensor,
    **options: bool,
) -> tuple[Any, Tensor]:
    """The output of the library's forward on tokens after their texts, and the places of the tokens
    in it (B, n).
    """
    x = tokens.to(backbone.dtype)
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    of_tokens = text_mask.new_ones(tokens.shape[:2])
    if not backbone.text_layers:
        mask = torch.cat([text_mask[text_index], of_tokens], 1)
        texts = backbone.embed(text_ids)[text_index].to(backbone.dtype)
        x = torch.cat([texts, x], 1)
        # The padding of a text moves behind the tokens: a mask hides it from attention, but not
        # from a convolution, a recurrence or a sliding window.
        order = (~mask).long().argsort(dim=1, stable=True)
        x = x.take_along_dim(order[..., None], 1)
        mask = mask.take_along_dim(order, 1)
        places = text_mask.sum(1)[text_index, None] + slots
        out = backbone.model(
            inputs_embeds=x,
            attention_mask=mask.long(),
            position_ids=mask.long().cumsum(1) - 1,
            use_cache=False,
            **options,
        )
        return out, places
    cache = backbone.read_text(text_ids, text_mask)
    mask = torch.cat([cache.text_mask[text_index], of_tokens], 1)
    positions = mask.long().cumsum(1) - 1
    given: Json = options | {
        "attention_mask": mask.long(),
        "position_ids": positions[:, cache.text_mask.shape[1] :],
        "past_key_values": _of_rows(cache, text_index),
        "use_cache": True,
    }
    upper = slice(backbone.text_layers, None)
    with only_blocks(backbone.core, upper), warnings.catch_warnings():
        # of `past_key_values`, a name that all supported versions have
        warnings.simplefilter("ignore", FutureWarning)
        return backbone.model(inputs_embeds=x, **given), slots.expand(tokens.shape[:2])


def _of_rows(texts: KVCache, text_index: Tensor) -> DynamicCache:
    """Keys and values of the text of each row, as the library keeps them."""
    from transformers import DynamicCache

    past = DynamicCache()
    for i, (k, v) in enumerate(zip(texts.keys, texts.values, strict=True)):
        past.update(k[text_index], v[text_index], i)
    return past


@torch.no_grad()
def check_causal(backbone: Backbone) -> None:
    """Raise a ValueError if a hidden state of a backbone depends on later tokens.

    It would then know the action that it predicts, and those after it, from the log.
    """
    if backbone.layout is not None:  # our forward masks later tokens
        return
    training = backbone.model.training
    backbone.model.eval()
    device = next(iter(backbone.core.parameters())).device
    numbers = torch.linspace(-1, 1, 8 * backbone.width, device=device)
    x = numbers.view(1, 8, -1).sin()
    changed = x.clone()
    changed[:, 4:].neg_()
    none = torch.zeros(1, 0, dtype=torch.long, device=device)
    texts = none, none.bool(), torch.zeros(1, dtype=torch.long, device=device)
    with _in_float32(backbone.core):
        one, other = (plain(backbone, tokens, *texts)[:, :4] for tokens in (x, changed))
        differs = (one - other).abs().max() > _tolerance(backbone, one)
    backbone.model.train(training)
    if differs:
        wanted = "a language model whose tokens attend to earlier ones alone"
        name = type(backbone.core).__name__
        remedy = "such a model can read the texts: text_encoder=features text_encoder.folder=..."
        raise ValueError(
            f"backbone: expected {wanted}, got {name}, which reads later ones; {remedy}"
        )


@torch.no_grad()
def matching_layout(backbone: Backbone) -> Llama | GPT2 | None:
    """Return the layout that computes what the library does; None: no layout does.

    The config decides, see `families`. A comparison of both forwards is the second line of defence.
    """
    layout = layout_of(backbone.config)
    if layout is None:
        return None
    training = backbone.model.training
    backbone.model.eval()
    backbone.layout = layout
    try:
        with _in_float32(backbone.core):
            is_equal = _is_equal(backbone) and _is_equal_in_training(backbone)
    finally:
        backbone.model.train(training)
    return layout if is_equal else None


def _is_equal(backbone: Backbone) -> bool:
    """Return whether our forward computes what the library does for two short texts and five
    tokens.
    """
    device = next(iter(backbone.core.parameters())).device
    last_id = backbone.config.vocab_size - 1
    ids = torch.linspace(0, last_id, 6, device=device).long().view(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device=device, dtype=torch.bool)
    inputs = _noise(backbone, 5), ids, mask, torch.arange(2, device=device)
    try:
        ours = backbone(*inputs)
    except Exception:  # whatever blocks of another kind raise
        return False
    expected = plain(backbone, *inputs)
    return torch.allclose(ours, expected, atol=_tolerance(backbone, expected), rtol=0)


def _noise(backbone: Backbone, n: int) -> Tensor:
    """Return n tokens of two rows, (2, n, D), the same each time."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, n, backbone.width, generator=generator, dtype=backbone.dtype)
    return numbers.to(next(iter(backbone.core.parameters())).device)


def _is_equal_in_training(backbone: Backbone) -> bool:
    """Return whether the first and the last block compute in training what the library does, at
    positions up to the last, with large weights, whose products reach any clipping.
    """
    last = min(backbone.positions, MOST_POSITIONS) - 1
    core = backbone.core
    device = next(iter(core.parameters())).device
    positions = torch.linspace(0, last, min(SPREAD, int(last) + 1), device=device).long()
    x = _noise(backbone, len(positions)) * LARGE
    backbone.model.train()
    with _first_and_last_block(backbone), _large_weights(core), _DropoutScales():
        ours = backbone.read_at(x, positions)
        expected = core(
            inputs_embeds=x,
            attention_mask=torch.ones(x.shape[:2], dtype=torch.long, device=device),
            position_ids=positions.expand(len(x), -1),
            use_cache=False,
        ).last_hidden_state
    return torch.allclose(ours, expected, atol=_tolerance(backbone, expected), rtol=0)


class _DropoutScales(TorchFunctionMode):
    """Let dropout of a share p multiply by 1 + p, so that the same dropout gives the same numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is drop:
            x, share = args
            return x * (1 + share)
        if func is F.dropout:
            bound = inspect.signature(F.dropout).bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
            return options["input"] * (1 + options["p"] * options["training"])
        if func is F.scaled_dot_product_attention:
            share = kwargs.pop("dropout_p", 0.0)
            return func(*args, **kwargs) * (1 + share)
        return func(*args, **kwargs)


@contextmanager
def _first_and_last_block(backbone: Backbone) -> Iterator[None]:
    """Let a model consist of these two blocks, within the block of this statement."""
    assert backbone.layout is not None
    core, name = backbone.core, backbone.layout.blocks_name
    blocks = getattr(core, name)
    setattr(core, name, nn.ModuleList([blocks[0], blocks[-1]][: len(blocks)]))
    try:
        yield
    finally:
        setattr(core, name, blocks)


@contextmanager
def _large_weights(core: PreTrainedModel) -> Iterator[None]:
    """Let each row of a matrix have length LARGE and each vector a root mean square of LARGE,
    within the block of this statement.
    """
    words = core.get_input_embeddings().weight
    before = {weight: weight.data for weight in core.parameters() if weight is not words}
    for weight, numbers in before.items():
        length = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True).clamp(min=1e-9)
        if weight.ndim == 1:
            length = length / len(weight) ** 0.5
        weight.data = numbers * (LARGE / length)
    try:
        yield
    finally:
        for weight, numbers in before.items():
            weight.data = numbers


@contextmanager
def _in_float32(core: PreTrainedModel) -> Iterator[None]:
    """Let a model of 16-bit weights compute in float32, within the block of this statement.

    In 16 bits rounding hides what the models of some families do: every fourth block has no
    positions, these turn other pairs of numbers, or a token attends to later ones.
    """
    before = {}
    for weight in core.parameters():
        if weight.dtype in (torch.bfloat16, torch.float16):
            before[weight] = weight.dtype
            weight.data = weight.data.float()
    try:
        yield
    finally:
        for weight, dtype in before.items():
            weight.data = weight.data.to(dtype)


def _tolerance(backbone: Backbone, hidden: Tensor) -> float:
    """By how much hidden states may differ that are equal but for rounding."""
    return TOLERANCES.get(backbone.dtype, 5e-2) * hidden.abs().max().item()


def whole_model(source: str, **options: object) -> PreTrainedModel:
    """The model of a folder or of the hub, see `AutoModel.from_pretrained`.

    Raises:
        OSError: its files lack weights, which transformers would draw at random, or have some of
            other sizes than its config.json says.
    """
    from transformers import AutoModel

    model: PreTrainedModel
    other = "its weights have other sizes than its config.json says"
    with explained(other, RuntimeError, raised=OSError):
        model, loading = AutoModel.from_pretrained(
            source, output_loading_info=True, trust_remote_code=False, **options
        )
    lacking = loading["missing_keys"]
    if lacking:
        raise OSError(f"it lacks weights of {type(model).__name__}, such as {min(lacking)}")
    return model
