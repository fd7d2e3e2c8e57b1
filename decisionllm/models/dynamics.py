"""Learned dynamics: an ensemble that predicts the next observation, and where to trust it.

The members of the ensemble predict the change of the observation. An imagined sequence is not used
where they disagree about its end, or where its end is unlike the data. Observations and actions are
in the model's units.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.models.fitting import minimise
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Transitions
from decisionllm.schema import Spec
from decisionllm.tokenizers.fourier_features import append_fourier_features
from decisionllm.tokenizers.trajectory import action_inputs

MEMBERS = 2  # of the ensemble
BATCH = 4096  # rows of a training step
# by which members may differ about an end for each imagined step, in standard deviations of a
# step's change
TOLERANCE = 0.2
# share of the transitions, those with the largest errors, that half of each batch is drawn from
HARD = 0.1
BINS = 50  # of each number of an observation, from its least to its largest value in the data


def candidate_actions(spec: Spec) -> Tensor:
    """Return the actions to plan with, in the model's units (C, A): every discrete one; else each
    dimension at a bound or in the middle.
    """
    if spec.num_actions:
        return torch.arange(spec.num_actions, dtype=torch.float32)[:, None]
    if spec.action_dim > 2:
        raise ValueError(
            "planner=value: expected at most two action dimensions, or discrete actions, got "
            f"{spec.action_dim}; take planner=none"
        )
    each = torch.tensor([-1.0, 0.0, 1.0])
    return torch.cartesian_prod(*[each] * spec.action_dim).view(-1, spec.action_dim)


class FourierMLP(nn.Module):
    """An MLP of inputs and of sines and cosines of the first S of them, each at frequencies up to
    one that resolves a step's change.

    With a code, the numbers after the first S, each hidden number of the last layers is multiplied
    by a number of its own for each code.
    """

    def __init__(
        self, S: int, inputs: int, outputs: int, *, inner: int = 256, count: int = 12, code: int = 0
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(code, inner) if code else None
        self.frequencies = nn.Buffer(torch.ones(count, S))
        self.first = nn.Linear(inputs + 2 * count * S, inner)
        self.last = nn.Linear(inner, outputs)
        self.middle = nn.Linear(inner, inner)

    def set_frequencies(self, change: Tensor) -> None:
        """Draw them log-uniformly between 1 and 1 / change. change: (S,) deviation of a step's
        change, in the model's units.
        """
        count = len(self.frequencies)
        number = torch.arange(count, device=change.device)[:, None]
        share = (number + torch.rand_like(self.frequencies)) / count
        self.frequencies.copy_((1 / change).clamp(min=2.0) ** share)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs); under autocast only the middle has less precision."""
        S = self.frequencies.shape[1]
        phases = (x[..., None, :S] * self.frequencies).flatten(-2)
        with torch.autocast(x.device.type, enabled=False):
            hidden = F.silu(self.first(append_fourier_features(x, phases)))
        hidden = F.silu(self.middle(hidden))
        with torch.autocast(x.device.type, enabled=False):
            if self.gate is not None:
                hidden = hidden * (1 + self.gate(x[..., S : S + self.gate.in_features]))
            out: Tensor = self.last(hidden.float())
        return out


class Dynamics(nn.Module):
    """An ensemble that predicts what follows, and what the data look like.

    A state is an observation with K numbers that stay the same, such as a goal: (..., S + K).

    Args:
        spec: of the data.
        compared: how many numbers of an observation, the first ones, must be like the data; 0: all.
    """

    members: Any  # (M,) FourierMLP

    def __init__(self, spec: Spec, *, compared: int = 0) -> None:
        super().__init__()
        S = spec.observation_dim
        A = spec.num_actions or spec.action_dim
        self.spec = spec
        self.compared = compared or S
        self.members = nn.ModuleList(FourierMLP(S, S + A, S) for _ in range(MEMBERS))
        pairs = torch.zeros(1, 2, dtype=torch.long)
        if self.compared > 1:
            pairs = torch.combinations(torch.arange(self.compared))
        self.pairs = nn.Buffer(pairs)  # of numbers of an observation, see `supported`
        self.together = nn.Buffer(torch.ones(len(pairs), BINS, BINS, dtype=torch.bool))
        self.change_mean = nn.Buffer(torch.zeros(S))
        self.change_scale = nn.Buffer(torch.ones(S))
        self.low = nn.Buffer(torch.zeros(S))
        self.bin_width = nn.Buffer(torch.ones(S))

    def encode(self, states: Tensor, actions: Tensor) -> Tensor:
        """Return the input of a network (..., x + A) of states or observations (..., x) and
        actions.
        """
        return torch.cat([states, action_inputs(actions, self.spec.num_actions)], -1)

    def step(self, member: nn.Module, states: Tensor, actions: Tensor) -> Tensor:
        """Return the next states (..., S + K), as this member predicts them."""
        S = self.spec.observation_dim
        change: Tensor = member(self.encode(states[..., :S], actions))
        K = states.shape[-1] - S
        return states + F.pad(self.change_mean + self.change_scale * change, (0, K))

    def hold_actions(
        self, states: Tensor, actions: Tensor, steps: int, lengths: Tensor | None = None
    ) -> Tensor:
        """Return where each member ends from states (n, S + K) by holding actions (n, A): (M, n, S
        + K).

        Args:
            states, actions: n of them.
            steps: how many.
            lengths: (n, 1) at most `steps`, after which a row stays where it is.
        """
        ends = []
        for member in self.members:
            x = states
            for t in range(steps):
                following = self.step(member, x, actions)
                x = following if lengths is None else torch.where(t < lengths, following, x)
            ends.append(x)
        return torch.stack(ends)

    def agree(self, ends: Tensor, steps: int | Tensor) -> Tensor:
        """Return True where the members' ends (M, ..., S + K) after so many steps, one number or
        (..., 1), agree in every number and their mean is like the data: (...) bool.
        """
        ends = ends[..., : self.spec.observation_dim]
        mean = ends.mean(0)
        apart = (ends - mean).abs().amax(0)
        alike = (apart < TOLERANCE * steps * self.change_scale).all(-1)
        return alike & self.is_supported(mean)

    def bins(self, observations: Tensor) -> Tensor:
        """Return the bin of each number, (..., S) int; below 0 or from BINS on beyond the data's
        range.
        """
        return ((observations - self.low) / self.bin_width).floor().long()

    def is_supported(self, observations: Tensor) -> Tensor:
        """Return True where any two compared numbers of an observation (..., S) are in bins that
        they are in together somewhere in the data: (...) bool.

        A place within a wall is not, however smoothly the members cross it. All numbers together
        would need more data.
        """
        bins = self.bins(observations)[..., : self.compared]
        # a bin more at the ends, where an observation may rest
        inside = ((bins >= -1) & (bins <= BINS)).all(-1)
        first, second = bins.clamp(0, BINS - 1)[..., self.pairs].unbind(-1)  # (..., pairs)
        pair = torch.arange(len(self.pairs), device=bins.device)
        seen: Tensor = self.together[pair, first, second]
        return inside & seen.all(-1)

    def set_units(self, units: Normalizer) -> None:
        """Take the change of an observation in a step, in the model's units, and the frequencies
        that resolve it."""
        self.change_scale.copy_(units.change_scale / units.observation_scale)
        self.change_mean.copy_(units.change_mean / units.observation_scale)
        for member in self.members:
            member.set_frequencies(self.change_scale)

    def fit(self, data: Transitions, steps: int) -> None:
        """Count what the data look like and fit the members. steps: of BATCH transitions each."""
        self.count_bins(data.observations)
        for member in self.members:
            self._fit_member(member, data, steps)

    def count_bins(self, x: Tensor) -> None:
        """Count which bins any two numbers of the observations (n, S) are in together, and the bins
        around them.
        """
        self.low.copy_(x.amin(0))
        self.bin_width.copy_(((x.amax(0) - self.low) / (BINS - 1e-3)).clamp(min=1e-6))
        self.together.zero_()
        bins = self.bins(x).clamp(0, BINS - 1)
        for together, (i, j) in zip(self.together, self.pairs.tolist(), strict=True):
            together[bins[:, i], bins[:, j]] = True
        around = F.max_pool2d(self.together[:, None].float(), 3, stride=1, padding=1)
        self.together.copy_(around[:, 0] > 0)

    def _fit_member(self, member: nn.Module, data: Transitions, steps: int) -> None:
        """Fit a member to transitions, more to those that it predicts badly."""
        x = data.observations
        pairs = data.pairs

        def errors(rows: Tensor) -> Tensor:
            change = (x[rows + 1] - x[rows] - self.change_mean) / self.change_scale
            predicted = member(self.encode(x[rows], data.actions[rows]))
            return F.mse_loss(predicted, change, reduction="none").mean(-1)

        hard = pairs

        def loss(step: int) -> Tensor:
            nonlocal hard
            if step and step % max(1, steps // 4) == 0:
                sample = sample_rows(pairs, 100 * BATCH)
                with torch.no_grad():
                    errors_of_sample = torch.cat([errors(rows) for rows in sample.split(BATCH)])
                hard = sample[errors_of_sample.topk(int(HARD * len(sample))).indices]
            any_rows = sample_rows(pairs, BATCH // 2)
            hard_rows = sample_rows(hard, BATCH // 2)
            return errors(torch.cat([any_rows, hard_rows])).mean()

        minimise(member, loss, steps, "planner: dynamics")


def sample_rows(x: Tensor, count: int) -> Tensor:
    """Sample so many rows of a tensor (n, ...), (count, ...)."""
    return x[torch.randint(len(x), (count,))]
