"""The layouts of supported architectures: how the modules of a block are called before and after
the attention.

`blocks.BlockStack` calls the parts of a layout in this order:

    blocks              the blocks of a model
    enter               embedded tokens and positions -> states before the first block
    project             states -> queries, keys and values of a block
    attention_dropout   of a block
    finish              states and mixed values -> states behind a block
    norm                states behind the last block -> hidden states

`pack` prepares the weights of a block for decisions. To add an architecture, write a class with
these members, types of its modules in `parts`, and a row of `families.FAMILIES`.
"""

from functools import partial
from operator import attrgetter

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

ALL = slice(None)
Rope = tuple[Tensor, ...]  # cosines and sines of positions; () where the model has none


class Llama:
    """Blocks of Qwen2, Qwen3, Llama, Mistral and their like: RMS norms, rotary positions, a gated
    feed-forward.
    """

    blocks_name = "layers"
    blocks = attrgetter(blocks_name)
    attention_dropout = attrgetter("self_attn.attention_dropout")

    def enter(self, core: LlamaModel, x: Tensor, positions: Tensor) -> tuple[Tensor, Rope]:
        cos, sin = core.rotary_emb(x, positions)  # (B, n, d), of Olmo in float32
        cos = cos[:, None].to(x.dtype)
        sin = sin[:, None].to(x.dtype)
        left, right = sin.chunk(2, -1)
        return x, (cos, torch.cat([-left, right], -1))

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
        h = _rms(block.input_layernorm, x)
        cos, sin = rope
        if h.shape[1] == h[:, out].shape[1]:
            q, k, v = linear(h, attention.q_proj, attention.k_proj, attention.v_proj)
        else:
            (q,) = linear(h[:, out], attention.q_proj)
            k, v = linear(h, attention.k_proj, attention.v_proj)
        q, k, v = (_split_heads(part, attention.head_dim) for part in (q, k, v))
        if "q_norm" in attention._modules:  # Qwen3
            q = _rms(attention.q_norm, q)
            k = _rms(attention.k_norm, k)
        return _rotate(q, cos[:, :, out], sin[:, :, out]), _rotate(k, cos, sin), v

    def finish(self, block: LlamaBlock, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + linear(mixed, block.self_attn.o_proj)[0]
        mlp = block.mlp
        gate, up = linear(_rms(block.post_attention_layernorm, x), mlp.gate_proj, mlp.up_proj)
        return x + linear(mlp.act_fn(gate) * up, mlp.down_proj)[0]

    def norm(self, core: LlamaModel, x: Tensor) -> Tensor:
        return _rms(core.norm, x)


class GPT2:
    """Blocks of GPT-2: layer norms, learned positions, one map to queries, keys and values."""

    blocks_name = "h"
    blocks = attrgetter(blocks_name)
    attention_dropout = attrgetter("attn.attn_dropout.p")

    def enter(self, core: GPT2Model, x: Tensor, positions: Tensor) -> tuple[Tensor, Rope]:
        x = x + core.wpe(positions)
        if core.training:
            x = drop(x, core.drop.p)
        return x, ()

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
    if (
        torch.is_grad_enabled()
        and x.dtype == torch.bfloat16
        and not x.is_cuda
        and not norm.weight.requires_grad
    ):
        return _FrozenRMS.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


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
        return F.rms_norm(x, weight.shape, weight, epsilon)

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
        mean = (gradient @ weight)[..., None].float() / D
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
