"""Episodes -> windows of up to T steps, padded on the right -> batches. Training, evaluation and the server all use this slicer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from decisionllm.datasets.store import Store, blocks
from decisionllm.schema import OPTIONAL_STEP_FIELDS, Batch, History, StepColumns, Window, shaped

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 22  # rows that are worked on at a time


def returns_to_go(rewards: np.ndarray, totals: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return-to-go of every step: the total return minus the rewards received before the step.

    Args:
        rewards: (n,) rewards of all episodes, end to end, in raw reward units.
        totals: (E,) return of each episode (training) or its target return (rollout), raw reward units.
        offsets: (E+1,) row of the first step of each episode, and n.

    Returns:
        (n,) float64. Rewards [1, 2, 3] with total 6 give [6, 5, 3].
    """
    before = np.concatenate([[0.0], np.cumsum(rewards, dtype=np.float64)])
    return np.asarray(np.repeat(np.asarray(totals, np.float64) + before[offsets[:-1]], np.diff(offsets)) - before[:-1])


@dataclass(frozen=True)
class Steps(StepColumns[np.ndarray]):
    """Episodes end to end, as the slicer reads them: of a log, views of files; of a rollout, up to the current step."""

    returns_to_go: np.ndarray = shaped("n")
    first: np.ndarray = shaped("E")  # row of each episode's first step
    end: np.ndarray = shaped("E")  # row after its last

    def blocks(self, episodes: np.ndarray, size: int = BLOCK) -> Iterator[np.ndarray]:
        """The rows of these episodes, end to end, at most `size` at a time."""
        first = self.first[episodes]
        before = np.concatenate([[0], np.cumsum(self.end[episodes] - first)])
        for start in range(0, before[-1], size):
            row = np.arange(start, min(start + size, before[-1]))
            which = np.searchsorted(before, row, side="right") - 1
            yield first[which] + row - before[which]


def of_store(store: Store, *, return_horizon: int = 0) -> Steps:
    """The steps of a log.

    Args:
        store: of the log.
        return_horizon: a return counts the rewards of this many next steps; 0: to the end of the episode. The last steps of a
            truncated episode are then left out, since the rewards that would have followed are unknown.
    """
    first, end = store.offsets[:-1], store.offsets[1:]
    togo: np.ndarray = np.empty(len(store.rewards), np.float32)
    for part, rows in blocks(store, BLOCK):
        offsets = store.offsets[part.start : part.stop + 1] - rows.start
        each = returns_to_go(store.rewards[rows], store.returns[part], offsets)
        if return_horizon:
            last = np.repeat(offsets[1:], np.diff(offsets))
            later = np.minimum(np.arange(len(each)) + return_horizon, last)
            each = each - np.where(later < last, each[np.minimum(later, len(each) - 1)], 0)
        togo[rows] = each
    if return_horizon:
        end = np.where(store.terminated, end, np.maximum(end - return_horizon + 1, first))
    columns = {"observations": store.observations, "actions": store.actions, "returns_to_go": togo}
    optional = _optional(store)
    if store.action_weight is not None:
        optional["loss_mask"] = (store.action_weight > 0) & optional.get("loss_mask", True)
    return Steps(**columns, first=first, end=end, **optional)


def rollout_returns_to_go(
    rewards: np.ndarray, target_returns: np.ndarray, offsets: np.ndarray, *, return_horizon: int = 0
) -> np.ndarray:
    """Return-to-go that a policy conditions on at each step of a rollout: rewards (n,), targets (E,), offsets (E+1,) -> (n,).

    With a return_horizon it is the target at every step, since a return of the next steps does not shrink by what was received.
    """
    if return_horizon:
        return np.repeat(np.asarray(target_returns, np.float64), np.diff(offsets))
    return returns_to_go(rewards, target_returns, offsets)


def of_histories(histories: Sequence[History], target_returns: Any, *, return_horizon: int = 0) -> Steps:
    """The steps of N histories with these target returns (N,). The next action is a zero, which no prediction depends on."""
    sizes = np.array([len(h.observations) for h in histories])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    zero = np.zeros((1, histories[0].actions.shape[1]), np.float32)
    rewards = np.concatenate([part for h in histories for part in (h.rewards, [0.0])])
    masks = [h.action_masks for h in histories]
    C = next((mask.shape[1] for mask in masks if mask is not None), 0)
    allowed = [np.ones((n, C), bool) if mask is None else mask for mask, n in zip(masks, sizes, strict=True)]
    togo = rollout_returns_to_go(rewards, target_returns, offsets, return_horizon=return_horizon)
    return Steps(
        observations=np.concatenate([h.observations for h in histories]).astype(np.float32),
        actions=np.concatenate([part for h in histories for part in (h.actions, zero)]).astype(np.float32),
        returns_to_go=togo.astype(np.float32), first=offsets[:-1], end=offsets[1:],
        action_masks=np.concatenate(allowed) if C else None,
    )  # fmt: skip


def cut(steps: Steps, episodes: np.ndarray, starts: np.ndarray, T: int) -> Window:
    """Windows of T steps that begin at these steps (B,) of these episodes (B,), padded where they leave the episode."""
    first, end = steps.first[episodes], steps.end[episodes]
    step = starts[:, None] + np.arange(T)
    mask = (step >= 0) & (step < (end - first)[:, None])
    padding = np.nonzero(~mask)
    always = {"observations": steps.observations, "actions": steps.actions, "returns_to_go": steps.returns_to_go}
    columns: dict[str, Any] = _rows(always | _optional(steps), first + starts, T)
    for name, column in {**columns, "": step}.items():
        column[padding] = name == "action_masks"  # padding is zero; every action is allowed there
    return Window(**columns, timesteps=step, mask=mask, episodes=episodes)


def _rows(columns: dict[str, np.ndarray], begin: np.ndarray, T: int) -> dict[str, np.ndarray]:
    """T rows of columns (n, ...) from each of these on (B,): (B, T, ...). What would be before or behind a column is any row of it."""
    n = len(next(iter(columns.values())))
    inside = np.clip(begin, 0, max(n - T, 0))
    outside = np.flatnonzero(inside != begin)
    found = {}
    for name, column in columns.items():
        if T == 1 or n < T or not column.flags.c_contiguous:
            found[name] = column.take(begin[:, None] + np.arange(T), 0, mode="clip")
            continue
        row = column.nbytes // n
        windows = np.ndarray(n - T + 1, f"V{T * row}", column, strides=row)[inside]  # a window is copied as one element
        found[name] = windows.view(column.dtype).reshape(len(begin), T, *column.shape[1:])
        if len(outside):
            found[name][outside] = column.take(begin[outside, None] + np.arange(T), 0, mode="clip")
    return found


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
        ids, mask = ids[used], mask[used]
    length = int(mask.sum(1).max()) if mask.numel() else 0
    return Batch(
        tensor(window.observations), tensor(window.actions), tensor(window.returns_to_go), tensor(window.timesteps),
        tensor(window.mask), ids[:, :length], mask[:, :length], tensor(index),
        team=None if window.team is None else tensor(np.unique(window.team, return_inverse=True)[1]),
        identity=None if window.identity is None else tensor(window.identity),
        **{name: tensor(column) for name, column in _optional(window).items()},
    )  # fmt: skip


def _optional(columns: StepColumns[np.ndarray]) -> dict[str, Any]:
    """The optional step columns that are there."""
    return {name: column for name in OPTIONAL_STEP_FIELDS if (column := vars(columns)[name]) is not None}


def window_start(now: np.ndarray | int, T: int, stride: int) -> np.ndarray:
    """The step where the window of a decision at step `now` begins.

    The window grows to T steps and then drops the oldest `stride` at once, so that cached keys and values stay valid in between.
    Its length, within T - stride + 1 .. T once the episode is longer, is one that training has seen. stride = 1 is the plain
    sliding window.

    Args:
        now: (N,) steps.
        T: window length, steps.
        stride: steps, at most T.

    Returns:
        (N,) int.
    """
    over = np.maximum(np.asarray(now) + 1 - T, 0)
    return np.asarray(-(-over // stride) * stride)


class Sampler:
    """Training windows, a pure function of (seed, step), that begin at any step of the chosen episodes.

    A window that begins near the end of its episode is short, as at the beginning of a rollout.

    Args:
        steps: of all episodes of the log.
        episodes: the chosen ones.
        T: window length, steps.
        batch_size: B.
        seed: of the draws.
        weights: (E,) relative frequency of the steps of each episode of the log; None: equal.
        discount: a window begins at step t of its episode with relative frequency discount^t; of all, or (E,) of each episode of
            the log.
    """

    def __init__(
        self, steps: Steps, episodes: np.ndarray, *, T: int, batch_size: int, seed: int, weights: np.ndarray | None = None,
        discount: float | np.ndarray = 1.0,
    ) -> None:  # fmt: skip
        self.steps, self.T, self.batch_size, self.seed = steps, T, batch_size, seed
        self.texts = batch_size  # of a batch, at most
        self.episodes = self.arranged(np.asarray(episodes))
        self.discount = discount[self.episodes] if isinstance(discount, np.ndarray) else discount
        lengths = (steps.end - steps.first)[self.episodes]
        self.before = np.concatenate([[0], np.cumsum(lengths)])
        self.weights = None if weights is None else weights[self.episodes]
        self.pitch = max(self.before[-1] // (4 * len(lengths)), 1)  # of the steps whose episodes are looked up before
        self.nearest = np.searchsorted(self.before, np.arange(0, self.before[-1], self.pitch), side="right") - 1

    def arranged(self, episodes: np.ndarray) -> np.ndarray:
        """These episodes in the order in which their steps are counted."""
        return np.sort(episodes)

    def __call__(self, step: int) -> Window:
        return self.at(self.draw(np.random.default_rng((self.seed, step))))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """The first steps of the windows of a batch (B,), counted as in `at`."""
        return draw(rng, self.batch_size, self.before, self.weights, self.discount)

    def at(self, drawn: np.ndarray) -> Window:
        """The windows that begin at these steps (B,), counted over the chosen episodes alone."""
        return cut(self.steps, *self.find(drawn), self.T)

    def find(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The episodes of these steps (B,), counted over the chosen episodes alone, and the steps within them (B,)."""
        which = self.nearest[drawn // self.pitch]
        while (later := drawn >= self.before[which + 1]).any():  # a few times: four looked-up steps an episode, on average
            which = which + later
        return self.episodes[which], drawn - self.before[which]


class TextSampler(Sampler):
    """A `Sampler` of windows of which several share a task, so that few texts are read for many windows.

    Row i of a batch has the task of row i % texts. The tasks of a batch are drawn as those of a `Sampler` are, and so is each row
    among the steps of its task: any one row is drawn as a `Sampler` draws it.

    Args:
        steps: of all episodes of the log.
        episodes: the chosen ones.
        task: (E,) of each episode of the log.
        rows_per_text: windows of a batch that share a task.
        options: of a `Sampler`.
    """

    def __init__(self, steps: Steps, episodes: np.ndarray, *, task: np.ndarray, rows_per_text: int, **options: Any) -> None:
        self.task = task
        super().__init__(steps, episodes, **options)
        self.texts = -(-self.batch_size // rows_per_text)
        chosen = task[self.episodes]
        changes = np.flatnonzero(np.diff(chosen)) + 1
        self.first = np.concatenate([[0], changes])  # of the chosen episodes, the first one of each task
        self.end = np.concatenate([changes, [len(chosen)]])

    def arranged(self, episodes: np.ndarray) -> np.ndarray:
        """By task, so that the steps of a task are neighbours."""
        episodes = super().arranged(episodes)
        return np.asarray(episodes[np.argsort(self.task[episodes], kind="stable")])

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        leaders = draw(rng, self.texts, self.before, self.weights, self.discount)
        which = np.searchsorted(self.before, leaders, side="right") - 1
        of_task = np.searchsorted(self.first, which, side="right") - 1
        rows = of_task[np.arange(self.batch_size) % self.texts]
        return draw(rng, self.batch_size, self.before, self.weights, self.discount, among=(self.first[rows], self.end[rows]))


def sampler(rows_per_text: int, task: np.ndarray) -> Callable[..., Sampler]:
    """What makes samplers of which so many rows share a text: of a `Sampler` or `TextSampler` all but `task` and `rows_per_text`."""
    return Sampler if rows_per_text == 1 else partial(TextSampler, task=task, rows_per_text=rows_per_text)


def draw(
    rng: np.random.Generator,
    size: int,
    before: np.ndarray,
    weights: np.ndarray | None = None,
    discount: float | np.ndarray = 1.0,
    among: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Draw steps of episodes that hold before[e]:before[e + 1].

    Args:
        rng: of the draws.
        size: how many.
        before: (E+1,) steps before each episode, and all of them.
        weights: (E,) relative frequency of the steps of each episode; None: all alike.
        discount: relative frequency discount^t of step t of an episode, of all or of each (E,).
        among: (size,) twice, the first episode that each is drawn from, and the one after the last; None: from all.

    Returns:
        (size,) steps.
    """
    even = bool(np.all(discount == 1))
    if weights is None and even:
        if among is None:
            return rng.integers(before[-1], size=size)
        return np.asarray(rng.integers(before[among[0]], before[among[1]]))
    lengths = np.diff(before)
    share = np.concatenate([[0], np.cumsum(lengths if weights is None else lengths * weights)])
    low, high = (0, share[-1]) if among is None else (share[among[0]], share[among[1]])
    which = np.searchsorted(share, low + rng.random(size) * (high - low), side="right") - 1
    if among is not None:  # rounding may reach the episode behind the last one
        which = np.clip(which, among[0], among[1] - 1)
    if even:
        return np.asarray(rng.integers(before[which], before[which + 1]))
    of_episode, uniform = np.broadcast_to(discount, lengths.shape)[which], rng.random(size)
    rate = np.log(np.where(of_episode < 1, of_episode, 0.5))  # any below 0 where it isn't used
    mass = -np.expm1(lengths[which] * rate)  # 1 - discount^length
    step = np.where(of_episode < 1, np.log1p(-mass * uniform) / rate, lengths[which] * uniform)
    return np.asarray(before[which] + np.minimum(step.astype(np.int64), lengths[which] - 1))


def part_weights(store: Store, steps: Steps, episodes: np.ndarray, shares: Sequence[float]) -> np.ndarray | None:
    """Relative frequency (E,) of the steps of each episode in a draw; None: equal.

    Args:
        store, steps: of the log.
        episodes: the chosen ones.
        shares: of the parts of a mixture in a batch, whatever their sizes.

    Raises:
        ValueError: a part has no chosen episode.
    """
    parts = [*zip(store.parts.values(), shares, strict=True)]
    if len(parts) == 1:
        return None
    weights = np.zeros(len(store.lengths))
    for part, share in parts:
        chosen = np.intersect1d(part, episodes)
        total = (steps.end - steps.first)[chosen].sum()
        if not total:
            expected = "expected episodes of at least so many steps in every part of the mixture"
            raise ValueError(f"model.return_horizon: {expected}")
        weights[part] = share / total
    return weights


def select(
    store: Store, *, fraction: float = 1.0, min_return_quantile: float = 0.0, held_out: float = 0.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the episodes to train on and those held out, of each part of a mixture as if it were alone; no group is in both.

    Args:
        store: of the log.
        fraction: data volume, the share of the groups not held out that is kept.
        min_return_quantile: of those, drop episodes whose return is below this quantile; the best are always kept.
        held_out: share of the groups never trained on.
        seed: of the choice of groups.

    Returns:
        Two sorted (E,) int arrays.

    Raises:
        ValueError: a share is not within 0 .. 1, `fraction` is 0, or no group is left to train on.
    """
    for name, value in {"fraction": fraction, "min_return_quantile": min_return_quantile, "held_out": held_out}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"data.{name}: expected a share within 0 .. 1, got {value}")
    if not fraction:
        raise ValueError(f"data.fraction: expected more than 0, got {fraction}")
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for episodes in store.parts.values():
        group = store.group[episodes]
        groups = np.unique(group)
        groups = groups[np.random.default_rng(seed).permutation(len(groups))]
        count = round(held_out * len(groups))
        wanted = max(round(fraction * (len(groups) - count)), 1)
        chosen = episodes[np.isin(group, groups[count : count + wanted])]
        if not len(chosen):
            raise ValueError(f"data.held_out={held_out} leaves no group of {len(groups)} to train on")
        returns = store.returns[chosen]
        best = chosen[returns >= np.quantile(returns, min_return_quantile)]
        found.append((best, episodes[np.isin(group, groups[:count])]))
    train, out_of_it = (np.concatenate(each) for each in zip(*found, strict=True))
    return train, out_of_it
