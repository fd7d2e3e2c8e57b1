"""Heads: distributions over the next action by hidden states, see `protocols.Head` and
`protocols.Distribution`.

Actions are in the model's units: -1 .. 1 per dimension, or the index of a discrete one. log_prob is
(B, T); mode, mean and sample are (B, T, A). Log-probabilities of continuous actions are densities,
so that heads can be compared in nats.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decisionllm.checks import check_at_least, check_positive
from decisionllm.protocols import Head
from decisionllm.schema import Spec
from decisionllm.tokenizers import bins
from decisionllm.tokenizers.entities import entity_blocks, entity_width


@dataclass(frozen=True)
class Gaussian:
    """Independent normal distributions of one deviation."""

    mean: Tensor  # (B, T, A)
    deviation: float

    def log_prob(self, actions: Tensor) -> Tensor:
        scaled = (actions - self.mean) / self.deviation
        each = -0.5 * scaled**2 - _log_normaliser(self.deviation)
        return each.sum(-1)

    @property
    def mode(self) -> Tensor:
        return self.mean

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device)
        return self.mean + self.deviation * noise

    def unclipped_mean(self) -> Tensor:
        """Return the actions (B, T, A) of a controller whose noisy, clipped actions have this mean.

        Noise of this deviation is added to them, and they are clipped to -1 .. 1. A controller's 1
        with noise of 0.5 is 0.8 on average in the log, which is what the squared error learns.
        """
        target = self.mean.float()
        actions = target
        limits = target.new_tensor([-1.0, 1.0])
        for _ in range(5):  # Newton's method
            away = (limits - actions[..., None]) / self.deviation  # (B, T, A, 2)
            below = (1 + (away / math.sqrt(2)).erf()) / 2  # chances to be below each limit
            density = (-0.5 * away**2).exp() / math.sqrt(2 * math.pi)
            within = below[..., 1] - below[..., 0]  # chance not to be clipped
            clipped = 1 - below.sum(-1)  # chance of 1, less that of -1
            cut_off = self.deviation * (density[..., 1] - density[..., 0])
            mean = clipped + actions * within - cut_off
            slope = within  # of the mean over the action
            actions = (actions + (target - mean) / slope).clamp(-1, 1)
        return actions


def _log_normaliser(deviation: float) -> float:
    """Return the log-normaliser of the normal density of one dimension."""
    return math.log(deviation * math.sqrt(2 * math.pi))


LEAK = 0.01  # of the gradient of `tanh_that_returns`


def tanh_that_returns(x: Tensor) -> Tensor:
    """Compute tanh with a gradient that is never below `LEAK`.

    In float32 that of tanh is 0 from |x| = 9 on: a mean that a large step of the optimiser brought
    there would be -1 or 1 for ever, whatever the data says.
    """
    mean = x.tanh()
    if not x.requires_grad:  # a policy that acts pays for no gradient
        return mean
    slope = 1 - mean.detach() ** 2
    missing = (LEAK - slope).clamp(min=0)  # 0 up to |x| = 2.99
    zero_of_slope_1 = x - x.detach()
    return mean + missing * zero_of_slope_1


class GaussianHead(nn.Module):
    """A Gaussian of fixed deviation, whose mean is a tanh: its loss is the squared error.

    Args:
        width: D, of hidden states.
        spec: of the data; continuous actions.
        deviation: standard deviation of the Gaussian, in the model's units.

    Raises:
        ValueError: the data has discrete actions, or the deviation is not above 0.
    """

    entities: slice | None = None

    def __init__(self, width: int, spec: Spec, *, deviation: float = 0.5) -> None:
        super().__init__()
        _check_continuous(spec, "gaussian")
        check_positive("head.deviation", deviation)
        self.out = nn.Linear(width, spec.action_dim)
        self.deviation = deviation
        self.loss_floor = spec.action_dim * _log_normaliser(deviation)

    def forward(
        self,
        hidden: Tensor,
        action_masks: Tensor | None = None,
        entities: Tensor | None = None,
    ) -> Gaussian:
        return Gaussian(tanh_that_returns(self.out(hidden)), self.deviation)


def _sample_indices(shares: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample one index (...) of each categorical (..., K)."""
    rows = shares.flatten(0, -2)
    indices = torch.multinomial(rows, 1, generator=generator)
    return indices.view(shares.shape[:-1])


@dataclass(frozen=True)
class Bins:
    """An independent categorical over K bins a dimension."""

    logits: Tensor  # (B, T, A, K)

    @property
    def count(self) -> int:
        """K."""
        return self.logits.shape[-1]

    def log_prob(self, actions: Tensor) -> Tensor:
        indices = bins.encode(actions, self.count)
        logits = self.logits.log_softmax(-1).expand(*indices.shape, -1)
        each = logits.gather(-1, indices[..., None])[..., 0]
        return (each - math.log(bins.bin_width(self.count))).sum(-1)

    @property
    def mode(self) -> Tensor:
        return bins.decode(self.logits.argmax(-1), self.count)

    @property
    def mean(self) -> Tensor:
        indices = torch.arange(self.count, device=self.logits.device)
        centres = bins.decode(indices, self.count)
        shares = self.logits.softmax(-1)
        return shares @ centres.to(shares.dtype)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        indices = _sample_indices(self.logits.softmax(-1), generator)
        return bins.decode(indices, self.count)


class BinsHead(nn.Module):
    """A categorical over bins per action dimension: keeps several modes, which a squared error
    would average.

    Args:
        width: D, of hidden states.
        spec: of the data; continuous actions.
        num_bins: bins of each action dimension.

    Raises:
        ValueError: the data has discrete actions, or there are fewer than two bins.
    """

    entities: slice | None = None

    def __init__(self, width: int, spec: Spec, *, num_bins: int = 33) -> None:
        super().__init__()
        _check_continuous(spec, "bins")
        check_at_least("head.num_bins", num_bins, 2)
        self.shape = (spec.action_dim, num_bins)
        self.loss_floor = spec.action_dim * math.log(bins.bin_width(num_bins))
        self.out = nn.Linear(width, spec.action_dim * num_bins)

    def forward(
        self,
        hidden: Tensor,
        action_masks: Tensor | None = None,
        entities: Tensor | None = None,
    ) -> Bins:
        logits = self.out(hidden).float()  # a CPU's autocast would leave the loss in bfloat16
        return Bins(logits.unflatten(-1, self.shape))


@dataclass(frozen=True)
class Discrete:
    """One categorical over C actions."""

    logits: Tensor  # (B, T, C), log-probabilities, -inf where an action is not allowed

    @classmethod
    def from_logits(cls, logits: Tensor, action_masks: Tensor | None) -> "Discrete":
        """Build the distribution over the allowed actions: logits (B, T, C), masks (B, T, C) bool
        or None.
        """
        logits = logits.float()  # a CPU's autocast would leave the loss in bfloat16
        if action_masks is not None:
            logits = logits.masked_fill(~action_masks, float("-inf"))
        return cls(logits.log_softmax(-1))

    def log_prob(self, actions: Tensor) -> Tensor:
        indices = actions.long()
        return self.logits.expand(*indices.shape[:-1], -1).gather(-1, indices)[..., 0]

    @property
    def mode(self) -> Tensor:
        return self.logits.argmax(-1, keepdim=True).float()

    mean = mode  # an index has no mean

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        indices = _sample_indices(self.logits.exp(), generator)
        return indices[..., None].float()


class DiscreteHead(nn.Module):
    """A categorical over the discrete actions that the mask allows.

    Args:
        width: D, of hidden states.
        spec: of the data; discrete actions.

    Raises:
        ValueError: the data has continuous actions.
    """

    entities: slice | None = None
    loss_floor = 0.0

    def __init__(self, width: int, spec: Spec) -> None:
        super().__init__()
        if not spec.num_actions:
            raise ValueError(
                "head=discrete: expected discrete actions, got continuous ones; take head=gaussian "
                "or bins, or dataset.num_actions=N where they are indices of N actions"
            )
        self.out = nn.Linear(width, spec.num_actions)

    def forward(
        self,
        hidden: Tensor,
        action_masks: Tensor | None = None,
        entities: Tensor | None = None,
    ) -> Discrete:
        return Discrete.from_logits(self.out(hidden), action_masks)


class PointerHead(nn.Module):
    """Discrete actions, of which the last ones are each aimed at one entity: attention from the
    hidden state to the entities.

    The entities of one kind are the targets of as many last actions, in the order of the schema;
    the other actions are as in head=discrete.

    Args:
        width: D, of hidden states.
        spec: of the data; discrete actions and an entity schema.
        kind: kind of the entities; empty: the last kind of the schema.

    Raises:
        ValueError: the data has no such actions or entities.
    """

    loss_floor = 0.0

    def __init__(self, width: int, spec: Spec, *, kind: str = "") -> None:
        super().__init__()
        first = 1
        slices_by_kind = {}
        for block in entity_blocks(spec.entity_schema):
            # among the own numbers and all entities
            slices_by_kind[block.kind] = slice(first, first + block.num_entities)
            first += block.num_entities
        kind = kind or next(reversed(slices_by_kind), "")
        self.entities = slices_by_kind.get(kind, slice(0, 0))
        count = self.entities.stop - self.entities.start
        if not (count and spec.num_actions >= count):
            kinds = ", ".join(slices_by_kind) or "none"
            raise ValueError(
                "head=pointer: expected discrete actions aimed at the entities of one kind, got "
                f"{spec.num_actions} actions and kind {kind!r} of {kinds}"
            )
        self.out = nn.Linear(width, spec.num_actions - count)
        self.query = nn.Linear(width, entity_width(width))
        self.key = nn.Linear(entity_width(width), entity_width(width))

    def forward(
        self,
        hidden: Tensor,
        action_masks: Tensor | None = None,
        entities: Tensor | None = None,
    ) -> Discrete:
        """hidden (B, T, D), action_masks (B, T, C) bool, entities (B, T, K, inner)."""
        assert entities is not None
        match = (self.key(entities) @ self.query(hidden)[..., None])[..., 0]  # (B, T, K)
        aimed = match * entities.shape[-1] ** -0.5
        return Discrete.from_logits(torch.cat([self.out(hidden), aimed], -1), action_masks)


def check_decode(decode: str, head: Head) -> None:
    """Raise a ValueError if the distributions of a head have no such action, see
    `SequenceModel.choose`.
    """
    if decode == "unclipped" and not isinstance(head, GaussianHead):
        raise ValueError(f"decode: unclipped needs head=gaussian, got {type(head).__name__}")


def _check_continuous(spec: Spec, name: str) -> None:
    if spec.num_actions:
        raise ValueError(
            f"head={name}: expected continuous actions, got {spec.num_actions} discrete ones; take "
            "head=discrete"
        )
