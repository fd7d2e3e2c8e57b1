"""Tokens of the entities in an observation, which a transformer reads beside the trajectory.

A trajectory has one observation token a step. An entity of that step, such as an object in view, is
a token of its own: the observation token attends to it, with the text already read, so that what the
text asks for decides what is taken from it. Entities of a step attend to the text, to the trajectory
before their observation token, and to each other, in any order.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class EntityTokens(NamedTuple):
    """E entity tokens beside the n tokens of each of B rows.

    Letters: B rows, n trajectory tokens, E entities, M keys of trajectory tokens, L of texts.
    """

    embedded: Tensor  # (B, E, D)
    present: Tensor  # (B, E) bool; False: padding, which nothing attends to
    place: Tensor  # (E,) of the observation token of their step, among the n tokens
    remembered: bool  # whether the tokens of later steps attend to them too

    def append_to(self, tokens: Tensor) -> Tensor:
        """Put the entities behind the tokens of their rows: (B, n, D) -> (B, n + E, D)."""
        return torch.cat([tokens, self.embedded.to(tokens.dtype)], 1)

    def positions(self, positions: Tensor) -> Tensor:
        """Give entities the position of their observation token: (B or 1, n) -> (B or 1, n + E)."""
        return torch.cat([positions, positions[:, self.place]], 1)

    def last_slots(self, slots: Tensor) -> Tensor:
        """Return the last trajectory slot that each token attends to: (B or 1, n) slots of the n
        tokens -> (B or 1, n + E).
        """
        return torch.cat([slots, slots[:, self.place] - 1], 1)

    def visible(self, before: Tensor) -> Tensor:
        """Add the entities as keys to what each token attends to.

        Args:
            before: (B or 1, n + E, L + M) bool, the keys of texts and trajectories.

        Returns:
            (B, n + E, L + M + E) bool.
        """
        B, E = self.present.shape
        n = before.shape[1] - E
        device = self.place.device
        step = torch.cat([torch.arange(n, device=device), self.place])[:, None]  # of each query
        own = step >= self.place if self.remembered else step == self.place  # (n + E, E)
        keys = own & self.present[:, None]
        # without a key at all the softmax of a padded entity would be NaN
        itself = torch.zeros_like(own)
        itself[n:].fill_diagonal_(True)
        return torch.cat([before.expand(B, -1, -1), keys | itself], -1)
