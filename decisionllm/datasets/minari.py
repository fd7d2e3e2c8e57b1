"""Minari datasets in and out, through the real library: any Box, Discrete or Dict observations; Box, Discrete or
MultiDiscrete actions.

`D4RL/pointmaze/*` has two defects, both repaired on reading. The first observation of an episode still has the previous goal
(Minari issue 265): the goal of the second is used. An episode ends with its first reward, so that every return is 1: with
goal=fixed the rewards are those of the evaluation environment for its one goal, as in D4RL's Maze2D, and the goal is left out of
the observation; with goal=own the goal stays in the observation and the rewards stay as they are.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets.arrays import constant_text
from decisionllm.datasets.moments import Moments
from decisionllm.datasets.spaces import (
    action_parts,
    action_spec,
    decode_actions,
    encode_actions,
    flatten,
    observation_parts,
    unflatten,
)
from decisionllm.datasets.store import Store
from decisionllm.datasets.templates import TEXTS, writer
from decisionllm.files import AGAIN, explained
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec

RADIUS = 0.45  # of PointMaze's goals

# Of what a store of it holds. 2: the card names the parts of an observation. The rows are those of before: Minari restores a Dict space
# with sorted keys, so that the older rule, the order of the space's own keys, gave them the same order. A run whose info has no parts
# is therefore laid out by the rule of `spaces.flatten` too.
VERSION = 2


@register("dataset", "minari", text="${text}")
def load(*, minari_id: str, text: str = "none", task: str = "", goal: str = "fixed", horizon: int = 0) -> Source:
    """A local Minari dataset; nothing is downloaded.

    Args:
        minari_id: its id, or the path of its folder.
        text: `none`; `constant`: the task, or else the dataset's id and description; `template`: the task with the numbers of parts of
            the first observation, see `templates.writer`.
        task: the text of every episode, such as "Reach the goal." or, with text=template, "Go to {desired_goal}."
        goal: of PointMaze, `fixed` or `own`, see above.
        horizon: refuse longer episodes; 0: the longest one, or the time limit of the evaluation environment if that is more.

    Raises:
        FileNotFoundError: there is no such dataset.
        ValueError: it is damaged, or its spaces are not supported.
    """
    one_of("dataset.text", text, TEXTS)
    one_of("dataset.goal", goal, ("fixed", "own"))
    dataset = find(minari_id)
    metadata, maze = dataset.storage.metadata, is_pointmaze(dataset)
    sizes = action_parts(dataset.action_space)  # refuses other spaces before anything is read
    fixed = fixed_reward(dataset) if maze and goal == "fixed" else None
    part = part_read(dataset, goal)
    space = dataset.observation_space[part] if part else dataset.observation_space
    parts = observation_parts(space)
    words = words_of("dataset", dataset, text, task)
    hint = "dataset.goal=own keeps the goal in the observation" if part else ""
    write = writer("dataset.task", words, parts, hint=hint) if text == "template" else lambda row: words

    def episodes() -> Iterator[Episode]:
        for e, raw in enumerate(_read(dataset)):
            observations, rewards = raw.observations, np.asarray(raw.rewards, np.float32)
            if maze:
                goals = np.array(observations["desired_goal"])
                goals[0] = goals[1]
                observations = observations | {"desired_goal": goals}
            if fixed:
                rewards = fixed(observations["observation"][1:, :2])
            actions = encode_actions(raw.actions, dataset.action_space)
            try:
                rows = flatten(observations[part] if part else observations, space)
                ended = bool(raw.terminations[-1])
                yield Episode(
                    rows[:-1], actions, rewards, terminated=ended, truncated=bool(raw.truncations[-1]) or not ended,
                    task=write(rows[0]), group=e, final_observation=rows[-1],
                )  # fmt: skip
            except ValueError as error:
                raise ValueError(f"{dataset.id}, episode {e}: {error}") from error

    S, longest, actions = 0, evaluation(dataset).get("max_episode_steps") or 0, Moments()  # a first pass: the spec
    for episode in episodes():
        S, longest = episode.observations.shape[1], max(longest, len(episode.rewards))
        actions.add(episode.actions)
    if not S:
        raise ValueError(f"{dataset.id}: expected at least one episode, got none")
    spec = Spec(S, **action_spec(dataset.action_space, actions.low, actions.high), horizon=horizon or longest)
    references = {key: metadata[key] for key in ("ref_min_score", "ref_max_score") if key in metadata}
    info = {"name": dataset.id, "env": "minari", "text": text, "goal": goal if maze else "", **references}
    info["observation_parts"] = [list(each) for each in parts]
    if len(sizes) > 1:
        info["action_parts"] = sizes
    return Source(spec, episodes(), info)


def files(*, minari_id: str, **options: Any) -> list[Path]:
    """The files that `load` reads with these options."""
    return sorted(path for path in folder(minari_id).rglob("*") if path.is_file())


def folder(minari_id: str) -> Path:
    """The data folder of an id or of a path."""
    from minari.storage import get_dataset_path

    path = Path(minari_id).expanduser()
    return (path if path.is_dir() else get_dataset_path(minari_id)) / "data"


def find(minari_id: str) -> Any:
    """The open Minari dataset, by its id or the path of its folder."""
    import minari

    data = folder(minari_id)
    if not data.is_dir():
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        raise FileNotFoundError(f"{minari_id}: no such Minari dataset in {root}; `minari download {minari_id}` fetches it")
    with explained(f"{minari_id}: not a readable Minari dataset", OSError, KeyError, ValueError, AssertionError, remedy=AGAIN):
        return minari.MinariDataset(str(data))


def _read(dataset: Any) -> Iterator[Any]:
    """The episodes of a Minari dataset."""
    with explained(f"{dataset.id}: not a readable Minari dataset", OSError, KeyError, remedy=AGAIN):
        yield from dataset.iterate_episodes()


def description(dataset: Any) -> str:
    """The task text of a dataset: its id and what it says of itself."""
    return f"{dataset.id}. {dataset.storage.metadata.get('description') or ''}".strip()


def words_of(group: str, dataset: Any, text: str, task: str) -> str:
    """The task text, or the template of it, of a Minari dataset: in data (group `dataset`) as in environments (`env`)."""
    own = description(dataset) if text == "constant" else ""
    return constant_text(group, text, task or own, TEXTS)


def is_pointmaze(dataset: Any) -> bool:
    """Whether the two defects of PointMaze are to be repaired."""
    from gymnasium.spaces import Dict

    space = dataset.observation_space
    return "pointmaze" in dataset.id and isinstance(space, Dict) and {"observation", "desired_goal"} <= set(space)


def part_read(dataset: Any, goal: str) -> str:
    """The key of a Dict observation that a policy reads alone; empty: all of it. goal: see `load`."""
    return "observation" if is_pointmaze(dataset) and goal == "fixed" else ""


def evaluation(dataset: Any) -> dict[str, Any]:
    """The spec of a dataset's evaluation environment, or else of the one it was collected in; empty without either."""
    metadata = dataset.storage.metadata
    return dict(json.loads(metadata.get("eval_env_spec") or metadata.get("env_spec") or "{}"))


def fixed_reward(dataset: Any) -> Callable[[np.ndarray], np.ndarray]:
    """The reward of a PointMaze dataset's evaluation environment, for the one `g` of its map: (n, 2) positions -> (n,) float32."""
    options = evaluation(dataset).get("kwargs", {})
    maze: list[list[Any]] = options.get("maze_map") or []
    cells = [(i, j) for i, row in enumerate(maze) for j, cell in enumerate(row) if cell == "g"]
    if len(cells) != 1:
        place = "in the map of its evaluation environment"
        raise ValueError(f"{dataset.id}: expected one goal cell 'g' {place}, got {len(cells)}; use dataset.goal=own")
    (i, j), rows, columns = cells[0], len(maze), len(maze[0])
    goal = j + 0.5 - columns / 2, rows / 2 - i - 0.5  # x to the right, y upwards, the origin in the middle

    def reward(positions: np.ndarray) -> np.ndarray:
        distance: np.ndarray = np.linalg.norm(positions - goal, axis=1)
        return np.asarray(np.exp(-distance) if options.get("reward_type") == "dense" else distance <= RADIUS, np.float32)

    return reward


def save(
    minari_id: str,
    store: Store,
    *,
    env: Any = None,
    reference: tuple[float, float] | None = None,
    final: np.ndarray | None = None,
    observation_space: Any = None,
    action_space: Any = None,
) -> Any:
    """Write a store as a local Minari dataset, all or nothing; texts, groups and action masks are left out.

    Minari stores one more observation than actions: an episode without a final observation repeats its last one.

    Args:
        minari_id: with a version, such as mine/maze-v0.
        store: the data.
        env: an environment or its spec, for `recover_environment`.
        reference: returns of a random policy and of an expert; Minari drops them where no environment is given, so that they are
            written afterwards.
        final: (E, S) final observations, of a store without them.
        observation_space: of the environment, into whose values rows are laid out by `spaces.unflatten`; None: a Box of S numbers.
        action_space: of the environment; None: that of the spec.

    Returns:
        The open Minari dataset.

    Raises:
        FileExistsError: such a dataset is there already.
        ValueError: the id has no version.
    """
    import minari
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    wanted = "an id with a version, such as mine/maze-v0"
    with explained(f"export=minari: expected {wanted}, got {minari_id!r}", ValueError, TypeError):
        parse_dataset_id(minari_id)
    if get_dataset_path(minari_id).exists():
        raise FileExistsError(f"{minari_id}: such a Minari dataset is there already; choose another name or version")

    observation_space = observation_space or spaces.Box(-np.inf, np.inf, (store.spec.observation_dim,), np.float32)
    action_space = action_space or _plain_actions(store, named=env is not None)
    finals = store.final_observation if final is None else final

    def buffer(e: int) -> Any:
        episode = store.episode(e)
        last = episode.observations[-1] if finals is None else finals[e]
        rows = np.concatenate([episode.observations, last[None]])
        ends = np.zeros((2, len(episode.rewards)), bool)
        ends[:, -1] = episode.terminated, episode.truncated
        return EpisodeBuffer(
            id=e,
            observations=unflatten(rows, observation_space),
            actions=decode_actions(episode.actions, action_space),
            rewards=episode.rewards,
            terminations=ends[0],
            truncations=ends[1],
        )

    # Minari writes images as JPEG, whose numbers are others, unless it is told not to; 0.5.3 has no such option.
    known = signature(minari.create_dataset_from_buffers).parameters
    lossless: dict[str, Any] = {"jpeg_encoding": False} if "jpeg_encoding" in known else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the missing author and links
            dataset = minari.create_dataset_from_buffers(
                minari_id,
                map(buffer, range(len(store.lengths))),
                env=env,
                observation_space=observation_space,
                action_space=action_space,
                data_format="hdf5",
                description=f"{store.info['name']}, written by decisionllm, fingerprint {store.fingerprint}",
                **lossless,
            )
        if reference is not None:
            dataset.storage.update_metadata({"ref_min_score": reference[0], "ref_max_score": reference[1]})
    except BaseException:
        shutil.rmtree(get_dataset_path(minari_id), ignore_errors=True)
        raise
    return dataset


def _plain_actions(store: Store, *, named: bool) -> Any:
    """The action space of a store's spec.

    Args:
        store: the data.
        named: an environment of this package is named, which takes the index of a combination as it is.
    """
    from gymnasium import spaces

    spec = store.spec
    if not spec.num_actions:
        return spaces.Box(*np.array([spec.low, spec.high], np.float32))
    sizes = store.info.get("action_parts")
    return spaces.Discrete(spec.num_actions) if named or not sizes else spaces.MultiDiscrete(sizes)
