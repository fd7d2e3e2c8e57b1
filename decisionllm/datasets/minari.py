"""Minari datasets read through the real library: Box, Discrete, MultiDiscrete, MultiBinary, Dict or
Tuple observations; Box, Discrete or MultiDiscrete actions.

A world whose public datasets have defects repairs them on reading, see `MinariRepair`.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.action_range import separate_bounds
from decisionllm.datasets.action_spaces import action_parts, action_spec, encode_actions
from decisionllm.datasets.arrays import check_bounds, clip_actions
from decisionllm.datasets.categorical import (
    Declaration,
    as_categorical,
    categorical_columns,
    categorical_sizes,
    grid_schema,
)
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.env_texts import choose_task_from, get_task_text, values_by_path
from decisionllm.datasets.running_statistics import RunningStatistics
from decisionllm.datasets.space_parts import AnySpace, observation_parts, text_parts, text_values
from decisionllm.datasets.spaces import flatten
from decisionllm.datasets.templates import (
    TEXTS,
    describe_unread_task,
    fixed_task_text,
    label_text,
    make_text_writer,
)
from decisionllm.files import AGAIN, explain_errors
from decisionllm.protocols import Source
from decisionllm.registry import function_names, get_function
from decisionllm.schema import Episode, Json, Spec
from decisionllm.trust import is_typed, local_minari_id

if TYPE_CHECKING:
    from minari import EpisodeData, MinariDataset


class MinariRepair(Protocol):
    """Repairs defects of the Minari datasets of a world. The table of a world's folder
    names a function in the group `minari_repair`: dataset -> its repair; None for datasets of other
    worlds.

    Attributes:
        part_without_goal: the key of a Dict observation that a policy reads alone with goal=fixed.
    """

    part_without_goal: str

    def repair_observations(self, observations: Any) -> Any:
        """Return the observations of an episode, stacked, without their defects."""
        ...

    def reward_of_fixed_goal(self) -> Callable[[Any], np.ndarray]:
        """Return the reward function of goal=fixed: repaired observations of n + 1 steps, stacked ->
        (n,) float32.
        """
        ...


def load(
    *,
    minari_id: str,
    text: str = "auto",
    task: str = "",
    task_from: str = "",
    goal: str = "fixed",
    categorical: Declaration = None,
    horizon: int = 0,
    low: Sequence[float] = [],
    high: Sequence[float] = [],
    clip: bool = False,
) -> Source:
    """Read a Minari dataset.

    Args:
        minari_id: its id on this machine, or the path of its folder; or a remote one, such as
            `hf://farama-minari/D4RL/door/human-v2`, which is downloaded unless it is here.
        text: `auto`: the text that `task_from` names, if any; `none`: no texts; `constant`: the
            task, or else the dataset's id and description; `template`: the task with the numbers of
            parts of the first observation, see `templates.make_text_writer`; `episode`: the text
            that `task_from` names.
        task: the text of every episode, such as "Reach the goal." or, with text=template, "Go to
            {desired_goal}."
        task_from: `info.KEY`: the text of an episode is what its recorded infos have under KEY;
            `observation.NAME`: the part NAME of its observations, which is a text; empty: neither is
            read, but with text=episode the one part that is a text.
        goal: of PointMaze: `fixed`, the one goal of evaluation, or `own`, the goal of each episode,
            see `worlds.maze2d.pointmaze`.
        categorical: {NAME: sizes} or [NAME] of the parts of an observation that are integers and
            name categories, which are read one-hot; see `categorical.as_categorical`. The cells of
            grids are entities, see `categorical.grid_schema`.
        horizon: refuse longer episodes; 0: the longest one, or the time limit of the evaluation
            environment if that is more.
        low: (A,) least action, raw units; empty: of the action space, or of the data where it has
            none.
        high: (A,) greatest action, as `low`.
        clip: clip actions to these bounds, as an environment does that clips those of a policy;
            they are an error otherwise.

    Raises:
        FileNotFoundError: there is no such dataset, or it cannot be downloaded.
        ValueError: it is damaged, or its spaces are not supported.
    """
    download_missing(minari_id)
    check_one_of("dataset.text", text, TEXTS)
    check_one_of("dataset.goal", goal, ("fixed", "own"))
    check_bounds(low, high)
    dataset = open_dataset(minari_id)
    sizes = action_parts(dataset.action_space)  # refuses other spaces before anything is read
    if sizes and (len(low) or len(high) or clip):
        raise ValueError(
            f"dataset: expected none of low, high and clip with discrete actions, "
            f"{dataset.action_space}, got {list(low)}, {list(high)} and {clip}"
        )
    repair = find_repair(dataset)
    part = policy_part(dataset, goal)
    reward_of_goal = None
    if repair is not None and goal == "fixed":
        reward_of_goal = repair.reward_of_fixed_goal()
    space = policy_space(dataset.observation_space, part, categorical, "dataset.categorical")
    parts = observation_parts(space)
    names = text_parts(space)
    task_from = choose_task_from("dataset", task_from, text, names)
    fixed_text = resolve_task_text("dataset", dataset, text, task)
    write = None
    if text == "template":
        suffix = "dataset.goal=own keeps the goal in the observation" if part else ""
        write = make_text_writer("dataset.task", fixed_text, parts, texts=names, suffix=suffix)

    early_ends: list[int] = []  # episodes that go on after an end
    unread_paths: dict[str, None] = {}  # in their order

    def episodes() -> Iterator[Episode]:
        early_ends.clear()
        for e, raw in enumerate(_read_raw_episodes(dataset)):
            if goes_on_after_end(raw):
                early_ends.append(e)
            try:
                episode = _build_episode(dataset, raw, part, space, repair, reward_of_goal)
                observed_texts = text_values(select_part(raw.observations, part), space)
                values = values_by_path(raw.infos or {}, observed_texts)
                task_text = fixed_text
                if write is not None:
                    first = {name: str(texts[0]) for name, texts in observed_texts.items()}
                    task_text = write(episode.observations[0], first)
                if task_from:
                    task_text = get_task_text(values, task_from, "dataset.task_from")
            except ValueError as error:
                raise ValueError(f"{dataset.id}, episode {e}: {error}") from error
            unread_paths.update(dict.fromkeys(values))
            yield replace(episode, group=e, task=task_text)

    spec = _infer_spec(dataset, episodes(), horizon, low, high)  # the first of two passes
    spec = replace(spec, categorical=categorical_columns(space), entity_schema=grid_schema(space))
    info: Json = {
        "name": dataset.id,
        "env": "minari",
        "text": label_text(text, has_own=bool(task_from)),
    }
    unread_paths.pop(task_from, None)
    if unread_paths:
        info["unread"] = list(unread_paths)
    faults = [*describe_unread_task(info["text"], task), *describe_early_ends(early_ends)]
    if faults:
        info["faults"] = faults
    if clip:
        info["clip"] = True
    info["goal"] = goal if repair is not None else ""
    metadata = dataset.storage.metadata
    for key in ("ref_min_score", "ref_max_score"):
        if key in metadata:
            info[key] = metadata[key]
    info["observation_parts"] = [list(part) for part in parts]
    if categorical:
        info["categorical"] = categorical_sizes(space)
    if len(sizes) > 1:
        info["action_parts"] = sizes
    return Source(spec, clip_actions(episodes(), spec) if clip else episodes(), info)


def find_repair(dataset: "MinariDataset") -> MinariRepair | None:
    """Return the repair that a world has for this dataset; None: it is read as it is."""
    for name in function_names("minari_repair"):
        repair: MinariRepair | None
        repair = get_function("minari_repair", name, "minari_repair")(dataset)
        if repair is not None:
            return repair
    return None


def goes_on_after_end(raw: "EpisodeData") -> bool:
    """Return whether an episode has steps after one that ended it."""
    return bool(np.any(raw.terminations[:-1]) or np.any(raw.truncations[:-1]))


def describe_early_ends(episodes: Sequence[int]) -> list[str]:
    """Return the fault of these episodes, which go on after an end; see `data_quality.list_faults`."""
    if not episodes:
        return []
    return [
        f"{len(episodes):,} episodes, the first is {episodes[0]}, go on after a step that ended them: "
        "the rewards behind it count in their returns"
    ]


def _infer_spec(
    dataset: "MinariDataset",
    episodes: Iterable[Episode],
    horizon: int,
    low: Sequence[float],
    high: Sequence[float],
) -> Spec:
    """Infer the spec of a dataset's episodes; horizon, low, high: see `load`."""
    S = 0
    longest = read_env_spec(dataset).get("max_episode_steps") or 0
    actions = RunningStatistics()
    for episode in episodes:
        S = episode.observations.shape[1]
        longest = max(longest, len(episode.rewards))
        actions.add(episode.recorded_actions)
    if not S:
        raise ValueError(f"{dataset.id}: expected at least one episode, got none")
    bounds = action_spec(dataset.action_space, actions.low, actions.high)
    if not bounds.get("num_actions"):
        bounds["low"], bounds["high"] = separate_bounds(bounds["low"], bounds["high"])
    if len(low):
        bounds["low"] = tuple(low)
    if len(high):
        bounds["high"] = tuple(high)
    return Spec(S, **bounds, horizon=horizon or longest)


def _build_episode(
    dataset: "MinariDataset",
    raw: "EpisodeData",
    part: str,
    space: AnySpace,
    repair: MinariRepair | None,
    reward_of_goal: Callable[[Any], np.ndarray] | None,
) -> Episode:
    """Build an episode of a Minari dataset.

    Args:
        dataset: that holds it.
        raw: the episode as Minari reads it.
        part: see `policy_part`.
        space: of this part, see `policy_space`.
        repair: of the observations; None: they stay as they are.
        reward_of_goal: the reward in place of the logged one, see `MinariRepair`.
    """
    observations = raw.observations
    rewards = np.asarray(raw.rewards, np.float32)
    if repair is not None:
        observations = repair.repair_observations(observations)
    if reward_of_goal is not None:
        rewards = reward_of_goal(observations)
    rows = flatten(select_part(observations, part), space, dtype=None)
    terminated = bool(raw.terminations[-1])
    return Episode(
        rows[:-1],
        encode_actions(raw.actions, dataset.action_space),
        rewards,
        terminated=terminated,
        truncated=bool(raw.truncations[-1]) or not terminated,
        final_observation=rows[-1],
    )


def files(*, minari_id: str, **options: object) -> list[Path]:
    """Return the files that `load` reads with these options."""
    download_missing(minari_id)
    return sorted(path for path in data_folder(minari_id).rglob("*") if path.is_file())


def data_folder(minari_id: str) -> Path:
    """Return the data folder of an id or of a path."""
    from minari.storage import get_dataset_path

    path = Path(minari_id).expanduser()
    if not path.is_dir():
        path = get_dataset_path(local_minari_id(minari_id))
    return path / "data"


def download_missing(minari_id: str) -> None:
    """Download a remote dataset that is not on this machine, if the user's own command names it: one
    that a run names would make its environment before it could be checked, see `trust`.

    Raises:
        FileNotFoundError: the remote cannot be reached, or lacks it; or the command does not name it.
    """
    import minari

    folder = data_folder(minari_id).parent
    if "://" not in minari_id or folder.is_dir():
        return
    if not is_typed(minari_id):
        raise FileNotFoundError(
            f"{minari_id}: expected it in {folder}, since only what the command itself names is "
            f"downloaded, found none; run `minari download {minari_id}` first"
        )
    with explain_errors(
        f"dataset.minari_id: {minari_id} could not be downloaded",
        Exception,  # of the HTTP library that this version of huggingface_hub takes
        fix=f"where there is a network run `minari download {minari_id}`, and copy the folder to {folder}",
        raised=FileNotFoundError,
    ):
        minari.download_dataset(minari_id)


def open_dataset(minari_id: str) -> "MinariDataset":
    """Open a Minari dataset by its id or the path of its folder."""
    import minari

    data = data_folder(minari_id)
    if not data.is_dir():
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        raise FileNotFoundError(
            f"{minari_id}: no such Minari dataset in {root}; `minari download {minari_id}` fetches it, "
            f"and so does dataset.minari_id=hf://farama-minari/{minari_id} if it is Farama's"
        )
    what = f"{minari_id}: not a readable Minari dataset"
    with explain_errors(what, OSError, KeyError, ValueError, AssertionError, fix=AGAIN):
        return minari.MinariDataset(str(data))


def _read_raw_episodes(dataset: "MinariDataset") -> Iterator["EpisodeData"]:
    with explain_errors(
        f"{dataset.id}: not a readable Minari dataset", OSError, KeyError, fix=AGAIN
    ):
        yield from dataset.iterate_episodes()


def resolve_task_text(group: str, dataset: "MinariDataset", text: str, task: str) -> str:
    """Return the task text, or its template, of a Minari dataset: in data (group `dataset`) as in
    environments (`env`). With text=constant it is the id and the description by default.
    """
    default = ""
    if text == "constant":
        description = dataset.storage.metadata.get("description") or ""
        default = f"{dataset.id}. {description}".strip()
    return fixed_task_text(group, text, task or default, TEXTS)


def policy_part(dataset: "MinariDataset", goal: str) -> str:
    """Return the key of a Dict observation that a policy reads alone; empty: it reads all parts.

    goal: see `load`.
    """
    repair = find_repair(dataset)
    return repair.part_without_goal if repair is not None and goal == "fixed" else ""


def select_part(observation: Any, part: str) -> Any:
    """Return the part of an observation, or of its space, that a policy reads."""
    return observation[part] if part else observation


def policy_space(
    space: AnySpace, part: str, categorical: Declaration, option: str = "categorical"
) -> AnySpace:
    """Return the space of the observations that a policy reads: in data as in environments.

    Args:
        space: of a dataset or an environment.
        part: see `policy_part`.
        categorical, option: see `categorical.as_categorical`.
    """
    return as_categorical(select_part(space, part), categorical, option)


def read_env_spec(dataset: "MinariDataset") -> Json:
    """Return the spec of a dataset's evaluation environment, or else of the one it was collected in;
    empty without either.
    """
    metadata = dataset.storage.metadata
    return dict(json.loads(metadata.get("eval_env_spec") or metadata.get("env_spec") or "{}"))


# Version 2: the card names the parts of an observation. The rows are those of version 1: Minari
# restores a Dict space with sorted keys, so that the older rule, the order of the space's own keys,
# gave them the same order. A run whose info has no parts is therefore laid out by the rule of
# `spaces.flatten` too. Version 3: a missing action is no part of the bounds of an action without
# bounds. Version 4: the card has the faults of actions, rewards and final observations, and names the
# infos that are not read. Version 5: of categorical parts, the spec has each one-hot group, and grids
# as entities. Version 6: text=none reads no texts.
READER = DatasetReader(version=6, files=files)
