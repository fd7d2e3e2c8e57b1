"""Scaling laws: loss against parameters, data and its quality, loss against compute, score against loss; and tests for a trend.

L(N, D, q) = E + A / N^alpha + B / (D q^gamma)^beta, N in parameters, D in steps of data, q the data's quality, 1 for that of the
whole log. For given exponents the law is linear in E, A and B, so that the fit searches over the exponents alone.

Source: the parametric form and the Huber loss on log residuals are those of Hoffmann et al., Training Compute-Optimal Large
Language Models, 2022 (approach 3); the factor of quality is ours. Variable projection: Golub and Pereyra, The Differentiation of
Pseudo-Inverses and Nonlinear Least Squares Problems Whose Variables Separate, 1973; for scaling laws with non-negative factors:
Open Athena, https://github.com/Open-Athena/scaling-law-analysis.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls
from scipy.special import expit, huber
from scipy.stats import rankdata

HUBER = 0.02  # log residuals beyond this count linearly
WIDE = 4.0  # an exponent is not determined if its interval spans this factor
CERTAIN = 0.01  # p below which a trend is accepted
BOUNDS = {"alpha": (0.01, 3.0), "beta": (0.01, 3.0), "gamma": (-4.0, 4.0)}
STARTS = {"alpha": np.geomspace(0.03, 2, 7), "beta": np.geomspace(0.03, 2, 7), "gamma": np.array([-1.0, 0.1, 1.0])}


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

    def __call__(self, N: Any, D: Any, q: Any = 1.0) -> Any:
        """The expected loss of N parameters on D steps of data of quality q; all broadcast."""
        size = self.A / np.asarray(N, np.float64) ** self.alpha
        return self.E + size + self.B / (np.asarray(D, np.float64) * np.asarray(q, np.float64) ** self.gamma) ** self.beta

    def band(self, N: Any, D: Any, q: Any = 1.0) -> np.ndarray:
        """(2, ...) low and high end of the 95 % bootstrap band."""
        return np.asarray(np.percentile([draw(N, D, q) for draw in self.draws], [2.5, 97.5], axis=0))

    def row(self) -> dict[str, Any]:
        """The law as JSON values."""
        return {name: vars(self)[name] for name in ("E", "A", "alpha", "B", "beta", "gamma")} | {"intervals": self.intervals}


def fit(N: Any, D: Any, loss: Any, q: Any = None, *, size: bool = True, data: bool = True, draws: int = 200) -> Law:
    """Fit the law to n runs.

    The bootstrap draws cells (runs of equal N, D and q) and within each as many of its runs, that is of its seeds.

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
    N, D, loss = (np.asarray(x, np.float64) for x in (N, D, loss))
    q = np.ones(len(N)) if q is None else np.asarray(q, np.float64)
    if not (loss > 0).all():
        raise ValueError(f"loss: expected more than 0, got {loss.min():.4g}: subtract the floor of the head")
    names = [*["alpha"] * size, *["beta"] * data, *["gamma"] * bool(data and np.ptp(q) > 1e-6)]
    runs, rng = np.stack([N, D, q, loss]), np.random.default_rng(0)
    law, cells = _fit(runs, names, list(itertools.product(*(STARTS[name] for name in names)))), _blocks(N, D, q)
    members = [np.flatnonzero(cells == cell) for cell in range(cells.max() + 1)]
    drawn = []
    for _ in range(draws):
        chosen = [rng.choice(members[cell], len(members[cell])) for cell in rng.integers(len(members), size=len(members))]
        drawn.append(_fit(runs[:, np.concatenate(chosen)], names, [[vars(law)[name] for name in names]]))
    shown = ["E", *["A", "alpha"] * size, *["B", "beta"] * data, *names[size + data :]]
    intervals = {name: tuple(np.percentile([vars(d)[name] for d in drawn], [2.5, 97.5]).tolist()) for name in shown if drawn}
    return replace(law, intervals=intervals, draws=tuple(drawn))


def cost(N: Any, D: Any, flops: Any) -> float:
    """FLOPs per parameter and step of data: the median of the runs (n,) on at least half of the largest data."""
    each, share = np.asarray(flops, np.float64) / N / D, np.asarray(D) / np.max(D)
    return float(np.median(each[share >= 0.5]))


def allocate(law: Law, flops: Any, cost: float) -> tuple[Any, Any]:
    """N and D of the least loss whose compute is `flops` = cost N D: alpha A / N^alpha = beta B / D^beta there; flops broadcasts.

    A law with one term alone has no such pair: ValueError.
    """
    if not (law.A and law.B and law.alpha and law.beta):
        raise ValueError("allocate: expected a law with a term of size and one of data; more of one of them costs nothing here")
    product = np.asarray(flops, np.float64) / cost
    N = (law.alpha * law.A / law.beta / law.B * product**law.beta) ** (1 / (law.alpha + law.beta))
    return N, product / N


def falls(x: Any, y: Any, blocks: Any = None, *, draws: int = 9999) -> float:
    """p of a permutation test that y falls with x, by rank correlation within blocks. x, y, blocks: (n,).

    scipy.stats.permutation_test has no blocks.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    blocks, rng = np.zeros(len(x)) if blocks is None else np.asarray(blocks), np.random.default_rng(0)
    total, shuffled = 0.0, np.zeros(draws)
    for block in np.unique(blocks):
        a, b = (rankdata(values[blocks == block]) - (1 + (blocks == block).sum()) / 2 for values in (x, y))  # centred ranks
        total += a @ b
        shuffled += rng.permuted(np.tile(b, (draws, 1)), axis=1) @ a
    return float((1 + (shuffled <= total + 1e-9).sum()) / (1 + draws))


def describe(N: np.ndarray, D: np.ndarray, loss: np.ndarray, q: Any = None, *, draws: int = 200) -> dict[str, Any]:
    """Test for trends, fit the law, and predict the largest model from the others. Arguments as of `fit`.

    Returns:
        p: of the trend with `size` and with `data`. law: with a term for each trend; None without a trend. left_out: relative
        error of the law fitted without the largest model, on its losses; None without enough sizes.
    """
    q = np.ones(len(N)) if q is None else q
    p = {"size": falls(N, loss, _blocks(D, q)), "data": falls(D, loss, _blocks(N, q))}
    terms = {name: chance <= CERTAIN and len(np.unique(x)) >= 3 for (name, chance), x in zip(p.items(), (N, D), strict=True)}
    if not any(terms.values()) or len(N) < 8:
        return {"p": p, "law": None, "left_out": None}
    law, largest = fit(N, D, loss, q, **terms, draws=draws), N.max() == N
    left_out = None
    if terms["size"] and len(np.unique(N)) >= 4:
        known = fit(N[~largest], D[~largest], loss[~largest], q[~largest], **terms, draws=0)
        missed = known(N[largest], D[largest], q[largest]) / loss[largest] - 1
        left_out = {"parameters": float(N.max()), "missed": float(missed.mean()), "worst": float(missed[abs(missed).argmax()])}
    return {"p": p, "law": law, "left_out": left_out}


def frontier(C: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, list[float] | None]:
    """The runs that no run of less compute beats, (k,) int, and the power law [E, K, gamma] through them: E + K / C^gamma.

    None instead of the law if there are fewer than four such runs, or if their compute hardly differs.
    """
    order = np.lexsort((loss, C))
    best = order[loss[order] <= np.minimum.accumulate(loss[order])]
    if len(best) < 4 or np.ptp(np.log(C[best])) < 0.5:
        return best, None
    law = fit(C[best], np.ones(len(best)), loss[best], data=False, draws=0)
    return best, [law.E, law.A, law.alpha]


def intrinsic(C: Any, score: Any) -> np.ndarray:
    """Intrinsic performance of n runs: the least compute (n,) of any run that scores at least as much. C, score: (n,).

    Source: Hilton, Tang and Schulman, Scaling laws for single-agent reinforcement learning, 2023, who define it for models that
    are scaled along the frontier; here of the runs that were made.
    """
    C, order = np.asarray(C, np.float64), np.lexsort((C, -np.asarray(score)))
    least: np.ndarray = np.empty_like(C)
    least[order] = np.minimum.accumulate(C[order])
    return least


def loose(law: Law) -> list[str]:
    """The exponents that the runs do not determine: the interval reaches the bounds, or is wide, or the term may be missing."""
    factors = {"alpha": "A", "beta": "B"}
    found = []
    for name, bounds in BOUNDS.items():
        low, high = (law.intervals or {}).get(name, (1.0, 1.0))
        wide = name in factors and (high > WIDE * low or (law.intervals or {}).get(factors[name], (1.0,))[0] <= 0)
        if wide or np.isclose([low, high], bounds, rtol=0.02).any():
            found.append(name)
    return found


def saturate(loss: Any, score: Any, *, draws: int = 200) -> dict[str, Any]:
    """Fit score = low + (high - low) / (1 + exp(steep (loss - middle))), with its 95 % band; without a trend p alone."""
    loss, score = np.asarray(loss, np.float64), np.asarray(score, np.float64)
    p = falls(loss, score)
    if p > CERTAIN or len(loss) < 8:
        return {"p": p}
    spread, scale = float(np.ptp(score)), float(np.ptp(loss))
    low, high = [-np.inf, 0, 0, loss.min() - scale], [np.inf, 4 * spread, 100 / scale, loss.max() + scale]

    def curve(x: Any, at: np.ndarray) -> Any:
        return x[0] + x[1] * expit(-x[2] * (at - x[3]))

    def solve(y: np.ndarray, starts: list[Any]) -> Any:
        options: dict[str, Any] = {"bounds": (low, high), "loss": "soft_l1", "f_scale": 0.1}
        tried = (least_squares(lambda x: (curve(x, loss) - y) / spread, start, **options) for start in starts)
        return min(tried, key=lambda found: found.cost).x

    starts = [[score.min(), spread, steep / scale, np.quantile(loss, at)] for steep in (3, 12) for at in (0.25, 0.5, 0.75)]
    found, rng = solve(score, starts), np.random.default_rng(0)
    fitted, at = curve(found, loss), np.linspace(loss.min(), loss.max(), 60)
    drawn = [solve(fitted + rng.choice(score - fitted, len(loss)), [found]) for _ in range(draws)]
    band = np.percentile([curve(x, at) for x in drawn], [2.5, 97.5], axis=0)
    return {
        "p": p, "low": found[0], "high": found[0] + found[1], "steep": found[2], "middle": found[3],
        "at": at.tolist(), "curve": curve(found, at).tolist(), "band": band.tolist(),
    }  # fmt: skip


def _fit(runs: np.ndarray, names: list[str], starts: list[Any]) -> Law:
    """The law of runs (4, n): N, D, q, loss. Descends over the exponents `names` from the best start."""
    n, d, r, logs = np.log(runs)
    middle = {"alpha": n.mean(), "beta": d.mean()}  # the columns are 1 there, so that they are alike in size
    low, high = zip(*(BOUNDS[name] for name in names), strict=True)

    def project(x: Any) -> tuple[np.ndarray, np.ndarray]:
        at = dict(zip(names, x, strict=True))
        size = [np.exp(-at["alpha"] * (n - middle["alpha"]))] if "alpha" in at else []
        data = [np.exp(-at["beta"] * (d + at.get("gamma", 0) * r - middle["beta"]))] if "beta" in at else []
        columns = np.stack([np.ones_like(n), *size, *data], 1)
        factors = _factors(columns, logs)
        return factors, np.log(columns @ factors) - logs

    def cost(x: Any) -> float:
        return float(huber(HUBER, project(x)[1]).sum())

    start = np.clip(min(starts, key=cost) if len(starts) > 1 else starts[0], np.add(low, 1e-6), np.subtract(high, 1e-6))
    found = least_squares(lambda x: project(x)[1], start, bounds=(low, high), loss="huber", f_scale=HUBER).x
    at = dict(zip(names, found.tolist(), strict=True))
    E, *rest = project(found)[0].tolist()
    A, B = (rest.pop(0) * float(np.exp(at[name] * mean)) if name in at else 0.0 for name, mean in middle.items())
    return Law(E=E, A=A, B=B, **at)


def _factors(columns: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Factors (k,) >= 0 of columns (n, k): the least Huber loss of log(columns @ factors) - logs, by Gauss-Newton steps."""
    factors, fitted = np.zeros(columns.shape[1]), logs
    for _ in range(30):
        error = logs - fitted
        weight = np.sqrt(HUBER / np.maximum(abs(error), HUBER))
        last, factors = factors, nnls(columns * (weight / np.exp(fitted))[:, None], weight * (1 + error))[0]
        if np.allclose(last, factors, rtol=1e-9, atol=0):
            break
        fitted = np.log(columns @ factors)
    return factors


def _blocks(*columns: np.ndarray) -> np.ndarray:
    """(n,) one number for each distinct row of these columns."""
    return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)
