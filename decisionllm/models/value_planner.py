"""A planner by values that are learned inside a learned model: the return of holding an action for
some steps, and of what can follow.

Fitted value iteration over real and imagined observations, V(x) = max over the candidate actions of
the discounted rewards while it is held + discount^k V(end), needs no more data than the dynamics.
Rewards are within 0 .. 1 between the least and the largest of the data, values multiplied by
1 - discount, so that they are within 0 .. 1 too.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from decisionllm.checks import check_at_least, check_share
from decisionllm.models.dynamics import (
    BATCH,
    Dynamics,
    FourierMLP,
    candidate_actions,
    sample_rows,
)
from decisionllm.models.fitting import minimise
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Planner, Transitions
from decisionllm.randomness import temporary_seed
from decisionllm.schema import Spec

LEAST = 1e-3  # smallest value that is distinguished from 0
# numbers that stand for a task text, and how many texts a value can tell apart
CODE, TEXTS = 64, 512
PART = 512  # states whose plans are imagined at once


@lru_cache(TEXTS)
def text_code(text: str) -> Tensor:
    """Return numbers that stand for a text, (CODE,): drawn from N(0, 1) by a digest of the text."""
    seed = [*hashlib.blake2b(text.encode(), digest_size=8).digest()]
    return torch.from_numpy(np.random.default_rng(seed).normal(size=CODE)).float()


def codes(texts: Sequence[str]) -> Tensor:
    """Return the code of each text, (N, CODE)."""
    return torch.stack([text_code(text) for text in texts])


class ImaginedValue(nn.Module, Planner):
    """Models of the rewards and values, in learned dynamics; weights are fitted by `fit` alone.

    The observation holds what matters: the value reads no history. With `reads_text` it tells the
    task texts of its data apart, by a code that follows the observation; the dynamics are those of
    all texts. Below, a state is an observation with its code, (..., S + CODE), or an observation
    alone.

    Args:
        spec: of the data.
        discount: of a step, within 0 .. 1.
        horizon: steps to imagine before each action, for which a candidate action is held.
        least_value: where the best plan has less value, of 0 .. 1, the policy acts without a plan.
        reads_text: tell the task texts of the data apart.
        steps: training steps of each member of the dynamics, BATCH transitions each; the values have
            an iteration of steps / 25 batches for each 50.
    """

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
        check_at_least("planner.horizon", horizon, 1)
        check_at_least("planner.steps", steps, 1)
        check_share("planner.least_value", least_value)
        self.horizon = horizon
        self.least_value = least_value
        self.reads_text = reads_text
        self.steps = steps
        self.discount = discount
        code = CODE if reads_text else 0
        S = spec.observation_dim
        A = spec.num_actions or spec.action_dim
        self.dynamics = Dynamics(spec)
        # reward, and whether the episode ends
        rewards = (FourierMLP(S, S + code + A, 2, inner=128, code=code) for _ in range(3))
        self.rewards = nn.ModuleList(rewards)
        self.values = nn.ModuleList(FourierMLP(S, S + code, 1, code=code) for _ in range(2))
        if reads_text:
            self.known = nn.Buffer(torch.zeros(TEXTS, CODE))
        self.reward_low = nn.Buffer(torch.zeros(()))
        self.reward_span = nn.Buffer(torch.ones(()))
        self.candidates = nn.Buffer(candidate_actions(spec))
        self.requires_grad_(False)

    def text_codes(self, texts: Sequence[str]) -> Tensor:
        """Return the code of each text of the data, (U, CODE) or (U, 0).

        Raises:
            ValueError: more texts than the planner tells apart.
        """
        most = TEXTS if self.reads_text else 1
        if len(texts) > most:
            raise ValueError(
                f"planner=value: expected at most {most} task texts ({TEXTS} with "
                f"planner.reads_text=true), got {len(texts)}"
            )
        if not self.reads_text:
            return torch.zeros(len(texts), 0)
        return codes(texts)

    def states(self, observations: Tensor, texts: Sequence[str]) -> Tensor:
        """Append the codes of their texts to observations (N, S), in the model's units.

        Raises:
            ValueError: a text that the value was not fitted to.
        """
        if not self.reads_text:
            return observations
        for text in dict.fromkeys(texts):
            if not (text_code(text).to(self.known) == self.known).all(-1).any():
                raise ValueError(
                    "planner.reads_text: expected a task text that the value was fitted to, got "
                    f"{text!r}; act.planning_horizon=0 acts without the value"
                )
        return torch.cat([observations, codes(texts).to(observations)], -1)

    def value(self, states: Tensor) -> Tensor:
        """Return the lesser of both values (...), within 0 .. 1: the best of many actions is more
        often one whose value is too high.
        """
        return torch.cat([value(states) for value in self.values], -1).amin(-1).sigmoid()

    @property
    def zero(self) -> Tensor:
        """A reward of 0 in the unit of the values, which an episode that is over brings."""
        return (-self.reward_low / self.reward_span).clamp(0, 1)

    def predict_rewards(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Predict rewards within 0 .. 1, and the probability that the task ends the episode: two
        (...).

        Of several models of the rewards the least: each finds some in a few places unlike the data,
        where a plan would stay.
        """
        x = self.dynamics.encode(states, actions)
        paid, over = torch.stack([reward(x) for reward in self.rewards]).sigmoid().unbind(-1)
        return paid.amin(0), over.mean(0)

    @torch.no_grad()
    def advance(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Imagine one step of each row: the next observations (N, S), rewards in raw units (N,),
        whether the task ended the episode, and whether the members agree, (N,) bool."""
        ends = self.dynamics.hold_actions(states, actions, 1)
        paid, over = self.predict_rewards(states, actions)
        observations = ends.mean(0)[:, : self.dynamics.spec.observation_dim]
        reward = self.reward_low + paid * self.reward_span
        return observations, reward, over > 0.5, self.dynamics.agree(ends, 1)

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
        M = len(self.dynamics.members)
        actions = self.candidates.repeat(N, 1)
        gains = torch.zeros_like(actions[:, 0])  # sum over the members
        alive = torch.ones_like(actions[:, 0])  # product over the members
        ends = []
        for member in self.dynamics.members:
            x = states.repeat_interleave(C, 0)
            going = torch.ones_like(alive)
            for i in range(steps):
                paid, over = self.predict_rewards(x, actions)
                gains = gains + self.discount**i * (going * paid + (1 - going) * self.zero)
                x = self.dynamics.step(member, x, actions)
                going = going * (1 - over)
            ends.append(x)
            alive = alive * going
        every = torch.stack(ends).view(M, N, C, -1)
        gains = (1 - self.discount) / M * gains
        alive = alive ** (1 / M)
        agreed = self.dynamics.agree(every, steps)
        return every.mean(0), gains.view(N, C), alive.view(N, C), agreed

    def plan_values(self, imagined: tuple[Tensor, ...], steps: int) -> Tensor:
        """Return the value of each imagined sequence (N, C), within 0 .. 1; -1 where it is not
        used, see `Dynamics.agreed`.
        """
        ends, gains, alive, agreed = imagined
        after = alive * self.value(ends) + (1 - alive) * self.zero
        return torch.where(agreed, gains + self.discount**steps * after, -1.0)

    @torch.no_grad()
    def plan(self, states: Tensor, steps: int) -> Tensor:
        """Return the values (N, C) of holding each candidate action for so many steps, see
        `plan_values`. states: (N, S + CODE).
        """
        return self.plan_values(self.imagine(states, steps), steps)

    def fit(self, data: Transitions, units: Normalizer, *, seed: int) -> None:
        """Fit all parts.

        Raises:
            ValueError: no observation follows another.
        """
        if not len(data.pairs):
            raise ValueError(
                "planner=value: expected some episodes of two steps or more, whose changes it "
                "learns, got none"
            )
        with temporary_seed(seed):
            self.dynamics.set_units(units)
            for net in (*self.rewards, *self.values):
                net.set_frequencies(self.horizon * self.dynamics.change_scale)
            if self.reads_text:
                self.known[: len(data.codes)] = data.codes
            self.dynamics.fit(data, self.steps)
            self._fit_rewards(data)
            self._fit_values(self._sample_states(data, self.steps * BATCH // 100))

    def _fit_rewards(self, data: Transitions) -> None:
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
                logits = reward(self.dynamics.encode(data.states(rows), data.actions[rows]))
                return F.binary_cross_entropy_with_logits(logits, targets[rows])

            minimise(reward, loss, max(1, self.steps // 3), "planner: rewards")

    @torch.no_grad()
    def _sample_states(self, data: Transitions, count: int) -> Tensor:
        """Sample states (n, S + CODE): half of the data, half one or two imagined sequences of up
        to `horizon` steps away from it.
        """
        x = data.states(torch.randint(len(data.observations), (count,)))
        parts = [x[: count // 2]]
        x = x[count // 2 :]
        for _ in range(2):
            actions = sample_rows(self.candidates, len(x))
            lengths = torch.randint(1, self.horizon + 1, (len(x), 1))
            every = self.dynamics.hold_actions(x, actions, self.horizon, lengths)
            x = every.mean(0)[self.dynamics.agree(every, lengths)]
            half = len(x) // 2
            parts.append(x[:half])
            x = x[half:]
        return torch.cat([*parts, x])

    def _fit_values(self, states: Tensor) -> None:
        """Fit the values by value iteration.

        The loss is one of logits, so that values near 0, far from any reward, differ too.
        """
        rounds = max(1, self.steps // 50)
        each = max(1, self.steps // 25)
        imagined = [self.imagine(part, self.horizon) for part in states.split(PART)]
        for value in self.values:
            nn.init.zeros_(value.last.weight)
            nn.init.constant_(value.last.bias, -5.0)

        targets = torch.zeros_like(states[:, 0])

        def loss(step: int) -> Tensor:
            if step % each == 0:
                targets.copy_(self._improve_values(imagined, step // each))
            total = torch.zeros(())
            for value in self.values:
                rows = torch.randint(len(states), (BATCH,))
                logits = value(states[rows])[:, 0]
                total = total + F.smooth_l1_loss(logits, targets[rows], beta=0.3)
            return total

        def learning_rate_factor(step: int) -> float:
            iteration = step // each
            if iteration >= 0.9 * rounds:
                return 0.1
            if iteration >= 0.7 * rounds:
                return 0.3
            return 1.0

        minimise(
            self.values,
            loss,
            rounds * each,
            "planner: values",
            lr=1e-3,
            schedule=lambda optimizer, steps: LambdaLR(optimizer, learning_rate_factor),
        )

    @torch.no_grad()
    def _improve_values(self, imagined: Sequence[tuple[Tensor, ...]], iteration: int) -> Tensor:
        """Return the logits of the best plan from each state (n,), by the values of now.

        Args:
            imagined: plans of `horizon` steps from the states, in parts, see `imagine`.
            iteration: from 0.
        """
        best = torch.cat([self.plan_values(part, self.horizon).amax(-1) for part in imagined])
        # the value of the best reward at each of so many steps
        most = 1 - self.discount ** (self.horizon * (iteration + 1))
        return best.clamp(0, most).clamp(LEAST, 1 - LEAST).logit()
