"""A few tokens that sum up a text, in place of one token a word."""

import torch
from torch import Tensor, nn

from decisionllm.randomness import seeded


class TextSummary(nn.Module):
    """Tokens that sum up a text: a learned query for each attends to the kept states of its words,
    and a linear map of its own makes a token of what it found.

    It has one layer of attention and few heads, so that it learns where a task is told in a
    sentence, and not the sentences: wordings that were never trained on are understood more often
    than where whole blocks attend to each word. See LOG.md.

    Args:
        width: D.
        tokens: P, of each text.
        seed: of the first weights.
    """

    def __init__(self, width: int, tokens: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        with seeded(seed):
            self.queries = nn.Parameter(torch.randn(tokens, width) / width**0.5)
            self.maps = nn.Parameter(torch.randn(tokens, width, width) / width**0.5)

    @property
    def tokens(self) -> int:
        return len(self.queries)

    def forward(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Kept states of texts (U, L, D), real where mask (U, L) -> their tokens (U, P, D) and a
        mask (U, P), False for a text without words.
        """
        words = self.norm(states.float())
        found = self._shares(words, mask) @ words
        tokens = torch.einsum("upd,pde->upe", found, self.maps)
        return tokens, mask.any(1, keepdim=True).expand(-1, self.tokens)

    def shares(self, states: Tensor, mask: Tensor) -> Tensor:
        """How much of each word is in each token: (U, P, L), a sum of 1 over the words."""
        return self._shares(self.norm(states.float()), mask)

    def _shares(self, words: Tensor, mask: Tensor) -> Tensor:
        scores = self.queries @ words.transpose(1, 2)
        # finite, since a text without words has nothing else
        return scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(-1)
