"""A survey of a log in one reading: moments for its card, and faults: repeated episodes, constants,
jumps, leaked futures.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from decisionllm.datasets import moments
from decisionllm.datasets.moments import Moments, covariance
from decisionllm.datasets.store import Store, read
from decisionllm.datasets.windows import BLOCK, returns_to_go
from decisionllm.schema import Json
from decisionllm.tokenizers.entities import entity_blocks

JUMP = 30  # a change is a jump beyond so many medians of the changes of its number that are not 0
# an observation holds the future if a number of it correlates so much with what comes
LEAK = 1 - 1e-6
SAMPLE = 100_000  # changes that the medians are taken from, of whole episodes


@dataclass(frozen=True)
class Survey:
    """Facts of a log of observations (n, S)."""

    mean: np.ndarray  # (S,) of the observations
    deviation: np.ndarray  # (S,)
    actions: Moments  # recorded ones alone
    counts: np.ndarray  # (C,) of each discrete action
    at_bound: int  # numbers of continuous actions
    faults: list[str]  # a sentence for each kind


def survey(store: Store) -> Survey:
    """Read a store block by block, each byte of the observations once.

    Raises:
        ValueError: its content is not what was written.
    """
    S = store.spec.observation_dim
    reading = _Reading(store)
    mean, covariances = covariance(reading.blocks())
    deviation = np.sqrt(np.diag(covariances).clip(min=0))
    varies = moments.varies(mean, deviation)
    # a number that does not vary correlates with nothing
    unit = np.where(varies, deviation, np.inf)
    correlation = np.abs(covariances) / np.outer(unit, unit)
    found = [
        *_repeats(store, np.array(reading.digests, "V16")),
        *_constants(store, mean[:S], varies[:S]),
        *reading.jumped(),
        *_leaks(correlation[:S, S], "return-to-go"),
        *_leaks(correlation[:S, S + 1], "reward of the step"),
    ]
    return Survey(mean[:S], deviation[:S], reading.actions, reading.counts, reading.at_bound, found)


class _Reading:
    """Counts while a store is read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.actions = Moments()
        self.counts = np.zeros(store.spec.num_actions, int)
        self.at_bound = 0
        self.usual = _usual_changes(store)
        self.jumps = np.zeros(store.spec.observation_dim, int)
        self.digests: list[bytes] = []  # of each episode

    def blocks(self) -> Iterator[np.ndarray]:
        """Observations, return-to-go and reward of the steps, (n, S + 2) float64 at a time."""
        store = self.store
        size = max(BLOCK // store.spec.observation_dim, 1)
        for episodes, rows in read(store, size):
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
        jumped = (changes > JUMP * self.usual) & (self.usual > 0)
        jumped[bounds[1:-1] - 1] = False  # from one episode to the next
        self.jumps += jumped.sum(0)

    def _count_actions(self, rows: slice) -> None:
        spec = self.store.spec
        recorded = self.store.actions[rows]
        if self.store.action_weight is not None:
            recorded = recorded[self.store.action_weight[rows] > 0]
        self.actions.add(recorded)
        if spec.num_actions:
            self.counts += np.bincount(recorded[:, 0].astype(int), minlength=spec.num_actions)
        else:
            at_bound = np.isclose(recorded, spec.low) | np.isclose(recorded, spec.high)
            self.at_bound += int(at_bound.sum())

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

    def jumped(self) -> Iterator[str]:
        """A sentence for each number of an observation that jumps."""
        for i in np.flatnonzero(self.jumps):
            yield (
                f"observation [{i}]: {self.jumps[i]:,} changes of more than {JUMP} times its usual "
                f"change in a step, {self.usual[i]:.3g}"
            )


def _constants(store: Store, mean: np.ndarray, varies: np.ndarray) -> Iterator[str]:
    """Rewards and numbers of an observation that are the same throughout, but zeros of entities,
    which may be those of one that is never there.

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
    of_entity = np.zeros(len(mean), bool)
    for block in entity_blocks(store.spec.entity_schema):
        of_entity[block.columns] = True
    constant = np.flatnonzero(~varies & ~(of_entity & (mean == 0)))
    if len(constant):
        yield f"observation {constant.tolist()}: the same number at every step"


def _leaks(correlation: np.ndarray, what: str) -> Iterator[str]:
    """Numbers of an observation that tell `what`, by their correlation (S,) with it."""
    leaks = np.flatnonzero(correlation > LEAK)
    if len(leaks):
        yield f"observation {leaks.tolist()}: as good as the {what}, which is known only later"


def reported(info: Json, key: str = "faults") -> list[str]:
    """Return the faults that the reader of a dataset reported, those of a mixture by part.

    Args:
        info: of its store.
        key: `faults`, or `unread`: the names of what it does not read.
    """
    lines = list(info.get(key, []))
    for label, part in info.get("parts", {}).items():
        lines += [f"{label}: {line}" for line in reported(part["dataset"], key)]
    return lines


def _usual_changes(store: Store) -> np.ndarray:
    """(S,) median of the changes in a step that are not 0, in some episodes; 0 without any."""
    changes = []
    for a, b in list(pairwise(store.offsets.tolist()))[:: len(store.rewards) // SAMPLE + 1]:
        changes.append(np.abs(np.diff(store.observations[a : min(b, a + SAMPLE)], axis=0)))
    usual = np.zeros(store.spec.observation_dim)
    for i, each in enumerate(np.concatenate(changes).T):
        if each.any():
            usual[i] = np.median(each[each > 0])
    return usual


def _repeats(store: Store, digests: np.ndarray) -> Iterator[str]:
    """Episodes whose observations, actions and rewards equal those of another one to the byte, by
    their digests (E,).
    """
    # kind: (E,), which of the different episodes
    _, kind, count = np.unique(digests, return_inverse=True, return_counts=True)
    if not (count > 1).any():
        return
    part = np.zeros(len(store.lengths)) if store.part is None else store.part
    places = {"groups, of which one may be held out": store.group, "parts": part}
    found = (
        f"{(count - 1).sum():,} of {len(kind):,} episodes repeat another one, "
        f"{(count > 1).sum():,} different ones"
    )
    for name, place in places.items():
        pairs = np.unique(np.stack([kind, place]), axis=1)
        apart = (np.bincount(pairs[0].astype(int)) > 1).sum()
        if apart:
            found += f"; {apart:,} of them in several {name}"
    yield found
