"""The worth of words to a bidder: each campaign given its own text and that of another advertiser,
campaign by campaign.

`python -m lab.auction_words runs/auction/words-* --days data/later:200-203` replays the days
with half, all and one and a half of the budgets, in trained and in held-out wordings, and appends a
row for each budget to auction_words.jsonl: the mean scores over the runs, and by how much own words
are better, with the 95 % interval over campaigns.
"""

import argparse
from pathlib import Path

from decisionllm.eval.intervals import over_episodes
from decisionllm.runs import directory
from lab.played import append, replay_options, scores_of_runs

ROWS = Path(__file__).parent / "rows" / "auction_words.jsonl"
BUDGETS = "0.5,1,1.5"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.auction_words", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--days", required=True, metavar="FOLDER:PERIODS", help="days to replay")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    options = {**replay_options(arguments.days), "budgets": BUDGETS, "repeats": arguments.repeats}
    versions = directory.versions()
    for wordings in ("trained", "held_out"):
        options["wordings"] = wordings
        by_run, env, name = scores_of_runs(arguments.runs, options)
        own = by_run.mean(0)
        another = scores_of_runs(arguments.runs, options | {"text_of": "another"})[0].mean(0)
        for protocol, members in env.conditions("per_agent", False).items():
            apart = (own - another)[members]
            low, high = over_episodes(apart, env.clusters[members])
            row = {
                "protocol": protocol,
                "policy": name,
                "runs": [str(run) for run in arguments.runs],
                "campaigns": len(members),
                "own_words": float(own[members].mean()),
                "anothers_words": float(another[members].mean()),
                "apart": float(apart.mean()),
                "low": low,
                "high": high,
                "versions": versions,
            }
            append(arguments.out, row)
            words = f"own words {row['own_words']:.1f}, another's {row['anothers_words']:.1f}"
            difference = f"{row['apart']:+.2f} [{low:+.2f}, {high:+.2f}]"
            print(f"{protocol}: {words}, {difference}", flush=True)


if __name__ == "__main__":
    main()
