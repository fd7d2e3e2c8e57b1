"""Logs of many agents in one world: each stay of each agent is an episode, and the episodes of one
world share their group.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.action_range import separate_bounds
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.store import Store
from decisionllm.files import explain_errors
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json, Spec
from decisionllm.teams.agent_episodes import AgentEpisodes, Task, build_agent_episodes
from decisionllm.teams.formats import marl_archives
from decisionllm.teams.formats.log_meta import merge_meta
from decisionllm.teams.formats.team_log import Log
from decisionllm.teams.formats.team_parquet import read, read_meta, write
from decisionllm.teams.pettingzoo.collect import collect
from decisionllm.teams.texts import TEXTS, task_text, team_facts
from decisionllm.tokenizers.entities import vector_columns

__all__ = ["Log", "collect", "load", "read", "source", "write"]
# keys of meta that a store repeats
COPIED = (
    "env",
    "world",
    "references",
    "generator",
    "seed",
    "source",
    "licence",
    "repairs",
    "faults",
)


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
        meta: a JSON file that is laid over the log's meta, see `log_meta`, such as its name, task,
            reward_rule, or the roles and blocks of its types; the only type of a public log is
            `agent`.
        cut: steps of a world in an OMAR log.
    """
    logs = make_log_reader(path, meta, cut)
    log_options = {
        "path": path,
        "format": marl_archives.detect_format(path),
        "meta": meta,
        "cut": cut,
    }
    return source(logs, text=text, capacity=capacity, returns=returns, team=team, **log_options)


def make_log_reader(path: str, meta: str = "", cut: int = 25) -> Callable[[], Iterator[Log]]:
    """Return a function that yields the Logs of a path, see `load`.

    Each is of some whole worlds, with the file `meta` laid over its meta.
    """
    file = Path(path).expanduser()
    kind = marl_archives.detect_format(path)
    overlay_meta = partial(_overlay_meta, path=path, meta=meta)
    if kind == "ours":
        log = read(file)
        return lambda: iter([replace(log, meta=overlay_meta(log.meta))])

    def logs() -> Iterator[Log]:
        for log in marl_archives.read_archive(file, kind, cut=cut):
            yield replace(log, meta=overlay_meta(log.meta))

    return logs


def load_meta(path: str, meta: str = "") -> Json:
    """Load the meta of a log without the tables, where the log is in our own format."""
    if marl_archives.detect_format(path) == "ours":
        return _overlay_meta(read_meta(Path(path).expanduser()), path, meta)
    return reduce(merge_meta, (log.meta for log in make_log_reader(path, meta)()))


def _overlay_meta(log_meta: Json, path: str, meta: str) -> Json:
    """Lay the JSON file `meta` over the meta of a log, and give it a name."""
    file = Path(path).expanduser()
    name = f"team@{file.stem}"
    if marl_archives.detect_format(path) == "vault":
        name = f"team@{file.parent.name}-{file.stem}"
    overlay: Json = {}
    types: Json = {}
    with explain_errors(
        f"dataset.meta: expected a JSON file that describes a log, got {meta}",
        OSError,
        ValueError,
        AttributeError,
        TypeError,
    ):
        if meta:
            overlay = json.loads(Path(meta).expanduser().read_text(encoding="utf-8-sig"))
        overlay_types = overlay.get("types", {})
        for name_of_type, agent_type in log_meta["types"].items():
            types[name_of_type] = agent_type | overlay_types.get(name_of_type, {})
    for name_of_type in overlay_types:
        check_one_of("dataset.meta, types", name_of_type, types)
    return {"name": name} | log_meta | overlay | {"types": types}


def list_files(*, path: str, meta: str = "", **options: object) -> list[Path]:
    """List the files that `load` reads with these options."""
    root = Path(path).expanduser()
    paths = [root]
    if marl_archives.detect_format(path) != "pymarl":
        paths = sorted(file for file in root.rglob("*") if file.is_file())
    if meta:
        paths.append(Path(meta).expanduser())
    return paths


def source(
    logs: Log | Callable[[], Iterable[Log]],
    *,
    text: str = "none",
    capacity: int = 6,
    returns: str = "",
    team: int = 0,
    **info: object,
) -> Source:
    """Build the episodes of a log, one for each stay of each agent of `team`.

    Other teams are part of the world.

    An agent that is absent for some steps has an episode for each stay. One whose rows end before
    the world's without `terminated` has left, and is truncated. A world must end, with `terminated`
    or `truncated` on its last step.

    Args:
        logs: the log; or () -> its parts, Logs of some whole worlds each, which are read twice
            where there are several.
        text: `none`; `constant` names the task; `informative` also the team's size and the agent's
            role; `shuffled` is `informative` with the texts permuted between episodes;
            `paraphrased` is `informative` in the wordings of `frames.yaml`, another one in
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
    check_one_of("dataset.text", text, TEXTS)
    parts = partial(list, [logs]) if isinstance(logs, Log) else logs
    read_episodes = partial(build_agent_episodes, capacity=capacity, returns=returns, team=team)

    meta: Json = {}
    tasks: list[Task] = []  # of each episode
    distinct_tasks: dict[Task, Task] = {}  # episodes share an object, since there are many
    count = 0  # parts
    masked = False
    for agent_episodes in map(read_episodes, parts()):
        meta = merge_meta(meta, agent_episodes.meta)
        tasks += [distinct_tasks.setdefault(task, task) for task in agent_episodes.tasks]
        count += 1
        masked |= agent_episodes.has_forbidden_actions
    if meta.get("shared_reward") and agent_episodes.returns != "team":
        raise ValueError(
            f"dataset.returns={agent_episodes.returns}: expected a reward of each agent, got one "
            "for the whole team"
        )

    store_info = build_info(meta, agent_episodes) | {"text": text, "capacity": capacity}
    store_info |= {"returns": agent_episodes.returns, "team": team, **info}
    if text == "paraphrased":
        store_info["wordings"] = {
            task_text(meta, *task): team_facts(meta, *task) for task in distinct_tasks
        }

    def episodes() -> Iterator[Episode]:
        episode_parts: Iterable[AgentEpisodes] = [agent_episodes]
        if count > 1:  # several parts are read again, as parts of one log
            episode_parts = (read_episodes(replace(log, meta=meta)) for log in parts())
        texts = iter(build_texts(meta, tasks, text))
        for part in episode_parts:
            yield from part.episodes(texts, masked=masked)

    return Source(build_spec(meta, agent_episodes), episodes(), store_info)


def build_texts(meta: Json, tasks: Sequence[Task], text: str) -> list[str]:
    """Return the text of each episode.

    Args:
        meta: of the log.
        tasks: of each episode.
        text: see `source`.
    """
    text_of = {task: task_text(meta, *task, text) for task in set(tasks)}
    texts = [text_of[task] for task in tasks]
    if text == "shuffled":
        return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    return texts


def build_spec(meta: Json, episodes: AgentEpisodes) -> Spec:
    """Build the spaces of all agents of a log, from some of its episodes."""
    types = list(meta["types"].values())
    shapes = {
        "observation_dim": episodes.observations.shape[1],
        "action_dim": episodes.actions.shape[1],
        "horizon": int(meta["horizon"]),
        "entity_schema": episodes.schema,
    }
    if "num_actions" in types[0]:
        return Spec(**shapes, num_actions=max(agent_type["num_actions"] for agent_type in types))
    low, high = separate_bounds(types[0]["low"], types[0]["high"])
    return Spec(**shapes, low=low, high=high)


def build_info(meta: Json, episodes: AgentEpisodes) -> Json:
    """Build the info of a store of a log, from some of its episodes."""
    info = {"name": meta.get("name", "team"), "env": "none"}
    for key in COPIED:
        if key in meta:
            info[key] = meta[key]
    if meta.get("plane"):
        info["vectors"] = vector_columns(episodes.schema, len(meta["types"]))
    return info


def save(folder: str, store: Store) -> None:
    """Write the log that a store was made of, see `write`.

    The log is read again, since a store has one layout for all types.
    """
    if store.info.get("format") is None or store.agent is None:
        raise ValueError(
            "export=team: expected a dataset of many agents (dataset=team), got "
            f"{store.info['name']}"
        )
    logs = make_log_reader(store.info["path"], store.info["meta"], store.info["cut"])
    write(folder, logs())


READER = DatasetReader(files=list_files)
