"""The quality of a log, in one reading: statistics for its card, and faults: repeated episodes,
constants, jumps, leaked futures.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from decisionllm.datasets import running_statistics
from decisionllm.datasets.running_statistics import RunningStatistics, mean_and_covariance
from decisionllm.datasets.store import Store, read_and_verify
from decisionllm.datasets.windows import BLOCK, returns_to_go
from decisionllm.schema import Json
from decisionllm.tokenizers.entities import entity_blocks

JUMP = 30  # a change is a jump beyond this multiple of the median change, zeros left out
# an observation leaks the future if a number of it correlates more with the return or the reward
LEAK = 1 - 1e-6
SAMPLE = 100_000  # changes that the medians are taken from, of whole episodes


@dataclass(frozen=True)
class Survey:
    """Statistics and faults of a log of observations (n, S)."""

    mean: np.ndarray  # (S,) of the observations
    deviation: np.ndarray  # (S,)
    actions: RunningStatistics  # recorded ones alone
    counts: np.ndarray  # (C,) of each discrete action
    at_bound: int  # numbers of continuous actions
    faults: list[str]  # one sentence each


def survey_log(store: Store) -> Survey:
    """Read a store block by block and return its statistics and faults.

    Raises:
        ValueError: its content is not what was written.
    """
    S = store.spec.observation_dim
    counts = _Counts(store)
    mean, covariances = mean_and_covariance(counts.read_blocks())
    deviation = np.sqrt(np.diag(covariances).clip(min=0))
    varies = running_statistics.is_varying(mean, deviation)
    # a number that does not vary correlates with nothing
    unit = np.where(varies, deviation, np.inf)
    correlation = np.abs(covariances) / np.outer(unit, unit)
    faults = [
        *_describe_repeats(store, np.array(counts.digests, "V16")),
        *_describe_constants(store, mean[:S], varies[:S]),
        *counts.describe_jumps(),
        *_describe_leaks(correlation[:S, S], "return-to-go"),
        *_describe_leaks(correlation[:S, S + 1], "reward of the step"),
    ]
    return Survey(
        mean=mean[:S],
        deviation=deviation[:S],
        actions=counts.actions,
        counts=counts.discrete_actions,
        at_bound=counts.at_bound,
        faults=faults,
    )


class _Counts:
    """Counts that grow while a store is read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.actions = RunningStatistics()
        self.discrete_actions = np.zeros(store.spec.num_actions, int)
        self.at_bound = 0
        self.usual_changes = _median_changes(store)
        self.jumps = np.zeros(store.spec.observation_dim, int)
        self.digests: list[bytes] = []  # of each episode

    def read_blocks(self) -> Iterator[np.ndarray]:
        """Yield observations, return-to-go and reward of the steps in blocks (n, S + 2) float64."""
        store = self.store
        size = max(BLOCK // store.spec.observation_dim, 1)
        for episodes, rows in read_and_verify(store, size):
            # where the episodes of the block begin and end in it
            bounds = store.offsets[episodes.start : episodes.stop + 1] - rows.start
            observations = store.observations[rows]
            rewards = store.rewards[rows]
            self._count_jumps(observations, bounds)
            self._count_actions(rows)
            self._digest(observations, store.actions[rows], rewards, bounds)
            togo = returns_to_go(rewards, store.returns[episodes], bounds)
            yield np.column_stack([observations, togo, rewards]).astype(np.float64)

    def _count_jumps(self, observations: np.ndarray, bounds: np.ndarray) -> None:
        changes = np.abs(np.diff(observations, axis=0))
        is_jump = (changes > JUMP * self.usual_changes) & (self.usual_changes > 0)
        is_jump[bounds[1:-1] - 1] = False  # from one episode to the next
        self.jumps += is_jump.sum(0)

    def _count_actions(self, rows: slice) -> None:
        spec = self.store.spec
        recorded = self.store.actions[rows]
        if self.store.action_weight is not None:
            recorded = recorded[self.store.action_weight[rows] > 0]
        self.actions.add(recorded)
        if spec.num_actions:
            self.discrete_actions += np.bincount(
                recorded[:, 0].astype(int), minlength=spec.num_actions
            )
        else:
            is_at_bound = np.isclose(recorded, spec.low) | np.isclose(recorded, spec.high)
            self.at_bound += int(is_at_bound.sum())

    def _digest(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        bounds: np.ndarray,
    ) -> None:
        for begin, end in pairwise(bounds.tolist()):
            digest = hashlib.blake2b(digest_size=16)
            for column in (observations, actions, rewards):
                digest.update(column[begin:end].tobytes())
            self.digests.append(digest.digest())

    def describe_jumps(self) -> Iterator[str]:
        """Yield a sentence for each number of an observation that jumps."""
        for i in np.flatnonzero(self.jumps):
            yield (
                f"observation [{i}]: {self.jumps[i]:,} changes of more than {JUMP} times its usual "
                f"change in a step, {self.usual_changes[i]:.3g}"
            )


def _describe_constants(store: Store, mean: np.ndarray, varies: np.ndarray) -> Iterator[str]:
    """Yield sentences on constant rewards and constant numbers of an observation, but for zeros of
    entities, one of which may never be present.

    Args:
        store: of the log.
        mean: (S,) of the numbers.
        varies: (S,) bool, the numbers that change.
    """
    if not np.ptp(store.rewards):
        yield (
            f"every reward is {store.rewards[0]:g}: a return says no more than the length of an "
            "episode"
        )
    is_of_entity = np.zeros(len(mean), bool)
    for block in entity_blocks(store.spec.entity_schema):
        is_of_entity[block.columns] = True
    constant = np.flatnonzero(~varies & ~(is_of_entity & (mean == 0)))
    if len(constant):
        yield f"observation {constant.tolist()}: the same number at every step"


def _describe_leaks(correlation: np.ndarray, future: str) -> Iterator[str]:
    """Yield a sentence on numbers of an observation that leak a future value, by their correlation
    (S,) with it.
    """
    leaks = np.flatnonzero(correlation > LEAK)
    if len(leaks):
        yield f"observation {leaks.tolist()}: as good as the {future}, which is known only later"


def list_faults(info: Json, key: str = "faults") -> list[str]:
    """Return the faults that the reader of a dataset reported, those of a mixture by part.

    Args:
        info: of its store.
        key: `faults`, or `unread`: the names of the columns and infos that are not read.
    """
    lines = list(info.get(key, []))
    for label, part in info.get("parts", {}).items():
        lines += [f"{label}: {line}" for line in list_faults(part["dataset"], key)]
    return lines


def _median_changes(store: Store) -> np.ndarray:
    """Return the median change of each number in a step, zeros left out, in a sample of episodes:
    (S,); 0 for a number that never changes.
    """
    changes = []
    for a, b in list(pairwise(store.offsets.tolist()))[:: len(store.rewards) // SAMPLE + 1]:
        changes.append(np.abs(np.diff(store.observations[a : min(b, a + SAMPLE)], axis=0)))
    medians = np.zeros(store.spec.observation_dim)
    for i, column in enumerate(np.concatenate(changes).T):
        if column.any():
            medians[i] = np.median(column[column > 0])
    return medians


def _describe_repeats(store: Store, digests: np.ndarray) -> Iterator[str]:
    """Yield a sentence on episodes whose observations, actions and rewards equal those of another
    one to the byte, by their digests (E,).
    """
    # kind: (E,) index of the distinct episode
    _, kind, count = np.unique(digests, return_inverse=True, return_counts=True)
    if not (count > 1).any():
        return
    part = np.zeros(len(store.lengths)) if store.part is None else store.part
    partitions = {"groups, of which one may be held out": store.group, "parts": part}
    sentence = (
        f"{(count - 1).sum():,} of {len(kind):,} episodes repeat another one, "
        f"{(count > 1).sum():,} different ones"
    )
    for name, partition in partitions.items():
        pairs = np.unique(np.stack([kind, partition]), axis=1)
        in_several = (np.bincount(pairs[0].astype(int)) > 1).sum()
        if in_several:
            sentence += f"; {in_several:,} of them in several {name}"
    yield sentence
