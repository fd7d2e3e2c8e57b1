"""Learned tokens that summarise a text, in place of one token a word."""

import torch
from torch import Tensor, nn

from decisionllm.randomness import temporary_seed


class TextSummary(nn.Module):
    """Tokens that summarise a text: a learned query for each attends to the stored states of its
    words, and a linear map of its own makes a token of the mean.

    It has one layer of attention and few heads, so that it learns where a sentence names the task,
    and not the sentences: the policy follows wordings that were never trained on more often than
    where whole blocks attend to each word. See lab/LOG.md.

    Args:
        width: D.
        tokens: P, of each text.
        seed: of the first weights.
    """

    def __init__(self, width: int, tokens: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        with temporary_seed(seed):
            self.queries = nn.Parameter(torch.randn(tokens, width) / width**0.5)
            self.maps = nn.Parameter(torch.randn(tokens, width, width) / width**0.5)

    @property
    def tokens(self) -> int:
        return len(self.queries)

    def forward(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens (U, P, D) of stored states of texts (U, L, D), real where mask (U, L),
        and a mask (U, P), False for a text without words.
        """
        words = self.norm(states.float())
        mixed = self._shares(words, mask) @ words
        tokens = torch.einsum("upd,pde->upe", mixed, self.maps)
        return tokens, mask.any(1, keepdim=True).expand(-1, self.tokens)

    def shares(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the share of each word in each token: (U, P, L), a sum of 1 over the words."""
        return self._shares(self.norm(states.float()), mask)

    def _shares(self, words: Tensor, mask: Tensor) -> Tensor:
        scores = self.queries @ words.transpose(1, 2)
        # finite, since a text without words has nothing else
        return scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(-1)
