"""The layouts of supported architectures: how the modules of a block are called before and after
the attention.

`blocks.BlockStack` calls the parts of a layout in this order:

    blocks              the blocks of a model
    enter               embedded tokens and positions -> states before the first block
    rotations           positions -> rotary embedding of the blocks of a kind, see `BlockKind`
    project             states -> queries, keys and values of a block
    attention_dropout   of a block
    finish              states and mixed values -> states behind a block
    norm                states behind the last block -> hidden states

`pack` prepares the weights of a block for decisions. To add an architecture, write a row of
`families.FAMILIES`: with a `Llama` whose attributes say where its norms stand and how they and the
rotary embedding are computed, or with a class of its own that has the members above, and types of
its modules in `hf_types`.
"""

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decisionllm.backbones.hf_types import (
    GPT2Block,
    GPT2Model,
    LlamaBlock,
    LlamaModel,
    RMSNorm,
    Saved,
)
from decisionllm.backbones.lora import linear, pack

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ALL = slice(None)
FULL, SLIDING = "full_attention", "sliding_attention"  # names of transformers
Rope = tuple[Tensor, ...]  # cosines and sines of positions; () where the model has none


class BlockKind(NamedTuple):
    """The attention of a block.

    Attributes:
        name: FULL or SLIDING; some models have other rotary frequencies for each.
        window: the most tokens, itself included, that a token attends to; None: all before it.
    """

    name: str
    window: int | None


def block_kinds(config: "PreTrainedConfig") -> list[BlockKind]:
    """Return the kind of each block of a model."""
    window: int | None = getattr(config, "sliding_window", None) or None
    names: list[str] | None = getattr(config, "layer_types", None)
    if not names:
        names = [SLIDING if window else FULL] * config.num_hidden_layers
    return [BlockKind(name, window if name == SLIDING else None) for name in names]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """Blocks of Qwen2, Qwen3, Llama, Mistral and their like: RMS norms, rotary positions, a gated
    feed-forward.

    Attributes:
        attention_output_norm: name of the norm of what attention adds to the states; "": none.
        mlp_input_norm: of the norm before the feed-forward.
        mlp_output_norm: of the norm of what the feed-forward adds; "": none.
        norm_offset: number that every norm adds to its weight.
        rotates_by_kind: whether the rotary embedding has frequencies for each kind of block.
    """

    attention_output_norm: str = ""
    mlp_input_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    norm_offset: float = 0.0
    rotates_by_kind: bool = False

    blocks_name = "layers"
    blocks = attrgetter(blocks_name)
    attention_dropout = attrgetter("self_attn.attention_dropout")

    def enter(self, core: LlamaModel, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def rotations(self, core: LlamaModel, x: Tensor, positions: Tensor, kind: str) -> Rope:
        kinds = (kind,) if self.rotates_by_kind else ()
        cos, sin = core.rotary_emb(x, positions, *kinds)  # (B, n, d), of Olmo in float32
        cos = cos[:, None].to(x.dtype)
        sin = sin[:, None].to(x.dtype)
        left, right = sin.chunk(2, -1)
        return cos, torch.cat([-left, right], -1)

    def pack(self, block: LlamaBlock) -> None:
        attention, mlp = block.self_attn, block.mlp
        pack(attention.q_proj, attention.k_proj, attention.v_proj)
        pack(attention.o_proj)
        pack(mlp.gate_proj, mlp.up_proj)
        pack(mlp.down_proj)

    def project(
        self, block: LlamaBlock, x: Tensor, rope: Rope, out: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.self_attn
        h = self._norm(block.input_layernorm, x)
        cos, sin = rope
        if h.shape[1] == h[:, out].shape[1]:
            q, k, v = linear(h, attention.q_proj, attention.k_proj, attention.v_proj)
        else:
            (q,) = linear(h[:, out], attention.q_proj)
            k, v = linear(h, attention.k_proj, attention.v_proj)
        q, k, v = (_split_heads(part, attention.head_dim) for part in (q, k, v))
        if "q_norm" in attention._modules:  # Qwen3, Gemma 3
            q = self._norm(attention.q_norm, q)
            k = self._norm(attention.k_norm, k)
        # `attention` divides scores by the root of the head's width
        usual_scaling = attention.head_dim**-0.5
        if attention.scaling != usual_scaling:
            q = q * (attention.scaling / usual_scaling)
        return _rotate(q, cos[:, :, out], sin[:, :, out]), _rotate(k, cos, sin), v

    def finish(self, block: LlamaBlock, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self._norm_by_name(
            block, self.attention_output_norm, linear(mixed, block.self_attn.o_proj)[0]
        )
        mlp = block.mlp
        h = self._norm_by_name(block, self.mlp_input_norm, x)
        gate, up = linear(h, mlp.gate_proj, mlp.up_proj)
        out = linear(mlp.act_fn(gate) * up, mlp.down_proj)[0]
        return x + self._norm_by_name(block, self.mlp_output_norm, out)

    def norm(self, core: LlamaModel, x: Tensor) -> Tensor:
        return self._norm(core.norm, x)

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return _rms_with_offset(norm, x, self.norm_offset) if self.norm_offset else _rms(norm, x)

    def _norm_by_name(self, block: LlamaBlock, name: str, x: Tensor) -> Tensor:
        """Apply the norm of a block that has this name; "": none."""
        return self._norm(getattr(block, name), x) if name else x


class GPT2:
    """Blocks of GPT-2: layer norms, learned positions, one map to queries, keys and values."""

    blocks_name = "h"
    blocks = attrgetter(blocks_name)
    attention_dropout = attrgetter("attn.attn_dropout.p")

    def enter(self, core: GPT2Model, x: Tensor, positions: Tensor) -> Tensor:
        x = x + core.wpe(positions)
        return drop(x, core.drop.p) if core.training else x

    def rotations(self, core: GPT2Model, x: Tensor, positions: Tensor, kind: str) -> Rope:
        return ()

    def pack(self, block: GPT2Block) -> None:
        """Do nothing: its maps have no packed form."""

    def project(
        self, block: GPT2Block, x: Tensor, rope: Rope, out: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attn
        h = block.ln_1(x)
        # an adapter wraps the map: it is called whole
        if out == ALL or not hasattr(attention.c_attn, "nf"):
            q, k, v = attention.c_attn(h).split(attention.split_size, -1)
            q = q[:, out]
        else:
            weight = attention.c_attn.weight
            bias = attention.c_attn.bias
            D = attention.split_size
            q = h[:, out] @ weight[:, :D] + bias[:D]
            k, v = (h @ weight[:, D:] + bias[D:]).split(D, -1)
        split = partial(_split_heads, width=attention.head_dim)
        return split(q), split(k), split(v)

    def finish(self, block: GPT2Block, x: Tensor, mixed: Tensor) -> Tensor:
        attention, mlp = block.attn, block.mlp
        mixed = attention.c_proj(mixed)
        if block.training:
            mixed = drop(mixed, attention.resid_dropout.p)
        x = x + mixed
        out = mlp.c_proj(mlp.act(mlp.c_fc(block.ln_2(x))))
        if block.training:
            out = drop(out, mlp.dropout.p)
        return x + out

    def norm(self, core: GPT2Model, x: Tensor) -> Tensor:
        return core.ln_f(x)


def _rms(norm: RMSNorm, x: Tensor) -> Tensor:
    """Apply an RMS norm, in one call where the module is the usual one of transformers."""
    if not hasattr(norm, "variance_epsilon"):
        return norm(x)
    if norm.weight.dtype != x.dtype:  # queries and keys of Qwen3 within autocast
        return norm(x)
    return _rms_of_weight(x, norm.weight, norm.variance_epsilon)


def _rms_with_offset(norm: RMSNorm, x: Tensor, offset: float) -> Tensor:
    """Apply an RMS norm that adds a number to its weight, in float32 or wider as transformers
    does.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    return _rms_of_weight(x, norm.weight.to(exact) + offset, norm.eps)


def _rms_of_weight(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply the RMS norm of this weight, which may be of a wider type than x."""
    if (
        torch.is_grad_enabled()
        and x.dtype == torch.bfloat16
        and not x.is_cuda
        and not weight.requires_grad
    ):
        return _FrozenRMS.apply(x, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]
    return _compute_rms(x, weight, epsilon)


def _compute_rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)


class _Epsilon(Saved):
    epsilon: float


class _FrozenRMS(torch.autograd.Function):
    """RMS norm of frozen weight, whose gradient is that of layer norm with a mean of 0, which torch
    has in one call.
    """

    @staticmethod
    def forward(ctx: _Epsilon, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.epsilon = epsilon
        ctx.save_for_backward(x, weight)
        return _compute_rms(x, weight, epsilon)

    @staticmethod
    def backward(ctx: _Epsilon, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        D = weight.numel()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (length.square() / D + ctx.epsilon).rsqrt()
        of_layer_norm = torch.ops.aten.native_layer_norm_backward(
            gradient,
            x,
            weight.shape,
            torch.zeros_like(scale),
            scale,
            weight.float(),
            None,
            (True, False, False),
        )[0]
        # what layer norm subtracts, and RMS norm does not
        mean = (gradient @ weight.to(gradient.dtype))[..., None].float() / D
        return of_layer_norm.add_((scale * mean).to(x.dtype)), None, None


def _split_heads(x: Tensor, width: int) -> Tensor:
    heads: Tensor = x.unflatten(-1, (-1, width))
    return heads.transpose(1, 2)  # (B, n, H d) -> (B, H, n, d)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding; the first half of the sines has the sign of the rotation."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)


def drop(x: Tensor, share: float) -> Tensor:
    """Drop out this share, in training.

    On a CPU from 16 random bits a number: five times faster than torch's own.
    """
    if x.is_cuda or not 0 < share < 1:
        return F.dropout(x, share)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64)  # of 64 random bits
    bits = words.random_(-(2**63), None).view(torch.int16)
    keep = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(bits[: x.numel()].view(x.shape), round(share * 2**16) - 2**15, out=keep)
    return x * keep.mul_(1 / (1 - share))
