"""What one reading of a log finds: moments for its card; and what may be wrong: repeated episodes,
constants, jumps, leaked futures.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from decisionllm.datasets.moments import Moments, covariance
from decisionllm.datasets.store import Store, read
from decisionllm.datasets.windows import BLOCK, returns_to_go
from decisionllm.schema import Json

JUMP = 30  # a change is a jump beyond so many medians of the changes of its number that are not 0
# an observation holds the future if a number of it correlates so much with what comes
LEAK = 1 - 1e-6
SAMPLE = 100_000  # changes that the medians are taken from, of whole episodes


@dataclass(frozen=True)
class Survey:
    """What was found in a log of observations (n, S)."""

    mean: np.ndarray  # (S,) of the observations
    deviation: np.ndarray  # (S,)
    actions: Moments  # of those that are recorded
    counts: np.ndarray  # (C,) of each discrete action
    at_bound: int  # numbers of continuous actions
    faults: list[str]  # a sentence for each kind


def survey(store: Store) -> Survey:
    """Read a store block by block, each byte of the observations once.

    Raises:
        ValueError: its content is not what was written.
    """
    spec, S = store.spec, store.spec.observation_dim
    actions = Moments()
    counts = np.zeros(spec.num_actions, int)
    at_bound = 0
    usual = _usual_changes(store)
    jumps, digests = np.zeros(S, int), list[bytes]()

    def blocks() -> Iterator[np.ndarray]:  # observations, return-to-go, reward: (n, S + 2)
        nonlocal counts, at_bound, jumps
        for episodes, rows in read(store, max(BLOCK // S, 1)):
            seen, taken, rewards = columns = [
                vars(store)[name][rows] for name in ("observations", "actions", "rewards")
            ]
            ends = store.offsets[episodes.start : episodes.stop + 1] - rows.start
            for e in pairwise(ends.tolist()):
                digests.append(
                    hashlib.blake2b(
                        b"".join(x[slice(*e)].tobytes() for x in columns), digest_size=16
                    ).digest()
                )
            jumped = (np.abs(np.diff(seen, axis=0)) > JUMP * usual) & (usual > 0)
            # from one episode to the next is none
            jumps += jumped.sum(0) - jumped[ends[1:-1] - 1].sum(0)
            recorded = (
                taken if store.action_weight is None else taken[store.action_weight[rows] > 0]
            )
            actions.add(recorded)
            if spec.num_actions:
                counts += np.bincount(recorded[:, 0].astype(int), minlength=spec.num_actions)
            else:
                at_bound += int(
                    (np.isclose(recorded, spec.low) | np.isclose(recorded, spec.high)).sum()
                )
            future = returns_to_go(rewards, store.returns[episodes], ends), rewards
            yield np.concatenate([seen, np.stack(future, 1)], 1, dtype=np.float64)

    mean, covariances = covariance(blocks())
    deviation = np.sqrt(np.diag(covariances).clip(min=0))
    found = list(_repeats(store, np.array(digests, "V16")))
    if not np.ptp(store.rewards):
        found.append(
            f"every reward is {store.rewards[0]:g}: a return says no more than the length of an "
            "episode"
        )
    varies = deviation > 1e-9 * (1 + np.abs(mean))
    correlation = np.abs(covariances) / np.outer(*[np.where(varies, deviation, np.inf)] * 2)
    if len(constant := np.flatnonzero(~varies[:S])):
        found.append(f"observation {constant.tolist()}: the same number at every step")
    for i in np.flatnonzero(jumps):
        often = (
            f"{jumps[i]:,} changes of more than {JUMP} times its usual change in a step, "
            f"{usual[i]:.3g}"
        )
        found.append(f"observation [{i}]: {often}")
    for what, column in (("return-to-go", S), ("reward of the step", S + 1)):
        if len(leaks := np.flatnonzero(correlation[:S, column] > LEAK)):
            found.append(
                f"observation {leaks.tolist()}: as good as the {what}, which is known only later"
            )
    return Survey(mean[:S], deviation[:S], actions, counts, at_bound, found)


def reported(info: Json) -> list[str]:
    """The faults that the reader of a dataset found, those of a mixture by part. info: of its
    store, with a list `faults`.
    """
    found = list(info.get("faults", []))
    for label, part in info.get("parts", {}).items():
        found += [f"{label}: {fault}" for fault in reported(part["dataset"])]
    return found


def _usual_changes(store: Store) -> np.ndarray:
    """(S,) median of the changes in a step that are not 0, in some episodes; 0 without any."""
    some = list(pairwise(store.offsets.tolist()))[:: len(store.rewards) // SAMPLE + 1]
    changes = np.concatenate(
        [np.abs(np.diff(store.observations[a : min(b, a + SAMPLE)], axis=0)) for a, b in some]
    )
    return np.array([np.median(each[each > 0]) if each.any() else 0 for each in changes.T])


def _repeats(store: Store, digests: np.ndarray) -> Iterator[str]:
    """Episodes whose observations, actions and rewards equal those of another one to the byte, by
    their digests (E,).
    """
    part = np.zeros(len(store.lengths)) if store.part is None else store.part
    kind, count = np.unique(digests, return_inverse=True, return_counts=True)[1:]
    if (count > 1).any():
        places = {"groups, of which one may be held out": store.group, "parts": part}
        pairs = {
            name: np.unique(np.stack([kind, each]), axis=1)[0].astype(int)
            for name, each in places.items()
        }
        apart = {name: sum(np.bincount(kinds) > 1) for name, kinds in pairs.items()}
        found = "".join(f"; {n:,} of them in several {name}" for name, n in apart.items() if n)
        yield (
            f"{(count - 1).sum():,} of {len(kind):,} episodes repeat another one, "
            f"{(count > 1).sum():,} different ones{found}"
        )
