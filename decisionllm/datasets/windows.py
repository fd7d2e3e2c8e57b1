"""Episodes -> windows of up to T steps, padded on the right -> batches. Training, evaluation and the server all slice here."""

from dataclasses import dataclass

import numpy as np
import torch

from decisionllm.schema import OPTIONAL_STEP_FIELDS, Batch, StepColumns, Window


def returns_to_go(rewards, total, offsets):
    """What is still to come at each step: the total less what came before it. (n,), (E,) -> (n,) float64

    In a log the total is the episode's own return, so that this is the sum that follows, the present reward included:
    [1, 2, 3] with total 6 -> [6, 5, 3]. In a rollout it is the return that was asked for, and the same rule counts down.
    `rewards` holds episodes end to end, of rows offsets[e]:offsets[e + 1], and `total` has one entry an episode.
    """
    before = np.concatenate([[0.0], np.cumsum(rewards, dtype=np.float64)])
    start = before[offsets[:-1]]
    return np.repeat(np.asarray(total, np.float64) + start, np.diff(offsets)) - before[:-1]


@dataclass(frozen=True)
class Steps(StepColumns[np.ndarray]):
    """Episodes end to end, as the slicer reads them. A log's are views of files; a rollout's end with the step that is now."""

    returns_to_go: np.ndarray  # (n,)
    first: np.ndarray  # (E,) row of each episode's first step
    end: np.ndarray  # (E,) row after its last


def of_store(store, *, return_horizon=0):
    """The steps of a log. ahead: count only the rewards of so many next steps; 0 counts to the end of the episode.

    A truncated episode does not show what its last steps would have brought, so these are left out if `ahead` is set.
    """
    togo = returns_to_go(store.rewards, store.returns, store.offsets)
    first, end = store.offsets[:-1], store.offsets[1:]
    if return_horizon:
        last = np.repeat(end, store.lengths)
        later = np.minimum(np.arange(len(togo)) + return_horizon, last)
        togo = togo - np.where(later < last, togo[np.minimum(later, len(togo) - 1)], 0)
        end = np.where(store.terminated, end, np.maximum(end - return_horizon + 1, first))
    optional = {name: vars(store)[name] for name in OPTIONAL_STEP_FIELDS}
    return Steps(store.observations, store.actions, togo.astype(np.float32), first, end, **optional)


def rollout_returns_to_go(rewards, target_returns, offsets, *, return_horizon=0):
    """The return that a policy is asked for at each step of a rollout: the return-to-go of the target, or, where returns count
    only `ahead` steps, the target itself, since as much is to come in the next steps as in the last. (n,), (E,) -> (n,)"""
    if return_horizon:
        return np.repeat(np.asarray(target_returns, np.float64), np.diff(offsets))
    return returns_to_go(rewards, target_returns, offsets)


def of_histories(histories, target_returns, *, return_horizon=0):
    """The steps of N histories; the action that is still to be chosen is a zero, which no prediction can see."""
    sizes = np.array([len(h.observations) for h in histories])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    zero = np.zeros((1, histories[0].actions.shape[1]), np.float32)
    rewards = np.concatenate([part for h in histories for part in (h.rewards, [0.0])])
    masks = None
    if C := next((h.action_masks.shape[1] for h in histories if h.action_masks is not None), 0):
        allowed = lambda h: np.ones((len(h.observations), C), bool) if h.action_masks is None else h.action_masks  # noqa: E731
        masks = np.concatenate([allowed(h) for h in histories])
    return Steps(
        np.concatenate([h.observations for h in histories]).astype(np.float32),
        np.concatenate([part for h in histories for part in (h.actions, zero)]).astype(np.float32),
        rollout_returns_to_go(rewards, target_returns, offsets, return_horizon=return_horizon).astype(np.float32), offsets[:-1], offsets[1:], action_masks=masks,
    )  # fmt: skip


def cut(steps, episodes, starts, T):
    """Windows of T steps that begin at these steps of these episodes and end with them at the latest. (B,), (B,) -> Window

    A window may begin before its episode, which is then padded on the left too.
    """
    first, end = steps.first[episodes], steps.end[episodes]
    rows = (first + starts)[:, None] + np.arange(T)
    mask = (rows < end[:, None]) & (rows >= first[:, None])
    rows = np.clip(rows, first[:, None], end[:, None] - 1)
    real = mask[..., None]
    optional = {name: column.take(rows, 0) for name in OPTIONAL_STEP_FIELDS if (column := vars(steps)[name]) is not None}
    for name, values in optional.items():  # padding is zero; every action is allowed there
        optional[name] = values | ~real if name == "action_masks" else values * mask
    return Window(
        observations=steps.observations.take(rows, 0) * real,  # take: three times faster than an index
        actions=steps.actions.take(rows, 0) * real,
        returns_to_go=steps.returns_to_go.take(rows) * mask,
        timesteps=(rows - first[:, None]) * mask,
        mask=mask,
        episodes=episodes,
        **optional,
    )


def collate(window, texts, index):
    """A Window and the texts of its rows -> a Batch. texts: ids and mask of all texts (U, L); index: (B,) each row's."""
    ids, mask = texts
    if len(ids) > 1:  # only those that are used
        used, index = np.unique(index, return_inverse=True)
        ids, mask = ids[used], mask[used]
    length = int(mask.sum(1).max()) if mask.numel() else 0
    tensor = torch.from_numpy
    optional = {name: tensor(x) for name in OPTIONAL_STEP_FIELDS if (x := vars(window)[name]) is not None}
    return Batch(
        tensor(window.observations), tensor(window.actions), tensor(window.returns_to_go), tensor(window.timesteps),
        tensor(window.mask), ids[:, :length], mask[:, :length], tensor(index),
        team=None if window.team is None else tensor(np.unique(window.team, return_inverse=True)[1]),
        identity=None if window.identity is None else tensor(window.identity), **optional,
    )  # fmt: skip


def window_start(now, T, stride):
    """The step where the window of a decision at step `now` begins, for windows of T steps: (N,) int -> (N,) int

    The window grows to T steps and then lets the oldest `stride` go at once, so that cached keys and values stay valid
    in between. Every window is one that training has seen: its length is within T - stride + 1 .. T once the episode is
    longer. stride = 1 is the plain sliding window.
    """
    over = np.maximum(np.asarray(now) + 1 - T, 0)
    return -(-over // stride) * stride


class Sampler:
    """Training windows, drawn as a pure function of (seed, step): uniformly over every step of the chosen episodes, or more often
    from those with more weight (E,), of all episodes of the log.

    A window that begins near the end of its episode is short, as it is at the beginning of a rollout.
    """

    def __init__(self, steps, episodes, *, T, batch_size, seed, weights=None):
        self.steps, self.T, self.batch_size, self.seed = steps, T, batch_size, seed
        self.episodes = np.sort(np.asarray(episodes))
        lengths = (steps.end - steps.first)[self.episodes]
        self.before = np.concatenate([[0], np.cumsum(lengths)])
        self.weights = None if weights is None else weights[self.episodes]

    def __call__(self, step):
        return self.at(draw(np.random.default_rng((self.seed, step)), self.batch_size, self.before, self.weights))

    def at(self, drawn):
        """The windows that begin at these steps, counted over the chosen episodes alone. (B,) int -> Window"""
        which = np.searchsorted(self.before, drawn, side="right") - 1
        return cut(self.steps, self.episodes[which], drawn - self.before[which], self.T)


def draw(rng, size, before, weights=None):
    """Steps of episodes that hold before[e]:before[e + 1], all alike or by the weights of their episodes (E,): (size,) int"""
    if weights is None:
        return rng.integers(before[-1], size=size)
    share = np.cumsum(np.diff(before) * weights)
    which = np.searchsorted(share, rng.random(size) * share[-1], side="right")
    return rng.integers(before[which], before[which + 1])


def return_weights(returns, temperature):
    """How often to draw episodes of these returns: exp(return / temperature), of returns between 0, the least, and 1, the best.
    (E,) -> (E,), at most 1. Source: Hong et al., Harnessing Mixed Offline RL Datasets via Trajectory Weighting, ICLR 2023."""
    returns = np.asarray(returns, np.float64)
    return np.exp((returns - returns.max()) / (temperature * (np.ptp(returns) or 1.0)))


def select(store, *, fraction=1.0, min_return_quantile=0.0, held_out=0.0, seed=0):
    """The episodes to train on and those held out: two sorted (E,) int arrays; no group is in both.

    held_out: share of the groups never trained on. fraction: data volume, the share of the other groups that is kept.
    min_return_quantile: of those, drop episodes whose return is below this quantile; the best are always kept.
    """
    for name, value in {"fraction": fraction, "min_return_quantile": min_return_quantile, "held_out": held_out}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a share within 0 .. 1, got {value}")
    groups = np.unique(store.group)
    groups = groups[np.random.default_rng(seed).permutation(len(groups))]
    out = round(held_out * len(groups))
    kept = groups[out : out + max(round(fraction * (len(groups) - out)), 1)]
    chosen = np.flatnonzero(np.isin(store.group, kept))
    if not len(chosen):
        raise ValueError(f"data.held_out={held_out} leaves no group of {len(groups)} to train on")
    returns = store.returns[chosen]
    return chosen[returns >= np.quantile(returns, min_return_quantile)], np.flatnonzero(np.isin(store.group, groups[:out]))
