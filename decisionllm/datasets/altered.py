"""Transforms of a log, to measure what a worse one costs: `transform=unlabelled` leaves out
actions, `transform=corrupted` changes a column.

Random: an observation or an action moves by up to `scale` standard deviations of the log in each
number, a discrete action is any that is allowed, a reward is any within 30 deviations. Adversarial:
each number of an observation or an action moves by `scale` deviations to where a linear model of
the return-to-go predicts less, a discrete action is the allowed one of the least prediction, a
reward changes its sign and is multiplied by `scale`. A corrupted observation is also what follows
the step before: of a log of whole episodes, a corruption of observations is one of dynamics too.
Source: the protocol of RIQL (Yang et al., ICLR 2024, arXiv 2310.12955), whose adversary is a
trained critic.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from decisionllm import checks
from decisionllm.datasets import moments
from decisionllm.datasets.store import DatasetReader, Store
from decisionllm.datasets.windows import BLOCK, of_store
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Json
from decisionllm.tokenizers.entities import entity_blocks

# The draw of labelled episodes has its own random numbers: not those of held-out groups, nor those
# of one episode.
LABELS = 1 << 40
REWARD_RANGE = 30  # deviations of random rewards, for scale=1


@register("transform", "unlabelled", seed="${data.seed}")
def unlabelled(clean: Store, *, actions_kept: float = 0.1, seed: int = 0) -> Source:
    """Leave out the actions of some episodes.

    Args:
        clean: the log.
        actions_kept: share of the episodes, drawn at random, whose actions are kept.
        seed: of the draw.

    Raises:
        ValueError: a share that cannot be, or that keeps the actions of no episode.
    """
    E = len(clean.lengths)
    checks.share("transform.actions_kept", actions_kept)
    count = round(actions_kept * E)
    if not count:
        given = f"transform.actions_kept={actions_kept} of {E} episodes"
        raise ValueError(f"{given} keeps the actions of none; give a larger share")
    kept = np.random.default_rng((seed, LABELS)).permutation(E)[:count]
    labelled = np.isin(np.arange(E), kept)

    def episodes() -> Iterator[Episode]:
        for e in range(E):
            episode = clean.episode(e)
            if labelled[e]:
                yield episode
            else:
                yield replace(episode, action_weight=np.zeros(len(episode.rewards), np.float32))

    info = clean.info | {"actions_kept": actions_kept, "seed_of_changes": seed}
    return Source(clean.spec, episodes(), info, dict(clean.facts))


@register("transform", "corrupted", seed="${data.seed}")
def corrupted(
    clean: Store,
    *,
    column: str = "rewards",
    share: float = 0.3,
    kind: str = "random",
    scale: float = 1.0,
    seed: int = 0,
) -> Source:
    """Change a column of some steps, see above.

    Args:
        clean: the log.
        column: `observations`, `actions` or `rewards`.
        share: of the steps that are changed.
        kind: `random`, or `adversarial`: towards a low return.
        scale: of the change, in standard deviations of the log.
        seed: of the steps and of random changes.

    Raises:
        ValueError: an option cannot be.
    """
    checks.one_of("transform.column", column, ("observations", "actions", "rewards"))
    checks.one_of("transform.kind", kind, ("random", "adversarial"))
    if not (0 <= share <= 1 and scale > 0):
        raise ValueError(
            f"transform.share, transform.scale: expected within 0 .. 1 and above 0, got {share} "
            f"and {scale}"
        )

    def episodes() -> Iterator[Episode]:
        change = Corruption(clean, column, kind, scale)
        for e in range(len(clean.lengths)):
            episode = clean.episode(e)
            rng = np.random.default_rng((seed, e))
            hit = rng.random(len(episode.rewards)) < share
            changed: Json = {column: change(episode, rng, hit)}
            yield replace(episode, **changed)

    words = f"{column} of {100 * share:g} % of the steps, {kind}, scale {scale:g}"
    info = clean.info | {"corrupted": words, "seed_of_changes": seed}
    if column == "rewards":
        info.pop("campaigns", None)  # of an auction, with their returns
    return Source(clean.spec, episodes(), info, dict(clean.facts))


class Corruption:
    """Corrupts a column of an episode, in units of the deviations of a log, see above."""

    def __init__(self, clean: Store, corrupt: str, kind: str, scale: float) -> None:
        self.spec = clean.spec
        self.corrupt = corrupt
        self.adversarial = kind == "adversarial"
        self.scale = scale
        self.deviation, self.slope = self._fit(clean)
        # The number that says whether an entity is present is never moved.
        for block in entity_blocks(self.spec.entity_schema):
            if block.has_flag:
                self.deviation[block.columns][:: block.width] = 0
        self.reward_deviation = float(np.std(clean.rewards, dtype=np.float64))

    def _numbers(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """(n, S + A): an observation and an action, a discrete one as a one-hot vector."""
        C = self.spec.num_actions
        taken = np.eye(C)[actions[:, 0].astype(int)] if C else actions
        return np.concatenate([observations, taken], 1, dtype=np.float64)

    def _fit(self, clean: Store) -> tuple[np.ndarray, np.ndarray]:
        """Fit a linear model of the return-to-go to the standardised numbers, by least squares.

        Returns:
            (S + A,) deviations of the numbers, and (S + A,) slopes.
        """
        togo = of_store(clean).returns_to_go
        size = max(BLOCK // (clean.spec.observation_dim + clean.spec.action_dim), 1)

        def numbers() -> Iterator[np.ndarray]:
            for start in range(0, len(togo), size):
                rows = slice(start, start + size)
                taken = self._numbers(clean.observations[rows], clean.actions[rows])
                yield np.column_stack([taken, togo[rows]])

        mean, covariance = moments.covariance(numbers())
        deviation = np.sqrt(np.diag(covariance).clip(min=0))
        # a constant number has no slope
        unit = np.where(moments.varies(mean, deviation), deviation, np.inf)
        correlation = covariance / np.outer(unit, unit)
        slope = np.linalg.lstsq(correlation[:-1, :-1], correlation[:-1, -1], rcond=1e-6)[0]
        return deviation[:-1], slope

    def __call__(self, episode: Episode, rng: np.random.Generator, hit: np.ndarray) -> np.ndarray:
        """The column of an episode with the steps `hit` (n,) bool corrupted."""
        column: np.ndarray = vars(episode)[self.corrupt]
        if self.corrupt == "rewards":
            new = self._rewards(column, rng)
        elif self.corrupt == "actions" and self.spec.num_actions:
            new = self._discrete_actions(episode, rng)
        else:
            new = self._moved(column, rng)
        return np.where(hit.reshape(-1, *[1] * (column.ndim - 1)), new, column).astype(np.float32)

    def _rewards(self, column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n,) rewards of the opposite sign, or anywhere within the range of the log."""
        if self.adversarial:
            return -self.scale * column
        span = REWARD_RANGE * self.scale * self.reward_deviation
        return rng.uniform(-span, span, len(column))

    def _discrete_actions(self, episode: Episode, rng: np.random.Generator) -> np.ndarray:
        """(n, 1) allowed actions: those that lower the reward most, or any."""
        n = len(episode.rewards)
        S = self.spec.observation_dim
        if self.adversarial:
            preference = np.tile(-self.slope[S:] / self.deviation[S:].clip(min=1e-9), (n, 1))
        else:
            preference = rng.random((n, self.spec.num_actions))
        allowed = True if episode.action_masks is None else episode.action_masks
        chosen: np.ndarray = np.where(allowed, preference, -np.inf).argmax(1)
        return chosen[:, None]

    def _moved(self, column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Observations or continuous actions, moved to where the reward is lower, or anywhere."""
        S = self.spec.observation_dim
        of_observations = self.corrupt == "observations"
        part = slice(S) if of_observations else slice(S, None)
        worse = -np.sign(self.slope[part])
        by = worse if self.adversarial else rng.uniform(-1, 1, column.shape)
        new: np.ndarray = column + self.scale * by * self.deviation[part]
        if not of_observations:
            new = np.clip(new, self.spec.low, self.spec.high)
        return new


READER = DatasetReader(version=5)
