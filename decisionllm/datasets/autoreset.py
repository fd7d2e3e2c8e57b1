"""Observations of another episode at the ends of episodes, as a vector environment leaves them.

Gymnasium's vector environments reset by themselves. With `AutoresetMode.SAME_STEP` the step that
ends an episode returns the first observation of the next one, and the final observation stands in
`info["final_obs"]`. With `NEXT_STEP` the next step ignores its action, has the reward 0 and returns
the first observation: its row is no step of an episode. A log whose next observations are its
observations moved by one row looks like the first.
"""

import numpy as np

FEW = 2  # equal observations that may be a coincidence, less one
SHARE = 0.3  # of the episodes that end as the next one starts, beyond chance
ANY_SHARE = 0.7  # of the episodes that end as any other one starts
SAMPLE = 10_000  # rows that are compared
CONTINUOUS = 0.5  # a change is no reset below so much of the distance of two random observations


def starts_elsewhere(
    observations: np.ndarray, offsets: np.ndarray, final: np.ndarray | None
) -> np.ndarray:
    """Return whether the final observation of each episode is the first one of another: (E,) bool.

    All are false where this may be by chance, as where every episode starts alike, and in a log
    that goes on after a time limit without a reset.

    Args:
        observations: (n, S) of all episodes, end to end.
        offsets: (E+1,) row of the first step of each episode, and n.
        final: (E, S), or None.
    """
    E = len(offsets) - 1
    nothing = np.zeros(E, bool)
    if final is None or E < 2:
        return nothing
    starts = observations[offsets[:-1]]
    # number of each of the distinct observations
    _, number = np.unique(np.concatenate([starts, final]) + 0, axis=0, return_inverse=True)
    start, end = np.split(number.reshape(-1), 2)
    equal = _equal_next(start, end) | _equal_any(start, end)
    if equal.sum() < FEW:
        return nothing
    last = observations[offsets[1:] - 1]
    change = _typical(final[equal] - last[equal], observations)
    return np.asarray(equal & (change >= CONTINUOUS))


def _equal_next(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return whether an episode ends as the next one starts: (E,) bool; none where it is as likely
    to end as any other starts.

    start, end: (E,) numbers of the first and final observations.
    """
    E = len(start)
    equal = np.append(end[:-1] == start[1:], False)
    count = np.bincount(start, minlength=int(max(start.max(), end.max())) + 1)
    # starts of other episodes than the next one that are equal too
    by_chance = (count[end] - equal) / E
    is_more = equal.sum() - by_chance.sum() >= SHARE * (E - 1)
    return np.asarray(equal & is_more)


def _equal_any(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return whether an episode ends as exactly one other starts: (E,) bool; of a log whose
    episodes are in another order than they were recorded in.

    start, end: (E,) numbers of the first and final observations.
    """
    size = int(max(start.max(), end.max())) + 1
    starts = np.bincount(start, minlength=size)
    ends = np.bincount(end, minlength=size)
    equal = (starts[end] == 1) & (ends[end] == 1) & (start != end)
    return np.asarray(equal & (equal.mean() >= ANY_SHARE))


def has_extra_rows(
    observations: np.ndarray, offsets: np.ndarray, final: np.ndarray | None, rewards: np.ndarray
) -> bool:
    """Return whether the first row of each episode but the first is that of a reset, as
    `AutoresetMode.NEXT_STEP` makes it.

    It follows the end of the episode before without a jump, has the reward 0, and the next one
    jumps, as no other step does.

    Args:
        observations: (n, S) of all episodes, end to end.
        offsets: (E+1,) row of the first step of each episode, and n.
        final: (E, S), or None.
        rewards: (n,).
    """
    first = offsets[1:-1]
    long = np.diff(offsets)[1:] > 2
    if final is not None:
        long &= (final[:-1] == observations[first]).all(1)
    if long.sum() < FEW or long.mean() < 0.5:
        return False
    first = first[long]
    if rewards[first].any() or not rewards.any():
        return False
    here = observations[first]
    usual = _typical(observations[first + 2] - observations[first + 1], observations)
    before = _typical(here - observations[first - 1], observations)
    after = _typical(observations[first + 1] - here, observations)
    return max(before, usual) < CONTINUOUS <= after


def _typical(changes: np.ndarray, observations: np.ndarray) -> float:
    """Return the median size of changes (m, S) as a share of that of two random observations."""
    rows = np.linspace(0, len(observations) - 1, min(len(observations), SAMPLE)).astype(int)
    sample = observations[rows].astype(np.float64)
    unit = sample.std(0)
    unit[unit == 0] = 1
    other = np.random.default_rng(0).permutation(len(sample))
    usual = np.median(np.abs((sample - sample[other]) / unit).max(1))
    size = np.median(np.abs(changes / unit).max(1))
    return float(size / usual) if usual else 0.0


def describe_faults(
    observations: np.ndarray, offsets: np.ndarray, final: np.ndarray | None, rewards: np.ndarray
) -> list[str]:
    """Return the faults of the ends of episodes; see `starts_elsewhere` and `has_extra_rows`."""
    E = len(offsets) - 1
    if has_extra_rows(observations, offsets, final, rewards):
        return [
            "the first row of every episode but the first is a reset whose action was ignored, as "
            "a vector environment with AutoresetMode.NEXT_STEP records it; leave out each row after "
            "an end"
        ]
    count = int(starts_elsewhere(observations, offsets, final).sum())
    if not count:
        return []
    return [
        f"the final observation of {count:,} of {E:,} episodes is the first one of another, as of a "
        "vector environment that resets by itself, and is not used; record "
        'info["final_obs"] at the end of an episode'
    ]
