"""The command `evaluate`: roll runs out beside scripted baselines, append to results.jsonl, write the report."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from decisionllm.config import Node, listed, merged, of_run, with_defaults
from decisionllm.eval import attention, layout, report
from decisionllm.eval.identity import nearest, options_of, resolved
from decisionllm.eval.rollout import rollout
from decisionllm.files import explained
from decisionllm.policy import checkpoint
from decisionllm.protocols import Begin, Env, Player
from decisionllm.registry import build
from decisionllm.schema import Episode, Report, Spec


class Contender(NamedTuple):
    """A player to roll out: its name in results, the target return that names its row, and how it begins."""

    name: str
    target: float | None
    begin: Begin
    scripted: bool


def evaluate(config: dict[str, Any]) -> Path:
    """Roll out every run of config["run"].

    Args:
        config: plain dicts of the form of configs/evaluate.yaml; an option left out has its default.

    Returns:
        The path of results.jsonl.

    Raises:
        ValueError: a run cannot be evaluated, or an option does not fit it.
        FileNotFoundError: a run is not there or has no checkpoint.
    """
    console, config = Console(soft_wrap=True, markup=False, highlight=False), with_defaults("evaluate", config)
    runs = run_directories(config["run"] if isinstance(config["run"], list) else [config["run"]])
    if not runs or config["episodes"] < 1:
        raise ValueError(f"run, episodes: expected at least one of each, got {config['run']} and {config['episodes']}")
    for key in ("target_quantiles", "target_returns"):
        with explained(f"{key}: expected numbers", ValueError, TypeError):
            config[key] = [float(x) for x in config[key]]
    out = Path(config["out"]) if config["out"] else runs[0].parent
    acting = config["act"] | config["team"]
    acting["generator"] = torch.Generator(checkpoint.usable(config["device"])).manual_seed(config["seed"])  # of decode=sample
    loaded = [  # all of them, before any work is lost
        (run, *each) for run in runs
        for each in checkpoint.load_parts(run, listed(config["part"] or "") or [*checkpoint.read(run)[1].get("parts", {})], device=config["device"], **acting)
    ]  # fmt: skip
    # Seeds of one experiment come one after the other and share their environment, which may be slow to build.
    make = lru_cache(maxsize=1)(lambda node: build(json.loads(node), config["episodes"]))
    versions = checkpoint.versions()
    # the run by the label of its pictures, and by the dataset whose baselines were played beside it
    drawn: dict[str, Path] = {}
    published: dict[str, dict[str, float]] = {}  # by dataset
    units: dict[str, str] = {}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.jsonl").open("a", buffering=1) as file:
        for run, policy, run_config, info in loaded:
            env, changed, note = environment(run, run_config, info, config, make)
            if note:
                console.print(note)
            ignored = ", ".join(key for key, value in (config["act"] | config["team"]).items() if value is not None)
            if "policy" in run_config and ignored:
                console.print(f"{run}: a baseline acts by its network's mean; {ignored} of act and team have no effect on it")
            dataset, part_label = info["dataset"]["name"], run_config.get("part", "")  # part: of a mixture
            published[dataset], units[dataset] = published_scores(env, info["dataset"]), env.unit
            contenders = [*targets(policy, run_config, info, env, config)]
            if config["baselines"] and dataset + changed not in drawn:
                scripted = env.baselines(config["seed"])
                contenders += [Contender(name, None, begin, True) for name, begin in scripted.items()]
            shared = {"run": str(run), "decode": policy.decode, "planning_horizon": policy.planning_horizon,
                      "execution": policy.execution, "fingerprint": info["fingerprint"], "versions": versions}  # fmt: skip
            shared |= {} if "policy" in run_config else env.probe(policy)
            where = {"env_seed": config["seed"]} | ({"changed": changed} if changed else {})
            shared |= {"part": part_label} if part_label else {}
            shared |= {"file_digest": info["dataset"]["digest"]} if "digest" in info["dataset"] else {}
            for contender in contenders:
                episodes, seconds = play(contender, env, config["seed"], console, info["spec"]["observation_dim"])
                unread = sorted({e.task for e in episodes}.difference(info.get("tasks", env.tasks)))
                if unread and contender is contenders[0]:
                    console.print(
                        f"{run}: {len(unread)} task texts of the environment were not in its data, such as {unread[0]!r}"
                    )
                conditions = env.conditions(policy.execution, contender.scripted)
                for protocol, members in conditions.items():
                    part = [episodes[i] for i in members]
                    scores = env.score(part)
                    low, high = report.interval(scores)
                    row = Report(
                        dataset=dataset, policy=contender.name, protocol=protocol, text="none" if contender.scripted else env.text,
                        seed=config["seed"] if contender.scripted else run_config["seed"], target_return=contender.target,
                        headline=contender.scripted or contender.target == headline(policy), n=len(part), score=float(np.mean(scores)), low=low,
                        high=high, mean_return=float(np.mean([e.rewards.sum() for e in part])), seconds=round(seconds, 2),
                        options={} if contender.scripted else options_of(run_config),
                        extra=where | ({} if contender.scripted else shared) | env.metrics(part),
                    )  # fmt: skip
                    file.write(json.dumps(row.row()) + "\n")
                    console.print(line(row))
                    label = file_name(contender.name, protocol, changed, str(row.seed), part_label)
                    if drawn.get(label, run) != run and not contender.scripted:
                        label = file_name(label, str(run))
                    if config["report"] and label not in drawn and row.headline and protocol == next(iter(conditions)):
                        drawn[label] = run
                        pictures = {"rollout": env.draw(part, f"{contender.name}, {protocol}: {row.score:.1f}")}
                        if not contender.scripted and "policy" not in run_config:
                            pictures["attention"] = attention.draw(policy, part, f"{contender.name}: attention to the text")
                        for name, picture in pictures.items():
                            if picture is not None:
                                picture.savefig(out / f"{name}-{label}.png")
            drawn[dataset + changed] = run
    console.print(report.table(report.summarise(report.read_rows(out))))
    if config["report"]:
        console.print(f"report: {report.write_report(out, published, units)}")
    return out / "results.jsonl"


def published_scores(env: Env, dataset: Mapping[str, Any]) -> dict[str, float]:
    """The published scores that the report shows beside those of a dataset: {name: score}.

    Args:
        env: where the scores belong.
        dataset: its info. A file that stands in for a published one and is not recognised as it has none.
    """
    return dict(env.published) if dataset.get("recognised", True) else {}


def run_directories(given: Sequence[Any]) -> list[Path]:
    """The run directories that paths and patterns name, in their order."""
    found: list[Path] = []
    for pattern in given:
        found += matched(str(pattern))
    return found


def matched(given: str) -> list[Path]:
    """The run directory that is given, or the sorted run directories that a pattern such as runs/x/* matches; `~` is expanded.

    Raises:
        FileNotFoundError: nothing that the pattern matches is a run directory.
    """
    path = Path(given).expanduser()
    if path.exists() or not has_magic(given):
        return [path]
    found = [Path(match) for match in sorted(glob(str(path), recursive=True))]
    runs = [match for match in found if (match / "run.json").is_file()]
    if not runs:
        raise FileNotFoundError(
            f"run={given}: expected a pattern of run directories (with run.json), "
            f"it matches {len(found)} files or folders and none is a run; `ls {given}` shows them"
        )
    return runs


def environment(
    run: Path, run_config: dict[str, Any], info: dict[str, Any], config: dict[str, Any], make: Callable[[str], Env]
) -> tuple[Env, str, str]:
    """The environment that a run is rolled out in, what is not the run's own, and a note for the user.

    make: builds the environment of a config node, as JSON.

    Rows name what is not the run's own as "agents=5, act.stride=1"; options of `act` that a row has in a column, or in the name of its
    policy, are not named again. The note is one line or empty, see `layout.check_layout`.
    """
    own, given = run_config["env"], of_run(run_config, config["env"])
    if own["_target_"] == "none" and not given:
        example = "+env._target_=decisionllm.eval.gymnasium.make +env.id=CartPole-v1"
        raise ValueError(f"{run}: env=none, there is no environment to roll out in; give one, such as {example}")
    same = given.get("_target_", own["_target_"]) == own["_target_"]
    emptied = {key: value for key, value in given.items() if value == {}}  # instead of merged
    node = merged(own if same else {}, given) | emptied
    changed = changed_env(own, given, node, run_config) if given else []
    for part, named in (("act", ("decode", "planning_horizon")), ("team", ("execution",))):
        acting = run_config.get(part, {})
        changed += [
            f"{part}.{key}={x}" for key, x in config[part].items() if x not in (None, acting.get(key)) and key not in named
        ]
    env = make(json.dumps(node, sort_keys=True))
    layout.check_actions(Spec.of(info["spec"]), env, str(run))
    dataset = info["dataset"]
    note = layout.check_layout(dataset.get("observation_parts"), env, str(run), action_parts=dataset.get("action_parts"))
    return env, ", ".join(changed), note


def changed_env(own: Node, given: Node, node: Node, run_config: dict[str, Any]) -> list[str]:
    """How the environment of an evaluation differs from the run's own, in words: ["goal=south"], ["env=gymnasium", "id=CartPole-v1"].

    Args:
        own: the run's environment.
        given: the options given in its place.
        node: both together, which is built.
        run_config: of the run, which defaults of options may refer to.
    """
    name, defaults = nearest("env", node)
    usual = {key: resolved(value, run_config) for key, value in defaults.items()}
    if node["_target_"] != own["_target_"]:
        options = {key: value for key, value in given.items() if key != "_target_"}
        return [f"env={name}", *(f"{key}={value}" for key, value in options.items() if value != usual.get(key))]
    before = usual | own
    return [f"{key}={value}" for key, value in given.items() if node[key] != before.get(key)]


def file_name(*words: str) -> str:
    """These words, joined and with - for what is awkward in the name of a file."""
    return re.sub(r"[^\w.+-]+", "-", "-".join(filter(None, words)))


def headline(policy: Any) -> float | None:
    """The one target return that is fixed before the run; None: no target, or the predicted maximum return."""
    return policy.target_return if policy.return_conditioned else None


def targets(
    policy: Any, run_config: dict[str, Any], info: dict[str, Any], env: Env, config: dict[str, Any]
) -> Iterator[Contender]:
    """The policy once for each target return: the headline, quantiles of the training returns, and given returns."""
    given: dict[float | None, Any] = {headline(policy): headline(policy)}  # as a row names it: one for all, or one each
    if policy.return_conditioned:
        for quantile in config["target_quantiles"]:
            similar = env.target_returns(info["dataset"], quantile)
            each = checkpoint.target(info, quantile) if similar is None else similar
            given.setdefault(float(np.mean(each)), each)
        given |= {target: target for target in config["target_returns"]}
    name = run_config["name"] + f"+plan{policy.planning_horizon}" * bool(policy.planning_horizon)
    name += "+joint" * (policy.execution == "joint")
    for target, each in given.items():
        suffix = "+max-return" if policy.return_conditioned and target is None else ""

        def begin(tasks: Sequence[str], each: Any = each) -> Player:  # a reset may change groups
            player: Player = policy.begin(tasks, horizon=env.horizon, target_returns=each, groups=env.groups)
            return player

        yield Contender(name + suffix, target, begin, False)


def play(contender: Contender, env: Env, seed: int, console: Console, observation_dim: int) -> tuple[list[Episode], float]:
    """The episodes of one player, and the seconds they took. observation_dim: S of the run, which a scripted player need not have."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{contender.name} {contender.target or ''}", total=env.horizon)
        began = time.monotonic()
        episodes = rollout(
            contender.begin, env, seed=seed, progress=lambda n: bar.advance(task, n),
            observation_dim=0 if contender.scripted else observation_dim,
        )  # fmt: skip
        return episodes, time.monotonic() - began


def line(row: Report) -> str:
    """A result row for the terminal."""
    target = "-" if row.target_return is None else format(row.target_return, ".1f")
    scores = f"score {row.score:6.1f}  [{row.low:.1f}, {row.high:.1f}]"
    return f"{row.policy:24s} target {target:>6s}  {scores}  {row.seconds:.1f} s  {row.protocol}"
