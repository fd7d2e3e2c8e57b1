"""Scaling laws: loss against parameters, data and its quality, against compute, and score against loss; or that there is no trend.

L(N, D, q) = E + A / N^alpha + B / (D q^gamma)^beta, N in parameters, D in steps of data, q the data's quality, 1 for that of the
whole log. The parametric form, the Huber loss on log residuals and the many starts are those of Hoffmann et al., Training
Compute-Optimal Large Language Models, 2022 (approach 3); the factor of quality is ours.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit

HUBER = 0.02  # log residuals beyond this count less than their square
CERTAIN = 0.01  # a trend is believed if chance shows as much at most so often
BOUNDS = {"E": (-12.0, 6.0), "A": (-12.0, 25.0), "alpha": (0.01, 3.0), "B": (-12.0, 25.0), "beta": (0.01, 3.0), "gamma": (-4.0, 4.0)}  # E, A, B as logs  # fmt: skip
STARTS = {
    "alpha": (0.2, 0.5, 1.0),
    "beta": (0.2, 0.5, 1.0),
    "gamma": (0.0,),
    "E": (0.05, 0.5, 0.95),
}  # E as a share of the least loss


@dataclass(frozen=True)
class Law:
    """A fitted law; what has no trend has no term. intervals: {name: (low, high)}, 95 %; draws: the same law, fitted again."""

    E: float
    A: float = 0.0
    alpha: float = 0.0
    B: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    intervals: dict | None = None
    draws: tuple = ()

    def __call__(self, N, D, q=1.0):
        """The loss that is expected of N parameters on D steps of data of quality q; all broadcast."""
        size = self.A / np.asarray(N, np.float64) ** self.alpha
        return self.E + size + self.B / (np.asarray(D, np.float64) * np.asarray(q, np.float64) ** self.gamma) ** self.beta

    def band(self, N, D, q=1.0):
        """(low, high) of the 95 % bootstrap band there."""
        return np.percentile([draw(N, D, q) for draw in self.draws], [2.5, 97.5], axis=0)

    def row(self):
        """For JSON."""
        return {name: getattr(self, name) for name in BOUNDS} | {"intervals": self.intervals}


def fit(N, D, loss, q=None, *, size=True, data=True, draws=200, seed=0):
    """The law of these runs (n,), each of the two terms only if wanted. loss: > 0. -> Law with bootstrap intervals

    The bootstrap puts the log residuals, drawn anew and inflated by the degrees of freedom, on what was fitted: the design stays.
    """
    N, D, loss = (np.asarray(x, np.float64) for x in (N, D, loss))
    q = np.ones(len(N)) if q is None else np.asarray(q, np.float64)
    names = ["E", *["A", "alpha"] * size, *["B", "beta"] * data, *["gamma"] * bool(data and np.ptp(q) > 1e-6)]
    if not (loss > 0).all():
        raise ValueError(f"loss: expected more than 0, got {loss.min():.4g}: take what is above the head's floor")
    found = min((_descend(names, start, N, D, q, np.log(loss)) for start in _starts(names, N, D, loss)), key=lambda f: f.cost)
    law, rng = _law(names, found.x), np.random.default_rng(seed)
    fitted, drawn = np.log(law(N, D, q)), []
    noise = (np.log(loss) - fitted) * np.sqrt(len(N) / max(len(N) - len(names), 1))
    for _ in range(draws):
        again = fitted + rng.choice(noise, len(N))
        drawn.append(_law(names, _descend(names, found.x, N, D, q, again).x))
    intervals = {name: tuple(np.percentile([getattr(d, name) for d in drawn], [2.5, 97.5]).tolist()) for name in names if drawn}
    return replace(law, intervals=intervals, draws=tuple(drawn))


def falls(x, y, blocks=None, *, seed=0, draws=9999):
    """How often chance alone would show y falling with x as much as it does, by ranks within blocks. (n,), (n,), (n,) -> p"""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    blocks, rng = np.zeros(len(x)) if blocks is None else np.asarray(blocks), np.random.default_rng(seed)
    total, shuffled = 0.0, np.zeros(draws)
    for block in np.unique(blocks):
        a, b = (_ranks(values[blocks == block]) for values in (x, y))
        total += a @ b
        shuffled += rng.permuted(np.tile(b, (draws, 1)), axis=1) @ a
    return float((1 + (shuffled <= total + 1e-9).sum()) / (1 + draws))


def describe(N, D, loss, q=None, *, draws=200):
    """What these runs say: p of each trend, the law with the terms that have one (None if there is none), and how well it predicts
    the largest model from the others. -> {"p": {...}, "law": Law | None, "left_out": {...} | None}"""
    N, D, loss = (np.asarray(x, np.float64) for x in (N, D, loss))
    q = np.ones(len(N)) if q is None else np.asarray(q, np.float64)
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


def frontier(C, loss):
    """The runs that no run of less compute beats, and the power law through them: (which (k,) int, [E, K, gamma] or None).

    L(C) = E + K / C^gamma; fewer than four such runs, or no fall, give None.
    """
    order = np.lexsort((loss, C))
    best = order[np.asarray(loss)[order] <= np.minimum.accumulate(np.asarray(loss)[order])]
    if len(best) < 4 or np.ptp(np.log(np.asarray(C)[best])) < 0.5:
        return best, None
    law = fit(np.asarray(C)[best], np.ones(len(best)), np.asarray(loss)[best], data=False, draws=0)
    return best, [law.E, law.A, law.alpha]


def saturate(loss, score, *, draws=200, seed=0):
    """score = low + (high - low) / (1 + exp(steep (loss - middle))): {"p", "low", "high", "steep", "middle", "band": draws} or p alone."""
    loss, score = np.asarray(loss, np.float64), np.asarray(score, np.float64)
    p = falls(loss, score)
    if p > CERTAIN or len(loss) < 8:
        return {"p": p}
    spread, scale = float(np.ptp(score)), float(np.ptp(loss))

    def curve(x, at):
        return x[0] + x[1] * expit(-x[2] * (at - x[3]))

    def solve(y, starts):
        low, high = [-np.inf, 0, 0, loss.min() - scale], [np.inf, 4 * spread, 100 / scale, loss.max() + scale]
        tried = (least_squares(lambda x: (curve(x, loss) - y) / spread, s, bounds=(low, high), loss="soft_l1", f_scale=0.1) for s in starts)  # fmt: skip
        return min(tried, key=lambda found: found.cost).x

    starts = [[score.min(), spread, steep / scale, np.quantile(loss, at)] for steep in (3, 12) for at in (0.25, 0.5, 0.75)]
    found, rng = solve(score, starts), np.random.default_rng(seed)
    noise, drawn = score - curve(found, loss), []
    for _ in range(draws):
        drawn.append(solve(curve(found, loss) + rng.choice(noise, len(loss)), [found]))
    at = np.linspace(loss.min(), loss.max(), 60)
    band = np.percentile([curve(x, at) for x in drawn], [2.5, 97.5], axis=0) if drawn else np.zeros((2, 60))
    return {
        "p": p, "low": found[0], "high": found[0] + found[1], "steep": found[2], "middle": found[3],
        "at": at.tolist(), "curve": curve(found, at).tolist(), "band": band.tolist(),
    }  # fmt: skip


def _descend(names, start, N, D, q, logs):
    """The optimum from a start: Huber's loss on log residuals, with the exact slopes."""
    at = {name: i for i, name in enumerate(names)}
    n, d, r = np.log(N), np.log(D), np.log(q)

    def terms(x):
        size = np.exp(x[at["A"]] - x[at["alpha"]] * n) if "A" in at else 0 * n
        amount = d + (x[at["gamma"]] * r if "gamma" in at else 0)
        data = np.exp(x[at["B"]] - x[at["beta"]] * amount) if "B" in at else 0 * n
        return np.exp(x[at["E"]]), size, data, amount

    def residuals(x):
        return np.log(sum(terms(x)[:3])) - logs

    def slopes(x):
        rest, size, data, amount = terms(x)
        each = {
            "E": rest + 0 * n, "A": size, "alpha": -n * size, "B": data, "beta": -amount * data,
            "gamma": -x[at["beta"]] * r * data if "gamma" in at else None,
        }  # fmt: skip
        return np.stack([each[name] for name in names], 1) / (rest + size + data)[:, None]

    low, high = zip(*(BOUNDS[name] for name in names), strict=True)
    start = np.clip(start, np.add(low, 1e-6), np.subtract(high, 1e-6))
    return least_squares(residuals, start, slopes, bounds=(low, high), loss="huber", f_scale=HUBER, max_nfev=300, x_scale="jac")


def _starts(names, N, D, loss):
    """Exponents from a grid; the factors share what is above E, at the middle of the data."""
    for alpha, beta, gamma, share in itertools.product(*STARTS.values()):
        above = np.log((np.median(loss) - share * loss.min()) / (("A" in names) + ("B" in names)))
        each = {
            "E": np.log(share * loss.min()), "alpha": alpha, "beta": beta, "gamma": gamma,
            "A": above + alpha * np.median(np.log(N)), "B": above + beta * np.median(np.log(D)),
        }  # fmt: skip
        yield [each[name] for name in names]


def _law(names, x):
    return Law(**{"E": 0.0} | {k: float(np.exp(v) if k in ("E", "A", "B") else v) for k, v in zip(names, x, strict=True)})


def _blocks(*columns):
    """One number for each different row of these columns: (n,)"""
    return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)


def _ranks(values):
    """Ranks, ties at their mean, centred."""
    from scipy.stats import rankdata

    ranks = rankdata(values)
    return ranks - ranks.mean()
