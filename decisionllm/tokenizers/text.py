"""Task texts -> token ids, by a backbone's own tokenizer or by the byte-level BPE that ships with
the package.

`tokenizer.json` is made from `corpus.txt` by `python -m docs.tokenizer`; a test makes it again and
compares the bytes. It splits text as Qwen does, digits apart, and its vocabulary holds every byte,
so that every text can be encoded.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


HERE = Path(__file__).parent
# Qwen's names, so that a true Qwen tokenizer is a change of path
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 919  # tokens of `own_tokenizer`, so that a model can be built without loading it


def merge_team_texts(tasks: Iterable[str]) -> str:
    """Combine the members' task texts: each sentence once, in the order of the sorted texts."""
    different = sorted(set(tasks))
    if len(different) == 1:
        return different[0]
    sentences: list[str] = []
    for task in different:
        sentences += re.split(r"(?<=\.) ", task)
    return " ".join(dict.fromkeys(sentences))


@cache
def own_tokenizer() -> "PreTrainedTokenizerFast":
    """The tokenizer that ships with the package, for backbones with random weights."""
    from transformers import PreTrainedTokenizerFast

    file = str(HERE / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, pad_token=SPECIAL[0], eos_token=SPECIAL[0])


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids of texts, padded on the right.

    Args:
        tokenizer: of a backbone.
        texts: U texts.

    Returns:
        ids (U, L) long, 0 where padded, and mask (U, L) bool, True where real. L = 0 where all
        texts are empty.
    """
    return pad_ids([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise a ValueError if a model with so many word embeddings has none for one of these token
    ids.
    """
    if ids.numel() and int(ids.max()) >= vocabulary:
        cause = "its tokenizer is that of another model, or has tokens that were added to it alone"
        raise ValueError(
            f"text: expected token ids below {vocabulary}, the word embeddings of the model, got "
            f"{int(ids.max())}; {cause}"
        )


def pad_ids(ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Lists of token ids as ids (U, L) and mask (U, L), padded on the right."""
    sizes = torch.tensor([len(row) for row in ids], dtype=torch.long)
    rows = torch.zeros(len(ids), max(map(len, ids), default=0), dtype=torch.long)
    mask = torch.arange(rows.shape[1]) < sizes[:, None]
    for row, tokens in zip(rows, ids, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    return rows, mask
