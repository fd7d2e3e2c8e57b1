"""The command `evaluate`: roll runs out beside scripted baselines, write results and a report."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from decisionllm.baselines.d3rlpy import Baseline
from decisionllm.checks import split_list
from decisionllm.command_line import fill_defaults
from decisionllm.commands.evaluate_env import acting_differences, build_env_node
from decisionllm.commands.evaluate_warnings import option_warnings, rollout_warnings
from decisionllm.commands.options import (
    number_from,
    numbers,
    read_options,
    seed_number,
    word,
)
from decisionllm.eval import attention, intervals, report, word_probe
from decisionllm.eval.conclusions import format_number
from decisionllm.eval.env_layout import check_env
from decisionllm.eval.result_groups import identifying_options
from decisionllm.eval.rollout import begin_session, rollout
from decisionllm.eval.text_variants import read_pairs
from decisionllm.files import append_line, check_writable, read_lines, safe_name
from decisionllm.policy.open_runs import OpenedRun, open_runs, run_directories
from decisionllm.policy.policy import Policy
from decisionllm.progress import show_progress
from decisionllm.protocols import Begin, Env
from decisionllm.registry import Node, build
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Episode, Json, Report, Spec, Targets
from decisionllm.trust import trust_user_modules


@dataclass(frozen=True, kw_only=True)
class ActOverrides:
    """Options of acting in place of the run's own; None: the run's own."""

    stride: int | None
    decode: str | None
    planning_horizon: int | None
    planning_value: float | None


@dataclass(frozen=True, kw_only=True)
class TeamOverrides:
    """Options of a team in place of the run's own; None: the run's own."""

    execution: str | None


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The options of `evaluate`; configs/evaluate.yaml explains them and has their defaults."""

    run: str | list[str]
    out: str | None
    part: str | list[str] | None
    episodes: int = number_from(1)
    seed: int = seed_number()
    target_quantiles: list[float] = numbers()
    target_returns: list[float] = numbers()
    baselines: bool
    probe: str | None = word("words", optional=True)
    probe_pairs: str | None
    report: bool
    env: Node
    device: str
    trust: list[str]
    act: ActOverrides
    team: TeamOverrides

    @property
    def acting(self) -> dict[str, Node]:
        return {"act": asdict(self.act), "team": asdict(self.team)}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A player to roll out.

    Attributes:
        name: in results.
        is_scripted: it is a scripted controller, not a policy.
        begin: starts a player of the episodes.
        report_fields: fields of its `Report`.
        columns: further columns of its result rows, in `Report.extra`.
    """

    name: str
    is_scripted: bool
    begin: Begin
    report_fields: Json
    columns: Json


def evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    part: str | Sequence[str] | None = None,
    episodes: int = 100,
    seed: int = 0,
    target_quantiles: Sequence[float] = (),
    target_returns: Sequence[float] = (),
    baselines: bool = True,
    probe: Literal["words"] | None = None,
    probe_pairs: str | Path | None = None,
    report: bool = True,
    env: Node | None = None,
    device: str = "cpu",
    trust: Sequence[str] = (),
    act: Node | None = None,
    team: Node | None = None,
) -> Path:
    """Roll out trained runs beside scripted players: `evaluate("runs/first", episodes=20)`.

    Args:
        run: a run directory, or several.
        out: where results.jsonl and report.html go; None: the folder that holds the first run.
        part: of a run on a mixture: evaluate these parts alone; None: each in its own environment.
        episodes: rolled out with each policy, as one batch.
        seed: of the environment's starts.
        target_quantiles: more target returns: quantiles of the training returns.
        target_returns: more target returns, in raw reward units.
        baselines: also roll out the environment's scripted players.
        probe: `words`: ask each policy again with the task text replaced.
        probe_pairs: a file of your own texts for the probe.
        report: write report.html with its pictures.
        env: options of the environment in place of the run's own, such as {"goal": "south"}.
        device: `cpu`, `cuda` or `auto`.
        trust: modules whose code the runs may execute, such as ["mylab"].
        act: how the policy acts in place of the run's own, such as {"decode": "sample"}.
        team: {"execution": "joint"} of a run that was trained so.

    Returns:
        The path of results.jsonl.

    Raises:
        ValueError: a run cannot be evaluated, or an option does not fit it.
        FileNotFoundError: a run is not there or has no checkpoint.
    """
    runs = [run] if isinstance(run, str | Path) else run
    options = {
        "run": [str(path) for path in runs],
        "out": None if out is None else str(out),
        "part": part if part is None or isinstance(part, str) else [*part],
        "episodes": episodes,
        "seed": seed,
        "target_quantiles": [*target_quantiles],
        "target_returns": [*target_returns],
        "baselines": baselines,
        "probe": probe,
        "probe_pairs": None if probe_pairs is None else str(probe_pairs),
        "report": report,
        "env": env or {},
        "device": device,
        "trust": [*trust],
        "act": act or {},
        "team": team or {},
    }
    return evaluate_runs(options)


@trust_user_modules
def evaluate_runs(config: Node) -> Path:
    """Roll out the runs of a config, plain dicts as configs/evaluate.yaml; an option left out has
    its default. See `evaluate`.
    """
    options = read_options(EvaluateConfig, fill_defaults("evaluate", config))
    paths = run_directories(options.run)
    if not paths:
        raise ValueError(f"run: expected one run directory or more, got {options.run}")
    if options.probe_pairs is not None:
        if options.probe is None:
            raise ValueError(
                f"probe_pairs={options.probe_pairs}: needs probe=words, got probe=null"
            )
        read_pairs(options.probe_pairs)
    runs = open_runs(
        paths,
        device=options.device,
        seed=options.seed,
        acting=asdict(options.act) | asdict(options.team),
        parts=split_list(options.part or ""),
    )
    if options.probe:
        for run in runs:
            word_probe.check_reads_text(run)
    results = Results(Path(options.out or paths[0].parent), report=options.report)

    # Seeds of one experiment come one after the other and share their environment, which may be
    # slow to build.
    @lru_cache(maxsize=1)
    def make_env(node: str) -> Env:
        env: Env = build(json.loads(node), options.episodes)
        return env

    envs_with_baselines = set()  # environments that scripted players have played in, as JSON
    for run in runs:
        env_node, differences = build_env_node(run, options.env)
        differences += acting_differences(run.config, options.acting)
        env_as_json = json.dumps(env_node, sort_keys=True)  # the same text of equal nodes
        env = make_env(env_as_json)
        introduce_run(run, env, options, results)
        contenders = describe_policy(run, env, options, differences, results)
        if options.baselines and env_as_json not in envs_with_baselines:
            envs_with_baselines.add(env_as_json)
            contenders += scripted_contenders(env, env_node, options.seed)
        evaluated_in: Json = {"env_seed": options.seed}
        if differences:
            evaluated_in["changed"] = ", ".join(differences)
        play_all(contenders, run, env, options, evaluated_in, results)
    results.summarise()
    return results.path


def introduce_run(run: OpenedRun, env: Env, options: EvaluateConfig, results: "Results") -> None:
    """Compare an environment with the data of a run; print what a reader of its scores must know."""
    note = check_env(Spec.of(run.info["spec"]), run.info["dataset"], env, str(run.path))
    if note:
        results.print(note)
    for warning in option_warnings(run, options.acting, options.seed):
        results.print(warning)
    if run.info.get("mean_return"):
        results.print(f"{run.path}: mean return of the log {run.info['mean_return']:.4g}")
    results.describe_world(run, env)


def describe_policy(
    run: OpenedRun, env: Env, options: EvaluateConfig, differences: list[str], results: "Results"
) -> list[Contender]:
    """Return the policy of a run, once for each target.

    differences: of its environment and options from those of its training, a column of its rows.
    """
    columns = policy_columns(run, env)
    step = checkpoint.interrupted_step(run.path)
    if step is not None:
        stopped = f"stopped at step {step:,}"
        results.print(f"{run.path}: the training is not finished, it has {stopped}")
        differences = [*differences, stopped]
    if differences:
        columns["changed"] = ", ".join(differences)
    return policy_contenders(run, env, options, columns)


def play_all(
    contenders: list[Contender],
    run: OpenedRun,
    env: Env,
    options: EvaluateConfig,
    evaluated_in: Json,
    results: "Results",
) -> None:
    """Roll out the contenders; add their rows and pictures, and the probe of the first, to the
    results.

    evaluated_in: columns of each row.
    """
    pairs = None
    if options.probe:  # before any rollout
        pairs = word_probe.prepare_pairs(run, env, options.seed, options.probe_pairs)
    for contender in contenders:
        is_headline_policy = contender is contenders[0]
        episodes, seconds = play(contender, env, options.seed, run)
        if is_headline_policy:
            for warning in rollout_warnings(run, env, episodes):
                results.print(warning)
        rows = []
        for row, members in result_rows(contender, episodes, seconds, env, run, evaluated_in):
            rows.append(row)
            results.add(row)
            if options.report:
                results.draw(row, members, contender, env, run)
        if pairs is not None and is_headline_policy:
            results.add_probe(
                word_probe.probe_run(
                    run,
                    env,
                    episodes,
                    rows[0].row(),
                    pairs,
                    limit=options.episodes,
                    seed=options.seed,
                )
            )


class Results:
    """The result rows of a command, with their pictures and the report.

    Args:
        folder: where to; it is made.
        report: draw pictures and write report.html.
    """

    def __init__(self, folder: Path, *, report: bool) -> None:
        self.folder = folder
        self.report = report
        self.path = folder / "results.jsonl"
        self.probes = folder / word_probe.FILE
        self.console = Console(soft_wrap=True, markup=False, highlight=False)
        self.published: dict[str, dict[str, float]] = {}  # scores by world
        self.units: dict[str, str] = {}  # of the score, by world
        self.run_by_picture: dict[str, Path] = {}  # the run by the label of its pictures
        files = [self.path.name, self.probes.name]
        if report:
            files.append("report.html")
        check_writable(folder, *files)  # now, not after hours of rollouts
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.probes):
            if path.is_file():
                read_lines(path)  # a damaged line is an error now too

    def print(self, line: str) -> None:
        self.console.print(line)

    def describe_world(self, run: OpenedRun, env: Env) -> None:
        """Record the unit and the published scores that the report shows beside those of a world."""
        world = world_name(run, env)
        self.published.setdefault(world, {}).update(published_scores(env, run.info["dataset"]))
        self.units[world] = env.unit

    def add(self, row: Report) -> None:
        """Append a row to results.jsonl and print it."""
        append_line(self.path, row.row())
        target = report.format_target(row.target_return)
        score, low, high = (format_number(x) for x in (row.score, row.low, row.high))
        self.print(
            f"{row.policy:24s} target {target:>6s}  score {score:>6s}  [{low}, {high}]  "
            f"{row.protocol}, {row.n} episodes in {row.seconds:.1f} s"
        )

    def add_probe(self, row: Json) -> None:
        """Append the shares of an instruction probe to word_probe.jsonl."""
        append_line(self.probes, row)
        if all(variant["as_other"] is None for variant in row["variants"]):
            self.print(
                f"{row['run']}: its data and environment have one task text, so that there is no "
                "other task to ask for with probe=words"
            )

    def draw(
        self,
        row: Report,
        episodes: Sequence[Episode],
        contender: Contender,
        env: Env,
        run: OpenedRun,
    ) -> None:
        """Write pictures of a headline row of the first condition, unless they are there already."""
        policy = run.policy
        first, *_ = env.conditions(policy.execution, contender.is_scripted)
        if not row.headline or row.protocol != first:
            return
        label = picture_label(row, contender, run, self.run_by_picture)
        if label in self.run_by_picture:
            return
        self.run_by_picture[label] = run.path
        score = format_number(row.score)
        pictures = {"rollout": env.draw(episodes, f"{row.policy}, {row.protocol}: {score}")}
        if isinstance(policy, Policy) and not contender.is_scripted:
            title = f"{row.policy}: attention to the text"
            pictures["attention"] = attention.draw(policy, episodes, title)
        for name, picture in pictures.items():
            if picture is not None:
                words = picture_words(name, row, contender)
                picture.savefig(self.folder / f"{name}-{label}.png", metadata=words)

    def summarise(self) -> None:
        """Print the tables of all rows, and write the report."""
        tables = report.tables(report.summarise(report.read_rows(self.folder)))
        tables += [probe.table() for probe in report.read_probes(self.folder)]
        for table in tables:
            # the terminal breaks a table that is wider: no column is lost
            self.console.print(table, soft_wrap=False, crop=False)
        if self.report:
            path = report.write_report(self.folder, self.published, self.units)
            self.print(f"report: {path}")


def world_name(run: OpenedRun, env: Env) -> str:
    """Return the name of an environment's world in results; see `Env.name`."""
    return env.name or str(run.info["dataset"]["name"])


def published_scores(env: Env, dataset: Json) -> dict[str, float]:
    """Return the published scores that the report shows beside those of a dataset: {name: score}.

    Args:
        env: where the scores belong.
        dataset: its info. A file that stands in for a published one and is not recognised as it
            has none.
    """
    return dict(env.published) if dataset.get("recognised", True) else {}


def policy_contenders(
    run: OpenedRun, env: Env, options: EvaluateConfig, columns: Json
) -> list[Contender]:
    """Return the policy once for each target return, the headline first."""
    policy = run.policy
    name = run.config["name"]
    if policy.planning_horizon:
        name += f"+plan{policy.planning_horizon}"
    if policy.execution == "joint":
        name += "+joint"
    contenders = []
    for target, targets in targets_by_name(run, env, options).items():
        is_predicted = policy.return_conditioned and target is None
        contenders.append(
            Contender(
                name=f"{name}+max-return" if is_predicted else name,
                is_scripted=False,
                begin=partial(begin_session, policy, env, targets, options.seed),
                report_fields={
                    "text": env.text_label,
                    "seed": run.config["seed"],
                    "target_return": target,
                    "headline": target == headline_target(policy),
                    "options": identifying_options(run.config),
                },
                columns=columns,
            )
        )
    return contenders


def targets_by_name(
    run: OpenedRun, env: Env, options: EvaluateConfig
) -> dict[float | None, Targets]:
    """Return the target returns: the headline, quantiles of the training returns, options of the
    user.

    Returns:
        {name in a result row: one target for all episodes, or (N,) one for each}.
    """
    headline = headline_target(run.policy)
    targets: dict[float | None, Targets] = {headline: headline}
    if not run.policy.return_conditioned:
        return targets
    for quantile in options.target_quantiles:
        by_episode: Targets = env.target_returns(run.info["dataset"], quantile)
        if by_episode is None:
            by_episode = directory.target_return(run.info, quantile)
        targets.setdefault(float(np.mean(by_episode)), by_episode)
    for target in options.target_returns:
        targets[target] = target
    return targets


def headline_target(policy: Policy | Baseline) -> float | None:
    """Return the target return that is fixed before the run; None: no target, or the predicted
    maximum.
    """
    return policy.target_return if policy.return_conditioned else None


def policy_columns(run: OpenedRun, env: Env) -> Json:
    """Return the further columns that all result rows of a policy share."""
    policy, config, info = run.policy, run.config, run.info
    columns = {
        "run": str(run.path),
        "decode": policy.decode,
        "planning_horizon": policy.planning_horizon,
        "execution": policy.execution,
        "fingerprint": info["fingerprint"],
        "versions": directory.versions(),
    }
    if info.get("mean_return"):  # 0 of a log without rewards
        columns["log_return"] = info["mean_return"]
    if isinstance(policy, Policy):
        columns |= env.probe(policy)
    if config.get("part"):
        columns["part"] = config["part"]
    if "digest" in info["dataset"]:
        columns["file_digest"] = info["dataset"]["digest"]
    return columns


def scripted_contenders(env: Env, env_node: Node, seed: int) -> list[Contender]:
    """Return the scripted players of an environment."""
    report_fields = {
        "text": "none",
        "seed": seed,
        "target_return": None,
        "headline": True,
        "options": identifying_options({"env": env_node, "name": ""}),
    }
    contenders = []
    for name, begin in env.baselines(seed).items():
        contenders.append(
            Contender(
                name=name, is_scripted=True, begin=begin, report_fields=report_fields, columns={}
            )
        )
    return contenders


def play(contender: Contender, env: Env, seed: int, run: OpenedRun) -> tuple[list[Episode], float]:
    """Return the episodes of one player, and the seconds they took."""
    # a scripted player need not read observations of the size that the run was trained on
    size = 0 if contender.is_scripted else run.info["spec"]["observation_dim"]
    title = f"{contender.name} {contender.report_fields['target_return'] or ''}".rstrip()
    with show_progress(title, env.horizon) as advance:
        began = time.monotonic()
        episodes = rollout(contender.begin, env, seed=seed, progress=advance, observation_dim=size)
        return episodes, time.monotonic() - began


def result_rows(
    contender: Contender,
    episodes: Sequence[Episode],
    seconds: float,
    env: Env,
    run: OpenedRun,
    evaluated_in: Json,
) -> Iterator[tuple[Report, list[Episode]]]:
    """Yield a result row for each condition of the environment, with its episodes.

    evaluated_in: columns about the environment.
    """
    conditions = env.conditions(run.policy.execution, contender.is_scripted)
    world = world_name(run, env)
    dataset = world if contender.is_scripted else run.info["dataset"]["name"]
    for protocol, indices in conditions.items():
        members = [episodes[i] for i in indices]
        scores = env.score(members)
        clusters = None if env.clusters is None else env.clusters[indices]
        low, high = intervals.over_episodes(scores, clusters)
        returns = [episode.rewards.sum() for episode in members]
        row = Report(
            **contender.report_fields,
            world=world,
            dataset=dataset,
            policy=contender.name,
            protocol=protocol,
            n=len(members),
            score=float(np.mean(scores)),
            low=low,
            high=high,
            mean_return=float(np.mean(returns)),
            seconds=round(seconds, 2),
            extra=evaluated_in | contender.columns | env.metrics(members),
        )
        yield row, members


def picture_label(
    row: Report, contender: Contender, run: OpenedRun, run_by_picture: Mapping[str, Path]
) -> str:
    """Return the label of a row's pictures; with its path where another run has the same label.

    run_by_picture: the run of each label. Scripted players are the same in every run.
    """
    changed = row.extra.get("changed", "")
    part = run.config.get("part", "")
    label = file_name(row.policy, row.protocol, changed, str(row.seed), part)
    owner = run_by_picture.get(label, run.path)
    if contender.is_scripted or owner == run.path:
        return label
    return file_name(label, str(run.path))


def picture_words(kind: str, row: Report, contender: Contender) -> dict[str, str]:
    """Return the heading and the caption of a picture of a row, which its file keeps for the report."""
    seed = "" if contender.is_scripted else f", seed {row.seed}"
    if kind == "attention":
        return {
            "Title": f"What {row.policy} reads of the text{seed}",
            "Description": "Attention from the first observation to each token of a task text, by layer.",
        }
    score = f"{format_number(row.score)} over {row.n} episodes"
    return {
        "Title": f"Episodes of {row.policy}{seed}",
        "Description": f"{row.world}, {row.protocol}: mean score {score}, of which some are drawn.",
    }


def file_name(*words: str) -> str:
    """Return these words, but empty ones, as the name of a file."""
    return safe_name("-".join(filter(None, words)))
