"""Scaling laws: planted exponents are recovered within their intervals, and noise gives no law."""

import numpy as np
import pytest

from decisionllm.scaling import law

TRUE = law.Law(E=0.4, A=60.0, alpha=0.45, B=90.0, beta=0.55)


def study(noise=0.01, seed=0, true=TRUE, sizes=6, volumes=5, seeds=6):
    """N, D, loss of every run of a grid, (n,) each."""
    N, D, _ = np.meshgrid(
        np.geomspace(3e4, 1e7, sizes), np.geomspace(1e3, 1e6, volumes), range(seeds), indexing="ij"
    )
    N, D = N.ravel(), D.ravel()
    return N, D, true(N, D) * np.exp(noise * np.random.default_rng(seed).normal(size=len(N)))


def described(N, D, loss):
    """The trends of runs of one quality, and their law."""
    p = law.trend_p_values(N, D, loss, np.ones(len(N)))
    return p, law.describe(N, D, loss, p, draws=0)


def test_a_law_is_the_sum_of_its_terms():
    assert law.Law(E=1, A=8, alpha=0.5, B=9, beta=2)(N=16, D=3) == 1 + 2 + 1


def test_planted_exponents_are_within_their_intervals():
    actual = law.fit(*study())
    for name in ("E", "alpha", "beta"):
        low, high = actual.intervals[name]
        assert low <= getattr(TRUE, name) <= high, (name, low, high)
        assert high - low < 0.25, f"the interval of {name} is too wide"
    low, high = actual.band(np.array([1e6]), np.array([1e5]))
    assert low < TRUE(1e6, 1e5) < high


def test_without_noise_the_parameters_are_recovered():
    actual, true = law.fit(*study(noise=0.0), draws=0).row(), TRUE.row()
    assert actual.pop("intervals") == true.pop("intervals") == {}
    assert actual == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_the_published_law_of_chinchilla_is_recovered_within_a_hundredth(noise):
    """81 simulated runs of nine budgets, 6e18 to 3e21 FLOPs, each of nine sizes."""
    true = law.Law(E=1.69, A=406.4, alpha=0.34, B=410.7, beta=0.28)
    budget, size = np.meshgrid(np.geomspace(6e18, 3e21, 9), np.geomspace(0.25, 4, 9))
    N = (size * np.sqrt(budget / 6 / 20)).ravel()
    D = budget.ravel() / 6 / N
    actual = law.fit(
        N, D, true(N, D) * np.exp(noise * np.random.default_rng(0).normal(size=81)), draws=0
    )
    assert [actual.E, actual.A, actual.alpha, actual.B, actual.beta] == pytest.approx(
        [1.69, 406.4, 0.34, 410.7, 0.28], rel=0.01
    )


def test_a_few_outliers_move_the_fit_little():
    N, D, loss = study()
    loss[::30] *= 10
    actual = law.fit(N, D, loss, draws=0)
    assert actual.alpha == pytest.approx(TRUE.alpha, abs=0.05)
    assert actual.beta == pytest.approx(TRUE.beta, abs=0.05)


def test_the_largest_model_is_predicted_from_the_others():
    _, actual = described(*study())
    assert actual["left_out"]["parameters"] == pytest.approx(1e7)
    assert abs(actual["left_out"]["missed"]) < 0.02
    N, D, loss = study()
    loss[N.max() == N] *= 1.3  # the largest model is trained too little
    _, actual = described(N, D, loss)
    assert actual["left_out"]["missed"] == pytest.approx(1 / 1.3 - 1, abs=0.02)


def test_noise_gives_no_law():
    N, D, _ = study()
    flat = np.exp(0.1 * np.random.default_rng(1).normal(size=len(N)))
    p, actual = described(N, D, flat)
    assert actual == {"law": None, "left_out": None} and min(p.values()) > law.CERTAIN
    assert law.falling_p_value(flat, np.random.default_rng(2).normal(size=len(N))) > law.CERTAIN


def test_an_axis_without_a_trend_has_no_term():
    N, D, loss = study(true=law.Law(E=0.4, B=90.0, beta=0.55))
    p, actual = described(N, D, loss)
    assert p["size"] > law.CERTAIN >= p["data"]
    assert actual["law"].A == 0 and actual["law"].beta == pytest.approx(0.55, abs=0.05)
    _, actual = described(N, D, 1 / loss)  # a rising loss is no trend either
    assert actual["law"] is None


def test_a_trend_is_sought_within_each_quality():
    """The larger models have the worse data: over both qualities the loss rises with size."""
    N = np.array([1, 2, 3, 4, 11, 12, 13, 14])
    quality = np.repeat([1.0, 0.5], 4)
    loss = np.array([4, 3, 2, 1, 8, 7, 6, 5])
    assert law.trend_p_values(N, np.ones(8), loss, quality)["size"] < law.CERTAIN
    assert law.trend_p_values(N, np.ones(8), loss, np.ones(8))["size"] > 0.5


def test_the_p_of_four_values_is_counted_by_hand():
    # one of 24 orders
    assert law.falling_p_value([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(1 / 24, abs=0.01)
    assert law.falling_p_value([1, 2, 3, 4], [1, 2, 3, 4]) == 1


def test_a_loss_below_zero_is_refused():
    with pytest.raises(
        ValueError, match="expected more than 0, got -0.5: subtract the floor of the head"
    ):
        law.fit([1, 2], [1, 2], [1.0, -0.5])


def test_compute_is_allocated_where_the_loss_is_least():
    assert law.allocate(law.Law(E=1, A=100, alpha=0.5, B=100, beta=0.5), 6e12, 6) == pytest.approx(
        (1e6, 1e6)
    )
    N = np.geomspace(1e2, 1e8, 20_001)
    best, data = law.allocate(TRUE, 6e12, 6)
    assert best == pytest.approx(N[TRUE(N, 1e12 / N).argmin()], rel=1e-3)
    assert best * data == pytest.approx(1e12)


def test_a_trend_of_no_number_is_refused():
    with pytest.raises(ValueError, match="expected numbers, got NaN"):
        law.trend_p_values([1, 2], [5, 5], [np.nan, np.nan], [1, 1])


def test_an_exponent_that_the_runs_do_not_determine_is_named():
    intervals = {"alpha": (0.3, 0.5), "A": (1.0, 2.0), "beta": (0.2, 0.9), "B": (1.0, 2.0)}
    assert law.undetermined_exponents(law.Law(E=1, intervals=intervals)) == ["beta"]
    at_bounds = intervals | {"beta": (1.0, 3.0)}
    assert law.undetermined_exponents(law.Law(E=1, intervals=at_bounds)) == ["beta"]
    without_a_term = intervals | {"A": (0.0, 2.0)}
    assert law.undetermined_exponents(law.Law(E=1, intervals=without_a_term)) == ["alpha", "beta"]
