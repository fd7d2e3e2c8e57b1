"""Checks of a policy in simple_spread: more agents than in training, a crash, the target return,
and cloning for comparison.

`python -m lab.multiagent runs/spread/returns-* --cloning runs/spread/cloning-*` rolls the
runs out, appends the rows to multiagent.jsonl and prints one line a check. It takes minutes for
each run.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.commands.evaluate import evaluate

ROWS = Path(__file__).parent / "rows" / "multiagent.jsonl"
CRASHES = (0, 2, 4, 8)
EVALUATION = {"baselines": False, "report": False}
Row = dict[str, Any]
Verdicts = dict[str, tuple[bool, str]]  # {check: (met, words)}


def rows(runs: list[Path], out: Path, *, episodes: int, **options: Any) -> list[Row]:
    """Evaluate runs in a folder of their own, append the rows to `out` and return them."""
    folder = out.with_suffix("") / str(len(list(out.with_suffix("").glob("*"))))
    path = evaluate(runs, out=folder, episodes=episodes, **(EVALUATION | options))
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)
    return found


def score(found: list[Row], protocol: str, **same: Any) -> float:
    """The mean score of the rows of a protocol, over runs."""
    kept = [
        r["score"]
        for r in found
        if r["protocol"] == protocol and all(r[key] == value for key, value in same.items())
    ]
    if not kept:
        raise ValueError(
            f"expected rows of {protocol}, got those of {sorted({r['protocol'] for r in found})}"
        )
    return float(np.mean(kept))


def verdicts(
    plain: list[Row], crashed: list[Row], targeted: dict[str, list[Row]], cloned: list[Row]
) -> Verdicts:
    """The checks by their rows. targeted: {quality whose return is the target: its rows}."""
    numbers = {n: score(plain, f"per agent, {n} agents") for n in range(2, 7)}
    least = min(numbers[n] / numbers[3] for n in (2, 4, 5))
    found = {
        "MA-10": (
            least >= 0.85,
            "by agents: " + ", ".join(f"{n}: {s:.1f}" for n, s in numbers.items()),
        )
    }
    ours, teacher = (
        [score(part, f"per agent, crash at {c}") for c in CRASHES]
        for part in (
            [r for r in crashed if "run" in r],
            [r for r in crashed if r["policy"] == "expert"],
        )
    )
    words = ", ".join(
        f"at {c}: {o:.1f} of {t:.1f}" for c, o, t in zip(CRASHES, ours, teacher, strict=True)
    )
    found["MA-11"] = (
        min(o / t for o, t in zip(ours, teacher, strict=True)) >= 0.85,
        f"crash {words}",
    )
    handle = {quality: score(part, "per agent") for quality, part in targeted.items()}
    found["MA-12"] = (
        list(handle.values()) == sorted(handle.values())
        and handle["expert"] > handle["random"] + 20,
        "target: " + ", ".join(f"{quality}: {s:.1f}" for quality, s in handle.items()),
    )
    gain = numbers[3] - score(cloned, "per agent")
    found["MA-13"] = (gain >= 20, f"{numbers[3]:.1f} against {numbers[3] - gain:.1f} of cloning")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.multiagent", description=sys.modules[__name__].__doc__
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--cloning", nargs="+", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    roll = partial(rows, out=arguments.out, episodes=arguments.episodes)
    plain = roll(arguments.runs, env={"agents": "2-6"})
    crashed = roll(arguments.runs, env={"crash": ",".join(map(str, CRASHES))}, baselines=True)
    own = {
        r["policy"]: r["return"]
        for r in crashed
        if r["protocol"] == "per agent" and r["policy"] in ("random", "medium", "expert")
    }
    wanted = {quality: own[quality] for quality in ("random", "medium", "expert")}
    found = roll(arguments.runs, target_returns=list(wanted.values()))
    targeted = {
        quality: [r for r in found if r["target_return"] == target]
        for quality, target in wanted.items()
    }
    for check, (met, words) in verdicts(plain, crashed, targeted, roll(arguments.cloning)).items():
        print(f"{check}  {'yes' if met else 'NO '}  {words}")


if __name__ == "__main__":
    main()
