"""Scaling laws: loss against parameters, data and its quality, loss against compute, score against loss; and tests for a trend.

L(N, D, q) = E + A / N^alpha + B / (D q^gamma)^beta, N in parameters, D in steps of data, q the data's quality, 1 for that of the
whole log.

Source: the parametric form, the Huber loss on log residuals and the many starts are those of Hoffmann et al., Training
Compute-Optimal Large Language Models, 2022 (approach 3); the factor of quality is ours.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit
from scipy.stats import rankdata

HUBER = 0.02  # log residuals beyond this count linearly
CERTAIN = 0.01  # p below which a trend is accepted
BOUNDS = {"E": (-12.0, 6.0), "A": (-12.0, 25.0), "alpha": (0.01, 3.0), "B": (-12.0, 25.0), "beta": (0.01, 3.0), "gamma": (-4.0, 4.0)}  # E, A, B as logs  # fmt: skip
STARTS = {"alpha": (0.2, 0.5, 1.0), "beta": (0.2, 0.5, 1.0), "gamma": (0.0,), "E": (0.05, 0.5, 0.95)}  # E: of the least loss


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
        return {name: vars(self)[name] for name in BOUNDS} | {"intervals": self.intervals}


def fit(N: Any, D: Any, loss: Any, q: Any = None, *, size: bool = True, data: bool = True, draws: int = 200) -> Law:
    """Fit the law to n runs.

    The bootstrap adds resampled log residuals, inflated by the degrees of freedom, to the fitted values; N, D and q stay.

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
    names = ["E", *["A", "alpha"] * size, *["B", "beta"] * data, *["gamma"] * bool(data and np.ptp(q) > 1e-6)]
    if not (loss > 0).all():
        raise ValueError(f"loss: expected more than 0, got {loss.min():.4g}: subtract the floor of the head")
    found = min((_descend(names, start, N, D, q, np.log(loss)) for start in _starts(names, N, D, loss)), key=lambda f: f.cost)
    law, rng = _law(names, found.x), np.random.default_rng(0)
    fitted = np.log(law(N, D, q))
    noise = (np.log(loss) - fitted) * np.sqrt(len(N) / max(len(N) - len(names), 1))
    samples = (fitted + rng.choice(noise, len(N)) for _ in range(draws))
    drawn = [_law(names, _descend(names, found.x, N, D, q, sample).x) for sample in samples]
    intervals = {name: tuple(np.percentile([vars(d)[name] for d in drawn], [2.5, 97.5]).tolist()) for name in names if drawn}
    return replace(law, intervals=intervals, draws=tuple(drawn))


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


def _descend(names: list[str], start: Any, N: np.ndarray, D: np.ndarray, q: np.ndarray, logs: np.ndarray) -> Any:
    """The optimum from a start: Huber's loss on log residuals, with exact derivatives."""
    at = {name: i for i, name in enumerate(names)}
    n, d, r = np.log(N), np.log(D), np.log(q)

    def terms(x: np.ndarray) -> tuple[Any, ...]:
        size = np.exp(x[at["A"]] - x[at["alpha"]] * n) if "A" in at else 0 * n
        amount = d + (x[at["gamma"]] * r if "gamma" in at else 0)
        data = np.exp(x[at["B"]] - x[at["beta"]] * amount) if "B" in at else 0 * n
        return np.exp(x[at["E"]]), size, data, amount

    def residuals(x: np.ndarray) -> Any:
        return np.log(sum(terms(x)[:3])) - logs

    def derivatives(x: np.ndarray) -> Any:
        rest, size, data, amount = terms(x)
        each = {"E": rest + 0 * n, "A": size, "alpha": -n * size, "B": data, "beta": -amount * data}
        each |= {"gamma": -x[at["beta"]] * r * data} if "gamma" in at else {}
        return np.stack([each[name] for name in names], 1) / (rest + size + data)[:, None]

    low, high = zip(*(BOUNDS[name] for name in names), strict=True)
    start = np.clip(start, np.add(low, 1e-6), np.subtract(high, 1e-6))
    options: dict[str, Any] = {"loss": "huber", "f_scale": HUBER, "max_nfev": 300, "x_scale": "jac"}
    return least_squares(residuals, start, derivatives, bounds=(low, high), **options)


def _starts(names: list[str], N: np.ndarray, D: np.ndarray, loss: np.ndarray) -> Iterator[list[float]]:
    """Exponents from a grid; the factors share the loss above E, at the median of the data."""
    for alpha, beta, gamma, share in itertools.product(*STARTS.values()):
        above = np.log((np.median(loss) - share * loss.min()) / (("A" in names) + ("B" in names)))
        each = {
            "E": np.log(share * loss.min()), "alpha": alpha, "beta": beta, "gamma": gamma,
            "A": above + alpha * np.median(np.log(N)), "B": above + beta * np.median(np.log(D)),
        }  # fmt: skip
        yield [each[name] for name in names]


def _law(names: list[str], x: np.ndarray) -> Law:
    values: dict[str, Any] = {k: float(np.exp(v) if k in ("E", "A", "B") else v) for k, v in zip(names, x, strict=True)}
    return Law(**values)


def _blocks(*columns: np.ndarray) -> np.ndarray:
    """(n,) one number for each distinct row of these columns."""
    return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)
