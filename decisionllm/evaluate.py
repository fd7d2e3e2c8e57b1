"""The command `evaluate`: roll runs out beside scripted baselines, write results and a report."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from decisionllm.baselines.d3rlpy import Baseline
from decisionllm.checks import listed
from decisionllm.command_line import with_defaults
from decisionllm.config import env_options_of, merged
from decisionllm.eval import attention, report
from decisionllm.eval.identity import nearest, options_of, resolved
from decisionllm.eval.layout import check_env
from decisionllm.eval.rollout import begin_in, rollout
from decisionllm.files import explained
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Begin, Env
from decisionllm.registry import Node, build
from decisionllm.runs import directory, hardware
from decisionllm.schema import Episode, Json, Report, Spec, Targets

# options of acting that a result row has in a column, or in the name of its policy
IN_COLUMNS = ("act.decode", "act.planning_horizon", "team.execution")


class Loaded(NamedTuple):
    """A policy, with the run or the part of a mixture that it was trained on."""

    run: Path
    policy: Policy | Baseline
    config: Node
    info: Json


class Contender(NamedTuple):
    """A player to roll out: how it begins, and the columns of its result rows, see `Report`."""

    name: str
    scripted: bool
    begin: Begin
    about: Json
    columns: Json


def evaluate(config: Node) -> Path:
    """Roll out every run of config["run"].

    Args:
        config: plain dicts as configs/evaluate.yaml; an option left out has its default.

    Returns:
        The path of results.jsonl.

    Raises:
        ValueError: a run cannot be evaluated, or an option does not fit it.
        FileNotFoundError: a run is not there or has no checkpoint.
    """
    config = with_defaults("evaluate", config)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    runs = check_options(config)
    out = Path(config["out"] or runs[0].parent)
    policies = load_policies(runs, config)  # all of them, before any work is lost

    # Seeds of one experiment come one after the other and share their environment, which may be
    # slow to build.
    make = lru_cache(maxsize=1)(lambda node: build(json.loads(node), config["episodes"]))
    published: dict[str, dict[str, float]] = {}  # by dataset
    units: dict[str, str] = {}  # by dataset
    baselines_played: set[str] = set()
    drawn: dict[str, Path] = {}  # the run by the label of its pictures
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.jsonl").open("a", buffering=1) as file:
        for loaded in policies:
            env, changed, note = environment(loaded, config, make)
            say_notes(console, note, loaded, config)
            dataset = loaded.info["dataset"]["name"]
            published[dataset] = published_scores(env, loaded.info["dataset"])
            units[dataset] = env.unit
            contenders = policy_contenders(loaded, env, config)
            if config["baselines"] and dataset + changed not in baselines_played:
                baselines_played.add(dataset + changed)
                contenders += scripted_contenders(env, config["seed"])
            where = {"env_seed": config["seed"]}
            if changed:
                where["changed"] = changed
            for contender in contenders:
                episodes, seconds = play(contender, env, config["seed"], loaded, console)
                if contender is contenders[0]:
                    say_unread_texts(console, episodes, env, loaded)
                for row, part in result_rows(contender, episodes, seconds, env, loaded, where):
                    file.write(json.dumps(row.row()) + "\n")
                    console.print(line(row))
                    if config["report"]:
                        draw(row, part, contender, env, loaded, out, drawn)
    for table in report.tables(report.summarise(report.read_rows(out))):
        console.print(table, soft_wrap=False)
    if config["report"]:
        console.print(f"report: {report.write_report(out, published, units)}")
    return out / "results.jsonl"


def check_options(config: Node) -> list[Path]:
    """The run directories; a ValueError if an option cannot be. Target returns become floats."""
    runs = run_directories(config["run"])
    if not runs or config["episodes"] < 1:
        got = f"{config['run']} and {config['episodes']}"
        raise ValueError(f"run, episodes: expected at least one of each, got {got}")
    for key in ("target_quantiles", "target_returns"):
        with explained(f"{key}: expected numbers", ValueError, TypeError):
            config[key] = [float(number) for number in config[key]]
    return runs


def run_directories(given: object) -> list[Path]:
    """The run directories that a path or pattern, or a list of them, names, in their order."""
    found: list[Path] = []
    patterns = given if isinstance(given, list) else [given]
    for pattern in patterns:
        found += matched(str(pattern))
    return found


def matched(given: str) -> list[Path]:
    """The given run directory, or the sorted ones that a pattern such as runs/x/* matches.

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


def load_policies(runs: Sequence[Path], config: Node) -> list[Loaded]:
    """The policies of all runs; of a run on a mixture, one for each part."""
    acting = config["act"] | config["team"]
    device = config["device"]
    generator = torch.Generator(hardware.usable(device))  # of decode=sample, for all runs
    acting["generator"] = generator.manual_seed(config["seed"])
    found = []
    for run in runs:
        parts = listed(config["part"] or "")
        if not parts:
            _, info = directory.read(run)
            parts = list(info.get("parts", {}))
        for policy in loading.load_parts(run, parts, device=device, **acting):
            found.append(Loaded(run, policy, policy.config, policy.info))
    return found


def environment(
    loaded: Loaded,
    config: Node,
    make: Callable[[str], Env],
) -> tuple[Env, str, str]:
    """The environment that a run is rolled out in.

    Args:
        loaded: the run.
        config: of the evaluation.
        make: builds the environment of a config node, as JSON.

    Returns:
        The environment; what is not the run's own, such as "agents=5, act.stride=1"; and a note
        of one line for the user, or "", see `check_env`.
    """
    run = str(loaded.run)
    own = loaded.config["env"]
    given = env_options_of(loaded.config, config["env"])
    if own["_target_"] == "none" and not given:
        example = "+env._target_=decisionllm.eval.gymnasium.make +env.id=CartPole-v1"
        nothing = "env=none, there is no environment to roll out in"
        raise ValueError(f"{run}: {nothing}; give one, such as {example}")
    same = given.get("_target_", own["_target_"]) == own["_target_"]
    emptied = {key: value for key, value in given.items() if value == {}}  # instead of merged
    node = merged(own if same else {}, given) | emptied
    changed = changed_acting(loaded.config, config)
    if given:
        changed = changed_env(own, given, node, loaded.config) + changed
    env = make(json.dumps(node, sort_keys=True))
    note = check_env(Spec.of(loaded.info["spec"]), loaded.info["dataset"], env, run)
    return env, ", ".join(changed), note


def changed_env(own: Node, given: Node, node: Node, run_config: Node) -> list[str]:
    """How the environment of an evaluation differs from the run's own, such as ["goal=south"].

    Args:
        own: the run's environment.
        given: the options given in its place.
        node: both together, which is built.
        run_config: of the run, which defaults of options may refer to.
    """
    name, options = nearest("env", node)
    defaults = {key: resolved(value, run_config) for key, value in options.items()}
    changed = []
    if node["_target_"] == own["_target_"]:
        before = defaults | own
        compared = node
    else:
        before = defaults
        compared = given
        changed.append(f"env={name}")
        given = {key: value for key, value in given.items() if key != "_target_"}
    for key, value in given.items():
        if compared[key] != before.get(key):
            changed.append(f"{key}={value}")
    return changed


def changed_acting(run_config: Node, config: Node) -> list[str]:
    """Options of acting that are not the run's own and in no column, such as ["act.stride=1"]."""
    changed = []
    for group in ("act", "team"):
        own = run_config.get(group, {})
        for key, value in config[group].items():
            name = f"{group}.{key}"
            if name not in IN_COLUMNS and value is not None and value != own.get(key):
                changed.append(f"{name}={value}")
    return changed


def published_scores(env: Env, dataset: Json) -> dict[str, float]:
    """The published scores that the report shows beside those of a dataset: {name: score}.

    Args:
        env: where the scores belong.
        dataset: its info. A file that stands in for a published one and is not recognised as it
            has none.
    """
    return dict(env.published) if dataset.get("recognised", True) else {}


def say_notes(console: Console, note: str, loaded: Loaded, config: Node) -> None:
    """Print the note on the environment, and options that have no effect on a baseline."""
    if note:
        console.print(note)
    given = config["act"] | config["team"]
    ignored = ", ".join(key for key, value in given.items() if value is not None)
    if isinstance(loaded.policy, Baseline) and ignored:
        effect = f"{ignored} of act and team have no effect on it"
        console.print(f"{loaded.run}: a baseline acts by its network's mean; {effect}")


def say_unread_texts(console: Console, episodes: list[Episode], env: Env, loaded: Loaded) -> None:
    """Print how many task texts of the episodes the policy has not been trained on, if any."""
    known = loaded.info.get("tasks", env.tasks)
    unread = sorted({episode.task for episode in episodes}.difference(known))
    if unread:
        what = f"{len(unread)} task texts of the environment were not in its data"
        console.print(f"{loaded.run}: {what}, such as {unread[0]!r}")


def policy_contenders(
    loaded: Loaded,
    env: Env,
    config: Node,
) -> list[Contender]:
    """The policy once for each target return, see `targets`."""
    policy = loaded.policy
    name = loaded.config["name"]
    if policy.planning_horizon:
        name += f"+plan{policy.planning_horizon}"
    if policy.execution == "joint":
        name += "+joint"
    columns = policy_columns(loaded, env)
    contenders = []
    for target, each in targets(loaded, env, config).items():
        predicted = policy.return_conditioned and target is None
        about = {
            "text": env.text,
            "seed": loaded.config["seed"],
            "target_return": target,
            "headline": target == headline(policy),
            "options": options_of(loaded.config),
        }
        label = f"{name}+max-return" if predicted else name
        begin = partial(begin_in, policy, env, each)
        contenders.append(Contender(label, False, begin, about, columns))
    return contenders


def targets(loaded: Loaded, env: Env, config: Node) -> dict[float | None, Targets]:
    """Target returns: the headline, quantiles of the training returns, and given returns.

    Returns:
        {name in a result row: one target for all episodes, or (N,) one for each}.
    """
    policy, info = loaded.policy, loaded.info
    found: dict[float | None, Targets] = {headline(policy): headline(policy)}
    if not policy.return_conditioned:
        return found
    for quantile in config["target_quantiles"]:
        each: Targets = env.target_returns(info["dataset"], quantile)
        if each is None:
            each = directory.target(info, quantile)
        found.setdefault(float(np.mean(each)), each)
    return found | {target: target for target in config["target_returns"]}


def headline(policy: Policy | Baseline) -> float | None:
    """The target return that is fixed before the run; None: no target, or the predicted maximum."""
    return policy.target_return if policy.return_conditioned else None


def policy_columns(loaded: Loaded, env: Env) -> Json:
    """The further columns that all result rows of a policy share."""
    run, policy, config, info = loaded
    columns = {
        "run": str(run),
        "decode": policy.decode,
        "planning_horizon": policy.planning_horizon,
        "execution": policy.execution,
        "fingerprint": info["fingerprint"],
        "versions": directory.versions(),
    }
    if isinstance(policy, Policy):
        columns |= env.probe(policy)
    if config.get("part"):
        columns["part"] = config["part"]
    if "digest" in info["dataset"]:
        columns["file_digest"] = info["dataset"]["digest"]
    return columns


def scripted_contenders(env: Env, seed: int) -> list[Contender]:
    """The scripted players of an environment."""
    about = {"text": "none", "seed": seed, "target_return": None, "headline": True, "options": {}}
    players = env.baselines(seed)
    return [Contender(name, True, begin, about, {}) for name, begin in players.items()]


def play(
    contender: Contender,
    env: Env,
    seed: int,
    loaded: Loaded,
    console: Console,
) -> tuple[list[Episode], float]:
    """The episodes of one player, and the seconds they took."""
    # a scripted player need not read observations of the size that the run was trained on
    size = 0 if contender.scripted else loaded.info["spec"]["observation_dim"]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        title = f"{contender.name} {contender.about['target_return'] or ''}"
        task = bar.add_task(title, total=env.horizon)
        advance = partial(bar.advance, task)
        began = time.monotonic()
        episodes = rollout(contender.begin, env, seed=seed, progress=advance, observation_dim=size)
        return episodes, time.monotonic() - began


def result_rows(
    contender: Contender,
    episodes: Sequence[Episode],
    seconds: float,
    env: Env,
    loaded: Loaded,
    where: Json,
) -> Iterator[tuple[Report, list[Episode]]]:
    """A result row for each condition of the environment, with the episodes that it is about."""
    conditions = env.conditions(loaded.policy.execution, contender.scripted)
    for protocol, members in conditions.items():
        part = [episodes[i] for i in members]
        scores = env.score(part)
        low, high = report.interval(scores)
        returns = [episode.rewards.sum() for episode in part]
        row = Report(
            **contender.about,
            dataset=loaded.info["dataset"]["name"],
            policy=contender.name,
            protocol=protocol,
            n=len(part),
            score=float(np.mean(scores)),
            low=low,
            high=high,
            mean_return=float(np.mean(returns)),
            seconds=round(seconds, 2),
            extra=where | contender.columns | env.metrics(part),
        )
        yield row, part


def line(row: Report) -> str:
    """A result row for the terminal."""
    target = "-" if row.target_return is None else format(row.target_return, ".1f")
    scores = f"score {row.score:6.1f}  [{row.low:.1f}, {row.high:.1f}]"
    about = f"{row.policy:24s} target {target:>6s}"
    return f"{about}  {scores}  {row.seconds:.1f} s  {row.protocol}"


def draw(
    row: Report,
    part: Sequence[Episode],
    contender: Contender,
    env: Env,
    loaded: Loaded,
    out: Path,
    drawn: dict[str, Path],
) -> None:
    """Write pictures of a headline row of the first condition, unless its label is in `drawn`."""
    run, policy, config, _ = loaded
    changed = row.extra.get("changed", "")
    label = file_name(row.policy, row.protocol, changed, str(row.seed), config.get("part", ""))
    if drawn.get(label, run) != run and not contender.scripted:
        label = file_name(label, str(run))
    first, *_ = env.conditions(policy.execution, contender.scripted)
    if label in drawn or not row.headline or row.protocol != first:
        return
    drawn[label] = run
    pictures = {"rollout": env.draw(part, f"{row.policy}, {row.protocol}: {row.score:.1f}")}
    if isinstance(policy, Policy) and not contender.scripted:
        title = f"{row.policy}: attention to the text"
        pictures["attention"] = attention.draw(policy, part, title)
    for name, picture in pictures.items():
        if picture is not None:
            picture.savefig(out / f"{name}-{label}.png")


def file_name(*words: str) -> str:
    """These words, joined and with - for what is awkward in the name of a file."""
    return re.sub(r"[^\w.+-]+", "-", "-".join(filter(None, words)))
