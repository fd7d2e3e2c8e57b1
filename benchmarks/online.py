"""How many days of its own market a bidder must play until it exceeds what it learned offline: paired over days that it never plays.

`python -m benchmarks.online --folder runs/online` plays two scripted bidders for seven days, trains a policy on them, fine-tunes it with
`decisionllm finetune`, scores the run of every round on ten further days and appends a row a round to online.jsonl. The market has fewer
opportunities a day than the one that the log is of (`--moved 0`: as many). Half an hour of one core; the same command continues.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.config import DataOptions, LogOptions, ModelOptions, OptimOptions, TrainConfig, ranges
from decisionllm.datasets.store import write
from decisionllm.envs.auction.observation import ObservationSpec
from decisionllm.eval.report import interval
from decisionllm.eval.rollout import rollout
from decisionllm.finetune import append, finetune, play
from decisionllm.policy import checkpoint
from decisionllm.protocols import Source
from decisionllm.registry import build, choice
from decisionllm.schema import Spec
from decisionllm.train import train

ROWS = Path(__file__).parent / "online.jsonl"
SPEC = ObservationSpec(observation="minimal", context_features="progress", reward="score")
SIZES = Spec(observation_dim=SPEC.size, action_dim=1, horizon=48, low=(0.0,), high=(300.0,))
PLAYED, GUARD = "9-40", "51-58"  # periods
BIDDERS = ("target CPA", "PID")


def logged(path: Path, market: dict[str, Any], periods: str) -> dict[str, Any]:
    """A data store of days that the scripted bidders played; the few bids above the bound count as it. Returns its config node."""
    if not (path / "card.json").is_file():
        env = build(choice("env", "auction", **SPEC.info(), **market, periods=periods), 1)
        players = env.baselines(0)
        episodes = [e for seed, name in enumerate(BIDDERS) for e in rollout(players[name], env, seed=seed)]
        episodes = [replace(e, actions=np.minimum(e.actions, SIZES.high)) for e in episodes]
        info = {"name": "auction@online-market", "env": "auction", **SPEC.info()}
        append(path, write(path.with_name("first"), Source(SIZES, episodes[:1], info)), episodes[1:], SPEC)
    return choice("dataset", "store", path=str(path))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online", description=sys.modules[__name__].__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/online"))
    parser.add_argument("--opportunities", type=int, default=10_000, help="of a day")
    parser.add_argument("--moved", type=int, default=4000, help="opportunities of a day after the log; 0: as in it")
    parser.add_argument("--positions", type=int, default=48, help="campaigns of a day")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1500, help="of the offline training; a quarter of them a round")
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--days", type=int, default=2, help="played in a round")
    parser.add_argument(
        "--weighting", type=float, default=0.33, help="model.advantage_weighting; 0: the predicted maximum return"
    )
    parser.add_argument("--new-share", type=float, default=0.5, help="of each batch of a round, from episodes that it played")
    parser.add_argument("--seed", type=int, default=0, help="of the training, the played days and the noise")
    parser.add_argument("--logged", default="0-6", help="periods")
    parser.add_argument("--test", default="41-50", help="periods")
    parser.add_argument("--out", type=Path, default=ROWS)
    given = parser.parse_args()
    market = {
        "protocol": "market",
        "opportunities": given.opportunities,
        "positions": ",".join(map(str, range(0, 48, 48 // given.positions))),
    }
    base, began = given.folder / "offline", time.process_time()
    learned: dict[str, Any] = {"max_return_expectile": 0.99}
    if given.weighting:
        learned = {"condition_on": "none", "advantage_weighting": given.weighting}
    config = TrainConfig(
        dataset=logged(given.folder / "logged", market, given.logged), env=choice("env", "auction", **SPEC.info()), run=str(base),
        backbone=choice("backbone", "nano"), head=choice("head", "gaussian"), name="nano", window=1, steps=given.steps, device="cpu", seed=given.seed,
        model=ModelOptions(timesteps="none", embedding="mlp", **learned), data=DataOptions(held_out=0.15),
        optim=OptimOptions(batch_size=256), log=LogOptions(tracker="none"),
    )  # fmt: skip
    train(config)
    market["opportunities"] = given.moved or given.opportunities
    options = {
        "run": str(base),
        "out": str(given.folder / "rounds"),
        "rounds": given.rounds,
        "guard_days": GUARD,
        "days": PLAYED,
        "days_per_round": given.days,
        "train": {"data": {"new_share": given.new_share}},
    }
    finetune(options | {"noise": given.noise, "steps": given.steps // 4, "seed": given.seed, "env": market})
    days, rows = ranges("--test", given.test), []
    offline: np.ndarray = np.zeros(0)
    for row in map(json.loads, (given.folder / "rounds/rounds.jsonl").read_text().splitlines()):
        scores = play(Path(row["run"]), days, {"device": "cpu", "env": market})[0].reshape(len(days), -1).mean(1)
        offline = scores if not row["round"] else offline
        above, losses = scores - offline, checkpoint.read(row["run"])[1].get("resumed", {}).get("held_out_nll")
        low, high = interval(above)
        rows.append({
            "days_played": row["round"] * given.days, "weighting": given.weighting, "new_share": given.new_share, "kept": row["kept"], "score": scores.mean(), "above_offline": above.mean(), "low": low, "high": high,
            "guard": float(np.mean(row["scores"])), "guard_days": GUARD, "held_out_nll": losses, "test_days": given.test, "noise": given.noise,
            "positions": given.positions, "opportunities": market["opportunities"], "logged_opportunities": given.opportunities, "seed": given.seed, "cpu_minutes": round((time.process_time() - began) / 60, 1), "versions": checkpoint.versions(),
        })  # fmt: skip
        print(
            f"{row['round'] * given.days} days: {scores.mean():.2f}, {above.mean():+.2f} [{low:+.2f}, {high:+.2f}] above offline",
            flush=True,
        )
    with given.out.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
