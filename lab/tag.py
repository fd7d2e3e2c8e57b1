"""simple_tag: win rates of one checkpoint in both roles, of a clone for each role, and of scripted
players, against each other.

`python -m lab.tag` records the log and trains the runs that are not there (10 minutes of a
core), appends a row a pairing to multiagent.jsonl and prints them. The chasers win an episode if
they touch the prey; all pairings start from the same seeds.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.eval.intervals import over_episodes
from decisionllm.eval.rollout import ScriptedPlayer, rollout
from decisionllm.policy import loading
from decisionllm.protocols import Player
from decisionllm.registry import build
from decisionllm.runs import directory
from decisionllm.teams.dataset import collect, write
from decisionllm.teams.pettingzoo.env import PettingZooTeams
from decisionllm.teams.spread import tag
from lab.multiagent import ROWS, Row

SCRIPTED: dict[str, Callable[..., Any]] = {"chasers": tag.chase, "prey": tag.flee}
# role -> the other one, and its type
OTHER = {"chasers": ("prey", "agent"), "prey": ("chasers", "adversary")}
FILES = {"checkpoint": "both", "clone": "clone-{}"}  # runs of each player
SWAPPED = "other text"  # the checkpoint with the task text of the other role
PLAYERS = ("scripted", "clone", "checkpoint")
# chasers, prey
PAIRINGS = (
    *product(PLAYERS, PLAYERS),
    (SWAPPED, "scripted"),
    ("random", "scripted"),
    ("scripted", SWAPPED),
)
FOLDER = Path("runs/tag")  # of the log and the runs, as in configs/experiment/tag.yaml
TOUCH = 10  # reward of a touch


def record(folder: Path, groups: int) -> None:
    """Write a log of both roles, each with a tenth or six tenths of random actions."""
    from mpe2 import simple_tag_v3

    act = tag.teachers(np.random.default_rng(0))
    write(
        folder, collect(simple_tag_v3.parallel_env(max_cycles=25), act, episodes=groups, **tag.META)
    )


def train(seed: int) -> dict[str, dict[str, Path]]:
    """{player: {role: run}}, trained where they are not there.

    Each role is seen equally often by the checkpoint and by its clone.
    """
    clone = ("name=clone", "model.condition_on=none", "steps=1250")
    words = {
        "both": (),
        "clone-chasers": (*clone, "~dataset.parts.prey"),
        "clone-prey": (*clone, "~dataset.parts.chasers"),
    }
    for name, more in words.items():
        if not (run := FOLDER / f"{name}-{seed}").exists():
            arguments = ("experiment=tag", f"run={run}", f"seed={seed}", "device=cpu", *more)
            subprocess.run([sys.executable, "-m", "decisionllm", "train", *arguments], check=True)
    runs = {
        name: {role: FOLDER / f"{file}-{seed}".format(role) for role in OTHER}
        for name, file in FILES.items()
    }
    return runs | {SWAPPED: runs["checkpoint"]}


def play(
    player: Path | str,
    role: str,
    partner: Path | str,
    node: dict[str, Any],
    *,
    episodes: int,
    text: str = "",
) -> dict[str, np.ndarray]:
    """Return the outcome of each episode, (E,) by name.

    Args:
        player, partner: of the role and of the other one: a run, `scripted` or `random`.
        node: config of the environment of the role.
        text: in place of the task text.
    """
    other, kind = OTHER[role]
    named = (
        f"{SCRIPTED[other].__module__}.{SCRIPTED[other].__name__}"
        if partner == "scripted"
        else str(partner)
    )
    env: PettingZooTeams = build(node | {"partners": {kind: named}}, episodes)

    def scripted(observations: np.ndarray, rows: np.ndarray) -> np.ndarray:
        seats = [env.rows[row] for row in rows]
        return np.array(
            [[SCRIPTED[role]({agent: env.views[w][0][agent]}, {})[agent]] for w, agent in seats]
        )

    def begin(tasks: Sequence[str]) -> Player:
        if isinstance(player, Path):
            policy = loading.load(player, part=role)
            made: Player = policy.begin(
                [text or task for task in tasks], env.horizon, groups=env.groups
            )
            return made
        return (
            ScriptedPlayer(scripted, tasks)
            if player == "scripted"
            else env.baselines(0)["random"](tasks)
        )

    rollout(begin, env, seed=0)
    return env.world_outcomes()


def row(chasers: str, prey: str, outcome: Mapping[str, np.ndarray]) -> Row:
    """The result row of a pairing."""
    won = 100.0 * (outcome["return_0"] > 0)
    captures = outcome["return_0"] / TOUCH
    low, high = over_episodes(won)
    least, most = over_episodes(captures)
    return {
        "dataset": "simple_tag",
        "policy": chasers,
        "protocol": f"chasers against {prey} prey",
        "n": len(won),
        "won": won.mean(),
        "low": low,
        "high": high,
        "captures": captures.mean(),
        "captures_low": least,
        "captures_high": most,
        "return_chasers": outcome["return_0"].mean(),
        "return_prey": outcome["return_1"].mean(),
        "env_seed": 0,
        "versions": directory.versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.tag", description=sys.modules[__name__].__doc__
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    if not (FOLDER / "log").exists():
        record(FOLDER / "log", groups=2400)
    runs = train(arguments.seed)
    nodes = {
        role: loading.load(runs["checkpoint"][role], part=role).config["env"] for role in OTHER
    }
    texts = {role: build(node, 1).tasks[0] for role, node in nodes.items()}
    won: dict[tuple[str, str], np.ndarray] = {}
    for chasers, prey in PAIRINGS:
        role = "prey" if prey == SWAPPED else "chasers"
        player, partner = (chasers, prey) if role == "chasers" else (prey, chasers)
        text = texts[OTHER[role][0]] if player == SWAPPED else ""
        other = OTHER[role][0]
        seats = [
            runs.get(name, {}).get(at, name) for name, at in ((player, role), (partner, other))
        ]
        outcome = play(
            seats[0], role, seats[1], nodes[role], episodes=arguments.episodes, text=text
        )
        made = row(chasers, prey, outcome) | {"seed": arguments.seed}
        won[chasers, prey] = 100.0 * (outcome["return_0"] > 0)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(made) + "\n")
        print(
            "{policy:10s} {protocol:31s} won {won:5.1f} % [{low:.1f}, {high:.1f}], captures "
            "{captures:.2f} [{captures_low:.2f}, {captures_high:.2f}], "
            "returns {return_chasers:.1f} and {return_prey:.1f}".format(**made),
            flush=True,
        )
    ours = won["checkpoint", "scripted"]
    clones = won["clone", "scripted"]
    for role, gain in (
        ("chasers", ours - clones),
        ("prey", won["scripted", "clone"] - won["scripted", "checkpoint"]),
    ):
        low, high = over_episodes(gain)
        print(
            f"the checkpoint as {role} wins {gain.mean():.1f} points more than the clone does, "
            f"against scripted ones [{low:.1f}, {high:.1f}]"
        )


if __name__ == "__main__":
    main()
