"""Logs of many agents in one world: each stay of each agent is an episode, and the episodes of one
world share their group.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import numpy as np

from decisionllm.checks import one_of
from decisionllm.datasets.action_range import separate_bounds
from decisionllm.datasets.store import DatasetReader, Store
from decisionllm.files import explained
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Json, Spec
from decisionllm.teams.agent_episodes import Stays, Task, stays_of
from decisionllm.teams.formats import marl_archives
from decisionllm.teams.formats.pettingzoo import collect
from decisionllm.teams.formats.team_log import Log, common_meta, read, read_meta, write
from decisionllm.teams.texts import TEXTS, task_text, team_facts
from decisionllm.tokenizers.entities import vectors

__all__ = ["Log", "collect", "load", "read", "source", "write"]
# keys of meta that a store repeats
KEPT = ("env", "world", "references", "generator", "seed", "source", "licence", "repairs", "faults")


@register("dataset", "team", text="${text}")
def load(
    *,
    path: str,
    text: str = "none",
    capacity: int = 6,
    returns: str = "",
    team: int = 0,
    meta: str = "",
    cut: int = 25,
) -> Source:
    """A log of many agents: a folder that `write` wrote, a Vault, a folder of OMAR's, or a PyMARL
    .h5, found by its files.

    Args:
        path: the folder or file.
        text, capacity, returns, team: see `source`.
        meta: a JSON file that is laid over the log's meta, see `team_log`, such as its name, task,
            reward_rule, or the roles and blocks of its types; the only type of a public log is
            `agent`.
        cut: steps of a world in an OMAR log.
    """
    logs = logs_of(path, meta, cut)
    given = {"path": path, "format": marl_archives.kind_of(path), "meta": meta, "cut": cut}
    return source(logs, text=text, capacity=capacity, returns=returns, team=team, **given)


def logs_of(path: str, meta: str = "", cut: int = 25) -> Callable[[], Iterator[Log]]:
    """() -> the Logs of a path, see `load`, each of some whole worlds, with the file `meta` laid
    over their meta.
    """
    file = Path(path).expanduser()
    kind = marl_archives.kind_of(path)
    overlaid = partial(_overlaid, path=path, meta=meta)
    if kind == "ours":
        log = read(file)
        return lambda: iter([replace(log, meta=overlaid(log.meta))])

    def logs() -> Iterator[Log]:
        for log in marl_archives.logs(file, kind, cut=cut):
            yield replace(log, meta=overlaid(log.meta))

    return logs


def meta_of(path: str, meta: str = "") -> Json:
    """The meta of `logs_of`; the tables of a log in our own format are not read."""
    if marl_archives.kind_of(path) == "ours":
        return _overlaid(read_meta(Path(path).expanduser()), path, meta)
    return reduce(common_meta, (log.meta for log in logs_of(path, meta)()))


def _overlaid(found: Json, path: str, meta: str) -> Json:
    """The meta of a log with the JSON file `meta` laid over it, and a name."""
    file = Path(path).expanduser()
    name = f"team@{file.stem}"
    if marl_archives.kind_of(path) == "vault":
        name = f"team@{file.parent.name}-{file.stem}"
    more: Json = {}
    types: Json = {}
    wanted = f"dataset.meta: expected a JSON file that describes a log, got {meta}"
    with explained(wanted, OSError, ValueError, AttributeError, TypeError):
        if meta:
            more = json.loads(Path(meta).expanduser().read_text(encoding="utf-8-sig"))
        described = more.get("types", {})
        for each, known in found["types"].items():
            types[each] = known | described.get(each, {})
    for each in described:
        one_of("dataset.meta, types", each, types)
    return {"name": name} | found | more | {"types": types}


def files(*, path: str, meta: str = "", **options: object) -> list[Path]:
    """The files that `load` reads with these options."""
    given = Path(path).expanduser()
    found = [given]
    if marl_archives.kind_of(path) != "pymarl":
        found = sorted(file for file in given.rglob("*") if file.is_file())
    if meta:
        found.append(Path(meta).expanduser())
    return found


def source(
    logs: Log | Callable[[], Iterable[Log]],
    *,
    text: str = "none",
    capacity: int = 6,
    returns: str = "",
    team: int = 0,
    **info: object,
) -> Source:
    """A log as episodes, one for each stay of each agent of `team`; other teams are part of the
    world.

    An agent that is absent for some steps has an episode for each stay. One whose rows end before
    the world's without `terminated` has left, and is truncated. A world must end, with `terminated`
    or `truncated` on its last step.

    Args:
        logs: the log; or () -> its parts, Logs of some whole worlds each, which are read twice
            where there are several.
        text: `none`; `constant` names the task; `informative` also the team's size and the agent's
            role; `shuffled` is `informative` with the texts permuted between episodes;
            `paraphrased` is `informative` in the wordings of `team_frames.yaml`, another one in
            each window.
        capacity: the most agents of a team, and the entities of a kind that an observation has room
            for.
        returns: `team`, the team's reward; `own`, the agent's; `mean`, the mean reward of all
            agents that the team ever has;
            empty: meta's, or `team` if the log has a team reward.
        team: whose agents are read.
        info: further facts that a result must report.

    Raises:
        ValueError: a row that cannot be, with its table, number and key.
    """
    one_of("dataset.text", text, TEXTS)
    parts = partial(list, [logs]) if isinstance(logs, Log) else logs
    read_stays = partial(stays_of, capacity=capacity, returns=returns, team=team)

    meta: Json = {}
    tasks: list[Task] = []  # of each stay
    known: dict[Task, Task] = {}  # the different ones: stays share an object, for there are many
    count = 0  # parts
    masked = False  # whether an action is ever forbidden
    for stays in map(read_stays, parts()):
        meta = common_meta(meta, stays.meta)
        tasks += [known.setdefault(task, task) for task in stays.tasks]
        count += 1
        masked |= stays.masked
    if meta.get("shared_reward") and stays.returns != "team":
        wanted = "a reward of each agent, got one for the whole team"
        raise ValueError(f"dataset.returns={stays.returns}: expected {wanted}")

    found = facts_of_log(meta, stays) | {"text": text, "capacity": capacity}
    found |= {"returns": stays.returns, "team": team, **info}
    if text == "paraphrased":
        found["wordings"] = {task_text(meta, *task): team_facts(meta, *task) for task in known}

    def episodes() -> Iterator[Episode]:
        again: Iterable[Stays] = [stays]
        if count > 1:  # several parts are read again, as parts of one log
            again = (read_stays(replace(log, meta=meta)) for log in parts())
        texts = iter(texts_of_stays(meta, tasks, text))
        for part in again:
            yield from part.episodes(texts, masked=masked)

    return Source(spec_of(meta, stays), episodes(), found)


def texts_of_stays(meta: Json, tasks: Sequence[Task], text: str) -> list[str]:
    """The text of each stay.

    Args:
        meta: of the log.
        tasks: of each stay.
        text: see `source`.
    """
    text_of = {task: task_text(meta, *task, text) for task in set(tasks)}
    texts = [text_of[task] for task in tasks]
    if text == "shuffled":
        return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    return texts


def spec_of(meta: Json, stays: Stays) -> Spec:
    """The spaces of all agents of a log, of which these are some stays."""
    types = list(meta["types"].values())
    shapes = {
        "observation_dim": stays.observations.shape[1],
        "action_dim": stays.actions.shape[1],
        "horizon": int(meta["horizon"]),
        "entity_schema": stays.schema,
    }
    if "num_actions" in types[0]:
        return Spec(**shapes, num_actions=max(each["num_actions"] for each in types))
    low, high = separate_bounds(types[0]["low"], types[0]["high"])
    return Spec(**shapes, low=low, high=high)


def facts_of_log(meta: Json, stays: Stays) -> Json:
    """The info of a store of a log, of which these are some stays."""
    found = {"name": meta.get("name", "team"), "env": "none"}
    for key in KEPT:
        if key in meta:
            found[key] = meta[key]
    if meta.get("plane"):
        found["vectors"] = vectors(stays.schema, len(meta["types"]))
    return found


@register("export", "team")
def save(folder: str, store: Store) -> None:
    """Write the log that a store was made of, see `write`.

    The log is read again, since a store has one layout for all types.
    """
    if store.info.get("format") is None or store.agent is None:
        wanted = "a dataset of many agents (dataset=team)"
        raise ValueError(f"export=team: expected {wanted}, got {store.info['name']}")
    logs = logs_of(store.info["path"], store.info["meta"], store.info["cut"])
    write(folder, logs())


READER = DatasetReader(files=files)
