"""Episodes -> windows of up to T steps, padded on the right -> batches.

Training, evaluation and the server all use this slicer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.datasets.row_blocks import Columns
from decisionllm.datasets.store import Store, blocks
from decisionllm.schema import (
    OPTIONAL_STEP_FIELDS,
    Batch,
    History,
    StepColumns,
    Window,
    shaped,
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
    distinct = np.unique(lengths)
    if len(distinct) == 1:  # of a rollout: nothing needs to be gathered
        received = received_before(rewards.reshape(len(lengths), -1)).ravel()
    else:
        received = np.zeros(len(rewards))
        for length in distinct:
            first = offsets[:-1][lengths == length]
            rows = first[:, None] + np.arange(length)  # (e, length)
            received[rows] = received_before(rewards[rows])
    return np.asarray(np.repeat(np.asarray(totals, np.float64), lengths) - received)


def received_before(rewards: np.ndarray) -> np.ndarray:
    """The rewards (E, T) that each episode received before each step, (E, T) float64."""
    received = np.zeros(rewards.shape)
    np.cumsum(rewards[:, :-1], axis=1, dtype=np.float64, out=received[:, 1:])
    return received


@dataclass(frozen=True)
class Steps(StepColumns[np.ndarray]):
    """Episodes end to end, as the slicer reads them: of a log, views of files; of a rollout, up to
    the current step.
    """

    returns_to_go: np.ndarray = shaped("n")
    first: np.ndarray = shaped("E")  # row of each episode's first step
    end: np.ndarray = shaped("E")  # row after its last

    def blocks(self, episodes: np.ndarray, size: int = BLOCK) -> Iterator[np.ndarray]:
        """The rows of these episodes, end to end, at most `size` at a time."""
        first = self.first[episodes]
        # steps before each of them
        before = np.concatenate([[0], np.cumsum(self.end[episodes] - first)])
        count = before[-1]
        for start in range(0, count, size):
            step = np.arange(start, min(start + size, count))
            episode = np.searchsorted(before, step, side="right") - 1
            yield first[episode] + step - before[episode]


def of_store(store: Store, *, return_horizon: int = 0) -> Steps:
    """The steps of a log.

    Args:
        store: of the log.
        return_horizon: a return counts the rewards of this many next steps; 0: to the end of the
            episode. The last steps of a truncated episode are then left out, since the rewards that
            would have followed are unknown; so are those of an agent whose team plays on, since only
            the sum of what follows is known.
    """
    togo: np.ndarray = np.empty(len(store.rewards), np.float32)
    for episodes, rows in blocks(store, BLOCK):
        offsets = store.offsets[episodes.start : episodes.stop + 1] - rows.start
        returns = store.returns[episodes]
        if return_horizon and store.return_after_exit is not None:
            returns = returns - store.return_after_exit[episodes]
        each = returns_to_go(store.rewards[rows], returns, offsets)
        if return_horizon:
            each = within_horizon(each, offsets, return_horizon)
        togo[rows] = each
    first, end = store.offsets[:-1], store.offsets[1:]
    if return_horizon:
        known = np.maximum(end - return_horizon + 1, first)
        is_whole = store.terminated
        if store.return_after_exit is not None:
            is_whole = is_whole & (store.return_after_exit == 0)
        end = np.where(is_whole, end, known)
    optional = _optional(store)
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


def within_horizon(togo: np.ndarray, offsets: np.ndarray, horizon: int) -> np.ndarray:
    """Returns-to-go (n,) less what is received after this many steps: the return of the next steps
    alone (n,).

    Args:
        togo: (n,) to the end of each episode.
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
    """Return-to-go that a policy conditions on at each step of a rollout: rewards (n,), targets
    (E,), offsets (E+1,) -> (n,).

    With a return_horizon it is the target at every step, since a return of the next steps does not
    shrink by what was received.
    """
    if return_horizon:
        return np.repeat(np.asarray(target_returns, np.float64), np.diff(offsets))
    return returns_to_go(rewards, target_returns, offsets)


def of_histories(
    histories: Sequence[History], target_returns: np.ndarray, *, return_horizon: int = 0
) -> Steps:
    """The steps of N histories with these target returns (N,).

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
        action_masks=_masks_of(histories),
    )


def _masks_of(histories: Sequence[History]) -> np.ndarray | None:
    """The allowed actions at each observation of these histories, end to end, (n, C); None if no
    history has masks.
    """
    known = [h.action_masks for h in histories if h.action_masks is not None]
    if not known:
        return None
    C = known[0].shape[1]
    each = []
    for history in histories:
        if history.action_masks is None:
            each.append(np.ones((len(history.observations), C), bool))
        else:
            each.append(history.action_masks)
    return np.concatenate(each)


def cut(steps: Steps, episodes: np.ndarray, starts: np.ndarray, T: int) -> Window:
    """Windows of T steps that begin at these steps (B,) of these episodes (B,), padded where they
    leave the episode.
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
    for name, column in (columns | _optional(steps)).items():
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
    windows: np.ndarray = (
        all_windows[inside].view(column.dtype).reshape(len(begin), T, *column.shape[1:])
    )
    outside = np.flatnonzero(inside != begin)
    if len(outside):
        windows[outside] = column.take(rows[outside], 0, mode="clip")
    return windows


def collate(window: Window, texts: tuple[torch.Tensor, torch.Tensor], index: np.ndarray) -> Batch:
    """A Window and the texts of its rows as a Batch.

    Args:
        window: B rows.
        texts: ids and mask (U, L) of all texts, see `tokenizers.text.encode`.
        index: (B,) the text of each row.
    """
    from torch import from_numpy as tensor

    ids, mask = texts
    if len(ids) > 1:  # only those that are used
        used, index = np.unique(index, return_inverse=True)
        ids = ids[used]
        mask = mask[used]
    longest = int(mask.sum(1).max()) if mask.numel() else 0  # tokens
    more = {name: tensor(column) for name, column in _optional(window).items()}
    if window.team is not None:
        _, numbered = np.unique(window.team, return_inverse=True)
        more["team"] = tensor(numbered)
    if window.identity is not None:
        more["identity"] = tensor(window.identity)
    return Batch(
        observations=tensor(window.observations),
        actions=tensor(window.actions),
        returns_to_go=tensor(window.returns_to_go),
        timesteps=tensor(window.timesteps),
        mask=tensor(window.mask),
        text_ids=ids[:, :longest],
        text_mask=mask[:, :longest],
        text_index=tensor(index),
        **more,
    )


def distinct(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The distinct ones of these texts (B,), in their order, and which of them each text is (B,)."""
    found = sorted(set(texts))
    number = {text: i for i, text in enumerate(found)}
    return found, np.array([number[text] for text in texts])


def _optional(columns: StepColumns[np.ndarray]) -> Columns:
    """The optional step columns that are there."""
    given = {name: vars(columns)[name] for name in OPTIONAL_STEP_FIELDS}
    return {name: column for name, column in given.items() if column is not None}


def window_start(now: np.ndarray | int, T: int, stride: int) -> np.ndarray:
    """The step where the window of a decision at step `now` begins.

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
    over = np.maximum(np.asarray(now) + 1 - T, 0)  # steps that do not fit
    drops = -(-over // stride)  # rounded up
    return np.asarray(drops * stride)
