"""Corruptions of a log, to measure the cost of a worse one: `transform=unlabelled` removes actions,
`transform=corrupted` changes a column.

Random: an observation or an action moves by up to `scale` standard deviations of the log in each
number, a discrete action is any allowed one, a reward is any within 30 deviations. Adversarial:
each number of an observation or an action moves by `scale` deviations to where a linear model of
the return-to-go predicts less, a discrete action is the allowed one of the least prediction, a
reward changes its sign and is multiplied by `scale`. A corrupted observation is also the next
observation of the step before, so that a corruption of observations is one of dynamics too.

Source: the protocol of RIQL (Yang et al., ICLR 2024, arXiv 2310.12955), whose adversary is a
trained critic.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from decisionllm import checks
from decisionllm.datasets import running_statistics
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import BLOCK, load_steps
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json
from decisionllm.tokenizers.entities import entity_blocks

# The second part of a seed, which no draw of held-out groups or of an episode has.
LABELS = 1 << 40
REWARD_RANGE = 30  # standard deviations of random rewards, for scale=1


def remove_actions(clean: Store, *, actions_kept: float = 0.1, seed: int = 0) -> Source:
    """Remove the actions of some episodes.

    Args:
        clean: the log.
        actions_kept: share of the episodes, drawn at random, whose actions are kept.
        seed: of the draw.

    Raises:
        ValueError: a share that cannot be, or that keeps the actions of no episode.
    """
    E = len(clean.lengths)
    checks.check_share("transform.actions_kept", actions_kept)
    num_labelled = round(actions_kept * E)
    if not num_labelled:
        raise ValueError(
            f"transform.actions_kept={actions_kept} of {E} episodes keeps the actions of none; give "
            "a larger share"
        )
    labelled = np.random.default_rng((seed, LABELS)).permutation(E)[:num_labelled]
    is_labelled = np.isin(np.arange(E), labelled)

    def episodes() -> Iterator[Episode]:
        for e in range(E):
            episode = clean.episode(e)
            if is_labelled[e]:
                yield episode
            else:
                yield replace(episode, action_weight=np.zeros(len(episode.rewards), np.float32))

    info = clean.info | {"actions_kept": actions_kept, "seed_of_changes": seed}
    return Source(clean.spec, episodes(), info, dict(clean.facts))


def corrupt_column(
    clean: Store,
    *,
    column: str = "rewards",
    share: float = 0.3,
    kind: str = "random",
    scale: float = 1.0,
    seed: int = 0,
) -> Source:
    """Corrupt a column of some steps, see above.

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
    checks.check_one_of("transform.column", column, ("observations", "actions", "rewards"))
    checks.check_one_of("transform.kind", kind, ("random", "adversarial"))
    if not (0 <= share <= 1 and scale > 0):
        raise ValueError(
            f"transform.share, transform.scale: expected within 0 .. 1 and above 0, got {share} "
            f"and {scale}"
        )

    def episodes() -> Iterator[Episode]:
        corruption = Corruption(clean, column, kind, scale)
        for e in range(len(clean.lengths)):
            episode = clean.episode(e)
            rng = np.random.default_rng((seed, e))
            is_hit = rng.random(len(episode.rewards)) < share
            changes: Json = {column: corruption(episode, rng, is_hit)}
            yield replace(episode, **changes)

    summary = f"{column} of {100 * share:g} % of the steps, {kind}, scale {scale:g}"
    info = clean.info | {"corrupted": summary, "seed_of_changes": seed}
    if column == "rewards":
        info.pop("campaigns", None)  # of an auction, with their returns
    return Source(clean.spec, episodes(), info, dict(clean.facts))


class Corruption:
    """Corrupts a column of an episode, in units of the standard deviations of a log, see above."""

    def __init__(self, clean: Store, column: str, kind: str, scale: float) -> None:
        self.spec = clean.spec
        self.column = column
        self.is_adversarial = kind == "adversarial"
        self.scale = scale
        self.deviation, self.slope = self._fit(clean)
        # The flag of an entity, which is 1 where it is present, is never moved.
        for block in entity_blocks(self.spec.entity_schema):
            if block.has_flag:
                self.deviation[block.columns][:: block.width] = 0
        self.reward_deviation = float(np.std(clean.rewards, dtype=np.float64))

    def _concatenate(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Return observations and actions, discrete ones as one-hot vectors: (n, S + A)."""
        C = self.spec.num_actions
        action_numbers = np.eye(C)[actions[:, 0].astype(int)] if C else actions
        return np.concatenate([observations, action_numbers], 1, dtype=np.float64)

    def _fit(self, clean: Store) -> tuple[np.ndarray, np.ndarray]:
        """Fit a linear model of the return-to-go to the standardised numbers, by least squares.

        Returns:
            (S + A,) deviations of the numbers, and (S + A,) slopes.
        """
        togo = load_steps(clean).returns_to_go
        size = max(BLOCK // (clean.spec.observation_dim + clean.spec.action_dim), 1)

        def blocks() -> Iterator[np.ndarray]:
            for start in range(0, len(togo), size):
                rows = slice(start, start + size)
                numbers = self._concatenate(clean.observations[rows], clean.actions[rows])
                yield np.column_stack([numbers, togo[rows]])

        mean, covariance = running_statistics.mean_and_covariance(blocks())
        deviation = np.sqrt(np.diag(covariance).clip(min=0))
        # a constant number has no slope
        unit = np.where(running_statistics.is_varying(mean, deviation), deviation, np.inf)
        correlation = covariance / np.outer(unit, unit)
        slope = np.linalg.lstsq(correlation[:-1, :-1], correlation[:-1, -1], rcond=1e-6)[0]
        return deviation[:-1], slope

    def __call__(
        self, episode: Episode, rng: np.random.Generator, is_hit: np.ndarray
    ) -> np.ndarray:
        """Return the column of an episode, corrupted at the steps `is_hit` (n,) bool."""
        column: np.ndarray = vars(episode)[self.column]
        if self.column == "rewards":
            corrupted = self._corrupt_rewards(column, rng)
        elif self.column == "actions" and self.spec.num_actions:
            corrupted = self._corrupt_discrete_actions(episode, rng)
        else:
            corrupted = self._move_numbers(column, rng)
        is_hit = is_hit.reshape(-1, *[1] * (column.ndim - 1))
        return np.where(is_hit, corrupted, column).astype(np.float32)

    def _corrupt_rewards(self, rewards: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return rewards (n,) of the opposite sign, or anywhere within the range of the log."""
        if self.is_adversarial:
            return -self.scale * rewards
        span = REWARD_RANGE * self.scale * self.reward_deviation
        return rng.uniform(-span, span, len(rewards))

    def _corrupt_discrete_actions(self, episode: Episode, rng: np.random.Generator) -> np.ndarray:
        """Return allowed actions (n, 1): those that lower the reward most, or any."""
        n = len(episode.rewards)
        S = self.spec.observation_dim
        if self.is_adversarial:
            preference = np.tile(-self.slope[S:] / self.deviation[S:].clip(min=1e-9), (n, 1))
        else:
            preference = rng.random((n, self.spec.num_actions))
        allowed = True if episode.action_masks is None else episode.action_masks
        actions: np.ndarray = np.where(allowed, preference, -np.inf).argmax(1)
        return actions[:, None]

    def _move_numbers(self, column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Move observations or continuous actions to where the reward is lower, or anywhere."""
        S = self.spec.observation_dim
        are_observations = self.column == "observations"
        numbers = slice(S) if are_observations else slice(S, None)
        if self.is_adversarial:
            direction = -np.sign(self.slope[numbers])
        else:
            direction = rng.uniform(-1, 1, column.shape)
        moved: np.ndarray = column + self.scale * direction * self.deviation[numbers]
        if not are_observations:
            moved = np.clip(moved, self.spec.low, self.spec.high)
        return moved


READER = DatasetReader(version=5)
