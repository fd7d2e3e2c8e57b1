"""Makes decisionllm/tokenizers/tokenizer.json from corpus.txt beside it: python -m
docs.tokenizer
"""

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from decisionllm.tokenizers.text import HERE, SPECIAL

# Qwen2's pre-tokenisation pattern
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
VOCABULARY = 2048


def build(corpus: Iterable[str]) -> Any:
    """Train the tokenizer on lines of text; the same lines give the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


if __name__ == "__main__":
    build((HERE / "corpus.txt").read_text(encoding="utf-8").splitlines()).save(
        str(HERE / "tokenizer.json"), pretty=False
    )
