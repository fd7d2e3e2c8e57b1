"""Hidden states -> distributions over the next action, and what an action brings.

Every head answers `forward(hidden, action_masks)` with a distribution that has `log_prob`, `mode`, `mean`, `sample`. Actions are
in the model's units: -1 .. 1 per dimension, or the index of a discrete one. log_prob is (B, T); mode, mean and sample are
(B, T, A). Log-probabilities of continuous actions are densities, so that heads can be compared in nats.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from decisionllm.registry import register
from decisionllm.tokenizers import bins
from decisionllm.tokenizers.entities import inner


@dataclass(frozen=True)
class Gaussian:
    mean: torch.Tensor  # (B, T, A)
    deviation: float

    def log_prob(self, actions):
        scaled = (actions - self.mean) / self.deviation
        return (-0.5 * scaled**2 - math.log(self.deviation * math.sqrt(2 * math.pi))).sum(-1)

    @property
    def mode(self):
        return self.mean

    def sample(self, generator=None):
        noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device)
        return self.mean + self.deviation * noise


@register("head", "gaussian")
class GaussianHead(nn.Module):
    """A Gaussian of fixed deviation: its loss is the squared error. squash: tanh, for actions that live at their bounds."""

    def __init__(self, width, spec, *, deviation: float = 0.5, squash: bool = True):
        super().__init__()
        _continuous(spec, "gaussian")
        self.out, self.deviation, self.squash = nn.Linear(width, spec.action_dim), deviation, squash
        self.loss_floor = spec.action_dim * math.log(deviation * math.sqrt(2 * math.pi))

    def forward(self, hidden, action_masks=None):
        mean = self.out(hidden)
        return Gaussian(mean.tanh() if self.squash else mean, self.deviation)


@dataclass(frozen=True)
class Bins:
    """One categorical a dimension. `logits(chosen)` is (B, T, A, K), where dimension i may look at the bins chosen before it."""

    logits: object  # (B, T, A) long or None -> (B, T, A, K)
    num_bins: int
    turns: int  # how often to ask: once, or once a dimension if each looks at those before

    def log_prob(self, actions):
        chosen = bins.encode(actions, self.num_bins)
        each = self.logits(chosen).log_softmax(-1).expand(*chosen.shape, -1).gather(-1, chosen[..., None])[..., 0]
        return (each - math.log(bins.width(self.num_bins))).sum(-1)

    @property
    def mode(self):
        return self._draw(lambda logits: logits.argmax(-1))

    @property
    def mean(self):
        logits = self.logits(None if self.turns == 1 else bins.encode(self.mode, self.num_bins))
        middles = bins.decode(torch.arange(self.num_bins, device=logits.device), self.num_bins)
        return logits.softmax(-1) @ middles.to(logits.dtype)

    def sample(self, generator=None):
        def pick(logits):
            drawn = torch.multinomial(logits.softmax(-1).flatten(0, -2), 1, generator=generator)
            return drawn.view(logits.shape[:-1])

        return self._draw(pick)

    def _draw(self, pick):
        chosen = None
        for i in range(self.turns):
            now = pick(self.logits(chosen))
            chosen = now if chosen is None else torch.cat([chosen[..., :i], now[..., i:]], -1)
        return bins.decode(chosen, self.num_bins)


@register("head", "bins")
class BinsHead(nn.Module):
    """A categorical over bins per action dimension: several modes where squared error would average them.

    chained: dimensions are drawn one after the other, each knowing the ones before.
    """

    def __init__(self, width, spec, *, num_bins: int = 33, chained: bool = False):
        super().__init__()
        _continuous(spec, "bins")
        self.num_bins, self.chained, self.dims = num_bins, chained, spec.action_dim
        self.out = nn.Linear(width, self.dims * num_bins)
        self.loss_floor = self.dims * math.log(bins.width(num_bins))
        if chained:
            self.before = nn.Embedding(self.dims * num_bins, width)
            self.mix = nn.Linear(width, width)

    def forward(self, hidden, action_masks=None):
        K, A = self.num_bins, self.dims
        if not self.chained:
            logits = self.out(hidden).unflatten(-1, (A, K))
            return Bins(lambda chosen: logits, K, 1)

        def logits(chosen):
            chosen = torch.zeros(*hidden.shape[:2], A, dtype=torch.long, device=hidden.device) if chosen is None else chosen
            each = self.before(chosen + K * torch.arange(A, device=chosen.device))  # (B, T, A, D)
            seen = each.cumsum(-2) - each  # of the dimensions before
            mixed = hidden[..., None, :] + F.gelu(self.mix(hidden)[..., None, :] + seen)
            return torch.einsum("btad,akd->btak", mixed, self.out.weight.unflatten(0, (A, K))) + self.out.bias.view(A, K)

        return Bins(logits, K, A)


@dataclass(frozen=True)
class Discrete:
    logits: torch.Tensor  # (B, T, C), log-probabilities, -inf where an action is not allowed

    def log_prob(self, actions):
        chosen = actions.long()
        return self.logits.expand(*chosen.shape[:-1], -1).gather(-1, chosen)[..., 0]

    @property
    def mode(self):
        return self.logits.argmax(-1, keepdim=True).float()

    mean = mode  # an index has no mean

    def sample(self, generator=None):
        drawn = torch.multinomial(self.logits.exp().flatten(0, 1), 1, generator=generator)
        return drawn.view(*self.logits.shape[:2], 1).float()


@register("head", "discrete")
class DiscreteHead(nn.Module):
    """A categorical over those of C discrete actions that the mask allows."""

    loss_floor = 0.0

    def __init__(self, width, spec):
        super().__init__()
        if not spec.num_actions:
            raise ValueError(
                "head=discrete: expected discrete actions, the data has continuous ones; take head=gaussian or bins"
            )
        self.out = nn.Linear(width, spec.num_actions)

    def forward(self, hidden, action_masks=None):
        logits = self.out(hidden)
        if action_masks is not None:
            logits = logits.masked_fill(~action_masks, float("-inf"))
        return Discrete(logits.log_softmax(-1))


@register("head", "pointer")
class PointerHead(nn.Module):
    """Discrete actions of which the last ones are each aimed at one entity: what was read points at it, however it stands in line.

    The schema's entities of this kind (none named: its last) are the targets of as many last actions, in their order; the
    others are as in head=discrete. It is told what each target is like on its own.
    """

    loss_floor = 0.0

    def __init__(self, width, spec, *, kind: str = ""):
        super().__init__()
        place, found = 1, {}
        for name, _, size in spec.entity_schema[1:]:
            found[name] = slice(place, place + size)  # among the own block and all entities
            place += size
        kind = kind or next(reversed(found), "")
        self.targets = found.get(kind, slice(0, 0))
        count = self.targets.stop - self.targets.start
        if not (count and spec.num_actions >= count):
            raise ValueError(
                f"head=pointer: expected discrete actions, of which the last ones are aimed at entities of a kind that observations have, got {spec.num_actions} actions and kind {kind!r}, of {', '.join(found) or 'none'}"
            )
        self.out = nn.Linear(width, spec.num_actions - count)
        self.query, self.key = nn.Linear(width, inner(width)), nn.Linear(inner(width), inner(width))

    def forward(self, hidden, action_masks=None, targets=None):
        """(B, T, D), (B, T, C) bool, (B, T, K, inner)"""
        aimed = (self.key(targets) @ self.query(hidden)[..., None])[..., 0] * targets.shape[-1] ** -0.5
        logits = torch.cat([self.out(hidden), aimed], -1)
        if action_masks is not None:
            logits = logits.masked_fill(~action_masks, float("-inf"))
        return Discrete(logits.log_softmax(-1))


class Dynamics(nn.Module):
    """What an action brings: the change of the observation, in deviations of such changes, and the reward, standardised.

    The change is predicted from the observation and the action alone, so that what one task shows of how the world moves
    holds in every other; the reward also from all that was read, since the text may say what is paid for.
    """

    def __init__(self, width, spec, *, inner=256):
        super().__init__()
        self.num_actions, S, A = spec.num_actions, spec.observation_dim, spec.num_actions or spec.action_dim
        self.change = nn.Sequential(nn.Linear(S + A, inner), nn.SiLU(), nn.Linear(inner, inner), nn.SiLU(), nn.Linear(inner, S))
        self.reward = nn.Sequential(nn.Linear(width + A, inner), nn.SiLU(), nn.Linear(inner, 1))

    def forward(self, hidden, observations, actions):
        """(..., D), (..., S), (..., A), all in the model's units -> (..., S), (...)"""
        if self.num_actions:
            actions = F.one_hot(actions[..., 0].long(), self.num_actions).to(hidden.dtype)
        return self.change(torch.cat([observations, actions], -1)), self.reward(torch.cat([hidden, actions], -1))[..., 0]


def candidate_actions(spec):
    """Actions worth holding for a while, in the model's units (C, A): every discrete one; in one or two dimensions, each a bound
    or the middle."""
    if spec.num_actions:
        return torch.arange(spec.num_actions, dtype=torch.float32)[:, None]
    if spec.action_dim > 2:
        raise ValueError(f"plan: expected at most two action dimensions, or discrete actions, got {spec.action_dim}")
    return torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * spec.action_dim).view(-1, spec.action_dim)


def _continuous(spec, name):
    if spec.num_actions:
        raise ValueError(
            f"head={name}: expected continuous actions, the data has {spec.num_actions} discrete ones; take head=discrete"
        )
