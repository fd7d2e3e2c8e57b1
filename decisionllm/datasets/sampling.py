"""The choice of episodes, and samplers of windows, which are pure functions of (seed, step)."""

from collections.abc import Sequence
from typing import Required, TypedDict, Unpack

import numpy as np

from decisionllm import checks
from decisionllm.datasets.draws import Draw, of_step
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import Steps, cut
from decisionllm.schema import Window


class SamplerOptions(TypedDict, total=False):
    """The options that samplers of all kinds have, see `Sampler`."""

    T: Required[int]
    batch_size: Required[int]
    seed: Required[int]
    weights: np.ndarray | None
    discount: float | np.ndarray


class Sampler:
    """Training windows, a pure function of (seed, step), that begin at any step of the chosen
    episodes.

    A window that begins near the end of its episode is short, as at the beginning of a rollout.

    Args:
        steps: of all episodes of the log.
        episodes: the chosen ones.
        T: window length, steps.
        batch_size: B.
        seed: of the draws.
        weights: (E,) relative frequency of the steps of each episode of the log; None: equal.
        discount: a window begins at step t of its episode with relative frequency discount^t; of
            all, or (E,) of each episode of the log.
    """

    # the texts that `Window.text_index` counts; None: those of the log
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
        self.episodes = self.arranged(np.asarray(episodes))
        self.discount = discount[self.episodes] if isinstance(discount, np.ndarray) else discount
        lengths = (steps.end - steps.first)[self.episodes]
        self.before = np.concatenate([[0], np.cumsum(lengths)])
        self.weights = None if weights is None else weights[self.episodes]
        # The episodes of every `pitch`-th step, about four of them in an episode, are looked up
        # once: see `find`.
        self.pitch = max(self.before[-1] // (4 * len(lengths)), 1)
        looked_up = np.arange(0, self.before[-1], self.pitch)
        self.nearest = np.searchsorted(self.before, looked_up, side="right") - 1

    def arranged(self, episodes: np.ndarray) -> np.ndarray:
        """These episodes in the order in which their steps are counted."""
        return np.sort(episodes)

    def __call__(self, step: int) -> Window:
        return self.at(self.draw(of_step(self.seed, step, Draw.ROWS)))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """The first steps of the windows of a batch (B,), counted as in `at`."""
        return draw(rng, self.batch_size, self.before, self.weights, self.discount)

    def at(self, drawn: np.ndarray) -> Window:
        """The windows that begin at these steps (B,), counted over the chosen episodes alone."""
        return cut(self.steps, *self.find(drawn), self.T)

    def find(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The episodes of these steps (B,), counted over the chosen episodes alone, and the steps
        within them (B,).
        """
        episode = self.nearest[drawn // self.pitch]
        while (behind := drawn >= self.before[episode + 1]).any():  # a few times
            episode = episode + behind
        return self.episodes[episode], drawn - self.before[episode]


class TextSampler(Sampler):
    """A `Sampler` of windows of which several share a task, so that few texts are read for many
    windows.

    Row i of a batch has the task of row i % texts. The tasks of a batch are drawn as those of a
    `Sampler` are, and so is each row among the steps of its task: any one row is drawn as a
    `Sampler` draws it.

    Args:
        steps: of all episodes of the log.
        episodes: the chosen ones.
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
        chosen = task[self.episodes]
        changes = np.flatnonzero(np.diff(chosen)) + 1
        # the first and the end of each task among the chosen episodes
        self.first = np.concatenate([[0], changes])
        self.end = np.concatenate([changes, [len(chosen)]])

    def arranged(self, episodes: np.ndarray) -> np.ndarray:
        """By task, so that the steps of a task are neighbours."""
        episodes = super().arranged(episodes)
        return np.asarray(episodes[np.argsort(self.task[episodes], kind="stable")])

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        steps = draw(rng, self.texts, self.before, self.weights, self.discount)
        episode = np.searchsorted(self.before, steps, side="right") - 1
        drawn_tasks = np.searchsorted(self.first, episode, side="right") - 1  # (texts,)
        task = drawn_tasks[np.arange(self.batch_size) % self.texts]  # (B,)
        among = self.first[task], self.end[task]
        return draw(rng, self.batch_size, self.before, self.weights, self.discount, among)


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
        among: (size,) twice, the first episode that each is drawn from, and the one after the last;
            None: from all.

    Returns:
        (size,) steps.
    """
    even = bool(np.all(discount == 1))
    if weights is None and even:
        if among is None:
            return rng.integers(before[-1], size=size)
        return np.asarray(rng.integers(before[among[0]], before[among[1]]))
    episode = draw_episodes(rng, size, before, weights, among)
    if even:
        return np.asarray(rng.integers(before[episode], before[episode + 1]))
    lengths = np.diff(before)
    of_episode = np.broadcast_to(discount, lengths.shape)[episode]
    step = draw_early_steps(rng, lengths[episode], of_episode)
    return np.asarray(before[episode] + step)


def draw_episodes(
    rng: np.random.Generator,
    size: int,
    before: np.ndarray,
    weights: np.ndarray | None,
    among: tuple[np.ndarray, np.ndarray] | None,
) -> np.ndarray:
    """Draw episodes (size,), each as often as it has steps, times its weight.

    Arguments: see `draw`.
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
    is_used = discount < 1
    rate = np.log(np.where(is_used, discount, 0.5))  # any number below 0 where it isn't used
    mass = -np.expm1(lengths * rate)  # 1 - discount^length
    step = np.where(is_used, np.log1p(-mass * uniform) / rate, lengths * uniform)
    return np.asarray(np.minimum(step.astype(np.int64), lengths - 1))


def part_weights(
    store: Store, steps: Steps, episodes: np.ndarray, shares: Sequence[float]
) -> np.ndarray | None:
    """Relative frequency (E,) of the steps of each episode in a draw; None: equal.

    Args:
        store, steps: of the log.
        episodes: the chosen ones, some of each part.
        shares: of the parts of a mixture in a batch, whatever their sizes.
    """
    if len(store.parts) == 1:
        return None
    weights = np.zeros(len(store.lengths))
    for part, share in zip(store.parts.values(), shares, strict=True):
        chosen = np.intersect1d(part, episodes)
        weights[part] = share / (steps.end - steps.first)[chosen].sum()
    return weights


def select(
    store: Store,
    *,
    fraction: float = 1.0,
    min_return_quantile: float = 0.0,
    held_out: float = 0.0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the episodes to train on and those held out, of each part of a mixture as if it were
    alone; no group is in both.

    Args:
        store: of the log.
        fraction: data volume, the share of the groups not held out that is kept.
        min_return_quantile: of those, drop episodes whose return is below this quantile; the best
            are always kept.
        held_out: share of the groups never trained on.
        seed: of the choice of groups.

    Returns:
        Two sorted (E,) int arrays.

    Raises:
        ValueError: a share is not within 0 .. 1, `fraction` is 0, or no group is left to train on.
    """
    checks.share("data.fraction", fraction)
    checks.share("data.min_return_quantile", min_return_quantile)
    checks.share("data.held_out", held_out)
    checks.more_than_0("data.fraction", fraction)
    trained_on = []
    out_of_it = []
    for episodes in store.parts.values():
        group = store.group[episodes]
        groups = np.unique(group)
        groups = groups[np.random.default_rng(seed).permutation(len(groups))]
        count = round(held_out * len(groups))
        wanted = max(round(fraction * (len(groups) - count)), 1)
        chosen = episodes[np.isin(group, groups[count : count + wanted])]
        if not len(chosen):
            raise ValueError(
                f"data.held_out={held_out} leaves no group of {len(groups)} to train on"
            )
        returns = store.returns[chosen]
        trained_on.append(chosen[returns >= np.quantile(returns, min_return_quantile)])
        out_of_it.append(episodes[np.isin(group, groups[:count])])
    return np.concatenate(trained_on), np.concatenate(out_of_it)
