"""Public isoFLOP tables: the largest budgets predicted from the smaller ones, by our law, the
direct fit and parabolas.

    git clone https://github.com/Open-Athena/scaling-law-analysis
    python -m lab.isoflops scaling-law-analysis/data/isoflops/transform/isoflops.csv

The table is not part of this repository, since its own states no licence. It joins the runs of
Chinchilla (as digitised by Epoch AI and by ml-scalefit), Llama 3, Marin and Misfitting; runs that
its authors mark as outliers are left out. The largest third of the budgets of each experiment is
predicted from the rest. A row appended to isoflops.jsonl holds relative errors, means over the
budgets that are left out: of the losses of their runs; of the least loss and the best N, against
the parabola through their runs.

Source: parabolas and direct fit are approaches 2 and 3 of Hoffmann et al., Training Compute-Optimal
    Large Language Models, 2022.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import huber, logsumexp

from decisionllm.scaling import law

STARTS = list(
    itertools.product(
        (-0.5, 0, 0.5, 1), (0, 5, 10, 15, 20), (0.2, 0.5, 1), (0, 5, 10, 15, 20), (0.2, 0.5, 1)
    )
)
RESULTS = Path(__file__).parent / "rows" / f"{Path(__file__).stem}.jsonl"


def direct(N, D, loss, starts):
    """All five parameters by L-BFGS from many starts: log E, log A, alpha, log B, beta."""
    n, d, logs = np.log(N), np.log(D), np.log(loss)

    def cost(x):
        terms = np.stack([0 * n + x[0], x[1] - x[2] * n, x[3] - x[4] * d])
        total = logsumexp(terms, 0)
        error, shares = total - logs, np.exp(terms - total)
        slope = np.clip(error, -1e-3, 1e-3)
        size, data = slope * shares[1], slope * shares[2]
        gradient = [
            (slope * shares[0]).sum(),
            size.sum(),
            -(n * size).sum(),
            data.sum(),
            -(d * data).sum(),
        ]
        return huber(1e-3, error).sum(), np.array(gradient)

    best = min(
        (minimize(cost, start, jac=True, method="L-BFGS-B") for start in starts),
        key=lambda found: found.fun,
    ).x
    return law.Law(
        E=np.exp(best[0]), A=np.exp(best[1]), alpha=best[2], B=np.exp(best[3]), beta=best[4]
    )


def vertices(runs):
    """(budgets, best N, least loss) of the parabola of loss over log N at each budget; those that
    open downwards are left out.
    """
    found = []
    for budget, part in runs.groupby("budget"):
        a, b, c = np.polyfit(np.log(part["params"]), part["loss"], 2)
        if a > 0:
            found.append((budget, np.exp(-b / 2 / a), c - b * b / 4 / a))
    return np.array(found).T


def predict(runs, starts=STARTS):
    """{method: relative errors} of one experiment, and the budgets that are predicted."""
    # FLOPs per parameter and token
    k = float((runs["budget"] / runs["params"] / runs["tokens"]).median())
    budgets = np.unique(runs["budget"])
    known = runs["budget"] < budgets[-max(len(budgets) // 3, 1)]
    C, N, least = vertices(runs[~known])
    given = vertices(runs[known])
    columns = [runs.loc[known, name].to_numpy() for name in ("params", "tokens", "loss")]
    far = [runs.loc[~known, name].to_numpy() for name in ("params", "tokens", "loss")]
    rows = {}
    for name, fitted in {
        "ours": law.fit(*columns, draws=0),
        "direct": direct(*columns, starts),
    }.items():
        best = np.array([law.allocate(fitted, c, k) for c in C])
        rows[name] = {
            "losses": fitted(*far[:2]) / far[2] - 1,
            "least": fitted(*best.T) / least - 1,
            "N": best[:, 0] / N - 1,
        }
    slope, at = np.polyfit(np.log(given[0]), np.log(given[1]), 1)
    power = law.fit(given[0], np.ones(len(given[0])), given[2], data=False, draws=0)
    rows["parabola"] = {
        "least": power(C, 1) / least - 1,
        "N": np.exp(at + slope * np.log(C)) / N - 1,
    }
    errors = {
        name: {key: float(abs(x).mean()) for key, x in row.items()} for name, row in rows.items()
    }
    return {
        "runs": len(runs),
        "fitted_budgets": int(known.groupby(runs["budget"]).all().sum()),
        "predicted": C.tolist(),
        **errors,
    }


def main():
    parser = argparse.ArgumentParser(
        prog="python -m lab.isoflops", description=__doc__.splitlines()[0]
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    table = pd.read_csv(options.table)
    for experiment, runs in table[~table["outlier"]].groupby("experiment"):
        row = {"experiment": experiment} | predict(runs)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = {
            name: {key: f"{x:.1%}" for key, x in row[name].items()}
            for name in ("ours", "direct", "parabola")
        }
        print(
            experiment,
            row["runs"],
            "runs,",
            len(row["predicted"]),
            "budgets predicted",
            json.dumps(shown),
        )


if __name__ == "__main__":
    main()
