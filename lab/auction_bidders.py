"""Bidders on several sets of days, beside OnlineLP with the pooled table of the same training days,
campaign by campaign.

`python -m lab.auction_bidders runs/auction/nano-* --replay data/logged:7-8
data/later:200-203 --market 9` replays the days of each folder with five budgets, seats each run at
all 48 positions of the answering market, and appends a row for each of them to auction.jsonl. It
prints the mean over the runs, and by how much it exceeds the pooled OnlineLP, with the 95 %
interval over campaigns, and appends that too. It takes minutes for each run and set.
"""

import argparse
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.eval.intervals import over_episodes
from decisionllm.eval.rollout import rollout
from decisionllm.policy import loading
from decisionllm.protocols import Begin
from decisionllm.registry import build
from decisionllm.runs import directory
from decisionllm.schema import Report
from lab.played import append, replay_options

ROWS = Path(__file__).parent / "rows" / "auction.jsonl"
BUDGETS = "0.5,0.75,1,1.25,1.5"  # shares of the published ones
POOLED = "OnlineLP, pooled"
IN_MARKET = (POOLED, "OnlineLP")  # where an episode of each takes a market of 48
SLOW = "AuctionNet DT"  # minutes a set; its scores are in docs/results.md


def compare(runs: list[Path], out: Path, **options: Any) -> dict[str, tuple[float, ...]]:
    """Roll runs and baselines out in one set of days, append their rows.

    Args:
        runs: of one name, trained on the days of one folder.
        out: rows are appended to it.
        options: of the env.

    Returns:
        For each condition the runs' mean score, and its mean difference to POOLED with the 95 %
        interval over campaigns. These are rows, too.
    """
    loaded = [(run, loading.load(run)) for run in runs]
    config, info = loaded[0][1].config, loaded[0][1].info
    env = build(config["env"] | options, 1)
    versions = directory.versions()
    scores: dict[str, list[np.ndarray]] = defaultdict(list)

    def play(name: str, begin: Begin, seed: int, run: dict[str, Any]) -> None:
        began = time.monotonic()
        episodes = rollout(begin, env, seed=0)
        seconds = round(time.monotonic() - began, 2)
        scores[name].append(env.score(episodes))
        for protocol, members in env.conditions("per_agent", not run).items():
            part = [episodes[i] for i in members]
            found = env.score(part)
            low, high = over_episodes(found, env.clusters[members])
            row = Report(
                world=env.name,
                dataset=info["dataset"]["name"],
                policy=name,
                protocol=protocol,
                text=env.text if run else "none",
                seed=seed,
                target_return=None,
                headline=True,
                n=len(part),
                score=float(found.mean()),
                low=low,
                high=high,
                seconds=seconds,
                mean_return=float(np.mean([e.rewards.sum() for e in part])),
                extra={"env_seed": 0, "versions": versions} | run | env.metrics(part),
            )
            append(out, row.row())

    in_market = options.get("protocol") == "market"
    for name, begin in env.baselines(0).items():
        if name in IN_MARKET or (name != SLOW and not in_market):
            play(name, begin, 0, {})
    for run, policy in loaded:
        begin = partial(policy.begin, horizon=env.horizon)
        source = {"run": str(run), "fingerprint": policy.info["fingerprint"]}
        play(policy.config["name"], begin, policy.config["seed"], source)
    mean = np.mean(scores[config["name"]], 0)
    (pooled,) = scores[POOLED]
    compared = {}
    for protocol, members in env.conditions("per_agent", False).items():
        apart = (mean - pooled)[members]
        score = float(mean[members].mean())
        low, high = over_episodes(apart, env.clusters[members])
        compared[protocol] = score, float(apart.mean()), low, high
        difference = {
            "dataset": info["dataset"]["name"],
            "policy": config["name"],
            "protocol": f"{protocol}, above {POOLED}",
            "runs": [str(run) for run in runs],
            "n": len(members),
            "campaigns": len(np.unique(env.clusters[members])),
            "apart": float(apart.mean()),
            "low": low,
            "high": high,
            "versions": versions,
        }
        append(out, difference)
    return compared


def main() -> None:
    program = "python -m lab.auction_bidders"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    several: dict[str, Any] = {"nargs": "*", "default": []}
    replayed = "days to replay"
    played = "periods of the answering market"
    parser.add_argument("--replay", **several, metavar="FOLDER:PERIODS", help=replayed)
    parser.add_argument("--market", **several, metavar="PERIODS", help=played)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    replay = {"budgets": BUDGETS, "repeats": arguments.repeats}
    market = {"path": "", "protocol": "market", "positions": "all", "draws": "expected"}
    sets = [replay | replay_options(days) for days in arguments.replay]
    sets += [market | {"periods": periods} for periods in arguments.market]
    for options in sets:
        for protocol, numbers in compare(arguments.runs, arguments.out, **options).items():
            score, above, low, high = numbers
            difference = f"{above:+.2f} [{low:+.2f}, {high:+.2f}] above {POOLED}"
            print(f"{protocol}: {score:.1f}, {difference}", flush=True)


if __name__ == "__main__":
    main()
