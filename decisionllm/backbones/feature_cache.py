"""A cache of the features of texts: a table in memory, and files by the text and the weights; both
of bounded size.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decisionllm.files import atomic, cache_dir
from decisionllm.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AT_ONCE = 16  # texts that are read in one forward
FEW = 128  # texts whose reading needs no progress
# Texts of one reader that are kept on disk. Where every text is new, further ones would never be
# read again.
MOST_FILES = 10_000
TokenIds = tuple[int, ...]  # of one text


def feature_folder(
    digest: str, config: "PreTrainedConfig", *, numbers: torch.dtype, held: torch.dtype
) -> Path:
    """Return the folder of the features that a model reads with these weights and this config.

    The config decides about the features too: how far positions are apart, what a norm adds.

    Args:
        digest: of the weights.
        config: of the model.
        numbers: the type whose numbers the weights are.
        held: the type in which they are stored and multiplied.
    """
    # what is computed in another type is rounded in another way
    rounded = "" if held == numbers else f"-{str(held).removeprefix('torch.')}"
    described = config.to_dict()
    described.pop("transformers_version", None)  # also where the features stay the same
    words = json.dumps(described, sort_keys=True, default=str)
    of_config = hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
    return cache_dir() / "text-features" / f"{digest}{rounded}-{of_config}"


class FeatureTable:
    """A table with a row of features for each token of each text that was read.

    A text is its token ids. Token ids of a batch are replaced by rows of the table, which a
    backbone then looks up as it looks up word embeddings.

    Args:
        read: texts -> their features, (length, F) each.
        size: F.
        dtype: of the features.
        folder: where they are kept on disk; its name says which weights read them.
    """

    def __init__(
        self,
        read: Callable[[Sequence[TokenIds]], list[Tensor]],
        *,
        size: int,
        dtype: torch.dtype,
        folder: Path,
    ) -> None:
        self.read = read
        self.size = size
        self.dtype = dtype
        self.folder = folder
        self.files = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
        self.forget()

    @torch.inference_mode(False)
    def forget(self) -> None:
        """Begin an empty table. Rows that were returned before are no longer valid."""
        self.table = torch.zeros(1, self.size, dtype=self.dtype)  # row 0: padding
        self.used = 1  # rows of the table
        self.first_rows: dict[TokenIds, int] = {}  # of each text that was read

    def rows(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the rows of the table (U, L) of the token ids of texts (U, L); padding is 0.

        mask: (U, L) True where real.
        """
        texts = [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]
        different = [text for text in dict.fromkeys(texts) if text]
        self._add_texts([text for text in different if text not in self.first_rows])
        rows = ids.clone()
        for row, real, text in zip(rows, mask, texts, strict=True):
            if text:
                row[real] = self.first_rows[text] + torch.arange(len(text))
        return rows

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the features (U, L, F) of rows of the table (U, L), on the CPU."""
        return self.table[rows.cpu()]

    # A table that began in inference mode could not grow outside of it, nor be trained with.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _add_texts(self, texts: Sequence[TokenIds]) -> None:
        """Append the features of new texts to the table."""
        for text, features in zip(texts, self._load_or_read(texts), strict=True):
            end = self.used + len(features)
            if end > len(self.table):  # twice the room: each feature is copied a few times in all
                grown = self.table.new_zeros(2 * end, self.size)
                grown[: self.used] = self.table[: self.used]
                self.table = grown
            self.table[self.used : end] = features
            self.first_rows[text] = self.used
            self.used = end

    def _load_or_read(self, texts: Sequence[TokenIds]) -> list[Tensor]:
        """Return the features of the tokens of texts, (length, F) each, from the disk or read now."""
        features_by_text = {}
        new_texts = []
        for text in texts:
            try:
                features_by_text[text] = load_file(self._file(text))["features"]
            except (FileNotFoundError, SafetensorError):  # there is no file, or a part of one
                new_texts.append(text)
        new_texts.sort(key=len)  # texts of one forward are padded to the longest of them
        starts = range(0, len(new_texts), AT_ONCE)
        # a bar for the few texts of a decision would only flicker
        progress = track(starts, "reading task texts") if len(new_texts) > FEW else starts
        for start in progress:
            part = new_texts[start : start + AT_ONCE]
            for text, features in zip(part, self.read(part), strict=True):
                features_by_text[text] = features
                self._write(text, features)
        return [features_by_text[text] for text in texts]

    def _file(self, text: TokenIds) -> Path:
        digest = hashlib.blake2b(str(text).encode(), digest_size=16).hexdigest()
        return self.folder / f"{digest}.safetensors"

    def _write(self, text: TokenIds, features: Tensor) -> None:
        """Write the features of a text into its file, as long as there are not too many."""
        file = self._file(text)
        if self.files < MOST_FILES:
            self.files += 1
            with atomic(file) as partial:
                save_file({"features": features.contiguous()}, partial)
