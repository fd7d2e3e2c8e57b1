"""A value learned inside a learned model: what holding an action for some steps brings, and what
can follow.

The members of an ensemble predict the change of the observation; an imagined sequence is not used
where they disagree about its end, or where its end is unlike the data. Fitted value iteration over
real and imagined observations, V(x) = max over the candidate actions of the discounted rewards
while it is held + discount^k V(end), then needs no more data. Observation and actions are in the
model's units, rewards within 0 .. 1 between the least and the largest of the data, values
multiplied by 1 - discount, so that they are within 0 .. 1 too.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.models.normalizer import Normalizer
from decisionllm.randomness import seeded
from decisionllm.registry import register
from decisionllm.schema import Spec
from decisionllm.tokenizers.trajectory import numbers
from decisionllm.tokenizers.waves import beside_waves

MEMBERS = 2  # of the ensemble
BATCH = 4096  # rows of a training step
# by which members may differ about an end for each imagined step, in standard deviations of a
# step's change
TOLERANCE = 0.2
# share of the transitions, those with the largest errors, that half of each batch is drawn from
HARD = 0.1
LEAST = 1e-3  # smallest value that is distinguished from 0
BINS = 50  # of each number of an observation, from its least to its largest value in the data
# numbers that stand for a task text, and how many texts a value can tell apart
CODE, TEXTS = 64, 512


def candidate_actions(spec: Spec) -> Tensor:
    """Actions to plan with, in the model's units (C, A): every discrete one; else each dimension at
    a bound or in the middle.
    """
    if spec.num_actions:
        return torch.arange(spec.num_actions, dtype=torch.float32)[:, None]
    if spec.action_dim > 2:
        wanted = "at most two action dimensions, or discrete actions"
        got = f"{spec.action_dim}; take planner=none"
        raise ValueError(f"planner=value: expected {wanted}, got {got}")
    each = torch.tensor([-1.0, 0.0, 1.0])
    return torch.cartesian_prod(*[each] * spec.action_dim).view(-1, spec.action_dim)


@lru_cache(TEXTS)
def code_of(text: str) -> Tensor:
    """Numbers that stand for a text, (CODE,): drawn from N(0, 1) by a digest of the text."""
    seed = [*hashlib.blake2b(text.encode(), digest_size=8).digest()]
    return torch.from_numpy(np.random.default_rng(seed).normal(size=CODE)).float()


def codes(texts: Sequence[str]) -> Tensor:
    """The code of each text, (N, CODE)."""
    return torch.stack([code_of(text) for text in texts])


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
            hidden = F.silu(self.first(beside_waves(x, phases)))
        hidden = F.silu(self.middle(hidden))
        with torch.autocast(x.device.type, enabled=False):
            if self.gate is not None:
                hidden = hidden * (1 + self.gate(x[..., S : S + self.gate.in_features]))
            out: Tensor = self.last(hidden.float())
        return out


@dataclass(frozen=True)
class Transitions:
    """Rows of the data, in the model's units, rewards raw."""

    observations: Tensor  # (n, S)
    actions: Tensor  # (n, A)
    rewards: Tensor  # (n,)
    ended: Tensor  # (n,) 1 where the task ended the episode after this row
    pairs: Tensor  # (m,) rows that are followed by the next row
    text: Tensor  # (n,) which of the codes is the row's
    codes: Tensor  # (K, CODE) of the texts, (K, 0) where no text is read

    def states(self, rows: Tensor) -> Tensor:
        """Observations of these rows, and the codes of their texts, (..., S + CODE)."""
        return torch.cat([self.observations[rows], self.codes[self.text[rows]]], -1)


@register("planner", "value")
class ImaginedValue(nn.Module):
    """Members of a dynamics model, models of the rewards, and values; weights are fitted by `fit`
    alone.

    The observation holds what matters: the value reads no history. With `reads_text` it tells the
    task texts of its data apart, by a code that follows the observation; the dynamics are those of
    all texts. Below, a state is an observation with its code, (..., S + CODE), or an observation
    alone.

    Args:
        spec: of the data.
        discount: of a step, within 0 .. 1.
        horizon: steps to imagine before each action, for which a candidate action is held.
        least_value: where the best plan has less value, of 0 .. 1, the policy acts without a plan.
        reads_text: whether it tells the task texts of the data apart.
        steps: of training of each member, BATCH transitions each; the values have an iteration of
            steps / 25 batches for each 50.
    """

    members: Any  # (M,) FourierMLP
    rewards: Any  # (3,) FourierMLP
    values: Any  # (2,) FourierMLP

    def __init__(
        self,
        spec: Spec,
        *,
        discount: float = 0.99,
        horizon: int = 10,
        least_value: float = 0.0,
        reads_text: bool = False,
        steps: int = 1500,
    ) -> None:
        super().__init__()
        if not 0 < discount < 1:
            raise ValueError(f"planner.discount: expected within 0 .. 1, got {discount}")
        if horizon < 1 or steps < 1:
            got = f"{horizon} and {steps}"
            raise ValueError(f"planner.horizon, planner.steps: expected 1 or more, got {got}")
        self.horizon = horizon
        self.least_value = least_value
        self.reads_text = reads_text
        self.steps = steps
        self.spec = spec
        self.discount = discount
        self.code = code = CODE if reads_text else 0
        S = spec.observation_dim
        A = spec.num_actions or spec.action_dim
        self.members = nn.ModuleList(FourierMLP(S, S + A, S) for _ in range(MEMBERS))
        # reward, and whether the episode ends
        rewards = (FourierMLP(S, S + code + A, 2, inner=128, code=code) for _ in range(3))
        self.rewards = nn.ModuleList(rewards)
        self.values = nn.ModuleList(FourierMLP(S, S + code, 1, code=code) for _ in range(2))
        if reads_text:
            self.known = nn.Buffer(torch.zeros(TEXTS, CODE))
        self._pair(S)
        self.change_mean = nn.Buffer(torch.zeros(S))
        self.change_scale = nn.Buffer(torch.ones(S))
        self.low = nn.Buffer(torch.zeros(S))
        self.bin_width = nn.Buffer(torch.ones(S))
        self.reward_low = nn.Buffer(torch.zeros(()))
        self.reward_span = nn.Buffer(torch.ones(()))
        self.candidates = nn.Buffer(candidate_actions(spec))
        self.requires_grad_(False)

    def _pair(self, size: int) -> None:
        """Pair the first numbers of an observation, so many, see `supported`."""
        pairs = torch.zeros(1, 2, dtype=torch.long)
        if size > 1:
            pairs = torch.combinations(torch.arange(size))
        self.pairs = nn.Buffer(pairs)
        self.together = nn.Buffer(torch.ones(len(pairs), BINS, BINS, dtype=torch.bool))

    def text_codes(self, texts: Sequence[str]) -> Tensor:
        """What a state holds of each text of the data, (K, CODE) or (K, 0).

        Raises:
            ValueError: more texts than the planner tells apart.
        """
        most = TEXTS if self.reads_text else 1
        if len(texts) > most:
            wanted = f"at most {most} task texts ({TEXTS} with planner.reads_text=true)"
            raise ValueError(f"planner=value: expected {wanted}, got {len(texts)}")
        if not self.reads_text:
            return torch.zeros(len(texts), 0)
        return codes(texts)

    def states(self, observations: Tensor, texts: Sequence[str]) -> Tensor:
        """Observations (N, S), in the model's units, and the codes of their texts.

        Raises:
            ValueError: a text that the value was not fitted to.
        """
        if not self.reads_text:
            return observations
        for text in dict.fromkeys(texts):
            if not (code_of(text).to(self.known) == self.known).all(-1).any():
                wanted = "a task text that the value was fitted to"
                remedy = "act.planning_horizon=0 acts without the value"
                raise ValueError(f"planner.reads_text: expected {wanted}, got {text!r}; {remedy}")
        return torch.cat([observations, codes(texts).to(observations)], -1)

    def encode(self, states: Tensor, actions: Tensor) -> Tensor:
        """What members and rewards read, (..., S + CODE + A)."""
        return torch.cat([states, numbers(actions, self.spec.num_actions)], -1)

    def step(self, member: nn.Module, states: Tensor, actions: Tensor) -> Tensor:
        """The next states, in the model's units, as this member predicts them."""
        change: Tensor = member(self.encode(states[..., : self.spec.observation_dim], actions))
        return states + F.pad(self.change_mean + self.change_scale * change, (0, self.code))

    def agreed(self, ends: Tensor, steps: int | Tensor) -> Tensor:
        """Whether the members' ends (M, ..., S) after so many steps, one number or (..., 1), agree
        in every number and their mean is like the data: (...) bool."""
        ends = ends[..., : self.spec.observation_dim]
        mean = ends.mean(0)
        apart = (ends - mean).abs().amax(0)
        alike = (apart < TOLERANCE * steps * self.change_scale).all(-1)
        return alike & self.supported(mean)

    def bins(self, observations: Tensor) -> Tensor:
        """The bin of each number, (..., S) int; below 0 or from BINS on beyond the data's range."""
        return ((observations - self.low) / self.bin_width).floor().long()

    def supported(self, observations: Tensor) -> Tensor:
        """Whether any two numbers of an observation (..., S) are in bins that they are in together
        somewhere in the data: (...) bool.

        A place within a wall is not, however smoothly the members cross it. All numbers together
        would need more data.
        """
        bins = self.bins(observations)
        # a bin more at the ends, where an observation may rest
        inside = ((bins >= -1) & (bins <= BINS)).all(-1)
        first, second = bins.clamp(0, BINS - 1)[..., self.pairs].unbind(-1)  # (..., pairs)
        pair = torch.arange(len(self.pairs), device=bins.device)
        known: Tensor = self.together[pair, first, second]
        return inside & known.all(-1)

    def value(self, states: Tensor) -> Tensor:
        """The lesser of both values (...), within 0 .. 1: the best of many actions is more often
        one whose value is too high.
        """
        return torch.cat([value(states) for value in self.values], -1).amin(-1).sigmoid()

    @property
    def zero(self) -> Tensor:
        """A reward of 0 in the unit of the values, which an episode that is over brings."""
        return (-self.reward_low / self.reward_span).clamp(0, 1)

    def pay(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards within 0 .. 1, and the probability that the task ends the episode: two (...).

        Of several models of the rewards the least: each finds some in a few places unlike the data,
        where a plan would stay.
        """
        x = self.encode(states, actions)
        paid, over = torch.stack([reward(x) for reward in self.rewards]).sigmoid().unbind(-1)
        return paid.amin(0), over.mean(0)

    @torch.no_grad()
    def advance(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One imagined step of each row: the next observations (N, S), rewards in raw units (N,),
        whether the task ended the episode, and whether the members agree, (N,) bool."""
        ends = torch.stack([self.step(member, states, actions) for member in self.members])
        paid, over = self.pay(states, actions)
        observations = ends.mean(0)[:, : self.spec.observation_dim]
        reward = self.reward_low + paid * self.reward_span
        return observations, reward, over > 0.5, self.agreed(ends, 1)

    @torch.no_grad()
    def imagine(self, states: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hold each candidate action for so many steps.

        Args:
            states: (N, S + CODE).
            steps: k.

        Returns:
            End states (N, C, S + CODE), the discounted rewards times 1 - discount until then (N,
            C), the probability that the episode goes on (N, C), and whether the members agree about
            the end (N, C).
        """
        N = len(states)
        C = len(self.candidates)
        M = len(self.members)
        actions = self.candidates.repeat(N, 1)
        gains = torch.zeros_like(actions[:, 0])  # sum over the members
        alive = torch.ones_like(actions[:, 0])  # product over the members
        ends = []
        for member in self.members:
            x = states.repeat_interleave(C, 0)
            going = torch.ones_like(alive)
            for i in range(steps):
                paid, over = self.pay(x, actions)
                gains = gains + self.discount**i * (going * paid + (1 - going) * self.zero)
                x = self.step(member, x, actions)
                going = going * (1 - over)
            ends.append(x)
            alive = alive * going
        every = torch.stack(ends).view(M, N, C, -1)
        gains = (1 - self.discount) / M * gains
        alive = alive ** (1 / M)
        return every.mean(0), gains.view(N, C), alive.view(N, C), self.agreed(every, steps)

    def ahead(self, imagined: tuple[Tensor, ...], steps: int) -> Tensor:
        """Value of each imagined sequence (N, C), within 0 .. 1; -1 where it is not used, see
        `agreed`.
        """
        ends, gains, alive, known = imagined
        after = alive * self.value(ends) + (1 - alive) * self.zero
        return torch.where(known, gains + self.discount**steps * after, -1.0)

    @torch.no_grad()
    def plan(self, states: Tensor, steps: int) -> Tensor:
        """Values (N, C) of holding each candidate action for so many steps, see `ahead`. states:
        (N, S + CODE).
        """
        return self.ahead(self.imagine(states, steps), steps)

    def fit(self, data: Transitions, units: Normalizer, *, seed: int) -> None:
        """Fit all parts.

        Args:
            data: transitions.
            units: of the model, fitted with the changes.
            seed: of weights and batches.

        Raises:
            ValueError: no observation follows another.
        """
        steps, horizon = self.steps, self.horizon
        if not len(data.pairs):
            wanted = "some episodes of two steps or more, whose changes it learns"
            raise ValueError(f"planner=value: expected {wanted}, got none")
        with seeded(seed):
            self._set_units(units)
            for net in self.members:
                net.set_frequencies(self.change_scale)
            for net in (*self.rewards, *self.values):
                net.set_frequencies(horizon * self.change_scale)
            if self.reads_text:
                self.known[: len(data.codes)] = data.codes
            self._count(data.observations)
            for member in self.members:
                self._fit_member(member, data, steps)
            self._fit_rewards(data, steps)
            states = self._states(data, steps * BATCH // 100, horizon)
            self._fit_values(states, horizon, rounds=max(1, steps // 50), each=max(1, steps // 25))

    def _set_units(self, units: Normalizer) -> None:
        """Take the change of an observation in a step, in the model's units."""
        self.change_scale.copy_(units.change_scale / units.observation_scale)
        self.change_mean.copy_(units.change_mean / units.observation_scale)

    def _count(self, x: Tensor) -> None:
        """Note which bins any two numbers of the observations (n, S) are in together, and the bins
        around them.
        """
        self.low.copy_(x.amin(0))
        self.bin_width.copy_(((x.amax(0) - self.low) / (BINS - 1e-3)).clamp(min=1e-6))
        self.together.zero_()
        bins = self.bins(x).clamp(0, BINS - 1)
        for known, (i, j) in zip(self.together, self.pairs.tolist(), strict=True):
            known[bins[:, i], bins[:, j]] = True
        around = F.max_pool2d(self.together[:, None].float(), 3, stride=1, padding=1)
        self.together.copy_(around[:, 0] > 0)

    def _fit_member(self, member: nn.Module, data: Transitions, steps: int) -> None:
        """Fit a member to transitions, more to those that it predicts badly."""
        x = data.observations
        a = data.actions
        pairs = data.pairs

        def errors(rows: Tensor) -> Tensor:
            change = (x[rows + 1] - x[rows] - self.change_mean) / self.change_scale
            predicted = member(self.encode(x[rows], a[rows]))
            return F.mse_loss(predicted, change, reduction="none").mean(-1)

        hard = pairs

        def loss(step: int) -> Tensor:
            nonlocal hard
            if step and step % max(1, steps // 4) == 0:
                some = pairs[torch.randint(len(pairs), (100 * BATCH,))]
                with torch.no_grad():
                    found = torch.cat([errors(rows) for rows in some.split(BATCH)])
                hard = some[found.topk(int(HARD * len(some))).indices]
            any_rows = pairs[torch.randint(len(pairs), (BATCH // 2,))]
            hard_rows = hard[torch.randint(len(hard), (BATCH // 2,))]
            return errors(torch.cat([any_rows, hard_rows])).mean()

        fitted(member, loss, steps, "value: dynamics")

    def _fit_rewards(self, data: Transitions, steps: int) -> None:
        low, high = data.rewards.min(), data.rewards.max()
        if data.ended.any():  # an episode that is over brings 0
            low, high = low.clamp(max=0), high.clamp(min=0)
        self.reward_low.copy_(low)
        self.reward_span.copy_((high - low).clamp(min=1e-6))
        targets = torch.stack([(data.rewards - self.reward_low) / self.reward_span, data.ended], -1)
        for reward in self.rewards:

            def loss(step: int, reward: nn.Module = reward) -> Tensor:
                # rare rewards drawn more often would look likely elsewhere
                rows = torch.randint(len(targets), (BATCH,))
                logits = reward(self.encode(data.states(rows), data.actions[rows]))
                return F.binary_cross_entropy_with_logits(logits, targets[rows])

            fitted(reward, loss, max(1, steps // 3), "value: rewards")

    @torch.no_grad()
    def _states(self, data: Transitions, count: int, longest: int) -> Tensor:
        """States (n, S + CODE): half of the data, half one or two imagined sequences of up to
        `longest` steps away from it.
        """
        x = data.states(torch.randint(len(data.observations), (count,)))
        found = [x[: count // 2]]
        x = x[count // 2 :]
        for _ in range(2):
            actions = self.candidates[torch.randint(len(self.candidates), (len(x),))]
            length = torch.randint(1, longest + 1, (len(x), 1))
            ends = []
            for member in self.members:
                y = x
                for t in range(longest):
                    y = torch.where(t < length, self.step(member, y, actions), y)
                ends.append(y)
            every = torch.stack(ends)
            x = every.mean(0)[self.agreed(every, length)]
            half = len(x) // 2
            found.append(x[:half])
            x = x[half:]
        return torch.cat([*found, x])

    def _fit_values(self, states: Tensor, steps: int, *, rounds: int, each: int) -> None:
        """Fitted value iteration.

        The loss is one of logits, so that values near 0, far from any reward, differ too.
        """
        parts = [self.imagine(part, steps) for part in states.split(512)]
        for value in self.values:
            nn.init.zeros_(value.last.weight)
            nn.init.constant_(value.last.bias, -5.0)
        self.values.requires_grad_(True)
        optimizer = torch.optim.Adam(self.values.parameters(), 1e-3)
        for i in track(range(rounds), "value: iterations"):
            if i >= 0.9 * rounds:
                rate = 1e-4
            elif i >= 0.7 * rounds:
                rate = 3e-4
            else:
                rate = 1e-3
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.no_grad():
                best = torch.cat([self.ahead(part, steps).amax(-1) for part in parts])
            most = 1 - self.discount ** (steps * (i + 1))  # of so many steps of the largest reward
            targets = best.clamp(0, most).clamp(LEAST, 1 - LEAST).logit()
            for _ in range(each):
                optimizer.zero_grad()
                for value in self.values:
                    rows = torch.randint(len(states), (BATCH,))
                    F.smooth_l1_loss(value(states[rows])[:, 0], targets[rows], beta=0.3).backward()
                optimizer.step()
        self.values.requires_grad_(False)


def fitted(net: nn.Module, loss: Callable[[int], Tensor], steps: int, what: str) -> None:
    """Train a network by this loss of a step; `what` is the title of the progress bar."""
    net.requires_grad_(True)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    # a warm-up of exactly one step would be divided by its last step, which is 0
    warmup = 0.05 if steps != 20 else 0.1
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, steps, pct_start=warmup, cycle_momentum=False
    )
    for step in track(range(steps), what):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        schedule.step()
    net.requires_grad_(False)
