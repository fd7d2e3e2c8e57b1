"""Observations of another episode at the ends of episodes, as a vector environment leaves them.

Gymnasium's vector environments reset by themselves. With `AutoresetMode.SAME_STEP` the step that
ends an episode returns the first observation of the next one, and the final observation stands in
`info["final_obs"]`. With `NEXT_STEP` the next step ignores its action, has the reward 0 and returns
the first observation: its row is no step of an episode. A log whose next observations are its
observations moved by one row looks like the first.
"""

import numpy as np

MIN_EPISODES = 2  # fewer equal observations may be a coincidence
NEXT_SHARE = 0.3  # of the episodes that end as the next one starts, beyond chance
ANY_SHARE = 0.7  # of the episodes that end as any other one starts
SAMPLE = 10_000  # rows that are compared
CONTINUOUS = 0.5  # smaller changes, as a share of that of two random observations, are no reset


def starts_elsewhere(
    observations: np.ndarray, offsets: np.ndarray, final: np.ndarray | None
) -> np.ndarray:
    """Return which final observations are the first observation of another episode, (E,) bool.

    All are false where this may be by chance, as where every episode starts alike, and in a log
    that goes on after a time limit without a reset.

    Args:
        observations: (n, S) of all episodes, end to end.
        offsets: (E+1,) row of the first step of each episode, and n.
        final: (E, S), or None.
    """
    E = len(offsets) - 1
    none = np.zeros(E, bool)
    if final is None or E < 2:
        return none
    starts = observations[offsets[:-1]]
    # indices into the distinct observations
    _, index = np.unique(np.concatenate([starts, final]) + 0, axis=0, return_inverse=True)
    start, end = np.split(index.reshape(-1), 2)
    is_equal = _equals_next_start(start, end) | _equals_any_start(start, end)
    if is_equal.sum() < MIN_EPISODES:
        return none
    last = observations[offsets[1:] - 1]
    change = _median_change(final[is_equal] - last[is_equal], observations)
    return np.asarray(is_equal & (change >= CONTINUOUS))


def _equals_next_start(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return which episodes end as the next one starts, (E,) bool; none if they end as often as any
    other episode starts.

    start, end: (E,) indices of the first and final observations.
    """
    E = len(start)
    is_equal = np.append(end[:-1] == start[1:], False)
    count = np.bincount(start, minlength=int(max(start.max(), end.max())) + 1)
    # starts of other episodes than the next one that are equal too
    by_chance = (count[end] - is_equal) / E
    is_more = is_equal.sum() - by_chance.sum() >= NEXT_SHARE * (E - 1)
    return np.asarray(is_equal & is_more)


def _equals_any_start(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return which episodes end as exactly one other starts, (E,) bool: of a log whose episodes are
    in another order than they were recorded in.

    start, end: (E,) indices of the first and final observations.
    """
    size = int(max(start.max(), end.max())) + 1
    num_starts = np.bincount(start, minlength=size)
    num_ends = np.bincount(end, minlength=size)
    is_equal = (num_starts[end] == 1) & (num_ends[end] == 1) & (start != end)
    return np.asarray(is_equal & (is_equal.mean() >= ANY_SHARE))


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
    is_candidate = np.diff(offsets)[1:] > 2
    if final is not None:
        is_candidate &= (final[:-1] == observations[first]).all(1)
    if is_candidate.sum() < MIN_EPISODES or is_candidate.mean() < 0.5:
        return False
    first = first[is_candidate]
    if rewards[first].any() or not rewards.any():
        return False
    usual = _median_change(observations[first + 2] - observations[first + 1], observations)
    before = _median_change(observations[first] - observations[first - 1], observations)
    after = _median_change(observations[first + 1] - observations[first], observations)
    return max(before, usual) < CONTINUOUS <= after


def _median_change(changes: np.ndarray, observations: np.ndarray) -> float:
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
