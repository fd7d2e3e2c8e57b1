"""Your own data: episodes made in Python, arrays in D4RL's layout, or a data store that exists
already."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
from gymnasium import spaces

from decisionllm.checks import check_one_of, is_number_list
from decisionllm.datasets.action_range import separate_bounds
from decisionllm.datasets.action_spaces import check_action_parts, encode_actions
from decisionllm.datasets.d4rl_files import (
    ENDS,
    KEYS,
    check_ends,
    check_other_columns,
    describe_next_observations,
    episode_ends,
    list_unread,
    open_all_columns,
    read_blocks,
    read_episode_ends,
)
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.row_blocks import Columns, regroup_blocks
from decisionllm.datasets.running_statistics import RunningStatistics
from decisionllm.datasets.space_parts import check_observation_parts
from decisionllm.datasets.store import Store, open_store, replace_task_texts
from decisionllm.datasets.store_writer import check_episode, write_store
from decisionllm.datasets.templates import describe_unread_task, fixed_task_text, label_text
from decisionllm.datasets.text_columns import choose_column, read_episode_texts
from decisionllm.files import explain_errors
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json, Spec

TEXTS = ("auto", "none", "constant", "episode")  # values of the option `text`
OWN_TEXTS = ("auto", "episode")  # those that read the texts of the episodes


def load(
    *,
    path: str,
    name: str = "",
    task: str = "",
    task_from: str = "",
    text: str = "auto",
    horizon: int = 0,
    num_actions: int = 0,
    low: Sequence[float] = [],
    high: Sequence[float] = [],
    clip: bool = False,
    ignore: Sequence[str] = [],
    observation_parts: Mapping[str, int] | None = None,
    action_parts: Sequence[int] = [],
) -> Source:
    """Read the episodes of an .npz or HDF5 file in D4RL's layout, see `split_episodes`, in blocks of
    rows.

    Args:
        path: the file.
        name: of the dataset in results; empty: that of the file.
        task: the text of every episode, read with text=constant.
        task_from: the column of task texts, one for each row or episode, or a table of texts beside
            `task_index`; empty: the one called `tasks`, `language_instruction` or alike, see
            `text_columns.TEXT_NAMES`.
        text: `auto`: the column of texts, if there is one; `none`: no texts; `constant`: the task;
            `episode`: the column of texts, which has to be there.
        horizon: refuse longer episodes; 0: the longest one.
        num_actions: C of discrete actions; 0: the largest index plus 1 where actions are integers
            without bounds, else they are continuous.
        low: (A,) least action, raw units; empty: of the data.
        high: (A,) greatest action, raw units; empty: of the data.
        clip: clip actions to low and high; they are an error otherwise.
        ignore: columns that look like ends of episodes and are none.
        observation_parts: {NAME: numbers} of the parts of an observation, in the order of its
            columns, to compare with an environment; none: unknown.
        action_parts: sizes of the parts of a MultiDiscrete action, such as [3, 2], whose columns are
            integers from 0, or one index of their combination; empty: none.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a key is missing, a shape does not fit, a number is not finite, no row ends an
            episode, a column that is not read marks other ends, or the file is damaged.

    Source: D4RL, https://github.com/Farama-Foundation/D4RL/wiki/Tasks, `OfflineEnv.get_dataset`.
    """
    fixed_text = fixed_task_text("dataset", text, task, TEXTS)
    check_bounds(low, high)
    if clip and not (len(low) or len(high)):
        raise ValueError("dataset.clip: expected dataset.low or dataset.high to clip to, got none")
    file = Path(path).expanduser()
    widths = {"observations": 0, "actions": 0, "next_observations": 0}
    check_ends(file, read_blocks(file, widths))
    check_other_columns(file, ignore)
    column = find_text_column(file, text, task_from)
    if len(action_parts):
        num_actions = num_actions or prod(action_parts)
    recorded = encode_parts(split_episodes(read_blocks(file, widths)), action_parts)
    spec = infer_spec(recorded, horizon, num_actions, low, high)
    episodes = encode_parts(
        split_episodes(read_blocks(file, widths), task=fixed_text), action_parts
    )
    text = label_text(text, has_own=bool(column))
    if column:
        episodes = set_tasks(episodes, read_tasks(file, column))
    info: Json = {"name": name or file.stem, "text": text, "file": str(file)}
    info |= describe_layout(spec, list((observation_parts or {}).items()), action_parts)
    if clip:
        episodes = clip_actions(episodes, spec)
        info["clip"] = True
    unread_keys = list_unread(file, [*KEYS, *widths, *ENDS, column])
    if unread_keys:
        info["unread"] = unread_keys
    faults = [
        *describe_unread_task(text, task),
        *describe_next_observations(read_blocks(file, widths)),
    ]
    if faults:
        info["faults"] = faults
    return Source(spec, episodes, info)


def encode_parts(episodes: Iterable[Episode], action_parts: Sequence[int]) -> Iterator[Episode]:
    """Yield episodes whose actions (n, parts) of a MultiDiscrete are one index, (n, 1); those that
    are an index already stay.
    """
    for e, episode in enumerate(episodes):
        if len(action_parts) < 2 or episode.actions.shape[1] == 1:
            yield episode
            continue
        space = spaces.MultiDiscrete(list(action_parts))
        with explain_errors(f"episode {e}: dataset.action_parts={list(action_parts)}", ValueError):
            actions = encode_actions(episode.actions, space)
        yield replace(episode, actions=actions)


def describe_layout(
    spec: Spec, observation_parts: Sequence[tuple[str, int]], action_parts: Sequence[int]
) -> Json:
    """Return the keys of a dataset's info about the parts that a user states; a ValueError if they
    are not those of the spec.
    """
    layout: Json = {}
    if observation_parts:
        layout["observation_parts"] = check_observation_parts(
            observation_parts, spec.observation_dim
        )
    if action_parts:
        layout["action_parts"] = check_action_parts(action_parts, spec.num_actions)
    return layout


def check_bounds(low: object, high: object) -> None:
    """Raise a ValueError unless the options `low` and `high` are lists of numbers."""
    for key, bounds in {"low": low, "high": high}.items():
        if not is_number_list(bounds):
            raise ValueError(f"dataset.{key}: expected a list of numbers, got {bounds!r}")


def clip_actions(episodes: Iterable[Episode], spec: Spec) -> Iterator[Episode]:
    """Yield episodes whose continuous actions are clipped to the bounds of the spec."""
    low, high = np.array([spec.low, spec.high], np.float32)
    for episode in episodes:
        yield replace(episode, actions=np.clip(episode.actions, low, high))


def open_folder(*, path: str, text: str = "auto") -> Store:
    """Open a data store that `from_episodes` or `store_writer.write_store` wrote; the folder must stay.

    Args:
        path: the folder.
        text: `auto` or `episode`: the texts of the episodes; `none`: no texts, see `select_texts`.
    """
    check_one_of("dataset.text", text, ("auto", "none", "episode"))
    return open_store(Path(path).expanduser())


def select_texts(store: Store, *, text: str = "auto", **options: object) -> Store:
    """Return the store with its texts, or without texts if `text` is `none`."""
    if text != "none" or not any(store.tasks):
        return store
    return replace_task_texts(store, "none", [""] * len(store.task), {})


def files(*, path: str, **options: object) -> list[Path]:
    """Return the file that these options read; of a store its card, which is written last."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "card.json"
    return [file] if file.is_file() else []


def from_episodes(
    episodes: Iterable[Episode],
    path: str | Path,
    *,
    name: str,
    spec: Spec | None = None,
    observation_parts: Sequence[tuple[str, int]] = (),
    action_parts: Sequence[int] = (),
) -> Json:
    """Write episodes to a data store, all or nothing, to train on.

    Args:
        episodes: of equal observation and action sizes, raw units. With a spec they are written as
            they come.
        path: the folder to write; a store that is there is replaced.
        name: of the dataset in results.
        spec: sizes, action space and horizon; None: those of the data, see `infer_spec`.
        observation_parts: (name, numbers) of the parts of an observation, in the order of its
            columns, as `space_parts.observation_parts` returns them. An environment with another
            layout is refused. Empty: unknown.
        action_parts: sizes of the parts of a MultiDiscrete action, which the log holds as
            `action_spaces.encode_actions` does. Empty: unknown.

    Returns:
        The config node of the data: `config["dataset"]` of `train`, or `dataset=store
            dataset.path=...` on the command line.

    Raises:
        FileExistsError: the path holds something else than a store.
        ValueError: there is no episode, or one does not fit the others or the spec; or the parts
            are not those of an observation or an action.
    """
    if spec is None:
        episodes = list(episodes)
        spec = infer_spec(episodes)
    info: Json = {"name": name} | describe_layout(spec, observation_parts, action_parts)
    store = write_store(Path(path).expanduser(), Source(spec, episodes, info))
    folder = str(store.path.absolute())
    return {"_target_": f"{__name__}.open_folder", "path": folder, "text": "${text}"}


def split_episodes(blocks: Iterable[Columns], *, task: str = "") -> Iterator[Episode]:
    """Split blocks of D4RL's columns, rows of all episodes end to end, into episodes.

    An episode ends with a row where `terminals` (it terminated) or the optional `timeouts` (it was
    truncated) or both are set, and with the last row; `load` refuses a file without such a row, see
    `check_ends`. Actions of NaN are missing. The final observation is the last row of the optional
    `next_observations`.

    Args:
        blocks: see `d4rl_files.read_blocks`.
        task: text of every episode.
    """
    group = 0
    for block in regroup_blocks(blocks, episode_ends):
        after = np.flatnonzero(episode_ends(block)) + 1
        bounds = np.unique([0, *after, len(block["rewards"])])
        for a, b in pairwise(bounds.tolist()):
            yield make_episode({key: x[a:b] for key, x in block.items()}, group, task)
            group += 1


def make_episode(columns: Columns, group: int, task: str) -> Episode:
    """Build an episode from its rows of D4RL's columns."""
    n = len(columns["rewards"])
    actions = columns["actions"]
    if actions.dtype.kind == "f":
        actions = actions.astype(np.float32)
    final = None
    if "next_observations" in columns:
        final = columns["next_observations"].reshape(n, -1)[-1].astype(np.float32)
    terminated = bool(columns["terminals"][-1])
    timed_out = "timeouts" in columns and bool(columns["timeouts"][-1])
    return Episode(
        columns["observations"].reshape(n, -1),
        actions.reshape(n, -1),
        columns["rewards"].astype(np.float32),
        group=group,
        task=task,
        terminated=terminated,
        truncated=timed_out or not terminated,
        final_observation=final,
    )


def set_tasks(episodes: Iterable[Episode], tasks: Sequence[str]) -> Iterator[Episode]:
    """Yield the episodes with their texts (E,)."""
    for episode, task in zip(episodes, tasks, strict=True):
        yield replace(episode, task=task)


def find_text_column(path: Path, text: str, task_from: str) -> str:
    """Return the column of task texts that is read; empty: none.

    Raises:
        ValueError: text=episode asks for one and there is none; text=constant has another text; or
            see `choose_column`.
    """
    if text not in OWN_TEXTS:
        if text == "constant" and task_from:
            raise ValueError(
                f"dataset.task_from: expected none with text=constant, which reads dataset.task, got "
                f"{task_from!r}; take text=episode to read it"
            )
        return ""
    with ExitStack() as stack:
        columns = open_all_columns(stack, path)
        column = choose_column(path, columns, task_from)
    if text == "episode" and not column:
        raise ValueError(
            f"dataset.text: expected a column of task texts in {path} for text=episode, got "
            f"{', '.join(columns)}; dataset.task_from=NAME names it"
        )
    return column


def read_tasks(path: Path, column: str) -> list[str]:
    """Return the text of each episode of a file whose columns were checked: (E,)."""
    with ExitStack() as stack:
        columns = open_all_columns(stack, path)
        ended = read_episode_ends(columns)
        offsets = np.unique([0, *np.flatnonzero(ended) + 1, len(ended)])
        return read_episode_texts(path, columns, column, offsets)


def infer_spec(
    episodes: Iterable[Episode],
    horizon: int = 0,
    num_actions: int = 0,
    low: Sequence[float] = (),
    high: Sequence[float] = (),
) -> Spec:
    """Infer the spec of episodes.

    The horizon and the bounds of continuous actions are those of the data unless they are given
    here. Actions that are integers without bounds are discrete, and C is the largest index plus 1.
    """
    S = A = longest = 0
    actions = RunningStatistics()
    is_discrete = True
    for e, episode in enumerate(episodes):
        check_episode(f"episode {e}", episode)
        recorded = episode.recorded_actions
        if not longest:
            S = episode.observations.shape[1]
            A = recorded.shape[1]
        longest = max(longest, len(episode.rewards))
        is_discrete = is_discrete and recorded.dtype.kind in "iub"
        if recorded.shape[1] == A:  # `store_writer.write_store` refuses an episode of another size
            actions.add(recorded)
    if not longest:
        raise ValueError("episodes: expected at least one, got none")
    if not actions.count:
        raise ValueError(
            "episodes: expected the recorded action of some steps, all of them are missing (NaN); "
            "record some to learn from"
        )
    is_bounded = len(low) + len(high) > 0
    if num_actions and is_bounded:
        raise ValueError(
            f"num_actions: expected no bounds (low, high) of {num_actions} discrete actions, got "
            f"{list(low)} and {list(high)}"
        )
    if is_discrete and not is_bounded and A > 1:
        raise ValueError(
            f"actions: expected one index of a discrete action in each row, got {A} integers; if "
            "they are the parts of a MultiDiscrete action, give their sizes, "
            "dataset.action_parts=[3, 2], or encode them, see docs/environments.md; if they are "
            "continuous, save floating-point numbers"
        )
    if is_discrete and not is_bounded and not num_actions:
        num_actions = 1 + int(actions.high.max())
    if not num_actions:
        has_both_bounds = len(low) and len(high)
        low = low if len(low) else actions.low.tolist()
        high = high if len(high) else actions.high.tolist()
        if not has_both_bounds:
            low, high = separate_bounds(low, high)
    return Spec(S, A, horizon or longest, tuple(low), tuple(high), num_actions)


# Version 2: an episode may be both terminated and truncated, actions with bounds are continuous, and
# the card says where next observations contradict the rows. Version 3: the card says where float32
# rounds observations visibly. Version 4: flags are 0 or 1. Version 5: texts of the file are read; the
# card names the columns that are not, and has the faults of actions, rewards and final observations; a
# column that marks other ends of episodes is refused. Version 6: text=none reads no texts.
READER = DatasetReader(version=6, files=files, set_texts=select_texts)
