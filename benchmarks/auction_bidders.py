"""Bidders on several sets of days, beside OnlineLP with the pooled table of the same training days, campaign by campaign.

`python -m benchmarks.auction_bidders runs/auction/nano-* --replay data/logged:7-8 data/later:200-203 --market 9` replays the days of each
folder with five budgets, seats each run at all 48 positions of the answering market, appends the rows to auction.jsonl and prints one line
a row: the mean over the runs, and by how much it exceeds the pooled OnlineLP, with the 95 % interval over campaigns. It takes minutes for
each run and set.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.eval.report import interval
from decisionllm.eval.rollout import rollout
from decisionllm.policy import checkpoint
from decisionllm.protocols import Begin
from decisionllm.registry import build
from decisionllm.schema import Report

ROWS = Path(__file__).parent / "auction.jsonl"
POOLED = "OnlineLP, pooled"
IN_MARKET = (POOLED, "OnlineLP")  # where an episode of each takes a market of 48
SLOW = "AuctionNet DT"  # minutes a set; its scores are in docs/results.md


def compare(runs: list[Path], out: Path, **options: Any) -> dict[str, tuple[float, float, float, float]]:
    """Roll runs and baselines out in one set of days, append their rows.

    Args:
        runs: of one name, trained on the days of one folder.
        out: rows are appended to it.
        options: of the env.

    Returns:
        For each condition the runs' mean score, and its mean difference to POOLED with the 95 % interval over campaigns.
    """
    loaded = [(run, *checkpoint.load(run)) for run in runs]
    env = build(loaded[0][2]["env"] | options, 1)
    versions, dataset = checkpoint.versions(), loaded[0][3]["dataset"]["name"]
    scores: dict[str, list[np.ndarray]] = {}

    def play(name: str, begin: Begin, seed: int, extra: dict[str, Any]) -> None:
        began = time.monotonic()
        episodes = rollout(begin, env, seed=0)
        seconds = round(time.monotonic() - began, 2)
        scores.setdefault(name, []).append(env.score(episodes))
        with out.open("a") as file:
            for protocol, members in env.conditions("per_agent", not extra).items():
                part = [episodes[i] for i in members]
                found = env.score(part)
                low, high = interval(found)
                row = Report(
                    dataset=dataset, policy=name, protocol=protocol, text=env.text if extra else "none", seed=seed, target_return=None,
                    headline=True, n=len(part), score=float(found.mean()), low=low, high=high, seconds=seconds,
                    mean_return=float(np.mean([e.rewards.sum() for e in part])),
                    extra={"env_seed": 0, "versions": versions} | extra | env.metrics(part),
                )  # fmt: skip
                file.write(json.dumps(row.row()) + "\n")

    for name, begin in env.baselines(0).items():
        if name in IN_MARKET or options.get("protocol") != "market" and name != SLOW:
            play(name, begin, 0, {})
    for run, policy, config, info in loaded:
        begin = partial(policy.begin, horizon=env.horizon)
        play(config["name"], begin, config["seed"], {"run": str(run), "fingerprint": info["fingerprint"]})
    mean, (pooled,) = np.mean(scores[loaded[0][2]["name"]], 0), scores[POOLED]
    found = {}
    for protocol, members in env.conditions("per_agent", False).items():
        apart = (mean - pooled)[members]
        found[protocol] = (float(mean[members].mean()), float(apart.mean()), *interval(apart))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auction_bidders", description=sys.modules[__name__].__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--replay", nargs="*", default=[], metavar="FOLDER:PERIODS", help="days to replay")
    parser.add_argument("--market", nargs="*", default=[], metavar="PERIODS", help="periods of the answering market")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROWS)
    given = parser.parse_args()
    sets = [
        {"path": path, "periods": periods, "budgets": "0.5,0.75,1,1.25,1.5", "repeats": given.repeats}
        for path, _, periods in (each.rpartition(":") for each in given.replay)
    ]
    sets += [
        {"path": "", "protocol": "market", "periods": periods, "positions": "all", "draws": "expected"}
        for periods in given.market
    ]
    for options in sets:
        for protocol, numbers in compare(given.runs, given.out, **options).items():
            score, above, low, high = numbers
            print(f"{protocol}: {score:.1f}, {above:+.2f} [{low:+.2f}, {high:+.2f}] above {POOLED}", flush=True)


if __name__ == "__main__":
    main()
