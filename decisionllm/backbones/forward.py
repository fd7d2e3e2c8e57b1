"""A transformers model that reads embeddings, block by block: shared text prefixes, a KV cache,
output positions.

A text is read once for all rows that share it, and its keys and values are multiplied for all of
them at once, see `attention`. The last block is computed only at the output positions, see `blocks`,
and decoding keeps keys and values, see `cache`. The config of a model decides whether its blocks are
supported, see `families`; transformers' own forward reads all other models, see `hf_forward`.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from decisionllm.backbones.blocks import (
    NO_OUTPUT,
    AttentionPlan,
    BlockStack,
    TokenPlaces,
    plan_attention,
    plan_attention_with_entities,
    rotations_by_kind,
)
from decisionllm.backbones.cuda_graphs import CUDAGraphReader, ReadRows
from decisionllm.backbones.families import layout_of
from decisionllm.backbones.hf_forward import hidden_states, run_behind_texts
from decisionllm.backbones.hf_types import LoadTokenizer, TextReader
from decisionllm.backbones.kv_cache import EncodedTexts, SessionCache, TextPrefix
from decisionllm.backbones.layouts import ALL, GPT2, BlockKind, Llama, block_kinds
from decisionllm.backbones.text_layers import TextLayers, text_weights
from decisionllm.backbones.text_summary import TextSummary
from decisionllm.tokenizers import text
from decisionllm.tokenizers.entity_tokens import EntityTokens

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# Letters: U texts, L their tokens, B rows, n new tokens, M keys, H query heads, G key heads, d head
# width, D width.
MOST_TEXTS = 20_000  # of which token ids and features are kept in memory
POSITIONS = "the positions of this backbone"  # that limit a length
RunBlock = Callable[[int, Tensor], tuple[Tensor, Tensor, Tensor]]  # `BlockStack.run_block`


class Backbone(nn.Module):
    """A transformers model with its text tokenizer.

    Args:
        model: of transformers, or wrapped by peft.
        load_tokenizer: loads the text tokenizer; called when the first text is read, since it takes
            a tenth of a second and more, in which no other thread runs.
        tune: `full`, `lora` or `frozen`: which weights are trained.

    Raises:
        TypeError: a tokenizer in place of the function.
    """

    model: Any

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        load_tokenizer: LoadTokenizer,
        tune: str,
    ) -> None:
        super().__init__()
        if hasattr(load_tokenizer, "decode"):
            raise TypeError(
                "Backbone: expected a function that loads the tokenizer, such as `lambda: "
                "tokenizer`, got a tokenizer"
            )
        self.model = model
        self.load_tokenizer = cache(load_tokenizer)
        self.tune = tune
        # The type whose numbers the frozen weights are, also where `widen` holds them in float32.
        self.frozen_dtype = self.dtype
        self.encoded: dict[str, list[int]] = {}  # token ids of texts
        # What reads texts in place of the word embeddings: a text encoder, see
        # `text_encoders.attach_text_encoder`, or the lower blocks, see `cut_off`.
        self.features: TextReader | None = None
        # How many lower blocks read texts alone; the tokens of a trajectory enter behind them.
        self.text_layers = 0
        self.summary: TextSummary | None = None
        self.gradient_checkpointing = False
        self.sharded = False  # see `shard`
        self.reader: ReadRows = self.read_rows  # see `record`
        self.config = self.core.config
        self.width: int = self.config.hidden_size
        # tokens that it can read at once
        self.positions: float = getattr(self.config, "max_position_embeddings", math.inf)
        # None: the blocks of this architecture are not supported
        self.layout: Llama | GPT2 | None = layout_of(self.core)
        self.kinds: list[BlockKind] = []  # of all blocks, where our forward reads them
        if self.layout is not None:
            self.kinds = block_kinds(self.config)
            self.positions = min(self.positions, _same_rotations(self.config))

    @property
    def core(self) -> Any:
        """The transformers model itself, inside peft's wrapper where there is one."""
        return self.model.get_base_model() if self.tune == "lora" else self.model

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.core.parameters())).dtype  # type: ignore[no-any-return]  # of transformers

    def widen(self) -> None:
        """Store the frozen weights in float32, their values as they are."""
        self.model.float()

    def narrow(self) -> None:
        """Store the frozen weights in the type of their values again; buffers, such as rotary
        frequencies, stay as they are.
        """
        for weight in self.core.parameters():
            weight.data = weight.data.to(self.frozen_dtype)

    def cut_off(
        self, text_layers: int, summary: TextSummary | None = None, *, source: str = ""
    ) -> None:
        """Let the lower blocks read texts alone, once: tokens of a trajectory enter behind them.

        See `text_layers.TextLayers`. summary: what the blocks above attend to; None: every word.
        """
        self.summary = summary
        self.text_layers = text_layers
        self.features = TextLayers(
            self.core,
            self.load_tokenizer,
            text_layers,
            numbers=self.frozen_dtype,
            source=source,
        )

    def text_weights(self) -> set[int]:
        """Return the ids of the weights of the lower blocks and the word embeddings, if texts are
        read by them alone.
        """
        if not self.text_layers:
            return set()
        return {id(weight) for _, weight in text_weights(self.core, self.text_layers)}

    @property
    def depth(self) -> int:
        """The number of blocks that read a trajectory."""
        return int(self.config.num_hidden_layers) - self.text_layers

    @property
    def windows(self) -> list[int | None]:
        """The windows of the blocks that read a trajectory, each once, see `BlockKind`."""
        return list(dict.fromkeys(kind.window for kind in self.kinds[self.text_layers :]))

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode U texts, on the CPU, see `tokenizers.text.encode`.

        Raises:
            ValueError: a text has as many tokens as the backbone has positions, or more.
        """
        # the empty text has no tokens, and needs no tokenizer
        different = [task for task in dict.fromkeys(texts) if task]
        new = [task for task in different if task not in self.encoded]
        if self.encoded and len(self.encoded) + len(new) > MOST_TEXTS:
            self.forget_texts()
            new = different
        if new:
            ids, mask = text.encode(self.text_tokenizer, new)
            if self.features is None:
                text.check_ids(ids, self.config.vocab_size)
            else:
                ids = self.features.table.rows(ids, mask)
            for task, row, real in zip(new, ids, mask, strict=True):
                self.encoded[task] = row[real].tolist()
        ids, mask = text.pad_ids([self.encoded.get(task, []) for task in texts])
        if ids.shape[1] >= self.positions:
            longest = max(texts, key=len)[:60]
            raise ValueError(
                f"text: expected fewer than {self.positions} tokens, {POSITIONS}, got "
                f"{ids.shape[1]}: {longest!r} ..."
            )
        return EncodedTexts(ids, mask)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.load_tokenizer()

    @property
    def text_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the texts: that of the text encoder where there is one."""
        return self.tokenizer if self.features is None else self.features.tokenizer

    def forget_texts(self) -> None:
        """Free the memory of encoded texts. Ids that `encode` returned before are no longer valid."""
        self.encoded = {}
        if self.features is not None:
            self.features.table.forget()

    def words(self, task: str) -> list[str]:
        """Return the tokens of a text, as text."""
        ids, _ = text.encode(self.text_tokenizer, [task])
        return [str(self.text_tokenizer.decode([i])) for i in ids[0].tolist()]

    def embed(self, text_ids: Tensor) -> Tensor:
        """Return the embeddings (U, L, D) of texts that are encoded, see `encode`."""
        words = self.core.get_input_embeddings() if self.features is None else self.features
        return words(text_ids)

    def forward(
        self,
        tokens: Tensor,
        text_ids: Tensor,
        text_mask: Tensor,
        text_index: Tensor,
        *,
        output_positions: slice = ALL,
        entities: EntityTokens | None = None,
    ) -> Tensor:
        """Read embedded tokens, each row after its text.

        Padding is on the right everywhere, after everything real, so that causal attention never
        includes it; the padding of a text takes no position.

        Args:
            tokens: (B, n, D).
            text_ids: (U, L) distinct texts; L = 0: no text.
            text_mask: (U, L) True where real.
            text_index: (B,) the text of each row.
            output_positions: of the n tokens.
            entities: read beside the tokens.

        Returns:
            Hidden states at the output positions (B, n', D).
        """
        L, n = text_ids.shape[1], tokens.shape[1]
        self.check_positions(self.text_places(L), n)
        on_cpu = not tokens.is_cuda
        if on_cpu and torch.is_autocast_enabled("cpu") and self.dtype == torch.float16:
            raise ValueError(
                "backbone.dtype: expected float32 or bfloat16, since a CPU does not mix float16 "
                "with bfloat16, got float16; optim.precision=no keeps float16"
            )
        states = self.embed(text_ids)
        if self.layout is None:
            assert entities is None, "refused by SequenceModel"
            x = tokens.to(self.dtype)
            out, places = run_behind_texts(self.model, x, states, text_mask, text_index)
            return hidden_states(out, places, tokens.dtype)[:, output_positions]
        if entities is not None:
            return self.read_rows(tokens, states, text_mask, text_index, output_positions, entities)
        return self.reader(tokens, states, text_mask, text_index, output_positions)

    def read_rows(
        self,
        tokens: Tensor,
        states: Tensor,
        text_mask: Tensor,
        text_index: Tensor,
        output_positions: slice,
        entities: EntityTokens | None = None,
    ) -> Tensor:
        """Read rows as `forward` does, behind texts that are embedded (U, L, D)."""
        n = tokens.shape[1]
        texts = TextPrefix([], [], text_mask, text_mask.sum(1))
        if states.shape[1]:
            texts = self.read_states(states, text_mask)
        # Without padding the mask and the positions of one row are those of all. A GPU is not asked:
        # the answer would wait for all that it has still to do.
        padded = states.shape[1] > 0 and (tokens.is_cuda or not bool(texts.text_mask.all()))
        masked = text_index if padded else text_index[:1]
        slots = torch.arange(n, device=tokens.device)[None]
        places = TokenPlaces(
            positions=texts.text_length[masked, None] + slots,
            slots=slots,
            num_keys=n,
            text_mask=texts.text_mask[masked],
            output_positions=output_positions,
            texts=texts.attention(text_index),
        )
        return self._read_tokens(tokens, places, entities)

    def _read_tokens(
        self, tokens: Tensor, places: TokenPlaces, entities: EntityTokens | None
    ) -> Tensor:
        """Run all blocks over tokens (B, n, D) and the entities beside them.

        Returns:
            Hidden states at the output positions of the n tokens (B, n', D).
        """
        if entities is None:
            return self._run_blocks(tokens, plan_attention(places, self.windows))[0]
        plan = plan_attention_with_entities(places, self.windows, entities, tokens.shape[1])
        return self._run_blocks(entities.append_to(tokens), plan)[0]

    def text_places(self, words: int) -> int:
        """Return the number of keys of a text of at most so many tokens."""
        return words if self.summary is None else self.summary.tokens

    def check_positions(self, before: int, n: int) -> None:
        """Raise a ValueError if there are no positions for n tokens behind so many others."""
        if before + n > self.positions:
            raise ValueError(
                f"text and window: expected at most {self.positions} tokens, {POSITIONS}, got "
                f"{before} + {n}; take a shorter text or a smaller window"
            )

    def read_texts(self, texts: Sequence[str]) -> TextPrefix:
        """Read U texts into a prefix of rows, each once."""
        ids, mask = self.encode(texts)
        device = next(iter(self.core.parameters())).device
        return self.read_text(ids.to(device), mask.to(device))

    def read_text(self, text_ids: Tensor, text_mask: Tensor) -> TextPrefix:
        """Read U texts (U, L) that are encoded, see `encode`.

        The output of their last block is not needed and not computed.
        """
        return self.read_states(self.embed(text_ids), text_mask)

    def read_states(self, x: Tensor, text_mask: Tensor) -> TextPrefix:
        """Read U texts that are embedded, or the states of their words behind the lower blocks
        (U, L, D).
        """
        if self.summary is not None:
            x, text_mask = self.summary(x, text_mask)
        if self.text_layers:
            keys, values = self._project_texts(x)
        else:
            slots = torch.arange(x.shape[1], device=x.device)[None]
            places = TokenPlaces(
                positions=slots,
                slots=slots,
                num_keys=x.shape[1],
                text_mask=slots[:, :0],  # nothing stands before a text
                output_positions=NO_OUTPUT,
            )
            _, keys, values = self._run_blocks(x, plan_attention(places, self.windows))
        return TextPrefix(keys, values, text_mask, text_mask.sum(1))

    def _project_texts(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and values of the upper blocks, all of the states (U, L, D) behind the
        lower ones.
        """
        assert self.layout is not None
        positions = torch.arange(x.shape[1], device=x.device)[None]
        x = self.layout.enter(self.core, x.to(self.dtype), positions)
        blocks = self.layout.blocks(self.core)[self.text_layers :]
        kinds = self.kinds[self.text_layers :]
        ropes = rotations_by_kind(self.layout, self.core, x, positions, kinds)
        keys, values = [], []
        for block, kind in zip(blocks, kinds, strict=True):
            _, k, v = self.layout.project(block, x, ropes[kind.name], NO_OUTPUT)
            keys.append(k)
            values.append(v)
        return keys, values

    def append(
        self,
        tokens: Tensor,
        cache: SessionCache,
        filled: Tensor,
        rows: Tensor | None = None,
        *,
        output_positions: slice = ALL,
        entities: EntityTokens | None = None,
    ) -> Tensor:
        """Read more tokens of some rows of a cache and write them into its room, in place.

        Args:
            tokens: (N, n, D), may be padded on the right: the next call overwrites what padding
                wrote.
            cache: of a session.
            filled: (N,) tokens of steps that each row has in the cache.
            rows: (N,) rows of the cache; None: all.
            output_positions: of the n tokens.
            entities: read beside the tokens, and not stored.

        Returns:
            Hidden states at the output positions (N, n', D).

        Raises:
            ValueError: a row has more tokens than the backbone has positions.
        """
        if rows is None:
            rows = torch.arange(len(cache.text_index), device=tokens.device)
        length = cache.texts.text_length[cache.text_index[rows]]
        self.check_positions(int((length + filled).max()), tokens.shape[1])
        # a CPU multiplies parts of a buffer in place in float32, but copies them in bfloat16
        whole = not tokens.is_cuda and self.dtype != torch.float32
        room = cache.place(rows, filled, tokens.shape[1], whole=whole)

        def write(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return cache.write(i, room, k, v)

        text_index = cache.text_index[rows]
        text_mask = cache.texts.text_mask[text_index]
        slots = room.slots
        if room.together is not None and bool(text_mask.all()):  # one row stands for all
            text_mask = text_mask[:1]
            length = length[:1]
            slots = slots[:1]
        places = TokenPlaces(
            positions=length[:, None] + slots,
            slots=slots,
            num_keys=room.end,
            text_mask=text_mask,
            output_positions=output_positions,
            extend=write,
            texts=cache.texts.attention(text_index),
        )
        return self._read_tokens(tokens, places, entities)

    def read_after(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Read more tokens of rows in lock-step, as one function of tensors.

        Args:
            tokens: (N, n, D).
            past: keys and values (layers, 2, N, G, M, d) of all tokens before, none of them
                padding.

        Returns:
            The hidden state of the last token (N, D), and the keys and values (layers, 2, N, G,
            M+n, d).
        """
        M, n = past.shape[4], tokens.shape[1]
        both: list[Tensor] = []  # keys and values of each block

        def append(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            both.append(torch.cat([past[i], torch.stack([k, v])], 3))
            return both[i][0], both[i][1]

        slots = torch.arange(n, device=tokens.device)[None]
        places = TokenPlaces(
            positions=M + slots,
            slots=slots,
            num_keys=n,
            text_mask=torch.ones(1, M, dtype=torch.bool, device=tokens.device),  # all before
            output_positions=slice(-1, None),
            extend=append,
        )
        hidden = self._run_blocks(tokens, plan_attention(places, self.windows))[0]
        return hidden[:, -1], torch.stack(both)

    def _run_blocks(
        self, tokens: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the blocks that read trajectories, in turn, on embedded tokens (B, n, D).

        Returns:
            Hidden states at the output positions (B, n', D), and the new keys and values of each
            block (B, G, n, d).
        """
        assert self.layout is not None
        blocks = self.layout.blocks(self.core)[self.text_layers :]
        kinds = self.kinds[self.text_layers :]
        training = self.model.training
        stack = BlockStack(self.layout, self.core, blocks, kinds, plan, training=training)
        states = stack.enter(tokens.to(self.dtype))
        keys, values = [], []
        for i, block in enumerate(blocks):
            call = block.step if self.sharded else _call
            if self.gradient_checkpointing and torch.is_grad_enabled():
                states, k, v = checkpoint(call, stack.run_block, i, states, use_reentrant=False)
            else:
                states, k, v = call(stack.run_block, i, states)
            keys.append(k)
            values.append(v)
        return stack.leave(states), keys, values

    def checkpoint_gradients(self, enabled: bool) -> None:
        """Let the backward pass compute each block again, whose inner states are then not kept."""
        self.gradient_checkpointing = enabled
        if enabled and self.layout is None:
            with warnings.catch_warnings():
                # of a name that all supported versions have
                warnings.simplefilter("ignore", FutureWarning)
                self.core.gradient_checkpointing_enable({"use_reentrant": False})

    def record(self) -> None:
        """Let a training step on a GPU start its kernels as recorded lists, see `recorded`."""
        if self.layout is not None and not self.gradient_checkpointing:
            self.reader = CUDAGraphReader(self, self.read_rows)

    def pack(self) -> None:
        """Lay the weights of adapted maps out for decisions, see `lora.pack`; they may be trained
        further.
        """
        if self.layout is not None and not self.sharded:
            for block in self.layout.blocks(self.core):
                self.layout.pack(block)

    def shard(self) -> None:
        """Let this forward too gather the weights of each block while it is read.

        Called once, after FSDP2 has sharded the blocks.
        """
        # which nothing here changes in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        if self.layout is not None:
            for block in self.layout.blocks(self.core):
                block.step = _call
                register_fsdp_forward_method(block, "step")
        self.sharded = True


def _call(run_block: RunBlock, i: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return run_block(i, states)


def _same_rotations(config: "PreTrainedConfig") -> float:
    """Return how long a sequence may be until the rotary frequencies of a model are others, also
    those of its beginning, or its queries are scaled.
    """
    own = getattr(config, "rope_parameters", None) or {}
    by_kind = [rotations for rotations in own.values() if isinstance(rotations, dict)]
    longest = math.inf
    for rotations in by_kind or [own]:
        if rotations.get("rope_type") == "longrope" or rotations.get("llama_4_scaling_beta"):
            longest = min(longest, rotations["original_max_position_embeddings"])
    return longest
