"""The forward of transformers on rows of embedded tokens, each behind its own copy of its text.

Letters: U texts, L their tokens, B rows, n tokens of a trajectory, D width.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def run_behind_texts(
    model: "PreTrainedModel | PeftModel",
    tokens: Tensor,
    texts: Tensor,
    text_mask: Tensor,
    text_index: Tensor,
    **options: bool,
) -> tuple[Any, Tensor]:
    """Run a model of transformers on rows of tokens behind their texts.

    Args:
        model: of transformers, or wrapped by peft.
        tokens: (B, n, D).
        texts: embedded (U, L, D).
        text_mask: (U, L) True where real.
        text_index: (B,) the text of each row.
        options: of the model's forward, such as output_attentions.

    Returns:
        The model's output, and the place of each token in it (B, n).
    """
    B, n = tokens.shape[:2]
    mask = torch.cat([text_mask[text_index], text_mask.new_ones(B, n)], 1)
    rows = torch.cat([texts[text_index].to(tokens.dtype), tokens], 1)
    # The padding of a text moves behind the tokens: a mask hides it from attention, but not from a
    # convolution, a recurrence or a sliding window.
    order = (~mask).long().argsort(dim=1, stable=True)
    rows = rows.take_along_dim(order[..., None], 1)
    mask = mask.take_along_dim(order, 1)
    out = model(
        inputs_embeds=rows,
        attention_mask=mask.long(),
        position_ids=mask.long().cumsum(1) - 1,
        use_cache=False,
        **options,
    )
    slots = torch.arange(n, device=tokens.device)
    return out, text_mask.sum(1)[text_index, None] + slots


def hidden_states(out: Any, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the last hidden states of a model's output at these places (B, n): (B, n, D)."""
    hidden: Tensor = out.last_hidden_state.take_along_dim(places[..., None], 1)
    return hidden.to(dtype)
