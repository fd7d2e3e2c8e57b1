"""A transformers model that reads embeddings, block by block: shared text prefixes, a KV cache,
output positions.

A text is read once for all rows that share it, and its keys and values are multiplied for all of
them at once, see `attention`. The last block is computed only at the output positions, and decoding
keeps keys and values, see `cache`. `library.plain` is the library's own forward on the same
embeddings; when a model is loaded both are compared, and an architecture whose blocks are not
supported is read by the library.
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

from decisionllm.backbones import library
from decisionllm.backbones.attention import TextAttention, attend
from decisionllm.backbones.cache import KVCache, SessionCache
from decisionllm.backbones.cut import TextLayers
from decisionllm.backbones.families import layout_of
from decisionllm.backbones.layouts import ALL, GPT2, Llama
from decisionllm.backbones.packing import PackedTokens, Rows, TokenLayout
from decisionllm.backbones.parts import LoadTokenizer, TextReader
from decisionllm.backbones.recorded import ReadRows, Recorded
from decisionllm.backbones.summary import TextSummary
from decisionllm.tokenizers import text
from decisionllm.tokenizers.entity_tokens import EntityTokens

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# Letters: U texts, L their tokens, B rows, n new tokens, M keys, H query heads, G key heads, d head
# width, D width.
MOST_TEXTS = 20_000  # of which token ids and features are kept in memory
POSITIONS = "the positions or the sliding window of this backbone"  # that limit a length
Step = Callable[[int, Tensor], tuple[Tensor, Tensor, Tensor]]  # of block i: x, new keys and values
# extend(i, k, v) may keep the new keys and values of block i; it returns all to attend to.
Extend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


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
            wanted = "a function that loads the tokenizer, such as `lambda: tokenizer`"
            raise TypeError(f"Backbone: expected {wanted}, got a tokenizer")
        self.model = model
        self.load_tokenizer = cache(load_tokenizer)
        self.tune = tune
        # The type whose numbers the frozen weights are, also where `widen` holds them in float32.
        self.frozen_dtype = self.dtype
        self.encoded: dict[str, list[int]] = {}  # token ids of texts
        # What reads texts in place of the word embeddings: a text encoder, see `readers.attach`, or
        # the lower blocks, see `cut_off`.
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
        longest = self.positions
        if layout_of(self.config) is not None:
            # our forward attends to all earlier tokens, and keeps their keys
            window = _sliding_window(self.config)
            self.positions = min(longest, window, _same_rotations(self.config))
        # None: the blocks of this architecture are not supported
        self.layout: Llama | GPT2 | None = library.matching_layout(self)
        if self.layout is None:
            self.positions = longest

    @property
    def core(self) -> Any:
        """The transformers model itself, inside peft's wrapper where there is one."""
        return self.model.get_base_model() if self.tune == "lora" else self.model

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.core.parameters())).dtype  # type: ignore[no-any-return]  # of transformers

    def widen(self) -> None:
        """Hold the frozen weights in float32, their numbers as they are."""
        self.model.float()

    def narrow(self) -> None:
        """Hold the frozen weights in the type of their numbers again; buffers, such as rotary
        frequencies, stay as they are.
        """
        for weight in self.core.parameters():
            weight.data = weight.data.to(self.frozen_dtype)

    def cut_off(self, text_layers: int, summary: TextSummary | None = None) -> None:
        """Let the lower blocks read texts alone, once: tokens of a trajectory enter behind them.

        See `cut.TextLayers`. summary: what the blocks above attend to; None: every word.
        """
        self.summary = summary
        self.text_layers = text_layers
        self.features = TextLayers(
            self.core, self.load_tokenizer, text_layers, numbers=self.frozen_dtype
        )

    @property
    def depth(self) -> int:
        """The blocks that read a trajectory."""
        return int(self.config.num_hidden_layers) - self.text_layers

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids of U texts (U, L), padded on the right, and a mask (U, L), True where real; see
        `tokenizers.text.encode`.
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
                ids = self.features.kept.rows(ids, mask)
            for task, row, real in zip(new, ids, mask, strict=True):
                self.encoded[task] = row[real].tolist()
        ids, mask = text.padded([self.encoded.get(task, []) for task in texts])
        if ids.shape[1] >= self.positions:
            wanted = f"fewer than {self.positions} tokens, {POSITIONS}"
            longest = max(texts, key=len)[:60]
            raise ValueError(f"text: expected {wanted}, got {ids.shape[1]}: {longest!r} ...")
        return ids, mask

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.load_tokenizer()

    @property
    def text_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Of what reads the texts: the text encoder's where there is one."""
        return self.tokenizer if self.features is None else self.features.tokenizer

    def forget_texts(self) -> None:
        """Free what is kept of texts. Ids that `encode` gave before are no longer valid."""
        self.encoded = {}
        if self.features is not None:
            self.features.kept.forget()

    def words(self, task: str) -> list[str]:
        """The tokens of a text, as text."""
        ids, _ = text.encode(self.text_tokenizer, [task])
        return [str(self.text_tokenizer.decode([i])) for i in ids[0].tolist()]

    def embed(self, text_ids: Tensor) -> Tensor:
        """Token ids of texts, see `encode`, -> embeddings (U, L, D)."""
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
            wanted = "float32 or bfloat16, since a CPU does not mix float16 with bfloat16"
            remedy = "optim.precision=no keeps float16"
            raise ValueError(f"backbone.dtype: expected {wanted}, got float16; {remedy}")
        if self.layout is None:
            assert entities is None, "refused by SequenceModel"
            return library.plain(self, tokens, text_ids, text_mask, text_index)[:, output_positions]
        states = self.embed(text_ids)
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
        """As `forward`, of texts that are embedded (U, L, D)."""
        n = tokens.shape[1]
        texts = KVCache([], [], text_mask, text_mask.sum(1))
        if states.shape[1]:
            texts = self._read_embedded(states, text_mask)
        # Without padding the mask and the positions of one row are those of all. A GPU is not asked:
        # the answer would wait for all that it has still to do.
        padded = states.shape[1] > 0 and (tokens.is_cuda or not bool(texts.text_mask.all()))
        masked = text_index if padded else text_index[:1]
        slots = torch.arange(n, device=tokens.device)[None]
        positions = texts.text_length[masked, None] + slots
        before = texts.attention(text_index)
        mask = texts.text_mask[masked]
        return self._read_beside(
            entities, tokens, slots, positions, mask, n, _new_alone, output_positions, before
        )

    def _read_beside(
        self,
        entities: EntityTokens | None,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        text_mask: Tensor,
        M: int,
        extend: Extend,
        output_positions: slice,
        texts: TextAttention | None,
    ) -> Tensor:
        """Run all blocks over tokens (B, n, D) and the entities beside them.

        Args:
            slots: (B or 1, n) place of each token among the M keys of the trajectory.
            positions: (B or 1, n).
            text_mask: (B or 1, L) True where real.
            extend: of the n tokens.

        Returns:
            Hidden states at the output positions of the n tokens (B, n', D).
        """
        if entities is None:
            visible = _visible(text_mask, slots, M)
            return self._run(tokens, positions, visible, extend, output_positions, texts)[0]
        n = tokens.shape[1]

        def extend_trajectory(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            all_k, all_v = extend(i, k[:, :, :n], v[:, :, :n])
            return torch.cat([all_k, k[:, :, n:]], 2), torch.cat([all_v, v[:, :, n:]], 2)

        visible = entities.visible(_visible(text_mask, entities.last_slots(slots), M))
        outputs = slice(*output_positions.indices(n))
        whole = entities.append_to(tokens)
        places = entities.positions(positions)
        layout = PackedTokens(entities.real(n), outputs)
        return self._run(whole, places, visible, extend_trajectory, outputs, texts, layout)[0]

    def text_places(self, words: int) -> int:
        """How many keys a text of at most so many tokens has."""
        return words if self.summary is None else self.summary.tokens

    def check_positions(self, before: int, n: int) -> None:
        """Raise a ValueError if there are no positions for n tokens behind so many others."""
        if before + n > self.positions:
            wanted = f"at most {self.positions} tokens, {POSITIONS}"
            remedy = "take a shorter text or a smaller window"
            raise ValueError(f"text and window: expected {wanted}, got {before} + {n}; {remedy}")

    def read_text(self, text_ids: Tensor, text_mask: Tensor) -> KVCache:
        """Read U texts (U, L) into a cache.

        The output of their last block is not needed and not computed.
        """
        return self._read_embedded(self.embed(text_ids), text_mask)

    def _read_embedded(self, x: Tensor, text_mask: Tensor) -> KVCache:
        """`read_text` of embeddings (U, L, D)."""
        if self.summary is not None:
            x, text_mask = self.summary(x, text_mask)
        if self.text_layers:
            keys, values = self._keys_values(x)
        else:
            slots = torch.arange(x.shape[1], device=x.device)[None]
            visible = _visible(slots[:, :0], slots, x.shape[1])  # nothing stands before a text
            _, keys, values = self._run(x, slots, visible, _new_alone, output_positions=slice(0, 0))
        return KVCache(keys, values, text_mask, text_mask.sum(1))

    def _keys_values(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the upper blocks, all of the same states (U, L, D): those that the
        lower blocks have of texts.
        """
        assert self.layout is not None
        positions = torch.arange(x.shape[1], device=x.device)[None]
        x, rope = self.layout.enter(self.core, x.to(self.dtype), positions)
        keys, values = [], []
        for block in self.layout.blocks(self.core)[self.text_layers :]:
            _, k, v = self.layout.project(block, x, rope, slice(0, 0))
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
            entities: read beside the tokens, and not kept.

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
        place = cache.place(rows, filled, tokens.shape[1], whole=whole)

        def write(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return cache.write(i, place, k, v)

        text_index = cache.text_index[rows]
        text_mask = cache.texts.text_mask[text_index]
        slots = place.slots
        if place.together is not None and bool(text_mask.all()):  # one row stands for all
            text_mask = text_mask[:1]
            length = length[:1]
            slots = slots[:1]
        positions = length[:, None] + slots
        before = cache.texts.attention(text_index)
        return self._read_beside(
            entities,
            tokens,
            slots,
            positions,
            text_mask,
            place.end,
            write,
            output_positions,
            before,
        )

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
        all_before = torch.ones(1, M, dtype=torch.bool, device=tokens.device)
        visible = _visible(all_before, slots, n)
        hidden = self._run(tokens, M + slots, visible, append, slice(-1, None))[0]
        return hidden[:, -1], torch.stack(both)

    def read_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read tokens (N, n, D) without texts at these positions (n,): hidden states (N, n, D)."""
        n = tokens.shape[1]
        slots = torch.arange(n, device=tokens.device)[None]
        visible = _visible(slots[:, :0], slots, n)
        return self._run(tokens, positions[None], visible, _new_alone, ALL)[0]

    def _run(
        self,
        x: Tensor,
        positions: Tensor,
        visible: Tensor,
        extend: Extend,
        output_positions: slice,
        texts: TextAttention | None = None,
        tokens: TokenLayout | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """All blocks in turn; the last one's queries and feed-forward only at the output positions.

        Args:
            visible: (B or 1, n, M) bool.
            extend: see `Extend`.
            texts: whose keys stand before these.
            tokens: how they lie between the attentions; None: as rows.

        Returns:
            Hidden states, and the new keys and values of each block.
        """
        assert self.layout is not None
        layout = self.layout
        tokens = tokens or Rows(output_positions)
        blocks = layout.blocks(self.core)[self.text_layers :]
        states = tokens.pack(x.to(self.dtype))
        x, rope = layout.enter(self.core, states, tokens.pack(positions))
        bias = torch.zeros(visible.shape, dtype=x.dtype, device=x.device)
        bias = bias.masked_fill(~visible, float("-inf"))[:, None]

        def step(i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            block = blocks[i]
            last = i == len(blocks) - 1
            out = tokens.outputs if last else ALL
            q, k, v = layout.project(block, x, rope, out)
            k, v = tokens.rows(k), tokens.rows(v)
            if out == slice(0, 0):
                return x[:, out], k, v
            dropout = layout.attention_dropout(block) if self.model.training else 0.0
            all_k, all_v = extend(i, k, v)
            q = tokens.output_rows(q) if last else tokens.rows(q)
            seen = bias[:, :, output_positions] if last else bias
            given = q, all_k, all_v, seen, dropout
            mixed = attend(*given) if texts is None else texts.attend(i, *given)
            joined = mixed.transpose(1, 2).flatten(2)  # (B, H, n, d) -> (B, n, H d)
            joined = tokens.pack_outputs(joined) if last else tokens.pack(joined)
            return layout.finish(block, x[:, out], joined), k, v

        keys, values = [], []
        for i, block in enumerate(blocks):
            call = block.step if self.sharded else _call
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, k, v = checkpoint(call, step, i, x, use_reentrant=False)
            else:
                x, k, v = call(step, i, x)
            keys.append(k)
            values.append(v)
        if output_positions != slice(0, 0):
            x = tokens.unpack_outputs(layout.norm(self.core, x))
        return x, keys, values

    def checkpoint_gradients(self, wanted: bool) -> None:
        """Whether the backward pass computes each block again, whose inner states are then not
        kept.
        """
        self.gradient_checkpointing = wanted
        if wanted and self.layout is None:
            with warnings.catch_warnings():
                # of a name that all supported versions have
                warnings.simplefilter("ignore", FutureWarning)
                self.core.gradient_checkpointing_enable({"use_reentrant": False})

    def record(self) -> None:
        """Let a training step on a GPU start its kernels as recorded lists, see `recorded`."""
        if self.layout is not None and not self.gradient_checkpointing:
            self.reader = Recorded(self)

    def pack(self) -> None:
        """Lay the weights of adapted maps out for decisions, see `lora.pack`; they may be trained
        further.
        """
        if self.layout is not None and not self.sharded:
            for block in self.layout.blocks(self.core):
                self.layout.pack(block)

    def shard(self) -> None:
        """To be called once FSDP2 has sharded the blocks: gathers the weights of each while it is
        read, by this forward too.
        """
        # which nothing here changes in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        if self.layout is not None:
            for block in self.layout.blocks(self.core):
                block.step = _call
                register_fsdp_forward_method(block, "step")
        self.sharded = True


def _new_alone(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The `Extend` of tokens that attend to each other alone, which keeps nothing."""
    return k, v


def _call(step: Step, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return step(i, x)


def _sliding_window(config: "PreTrainedConfig") -> float:
    """How many tokens, itself included, a token attends to at most in any block of a model."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return math.inf
    window: int | None = getattr(config, "sliding_window", None)
    return window or math.inf


def _same_rotations(config: "PreTrainedConfig") -> float:
    """Return how long a sequence may be until the rotary frequencies of a model are others, also
    those of its beginning, or its queries are scaled.
    """
    rotations = getattr(config, "rope_parameters", None) or {}
    if rotations.get("rope_type") != "longrope" and not rotations.get("llama_4_scaling_beta"):
        return math.inf
    longest: int = rotations["original_max_position_embeddings"]
    return longest


def _visible(text_mask: Tensor, slots: Tensor, M: int) -> Tensor:
    """The keys each token attends to, all real text and tokens up to itself: (N, L), (N, n) -> (N,
    n, L+M) bool.
    """
    text = text_mask[:, None].expand(-1, slots.shape[1], -1).bool()
    steps = torch.arange(M, device=slots.device) <= slots[..., None]
    N = max(len(text), len(steps))
    return torch.cat([text.expand(N, -1, -1), steps.expand(N, -1, -1)], -1)
