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
    place: Tensor  # (B, E) of the observation token of their step, among the n tokens
    remembered: bool  # whether the tokens of later steps attend to them too

    def append_to(self, tokens: Tensor) -> Tensor:
        """Put the entities behind the tokens of their rows: (B, n, D) -> (B, n + E, D)."""
        return torch.cat([tokens, self.embedded.to(tokens.dtype)], 1)

    def real(self, n: int) -> Tensor:
        """Return which of the n + E tokens are not padding of entities, (B, n + E) bool."""
        of_trajectory = self.present.new_ones(len(self.present), n)
        return torch.cat([of_trajectory, self.present], 1)

    def positions(self, positions: Tensor) -> Tensor:
        """Give entities the position of their observation token: (B or 1, n) -> (B, n + E)."""
        return torch.cat(self._at_observations(positions), 1)

    def last_slots(self, slots: Tensor) -> Tensor:
        """Return the last trajectory slot that each token attends to: (B or 1, n) slots of the n
        tokens -> (B, n + E).
        """
        slots, of_observations = self._at_observations(slots)
        return torch.cat([slots, of_observations - 1], 1)

    def _at_observations(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers of the tokens for each row (B, n), and those of the observation token of
        each entity (B, E).
        """
        rows = numbers.expand(len(self.place), -1)
        return rows, rows.gather(1, self.place)

    def visible(self, before: Tensor, window: int | None = None) -> Tensor:
        """Add the entities as keys to what each token attends to.

        Args:
            before: (B, n + E, L + M) bool, the keys of texts and trajectories.
            window: the most trajectory tokens, itself included, whose entities a token attends to;
                None: all before it.

        Returns:
            (B, n + E, L + M + E) bool.
        """
        B, E = self.present.shape
        n = before.shape[1] - E
        device = self.place.device
        of_tokens = torch.arange(n, device=device).expand(B, n)
        step = torch.cat([of_tokens, self.place], 1)[..., None]  # of each query, (B, n + E, 1)
        place = self.place[:, None]
        own = step >= place if self.remembered else step == place  # (B, n + E, E)
        if window is not None:
            own &= step < place + window
        # without a key at all the softmax of a padded entity would be NaN
        itself = torch.zeros(n + E, E, dtype=torch.bool, device=device)
        itself[n:].fill_diagonal_(True)
        keys = (own & self.present[:, None]) | itself
        return torch.cat([before, keys], -1)
