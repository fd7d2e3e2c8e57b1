"""(return-to-go, observation, action) of a step -> three embeddings, in the order R o a R o a ..."""

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

from decisionllm.tokenizers.entities import EntityEncoder


class TrajectoryTokenizer(nn.Module):
    """Numbers in the model's own units -> tokens (B, k T, D), k tokens a step: 3, or 2 without returns.

    embedding: `linear`, one map a stream as in the paper, or `mlp`, two layers. timesteps: `learned`, one vector a step of
    the horizon, shared by the step's tokens, or `none`. model.condition_on=False leaves the return token out: behaviour cloning.
    open_returns: a return need not be told; its token is then one learned vector. An observation that has a layout is read by an
    EntityEncoder, of so many layers as `entities` says.
    """

    def __init__(
        self, spec, width, *, embedding="linear", timesteps="learned", returns=True, nullable_returns=False, entities=0
    ):
        super().__init__()
        if embedding not in ("linear", "mlp"):
            raise ValueError(f"embedding: expected linear or mlp, got {embedding!r}")
        if timesteps not in ("learned", "none"):
            raise ValueError(f"timesteps: expected learned or none, got {timesteps!r}")

        def stream(size):
            if embedding == "linear":
                return nn.Linear(size, width)
            return nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, width))

        self.num_actions, self.horizon = spec.num_actions, spec.horizon
        self.tokens = 3 if returns else 2  # per step
        self.returns = stream(1) if returns else None
        self.null_return = nn.Parameter(torch.zeros(width)) if nullable_returns else None
        self.observations = (
            EntityEncoder(spec.entity_schema, width, embedding=embedding, layers=entities)
            if spec.entity_schema
            else stream(spec.observation_dim)
        )
        self.actions = stream(spec.num_actions or spec.action_dim)
        self.timesteps = nn.Embedding(spec.horizon, width) if timesteps == "learned" else None
        self.norm = nn.LayerNorm(width)

    def forward(self, returns_to_go, observations, actions, timesteps, return_given=None):
        """(B, T), (B, T, S), (B, T, A), (B, T) -> (B, k T, D). return_given: (B,) bool, whose returns are told; None: everybody's."""
        streams = [self.observations(observations), self.actions(self.numbers(actions))]
        if self.returns is not None:
            embedded = self.returns(returns_to_go[..., None])
            streams.insert(
                0,
                embedded
                if return_given is None
                else torch.where(return_given[:, None, None], embedded, self.null_return.to(embedded.dtype)),
            )
        tokens = torch.stack(streams, 2)  # (B, T, k, D)
        if self.timesteps is not None:
            tokens = tokens + self.timesteps(timesteps)[:, :, None]
        return self.norm(rearrange(tokens, "B T k D -> B (T k) D"))

    def numbers(self, actions):
        """Actions as a map takes them: a discrete one as a 1 among zeros."""
        return F.one_hot(actions[..., 0].long(), self.num_actions).to(actions.dtype) if self.num_actions else actions

    @property
    def output_positions(self):
        """Where actions are predicted: the observation tokens, each of which sees its step's return and all before."""
        return slice(self.tokens - 2, None, self.tokens)
