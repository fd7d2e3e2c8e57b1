"""What a policy of teams must show in simple_spread: more agents than it was trained with, a crash, a handle, more than cloning.

`python -m benchmarks.multiagent runs/spread/nano-* --cloning runs/spread/cloning-*` rolls the runs out, appends the rows to
multiagent.jsonl and prints one line a check. Minutes for each run, so that it is no test.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from decisionllm.evaluate import evaluate

ROWS = Path(__file__).parent / "multiagent.jsonl"
CRASHES = (0, 2, 4, 8)
EVALUATION = {"seed": 0, "sweep": [], "targets": [], "baselines": False, "report": False, "env": {}, "device": "cpu", "stride": None,
              "decode": None, "planning_horizon": None, "execution": None, "order": None}  # fmt: skip


def rows(runs, out, *, episodes, **options):
    """Evaluate runs into a file of their own: the rows."""
    folder = out.with_suffix("") / str(len(list(out.with_suffix("").glob("*"))))
    path = evaluate(EVALUATION | {"run": [str(run) for run in runs], "out": str(folder), "episodes": episodes} | options)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)
    return found


def score(found, protocol, **same):
    """The mean score of the rows of a protocol, over runs."""
    kept = [r["score"] for r in found if r["protocol"] == protocol and all(r[key] == value for key, value in same.items())]
    if not kept:
        raise ValueError(f"expected rows of {protocol}, got those of {sorted({r['protocol'] for r in found})}")
    return float(np.mean(kept))


def verdicts(plain, crashed, asked, cloned):
    """What the rows say: {check: (met, words)}. asked: {quality of the return asked for: its rows}."""
    named = lambda n: f"per agent, {n} agents"  # noqa: E731
    numbers = {n: score(plain, named(n)) for n in range(2, 7)}
    least = min(numbers[n] / numbers[3] for n in (2, 4, 5))
    found = {"MA-10": (least >= 0.85, "by agents: " + ", ".join(f"{n}: {s:.1f}" for n, s in numbers.items()))}
    ours, teacher = (
        [score(part, f"per agent, crash at {c}") for c in CRASHES]
        for part in ([r for r in crashed if "run" in r], [r for r in crashed if r["policy"] == "expert"])
    )
    words = ", ".join(f"at {c}: {o:.1f} of {t:.1f}" for c, o, t in zip(CRASHES, ours, teacher, strict=True))
    found["MA-11"] = (min(o / t for o, t in zip(ours, teacher, strict=True)) >= 0.85, f"crash {words}")
    handle = {quality: score(part, "per agent") for quality, part in asked.items()}
    found["MA-12"] = (
        list(handle.values()) == sorted(handle.values()) and handle["expert"] > handle["random"] + 20,
        "asked for: " + ", ".join(f"{quality}: {s:.1f}" for quality, s in handle.items()),
    )
    gain = numbers[3] - score(cloned, "per agent")
    found["MA-13"] = (gain >= 20, f"{numbers[3]:.1f} against {numbers[3] - gain:.1f} of cloning")
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multiagent", description=sys.modules[__name__].__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--cloning", nargs="+", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--out", type=Path, default=ROWS)
    given = parser.parse_args()
    roll = lambda runs, **options: rows(runs, given.out, episodes=given.episodes, **options)  # noqa: E731
    plain = roll(given.runs, env={"agents": "2-6"})
    crashed = roll(given.runs, env={"crash": ",".join(map(str, CRASHES))}, baselines=True)
    own = {
        r["policy"]: r["return"]
        for r in crashed
        if r["protocol"] == "per agent" and r["policy"] in ("random", "medium", "expert")
    }
    wanted = {quality: own[quality] for quality in ("random", "medium", "expert")}
    told = roll(given.runs, targets=list(wanted.values()))
    asked = {quality: [r for r in told if r["target_return"] == target] for quality, target in wanted.items()}
    for check, (met, words) in verdicts(plain, crashed, asked, roll(given.cloning)).items():
        print(f"{check}  {'yes' if met else 'NO '}  {words}")


if __name__ == "__main__":
    main()
