"""Normalizer, tokenizer, backbone and head put together: a Batch in, a distribution over actions (B, T) out."""

from functools import partial

import torch
from torch import nn

from decisionllm.registry import build
from decisionllm.tokenizers.trajectory import TrajectoryTokenizer


class Normalizer(nn.Module):
    """Raw units <-> the model's: fitted once from the training episodes, saved with the weights.

    Observations and returns-to-go are standardised; a return beyond what training saw is read as the nearest that it saw.
    Continuous actions run from -1 to 1 between their bounds; discrete ones stay as they are.
    """

    def __init__(self, spec):
        super().__init__()
        S, A = spec.observation_dim, spec.action_dim
        self.discrete = bool(spec.num_actions)
        buffer = partial(self.register_buffer, persistent=True)
        buffer("observation_mean", torch.zeros(S))
        buffer("observation_scale", torch.ones(S))
        buffer("return_mean", torch.zeros(()))
        buffer("return_scale", torch.ones(()))
        buffer("return_range", torch.tensor([-torch.inf, torch.inf]))
        buffer("low", torch.tensor(spec.low or [0.0] * A))
        buffer("high", torch.tensor(spec.high or [1.0] * A))

    @torch.no_grad()
    def fit(self, observations, returns_to_go):
        """(n, S) and (n,) numpy, of every training step."""
        scale = observations.std(0, dtype="float64")
        self.observation_mean.copy_(torch.from_numpy(observations.mean(0, dtype="float64")))
        self.observation_scale.copy_(torch.from_numpy(scale.clip(min=1e-6) + (scale < 1e-6)))  # a constant stays in its unit
        self.return_mean.fill_(float(returns_to_go.mean(dtype="float64")))
        self.return_scale.fill_(float(returns_to_go.std(dtype="float64")) or 1.0)
        self.return_range.copy_(torch.tensor([float(returns_to_go.min()), float(returns_to_go.max())]))

    def observations(self, x):
        return (x - self.observation_mean) / self.observation_scale

    def returns_to_go(self, x):
        return (x.clamp(*self.return_range) - self.return_mean) / self.return_scale

    def actions(self, x):
        return x if self.discrete else (x - self.low) / (self.high - self.low) * 2 - 1

    def raw_actions(self, x):
        return x if self.discrete else (x.clamp(-1, 1) + 1) / 2 * (self.high - self.low) + self.low


class DecisionLLM(nn.Module):
    """A language model that reads a text and a trajectory, and says at each observation what action comes next.

    returns: `told`, a token before each observation says what is still to come; `none`: behaviour cloning.
    """

    def __init__(self, spec, backbone, head, *, embedding="linear", timesteps="learned", returns="told"):
        super().__init__()
        if returns not in ("told", "none"):
            raise ValueError(f"returns: expected told or none, got {returns!r}")
        self.spec, self.backbone = spec, backbone
        self.normalizer = Normalizer(spec)
        options = {"embedding": embedding, "timesteps": timesteps, "returns": returns == "told"}
        self.tokenizer = TrajectoryTokenizer(spec, backbone.width, **options)
        self.head = build(head, backbone.width, spec)

    def tokens(self, batch):
        """The trajectory of a batch as the backbone reads it: (B, k T, D)."""
        units = self.normalizer
        return self.tokenizer(
            units.returns_to_go(batch.returns_to_go), units.observations(batch.observations),
            units.actions(batch.actions), batch.timesteps,
        )  # fmt: skip

    def read(self, batch):
        """Batch -> what was read up to each observation: (B, T, D)."""
        text = batch.text_ids, batch.text_mask, batch.text_index
        tokens = self.tokens(batch)[:, :-1]  # nobody reads the last action
        return self.backbone(tokens, *text, reads=self.tokenizer.reads).float()

    def forward(self, batch):
        """Batch -> the loss: negative log-likelihood, in nats an action, the mean over real steps."""
        distribution = self.head(self.read(batch), batch.action_masks)
        return masked_mean(-distribution.log_prob(self.normalizer.actions(batch.actions)), batch.mask)

    def choose(self, hidden, action_masks, *, decode, generator=None):
        """Hidden states (N, D) of now -> actions (N, A), raw units. decode: `mode`, `mean` or `sample` of the distribution."""
        distribution = self.head(hidden[:, None], None if action_masks is None else action_masks[:, None])
        chosen = distribution.sample(generator) if decode == "sample" else getattr(distribution, decode)
        return self.normalizer.raw_actions(chosen[:, 0])


def masked_mean(values, mask):
    """The mean over what is real: (B, T), (B, T) bool -> scalar. Padding has no weight, whatever it holds."""
    return torch.where(mask, values, 0).sum() / mask.sum()
