"""The blocks of a language model, run in turn on embedded tokens: project, attend, finish.

Letters: B rows, n new tokens, n' of them at output positions, L text tokens, M keys of a row, H
query heads, G key heads, d head width, D width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decisionllm.backbones.attention import TextAttention, attend
from decisionllm.backbones.layouts import ALL, GPT2, BlockKind, Llama, Rope
from decisionllm.backbones.packing import PackedTokens, Rows, TokenLayout
from decisionllm.tokenizers.entity_tokens import EntityTokens

NO_OUTPUT = slice(0, 0)  # of a text, of which only the keys and values are needed
# extend(i, k, v) may store the new keys and values of block i; it returns all keys and values of
# the rows that are attended to.
Extend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Window = int | None  # see `BlockKind.window`


def attend_to_new_tokens(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new keys and values alone, and store nothing: an `Extend`."""
    return k, v


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """The places of n new tokens of B rows among the keys of their texts and rows.

    Attributes:
        positions: (B or 1, n) that the model encodes.
        slots: (B or 1, n) of each token among the keys of its row.
        num_keys: M.
        text_mask: (B or 1, L) True where real.
        output_positions: tokens whose hidden states are needed.
        extend: see `Extend`.
        texts: attention to the texts; None: there are none.
    """

    positions: Tensor
    slots: Tensor
    num_keys: int
    text_mask: Tensor
    output_positions: slice
    extend: Extend = attend_to_new_tokens
    texts: TextAttention | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """The keys that the tokens of B rows attend to in the blocks.

    Attributes:
        positions: (B or 1, n).
        visible: by the window of a block, (B or 1, n, L + M) bool: the keys that each token attends
            to.
        output_positions: of the n tokens.
        extend: see `Extend`.
        texts: attention to the texts, whose keys stand before those of the rows.
        layout: of the tokens between the attentions.
    """

    positions: Tensor
    visible: dict[Window, Tensor]
    output_positions: slice
    extend: Extend
    texts: TextAttention | None
    layout: TokenLayout


def plan_attention(places: TokenPlaces, windows: Iterable[Window]) -> AttentionPlan:
    """Let each token attend to its text and to the tokens up to itself, within these windows."""
    visible = {}
    for window in windows:
        visible[window] = visible_keys(
            places.text_mask, places.slots, places.num_keys, window, slots=places.slots
        )
    return AttentionPlan(
        positions=places.positions,
        visible=visible,
        output_positions=places.output_positions,
        extend=places.extend,
        texts=places.texts,
        layout=Rows(places.output_positions),
    )


def plan_attention_with_entities(
    places: TokenPlaces, windows: Iterable[Window], entities: EntityTokens, n: int
) -> AttentionPlan:
    """Plan the attention of n tokens and of the entities that stand behind them, see
    `EntityTokens`.

    The keys of entities are attended to and not stored. In a window an entity counts as its
    observation token does.
    """

    def extend_tokens(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        all_k, all_v = places.extend(i, k[:, :, :n], v[:, :, :n])
        return torch.cat([all_k, k[:, :, n:]], 2), torch.cat([all_v, v[:, :, n:]], 2)

    last_slots = entities.last_slots(places.slots)
    slots = entities.positions(places.slots)
    visible = {}
    for window in windows:
        of_texts_and_rows = visible_keys(
            places.text_mask, last_slots, places.num_keys, window, slots=slots
        )
        visible[window] = entities.visible(of_texts_and_rows, window)
    output_positions = slice(*places.output_positions.indices(n))
    return AttentionPlan(
        visible=visible,
        positions=entities.positions(places.positions),
        output_positions=output_positions,
        extend=extend_tokens,
        texts=places.texts,
        layout=PackedTokens(entities.real(n), output_positions),
    )


def visible_keys(
    text_mask: Tensor, last_slots: Tensor, num_keys: int, window: Window, *, slots: Tensor
) -> Tensor:
    """Return which keys each token attends to: real text, and the tokens of its row up to its last
    slot, all of them within a window that ends with the token.

    Args:
        text_mask: (N, L) True where real.
        last_slots: (N, n).
        num_keys: M, of a row.
        window: of the block; the padding of a text does not count.
        slots: (N, n) of the tokens.

    Returns:
        (N, n, L + M) bool; N is 1 where both have one row.
    """
    row_slots = torch.arange(num_keys, device=slots.device)
    of_text = text_mask[:, None].expand(-1, slots.shape[1], -1).bool()
    of_row = row_slots <= last_slots[..., None]
    if window is not None:
        out_of_sight = slots[..., None] - window  # the last slot before the window
        of_row = of_row & (row_slots > out_of_sight)
        text_slots = torch.arange(text_mask.shape[1], device=slots.device)
        text_length = text_mask.sum(1)[:, None, None]
        of_text = of_text & (text_slots > text_length + out_of_sight)
    N = max(len(of_text), len(of_row))
    return torch.cat([of_text.expand(N, -1, -1), of_row.expand(N, -1, -1)], -1)


def rotations_by_kind(
    layout: Llama | GPT2, core: Any, states: Tensor, positions: Tensor, kinds: Iterable[BlockKind]
) -> dict[str, Rope]:
    """Return the rotary embedding of positions for blocks of these kinds, by the kind's name."""
    names = dict.fromkeys(kind.name for kind in kinds)
    return {name: layout.rotations(core, states, positions, name) for name in names}


class BlockStack:
    """Runs some blocks of a model, one call of `run_block` each.

    The last block computes its queries and its feed-forward at the output positions alone.

    Args:
        layout: of the model's architecture.
        core: the transformers model.
        blocks: of it.
        kinds: of these blocks.
        plan: of the attention, with the windows of these kinds.
        training: with dropout.
    """

    def __init__(
        self,
        layout: Llama | GPT2,
        core: Any,
        blocks: Any,
        kinds: Sequence[BlockKind],
        plan: AttentionPlan,
        *,
        training: bool,
    ) -> None:
        self.layout = layout
        self.core = core
        self.blocks = blocks
        self.kinds = kinds
        self.plan = plan
        self.training = training
        self.tokens = plan.layout

    def enter(self, tokens: Tensor) -> Tensor:
        """Return the states before the first block of embedded tokens (B, n, D)."""
        states = self.tokens.pack(tokens)
        positions = self.tokens.pack(self.plan.positions)
        states = self.layout.enter(self.core, states, positions)
        self.ropes = rotations_by_kind(self.layout, self.core, states, positions, self.kinds)
        self.biases = {}
        for window, visible in self.plan.visible.items():
            bias = torch.zeros(visible.shape, dtype=states.dtype, device=states.device)
            bias = bias.masked_fill(~visible, float("-inf"))
            self.biases[window] = bias[:, None]  # (B or 1, 1, n, L + M)
        return states

    def run_block(self, i: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states behind block i, and its keys and values (B, G, n, d)."""
        q, k, v = self._project(i, states)
        outputs = self._outputs(i)
        if outputs == NO_OUTPUT:
            return states[:, outputs], k, v
        mixed = self._attend(i, q, k, v)
        return self.layout.finish(self.blocks[i], states[:, outputs], mixed), k, v

    def leave(self, states: Tensor) -> Tensor:
        """Return the hidden states at the output positions (B, n', D)."""
        if self.plan.output_positions == NO_OUTPUT:
            return states
        return self.tokens.unpack_outputs(self.layout.norm(self.core, states))

    def _is_last(self, i: int) -> bool:
        return i == len(self.blocks) - 1

    def _outputs(self, i: int) -> slice:
        """Return the tokens, as they lie, whose states are computed in block i."""
        return self.tokens.outputs if self._is_last(i) else ALL

    def _project(self, i: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries as the tokens lie, and keys and values as rows."""
        rope = self.ropes[self.kinds[i].name]
        q, k, v = self.layout.project(self.blocks[i], states, rope, self._outputs(i))
        return q, self.tokens.rows(k), self.tokens.rows(v)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the values that the tokens attend to, all heads side by side, as they lie."""
        last = self._is_last(i)
        dropout = self.layout.attention_dropout(self.blocks[i]) if self.training else 0.0
        keys, values = self.plan.extend(i, k, v)
        bias = self.biases[self.kinds[i].window]
        bias = bias[:, :, self.plan.output_positions] if last else bias
        q = self.tokens.output_rows(q) if last else self.tokens.rows(q)
        if self.plan.texts is None:
            mixed = attend(q, keys, values, bias, dropout)
        else:
            mixed = self.plan.texts.attend(i, q, keys, values, bias, dropout)
        joined = mixed.transpose(1, 2).flatten(2)  # (B, H, n, d) -> (B, n, H d)
        return self.tokens.pack_outputs(joined) if last else self.tokens.pack(joined)
