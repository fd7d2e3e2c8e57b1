"""Scaling laws of loss and score, and tests for a trend.

L(N, D, q) = E + A / N^alpha + B / (D q^gamma)^beta, N in parameters, D in steps of data, q the
data's quality, 1 for that of the whole log. For given exponents the law is linear in E, A and B, so
that the fit searches over the exponents alone.

Source: the parametric form and the Huber loss on log residuals are those of Hoffmann et al.,
Training Compute-Optimal Large Language Models, 2022 (approach 3); the factor of quality is ours.
Variable projection: Golub and Pereyra, The Differentiation of Pseudo-Inverses and Nonlinear Least
Squares Problems Whose Variables Separate, 1973; for scaling laws with non-negative factors:
Open Athena, https://github.com/Open-Athena/scaling-law-analysis.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import OptimizeResult, least_squares, nnls
from scipy.special import expit, huber
from scipy.stats import rankdata

from decisionllm.schema import Json

HUBER = 0.02  # log residuals beyond this count linearly
WIDE = 4.0  # an exponent is not determined if its interval spans this factor
SHUFFLES = 9999  # of a permutation test
CERTAIN = 0.01  # p below which a trend is accepted
FACTORS = {"alpha": "A", "beta": "B"}  # of the term that has this exponent
BOUNDS = {"alpha": (0.01, 3.0), "beta": (0.01, 3.0), "gamma": (-4.0, 4.0)}
STARTS = {
    "alpha": np.geomspace(0.03, 2, 7),
    "beta": np.geomspace(0.03, 2, 7),
    "gamma": np.array([-1.0, 0.1, 1.0]),
}


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
    gamma: float = 0.0
    intervals: dict[str, tuple[float, float]] | None = None
    draws: tuple["Law", ...] = ()

    def __call__(self, N: ArrayLike, D: ArrayLike, q: ArrayLike = 1.0) -> Any:
        """The expected loss of N parameters on D steps of data of quality q; all broadcast."""
        size = self.A / _floats(N) ** self.alpha
        data = self.B / (_floats(D) * _floats(q) ** self.gamma) ** self.beta
        return self.E + size + data

    def band(self, N: ArrayLike, D: ArrayLike, q: ArrayLike = 1.0) -> np.ndarray:
        """(2, ...) low and high end of the 95 % bootstrap band."""
        losses = [draw(N, D, q) for draw in self.draws]
        return np.asarray(np.percentile(losses, [2.5, 97.5], axis=0))

    def row(self) -> Json:
        """The law as JSON values."""
        return {name: value for name, value in vars(self).items() if name != "draws"}


def fit(
    N: ArrayLike,
    D: ArrayLike,
    loss: ArrayLike,
    q: ArrayLike | None = None,
    *,
    size: bool = True,
    data: bool = True,
    draws: int = 200,
) -> Law:
    """Fit the law to n runs.

    The bootstrap draws cells (runs of equal N, D and q) and within each as many of its runs, that
    is of its seeds.

    Args:
        N: (n,) parameters.
        D: (n,) steps of data.
        loss: (n,) losses above the floor of the head, > 0, nats.
        q: (n,) quality; None: 1.
        size: fit the term of N.
        data: fit the term of D.
        draws: bootstrap samples.

    Raises:
        ValueError: a loss is not above 0.
    """
    quality = np.ones(np.shape(N)) if q is None else q
    runs = np.array([N, D, quality, loss], np.float64)  # (4, n)
    if not (runs[3] > 0).all():
        got = f"{runs[3].min():.4g}"
        raise ValueError(f"loss: expected more than 0, got {got}: subtract the floor of the head")
    names = []
    if size:
        names.append("alpha")
    if data:
        names.append("beta")
    if data and np.ptp(runs[2]) > 1e-6:
        names.append("gamma")
    law = _fit(runs, names, list(itertools.product(*(STARTS[name] for name in names))))

    cells = _blocks(*runs[:3])
    members = [np.flatnonzero(cells == cell) for cell in range(cells.max() + 1)]
    exponents = [vars(law)[name] for name in names]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(draws):
        picked = rng.integers(len(members), size=len(members))
        sample = [rng.choice(members[cell], len(members[cell])) for cell in picked]
        drawn.append(_fit(runs[:, np.concatenate(sample)], names, [exponents]))
    return replace(law, intervals=_intervals(drawn, names), draws=tuple(drawn))


def cost(N: ArrayLike, D: ArrayLike, flops: ArrayLike) -> float:
    """FLOPs per parameter and step of data: median of the runs on half of the largest data or more.

    N, D, flops: (n,).
    """
    each = _floats(flops) / _floats(N) / _floats(D)
    return float(np.median(each[_floats(D) / np.max(D) >= 0.5]))


def allocate(law: Law, flops: ArrayLike, cost: float) -> tuple[Any, Any]:
    """N and D of the least loss whose compute is `flops` = cost N D.

    There alpha A / N^alpha = beta B / D^beta. flops broadcasts. A ValueError for a law with one
    term alone, which has no such pair.
    """
    if not (law.A and law.B and law.alpha and law.beta):
        wanted = "a law with a term of size and one of data"
        raise ValueError(f"allocate: expected {wanted}; more of one of them costs nothing here")
    product = _floats(flops) / cost
    ratio = law.alpha * law.A / law.beta / law.B
    N = (ratio * product**law.beta) ** (1 / (law.alpha + law.beta))
    return N, product / N


def falls(x: ArrayLike, y: ArrayLike, blocks: ArrayLike | None = None) -> float:
    """p of a permutation test that y falls with x, by rank correlation within blocks.

    x, y, blocks: (n,). scipy.stats.permutation_test has no blocks.
    """
    x, y = _floats(x), _floats(y)
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
    N: np.ndarray,
    D: np.ndarray,
    loss: np.ndarray,
    q: np.ndarray | None = None,
    *,
    draws: int = 200,
) -> Json:
    """Test for trends, fit the law, and predict the largest model from the others.

    Arguments as of `fit`.

    Returns:
        p: of the trend with `size` and with `data`. law: with a term for each trend; None without a
        trend. left_out: relative error of the law fitted without the largest model, on its losses;
        None without enough sizes.
    """
    if q is None:
        q = np.ones(len(N))
    p = {"size": falls(N, loss, _blocks(D, q)), "data": falls(D, loss, _blocks(N, q))}
    sizes = np.unique(N)
    size = p["size"] <= CERTAIN and len(sizes) >= 3
    data = p["data"] <= CERTAIN and len(np.unique(D)) >= 3
    if len(N) < 8 or not (size or data):
        return {"p": p, "law": None, "left_out": None}
    law = fit(N, D, loss, q, size=size, data=data, draws=draws)
    left_out = None
    if size and len(sizes) >= 4:
        largest = sizes[-1] == N
        rest = ~largest
        known = fit(N[rest], D[rest], loss[rest], q[rest], size=size, data=data, draws=0)
        missed = known(N[largest], D[largest], q[largest]) / loss[largest] - 1
        left_out = {
            "parameters": float(sizes[-1]),
            "missed": float(missed.mean()),
            "worst": float(missed[abs(missed).argmax()]),
        }
    return {"p": p, "law": law, "left_out": left_out}


def frontier(C: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, list[float] | None]:
    """The runs that no run of less compute beats, and the power law through them.

    Returns:
        (k,) int, and [E, K, gamma] of E + K / C^gamma; None if there are fewer than four such runs,
        or if their compute hardly differs.
    """
    order = np.lexsort((loss, C))
    best = order[loss[order] <= np.minimum.accumulate(loss[order])]
    if len(best) < 4 or np.ptp(np.log(C[best])) < 0.5:
        return best, None
    law = fit(C[best], np.ones(len(best)), loss[best], data=False, draws=0)
    return best, [law.E, law.A, law.alpha]


def intrinsic(C: ArrayLike, score: ArrayLike) -> np.ndarray:
    """Intrinsic performance: the least compute (n,) of any run that scores at least as much.

    C, score: (n,).

    Source: Hilton, Tang and Schulman, Scaling laws for single-agent reinforcement learning, 2023,
    who define it for models that are scaled along the frontier; here of the runs that were made.
    """
    compute = _floats(C)
    order = np.lexsort((compute, -np.asarray(score)))
    least = np.empty_like(compute)
    least[order] = np.minimum.accumulate(compute[order])
    return least


def loose(law: Law) -> list[str]:
    """The exponents that the runs do not determine.

    Their interval reaches the bounds, or is wide, or the term may be missing.
    """
    intervals = law.intervals or {}
    found = []
    for name, bounds in BOUNDS.items():
        low, high = intervals.get(name, (1.0, 1.0))
        undetermined = np.isclose([low, high], bounds, rtol=0.02).any()
        if name in FACTORS:
            least_factor, _ = intervals.get(FACTORS[name], (1.0, 1.0))
            undetermined |= high > WIDE * low or least_factor <= 0
        if undetermined:
            found.append(name)
    return found


def saturate(loss: ArrayLike, score: ArrayLike, *, draws: int = 200) -> Json:
    """Fit a logistic of score against loss, with its 95 % band; without a trend p alone.

    score = low + (high - low) / (1 + exp(steep (loss - middle)))
    """
    x, y = _floats(loss), _floats(score)
    p = falls(x, y)
    if p > CERTAIN or len(x) < 8:
        return {"p": p}
    spread, scale = float(np.ptp(y)), float(np.ptp(x))
    low = [-np.inf, 0, 0, x.min() - scale]
    high = [np.inf, 4 * spread, 100 / scale, x.max() + scale]

    def solve(scores: np.ndarray, start: Sequence[float]) -> OptimizeResult:
        def residuals(parameters: np.ndarray) -> np.ndarray:
            errors: np.ndarray = _logistic(parameters, x) - scores
            return errors / spread

        return least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)

    tried = []
    for steep, share in itertools.product((3, 12), (0.25, 0.5, 0.75)):
        tried.append(solve(y, [y.min(), spread, steep / scale, np.quantile(x, share)]))
    found = min(tried, key=lambda result: result.cost).x

    # bootstrap of the residuals
    rng = np.random.default_rng(0)
    fitted = _logistic(found, x)
    at = np.linspace(x.min(), x.max(), 60)
    curves = []
    for _ in range(draws):
        drawn = solve(fitted + rng.choice(y - fitted, len(x)), found)
        curves.append(_logistic(drawn.x, at))
    return {
        "p": p,
        "low": found[0],
        "high": found[0] + found[1],
        "steep": found[2],
        "middle": found[3],
        "at": at.tolist(),
        "curve": _logistic(found, at).tolist(),
        "band": np.percentile(curves, [2.5, 97.5], axis=0).tolist(),
    }


def _logistic(parameters: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """The scores at losses (n,) of a logistic with low, high - low, steep, middle."""
    low, spread, steep, middle = parameters
    return np.asarray(low + spread * expit(-steep * (loss - middle)))


def _fit(runs: np.ndarray, names: list[str], starts: Sequence[Sequence[float]]) -> Law:
    """The law of runs (4, n): N, D, q, loss.

    Descends over the exponents `names` from the best of the starts.
    """
    n, d, r, logs = np.log(runs)
    # the columns of the linear factors are 1 there, so that they are alike in size
    middle = {"alpha": n.mean(), "beta": d.mean()}

    def project(exponents: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """The best factors for these exponents, and the log residuals."""
        at = dict(zip(names, _floats(exponents), strict=True))
        columns = [np.ones_like(n)]
        if "alpha" in at:
            columns.append(np.exp(-at["alpha"] * (n - middle["alpha"])))
        if "beta" in at:
            data = d + at.get("gamma", 0) * r
            columns.append(np.exp(-at["beta"] * (data - middle["beta"])))
        table = np.stack(columns, 1)  # (n, k)
        factors = _factors(table, logs)
        return factors, np.log(table @ factors) - logs

    def residuals(exponents: ArrayLike) -> np.ndarray:
        return project(exponents)[1]

    low, high = zip(*(BOUNDS[name] for name in names), strict=True)
    best = min(starts, key=lambda exponents: huber(HUBER, residuals(exponents)).sum())
    start = np.clip(best, np.add(low, 1e-6), np.subtract(high, 1e-6))
    found = least_squares(residuals, start, bounds=(low, high), loss="huber", f_scale=HUBER).x
    values = dict(zip(names, found.tolist(), strict=True))
    E, *factors = project(found)[0].tolist()
    for exponent, mean in middle.items():
        if exponent in values:
            scale = float(np.exp(values[exponent] * mean))
            values[FACTORS[exponent]] = factors.pop(0) * scale
    return Law(E=E, **values)


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
    shown = ["E"]
    for name in names:
        if name in FACTORS:
            shown.append(FACTORS[name])
        shown.append(name)
    found = {}
    for name in shown if draws else []:
        low, high = np.percentile([vars(draw)[name] for draw in draws], [2.5, 97.5]).tolist()
        found[name] = (low, high)
    return found


def _blocks(*columns: np.ndarray) -> np.ndarray:
    """(n,) one number for each distinct row of these columns."""
    rows = np.stack(columns, 1)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _floats(numbers: ArrayLike) -> np.ndarray:
    return np.asarray(numbers, np.float64)
