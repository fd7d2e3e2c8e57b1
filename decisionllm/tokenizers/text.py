"""Task texts -> token ids, by a backbone's own tokenizer or by the byte-level BPE that ships with the package.

`tokenizer.json` is made from `corpus.txt` by `python -m docs.tokenizer`; a test makes it again and compares the bytes. It splits
text as Qwen does, digits apart, and its vocabulary holds every byte, so that every text can be encoded.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # Qwen's names, so that a true Qwen tokenizer is a change of path


def of_team(tasks: Iterable[str]) -> str:
    """Combine the members' task texts into one team text: each sentence once, in the order of the sorted texts."""
    different = sorted(set(tasks))
    if len(different) == 1:
        return different[0]
    return " ".join(dict.fromkeys(sentence for task in different for sentence in re.split(r"(?<=\.) ", task)))


@cache
def own_tokenizer() -> Any:
    """The tokenizer that ships with the package, for backbones with random weights."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizer.json"), pad_token=SPECIAL[0], eos_token=SPECIAL[0])


def encode(tokenizer: Any, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids of texts, padded on the right.

    Args:
        tokenizer: of a backbone.
        texts: U texts.

    Returns:
        ids (U, L) long, 0 where padded, and mask (U, L) bool, True where real. L = 0 where all texts are empty.
    """
    return padded([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])


def padded(ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Lists of token ids as ids (U, L) and mask (U, L), padded on the right."""
    length = max(map(len, ids), default=0)
    if not length:
        return torch.zeros(len(ids), 0, dtype=torch.long), torch.zeros(len(ids), 0, dtype=torch.bool)
    rows = torch.tensor([[*row, *[0] * (length - len(row))] for row in ids], dtype=torch.long).view(len(ids), length)
    sizes = torch.tensor([len(row) for row in ids])
    return rows, torch.arange(length) < sizes[:, None]
