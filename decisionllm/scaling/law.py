"""Scaling laws of the loss, and tests for a trend.

L(N, D) = E + A / N^alpha + B / D^beta, N in parameters, D in steps of data. For given exponents the
law is linear in E, A and B, so that the fit searches over the exponents alone.

Source: the parametric form and the Huber loss on log residuals are those of Hoffmann et al.,
Training Compute-Optimal Large Language Models, 2022 (approach 3). Variable projection: Golub and
Pereyra, The Differentiation of Pseudo-Inverses and Nonlinear Least Squares Problems Whose Variables
Separate, 1973; for scaling laws with non-negative factors: Open Athena,
https://github.com/Open-Athena/scaling-law-analysis.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares, nnls
from scipy.special import huber
from scipy.stats import rankdata

from decisionllm.schema import Json

HUBER = 0.02  # log residuals beyond this count linearly
WIDE = 4.0  # an exponent is not determined if its interval spans this factor
SHUFFLES = 9999  # of a permutation test
CERTAIN = 0.01  # p below which a trend is accepted
FACTORS = {"alpha": "A", "beta": "B"}  # of the term that has this exponent
BOUNDS = (0.01, 3.0)  # of an exponent
STARTS = np.geomspace(0.03, 2, 7)  # of an exponent


@dataclass(frozen=True)
class Law:
    """A fitted law; an axis without a trend has no term.

    Attributes:
        intervals: {name: (low, high)}, 95 % bootstrap intervals.
        draws: the law fitted to each bootstrap sample.
    """

    E: float
    A: float = 0.0
    alpha: float = 0.0
    B: float = 0.0
    beta: float = 0.0
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    draws: tuple["Law", ...] = ()

    def __call__(self, N: ArrayLike, D: ArrayLike) -> Any:
        """Return the expected loss of N parameters on D steps of data; both broadcast."""
        size = self.A / _floats(N) ** self.alpha
        data = self.B / _floats(D) ** self.beta
        return self.E + size + data

    def band(self, N: ArrayLike, D: ArrayLike) -> np.ndarray:
        """(2, ...) low and high end of the 95 % bootstrap band."""
        losses = [draw(N, D) for draw in self.draws]
        return np.asarray(np.percentile(losses, [2.5, 97.5], axis=0))

    def row(self) -> Json:
        """Return the law as JSON values."""
        return {name: value for name, value in vars(self).items() if name != "draws"}


def trend_p_values(
    N: ArrayLike, D: ArrayLike, loss: ArrayLike, quality: ArrayLike
) -> dict[str, float]:
    """p that the loss falls with `size` and with `data`, the other axes being equal; (n,) each."""
    sizes = falling_p_value(N, loss, _cells(D, quality))
    return {"size": sizes, "data": falling_p_value(D, loss, _cells(N, quality))}


def falling_p_value(x: ArrayLike, y: ArrayLike, blocks: ArrayLike | None = None) -> float:
    """p of a permutation test that y falls with x, by rank correlation within blocks.

    x, y, blocks: (n,). scipy.stats.permutation_test has no blocks.
    """
    x, y = _floats(x), _floats(y)
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError("trend: expected numbers, got NaN; leave such runs out")
    blocks = np.zeros(len(x)) if blocks is None else np.asarray(blocks)
    rng = np.random.default_rng(0)
    total = 0.0
    shuffled = np.zeros(SHUFFLES)
    for block in np.unique(blocks):
        inside = blocks == block
        middle = (1 + inside.sum()) / 2
        a = rankdata(x[inside]) - middle
        b = rankdata(y[inside]) - middle
        total += a @ b
        shuffled += rng.permuted(np.tile(b, (SHUFFLES, 1)), axis=1) @ a
    extreme = (shuffled <= total + 1e-9).sum()
    return float((1 + extreme) / (1 + SHUFFLES))


def describe(
    N: np.ndarray, D: np.ndarray, loss: np.ndarray, p: dict[str, float], *, draws: int = 200
) -> Json:
    """Fit the law to n runs of one quality, and predict the largest model from the others.

    Args:
        N, D, loss, draws: as of `fit`.
        p: of the trends, see `trend_p_values`.

    Returns:
        law: with a term for each trend; None without a trend. left_out: relative error of the law
        fitted without the largest model, on its losses; None without enough sizes.
    """
    sizes = np.unique(N)
    size = p["size"] <= CERTAIN and len(sizes) >= 3
    data = p["data"] <= CERTAIN and len(np.unique(D)) >= 3
    if len(N) < 8 or not (size or data):
        return {"law": None, "left_out": None}
    law = fit(N, D, loss, size=size, data=data, draws=draws)
    left_out = None
    if size and len(sizes) >= 4:
        largest = sizes[-1] == N
        others = ~largest
        law_of_rest = fit(N[others], D[others], loss[others], size=size, data=data, draws=0)
        relative_error = law_of_rest(N[largest], D[largest]) / loss[largest] - 1
        left_out = {
            "parameters": float(sizes[-1]),
            "missed": float(relative_error.mean()),
            "worst": float(relative_error[abs(relative_error).argmax()]),
        }
    return {"law": law, "left_out": left_out}


def fit(
    N: ArrayLike,
    D: ArrayLike,
    loss: ArrayLike,
    *,
    size: bool = True,
    data: bool = True,
    draws: int = 200,
) -> Law:
    """Fit the law to n runs.

    The bootstrap draws cells (runs of equal N and D) and within each as many of its runs, that is
    of its seeds.

    Args:
        N: (n,) parameters.
        D: (n,) steps of data.
        loss: (n,) losses above the floor of the head, > 0, nats.
        size: fit the term of N.
        data: fit the term of D.
        draws: bootstrap samples.

    Raises:
        ValueError: a loss is not above 0.
    """
    runs = np.array([N, D, loss], np.float64)  # (3, n)
    if not (runs[2] > 0).all():
        raise ValueError(
            f"loss: expected more than 0, got {runs[2].min():.4g}: subtract the floor of the head"
        )
    names = []
    if size:
        names.append("alpha")
    if data:
        names.append("beta")
    law = _fit(runs, names, list(itertools.product(STARTS, repeat=len(names))))

    cells = _cells(*runs[:2])
    members = [np.flatnonzero(cells == cell) for cell in range(cells.max() + 1)]
    exponents = [vars(law)[name] for name in names]
    rng = np.random.default_rng(0)
    bootstrap_laws = []
    for _ in range(draws):
        picked = rng.integers(len(members), size=len(members))
        sample = [rng.choice(members[cell], len(members[cell])) for cell in picked]
        bootstrap_laws.append(_fit(runs[:, np.concatenate(sample)], names, [exponents]))
    return replace(law, intervals=_intervals(bootstrap_laws, names), draws=tuple(bootstrap_laws))


def _fit(runs: np.ndarray, names: Sequence[str], starts: Sequence[Sequence[float]]) -> Law:
    """Return the law of runs (3, n): N, D, loss.

    Descends over the exponents `names` from the best of the starts.
    """
    n, d, logs = np.log(runs)
    axes = {"alpha": n, "beta": d}  # what falls with this exponent
    # the columns of the linear factors are 1 at the mean, so that they are alike in size
    means = {name: axis.mean() for name, axis in axes.items()}

    def project(exponents: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Return the best factors for these exponents, and the log residuals."""
        columns = [np.ones_like(logs)]
        for name, exponent in zip(names, exponents, strict=True):
            columns.append(np.exp(-exponent * (axes[name] - means[name])))
        table = np.stack(columns, 1)  # (n, k)
        factors = _factors(table, logs)
        return factors, np.log(table @ factors) - logs

    def residuals(exponents: Sequence[float]) -> np.ndarray:
        return project(exponents)[1]

    best = min(starts, key=lambda exponents: huber(HUBER, residuals(exponents)).sum())
    start = np.clip(best, BOUNDS[0] + 1e-6, BOUNDS[1] - 1e-6)
    exponents = least_squares(residuals, start, bounds=BOUNDS, loss="huber", f_scale=HUBER).x
    E, *factors = project(exponents)[0].tolist()
    terms = {}
    for name, exponent, factor in zip(names, exponents.tolist(), factors, strict=True):
        terms[name] = exponent
        terms[FACTORS[name]] = factor * float(np.exp(exponent * means[name]))
    return Law(E=E, **terms)


def _factors(columns: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Factors (k,) >= 0 of columns (n, k): the least Huber loss of log(columns @ factors) - logs.

    By Gauss-Newton steps, each a non-negative least squares.
    """
    factors = np.zeros(columns.shape[1])
    fitted = logs
    for _ in range(30):
        error = logs - fitted
        weight = np.sqrt(HUBER / np.maximum(abs(error), HUBER))
        last = factors
        scaled = columns * (weight / np.exp(fitted))[:, None]
        factors, _norm = nnls(scaled, weight * (1 + error))
        if np.allclose(last, factors, rtol=1e-9, atol=0):
            break
        fitted = np.log(columns @ factors)
    return factors


def _intervals(draws: Sequence[Law], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """{name: 95 % interval} of E, of the exponents `names` and their factors; {} without draws."""
    if not draws:
        return {}
    parameters = ["E"]
    for name in names:
        parameters += [FACTORS[name], name]
    intervals = {}
    for name in parameters:
        low, high = np.percentile([vars(draw)[name] for draw in draws], [2.5, 97.5]).tolist()
        intervals[name] = (low, high)
    return intervals


def undetermined_exponents(law: Law) -> list[str]:
    """Return the exponents that the runs do not determine.

    Their interval reaches the bounds, or is wide, or the term may be missing.
    """
    exponents = []
    for name, factor in FACTORS.items():
        if name not in law.intervals:
            continue
        low, high = law.intervals[name]
        at_bounds = np.isclose([low, high], BOUNDS, rtol=0.02).any()
        least_factor, _ = law.intervals[factor]
        if at_bounds or high > WIDE * low or least_factor <= 0:
            exponents.append(name)
    return exponents


def allocate(law: Law, flops: ArrayLike, cost: float) -> tuple[Any, Any]:
    """N and D of the least loss whose compute is `flops` = cost N D, by a law with both terms.

    There alpha A / N^alpha = beta B / D^beta. flops broadcasts.
    """
    product = _floats(flops) / cost
    ratio = law.alpha * law.A / law.beta / law.B
    N = (ratio * product**law.beta) ** (1 / (law.alpha + law.beta))
    return N, product / N


def _cells(*columns: ArrayLike) -> np.ndarray:
    """(n,) one number for each distinct row of these columns."""
    rows = np.stack(columns, 1)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _floats(numbers: ArrayLike) -> np.ndarray:
    return np.asarray(numbers, np.float64)
