"""95 % intervals, by hand and by how often they hold the true mean."""

import numpy as np
import pytest

from decisionllm.eval.intervals import over_episodes, over_runs


def test_an_interval_holds_the_mean_of_coin_tosses():
    tosses = np.arange(400) % 2
    low, high = over_episodes(tosses)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.005)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.005)
    assert over_episodes(tosses) == (low, high), "it repeats"
    assert over_episodes([7.0]) == over_episodes([7, 7, 7]) == (7, 7)


def test_repetitions_of_a_case_count_once():
    """Five copies of a toss say no more than the toss."""
    tosses = np.arange(400) % 2
    repeated = np.repeat(tosses, 5)
    case = np.repeat(np.arange(400), 5)
    assert over_episodes(repeated, case) == over_episodes(tosses)
    low, high = over_episodes(repeated)
    least, most = over_episodes(repeated, case)
    assert 2.1 * (high - low) < most - least


def test_large_clusters_count_as_their_episodes():
    """Of three episodes two are of one day: the mean of all is 1, of both days 1.5."""
    rng = np.random.default_rng(0)
    day = np.repeat(np.arange(300), rng.integers(1, 6, size=300))
    large = np.bincount(day)[day] >= 4
    values = large + rng.normal(size=300)[day]
    low, high = over_episodes(values, day)
    assert low < values.mean() < high
    days = np.bincount(day, values) / np.bincount(day)
    assert days.mean() < low, "the mean of the days is another number"


def test_the_interval_of_three_runs_is_students():
    low, high = over_runs([10, 20, 60])
    assert (low, high) == pytest.approx((30 - 65.72, 30 + 65.72), abs=0.01)
    assert over_runs([4, 4, 4]) == (4, 4)


@pytest.mark.parametrize("runs", [2, 5])
def test_of_a_hundred_intervals_over_runs_ninety_five_hold_the_mean(runs):
    """By the normal distribution it would be 0.70 and 0.88 of them; of three runs see above."""
    samples = np.random.default_rng(runs).normal(size=(500, runs))
    intervals = np.array([over_runs(scores) for scores in samples])
    hold_mean = (intervals[:, 0] <= 0) & (intervals[:, 1] >= 0)
    assert hold_mean.mean() == pytest.approx(0.95, abs=0.025)
