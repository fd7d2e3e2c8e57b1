"""Your own data: episodes made in Python, arrays in D4RL's layout, or a data store that exists
already."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import h5py
import numpy as np

from decisionllm.checks import is_numbers, one_of
from decisionllm.datasets.action_range import separate_bounds
from decisionllm.datasets.episode_markers import describe_contradiction, find_contradictions
from decisionllm.datasets.moments import Moments
from decisionllm.datasets.row_blocks import Columns, ending, flags
from decisionllm.datasets.spaces import stated_action_parts, stated_parts
from decisionllm.datasets.store import (
    DatasetReader,
    Store,
    check_episode,
    open_store,
    with_texts,
    write,
)
from decisionllm.datasets.text_columns import (
    NO_COLUMN,
    choose_column,
    is_text,
    texts_of_episodes,
)
from decisionllm.files import AGAIN, explained
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Json, Spec, are_numbers

BLOCK = 1 << 21  # numbers of a column that are read at a time
KEYS = ("observations", "actions", "rewards", "terminals")
ELSEWHERE = {  # D4RL's key: what other libraries call it
    "observations": ("obs", "observation", "states"),
    "actions": ("action", "acts"),
    "rewards": ("reward", "rews"),
    "terminals": ("terminal", "terminations", "termination", "terminated", "dones", "done"),
    "timeouts": ("timeout", "truncations", "truncation", "truncated"),
    "next_observations": ("next_obs", "next_observation", "next_states"),
}
TEXTS = ("none", "constant", "episode")  # values of the option `text`
ENDS = ("terminals", "timeouts")  # flags of the last row of an episode
BOTH_ENDS = ("dones", "done")  # may be set by the task or by a time limit
HDF5 = (".hdf5", ".h5", ".hdf")


@register("dataset", "arrays", text="${text}")
def load(
    *,
    path: str,
    name: str = "",
    task: str = "",
    task_from: str = "",
    text: str = "none",
    horizon: int = 0,
    num_actions: int = 0,
    low: Sequence[float] = [],
    high: Sequence[float] = [],
    clip: bool = False,
    ignore: Sequence[str] = [],
) -> Source:
    """The episodes of an .npz or HDF5 file in D4RL's layout, see `cut`; the file is never held as a
    whole.

    Args:
        path: the file.
        name: of the dataset in results; empty: that of the file.
        task: the text of every episode, read with text=constant.
        task_from: the column of task texts, one for each row or episode, or a table of texts beside
            `task_index`; empty: the one called `tasks`, `language_instruction` or alike, see
            `text_columns.TEXT_NAMES`; `none`: no texts are read.
        text: `constant`: the task; `episode`: the column of texts, which has to be there; `none`:
            the column of texts, if there is one.
        horizon: refuse longer episodes; 0: the longest one.
        num_actions: C of discrete actions; 0: the largest index plus 1 where actions are integers
            without bounds, else they are continuous.
        low: (A,) least action, raw units; empty: of the data.
        high: (A,) greatest action, raw units; empty: of the data.
        clip: clip actions to low and high; they are an error otherwise.
        ignore: columns that look like ends of episodes and are none.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a key is missing, a shape does not fit, a number is not finite, no row ends an
            episode, a column that is not read marks other ends, or the file is damaged.

    Source: D4RL, https://github.com/Farama-Foundation/D4RL/wiki/Tasks, `OfflineEnv.get_dataset`.
    """
    words = constant_text("dataset", text, task, TEXTS)
    check_bounds(low, high)
    if clip and not (len(low) or len(high)):
        raise ValueError("dataset.clip: expected dataset.low or dataset.high to clip to, got none")
    file = Path(path).expanduser()
    widths = {"observations": 0, "actions": 0, "next_observations": 0}
    check_ends(file, blocks(file, widths))
    check_other_columns(file, ignore)
    column = text_column(file, text, task_from)
    spec = spec_of(cut(blocks(file, widths)), horizon, num_actions, low, high)
    episodes = cut(blocks(file, widths), task=words)
    if column:
        text = "episode"
        episodes = with_tasks(episodes, read_tasks(file, column))
    info: Json = {"name": name or file.stem, "text": text, "file": str(file)}
    if clip:
        episodes = clip_actions(episodes, spec)
        info["clip"] = True
    unread_keys = list_unread(file, [*KEYS, *widths, *ENDS, column])
    if unread_keys:
        info["unread"] = unread_keys
    faults = [*unread(text, task), *contradictions(blocks(file, widths))]
    if faults:
        info["faults"] = faults
    return Source(spec, episodes, info)


def check_bounds(low: object, high: object) -> None:
    """Raise a ValueError unless the options `low` and `high` are lists of numbers."""
    for key, bounds in {"low": low, "high": high}.items():
        if not is_numbers(bounds):
            raise ValueError(f"dataset.{key}: expected a list of numbers, got {bounds!r}")


def clip_actions(episodes: Iterable[Episode], spec: Spec) -> Iterator[Episode]:
    """Yield episodes whose continuous actions are clipped to the bounds of the spec."""
    low, high = np.array([spec.low, spec.high], np.float32)
    for episode in episodes:
        yield replace(episode, actions=np.clip(episode.actions, low, high))


@register("dataset", "store")
def open_folder(*, path: str, task_from: str = "") -> Store:
    """A data store that `from_episodes` or `store.write` made; the folder must stay.

    Args:
        path: the folder.
        task_from: empty: episodes have their own texts; `none`: no texts are read.
    """
    one_of("dataset.task_from", task_from, ("", NO_COLUMN))
    return open_store(Path(path).expanduser())


def select_texts(store: Store, *, task_from: str = "", **options: object) -> Store:
    """Return the store with its texts, or without texts if `task_from` is `none`."""
    if task_from != NO_COLUMN or not any(store.tasks):
        return store
    return with_texts(store, "none", [""] * len(store.task), {})


def files(*, path: str, **options: object) -> list[Path]:
    """The file that these options read; of a store its card, which is written with all the rest."""
    given = Path(path).expanduser()
    file = given / "card.json" if given.is_dir() else given
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
        spec: sizes, action space and horizon; None: those of the data, see `spec_of`.
        observation_parts: (name, numbers) of the parts of an observation, in the order of its
            columns, as `spaces.observation_parts` gives them. An environment that lays its parts
            out in another way is refused. Empty: not said.
        action_parts: sizes of the parts of a MultiDiscrete action, which the log holds as
            `spaces.encode_actions` does. Empty: not said.

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
        spec = spec_of(episodes)
    info: Json = {"name": name}
    if observation_parts:
        info["observation_parts"] = stated_parts(observation_parts, spec.observation_dim)
    if action_parts:
        info["action_parts"] = stated_action_parts(action_parts, spec.num_actions)
    store = write(Path(path).expanduser(), Source(spec, episodes, info))
    return {"_target_": f"{__name__}.open_folder", "path": str(store.path.absolute())}


def cut(blocks: Iterable[Columns], *, task: str = "") -> Iterator[Episode]:
    """D4RL's columns, rows of all episodes end to end in blocks, as episodes of the text `task`.

    An episode ends with a row where `terminals` (it terminated) or the optional `timeouts` (it was
    truncated) or both are set, and with the last row; `load` refuses a file without such a row, see
    `check_ends`. Actions of NaN are missing. Its final observation is known where the optional
    `next_observations` are there.
    """
    group = 0
    for block in ending(blocks, ends):
        after = np.flatnonzero(ends(block)) + 1
        bounds = np.unique([0, *after, len(block["rewards"])])
        for a, b in pairwise(bounds.tolist()):
            yield as_episode({key: x[a:b] for key, x in block.items()}, group, task)
            group += 1


def as_episode(columns: Columns, group: int, task: str) -> Episode:
    """One episode from its rows of D4RL's columns."""
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


def with_tasks(episodes: Iterable[Episode], tasks: Sequence[str]) -> Iterator[Episode]:
    """Yield the episodes with their texts (E,)."""
    for episode, task in zip(episodes, tasks, strict=True):
        yield replace(episode, task=task)


def text_column(path: Path, text: str, task_from: str) -> str:
    """Return the column of task texts that is read; empty: none.

    Raises:
        ValueError: text=episode asks for one and there is none; text=constant has another text; or
            see `choose_column`.
    """
    if text == "constant":
        if task_from not in ("", NO_COLUMN):
            raise ValueError(
                f"dataset.task_from: expected none with text=constant, which reads dataset.task, got "
                f"{task_from!r}; take text=episode to read it"
            )
        return ""
    with ExitStack() as stack:
        columns = open_all(stack, path)
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
        columns = open_all(stack, path)
        ended = row_ends(columns)
        offsets = np.unique([0, *np.flatnonzero(ended) + 1, len(ended)])
        return texts_of_episodes(path, columns, column, offsets)


def row_ends(columns: Json) -> np.ndarray:
    """Return whether an episode ends with each row of a file, whose columns `open_all` opened: (n,)
    bool.
    """
    n = columns["terminals"].shape[0]
    ended = np.zeros(n, bool)
    for key in ENDS:
        for start in range(0, n if key in columns else 0, BLOCK):
            rows = slice(start, min(start + BLOCK, n))
            ended[rows] |= columns[key][rows].reshape(-1) != 0
    return ended


def list_unread(path: Path, read: Sequence[str]) -> list[str]:
    """Return the names of the columns of a file that are not among those that are read."""
    with ExitStack() as stack:
        columns = open_all(stack, path)
        unread = [key for key in columns if key not in read]
        return [f"{key} (text)" if is_text(columns[key]) else key for key in unread]


def open_all(stack: ExitStack, path: Path) -> Json:
    """Return all columns of a file by name, nested ones as `group/name`, as `open_columns` does."""
    if path.suffix == ".npz":
        keys, _ = open_columns(stack, path, [])
        columns: Json = dict.fromkeys(keys)
        for key in keys:
            with suppress(ValueError):  # a type that this version of numpy cannot read
                columns |= open_columns(stack, path, [key])[1]
        return columns
    file = stack.enter_context(h5py.File(path))
    columns = {}

    def add(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            columns[name] = item

    file.visititems(add)
    return columns


def ends(columns: Columns) -> np.ndarray:
    """Whether an episode ends with each row of D4RL's columns: (n,) bool."""
    ended = [columns[key].astype(bool) for key in ENDS if key in columns]
    return np.asarray(np.any(ended, axis=0))


def check_ends(path: Path, blocks: Iterable[Columns]) -> None:
    """Raise a ValueError unless some row of a file ends an episode; reads up to the first one that
    does.

    Without this, all rows would be one episode, of which nothing can be held out.
    """
    rows = 0
    for block in blocks:
        if ends(block).any():
            return
        rows += len(block["rewards"])
    remedy = "mark the last row of each episode, also of a single one; dataset.horizon cuts nothing"
    wanted = "a row where terminals or timeouts is set"
    raise ValueError(f"{path}: expected {wanted}, got {rows:,} rows without; {remedy}")


def check_other_columns(path: Path, ignore: Sequence[str]) -> None:
    """Raise a ValueError if a column that is not read marks other ends of episodes.

    Args:
        path: of a file whose columns were checked.
        ignore: names of columns that say nothing of episodes.
    """
    with ExitStack() as stack, explain_damage(path):
        columns = open_all(stack, path)
        ended = row_ends(columns)
        read = {*KEYS, *ENDS, "next_observations", *ignore}
        arrays = {
            name: column
            for name, column in columns.items()
            if name not in read and getattr(column, "shape", None)
        }
        contradictions = find_contradictions(arrays, ended)
    absent = [name for name in ignore if name not in columns]
    if absent:
        raise ValueError(
            f"dataset.ignore: expected names among {', '.join(columns)}, got {', '.join(absent)}"
        )
    if contradictions:
        raise ValueError(f"{path}: {describe_contradiction(contradictions, ended)}")


def contradictions(blocks: Iterable[Columns]) -> list[str]:
    """The fault of `next_observations` that are not the observations of the next rows, as of
    shuffled rows; reads the whole file where it has them.
    """
    steps = wrong = 0
    for block in ending(blocks, ends):
        if "next_observations" not in block:
            return []
        inside = ~ends(block)[:-1]
        n = len(inside)
        following = block["observations"].reshape(n + 1, -1)[1:]
        stated = block["next_observations"].reshape(n + 1, -1)[:-1]
        same = np.isclose(stated, following).all(1)
        steps += int(inside.sum())
        wrong += int((inside & ~same).sum())
    if not wrong:
        return []
    said = f"next_observations: {wrong:,} of {steps:,} are not the observation of the next row"
    return [f"{said}, although the episode goes on"]


def constant_text(
    group: str,
    text: str,
    task: str,
    known: Sequence[str] = ("none", "constant"),
) -> str:
    """The task text of every episode, or its template; "" with text=none and text=episode.

    Args:
        group: of the options, for messages.
        text: the option `text`.
        task: the option `task`.
        known: values of the option `text`.
    """
    one_of(f"{group}.text", text, known)
    if text in ("none", "episode"):
        return ""
    if not task:
        raise ValueError(f"{group}.task: text={text} needs a text, got none; give {group}.task=...")
    return task


def unread(text: str, task: str) -> list[str]:
    """The fault of a task text that is given but not read; see `faults.reported`."""
    if not task or text not in ("none", "episode"):
        return []
    return [f"the task text {task!r} is not read, since text={text}"]


def spec_of(
    episodes: Iterable[Episode],
    horizon: int = 0,
    num_actions: int = 0,
    low: Sequence[float] = (),
    high: Sequence[float] = (),
) -> Spec:
    """The spec of these episodes.

    The data give what is not given here: the horizon, and the bounds of continuous actions. Where
    actions are integers without bounds they are discrete, and C is the largest index plus 1.
    """
    S = A = longest = 0
    actions = Moments()
    discrete = True
    for e, episode in enumerate(episodes):
        check_episode(f"episode {e}", episode)
        taken = episode.recorded_actions
        if not longest:
            S = episode.observations.shape[1]
            A = taken.shape[1]
        longest = max(longest, len(episode.rewards))
        discrete = discrete and taken.dtype.kind in "iub"
        if taken.shape[1] == A:  # `store.write` refuses an episode of another size
            actions.add(taken)
    if not longest:
        raise ValueError("episodes: expected at least one, got none")
    if not actions.count:
        why = "all of them are missing (NaN); record some to learn from"
        raise ValueError(f"episodes: expected the recorded action of some steps, {why}")
    bounded = len(low) + len(high) > 0
    if num_actions and bounded:
        wanted = f"no bounds (low, high) of {num_actions} discrete actions"
        raise ValueError(f"num_actions: expected {wanted}, got {list(low)} and {list(high)}")
    if discrete and not bounded and not num_actions:
        num_actions = 1 + int(actions.high.max())
    if not num_actions:
        is_stated = len(low) and len(high)
        low = low if len(low) else actions.low.tolist()
        high = high if len(high) else actions.high.tolist()
        if not is_stated:
            low, high = separate_bounds(low, high)
    return Spec(S, A, horizon or longest, tuple(low), tuple(high), num_actions)


def blocks(path: Path, widths: Mapping[str, int]) -> Iterator[Columns]:
    """The checked columns of an .npz or HDF5 file in D4RL's layout, rows by rows.

    Args:
        path: the file.
        widths: numbers in a row of each further key, 0: any.
    """
    widths = {"rewards": 1, "terminals": 1, "timeouts": 1, **widths}
    keys = list(dict.fromkeys([*KEYS, *widths]))
    npz = path.suffix == ".npz"
    wanted = f"{path}: expected an .npz or HDF5 file in D4RL's layout"
    if not path.is_file():
        raise FileNotFoundError(f"{wanted}, found none")
    if not (npz or path.suffix in HDF5 or h5py.is_hdf5(path)):
        remedy = "np.savez makes one of the columns of a table, see docs/data.md"
        raise ValueError(f"{wanted}, got another format; {remedy}")
    with ExitStack() as stack:
        with explain_damage(path):
            found, columns = open_columns(stack, path, keys)
        check_keys(path, found, keys)
        n = check_shapes(path, columns, widths)
        rows = max(BLOCK // max(numbers_of(x) for x in columns.values()), 1)
        for start in range(0, n, rows):
            with explain_damage(path):
                block = {key: column[start : start + rows] for key, column in columns.items()}
            yield checked_block(path, block, start)


def explain_damage(path: Path) -> AbstractContextManager[None]:
    """Explain an error of reading an .npz or HDF5 file."""
    kind = "npz" if path.suffix == ".npz" else "HDF5"
    what = f"{path}: not a readable {kind} file, perhaps truncated"
    errors = (OSError, ValueError, EOFError, BadZipFile, zlib.error)
    return explained(what, *errors, remedy=AGAIN)


def checked_block(path: Path, block: Columns, start: int) -> Columns:
    """Rows of a file from number `start` on: finite numbers, ends as bool (n,), rewards (n,)."""
    checked = {}
    for key, x in block.items():
        check_finite(path, key, x, start)
        if key in ENDS:
            checked[key] = flags(f"{path}: {key}", x.reshape(-1), start)
        elif key == "rewards":
            checked[key] = x.reshape(-1)
        else:
            checked[key] = x
    return checked


def open_columns(
    stack: ExitStack,
    path: Path,
    keys: Sequence[str],
) -> tuple[list[str], Json]:
    """All keys of a file, and its columns of `keys`, each read where it is indexed by a slice."""
    if path.suffix == ".npz":
        archive = stack.enter_context(ZipFile(path))
        arrays = [name for name in archive.namelist() if name.endswith(".npy")]
        found = [name.removesuffix(".npy") for name in arrays]
        return found, {key: Member(archive, key) for key in keys if key in found}

    file = stack.enter_context(h5py.File(path))
    # `in` finds nested keys too, and links; `get` gives None for a link that is broken
    columns = {key: file.get(key) for key in keys if key in file}
    return list(file), columns


def numbers_of(column: np.ndarray | h5py.Dataset) -> int:
    """Numbers in one row of a column."""
    return int(np.prod(column.shape[1:]))


def check_shapes(
    path: Path, columns: Mapping[str, np.ndarray | h5py.Dataset], widths: Mapping[str, int]
) -> int:
    """The number of rows of all columns.

    Args:
        path: of the file.
        columns: with shape and dtype.
        widths: as in `blocks`.

    Raises:
        ValueError: columns differ in length or have no row, or one has another shape or type, or
            is a group, a broken link or an empty dataset of HDF5.
    """
    for key, column in columns.items():
        check_is_array(path, key, column)
    sizes = {key: (*column.shape, 1)[0] for key, column in columns.items()}
    if len(set(sizes.values())) > 1 or not sizes["rewards"]:
        raise ValueError(f"{path}: expected columns of one length, at least 1, got {sizes}")
    for key, column in columns.items():
        check_width(path, key, column, widths[key])
    if "next_observations" in columns:
        width = numbers_of(columns["observations"])
        check_width(path, "next_observations", columns["next_observations"], width)
    return int(sizes["rewards"])


def check_width(path: Path, key: str, column: np.ndarray | h5py.Dataset, width: int) -> None:
    """Raise a ValueError unless a column has rows of so many numbers; 0: of one or more."""
    is_table = len(column.shape) in (1, 2) and are_numbers(column.dtype)
    found = numbers_of(column)
    fits = found == width if width else found > 0
    if not (is_table and fits):
        wanted = f"{key} of {width or 'some'} columns"
        raise ValueError(f"{path}: expected {wanted}, got shape {column.shape}, {column.dtype}")


def check_is_array(path: Path, key: str, column: object) -> None:
    """Raise a ValueError for a key of an HDF5 file that holds no array."""
    if isinstance(column, h5py.Group):
        parts = ", ".join(column)
        remedy = "np.hstack makes one of its parts"
        raise ValueError(f"{path}: expected {key} as one array, got a group of {parts}; {remedy}")
    if getattr(column, "shape", None) is None:
        got = "a broken link or an empty dataset"
        raise ValueError(f"{path}: expected {key} as an array, got {got}; write its rows there")


def check_keys(path: Path, found: Sequence[str], read: Sequence[str]) -> None:
    """Raise a ValueError if a file lacks a required key, or has an optional one under the name of
    another library.

    Args:
        path: of the file.
        found: its keys.
        read: the keys that are looked for, required and optional.
    """
    renamed = {}
    for key in read:
        others = [other for other in ELSEWHERE.get(key, ()) if other in found]
        if key not in found and others:
            renamed[key] = others[0]
    required = [key for key in KEYS if key not in found]
    lacking = [key for key in read if key in renamed or key in required]
    if not lacking:
        return
    pairs = []
    for key, other in renamed.items():
        either = " (timeouts where a time limit ended the episode)" if other in BOTH_ENDS else ""
        pairs.append(f"{other}: {key}{either}")
    remedy = ""
    if pairs:
        remedy = f"; rename {', '.join(pairs)}"
    elif lacking == ["terminals"] and "timeouts" in found:
        remedy = "; add terminals, all false if only time limits end the episodes"
    wrong = f"{', '.join(lacking)} not among {', '.join(found) or 'none'}"
    raise ValueError(f"{path}: expected D4RL's keys, {wrong}{remedy}")


def check_finite(path: Path, key: str, x: np.ndarray, start: int) -> None:
    """Raise a ValueError unless the rows of a column are finite as a store keeps them, in float32.

    Args:
        path: of the file.
        key: of the column.
        x: (n, ...) rows.
        start: number of the first row in the file.
    """
    # A float64 beyond the range of float32 becomes infinite, and is refused below
    with np.errstate(over="ignore"):
        finite = np.isfinite(x.astype(np.float32))
    if key == "actions" and x.dtype.kind == "f":
        missing = np.isnan(x).reshape(len(x), -1).all(1)  # a row of NaN: the log lacks the action
        finite[missing] = True
    if not finite.all():
        row = start + np.argwhere(~finite)[0, 0]
        wrong = x[~finite][0]
        kind = " (float32)" if np.isfinite(wrong) else ""
        raise ValueError(f"{path}: expected finite {key}{kind}, got {wrong} in row {row}")


class Member:
    """A column of an .npz file, whose rows are read in their order."""

    def __init__(self, file: ZipFile, key: str) -> None:
        self.file = file.open(f"{key}.npy")
        header = np.lib.format.read_array_header_2_0
        if np.lib.format.read_magic(self.file) == (1, 0):
            header = np.lib.format.read_array_header_1_0
        self.shape, self.by_columns, self.dtype = header(self.file)

    def __getitem__(self, rows: slice) -> np.ndarray:
        if not self.shape:
            return self._next(())
        if self.by_columns:
            return self.whole[rows]
        return self._next((min(rows.stop, self.shape[0]) - rows.start, *self.shape[1:]))

    @cached_property
    def whole(self) -> np.ndarray:
        """All rows, of an array that lies in the file column by column."""
        return self._next(self.shape[::-1]).T

    def _next(self, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape)) * self.dtype.itemsize
        return np.frombuffer(self.file.read(size), self.dtype).reshape(shape)


# Version 2: an episode may be both terminated and truncated, actions with bounds are continuous, and
# the card says where next observations contradict the rows. Version 3: the card says where float32
# rounds observations visibly. Version 4: flags are 0 or 1. Version 5: texts of the file are read; the
# card names the columns that are not, and has the faults of actions, rewards and final observations; a
# column that marks other ends of episodes is refused.
READER = DatasetReader(version=5, files=files, worded=select_texts)
