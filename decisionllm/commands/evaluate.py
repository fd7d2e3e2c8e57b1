"""The command `evaluate`: roll runs out beside scripted baselines, write results and a report."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from decisionllm.baselines.d3rlpy import Baseline
from decisionllm.checks import check_seed, one_of
from decisionllm.command_line import with_defaults
from decisionllm.config import env_options_of, merged
from decisionllm.eval import attention, intervals, report, watching, word_probe
from decisionllm.eval.identity import nearest, options_of, resolved
from decisionllm.eval.layout import check_env
from decisionllm.eval.rollout import begin_in, rollout
from decisionllm.eval.text_variants import read_pairs
from decisionllm.files import append_line, check_writable, explained, read_lines, safe_name
from decisionllm.policy.opening import OpenedRun, open_runs, run_directories
from decisionllm.policy.policy import Policy
from decisionllm.progress import shown
from decisionllm.protocols import Begin, Env
from decisionllm.registry import Node, build, is_none, lacks_text
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Episode, Json, Report, Spec, Targets
from decisionllm.trust import trusting_user

# options of acting that a result row has in a column, or in the name of its policy
IN_COLUMNS = ("act.decode", "act.planning_horizon", "team.execution")


class Contender(NamedTuple):
    """A player to roll out."""

    name: str
    scripted: bool
    begin: Begin
    about: Json  # fields of its `Report`
    columns: Json  # further columns of its result rows, in `Report.extra`


@trusting_user
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
    paths = check_options(config)
    runs = open_runs(paths, config, each_part=True)  # all of them, before any work is lost
    if config["probe"]:
        for run in runs:
            word_probe.check_reads_text(run)

    # Seeds of one experiment come one after the other and share their environment, which may be
    # slow to build.
    @lru_cache(maxsize=1)
    def make(node: str) -> Env:
        env: Env = build(json.loads(node), config["episodes"])
        return env

    results = Results(Path(config["out"] or paths[0].parent), report=config["report"])
    for run in runs:
        evaluate_run(run, config, make, results)
    results.summarise()
    return results.path


def check_options(config: Node) -> list[Path]:
    """The run directories; a ValueError if an option cannot be. Target returns become floats."""
    runs = run_directories(config["run"])
    if not runs or config["episodes"] < 1:
        got = f"{config['run']} and {config['episodes']}"
        raise ValueError(f"run, episodes: expected at least one of each, got {got}")
    check_seed("seed", config["seed"])
    for key in ("target_quantiles", "target_returns"):
        with explained(f"{key}: expected numbers", ValueError, TypeError):
            config[key] = [float(number) for number in config[key]]
    if config["probe"] is not None:
        one_of("probe", config["probe"], ("words",))
    if config["probe_pairs"] is not None:
        if config["probe"] is None:
            raise ValueError(
                f"probe_pairs={config['probe_pairs']}: needs probe=words, got probe=null"
            )
        read_pairs(config["probe_pairs"])
    return runs


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
        self.console = Console(soft_wrap=True, markup=False, highlight=False)
        self.published: dict[str, dict[str, float]] = {}  # scores by world
        self.units: dict[str, str] = {}  # of the score, by world
        self.played_by_baselines: set[str] = set()  # environments, as JSON
        self.drawn: dict[str, Path] = {}  # the run by the label of its pictures
        self.probes = folder / word_probe.FILE
        written = [self.path.name, self.probes.name, *(["report.html"] if report else [])]
        check_writable(folder, *written)  # now, not after hours of rollouts
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.probes):
            if path.is_file():
                read_lines(path)  # a damaged line is an error now too

    def say(self, line: str) -> None:
        self.console.print(line)

    def describe(self, world: str, dataset: Json, env: Env) -> None:
        """Keep what the report shows beside the scores of a world."""
        self.published.setdefault(world, {}).update(published_scores(env, dataset))
        self.units[world] = env.unit

    def lacks_baselines(self, env: str) -> bool:
        """Whether this is asked for an environment, as JSON, for the first time."""
        is_new = env not in self.played_by_baselines
        self.played_by_baselines.add(env)
        return is_new

    def add(self, row: Report) -> None:
        """Append a row to results.jsonl and print it."""
        append_line(self.path, row.row())
        self.say(line(row))

    def add_probe(self, row: Json) -> None:
        """Append the shares of an instruction probe to word_probe.jsonl."""
        append_line(self.probes, row)

    def summarise(self) -> None:
        """Print the tables of all rows, and write the report."""
        tables = report.tables(report.summarise(report.read_rows(self.folder)))
        tables += [probe.table() for probe in report.read_probes(self.folder)]
        for table in tables:
            # the terminal breaks a table that is wider: no column is lost
            self.console.print(table, soft_wrap=False, crop=False)
        if self.report:
            self.say(f"report: {report.write_report(self.folder, self.published, self.units)}")


def evaluate_run(
    run: OpenedRun, config: Node, make: Callable[[str], Env], results: Results
) -> None:
    """Roll out a run with each of its targets, and scripted players once in each world."""
    node, changed = chosen_environment(run, config)
    as_json = json.dumps(node, sort_keys=True)  # the same text of equal nodes
    env = make(as_json)
    note = check_env(Spec.of(run.info["spec"]), run.info["dataset"], env, str(run.path))
    say_notes(results, note, run, config)
    world = world_name(run, env)
    results.describe(world, run.info["dataset"], env)
    if config["probe"]:
        pairs = word_probe.prepare_pairs(run, env, config["seed"], config["probe_pairs"])
    contenders = policy_contenders(run, env, config)
    step = checkpoint.stopped_at(run.path)
    if step is not None:
        stopped = f"stopped at step {step:,}"
        results.say(f"{run.path}: the training is not finished, it has {stopped}")
        for contender in contenders:
            contender.columns["changed"] = ", ".join(filter(None, [changed, stopped]))
    if config["baselines"] and results.lacks_baselines(as_json):
        contenders += scripted_contenders(env, node, config["seed"])
    where = {"env_seed": config["seed"]}
    if changed:
        where["changed"] = changed
    for contender in contenders:
        episodes, seconds = play(contender, env, config["seed"], run)
        if contender is contenders[0]:
            say_unread_texts(results, episodes, env, run)
            for note in env.notes():
                results.say(f"{run.path}: {note}")
            say_constant_actions(results, episodes, run)
        rows = list(result_rows(contender, episodes, seconds, env, run, where))
        for row, part in rows:
            results.add(row)
            if results.report:
                draw(row, part, contender, env, run, results)
        if config["probe"] and contender is contenders[0]:
            about, _ = rows[0]
            probe = word_probe.probe_run(run, env, episodes, about.row(), config, pairs)
            results.add_probe(probe)
            if all(variant["as_other"] is None for variant in probe["variants"]):
                nothing = (
                    "its data and environment have one task text, so that there is no other task"
                )
                results.say(f"{run.path}: {nothing} to ask for with probe=words")


def world_name(run: OpenedRun, env: Env) -> str:
    """The name of an environment's world in results; see `Env.name`."""
    return env.name or str(run.info["dataset"]["name"])


def chosen_environment(run: OpenedRun, config: Node) -> tuple[Node, str]:
    """The environment that a run is rolled out in, as its config node, and what is not the run's
    own, such as "agents=5, act.stride=1".
    """
    own = run.config["env"]
    given = env_options_of(run.config, config["env"])
    if is_none(own) and not given:
        example = "+env._target_=decisionllm.eval.gymnasium.make +env.id=CartPole-v1"
        nothing = "env=none, there is no environment to roll out in"
        raise ValueError(f"{run.path}: {nothing}; give one, such as {example}")
    same = given.get("_target_", own["_target_"]) == own["_target_"]
    emptied = {key: value for key, value in given.items() if value == {}}  # instead of merged
    node = merged(own if same else {}, given) | emptied
    if not same and lacks_text(node, run.config["text"]):
        node["text"] = run.config["text"]
    changed = changed_acting(run.config, config)
    if given:
        changed = changed_env(own, given, node, run.config) + changed
    return node, ", ".join(changed)


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


def say_notes(results: Results, note: str, run: OpenedRun, config: Node) -> None:
    """Print the note on the environment, options that have no effect on a baseline, and whether the
    weights were chosen by the score that is measured.
    """
    if note:
        results.say(note)
    keep_best = run.config.get("log", {}).get("keep_best")
    if keep_best == "score" and config["seed"] == watching.SEED:
        why = f"rollouts of seed={watching.SEED} chose its weights (log.keep_best=score)"
        results.say(f"{run.path}: {why}, so that this score is too high; give another seed=")
    given = config["act"] | config["team"]
    ignored = ", ".join(key for key, value in given.items() if value is not None)
    if isinstance(run.policy, Baseline) and ignored:
        effect = f"{ignored} of act and team have no effect on it"
        results.say(f"{run.path}: a baseline acts by its network's mean; {effect}")


def say_unread_texts(results: Results, episodes: list[Episode], env: Env, run: OpenedRun) -> None:
    """Print how many task texts of the episodes the policy has not been trained on, if any."""
    known = run.info.get("tasks", env.tasks)
    unread = sorted({episode.task for episode in episodes}.difference(known))
    if unread:
        what = f"{len(unread)} task texts of the environment were not in its data"
        results.say(f"{run.path}: {what}, such as {unread[0]!r}")


def say_constant_actions(results: Results, episodes: list[Episode], run: OpenedRun) -> None:
    """Print which columns of continuous actions never change, if any: such a policy has learned to
    ignore what it observes, and its loss does not say so.
    """
    if run.info["spec"]["num_actions"]:
        return  # one discrete action may be the best everywhere
    actions = np.concatenate([episode.actions for episode in episodes])
    constant = np.flatnonzero((actions == actions[0]).all(0)).tolist()
    if constant and len(actions) > 1:
        what = f"columns {constant} of the action are {actions[0, constant].tolist()} at every step"
        why = "at a bound the mean of head=gaussian has no gradient"
        results.say(f"{run.path}: {what}; {why}, a lower optim.lr keeps it away from there")


def policy_contenders(
    run: OpenedRun,
    env: Env,
    config: Node,
) -> list[Contender]:
    """The policy once for each target return, see `targets`."""
    policy = run.policy
    name = run.config["name"]
    if policy.planning_horizon:
        name += f"+plan{policy.planning_horizon}"
    if policy.execution == "joint":
        name += "+joint"
    columns = policy_columns(run, env)
    contenders = []
    for target, each in targets(run, env, config).items():
        predicted = policy.return_conditioned and target is None
        about = {
            "text": env.text_label,
            "seed": run.config["seed"],
            "target_return": target,
            "headline": target == headline(policy),
            "options": options_of(run.config),
        }
        label = f"{name}+max-return" if predicted else name
        begin = partial(begin_in, policy, env, each, config["seed"])
        contenders.append(Contender(label, False, begin, about, columns))
    return contenders


def targets(run: OpenedRun, env: Env, config: Node) -> dict[float | None, Targets]:
    """Target returns: the headline, quantiles of the training returns, and given returns.

    Returns:
        {name in a result row: one target for all episodes, or (N,) one for each}.
    """
    policy, info = run.policy, run.info
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


def policy_columns(run: OpenedRun, env: Env) -> Json:
    """The further columns that all result rows of a policy share."""
    policy, config, info = run.policy, run.config, run.info
    columns = {
        "run": str(run.path),
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


def scripted_contenders(env: Env, node: Node, seed: int) -> list[Contender]:
    """The scripted players of an environment. node: its config."""
    about = {
        "text": "none",
        "seed": seed,
        "target_return": None,
        "headline": True,
        "options": options_of({"env": node, "name": ""}),
    }
    players = env.baselines(seed)
    return [Contender(name, True, begin, about, {}) for name, begin in players.items()]


def play(
    contender: Contender,
    env: Env,
    seed: int,
    run: OpenedRun,
) -> tuple[list[Episode], float]:
    """The episodes of one player, and the seconds they took."""
    # a scripted player need not read observations of the size that the run was trained on
    size = 0 if contender.scripted else run.info["spec"]["observation_dim"]
    title = f"{contender.name} {contender.about['target_return'] or ''}".rstrip()
    with shown(title, env.horizon) as advance:
        began = time.monotonic()
        episodes = rollout(contender.begin, env, seed=seed, progress=advance, observation_dim=size)
        return episodes, time.monotonic() - began


def result_rows(
    contender: Contender,
    episodes: Sequence[Episode],
    seconds: float,
    env: Env,
    run: OpenedRun,
    where: Json,
) -> Iterator[tuple[Report, list[Episode]]]:
    """A result row for each condition of the environment, with the episodes that it is about."""
    conditions = env.conditions(run.policy.execution, contender.scripted)
    world = world_name(run, env)
    dataset = world if contender.scripted else run.info["dataset"]["name"]
    for protocol, members in conditions.items():
        part = [episodes[i] for i in members]
        scores = env.score(part)
        clusters = None if env.clusters is None else env.clusters[members]
        low, high = intervals.over_episodes(scores, clusters)
        returns = [episode.rewards.sum() for episode in part]
        row = Report(
            **contender.about,
            world=world,
            dataset=dataset,
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
    target = report.target_words(row.target_return)
    score, low, high = (report.number(x) for x in (row.score, row.low, row.high))
    scores = f"score {score:>6s}  [{low}, {high}]"
    about = f"{row.policy:24s} target {target:>6s}"
    return f"{about}  {scores}  {row.seconds:.1f} s  {row.protocol}"


def draw(
    row: Report,
    part: Sequence[Episode],
    contender: Contender,
    env: Env,
    run: OpenedRun,
    results: Results,
) -> None:
    """Write pictures of a headline row of the first condition, unless they are there already."""
    policy = run.policy
    first, *_ = env.conditions(policy.execution, contender.scripted)
    if not row.headline or row.protocol != first:
        return
    label = picture_label(row, contender, run, results.drawn)
    if label in results.drawn:
        return
    results.drawn[label] = run.path
    title = f"{row.policy}, {row.protocol}: {report.number(row.score)}"
    pictures = {"rollout": env.draw(part, title)}
    if isinstance(policy, Policy) and not contender.scripted:
        title = f"{row.policy}: attention to the text"
        pictures["attention"] = attention.draw(policy, part, title)
    for name, picture in pictures.items():
        if picture is not None:
            picture.savefig(results.folder / f"{name}-{label}.png")


def picture_label(
    row: Report, contender: Contender, run: OpenedRun, drawn: Mapping[str, Path]
) -> str:
    """The label of a row's pictures; with its path where another run has the same label.

    drawn: the run of each label. Scripted players are the same in every run.
    """
    changed = row.extra.get("changed", "")
    part = run.config.get("part", "")
    label = file_name(row.policy, row.protocol, changed, str(row.seed), part)
    owner = drawn.get(label, run.path)
    if contender.scripted or owner == run.path:
        return label
    return file_name(label, str(run.path))


def file_name(*words: str) -> str:
    """These words, but empty ones, as the name of a file."""
    return safe_name("-".join(filter(None, words)))
