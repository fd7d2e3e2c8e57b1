"""Types of the modules of transformers and peft that this package calls by name.

Each protocol has the attributes that are used and no others. transformers and peft build the
modules; none of them inherits from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.pytorch_utils import Conv1D

    from decisionllm.backbones.feature_cache import FeatureTable

Step = Callable[[Tensor], Tensor]
LoadTokenizer = Callable[[], "PreTrainedTokenizerBase"]


class Saved(FunctionCtx):
    """The `ctx` of an autograd function, in its backward pass too."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class AdaptedLinear(Protocol):
    """A linear map with adapters, of peft: by the name of an adapter its narrow side (rank, in),
    its wide side (out, rank), and more.
    """

    base_layer: nn.Linear
    active_adapters: list[str]
    merged: bool
    disable_adapters: bool
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    lora_dropout: Mapping[str, nn.Module]
    lora_variant: Mapping[str, object]
    scaling: Mapping[str, float]
    packed: object  # see `lora.pack`


class TextReader(Protocol):
    """A reader of texts in place of the word embeddings of a backbone.

    Attributes:
        digest: of its weights.
        table: the features of the texts that were read.
    """

    digest: str
    table: FeatureTable

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the texts."""
        ...

    def fit(self, ids: Tensor, mask: Tensor) -> None:
        """Fit units to the features of these texts: token ids and mask (U, L)."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the embeddings (U, L, D) of rows of the table of features (U, L)."""
        ...


class RMSNorm(Protocol):
    """A norm; the usual one of transformers has a variance_epsilon, that of Gemma has eps."""

    weight: Tensor
    variance_epsilon: float
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...


class LlamaAttention(Protocol):
    """q_norm and k_norm are there in Qwen3 and Gemma 3 alone."""

    head_dim: int
    scaling: float  # of the scores
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: RMSNorm
    k_norm: RMSNorm
    _modules: Mapping[str, nn.Module | None]


class LlamaFeedForward(Protocol):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: Step


class LlamaBlock(Protocol):
    """It has other norms too, by the names of its layout."""

    self_attn: LlamaAttention
    mlp: LlamaFeedForward
    input_layernorm: RMSNorm


class LlamaModel(Protocol):
    norm: RMSNorm
    # states, positions and, in some models, the kind of block -> cosines and sines
    rotary_emb: Callable[..., tuple[Tensor, Tensor]]


class GPT2Attention(Protocol):
    head_dim: int
    split_size: int
    c_attn: Conv1D
    c_proj: Step
    resid_dropout: nn.Dropout


class GPT2FeedForward(Protocol):
    c_fc: Step
    c_proj: Step
    act: Step
    dropout: nn.Dropout


class GPT2Block(Protocol):
    training: bool
    attn: GPT2Attention
    mlp: GPT2FeedForward
    ln_1: Step
    ln_2: Step


class GPT2Model(Protocol):
    training: bool
    wpe: Step
    drop: nn.Dropout
    ln_f: Step
