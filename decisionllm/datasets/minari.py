"""Minari datasets in and out, through the real library: Box, Discrete, MultiDiscrete, MultiBinary,
Dict or Tuple observations; Box, Discrete or MultiDiscrete actions.

`D4RL/pointmaze/*` has two defects, both repaired on reading. The first observation of an episode
still has the previous goal (Minari issue 265): the goal of the second is used. An episode ends with
its first reward, so that every return is 1: with goal=fixed the rewards are those of the evaluation
environment for its one goal, as in D4RL's Maze2D, and the goal is left out of the observation; with
goal=own the goal stays in the observation and the rewards stay as they are.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from decisionllm.checks import one_of
from decisionllm.datasets.action_range import separate_bounds
from decisionllm.datasets.arrays import check_bounds, clip_actions, constant_text, unread
from decisionllm.datasets.env_texts import choose_task_from, task_of, values_by_path
from decisionllm.datasets.moments import Moments
from decisionllm.datasets.spaces import (
    ActionSpace,
    AnySpace,
    Declaration,
    action_parts,
    action_spec,
    as_categorical,
    categorical_columns,
    categorical_sizes,
    decode_actions,
    encode_actions,
    flatten,
    grid_schema,
    observation_parts,
    original_space,
    replace_texts,
    text_parts,
    text_values,
    unflatten,
)
from decisionllm.datasets.store import DatasetReader, Store
from decisionllm.datasets.templates import TEXTS, writer
from decisionllm.files import AGAIN, explained
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Json, Spec

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec
    from minari import EpisodeData, MinariDataset
    from minari.data_collector import EpisodeBuffer

RADIUS = 0.45  # of PointMaze's goals


@register("dataset", "minari", text="${text}")
def load(
    *,
    minari_id: str,
    text: str = "none",
    task: str = "",
    task_from: str = "",
    goal: str = "fixed",
    categorical: Declaration = None,
    horizon: int = 0,
    low: Sequence[float] = [],
    high: Sequence[float] = [],
    clip: bool = False,
) -> Source:
    """A local Minari dataset; nothing is downloaded.

    Args:
        minari_id: its id, or the path of its folder.
        text: `none`; `constant`: the task, or else the dataset's id and description; `template`:
            the task with the numbers of parts of the first observation, see `templates.writer`;
            `episode`: the text that `task_from` names.
        task: the text of every episode, such as "Reach the goal." or, with text=template, "Go to
            {desired_goal}."
        task_from: `info.KEY`: the text of an episode is what its recorded infos have under KEY;
            `observation.NAME`: the part NAME of its observations, which is a text; empty: neither is
            read, but with text=episode the one part that is a text.
        goal: of PointMaze, `fixed` or `own`, see above.
        categorical: {NAME: sizes} or [NAME] of the parts of an observation that are integers and
            name categories, which are read one-hot; see `spaces.as_categorical`. The cells of
            grids are entities, see `spaces.grid_schema`.
        horizon: refuse longer episodes; 0: the longest one, or the time limit of the evaluation
            environment if that is more.
        low: (A,) least action, raw units; empty: of the action space, or of the data where it has
            none.
        high: (A,) greatest action, as `low`.
        clip: clip actions to these bounds, as an environment does that clips those of a policy;
            they are an error otherwise.

    Raises:
        FileNotFoundError: there is no such dataset.
        ValueError: it is damaged, or its spaces are not supported.
    """
    one_of("dataset.text", text, TEXTS)
    one_of("dataset.goal", goal, ("fixed", "own"))
    check_bounds(low, high)
    dataset = find(minari_id)
    sizes = action_parts(dataset.action_space)  # refuses other spaces before anything is read
    if sizes and (len(low) or len(high) or clip):
        raise ValueError(
            f"dataset: expected none of low, high and clip with discrete actions, "
            f"{dataset.action_space}, got {list(low)}, {list(high)} and {clip}"
        )
    part = part_read(dataset, goal)
    # An observation without its goal has the rewards of the one goal that evaluation has.
    fixed = fixed_reward(dataset) if part else None
    space = observed_space(dataset.observation_space, part, categorical, "dataset.categorical")
    parts = observation_parts(space)
    names = text_parts(space)
    task_from = choose_task_from("dataset", task_from, text, names)
    words = words_of("dataset", dataset, text, task)
    write = None
    if text == "template":
        hint = "dataset.goal=own keeps the goal in the observation" if part else ""
        write = writer("dataset.task", words, parts, texts=names, hint=hint)

    early: list[int] = []  # episodes that go on after an end
    unread_paths: dict[str, None] = {}  # in their order

    def episodes() -> Iterator[Episode]:
        early.clear()
        for e, raw in enumerate(_raw_episodes(dataset)):
            if goes_on(raw):
                early.append(e)
            try:
                episode = _episode(dataset, raw, part, space, fixed)
                seen = text_values(observed(raw.observations, part), space)
                values = values_by_path(raw.infos or {}, seen)
                own = words
                if write is not None:
                    first = {name: str(texts[0]) for name, texts in seen.items()}
                    own = write(episode.observations[0], first)
                if task_from:
                    own = task_of(values, task_from, "dataset.task_from")
            except ValueError as error:
                raise ValueError(f"{dataset.id}, episode {e}: {error}") from error
            unread_paths.update(dict.fromkeys(values))
            yield replace(episode, group=e, task=own)

    spec = _spec(dataset, episodes(), horizon, low, high)  # the first of two passes
    spec = replace(spec, categorical=categorical_columns(space), entity_schema=grid_schema(space))
    info: Json = {
        "name": dataset.id,
        "env": "minari",
        "text": "episode" if task_from else text,
    }
    unread_paths.pop(task_from, None)
    if unread_paths:
        info["unread"] = list(unread_paths)
    faults = [*unread(text, task), *going_on(early)]
    if faults:
        info["faults"] = faults
    if clip:
        info["clip"] = True
    info |= facts_of(dataset, goal)
    info["observation_parts"] = [list(each) for each in parts]
    if categorical:
        info["categorical"] = categorical_sizes(space)
    if len(sizes) > 1:
        info["action_parts"] = sizes
    return Source(spec, clip_actions(episodes(), spec) if clip else episodes(), info)


def facts_of(dataset: "MinariDataset", goal: str) -> Json:
    """What an evaluation must know of a dataset: whose goal it has, and its reference scores."""
    metadata = dataset.storage.metadata
    scores = {key: metadata[key] for key in ("ref_min_score", "ref_max_score") if key in metadata}
    return {"goal": goal if is_pointmaze(dataset) else "", **scores}


def goes_on(raw: "EpisodeData") -> bool:
    """Whether an episode has steps after one that ended it."""
    return bool(np.any(raw.terminations[:-1]) or np.any(raw.truncations[:-1]))


def going_on(episodes: Sequence[int]) -> list[str]:
    """The fault of these episodes, which go on after an end; see `faults.reported`."""
    if not episodes:
        return []
    said = f"{len(episodes):,} episodes, the first is {episodes[0]}, go on after a step that ended them"
    return [f"{said}: the rewards behind it count in their returns"]


def _spec(
    dataset: "MinariDataset",
    episodes: Iterable[Episode],
    horizon: int,
    low: Sequence[float],
    high: Sequence[float],
) -> Spec:
    """The spec of a dataset's episodes; horizon, low, high: see `load`."""
    S = 0
    longest = evaluation(dataset).get("max_episode_steps") or 0
    actions = Moments()
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


def _episode(
    dataset: "MinariDataset",
    raw: "EpisodeData",
    part: str,
    space: AnySpace,
    fixed: Callable[[np.ndarray], np.ndarray] | None,
) -> Episode:
    """An episode of a Minari dataset.

    Args:
        dataset: that holds it.
        raw: the episode as Minari reads it.
        part: see `part_read`.
        space: of this part, see `observed_space`.
        fixed: the reward in place of the logged one, see `fixed_reward`.
    """
    observations = raw.observations
    rewards = np.asarray(raw.rewards, np.float32)
    if is_pointmaze(dataset):
        goals = np.array(observations["desired_goal"])
        goals[0] = goals[1]
        observations = observations | {"desired_goal": goals}
    if fixed:
        rewards = fixed(observations["observation"][1:, :2])
    rows = flatten(observed(observations, part), space, dtype=None)
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
    """The files that `load` reads with these options."""
    return sorted(path for path in folder(minari_id).rglob("*") if path.is_file())


def folder(minari_id: str) -> Path:
    """The data folder of an id or of a path."""
    from minari.storage import get_dataset_path

    path = Path(minari_id).expanduser()
    if not path.is_dir():
        path = get_dataset_path(minari_id)
    return path / "data"


def find(minari_id: str) -> "MinariDataset":
    """The open Minari dataset, by its id or the path of its folder."""
    import minari

    data = folder(minari_id)
    if not data.is_dir():
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        remedy = f"`minari download {minari_id}` fetches it"
        raise FileNotFoundError(f"{minari_id}: no such Minari dataset in {root}; {remedy}")
    what = f"{minari_id}: not a readable Minari dataset"
    with explained(what, OSError, KeyError, ValueError, AssertionError, remedy=AGAIN):
        return minari.MinariDataset(str(data))


def _raw_episodes(dataset: "MinariDataset") -> Iterator["EpisodeData"]:
    """The episodes of a Minari dataset."""
    with explained(f"{dataset.id}: not a readable Minari dataset", OSError, KeyError, remedy=AGAIN):
        yield from dataset.iterate_episodes()


def description(dataset: "MinariDataset") -> str:
    """The task text of a dataset: its id and what it says of itself."""
    return f"{dataset.id}. {dataset.storage.metadata.get('description') or ''}".strip()


def words_of(group: str, dataset: "MinariDataset", text: str, task: str) -> str:
    """The task text, or the template of it, of a Minari dataset: in data (group `dataset`) as in
    environments (`env`)."""
    own = description(dataset) if text == "constant" else ""
    return constant_text(group, text, task or own, TEXTS)


def is_pointmaze(dataset: "MinariDataset") -> bool:
    """Whether the two defects of PointMaze are to be repaired."""
    space = dataset.observation_space
    if "pointmaze" not in dataset.id or not isinstance(space, spaces.Dict):
        return False
    return {"observation", "desired_goal"} <= set(space)


def part_read(dataset: "MinariDataset", goal: str) -> str:
    """The key of a Dict observation that a policy reads alone; empty: all of it. goal: see
    `load`."""
    return "observation" if is_pointmaze(dataset) and goal == "fixed" else ""


def observed(observation: Any, part: str) -> Any:
    """The part of an observation, or of its space, that a policy reads."""
    return observation[part] if part else observation


def observed_space(
    space: AnySpace, part: str, categorical: Declaration, option: str = "categorical"
) -> AnySpace:
    """Return the space of the observations that a policy reads: in data as in environments.

    Args:
        space: of a dataset or an environment.
        part: see `part_read`.
        categorical, option: see `spaces.as_categorical`.
    """
    return as_categorical(observed(space, part), categorical, option)


def evaluation(dataset: "MinariDataset") -> Json:
    """The spec of a dataset's evaluation environment, or else of the one it was collected in; empty
    without either."""
    metadata = dataset.storage.metadata
    return dict(json.loads(metadata.get("eval_env_spec") or metadata.get("env_spec") or "{}"))


def fixed_reward(dataset: "MinariDataset") -> Callable[[np.ndarray], np.ndarray]:
    """The reward of a PointMaze dataset's evaluation environment, for the one `g` of its map.

    Returns:
        A function of (n, 2) positions that returns (n,) float32.
    """
    options = evaluation(dataset).get("kwargs", {})
    maze: list[list[object]] = options.get("maze_map") or []
    cells = np.argwhere(np.array(maze, dtype=str) == "g")
    if len(cells) != 1:
        wanted = "one goal cell 'g' in the map of its evaluation environment"
        remedy = "use dataset.goal=own"
        raise ValueError(f"{dataset.id}: expected {wanted}, got {len(cells)}; {remedy}")
    i, j = cells[0]
    # x to the right, y upwards, the origin in the middle
    goal = np.array([j + 0.5 - len(maze[0]) / 2, len(maze) / 2 - i - 0.5])

    def reward(positions: np.ndarray) -> np.ndarray:
        distance: np.ndarray = np.linalg.norm(positions - goal, axis=1)
        if options.get("reward_type") == "dense":
            return np.asarray(np.exp(-distance), np.float32)
        return np.asarray(distance <= RADIUS, np.float32)

    return reward


def save(
    minari_id: str,
    store: Store,
    *,
    env: "Env[Any, Any] | EnvSpec | str | None" = None,
    reference: tuple[float, float] | None = None,
    final: np.ndarray | None = None,
    observation_space: AnySpace | None = None,
    action_space: ActionSpace | None = None,
) -> "MinariDataset":
    """Write a store as a local Minari dataset, all or nothing; groups and action masks are left out,
    and texts unless a part of the observation space is one.

    Minari stores one more observation than actions: an episode without a final observation repeats
        its last one.

    Args:
        minari_id: with a version, such as mine/maze-v0.
        store: the data.
        env: an environment or its spec, for `recover_environment`.
        reference: returns of a random policy and of an expert; Minari drops them where no
            environment is given, so that they are written afterwards.
        final: (E, S) final observations, of a store without them.
        observation_space: of the environment, into whose values rows are laid out by
            `spaces.unflatten`; a categorical part is written as the Box that it was; None: a Box of
            S numbers.
        action_space: of the environment; None: that of the spec.

    Returns:
        The open Minari dataset.

    Raises:
        FileExistsError: such a dataset is there already.
        ValueError: the id has no version.
    """
    import minari
    from minari.storage import get_dataset_path

    check_new(minari_id)
    if not observation_space:
        shape = (store.spec.observation_dim,)
        observation_space = spaces.Box(-np.inf, np.inf, shape, np.float32)
    observation_space = replace_texts(observation_space, store.tasks)
    written_space = original_space(observation_space)
    action_space = action_space or _plain_actions(store, named=env is not None)
    finals = store.final_observation if final is None else final
    # By default Minari writes images as JPEG, which changes their numbers; 0.5.3 has no such option
    known = signature(minari.create_dataset_from_buffers).parameters
    lossless: Json = {"jpeg_encoding": False} if "jpeg_encoding" in known else {}
    description = f"{store.info['name']}, written by decisionllm, fingerprint {store.fingerprint}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the missing author and links
            dataset = minari.create_dataset_from_buffers(
                minari_id,
                _buffers(store, finals, observation_space, action_space),
                env=env,
                observation_space=written_space,
                action_space=action_space,
                data_format="hdf5",
                description=description,
                **lossless,
            )
        if reference is not None:
            low, high = reference
            dataset.storage.update_metadata({"ref_min_score": low, "ref_max_score": high})
    except BaseException:
        shutil.rmtree(get_dataset_path(minari_id), ignore_errors=True)
        raise
    return dataset


def check_new(minari_id: str) -> None:
    """Raise an error unless a Minari dataset of this id can be written."""
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    wanted = "an id with a version, such as mine/maze-v0"
    with explained(f"export=minari: expected {wanted}, got {minari_id!r}", ValueError, TypeError):
        parse_dataset_id(minari_id)
    if get_dataset_path(minari_id).exists():
        remedy = "choose another name or version"
        raise FileExistsError(f"{minari_id}: such a Minari dataset is there already; {remedy}")


def _buffers(
    store: Store,
    finals: np.ndarray | None,
    observation_space: AnySpace,
    action_space: ActionSpace,
) -> Iterator["EpisodeBuffer"]:
    """The episodes of a store as Minari writes them. finals: (E, S) final observations."""
    from minari.data_collector import EpisodeBuffer

    is_own = finals is store.final_observation
    has_final = store.has_final if is_own else np.ones(len(store.lengths), bool)
    for e in range(len(store.lengths)):
        episode = store.episode(e)
        last = episode.observations[-1] if finals is None or not has_final[e] else finals[e]
        rows = np.concatenate([episode.observations, last[None]])
        ends = np.zeros((2, len(episode.rewards)), bool)
        ends[:, -1] = episode.terminated, episode.truncated
        yield EpisodeBuffer(
            id=e,
            observations=unflatten(rows, observation_space, text=episode.task),
            actions=decode_actions(episode.actions, action_space),
            rewards=episode.rewards,
            terminations=ends[0],
            truncations=ends[1],
        )


def _plain_actions(store: Store, *, named: bool) -> ActionSpace:
    """The action space of a store's spec.

    Args:
        store: the data.
        named: an environment of this package is named, which takes the index of a combination as it
            is.
    """
    spec = store.spec
    if not spec.num_actions:
        return spaces.Box(*np.array([spec.low, spec.high], np.float32))
    sizes = store.info.get("action_parts")
    if named or not sizes:
        return spaces.Discrete(spec.num_actions)
    return spaces.MultiDiscrete(sizes)


# Version 2: the card names the parts of an observation. The rows are those of version 1: Minari
# restores a Dict space with sorted keys, so that the older rule, the order of the space's own keys,
# gave them the same order. A run whose info has no parts is therefore laid out by the rule of
# `spaces.flatten` too. Version 3: a missing action is no part of the bounds of an action without
# bounds. Version 4: the card has the faults of actions, rewards and final observations, and names the
# infos that are not read. Version 5: of categorical parts, the spec has each one-hot group, and grids
# as entities.
READER = DatasetReader(version=5, files=files)
