"""Datasets on disk: flat arrays that are memory-mapped, episode offsets, and a card.

A store is a folder: one .npy file per field with the rows of all episodes end to end, and card.json
with the spec (sizes, action space, horizon), the distinct task texts, the origin, and a fingerprint
of every byte.

A task text is made when a store is opened, so that another wording makes no data again. The store
holds one canonical text for each distinct task and, in its card, the facts that all texts of this
task are made of (a goal's cell, a campaign's budget). For this, a reader has two functions, see
`DatasetReader`:

- `data_options` returns the options that the data depend on. If `text` changes more than texts, the
  options keep the difference: a goal in the text of a Maze2D log also decides its rewards.
- `worded` returns the store with the texts that the option `text` asks for, see `with_texts`.

The fingerprint covers the data and the texts that are read: two runs with one fingerprint read the
same bytes.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import DTypeLike

from decisionllm.datasets import action_range, autoreset
from decisionllm.datasets.reward_range import RewardDigits
from decisionllm.datasets.rounding import Rounding
from decisionllm.datasets.row_blocks import Columns
from decisionllm.files import atomic, explained
from decisionllm.protocols import Source
from decisionllm.registry import Node, build, is_none, is_reference, no_choice, takes
from decisionllm.schema import (
    EPISODE_FIELDS,
    STEP_FIELDS,
    Episode,
    Json,
    Spec,
    StepColumns,
    refuse,
)

FORMAT = 1
CARD = ("format", "spec", "tasks", "info", "fingerprint", "arrays")  # keys of a store's card
NO_TRANSFORM = no_choice()
REMEDY = "delete the folder to make it again"
HEADER = 128  # bytes, of each .npy file
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Store(StepColumns[np.ndarray]):
    """An open store. n steps, E episodes; every array is a view of a file, in raw units."""

    path: Path
    spec: Spec
    tasks: tuple[str, ...]  # the distinct texts
    info: Json
    fingerprint: str
    offsets: np.ndarray  # (E+1,) int64: episode e is rows offsets[e]:offsets[e+1]
    rewards: np.ndarray  # (n,) float32
    terminated: np.ndarray  # (E,) bool
    truncated: np.ndarray  # (E,) bool
    task: np.ndarray  # (E,) int32, into tasks
    group: np.ndarray  # (E,) int64
    final_observation: np.ndarray | None = None  # (E, S) float32
    agent: np.ndarray | None = None  # (E,) int32
    start: np.ndarray | None = None  # (E,) int32
    return_after_exit: np.ndarray | None = None  # (E,) float32
    part: np.ndarray | None = None  # (E,) int32
    # {canonical text: facts}, for the tasks that have some
    facts: Mapping[str, Json] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(E,) steps of each episode."""
        return np.diff(self.offsets)

    @cached_property
    def returns(self) -> np.ndarray:
        """(E,) float64, raw reward units: of the whole episode, and of its team after it left."""
        own = np.add.reduceat(self.rewards, self.offsets[:-1], dtype=np.float64)
        return own if self.return_after_exit is None else own + self.return_after_exit

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """The episodes of each part of a mixture, {label: (e,) int}; {"": all of them} of one
        dataset.
        """
        part = np.zeros(len(self.lengths)) if self.part is None else self.part
        return {label: np.flatnonzero(part == i) for i, label in enumerate(self.part_infos)}

    @cached_property
    def part_infos(self) -> dict[str, Json]:
        """The info of each part of a mixture, by label; {"": info} of one dataset."""
        if "parts" not in self.info:
            return {"": self.info}
        return {label: part["dataset"] for label, part in self.info["parts"].items()}

    def episode_of(self, rows: np.ndarray) -> np.ndarray:
        """The episode that each row is a step of, of the shape of `rows`."""
        return np.searchsorted(self.offsets, rows, side="right") - 1

    def rows_of(self, episodes: np.ndarray) -> np.ndarray:
        """The rows of these episodes (E,), one episode after the other: (n,)."""
        return np.concatenate([np.arange(*self.offsets[e : e + 2]) for e in episodes])

    @cached_property
    def has_final(self) -> np.ndarray:
        """(E,) bool, whether the log has the observation after each episode; that of a reset is
        none.
        """
        if self.final_observation is None:
            return np.zeros(len(self.lengths), bool)
        has_final = np.ones(len(self.lengths), bool)
        for episodes in self.parts.values():  # each is one log
            if len(episodes):
                offsets = self.offsets[episodes[0] : episodes[-1] + 2]
                columns = self.observations, offsets, self.final_observation[episodes]
                if not autoreset.has_extra_rows(*columns, self.rewards):
                    has_final[episodes] = ~autoreset.starts_elsewhere(*columns)
        return has_final

    @cached_property
    def followed(self) -> np.ndarray:
        """(n,) bool, whether the log has the observation after each step."""
        known = np.ones(len(self.rewards), bool)
        known[self.offsets[1:] - 1] = self.has_final
        return known

    def following(self, rows: np.ndarray) -> np.ndarray:
        """The observations after these rows (m,), (m, S): after a last step the final one of its
        episode, or its own where the log has none.
        """
        after, is_last = next_rows(rows, self.offsets[1:])
        observations: np.ndarray = self.observations[after]
        if self.final_observation is not None:
            episodes = self.episode_of(rows[is_last])
            has_final = self.has_final[episodes]
            places = np.flatnonzero(is_last)[has_final]
            observations[places] = self.final_observation[episodes[has_final]]
        return observations

    def episode(self, e: int) -> Episode:
        """Episode e, its arrays views of the files."""
        rows = slice(self.offsets[e], self.offsets[e + 1])
        fields: Json = {}
        for name in (*STEP_FIELDS, *EPISODE_FIELDS):
            column = getattr(self, name)
            if column is None:
                fields[name] = None
            elif name in STEP_FIELDS:
                fields[name] = column[rows]
            elif column.ndim > 1:
                fields[name] = column[e]
            else:
                fields[name] = column[e].item()
        fields["task"] = self.tasks[fields["task"]]
        return Episode(**fields)


@dataclass(frozen=True, kw_only=True)
class DatasetReader:
    """What a store must know of a dataset reader beside the function that reads. Its module names it
    `READER`; each function here takes the options of the reader.

    A reader is a function that returns a `Source`. Register it under `@register("dataset", name)`;
    its keyword-only parameters become `dataset.*` options. One with a first parameter `opened` is
    given a function that opens the store of another dataset by its config node.

    Attributes:
        version: raise it when the reader makes other data of the same options, so that its stores
            are made again.
        files: (**options) -> the files that are read. A store is made again when one of them
            changes.
        readings: (**options) -> the config nodes of the other datasets that are read. A store is
            made again when the version of one of their readers changes.
        data_options: (**options) -> the options that the data depend on: those given, with the
            canonical `text`. None: all.
        worded: (store, **options) -> the store with the texts that the option `text` asks for, see
            `with_texts`. None: its texts are data.
    """

    version: int | None = None
    files: Callable[..., list[Path]] | None = None
    readings: Callable[..., list[Node]] | None = None
    data_options: Callable[..., Json] | None = None
    worded: Callable[..., Store] | None = None


def next_rows(rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row after each of these rows (m,) in its episode, (m,), and whether there is none, (m,)
    bool; a last row is its own next one.

    ends: (E,) the row after each episode.
    """
    is_last = np.isin(rows + 1, ends)
    return np.where(is_last, rows, rows + 1), is_last


def write(path: str | Path, source: Source) -> Store:
    """Write a Source to a folder, all or nothing, and open it. Episodes go to disk as they come.

    Raises:
        FileExistsError: the path is a file, or a folder that holds something else than a store.
        ValueError: no episode, or one that does not fit the spec; it is named with its step and
            number.
        OSError: the disk is full; what was there before is kept.
    """
    try:
        return _write(Path(path), source)
    except OSError as error:
        if error.errno not in FULL:
            raise
        kept = "nothing of it is left. Make room, or choose another folder (cache_dir=...)"
        raise OSError(
            f"{path}: the store could not be written ({error.strerror}); {kept}"
        ) from error


def _write(path: Path, source: Source) -> Store:
    is_other_folder = path.is_dir() and any(path.iterdir()) and not (path / "card.json").is_file()
    if path.is_file() or is_other_folder:
        raise FileExistsError(
            f"{path}: expected a new folder, or a store to replace; choose another path"
        )
    name = source.info.get("name", path)
    wanted = f"{name}: expected info and facts that JSON can hold"
    remedy = "x.item() is the number of a numpy scalar, x.tolist() the list of an array"
    with explained(wanted, TypeError, ValueError, remedy=remedy):
        json.dumps([source.info, source.facts])
    with atomic(path) as partial:
        partial.mkdir()
        with ExitStack() as stack:
            columns = Writer(partial, stack)
            for e, episode in enumerate(source.episodes):
                _check(f"episode {e}", episode, source.spec)
                columns.append(episode)
        if not columns.steps:
            raise ValueError(f"{name}: expected at least one episode, got none")
        arrays = {}
        shapes = {}
        for column in sorted(columns.files):
            array = np.load(partial / f"{column}.npy", mmap_mode="r")
            arrays[column] = array
            shapes[column] = [str(array.dtype), list(array.shape)]
        if "action_weight" in arrays and not arrays["action_weight"].any():
            why = "all of them are missing (NaN); record some to learn from"
            raise ValueError(f"{name}: expected the recorded action of some steps, {why}")
        spec = asdict(source.spec)
        tasks = list(columns.tasks)
        info = source.info
        faults = [
            *columns.rounding.faults(),
            *action_range.describe_faults(source.spec, arrays),
            *columns.digits.faults(arrays["rewards"]),
            *autoreset.describe_faults(
                arrays["observations"],
                arrays["offsets"],
                arrays.get("final_observation"),
                arrays["rewards"],
            ),
        ]
        # those of a mixture are faults of its parts, and a transform has those of its data
        faults = [each for each in faults if each not in info.get("faults", [])]
        if faults and "parts" not in info:
            info = info | {"faults": [*info.get("faults", []), *faults]}
        card: Json = {
            "format": FORMAT,
            "spec": spec,
            "tasks": tasks,
            "info": info,
            "facts": source.facts,
            "arrays": shapes,
            "fingerprint": _fingerprint(spec, tasks, arrays),
        }
        (partial / "card.json").write_text(
            json.dumps(card, indent=1, ensure_ascii=False), encoding="utf-8"
        )
    return open_store(path)


class Writer:
    """The files of a store that is being written, one for each column.

    Args:
        folder: of the store.
        stack: closes the files.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.files: dict[str, Column] = {}
        self.tasks: dict[str, int] = {}  # numbers of the texts
        self.episodes = 0
        self.steps = 0
        self.rounding = Rounding()  # of the observations
        self.digits = RewardDigits()
        self._begin("offsets", np.int64).append(np.zeros(1))

    def append(self, episode: Episode) -> None:
        """Write the steps of an episode behind those before.

        Raises:
            ValueError: the episode has another column than those before, or lacks one.
        """
        rows = self._rows(episode)
        for name in rows.keys() - self.files.keys():
            # The first episode that lacks an action may come late: the actions before are recorded.
            if name == "action_weight":
                self._begin(name, STEP_FIELDS[name]).append(np.ones(self.steps))
            elif self.episodes == 0:
                self._begin(name, (STEP_FIELDS | EPISODE_FIELDS)[name])
        unequal = rows.keys() ^ self.files.keys()
        if unequal:
            name = min(unequal)
            lacking = 0 if name in rows else self.episodes
            raise ValueError(f"episode {lacking}: expected {name} in every episode or in none")
        self.rounding.add(rows["observations"])
        name = f"episode {self.episodes}"
        self.digits.add(name, rows["rewards"], float(episode.return_after_exit or 0))
        for name, values in rows.items():
            self.files[name].append(values)
        self.episodes += 1
        self.steps += len(episode.rewards)

    def _rows(self, episode: Episode) -> Columns:
        """The rows that an episode adds to each column."""
        given = vars(episode) | {"task": self.tasks.setdefault(episode.task, len(self.tasks))}
        rows = {name: np.asarray(given[name]) for name in STEP_FIELDS if given[name] is not None}
        for name in EPISODE_FIELDS:
            if given[name] is not None:
                rows[name] = np.asarray(given[name])[None]
        if "action_weight" in self.files:
            rows.setdefault("action_weight", np.ones(len(episode.rewards), np.float32))
        rows["offsets"] = np.array([self.steps + len(episode.rewards)])
        return rows

    def _begin(self, name: str, dtype: DTypeLike) -> "Column":
        """Open the file of a new column."""
        column = Column(self.folder / f"{name}.npy", dtype)
        self.stack.callback(column.close)
        self.files[name] = column
        return column


class Column:
    """An .npy file that is written row by row, of a number of rows that is known at the end.

    Args:
        path: of the file.
        dtype: of its rows.
    """

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.shape: tuple[int, ...] = (0,)
        self.file = path.open("wb", buffering=1 << 18)
        self.file.write(bytes(HEADER))

    def append(self, rows: np.ndarray) -> None:
        """Rows (n, ...) of any dtype, each of the size of the first ones."""
        self.shape = (self.shape[0] + len(rows), *rows.shape[1:])
        self.file.write(np.ascontiguousarray(rows, self.dtype).data)

    def close(self) -> None:
        """Write the header, whose size does not depend on the number of rows."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        with self.file:
            self.file.seek(0)
            np.lib.format.write_array_header_1_0(self.file, header)


def open_store(path: str | Path) -> Store:
    """Open a folder made by `write`. Only the card is read; arrays are memory-mapped.

    Raises:
        FileNotFoundError: there is no store.
        ValueError: it is damaged, or of another format.
    """
    path = Path(path)
    if not (path / "card.json").is_file():
        raise FileNotFoundError(
            f"{path}: expected a data store (a folder with card.json), found none"
        )
    with explained(f"{path}/card.json is damaged", ValueError, remedy=REMEDY):
        card = json.loads((path / "card.json").read_text(encoding="utf-8"))
        if not isinstance(card, dict):
            raise ValueError(f"expected {{KEY: VALUE}}, got {card!r}")
        absent = [key for key in CARD if key not in card]
        if absent:
            raise ValueError(f"it lacks {', '.join(absent)}")
    if card.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected store format {FORMAT}, got {card.get('format')}; {REMEDY}"
        )
    arrays: Columns = {}
    for name, (dtype, shape) in card["arrays"].items():
        with explained(
            f"{path}/{name}.npy is damaged or missing", ValueError, OSError, EOFError, remedy=REMEDY
        ):
            found = np.asarray(np.load(path / f"{name}.npy", mmap_mode="r"))
        if [str(found.dtype), list(found.shape)] != [dtype, shape]:
            raise ValueError(
                f"{path}/{name}.npy: expected {dtype} {shape}, got {found.dtype} "
                f"{list(found.shape)}; {REMEDY}"
            )
        arrays[name] = found
    return Store(
        path=path,
        spec=Spec.of(card["spec"]),
        tasks=tuple(card["tasks"]),
        info=card["info"],
        facts=card.get("facts", {}),
        fingerprint=card["fingerprint"],
        **arrays,
    )


def read(store: Store, size: int) -> Iterator[tuple[slice, slice]]:
    """Read every byte of a store: whole episodes and their rows, about `size` rows at a time, whose
    observations have just been read.

    Raises:
        ValueError: its content is not what was written.
    """
    digest = hashlib.blake2b(digest_size=16)
    spec = asdict(store.spec)
    yield from _hashed(digest, spec, list(store.tasks), columns_of(store), blocks(store, size))
    found = digest.hexdigest()
    if found != store.fingerprint:
        raise ValueError(
            f"{store.path} is damaged: expected fingerprint {store.fingerprint}, got {found}; "
            f"{REMEDY}"
        )


def blocks(store: Store, size: int) -> Iterator[tuple[slice, slice]]:
    """All episodes in their order, in blocks of about `size` rows: (episodes, rows) of each
    block.
    """
    cuts = np.searchsorted(store.offsets[1:], np.arange(size, store.offsets[-1], size))
    for a, b in pairwise(np.unique([0, *cuts, len(store.lengths)]).tolist()):
        yield slice(a, b), slice(*store.offsets[[a, b]].tolist())


def columns_of(store: Store) -> Columns:
    """The arrays of a store by name."""
    return {
        name: x
        for name, x in vars(store).items()
        if name in (*STEP_FIELDS, *EPISODE_FIELDS, "offsets") and x is not None
    }


def _fingerprint(spec: Json, tasks: list[str], arrays: Columns) -> str:
    """Hash of the spec, the texts and every byte of the arrays."""
    digest = hashlib.blake2b(digest_size=16)
    whole = [(slice(0), slice(None))]
    for _ in _hashed(digest, spec, tasks, arrays, whole):
        pass
    return digest.hexdigest()


def _hashed(
    digest: hashlib.blake2b,
    spec: Json,
    tasks: list[str],
    arrays: Columns,
    parts: Iterable[tuple[slice, slice]],
) -> Iterator[tuple[slice, slice]]:
    """Update a hash with all of a store; the parts (episodes, rows) of its observations as they are
    read.
    """
    later = ("entity_schema", "categorical")  # empty ones are left out, as before there were some
    spaces = {key: value for key, value in spec.items() if value or key not in later}
    digest.update(json.dumps([spaces, tasks], sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        if name != "observations":
            digest.update(np.ascontiguousarray(arrays[name]).data.cast("B"))
            continue
        for episodes, rows in parts:
            digest.update(np.ascontiguousarray(arrays[name][rows]).data.cast("B"))
            yield episodes, rows


def prepare(dataset: Node, cache_dir: str | Path, transform: Node = NO_TRANSFORM) -> Store:
    """The store of a dataset as a transform changes it, with the texts of the dataset's option
    `text`.

    Args:
        dataset, cache_dir: see `kept`.
        transform: a config node; what it names takes a Store and returns a Source. Its store is
            kept beside that of the dataset itself, and made again where the version of its reader
            has changed.

    Raises:
        ValueError: an option cannot be.
    """
    store = kept(dataset, cache_dir)
    if not is_none(transform):
        source = build(dict(transform), store)
        version = reader_of(transform).version
        key = _key([version, store.fingerprint, source.info, dict(transform)])
        name = f"{_label(transform)}-{key}"
        store = keep(Path(cache_dir).expanduser() / "stores" / name, source)
    return worded(store, dataset)


def _label(node: Node) -> str:
    """The first word of a store's folder: `maze2d` for decisionllm.worlds.maze2d.dataset."""
    module = node["_target_"].rpartition(".")[0]
    return str(module.removesuffix(".dataset").rpartition(".")[2])


def _key(content: object) -> str:
    """A short hash of JSON values, for the name of a folder."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=6).hexdigest()


def kept(dataset: Node, cache_dir: str | Path) -> Store:
    """The store of a dataset with canonical texts, made on first use and found again by the hash of
    the options of its data.

    Args:
        dataset: a config node, see registry.choice. The sizes and times of the files of its reader
            are hashed too, so that a new or replaced file is read; and so is its version, so that
            stores of an older reader are made again.
        cache_dir: the store is in cache_dir/stores. A second process that prepares it waits for the
            first one.
    """
    dataset = data_node(dataset)
    stamps: list[object] = []
    for file in files(dataset):
        stat = file.stat()
        stamps.append([str(file), stat.st_size, stat.st_mtime_ns])
    reader = reader_of(dataset)
    if reader.version:
        stamps.append(reader.version)
    if reader.readings is not None:
        stamps.append([reader_of(node).version for node in reader.readings(**_options(dataset))])
    name = f"{_label(dataset)}-{_key([FORMAT, dataset, stamps])}"
    path = Path(cache_dir).expanduser() / "stores" / name
    if (path / "card.json").is_file():
        return open_store(path)
    if takes(dataset["_target_"], "opened"):
        source = build(dataset, partial(prepare, cache_dir=cache_dir))
    else:
        source = build(dataset)
    if isinstance(source, Store):
        return source
    if not isinstance(source, Source) or "name" not in source.info:
        wanted = 'a decisionllm.protocols.Source(spec, episodes, {"name": ...})'
        got = f"info {source.info}" if isinstance(source, Source) else type(source).__name__
        raise ValueError(f"{dataset['_target_']}: expected {wanted} of a reader, got {got}")
    return keep(path, source)


def data_node(dataset: Node) -> Json:
    """The config node of the data of a dataset: with the canonical text where its reader
    has one.
    """
    data_options = reader_of(dataset).data_options
    if data_options is None:
        return dataset
    return {"_target_": dataset["_target_"], **data_options(**_options(dataset))}


def worded(store: Store, dataset: Node) -> Store:
    """A store with canonical texts, with the texts that the option `text` of the dataset asks
    for.
    """
    found = retold(store, dataset)
    if found.tasks == store.tasks and np.array_equal(found.task, store.task):
        return found
    return replace(
        found, fingerprint=_fingerprint(asdict(found.spec), list(found.tasks), columns_of(found))
    )


def retold(store: Store, dataset: Node) -> Store:
    """`worded`, but with the fingerprint of the canonical texts, so that nothing is read."""
    wording = reader_of(dataset).worded
    return store if wording is None else wording(store, **_options(dataset))


def check_texts(text: str, stores: Collection[Store], dataset: Node) -> None:
    """Raise a ValueError if a run asks for task texts that its data do not follow.

    Args:
        text: the option of the run. `episode` asks for the texts that the data have.
        stores: of the run.
        dataset: the config node of the data.
    """
    if text == "none":
        return
    if not has_texts(stores):
        remedy = "give text=none, or data whose episodes have a text (Episode.task)"
        raise ValueError(f"text={text}: expected episodes with a task text, got none; {remedy}")
    if text == "episode":
        return
    # a mixture has the option for its parts
    takes_text = "text" in dataset and not any("parts" in store.info for store in stores)
    infos = [info for store in stores for info in store.part_infos.values()]
    if not takes_text and all(info.get("text") != text for info in infos):
        raise ValueError(
            f"text={text}: expected a dataset with the option `text`, got "
            f"{dataset['_target_']}, whose episodes have their own texts; give text=episode"
        )


def has_texts(stores: Iterable[Store]) -> bool:
    """Whether an episode of these stores has a task text."""
    return any(any(store.tasks) for store in stores)


def with_texts(
    store: Store, text: str, texts: Sequence[str], wordings: Json | None = None
) -> Store:
    """A store with these texts of its episodes (E,); with text=paraphrased their facts are
    `info["wordings"]`.

    Args:
        store: with canonical texts.
        text: the option.
        texts: of each episode, in their order.
        wordings: facts of those that have many wordings; None: of all with text=paraphrased, else
            of none.
    """
    info = {key: value for key, value in store.info.items() if key != "wordings"} | {"text": text}
    if wordings is None and text == "paraphrased":
        wordings = dict(zip(texts, facts_of(store), strict=True))
    if wordings:
        info["wordings"] = wordings
    number: dict[str, int] = {}
    task = np.array([number.setdefault(each, len(number)) for each in texts], store.task.dtype)
    return replace(store, tasks=tuple(number), task=task, info=info)


def facts_of(store: Store) -> list[Json]:
    """The facts of each episode of a store with canonical texts, (E,); {} where there are none."""
    known = [store.facts.get(task, {}) for task in store.tasks]
    return [known[i] for i in store.task.tolist()]


def reader_of(node: Node) -> DatasetReader:
    """What a config node's module says of its readers, or of its transforms: `READER`; by default
    that of a reader of nothing but its options.

    Raises:
        ValueError: the module has what a `READER` would name, and none.
    """
    module = node["_target_"].rpartition(".")[0]
    named = vars(import_module(module))
    if "READER" in named:
        reader: DatasetReader = named["READER"]
        return reader
    unused = [name for name in ("VERSION", "files", "data_options", "worded") if name in named]
    if unused:
        wanted = "READER = decisionllm.datasets.store.DatasetReader(files=files, ...)"
        got = f"{', '.join(unused)} that nothing would call"
        raise ValueError(f"{module}: expected {wanted} at its end, got {got}")
    return DatasetReader()


def _options(dataset: Node) -> Json:
    """The options of a config node; one that still refers to another option has its default."""
    return {
        key: value
        for key, value in dataset.items()
        if key != "_target_" and not is_reference(value)
    }


def keep(path: Path, source: Source) -> Store:
    """The store at cache_dir/stores/NAME: opened, or written by the first of the processes that ask
    for it.

    Args:
        path: of the store.
        source: of its episodes.
    """
    locks = path.parents[1] / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / path.name):
        if (path / "card.json").is_file():  # made while this process waited
            return open_store(path)
        # This process has the lock, so that a partial store is left of a process that was killed.
        for left in path.parent.glob(f".partial-*-{path.name}"):
            shutil.rmtree(left)
        return write(path, source)


def files(dataset: Node) -> list[Path]:
    """The files that the reader of a dataset reads, a config node."""
    name_files = reader_of(dataset).files
    return [] if name_files is None else name_files(**_options(dataset))


def _check(name: str, episode: Episode, spec: Spec) -> None:
    """Raise a ValueError for an episode that does not fit the spec."""
    check_episode(name, episode)
    _check_columns(name, episode)
    taken = episode.actions
    masks = episode.action_masks
    C = spec.num_actions
    steps = np.arange(len(episode.rewards))
    recorded = np.ones(len(steps), bool)
    if episode.action_weight is not None:
        recorded = episode.action_weight > 0
    S, A = episode.observations.shape[1], taken.shape[1]
    if (spec.observation_dim, spec.action_dim) != (S, A):
        wanted = f"observations of {spec.observation_dim} and actions of {spec.action_dim} numbers"
        raise ValueError(f"{name}: expected {wanted}, got {S} and {A}")
    if len(steps) > spec.horizon:
        most = f"{spec.horizon} steps (the horizon)"
        remedy = "cut the log or raise the horizon"
        raise ValueError(f"{name}: expected at most {most}, got {len(steps)}; {remedy}")
    if C:
        wrong = (taken != np.rint(taken)) | (taken < 0) | (taken >= C)
        space = f"an index below {C}"
        fix = ""
    else:
        slack = action_range.slack(spec.low, spec.high)
        wrong = (taken < np.subtract(spec.low, slack)) | (taken > np.add(spec.high, slack))
        space = f"within {list(spec.low)} .. {list(spec.high)}"
        fix = (
            "; clip them (dataset.clip=true, or np.clip) or widen the bounds (dataset.low and "
            "dataset.high, or Spec)"
        )
    place = f"{name}, step "
    log_prob = episode.action_log_prob
    if C and log_prob is not None:
        wanted = "expected the logarithm of a probability as action_log_prob, at most 0"
        remedy = "np.log makes it of a probability"
        refuse(place, log_prob > 1e-4, f"{{}}: {wanted}, got {{}}; {remedy}", steps, log_prob)
    beyond = f"{{}}: expected an action {space}, got {{}}{fix}"
    refuse(place, wrong.any(1) & recorded, beyond, steps, taken)
    if C and masks is not None:
        if masks.shape[1] != C:
            raise ValueError(f"{name}: expected action masks of {C} actions, got {masks.shape[1]}")
        allowed = np.take_along_axis(masks, taken.astype(int), 1)[:, 0]
        forbidden = "{}: the mask forbids the recorded action {:.0f}"
        refuse(place, ~allowed & recorded, forbidden, steps, taken[:, 0])


def check_episode(name: str, episode: object) -> None:
    """Raise a ValueError unless this is an `Episode`. name: of it, for messages."""
    if not isinstance(episode, Episode):
        remedy = "make it by decisionllm.Episode(observations, actions, rewards)"
        raise ValueError(f"{name}: expected an Episode, got {type(episode).__name__}; {remedy}")


def _check_columns(name: str, episode: Episode) -> None:
    """Raise a ValueError for a column that its type in a store would change: masks that are not
    bool, numbers beyond float32, or weights beyond 0 .. 1.
    """
    for column, dtype in (STEP_FIELDS | {"final_observation": np.float32}).items():
        values = vars(episode)[column]
        if values is None:
            continue
        if dtype is np.bool_ and values.dtype != bool:
            raise ValueError(f"{name}: expected {column} of true and false, got {values.dtype}")
        if values.dtype.kind == "f" and values.dtype != np.float32:
            with np.errstate(over="ignore"):
                wrong = ~np.isfinite(values.astype(np.float32))
            refuse(f"{name}: ", wrong, f"expected {column} within float32, got {{}}", values)
    weights = episode.action_weight
    if weights is not None:
        wrong = (weights < 0) | (weights > 1)
        refuse(f"{name}: ", wrong, "expected action_weight within 0 .. 1, got {}", weights)
