"""The ranks of `decisionllm compare` against true scores: bidders of different skill, or
policies of a maze, judged from a log alone and by the world that made the log.

`python -m lab.compare auction --runs runs/compare` (or `umaze`, or `samples`, where the log is
what a policy drew, with propensities) trains the runs that are missing, makes a
log of other days, estimates each policy from it, plays each in the market, appends a row for each
policy and one with the rank correlations to compare.jsonl, and prints the table. It takes ten
minutes of a core.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from decisionllm.__main__ import run as run_command
from decisionllm.datasets import sampling
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.estimates.compare import build_estimators, estimate_candidates
from decisionllm.estimates.comparison_report import ComparedPolicy
from decisionllm.estimates.logged_episodes import build_logged
from decisionllm.estimates.policy_actions import policy_actions
from decisionllm.eval.intervals import over_episodes
from decisionllm.eval.rollout import ScriptedPlayer, rollout
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Begin, Candidate, Env, Logged
from decisionllm.registry import build, choice
from decisionllm.runs import directory
from lab.played import append

MOST_FAR = 0.2  # share of actions far from the log, of policies that count as near it
Scores = dict[str, np.ndarray]  # of each episode, by policy
ROWS = Path(__file__).parent / "rows" / "compare.jsonl"
CACHE = os.environ.get("DECISIONLLM_HOME", "~/.cache/decisionllm")


@dataclass(frozen=True)
class World:
    """Where policies are trained, judged and played.

    Attributes:
        recipe: words of `train` that all runs share.
        runs: {name: further words}.
        targets: {name: (run, target return)}, policies of a run with another target.
        rules: {name: numbers of an action}, policies that always take it.
        log: name and options of the dataset that policies are judged from, or, if the log is drawn
            by a policy, of the environment where it is.
        envs: {protocol: name and options of an environment}, where they are played; a policy's
            scores are the truth that estimates are compared with.
        episodes: at least so many are played.
        discount: of the estimates.
        estimators: {name: options}.
        drawn_by: the run whose draws are the log; empty: the log is a dataset.
        decode: how policies choose an action, see `act.decode`.
    """

    recipe: Sequence[str]
    runs: dict[str, Sequence[str]]
    rules: dict[str, Sequence[float]]
    log: tuple[str, dict[str, Any]]
    envs: dict[str, tuple[str, dict[str, Any]]]
    episodes: int
    discount: float
    targets: dict[str, tuple[str, float]] = field(default_factory=dict)
    estimators: dict[str, dict[str, Any]] = field(default_factory=lambda: {"fqe": {}, "model": {}})
    drawn_by: str = ""
    decode: str | None = None


OBSERVED = {"observation": "minimal", "context_features": "progress", "reward": "score"}
SMALL = (
    "backbone=nano",
    "backbone.width=64",
    "backbone.layers=2",
    "backbone.inner=128",
    "device=cpu",
    "log.tracker=none",
    "log.every=200",
    "data.held_out=0.0",
    "log.validation_batches=0",
)
CLONE = "model.condition_on=none"
MAX_RETURN = ("objective=max_return", "objective.expectile=0.99")
AUCTION = World(
    recipe=(
        *SMALL,
        "dataset=auction",
        "dataset.periods=0-6",
        *(f"dataset.{key}={value}" for key, value in OBSERVED.items()),
        "head=gaussian",
        "window=1",
        "tokenizer.timesteps=none",
        "tokenizer.embedding=mlp",
        "optim.batch_size=256",
        "steps=400",
    ),
    runs={
        "clone of all": ("dataset.behaviour=constant_bidders", CLONE),
        "clone of the market's bidders": ("dataset.behaviour=reference", CLONE),
        "clone of the best quarter": (
            "dataset.behaviour=constant_bidders",
            CLONE,
            "data.min_return_quantile=0.75",
        ),
        "clone, 20 steps": ("dataset.behaviour=constant_bidders", CLONE, "steps=20"),
        "maximum return": ("dataset.behaviour=constant_bidders", *MAX_RETURN),
        "maximum return, 30 steps": (
            "dataset.behaviour=constant_bidders",
            *MAX_RETURN,
            "steps=30",
        ),
        "return-conditioned": ("dataset.behaviour=constant_bidders",),
    },
    targets={
        "return-conditioned, target 0": ("return-conditioned", 0.0),
        "return-conditioned, target 15": ("return-conditioned", 15.0),
    },
    rules={f"constant {bid}": [bid] for bid in (40, 70, 100, 150)},
    log=("auction", {"periods": "50-69", "behaviour": "constant_bidders", **OBSERVED}),
    envs={
        "replay": (
            "auction",
            {"periods": "80", "draws": "expected", **OBSERVED},
        ),
        "market": (
            "auction",
            {
                "protocol": "market",
                "periods": "80",
                "positions": "4,16,28,40",
                "draws": "expected",
                **OBSERVED,
            },
        ),
    },
    episodes=1,
    discount=1.0,
)
NEXT_REWARDS = "model.return_horizon=100"  # a maze has no end: returns are those of so many steps
UMAZE = World(
    recipe=(
        *SMALL,
        "dataset=maze2d-umaze",
        "dataset.source=regenerate",
        "dataset.cut=run",
        "head=gaussian",
        "window=1",
        "tokenizer.timesteps=none",
        "tokenizer.embedding=mlp",
        "optim.batch_size=256",
        "steps=600",
    ),
    runs={
        "clone of all": (CLONE,),
        "clone, 20 steps": (CLONE, "steps=20"),
        "return-conditioned": (NEXT_REWARDS,),
        "maximum return": (NEXT_REWARDS, *MAX_RETURN),
        "weighted by advantage": (
            NEXT_REWARDS,
            CLONE,
            "objective=advantage",
            "objective.temperature=0.33",
        ),
        "plans to a value": (CLONE, "planner=value", "planner.steps=1000"),
        "plans to a rough value": (CLONE, "planner=value", "planner.steps=100"),
    },
    targets={"return-conditioned, target 0": ("return-conditioned", 0.0)},
    rules={"rests": [0.0, 0.0], "pushes to the goal's corner": [-1.0, -1.0]},
    log=("maze2d-umaze", {"source": "regenerate", "cut": "run", "steps": 100_000, "seed": 1}),
    envs={"maze": ("maze2d-umaze", {})},
    episodes=100,
    discount=0.99,
)
# The rules are left out, since what is certain has no density.
SAMPLES = replace(
    AUCTION,
    rules={},
    log=("auction", {"periods": "50-69", "draws": "expected", **OBSERVED}),
    estimators={"importance": {}, "fqe": {}},
    drawn_by="clone of all",
    decode="sample",
)
WORLDS = {"auction": AUCTION, "umaze": UMAZE, "samples": SAMPLES}


def train(world: World, folder: Path) -> None:
    """Train the runs that are not there."""
    for name, words in world.runs.items():
        path = run_path(folder, name)
        if (path / "checkpoint").is_dir():
            continue
        arguments = [f"run={path}", f"name={path.name}", "seed=0"]
        assert run_command("train", [*world.recipe, *words, *arguments]) == 0, name


def run_path(folder: Path, name: str) -> Path:
    """The run directory of a policy."""
    return folder / name.replace(",", "").replace("'", "").replace(" ", "-")


def policies(world: World, folder: Path, log: Logged) -> list[Candidate]:
    """All policies of a world, with their actions along the log."""
    horizon = int(log.lengths.max())
    found = []
    options = {name: (name, None) for name in world.runs} | world.targets
    for name, (run, target) in options.items():
        policy = loading.load_policy(
            run_path(folder, run), target_return=target, decode=world.decode
        )
        acted = policy_actions(policy, log)
        log_prob = acted.log_prob if world.decode == "sample" else None
        begin = partial(policy.begin, horizon=horizon)
        found.append(Candidate(name, acted.actions, begin, log_prob))
    for name, action in world.rules.items():
        actions = repeated(action, len(log.rewards))
        found.append(Candidate(name, actions, always(action)))
    return found


def repeated(action: Sequence[float], times: int) -> np.ndarray:
    """The same action so often, (times, A)."""
    return np.tile(np.array(action, np.float32), (times, 1))


def always(action: Sequence[float]) -> Begin:
    """A player that takes the same action at every step."""

    def begin(tasks: Sequence[str]) -> ScriptedPlayer:
        return ScriptedPlayer(lambda seen, rows: repeated(action, len(rows)), tasks)

    return begin


def open_log(world: World, folder: Path) -> tuple[str, Logged]:
    """The name of the log that policies are judged from, and the log; half of its groups are held
    out.
    """
    name, options = world.log
    if world.drawn_by:
        policy = loading.load_policy(run_path(folder, world.drawn_by), decode=world.decode)
        log = drawn_log(policy, build(choice("env", name, **options), world.episodes))
        return f"{name}, drawn by {world.drawn_by}", log
    store = prepare_store(choice("dataset", name, **options), CACHE)
    fitting, held_out = sampling.select(store, held_out=0.5)
    return store.info["name"], build_logged(store, fitting, held_out)


def drawn_log(policy: Policy, env: Env) -> Logged:
    """Episodes of a policy that draws its actions, with propensities; every second campaign is held
    out.
    """
    episodes = rollout(partial(policy.begin, horizon=env.horizon), env, seed=0)
    lengths = [len(episode.rewards) for episode in episodes]
    log = Logged(
        spec=policy.spec,
        observations=np.concatenate([episode.observations for episode in episodes]),
        actions=np.concatenate([episode.actions for episode in episodes]),
        rewards=np.concatenate([episode.rewards for episode in episodes]).astype(np.float64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        terminated=np.array([episode.terminated for episode in episodes]),
        held_out=np.array([episode.group % 2 == 1 for episode in episodes]),
        tasks=[episode.task for episode in episodes],
        recorded=np.ones(sum(lengths), bool),
    )
    return replace(log, action_log_prob=policy_actions(policy, log).log_prob)


def correlation(judged: Sequence[ComparedPolicy], scores: Scores, name: str) -> float:
    """Spearman's rank correlation of an estimator's values with mean scores."""
    estimated = [one.estimates[name].value for one in judged]
    wanted = [scores[one.name].mean() for one in judged]
    return round(float(stats.spearmanr(estimated, wanted).statistic), 3)


def table(judged: Sequence[ComparedPolicy], played: dict[str, Scores]) -> Table:
    """Policies, the best by the first protocol first: mean scores, then estimates."""
    first = next(iter(played.values()))
    names = list(judged[0].estimates)
    made = Table(title="scores and estimates", title_justify="left")
    made.add_column("policy")
    for name in (*played, *names, "far"):
        made.add_column(name, justify="right")
    for one in sorted(judged, key=lambda each: -first[each.name].mean()):
        cells = [f"{scores[one.name].mean():.2f}" for scores in played.values()]
        cells += [f"{one.estimates[name].value:.2f}" for name in names]
        made.add_row(one.name, *cells, f"{100 * one.far:.0f} %")
    return made


def play(candidates: Sequence[Candidate], env: Env) -> Scores:
    """The scores of each policy in an environment."""
    return {each.name: env.score(rollout(each.begin, env, seed=0)) for each in candidates}


def row_of(one: ComparedPolicy, played: dict[str, Scores]) -> dict[str, Any]:
    """Return the estimates and the score of a policy, [value, low, high] each."""
    found: dict[str, Any] = {"policy": one.name, "far": round(one.far, 4)}
    for name, estimate in one.estimates.items():
        found[name] = [estimate.value, estimate.low, estimate.high]
    for protocol, scores in played.items():
        each = scores[one.name]
        found[protocol] = [float(each.mean()), *over_episodes(each)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.compare", description=__doc__)
    parser.add_argument("world", choices=list(WORLDS))
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the estimators")
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    world = WORLDS[arguments.world]
    folder = arguments.runs / arguments.world
    console = Console(width=120)
    train(world, folder)
    log_name, log = open_log(world, folder)
    candidates = policies(world, folder, log)
    judged = {}
    for seed in arguments.seeds:
        estimators = build_estimators(world.estimators, log, world.discount, seed)
        judged[seed] = estimate_candidates(candidates, log, estimators, seed=seed)
        for one in judged[seed]:
            console.print(f"seed {seed}: {row_of(one, {})}")
    played = {}
    for protocol, (name, options) in world.envs.items():
        env = build(choice("env", name, **options), world.episodes)
        played[protocol] = play(candidates, env)
    for seed, found in judged.items():
        about = {"world": arguments.world, "seed": seed, "versions": directory.versions()}
        for one in found:
            append(arguments.out, about | row_of(one, played))
        near = [one for one in found if one.far <= MOST_FAR]
        ranks = {}
        for name in world.estimators:
            for protocol, scores in played.items():
                ranks[f"{name}, {protocol}"] = correlation(found, scores, name)
                ranks[f"{name}, {protocol}, near the log"] = correlation(near, scores, name)
        append(arguments.out, about | {"log": log_name, "spearman": ranks})
        console.print(table(found, played))
        console.print(f"seed {seed}: Spearman's correlation: {ranks}")


if __name__ == "__main__":
    main()
