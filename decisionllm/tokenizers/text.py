"""Task texts -> token ids, by a backbone's own tokenizer or by the byte-level BPE that ships with the package.

`tokenizer.json` is made from `corpus.txt` by `python -m decisionllm.tokenizers.text`; a test makes it again and compares the
bytes. It splits text as Qwen does, digits apart, and its vocabulary holds every byte, so that every text can be encoded.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

HERE = Path(__file__).parent
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen2's pre-tokenisation pattern
VOCABULARY = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # Qwen's names, so that a true Qwen tokenizer is a change of path


def of_team(tasks: Iterable[str]) -> str:
    """Combine the members' task texts into one team text: each sentence once, in the order of the sorted texts."""
    different = sorted(set(tasks))
    if len(different) == 1:
        return different[0]
    return " ".join(dict.fromkeys(sentence for task in different for sentence in re.split(r"(?<=\.) ", task)))


def build(corpus: Iterable[str]) -> Any:
    """Train the tokenizer on lines of text; the same lines give the same bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


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
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    length = max(map(len, ids), default=0)
    padded = torch.tensor([row + [0] * (length - len(row)) for row in ids], dtype=torch.long).view(len(ids), length)
    sizes = torch.tensor([len(row) for row in ids])
    return padded, torch.arange(length) < sizes[:, None]


def cached(encode: Callable[[Sequence[str]], tuple[Tensor, Tensor]]) -> Callable[[Sequence[str]], tuple[Tensor, Tensor]]:
    """The same function of texts -> (ids, mask), with a memory of the last 100,000 texts."""
    row = lru_cache(100_000)(lambda task: encode([task])[0][0])

    def encoded(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = [row(task) for task in texts]
        ids = pad_sequence(rows, batch_first=True)
        return ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]

    return encoded


if __name__ == "__main__":
    build((HERE / "corpus.txt").read_text().splitlines()).save(str(HERE / "tokenizer.json"), pretty=False)
