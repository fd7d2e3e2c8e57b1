"""The protocol in which AuctionNet's results are published: five budgets, the score with penalty, a
95 % interval over campaigns, beside the rows that others published.

`python -m lab.auctionnet_public runs/auction/public-* --days data/auction-test:14-20` replays
the days with runs of `experiment=auctionnet-public` and with the best constant multiplier in
hindsight, prints the table and appends a row for each policy and budget to auctionnet_public.jsonl.
"""

import argparse
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from decisionllm.bidding.env import Auction
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.eval.intervals import over_episodes
from decisionllm.eval.rollout import rollout
from decisionllm.runs import directory
from lab.played import append, replay_options, scores_of_runs

ROWS = Path(__file__).parent / "rows" / "auctionnet_public.jsonl"
PUBLISHED = Path(__file__).parent / "auctionnet_published.yaml"
BUDGETS = {"50 %": 0.5, "75 %": 0.75, "100 %": 1.0, "125 %": 1.25, "150 %": 1.5}
HINDSIGHT = "best constant, hindsight"


def rows_of(policy: str, scores: np.ndarray, env: Auction, about: dict[str, object]) -> list[dict]:
    """A row for each budget.

    Args:
        policy: its name.
        scores: of each campaign by each run, (runs, N).
        env: whose campaigns they are.
        about: further keys of each row.
    """
    rows = []
    for budget, factor in BUDGETS.items():
        has_budget = np.isclose(env.entries.budget_factor, factor)
        of_budget = scores[:, has_budget]
        low, high = over_episodes(of_budget.mean(0), env.clusters[has_budget])
        row = {
            "policy": policy,
            "budget": budget,
            "score": float(of_budget.mean()),
            "low": low,
            "high": high,
            "by_seed": of_budget.mean(1).round(3).tolist(),
            "campaigns": of_budget.shape[1],
        }
        rows.append(row | about)
    return rows


def table(rows: list[dict]) -> Table:
    """Our rows with their intervals, then those of others."""
    title = "score by share of the budget; published rows are of other days"
    made = Table(title=title, title_justify="left")
    made.add_column("policy", no_wrap=True)
    for budget in BUDGETS:
        made.add_column(budget, justify="right", no_wrap=True)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = {row["budget"]: row for row in rows if row["policy"] == policy}
        shown = []
        for budget in BUDGETS:
            row = cells[budget]
            shown.append(f"{row['score']:.1f} ({row['low']:.1f}..{row['high']:.1f})")
        made.add_row(policy, *shown)
    made.add_section()
    for policy, published in yaml.safe_load(PUBLISHED.read_text(encoding="utf-8")).items():
        found = published["scores"]
        shown = [f"{found[budget]}" if budget in found else "" for budget in BUDGETS]
        made.add_row(f"{policy}, published", *shown)
    return made


def main() -> None:
    program = "python -m lab.auctionnet_public"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--days", required=True, metavar="FOLDER:PERIODS", help="days to replay")
    parser.add_argument("--repeats", type=int, default=5, help="draws of conversions")
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    options = {**replay_options(arguments.days), "repeats": arguments.repeats}
    options["budgets"] = ",".join(f"{factor:g}" for factor in BUDGETS.values())
    scores, env, name = scores_of_runs(arguments.runs, options)
    _, info = directory.read(arguments.runs[0])
    hindsight = rollout(env.baselines(0)[HINDSIGHT], env, seed=0)
    about = {
        "data": info["embodiments"][ONLY]["dataset"]["name"],
        "days": arguments.days,
        "runs": [str(run) for run in arguments.runs],
        "versions": directory.versions(),
    }
    rows = rows_of(name, scores, env, about)
    rows += rows_of(HINDSIGHT, env.score(hindsight)[None], env, about)
    for row in rows:
        append(arguments.out, row)
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
