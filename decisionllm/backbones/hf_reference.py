"""Transformers' own forward of a backbone: the reference of ours, also for a cut model.

Letters: U texts, L their tokens, B rows, n tokens of a trajectory, D width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.hf_forward import hidden_states, run_behind_texts
from decisionllm.backbones.text_layers import only_blocks
from decisionllm.schema import Json

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from decisionllm.backbones.kv_cache import TextPrefix

# By which hidden states may differ that are equal but for rounding, as a share of the largest.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}


def plain(
    backbone: Backbone, tokens: Tensor, text_ids: Tensor, text_mask: Tensor, text_index: Tensor
) -> Tensor:
    """Return what `Backbone.forward` does, the text repeated for every row: (B, n, D)."""
    out, places, _ = _run(backbone, tokens, text_ids, text_mask, text_index)
    return hidden_states(out, places, tokens.dtype)


def attention_to_text(
    backbone: Backbone, tokens: Tensor, text_ids: Tensor, text_mask: Tensor, text_index: Tensor
) -> Tensor:
    """Return how much each of the tokens attends to each token of its text, mean over the heads:
    (layers, B, n, L), of the layers with softmax attention.
    """
    core = backbone.core
    before = core.config._attn_implementation
    core.set_attn_implementation("eager")  # the only one that returns its weights
    try:
        out, places, words = _run(
            backbone, tokens, text_ids, text_mask, text_index, output_attentions=True
        )
    finally:
        core.set_attn_implementation(before)
    B, n = tokens.shape[:2]
    L = text_ids.shape[1]
    is_padding = ~text_mask[text_index][:, None]  # (B, 1, L)
    layers = [tokens.new_zeros(0, B, n, L)]
    for weights in out.get("attentions") or ():  # Mamba has none
        if weights.ndim != 4:  # of RWKV other numbers
            continue
        of_tokens = weights.float().mean(1).take_along_dim(places[..., None], 1)
        of_words = of_tokens.take_along_dim(words[:, None], -1)
        if backbone.summary is not None:
            shares = backbone.summary.shares(backbone.embed(text_ids), text_mask)
            of_words = of_words @ shares[text_index]
        layers.append(of_words.masked_fill(is_padding, 0.0)[None])
    return torch.cat(layers)


def _run(
    backbone: Backbone,
    tokens: Tensor,
    text_ids: Tensor,
    text_mask: Tensor,
    text_index: Tensor,
    **options: bool,
) -> tuple[Any, Tensor, Tensor]:
    """Return the output of transformers' forward on tokens behind their texts, the places of the
    tokens in it (B, n), and the places of the keys of the texts (B, L), or of their summaries.
    """
    x = tokens.to(backbone.dtype)
    B, n = tokens.shape[:2]
    if not backbone.text_layers:
        texts = backbone.embed(text_ids)
        out, places = run_behind_texts(backbone.model, x, texts, text_mask, text_index, **options)
        return out, places, torch.arange(text_ids.shape[1], device=tokens.device).expand(B, -1)
    prefix = backbone.read_text(text_ids, text_mask)
    # The padding of a text moves before it, since a sliding window counts the keys between.
    of_text = prefix.text_mask[text_index]
    order = of_text.long().argsort(dim=1, stable=True)  # (B, L)
    mask = torch.cat([of_text.take_along_dim(order, 1), text_mask.new_ones(B, n)], 1)
    positions = mask.long().cumsum(1) - 1
    inputs: Json = options | {
        "attention_mask": mask.long(),
        "position_ids": positions[:, of_text.shape[1] :],
        "past_key_values": _prefix_of_rows(prefix, text_index, order),
        "use_cache": True,
    }
    upper = slice(backbone.text_layers, None)
    places = torch.arange(n, device=tokens.device).expand(B, -1)
    with only_blocks(backbone.core, upper), warnings.catch_warnings():
        # of `past_key_values`, a name that all supported versions have
        warnings.simplefilter("ignore", FutureWarning)
        return backbone.model(inputs_embeds=x, **inputs), places, order.argsort(dim=1)


def _prefix_of_rows(texts: TextPrefix, text_index: Tensor, order: Tensor) -> DynamicCache:
    """Return the keys and values of the text of each row in this order (B, L), as transformers
    stores them.
    """
    from transformers import DynamicCache

    past = DynamicCache()
    index = order[:, None, :, None]
    for i, (k, v) in enumerate(zip(texts.keys, texts.values, strict=True)):
        keys = k[text_index].take_along_dim(index, 2)
        values = v[text_index].take_along_dim(index, 2)
        past.update(keys, values, i)
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
    no_text = torch.zeros(1, 0, dtype=torch.long, device=device)
    texts = no_text, no_text.bool(), torch.zeros(1, dtype=torch.long, device=device)
    with in_float32(backbone.core):
        one = plain(backbone, x, *texts)[:, :4]
        other = plain(backbone, changed, *texts)[:, :4]
        differs = (one - other).abs().max() > tolerance(backbone, one)
    backbone.model.train(training)
    if differs:
        raise ValueError(
            "backbone: expected a language model whose tokens attend to earlier ones alone, got "
            f"{type(backbone.core).__name__}, which reads later ones; such a model can read the "
            "texts: text_encoder=features text_encoder.folder=..."
        )


@contextmanager
def in_float32(core: PreTrainedModel) -> Iterator[None]:
    """Let a model of 16-bit weights compute in float32, within the block of this statement.

    In 16 bits rounding hides how the models of some families differ: a token attends to later
    ones, or every fourth block has no positions.
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


def tolerance(backbone: Backbone, hidden: Tensor) -> float:
    """Return by how much hidden states may differ that are equal but for rounding."""
    return TOLERANCES.get(backbone.dtype, 5e-2) * hidden.abs().max().item()
