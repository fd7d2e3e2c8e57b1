"""What may be wrong with a log: repeated episodes, constant numbers, jumps, observations that hold the future. Counted block by block."""

import hashlib
from collections.abc import Iterator

import numpy as np

from decisionllm.datasets.moments import covariance
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import BLOCK, of_store

JUMP = 30  # a change is a jump beyond so many medians of the changes of its number that are not 0
LEAK = 1 - 1e-6  # an observation holds the future if a number of it correlates so much with what comes
SAMPLE = 100_000  # changes that the medians are taken from


def faults(store: Store) -> Iterator[str]:
    """A sentence for each kind of fault that is found."""
    yield from _repeats(store)
    if np.ptp(store.rewards) == 0:
        yield f"every reward is {store.rewards[0]:g}: a return says no more than the length of an episode"
    n, names = len(store.rewards), store.spec.observation_dim
    last = np.zeros(n, bool)
    last[store.offsets[1:] - 1] = True
    size = max(BLOCK // names, 1)
    some = np.flatnonzero(~last)[:: n // SAMPLE + 1]
    changes = np.abs(store.observations[some + 1] - store.observations[some])
    median = np.array([np.median(each[each > 0]) if each.any() else 0 for each in changes.T])
    jumps = np.zeros(names, int)
    future = np.stack([of_store(store).returns_to_go, store.rewards], 1)

    def blocks() -> Iterator[np.ndarray]:  # in which the jumps are counted
        nonlocal jumps
        for start in range(0, n, size):
            rows = slice(start, min(start + size, n))
            ahead = store.observations[start + 1 : rows.stop + 1]
            change = np.abs(ahead - store.observations[start : start + len(ahead)])
            jumps += ((change > JUMP * median) & (median > 0) & ~last[start : start + len(ahead), None]).sum(0)
            yield np.concatenate([store.observations[rows], future[rows]], 1, dtype=np.float64)

    _, covariances = covariance(blocks())
    deviation = np.sqrt(np.diag(covariances).clip(min=0))
    varies = deviation > 1e-9 * (1 + np.abs(np.concatenate([store.observations[0], future[0]])))
    correlation = np.abs(covariances) / np.outer(*[np.where(varies, deviation, np.inf)] * 2)
    if len(constant := np.flatnonzero(~varies[:names])):
        yield f"observation {constant.tolist()}: the same number at every step"
    for i in np.flatnonzero(jumps):
        yield f"observation [{i}]: {jumps[i]:,} changes of more than {JUMP} times its usual change in a step, {median[i]:.3g}"
    for what, column in (("return-to-go", names), ("reward of the step", names + 1)):
        if len(leaks := np.flatnonzero(correlation[:names, column] > LEAK)):
            yield f"observation {leaks.tolist()}: as good as the {what}, which is known only later"


def _repeats(store: Store) -> Iterator[str]:
    """Episodes whose observations, actions and rewards equal those of another one to the byte."""
    part = np.zeros(len(store.lengths)) if store.part is None else store.part
    digests = []
    for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        columns = (store.observations[a:b], store.actions[a:b], store.rewards[a:b])
        digests.append(hashlib.blake2b(b"".join(x.tobytes() for x in columns), digest_size=16).digest())
    kind, count = np.unique(np.array(digests, "V16"), return_inverse=True, return_counts=True)[1:]
    if (count > 1).any():
        places = {"groups, of which one may be held out": store.group, "parts": part}
        apart = {
            name: sum(np.bincount(np.unique(np.stack([kind, each]), axis=1)[0].astype(int)) > 1)
            for name, each in places.items()
        }
        found = "".join(f"; {n:,} of them in several {name}" for name, n in apart.items() if n)
        yield f"{(count - 1).sum():,} of {len(kind):,} episodes repeat another one, {(count > 1).sum():,} different ones{found}"
