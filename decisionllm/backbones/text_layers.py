"""A pretrained model cut into two: its lower blocks read a text once, frozen; the blocks above read
the trajectory and attend to the text.

Blocks are counted from 1, as hidden states of transformers are: block 0 is the word embedding. With
text_layers=12 and layers=18 of a model of 30 blocks, blocks 1 to 12 read each distinct text once
and its hidden states are stored. The tokens of the trajectory enter behind block 12 and go through
blocks 13 to 18, which have adapters; the other 12 blocks are not built.

The text itself goes no further: each of the blocks 13 to 18 makes its keys and values of the kept
states behind block 12. The adapters of these two maps learn what to take from a text. A text costs
a step two small products a block, a sixteenth of a block; with the whole blocks, adapters included,
for texts too, a step took 2.6 times as long and learned no more in the same time. See lab/LOG.md.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from decisionllm.backbones.feature_cache import FeatureTable, TokenIds, feature_folder
from decisionllm.backbones.hf_types import LoadTokenizer
from decisionllm.files import cached_digest
from decisionllm.tokenizers.text import check_ids, pad_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# Where SmolLM2-135M (30 blocks) reads sixty wordings of a goal best, of those that were tried: 12
# and 18. See lab/LOG.md.
TEXT_SHARE = 0.4
SHARE = 0.6
DEFAULT = -1  # of both options: by these shares, but as trained where a run trained the model
# Attribute of the config of such a model, and key of config.json where it is exported: how many of
# its blocks read texts alone.
TRAINED_CUT = "decisionllm_text_layers"


def resolve_cut(
    core: "PreTrainedModel", text_layers: float, layers: float, *, tune: str, supported: bool
) -> tuple[int, int]:
    """Return how many blocks read texts alone, and how many there are in all, by these options.

    Args:
        core: the whole model of transformers.
        text_layers: blocks that read a text once, frozen, or a share of the model's blocks;
            DEFAULT: two fifths of the model, as many as in the run that trained it, or none where
            it can't be cut.
        layers: blocks that are built, or a share of the model's; 0: all; DEFAULT: three fifths of
            the model, or all where a run trained it or it can't be cut.
        tune: `full` trains all blocks, so that none may be frozen.
        supported: whether our forward reads the blocks of this model.

    Raises:
        ValueError: the options do not fit each other or the model.
    """
    count = core.config.num_hidden_layers
    reason = _reason_against_cut(core, tune, supported)
    if reason and (text_layers > 0 or 0 < layers != count):
        raise ValueError(
            f"backbone.text_layers, backbone.layers: expected 0 and 0, since {reason}, got "
            f"{text_layers} and {layers}"
        )
    if reason:
        return 0, count
    lower = _count_blocks("backbone.text_layers", text_layers, count)
    every = _count_blocks("backbone.layers", layers, count)
    trained_cut = getattr(core.config, TRAINED_CUT, None)
    if lower == DEFAULT and trained_cut is not None:
        lower = trained_cut
    elif lower == DEFAULT:
        lower = round(TEXT_SHARE * count)
    if every == DEFAULT and trained_cut is not None:  # all have learned to read trajectories
        every = count
    elif every == DEFAULT:
        every = max(math.ceil(SHARE * count), lower + 1)
    every = every or count
    if not 0 <= lower < every <= count:
        raise ValueError(
            f"backbone.text_layers, backbone.layers: expected text_layers below layers, and layers "
            f"of at most {count}, the blocks of this model, got {lower} and {every}"
        )
    return lower, every


def _count_blocks(option: str, blocks: float, count: int) -> int:
    """Return a number of blocks, or how many of a model's blocks a share of them is, rounded."""
    if blocks % 1 == 0:
        return int(blocks)
    number = round(blocks * count) if 0 < blocks < 1 else 0
    if not number:
        raise ValueError(
            f"{option}: expected a whole number of blocks, or a share between 0 and 1 of the "
            f"{count} blocks of this model that is at least one block, got {blocks}"
        )
    return number


def _reason_against_cut(core: "PreTrainedModel", tune: str, supported: bool) -> str:
    """Return why a model can't be cut; empty if it can be."""
    if not supported or not hasattr(core, "layers"):
        return f"the blocks of {type(core).__name__} are not supported"
    return "tune=full trains every block" if tune == "full" else ""


def get_blocks(core: "PreTrainedModel") -> nn.ModuleList:
    """Return the blocks of a model that can be cut."""
    blocks = core.layers
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def keep_blocks(core: "PreTrainedModel", layers: int) -> None:
    """Drop the blocks of a transformers model above the first `layers`."""
    if layers < core.config.num_hidden_layers:
        del get_blocks(core)[layers:]
        _describe_blocks(core.config, slice(0, layers))


@contextmanager
def only_blocks(core: "PreTrainedModel", selected: slice) -> Iterator[None]:
    """Let transformers' own forward of a model run some of its blocks alone, within the block of
    this statement.
    """
    whole, before = get_blocks(core), core.config
    core.layers = whole[selected]
    core.config = _copy_config(before)
    core.config._attn_implementation = before._attn_implementation
    _describe_blocks(core.config, selected)
    _number_blocks(core.layers)
    try:
        yield
    finally:
        core.layers, core.config = whole, before
        _number_blocks(whole)


def _number_blocks(blocks: Any) -> None:
    """Number blocks from 0, as transformers' cache of keys and values finds theirs."""
    for i, block in enumerate(blocks):
        block.self_attn.layer_idx = i


def _copy_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    return type(config).from_dict(config.to_dict())


def _describe_blocks(config: "PreTrainedConfig", selected: slice) -> None:
    """Let a config of transformers describe these blocks of its model alone."""
    # whether each block sees all tokens or a sliding window
    kinds = getattr(config, "layer_types", None)
    count = len(range(*selected.indices(config.num_hidden_layers)))
    if kinds:
        config.layer_types = kinds[selected]
    config.num_hidden_layers = count


class TextLayers:
    """The lower blocks of a backbone as a reader of its texts: see
    `text_encoders.FrozenFeatures` for the other one.

    Token ids are rows of a table of hidden states. A text is read once for each set of weights, and
    stored on disk.

    Args:
        core: the transformers model, whose lower blocks are frozen.
        load_tokenizer: loads that of the model.
        text_layers: how many of its blocks read texts.
        numbers: the type whose numbers the weights are; they may be held in a wider one.
        source: a name of the whole model's weights that no other weights have, by which their hash
            is kept; empty: they are hashed now.
    """

    def __init__(
        self,
        core: "PreTrainedModel",
        load_tokenizer: LoadTokenizer,
        text_layers: int,
        *,
        numbers: torch.dtype,
        source: str = "",
    ) -> None:
        self.core = core
        self.load_tokenizer = load_tokenizer
        self.text_layers = text_layers
        compute_digest = partial(weights_digest, core, text_layers, numbers)
        if source:
            self.digest = cached_digest(f"{source}/{text_layers}/{numbers}", compute_digest)
        else:
            self.digest = compute_digest()
        lower = _copy_config(core.config)
        _describe_blocks(lower, slice(0, text_layers))
        folder = feature_folder(self.digest, lower, numbers=numbers, held=core.dtype)
        self.table = FeatureTable(
            self._read, size=core.config.hidden_size, dtype=core.dtype, folder=folder
        )

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.load_tokenizer()

    def fit(self, ids: Tensor, mask: Tensor) -> None:
        """Hidden states are read as they are: there is nothing to fit."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the hidden states behind the lower blocks (U, L, D) of rows of the table (U, L)."""
        return self.table[rows].to(rows.device)

    @torch.no_grad()
    def _read(self, texts: Sequence[TokenIds]) -> list[Tensor]:
        """Return the hidden states of texts behind the lower blocks, by transformers' own forward:
        (length, D) each.
        """
        ids, mask = pad_ids(texts)
        check_ids(ids, self.core.config.vocab_size)
        device = self.core.device
        before = self.core.norm
        training = self.core.training
        self.core.norm = nn.Identity()  # the norm belongs behind the last block
        self.core.eval()
        try:
            # What is stored must not depend on the autocast of whoever reads a text first.
            with (
                only_blocks(self.core, slice(0, self.text_layers)),
                torch.autocast(device.type, enabled=False),
            ):
                out = self.core(
                    input_ids=ids.to(device), attention_mask=mask.long().to(device), use_cache=False
                )
        finally:
            self.core.norm = before
            self.core.train(training)
        return [row[real].cpu() for row, real in zip(out.last_hidden_state, mask, strict=True)]


def weights_digest(core: "PreTrainedModel", text_layers: int, numbers: torch.dtype) -> str:
    """Return a hash of the weights that read texts.

    numbers: the type whose numbers they are, in which they are hashed.
    """
    digest = hashlib.blake2b(str(text_layers).encode(), digest_size=12)
    for name, weight in text_weights(core, text_layers):
        digest.update(name.encode())
        digest.update(bytes_of(weight.to(numbers)))
    return digest.hexdigest()


def text_weights(core: "PreTrainedModel", text_layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the weights of the word embeddings and the lower blocks."""
    for module in (core.get_input_embeddings(), *get_blocks(core)[:text_layers]):
        yield from module.named_parameters()


def bytes_of(weight: Tensor) -> memoryview:
    """Return the bytes of a weight of any type, as a hash reads them."""
    return weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
