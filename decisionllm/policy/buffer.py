"""Episodes under way: observations, actions and rewards so far.

An exported policy uses this without torch.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from decisionllm.datasets.windows import rollout_returns_to_go
from decisionllm.protocols import Player
from decisionllm.schema import History, Spec, Targets, raise_for_first

Rows = slice | np.ndarray | Sequence[int]
ALL = slice(None)


def fill_targets(targets: Sequence[float | None], own: float | None) -> np.ndarray:
    """Target returns (N,) float64, where None is the policy's own.

    NaN in the result, from an own target of None, is the predicted maximum return.

    Raises:
        ValueError: a target is not finite.
    """
    resolved_targets = np.array(targets, np.float64)  # None becomes NaN
    left_out = np.array([target is None for target in targets], bool)
    wrong = ~np.isfinite(resolved_targets) & ~left_out
    raise_for_first("target_return", wrong, ": expected a finite number, got {}", resolved_targets)
    if own is not None:
        resolved_targets[left_out] = own
    return resolved_targets


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise a ValueError for one text in place of a list: each of its letters would be an episode."""
    if isinstance(tasks, str):
        raise ValueError(
            "tasks: expected a list of task texts, one for each episode, got one text; take "
            f"[{tasks[:60]!r}]"
        )


class ReturnConditioned(Protocol):
    """The members of a policy that a buffer uses: of a `Policy` or an `ExportedPolicy`."""

    return_horizon: int

    @property
    def spec(self) -> Spec: ...

    @property
    def return_conditioned(self) -> bool: ...

    def check_horizon(self, horizon: int) -> None: ...

    def resolve_targets(self, targets: Sequence[float | None]) -> np.ndarray: ...


class EpisodeBuffer(Player):
    """Observations, actions, rewards and masks of N episodes under way, and their target returns.

    Args:
        policy: that acts.
        N: episodes.
        horizon: most steps of an episode.
        target_returns: one for all or (N,), raw reward units; None: the policy's own.

    Raises:
        ValueError: the model cannot read that many steps.
    """

    def __init__(
        self, policy: ReturnConditioned, N: int, horizon: int, target_returns: Targets = None
    ) -> None:
        spec = policy.spec
        policy.check_horizon(horizon)
        self.policy = policy
        self.horizon = horizon
        targets: list[float | None] = [None] * N
        if target_returns is not None:
            targets = np.broadcast_to(target_returns, N).tolist()
        self.targets = policy.resolve_targets(targets)  # NaN: the predicted maximum return
        self.observations = np.zeros((N, horizon, spec.observation_dim), np.float32)
        self.actions = np.zeros((N, horizon, spec.action_dim), np.float32)
        self.rewards = np.zeros((N, horizon))
        self.masks = np.ones((N, horizon, spec.num_actions), bool) if spec.num_actions else None
        self.now = np.zeros(N, int)  # the step to decide next
        self.unrewarded = np.zeros(N, bool)  # whether the reward of the last step is not known
        self.active: Rows = ALL  # the episodes that continue

    def act(
        self,
        observations: np.ndarray,
        rewards: np.ndarray | None = None,
        action_masks: np.ndarray | None = None,
    ) -> np.ndarray:
        """Choose the next actions (M, A) of the episodes that continue, see `Player.act`.

        Raises:
            ValueError: a number is not finite, a shape does not fit, the horizon is exceeded, or
                rewards that the return-to-go needs are left out.
        """
        if rewards is None and self.needs_rewards():
            raise ValueError(
                "rewards: expected those of the last step, which the return-to-go is reduced by, "
                "got none"
            )
        self.observe(observations, rewards, action_masks, self.active)
        actions = self.decide(self.active)
        self.record_action(actions, self.active)
        return actions

    def needs_rewards(self) -> bool:
        """Return whether a return-to-go of these episodes depends on the rewards of a step before."""
        policy = self.policy
        if not policy.return_conditioned or policy.return_horizon:
            return False
        is_reduced = ~np.isnan(self.targets)  # others are predicted anew at each step
        return bool((self.unrewarded & is_reduced)[self.active].any())

    def numbers(self, rows: Rows = ALL) -> np.ndarray:
        """(M,) int, the numbers of these rows."""
        return np.arange(len(self.now))[rows]

    def decide(self, rows: Rows = ALL) -> np.ndarray:
        """Actions (M, A) for the current observations, raw units."""
        raise NotImplementedError

    def observe(
        self,
        observations: np.ndarray,
        rewards: np.ndarray | None = None,
        action_masks: np.ndarray | None = None,
        rows: Rows = ALL,
    ) -> None:
        """Take in current observations, and rewards of the previous step, of these rows;
        see `act`.
        """
        now = self.now[rows]
        each = self.numbers(rows)
        if (now >= self.horizon).any():
            raise ValueError(
                f"session: expected at most {self.horizon} steps (the horizon), got one more"
            )
        M = len(each)
        _check_step("observations", observations, (M, self.observations.shape[2]))
        self.observations[each, now] = observations
        if rewards is not None:
            _check_step("rewards", rewards, (M,))
            self.rewards[each, np.maximum(now - 1, 0)] = np.where(now > 0, rewards, 0)
            self.unrewarded[rows] = False
        if action_masks is not None and self.masks is not None:
            _check_step("action_masks", action_masks, (M, self.masks.shape[2]))
            check_allowed(action_masks)
            self.masks[each, now] = action_masks

    def returns_to_go(self, rows: Rows = ALL) -> np.ndarray:
        """Return-to-go at each step of these rows (M, H) float32, raw reward units; NaN where it is
        to be predicted.
        """
        rewards = self.rewards[rows]
        targets = self.targets[rows]
        offsets = np.arange(len(rewards) + 1) * rewards.shape[1]
        togo = rollout_returns_to_go(
            rewards.ravel(), targets, offsets, return_horizon=self.policy.return_horizon
        )
        return togo.reshape(rewards.shape).astype(np.float32)

    def record_action(self, actions: np.ndarray, rows: Rows = ALL) -> None:
        """Take in the actions (M, A) that were taken at the current step of these rows."""
        self.actions[self.numbers(rows), self.now[rows]] = actions
        self.now[rows] += 1
        self.unrewarded[rows] = True

    def restore_row(self, row: int, history: History) -> None:
        """Give a row the past of an episode that has begun; the last observation is not used."""
        t = len(history.actions)
        self.now[row] = t
        self.unrewarded[row] = False
        self.observations[row, :t] = history.observations[:t]
        self.actions[row, :t] = history.actions
        self.rewards[row, :t] = history.rewards
        if history.action_masks is not None and self.masks is not None:
            self.masks[row, :t] = history.action_masks[:t]

    def select(self, rows: Rows) -> None:
        """Continue with these episodes alone: (M,) int or (N,) bool."""
        self.observations = self.observations[rows]
        self.actions = self.actions[rows]
        self.rewards = self.rewards[rows]
        if self.masks is not None:
            self.masks = self.masks[rows]
        self.targets = self.targets[rows]
        self.now = self.now[rows]
        self.unrewarded = self.unrewarded[rows]

    def masks_at(self, each: np.ndarray) -> np.ndarray | None:
        """Return the allowed actions at the current step of these rows, (M, C) bool or None."""
        if self.masks is None:
            return None
        return np.asarray(self.masks[each, self.now[each]])


def check_sizes(spec: Spec, histories: Sequence[History]) -> None:
    """Raise a ValueError if observations, actions or masks have other sizes than in training.

    Without this, numpy repeats the numbers of a narrower one.
    """
    trained = spec.observation_dim, spec.action_dim
    sizes = "observations of {} and actions of {} numbers"
    for i, history in enumerate(histories):
        got = history.observations.shape[1], history.actions.shape[1]
        if got != trained:
            expected = f"{sizes.format(*trained)}, as in training"
            raise ValueError(f"history {i}: expected {expected}, got {sizes.format(*got)}")
        masks = history.action_masks
        if masks is not None and masks.shape[1] != spec.num_actions:
            expected = f"action masks of {spec.num_actions} discrete actions, as in training"
            raise ValueError(f"history {i}: expected {expected}, got {masks.shape[1]}")


def check_allowed(masks: np.ndarray) -> None:
    """Raise a ValueError if some row of masks (M, C) allows no action."""
    allowed = np.any(masks, axis=1)  # (M,)
    raise_for_first(
        "action_masks",
        np.logical_not(allowed),
        ": expected an allowed action in every row, got none",
    )


def _check_step(name: str, numbers: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless what a session is given has this shape and is finite.

    Without this, numpy repeats a row of a smaller shape.
    """
    array = np.asarray(numbers)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, a row an episode, got {array.shape}")
    raise_for_first(name, ~np.isfinite(array), ": expected finite numbers, got {}", array)
