"""The four logs of OMAR's simple_spread, made again by its protocol (arXiv 2111.11188), in its own
format.

`python -m lab.omar data/omar [--seed 0]` trains MATD3 in the world of `env.rules=omar` and
writes the folders random, medium-replay, medium and expert: uniform play; all that was played until
the policy reached the return of the published medium log; that policy; and the last one.
`meta.json` beside them describes the observation. About ten minutes of a core. Then, for each log
and way to learn,

    decisionllm train experiment=omar dataset.path=data/omar/medium-replay
    decisionllm evaluate run=runs/omar/nano-0 episodes=400
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import nn

from decisionllm.teams.spread.dataset import TASK, describe
from decisionllm.teams.spread.env import OMAR
from decisionllm.teams.spread.world import HORIZON, Spread
from decisionllm.teams.td3 import BATCH, NOISE, TeamTD3

AGENTS, SIZE = 3, 18  # numbers of an observation
MEDIUM = 273.4  # mean return of the published medium log
# seeds of worlds; those of an evaluation are below a million
TRAIN_STARTS, LOG_STARTS = 50_000_000, 80_000_000


def play(
    actor: nn.Module | None, starts: np.ndarray, rng: np.random.Generator, noise: float
) -> dict[str, np.ndarray]:
    """Columns (T, E, N, ...) of whole episodes in worlds with these seeds; without an actor uniform
    play.
    """
    world = Spread(starts, AGENTS, "omar")
    seen = []
    actions = []
    rewards = []
    for _ in range(HORIZON):
        seen.append(world.observe().reshape(len(starts), AGENTS, SIZE))
        if actor is None:
            chosen = rng.uniform(-1, 1, (len(starts), AGENTS, 2))
        else:
            with torch.no_grad():
                chosen = actor(torch.from_numpy(seen[-1])).tanh().numpy()
            chosen = (chosen + noise * rng.normal(size=chosen.shape)).clip(-1, 1)
        actions.append(chosen.astype(np.float32))
        rewards.append(world.step(actions[-1]).astype(np.float32))
    observed = np.stack([*seen, world.observe().reshape(seen[0].shape)])
    return {
        "obs": observed[:-1],
        "acs": np.stack(actions),
        "rews": np.stack(rewards),
        "next_obs": observed[1:],
    }


def mean_return(columns: dict[str, np.ndarray]) -> float:
    """Return the mean return of an agent."""
    return float(columns["rews"].sum(0).mean())


def save(folder: Path, columns: dict[str, np.ndarray]) -> None:
    """Write columns (T, E, N, ...) as OMAR's files, one an agent and column, episode after
    episode.
    """
    folder.mkdir(parents=True)
    for name, column in columns.items():
        for i in range(AGENTS):
            np.save(
                folder / f"{name}_{i}.npy",
                column[:, :, i].swapaxes(0, 1).reshape(-1, *column.shape[3:]),
            )
    over = np.zeros(columns["rews"].shape[:2], bool)
    over[-1] = True
    for i in range(AGENTS):
        np.save(folder / f"dones_{i}.npy", over.T.ravel())
    print(f"{folder}: {over.size:,} steps, mean return {mean_return(columns):.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.omar", description=sys.modules[__name__].__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=1200, help="of one episode in each of --worlds worlds"
    )
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument(
        "--episodes",
        type=int,
        default=10_000,
        help="of the logs random, medium and expert; 40,000 were published",
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    types = describe([AGENTS], "continuous")["types"]
    described = {"task": TASK, "horizon": HORIZON, "returns": "team", "plane": True, "types": types}
    (arguments.folder / "meta.json").write_text(json.dumps(described, indent=1), encoding="utf-8")

    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    learner = TeamTD3(AGENTS, SIZE, 2)
    medium = False
    first = LOG_STARTS + 1_000_000 * arguments.seed
    starts = np.arange(first, first + arguments.episodes)
    save(arguments.folder / "random", play(None, starts, rng, 0))
    tests = TRAIN_STARTS - 1 - np.arange(200)
    memory: dict[str, np.ndarray] = {}
    for turn in track(range(arguments.rounds), "MATD3"):
        these = arguments.worlds * turn + np.arange(arguments.worlds)
        played = play(
            learner.actor if turn >= 20 else None,
            TRAIN_STARTS + 1_000_000 * arguments.seed + these,
            rng,
            NOISE,
        )
        for name, x in played.items():
            size = (HORIZON, arguments.rounds * arguments.worlds, *x.shape[2:])
            memory.setdefault(name, np.zeros(size, np.float32))[:, these] = x
        for k in range(HORIZON if turn >= 20 else 0):
            t = rng.integers(HORIZON, size=BATCH)
            e = rng.integers(these[-1] + 1, size=BATCH)
            learner.update(*(torch.from_numpy(x[t, e]) for x in memory.values()), actor=k % 2 == 1)
        if turn % 20 == 0:
            found = mean_return(play(learner.actor, tests, rng, 0))
            print(
                f"round {turn}: {found:.1f}, score "
                f"{100 * (found - OMAR[0]) / (OMAR[1] - OMAR[0]):.1f}",
                flush=True,
            )
            if not medium and found >= MEDIUM:
                medium = True
                whole = {name: x[:, : these[-1] + 1] for name, x in memory.items()}
                save(arguments.folder / "medium-replay", whole)
                save(arguments.folder / "medium", play(learner.actor, starts, rng, NOISE))
    save(arguments.folder / "expert", play(learner.actor, starts, rng, NOISE))


if __name__ == "__main__":
    main()
