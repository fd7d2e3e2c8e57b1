"""Text encoders: other language models that read task texts in place of the word embeddings of a
backbone.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decisionllm.backbones.build import fingerprint, pretrained, smollm2
from decisionllm.backbones.feature_cache import FeatureTable, TokenIds, feature_folder
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.hf_reference import check_causal
from decisionllm.registry import Node, build, is_none
from decisionllm.tokenizers.text import check_ids, pad_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def attach_text_encoder(backbone: Backbone, encoder: Node, seed: int) -> None:
    """Let the text encoder of a run, a config node, read the texts of a backbone.

    Raises:
        ValueError: the backbone reads later tokens, or is cut and has an encoder.
    """
    # Here and not where it is loaded, since a text encoder may be bidirectional.
    check_causal(backbone)
    if is_none(encoder):
        return
    if backbone.text_layers:
        raise ValueError(
            "backbone.text_layers: expected 0, since text_encoder=features stands in place of word "
            f"embeddings, got {backbone.text_layers}"
        )
    backbone.features = build(encoder, backbone.width, seed)
    backbone.encoded = {}


class FrozenFeatures(nn.Module):
    """Features of each token of a text by a frozen language model, mapped to embeddings by a linear
    map and LayerNorm.

    Token ids are rows of a table of features (n, F) that grows with every new text. A text is read
    once; the features are stored on disk by the text and the weights of the encoder.

    Args:
        width: D of the backbone that reads the embeddings.
        seed: of weights=random and shuffled.
        folder: a local model folder, a GGUF file, or a run directory whose backbone was trained
            whole; without it and hub_id: SmolLM2-135M-Instruct.
        hub_id: name of a model on the hub, in place of a folder.
        weights: see `pretrained`.
        layer: the block whose output is taken, counted from 1; 0: the word embeddings.

    Raises:
        ValueError: the encoder has no such layer.
    """

    def __init__(
        self,
        width: int,
        seed: int,
        *,
        folder: str = "",
        hub_id: str = "",
        weights: str = "pretrained",
        layer: int = 12,
    ) -> None:
        super().__init__()
        read = partial(smollm2, seed, weights=weights, tune="frozen")
        if folder or hub_id:
            read = partial(
                pretrained,
                seed,
                folder=folder,
                hub_id=hub_id,
                weights=weights,
                dtype="bfloat16",
                tune="frozen",
            )
        encoder = read()  # whose upper blocks are left out
        # transformers norms what comes out of the last block, which may not be the model's last one
        if layer >= encoder.config.num_hidden_layers:
            encoder = read(text_layers=0, layers=0)
        layers = encoder.config.num_hidden_layers
        if not 0 <= layer <= layers:
            raise ValueError(
                f"text_encoder.layer: expected 0 .. {layers}, the layers of this encoder, got {layer}"
            )
        # in a list: no part of this module, its weights are not saved
        self.encoder = [encoder.eval()]
        self.layer = layer
        self.size = encoder.width
        weights_and_layer = f"{fingerprint(encoder)}/{layer}"
        self.digest = hashlib.blake2b(weights_and_layer.encode(), digest_size=12).hexdigest()
        features = feature_folder(
            self.digest, encoder.config, numbers=encoder.frozen_dtype, held=encoder.dtype
        )
        self.table = FeatureTable(self._read, size=self.size, dtype=torch.float16, folder=features)
        self.mean = nn.Buffer(torch.zeros(self.size))
        self.scale = nn.Buffer(torch.ones(self.size))
        self.out = nn.Sequential(nn.Linear(self.size, width), nn.LayerNorm(width))

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.encoder[0].tokenizer

    def fit(self, ids: Tensor, mask: Tensor) -> None:
        """Standardise by the features of the tokens of these texts: ids and mask (U, L), see
        `Backbone.encode`. Units once fitted stay, as those of the run that a run starts from, since
        the map was trained on them.
        """
        features = self.table[ids[mask]].float()
        if len(features) > 1 and not self.mean.any():
            self.mean.copy_(features.mean(0))
            self.scale.copy_(features.std(0).clamp(min=1e-3))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the embeddings (U, L, D) of rows of the table (U, L)."""
        features = self.table[rows].to(self.mean.device)
        embeddings: Tensor = self.out((features - self.mean) / self.scale)
        return embeddings

    @torch.no_grad()
    def _read(self, texts: Sequence[TokenIds]) -> list[Tensor]:
        """Return the hidden states of the encoder's layer for texts: (length, F) float16 each."""
        ids, mask = pad_ids(texts)
        check_ids(ids, self.encoder[0].config.vocab_size)
        positions = self.encoder[0].positions
        if ids.shape[1] > positions:
            raise ValueError(
                f"text: expected at most {positions} tokens, the positions of the text encoder, got "
                f"{ids.shape[1]}"
            )
        # features are stored on disk by the text and the weights alone: a caller's autocast must not
        # change them
        with torch.autocast(ids.device.type, enabled=False):
            out = self.encoder[0].model(
                input_ids=ids,
                attention_mask=mask.long(),
                output_hidden_states=True,
                use_cache=False,
            )
        hidden = out.hidden_states[self.layer]
        return [row[real].half() for row, real in zip(hidden, mask, strict=True)]
