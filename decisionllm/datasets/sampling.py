"""The split of episodes into training and held-out ones, and samplers of windows."""

from collections.abc import Sequence
from typing import Required, TypedDict, Unpack

import numpy as np

from decisionllm import checks
from decisionllm.datasets.rng import Stream, make_step_rng
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import Steps, cut_windows
from decisionllm.schema import Window


class SamplerOptions(TypedDict, total=False):
    """The options of all samplers, see `Sampler`."""

    T: Required[int]
    batch_size: Required[int]
    seed: Required[int]
    weights: np.ndarray | None
    discount: float | np.ndarray


class Sampler:
    """Samples windows that begin at any step of some episodes, a pure function of (seed, step).

    A window that begins near the end of its episode is short, as at the beginning of a rollout.

    Args:
        steps: of all episodes of the log.
        episodes: those that windows are drawn from.
        T: window length, steps.
        batch_size: B.
        seed: of the draws.
        weights: (E,) relative frequency of the steps of each episode of the log; None: equal.
        discount: a window begins at step t of its episode with relative frequency discount^t; one
            number, or (E,) of each episode of the log.
    """

    # the texts that `Window.text_index` refers to; None: those of the log
    tasks: Sequence[str] | None = None

    def __init__(
        self,
        steps: Steps,
        episodes: np.ndarray,
        *,
        T: int,
        batch_size: int,
        seed: int,
        weights: np.ndarray | None = None,
        discount: float | np.ndarray = 1.0,
    ) -> None:
        self.steps = steps
        self.T = T
        self.batch_size = batch_size
        self.seed = seed
        self.texts = batch_size  # distinct texts in a batch, at most
        self.episodes = self.sort_episodes(np.asarray(episodes))
        self.discount = discount[self.episodes] if isinstance(discount, np.ndarray) else discount
        lengths = (steps.end - steps.first)[self.episodes]
        self.before = np.concatenate([[0], np.cumsum(lengths)])
        self.weights = None if weights is None else weights[self.episodes]
        # The episodes of every `pitch`-th step, about four of them in an episode, are looked up
        # once: see `locate`.
        self.pitch = max(self.before[-1] // (4 * len(lengths)), 1)
        looked_up = np.arange(0, self.before[-1], self.pitch)
        self.nearest = np.searchsorted(self.before, looked_up, side="right") - 1

    def sort_episodes(self, episodes: np.ndarray) -> np.ndarray:
        """Return the episodes in the order in which their steps are counted."""
        return np.sort(episodes)

    def __call__(self, step: int) -> Window:
        return self.cut_windows(self.draw(make_step_rng(self.seed, step, Stream.ROWS)))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw the first steps of the windows of a batch (B,), counted over `episodes` alone."""
        return draw_steps(rng, self.batch_size, self.before, self.weights, self.discount)

    def cut_windows(self, starts: np.ndarray) -> Window:
        """Return the windows that begin at these steps (B,), counted over `episodes` alone."""
        return cut_windows(self.steps, *self.locate(starts), self.T)

    def locate(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the episodes (B,) of these steps (B,), counted over `episodes` alone, and the steps
        within them (B,).
        """
        episode = self.nearest[starts // self.pitch]
        while (is_behind := starts >= self.before[episode + 1]).any():  # a few times
            episode = episode + is_behind
        return self.episodes[episode], starts - self.before[episode]


class TextSampler(Sampler):
    """Samples windows of which several share a task, so that few texts are read for many windows.

    Row i of a batch has the task of row i % texts. The tasks of a batch are drawn as those of a
    `Sampler` are, and so is each row among the steps of its task: any one row is drawn as a
    `Sampler` draws it.

    Args:
        steps: of all episodes of the log.
        episodes: those that windows are drawn from.
        task: (E,) of each episode of the log.
        rows_per_text: windows of a batch that share a task.
        options: of a `Sampler`.
    """

    def __init__(
        self,
        steps: Steps,
        episodes: np.ndarray,
        *,
        task: np.ndarray,
        rows_per_text: int,
        **options: Unpack[SamplerOptions],
    ) -> None:
        self.task = task
        super().__init__(steps, episodes, **options)
        self.texts = -(-self.batch_size // rows_per_text)
        sorted_tasks = task[self.episodes]
        changes = np.flatnonzero(np.diff(sorted_tasks)) + 1
        # the first episode of each task, and the one behind its last
        self.first = np.concatenate([[0], changes])
        self.end = np.concatenate([changes, [len(sorted_tasks)]])

    def sort_episodes(self, episodes: np.ndarray) -> np.ndarray:
        """Sort by task, so that the steps of a task are neighbours."""
        episodes = super().sort_episodes(episodes)
        return np.asarray(episodes[np.argsort(self.task[episodes], kind="stable")])

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        steps = draw_steps(rng, self.texts, self.before, self.weights, self.discount)
        episode = np.searchsorted(self.before, steps, side="right") - 1
        drawn_tasks = np.searchsorted(self.first, episode, side="right") - 1  # (texts,)
        task = drawn_tasks[np.arange(self.batch_size) % self.texts]  # (B,)
        among = self.first[task], self.end[task]
        return draw_steps(rng, self.batch_size, self.before, self.weights, self.discount, among)


def draw_steps(
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
        size: number of draws.
        before: (E+1,) steps before each episode, and all of them.
        weights: (E,) relative frequency of the steps of each episode; None: equal.
        discount: relative frequency discount^t of step t of an episode; one number, or (E,).
        among: (size,) twice, the first episode that each is drawn from, and the one after the last;
            None: from all.

    Returns:
        (size,) steps.
    """
    is_uniform = bool(np.all(discount == 1))
    if weights is None and is_uniform:
        if among is None:
            return rng.integers(before[-1], size=size)
        return np.asarray(rng.integers(before[among[0]], before[among[1]]))
    episode = draw_episodes(rng, size, before, weights, among)
    if is_uniform:
        return np.asarray(rng.integers(before[episode], before[episode + 1]))
    lengths = np.diff(before)
    episode_discount = np.broadcast_to(discount, lengths.shape)[episode]
    step = draw_early_steps(rng, lengths[episode], episode_discount)
    return np.asarray(before[episode] + step)


def draw_episodes(
    rng: np.random.Generator,
    size: int,
    before: np.ndarray,
    weights: np.ndarray | None,
    among: tuple[np.ndarray, np.ndarray] | None,
) -> np.ndarray:
    """Draw episodes (size,), each as often as it has steps, times its weight.

    Arguments: see `draw_steps`.
    """
    mass = np.diff(before)
    if weights is not None:
        mass = mass * weights
    share = np.concatenate([[0], np.cumsum(mass)])
    if among is None:
        uniform = rng.random(size) * share[-1]
        return np.asarray(np.searchsorted(share, uniform, side="right") - 1)
    first, end = among
    uniform = share[first] + rng.random(size) * (share[end] - share[first])
    episode = np.searchsorted(share, uniform, side="right") - 1
    # rounding may reach the episode behind the last one
    return np.asarray(np.clip(episode, first, end - 1))


def draw_early_steps(
    rng: np.random.Generator, lengths: np.ndarray, discount: np.ndarray
) -> np.ndarray:
    """Draw steps of episodes of these lengths (m,), step t with relative frequency discount^t:
    (m,).

    It inverts the cumulative mass (1 - discount^t) / (1 - discount^length) at a uniform number.
    """
    uniform = rng.random(len(lengths))
    is_discounted = discount < 1
    rate = np.log(np.where(is_discounted, discount, 0.5))  # any number below 0 elsewhere
    mass = -np.expm1(lengths * rate)  # 1 - discount^length
    step = np.where(is_discounted, np.log1p(-mass * uniform) / rate, lengths * uniform)
    return np.asarray(np.minimum(step.astype(np.int64), lengths - 1))


def part_weights(
    store: Store, steps: Steps, episodes: np.ndarray, shares: Sequence[float]
) -> np.ndarray | None:
    """Return the relative frequency (E,) of the steps of each episode in a draw; None: equal.

    Args:
        store, steps: of the log.
        episodes: those that are drawn from, some of each part.
        shares: of the parts of a mixture in a batch, whatever their sizes.
    """
    if len(store.parts) == 1:
        return None
    weights = np.zeros(len(store.lengths))
    for part, share in zip(store.parts.values(), shares, strict=True):
        drawn_from = np.intersect1d(part, episodes)
        weights[part] = share / (steps.end - steps.first)[drawn_from].sum()
    return weights


def select(
    store: Store,
    *,
    fraction: float = 1.0,
    min_return_quantile: float = 0.0,
    held_out: float = 0.0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Split the episodes into training and held-out ones, in each part of a mixture as if it were
    alone; no group is in both.

    Args:
        store: of the log.
        fraction: share of the groups not held out that is used.
        min_return_quantile: of these, episodes whose return is below this quantile are dropped; the
            best ones never are.
        held_out: share of the groups never trained on.
        seed: of the choice of groups.

    Returns:
        Two sorted (E,) int arrays.

    Raises:
        ValueError: a share is not within 0 .. 1, `fraction` is 0, or no group is left to train on.
    """
    checks.check_share("data.fraction", fraction)
    checks.check_share("data.min_return_quantile", min_return_quantile)
    checks.check_share("data.held_out", held_out)
    checks.check_positive("data.fraction", fraction)
    training = []
    validation = []
    for episodes in store.parts.values():
        group = store.group[episodes]
        groups = np.unique(group)
        groups = groups[np.random.default_rng(seed).permutation(len(groups))]
        num_held_out = round(held_out * len(groups))
        num_trained = max(round(fraction * (len(groups) - num_held_out)), 1)
        training_groups = groups[num_held_out : num_held_out + num_trained]
        selected = episodes[np.isin(group, training_groups)]
        if not len(selected):
            raise ValueError(
                f"data.held_out={held_out} leaves no group of {len(groups)} to train on"
            )
        returns = store.returns[selected]
        training.append(selected[returns >= np.quantile(returns, min_return_quantile)])
        validation.append(episodes[np.isin(group, groups[:num_held_out])])
    return np.concatenate(training), np.concatenate(validation)
