"""Episodes -> windows of up to T steps, padded on the right -> batches.

Training, evaluation and the server all use this slicer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.datasets.row_blocks import Columns
from decisionllm.datasets.store import Store, iterate_blocks
from decisionllm.schema import (
    OPTIONAL_STEP_FIELDS,
    Batch,
    History,
    StepColumns,
    Window,
    array_field,
)

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 22  # rows that are worked on at a time


def returns_to_go(rewards: np.ndarray, totals: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return-to-go of every step: the total return minus the rewards received before the step.

    Args:
        rewards: (n,) rewards of all episodes, end to end, in raw reward units.
        totals: (E,) return of each episode (training) or its target return (rollout), raw reward
            units.
        offsets: (E+1,) row of the first step of each episode, and n.

    Returns:
        (n,) float64. Rewards [1, 2, 3] with total 6 give [6, 5, 3].
    """
    # One sum over all episodes would be shorter, but a large reward in one of them would take the
    # last digits from all that follow. Episodes of one length are summed at once.
    lengths = np.diff(offsets)
    distinct_lengths = np.unique(lengths)
    if len(distinct_lengths) == 1:  # of a rollout: nothing needs to be gathered
        received = sum_past_rewards(rewards.reshape(len(lengths), -1)).ravel()
    else:
        received = np.zeros(len(rewards))
        for length in distinct_lengths:
            first = offsets[:-1][lengths == length]
            rows = first[:, None] + np.arange(length)  # (e, length)
            received[rows] = sum_past_rewards(rewards[rows])
    return np.asarray(np.repeat(np.asarray(totals, np.float64), lengths) - received)


def sum_past_rewards(rewards: np.ndarray) -> np.ndarray:
    """Sum the rewards that each episode received before each step, (E, T) -> (E, T) float64."""
    received = np.zeros(rewards.shape)
    np.cumsum(rewards[:, :-1], axis=1, dtype=np.float64, out=received[:, 1:])
    return received


@dataclass(frozen=True)
class Steps(StepColumns[np.ndarray]):
    """Episodes end to end, as the slicer reads them: of a log, views of files; of a rollout, up to
    the current step.
    """

    returns_to_go: np.ndarray = array_field("n")
    first: np.ndarray = array_field("E")  # row of each episode's first step
    end: np.ndarray = array_field("E")  # row after its last

    def blocks(self, episodes: np.ndarray, size: int = BLOCK) -> Iterator[np.ndarray]:
        """Yield the rows of these episodes, end to end, at most `size` at a time."""
        first = self.first[episodes]
        steps_before = np.concatenate([[0], np.cumsum(self.end[episodes] - first)])
        num_steps = steps_before[-1]
        for start in range(0, num_steps, size):
            step = np.arange(start, min(start + size, num_steps))
            episode = np.searchsorted(steps_before, step, side="right") - 1
            yield first[episode] + step - steps_before[episode]


def load_steps(store: Store, *, return_horizon: int = 0) -> Steps:
    """Return the steps of a log with their returns-to-go.

    Args:
        store: of the log.
        return_horizon: a return counts the rewards of this many next steps; 0: to the end of the
            episode. The last steps of a truncated episode are then left out, since the rewards that
            would have followed are unknown; so are those of an agent whose team plays on, since only
            the sum of what follows is known.
    """
    togo: np.ndarray = np.empty(len(store.rewards), np.float32)
    for episodes, rows in iterate_blocks(store, BLOCK):
        offsets = store.offsets[episodes.start : episodes.stop + 1] - rows.start
        returns = store.returns[episodes]
        if return_horizon and store.return_after_exit is not None:
            returns = returns - store.return_after_exit[episodes]
        block = returns_to_go(store.rewards[rows], returns, offsets)
        if return_horizon:
            block = _returns_within_horizon(block, offsets, return_horizon)
        togo[rows] = block
    first, end = store.offsets[:-1], store.offsets[1:]
    if return_horizon:
        end_of_known = np.maximum(end - return_horizon + 1, first)
        is_whole = store.terminated
        if store.return_after_exit is not None:
            is_whole = is_whole & (store.return_after_exit == 0)
        end = np.where(is_whole, end, end_of_known)
    optional = _optional_columns(store)
    if store.action_weight is not None:
        recorded = store.action_weight > 0
        optional["loss_mask"] = recorded & optional.get("loss_mask", True)
    return Steps(
        observations=store.observations,
        actions=store.actions,
        returns_to_go=togo,
        first=first,
        end=end,
        **optional,
    )


def _returns_within_horizon(togo: np.ndarray, offsets: np.ndarray, horizon: int) -> np.ndarray:
    """Return the return of the next `horizon` steps alone, (n,).

    Args:
        togo: (n,) returns-to-go to the end of each episode.
        offsets: (E+1,) row of the first step of each episode, and n.
        horizon: steps.
    """
    end = np.repeat(offsets[1:], np.diff(offsets))  # (n,) the row after the episode of each row
    later = np.minimum(np.arange(len(togo)) + horizon, end)
    after = np.where(later < end, togo[np.minimum(later, len(togo) - 1)], 0)
    return np.asarray(togo - after)


def rollout_returns_to_go(
    rewards: np.ndarray, target_returns: np.ndarray, offsets: np.ndarray, *, return_horizon: int
) -> np.ndarray:
    """Return the return-to-go that a policy conditions on at each step of a rollout, (n,).

    With a return_horizon it is the target at every step, since a return of the next steps does not
    shrink by what was received.

    Args:
        rewards: (n,) of all episodes, end to end.
        target_returns: (E,).
        offsets: (E+1,) row of the first step of each episode, and n.
        return_horizon: steps; 0: to the end of the episode.
    """
    if return_horizon:
        return np.repeat(np.asarray(target_returns, np.float64), np.diff(offsets))
    return returns_to_go(rewards, target_returns, offsets)


def concatenate_histories(
    histories: Sequence[History], target_returns: np.ndarray, *, return_horizon: int = 0
) -> Steps:
    """Return the steps of N histories with these target returns (N,).

    The next action is a zero, which no prediction depends on.
    """
    offsets = np.concatenate([[0], np.cumsum([len(h.observations) for h in histories])])
    next_action = np.zeros((1, histories[0].actions.shape[1]), np.float32)
    actions = []
    rewards = []
    for history in histories:
        actions += [history.actions, next_action]
        rewards += [history.rewards, np.zeros(1)]
    togo = rollout_returns_to_go(
        np.concatenate(rewards), target_returns, offsets, return_horizon=return_horizon
    )
    return Steps(
        observations=np.concatenate([h.observations for h in histories]).astype(np.float32),
        actions=np.concatenate(actions).astype(np.float32),
        returns_to_go=togo.astype(np.float32),
        first=offsets[:-1],
        end=offsets[1:],
        action_masks=_concatenate_masks(histories),
    )


def _concatenate_masks(histories: Sequence[History]) -> np.ndarray | None:
    """Return the action masks of histories, end to end, (n, C); None if no history has masks."""
    masks = [h.action_masks for h in histories if h.action_masks is not None]
    if not masks:
        return None
    C = masks[0].shape[1]
    filled_masks = []
    for history in histories:
        if history.action_masks is None:
            filled_masks.append(np.ones((len(history.observations), C), bool))
        else:
            filled_masks.append(history.action_masks)
    return np.concatenate(filled_masks)


def cut_windows(steps: Steps, episodes: np.ndarray, starts: np.ndarray, T: int) -> Window:
    """Cut windows of T steps that begin at these steps (B,) of these episodes (B,), padded where
    they leave the episode.
    """
    first = steps.first[episodes]
    length = steps.end[episodes] - first
    timesteps = starts[:, None] + np.arange(T)  # (B, T)
    mask = (timesteps >= 0) & (timesteps < length[:, None])
    padding = np.nonzero(~mask)
    columns = {
        "observations": steps.observations,
        "actions": steps.actions,
        "returns_to_go": steps.returns_to_go,
    }
    windows: Columns = {}
    for name, column in (columns | _optional_columns(steps)).items():
        windows[name] = copy_windows(column, first + starts, T)
        # padding is zero; every action is allowed there
        windows[name][padding] = name == "action_masks"
    timesteps[padding] = 0
    return Window(**windows, timesteps=timesteps, mask=mask, episodes=episodes)


def copy_windows(column: np.ndarray, begin: np.ndarray, T: int) -> np.ndarray:
    """Copy T rows of a column (n, ...), from each of these rows on (B,): (B, T, ...).

    Rows outside of the column are any of its rows; the caller masks them.
    """
    n = len(column)
    rows = begin[:, None] + np.arange(T)  # (B, T)
    if T == 1 or n < T or not column.flags.c_contiguous:
        return np.asarray(column.take(rows, 0, mode="clip"))
    # All windows of the column as elements of T rows each, which overlap in memory. To copy twenty
    # rows of 80 bytes as one element of 1,600 is three times as fast as to copy them one by one.
    row = column.nbytes // n
    all_windows = np.ndarray(n - T + 1, f"V{T * row}", column, strides=row)
    inside = np.clip(begin, 0, n - T)
    selected = all_windows[inside].view(column.dtype)
    windows: np.ndarray = selected.reshape(len(begin), T, *column.shape[1:])
    outside = np.flatnonzero(inside != begin)
    if len(outside):
        windows[outside] = column.take(rows[outside], 0, mode="clip")
    return windows


def collate(window: Window, texts: tuple[torch.Tensor, torch.Tensor], index: np.ndarray) -> Batch:
    """Build a Batch of a Window and the texts of its rows.

    Args:
        window: B rows.
        texts: ids and mask (U, L) of all texts, see `tokenizers.text.encode`.
        index: (B,) the text of each row.
    """
    from torch import from_numpy as tensor

    ids, mask = texts
    if len(ids) > 1:  # only the texts of these rows
        used, index = np.unique(index, return_inverse=True)
        ids = ids[used]
        mask = mask[used]
    longest = int(mask.sum(1).max()) if mask.numel() else 0  # tokens
    optional = {name: tensor(column) for name, column in _optional_columns(window).items()}
    if window.team is not None:
        _, team_index = np.unique(window.team, return_inverse=True)
        optional["team"] = tensor(team_index)
    if window.identity is not None:
        optional["identity"] = tensor(window.identity)
    return Batch(
        observations=tensor(window.observations),
        actions=tensor(window.actions),
        returns_to_go=tensor(window.returns_to_go),
        timesteps=tensor(window.timesteps),
        mask=tensor(window.mask),
        text_ids=ids[:, :longest],
        text_mask=mask[:, :longest],
        text_index=tensor(index),
        **optional,
    )


def deduplicate_texts(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the distinct texts, sorted, and the index (B,) of each of these texts (B,)."""
    distinct_texts = sorted(set(texts))
    index = {text: i for i, text in enumerate(distinct_texts)}
    return distinct_texts, np.array([index[text] for text in texts])


def _optional_columns(columns: StepColumns[np.ndarray]) -> Columns:
    """Return the optional step columns that are not None."""
    present: Columns = {}
    for name in OPTIONAL_STEP_FIELDS:
        column = vars(columns)[name]
        if column is not None:
            present[name] = column
    return present


def window_start(now: np.ndarray | int, T: int, stride: int) -> np.ndarray:
    """Return the step where the window of a decision at step `now` begins.

    The window grows to T steps and then drops the oldest `stride` at once, so that cached keys and
    values stay valid in between. Its length, within T - stride + 1 .. T once the episode is longer,
    is one that training has seen. stride = 1 is the plain sliding window.

    Args:
        now: (N,) steps.
        T: window length, steps.
        stride: steps, at most T.

    Returns:
        (N,) int.
    """
    excess = np.maximum(np.asarray(now) + 1 - T, 0)  # steps that do not fit
    num_drops = -(-excess // stride)  # rounded up
    return np.asarray(num_drops * stride)
