"""A one-step dynamics model: the change of the observation and the reward that an action brings."""

import torch
from torch import Tensor, nn

from decisionllm.schema import Spec
from decisionllm.tokenizers.trajectory import numbers


class Dynamics(nn.Module):
    """Predicts the change of the observation, in standard deviations of such changes, and the standardised reward.

    The change depends on observation and action alone, so that what one task shows of the dynamics holds in every other; the
    reward also on the hidden state, since the text may say what is rewarded.

    Args:
        width: D, of hidden states.
        spec: of the data.
        inner: width of the hidden layers.
    """

    def __init__(self, width: int, spec: Spec, *, inner: int = 256) -> None:
        super().__init__()
        self.num_actions, S, A = spec.num_actions, spec.observation_dim, spec.num_actions or spec.action_dim
        self.change = nn.Sequential(nn.Linear(S + A, inner), nn.SiLU(), nn.Linear(inner, inner), nn.SiLU(), nn.Linear(inner, S))
        self.reward = nn.Sequential(nn.Linear(width + A, inner), nn.SiLU(), nn.Linear(inner, 1))

    def forward(self, hidden: Tensor, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """(..., D), (..., S), (..., A), in the model's units -> change (..., S), reward (...)."""
        actions = numbers(actions, self.num_actions)
        return self.change(torch.cat([observations, actions], -1)), self.reward(torch.cat([hidden, actions], -1))[..., 0]
