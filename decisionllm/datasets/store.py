"""Datasets on disk: flat arrays that are memory-mapped, episode offsets, and a card.

A store is a folder: one .npy file per field with the rows of all episodes end to end, and card.json
with the spec (sizes, action space, horizon), the distinct task texts, the origin, and a fingerprint
of every byte.

The store holds one canonical text for each distinct task and, in its card, the facts that all texts
of this task are made of (a goal's cell, a campaign's budget). The texts that the option `text` asks
for are made from them when the store is opened, see `dataset_reader`.

The fingerprint covers the data and the texts that are read: two runs with one fingerprint read the
same bytes.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from decisionllm.datasets import autoreset
from decisionllm.datasets.row_blocks import Columns
from decisionllm.files import explain_errors
from decisionllm.registry import Node
from decisionllm.schema import EPISODE_FIELDS, STEP_FIELDS, Episode, Json, Spec, StepColumns

FORMAT = 1
CARD_KEYS = ("format", "spec", "tasks", "info", "fingerprint", "arrays")
REBUILD = "delete the folder to make it again"  # the fix in messages


@dataclass(frozen=True, kw_only=True)
class Store(StepColumns[np.ndarray]):
    """An open store of n steps in E episodes; every array is a view of a file, in raw units."""

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

    @property
    def is_mixture(self) -> bool:
        return "parts" in self.info

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """The episodes of each part of a mixture, {label: (e,) int}; all episodes by the name of the
        dataset where it is no mixture.
        """
        part = np.zeros(len(self.lengths)) if self.part is None else self.part
        return {label: np.flatnonzero(part == i) for i, label in enumerate(self.part_infos)}

    @cached_property
    def part_infos(self) -> dict[str, Json]:
        """The info of each part of a mixture by label, or of the dataset by its name."""
        if not self.is_mixture:
            return {self.info.get("name", "dataset"): self.info}
        return {label: part["dataset"] for label, part in self.info["parts"].items()}

    def find_episodes(self, rows: np.ndarray) -> np.ndarray:
        """Return the episode that each row is a step of, in the shape of `rows`."""
        return np.searchsorted(self.offsets, rows, side="right") - 1

    def list_rows(self, episodes: np.ndarray) -> np.ndarray:
        """Return the rows (n,) of these episodes, one episode after the other."""
        return np.concatenate([np.arange(*self.offsets[e : e + 2]) for e in episodes])

    @cached_property
    def has_final(self) -> np.ndarray:
        """(E,) bool: the log has the final observation of the episode. The first observation after
        a reset does not count.
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
    def has_next_observation(self) -> np.ndarray:
        """(n,) bool: the log has the observation after the step."""
        has_next = np.ones(len(self.rewards), bool)
        has_next[self.offsets[1:] - 1] = self.has_final
        return has_next

    def next_observations(self, rows: np.ndarray) -> np.ndarray:
        """Return the observations after these rows, (m,) -> (m, S). After the last step of an episode
        it is the final observation, or the last one again where the log has none.
        """
        after, is_last = next_rows(rows, self.offsets[1:])
        observations: np.ndarray = self.observations[after]
        if self.final_observation is not None:
            episodes = self.find_episodes(rows[is_last])
            has_final = self.has_final[episodes]
            places = np.flatnonzero(is_last)[has_final]
            observations[places] = self.final_observation[episodes[has_final]]
        return observations

    def episode(self, e: int) -> Episode:
        """Return episode e; its arrays are views of the files."""
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


def next_rows(rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the next row of each of these rows within its episode.

    Args:
        rows: (m,).
        ends: (E,) the row after each episode.

    Returns:
        (m,) next rows, where the last row of an episode is its own next one; (m,) bool, the last
        rows.
    """
    is_last = np.isin(rows + 1, ends)
    return np.where(is_last, rows, rows + 1), is_last


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
    with explain_errors(f"{path}/card.json is damaged", ValueError, fix=REBUILD):
        card = json.loads((path / "card.json").read_text(encoding="utf-8"))
        if not isinstance(card, dict):
            raise ValueError(f"expected {{KEY: VALUE}}, got {card!r}")
        missing = [key for key in CARD_KEYS if key not in card]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    if card.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected store format {FORMAT}, got {card.get('format')}; {REBUILD}"
        )
    arrays: Columns = {}
    for name, (dtype, shape) in card["arrays"].items():
        with explain_errors(
            f"{path}/{name}.npy is damaged or missing",
            ValueError,
            OSError,
            EOFError,
            fix=REBUILD,
        ):
            array = np.asarray(np.load(path / f"{name}.npy", mmap_mode="r"))
        if [str(array.dtype), list(array.shape)] != [dtype, shape]:
            raise ValueError(
                f"{path}/{name}.npy: expected {dtype} {shape}, got {array.dtype} "
                f"{list(array.shape)}; {REBUILD}"
            )
        arrays[name] = array
    return Store(
        path=path,
        spec=Spec.of(card["spec"]),
        tasks=tuple(card["tasks"]),
        info=card["info"],
        facts=card.get("facts", {}),
        fingerprint=card["fingerprint"],
        **arrays,
    )


def read_and_verify(store: Store, size: int) -> Iterator[tuple[slice, slice]]:
    """Read every byte of a store and compare its fingerprint.

    Yields:
        (episodes, rows) of blocks of about `size` rows, whose observations have just been read.

    Raises:
        ValueError: its content is not what was written.
    """
    digest = hashlib.blake2b(digest_size=16)
    spec = asdict(store.spec)
    yield from _hash_blocks(
        digest, spec, list(store.tasks), get_columns(store), iterate_blocks(store, size)
    )
    fingerprint = digest.hexdigest()
    if fingerprint != store.fingerprint:
        raise ValueError(
            f"{store.path} is damaged: expected fingerprint {store.fingerprint}, got {fingerprint}; "
            f"{REBUILD}"
        )


def iterate_blocks(store: Store, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (episodes, rows) of blocks of whole episodes, about `size` rows each."""
    cuts = np.searchsorted(store.offsets[1:], np.arange(size, store.offsets[-1], size))
    for a, b in pairwise(np.unique([0, *cuts, len(store.lengths)]).tolist()):
        yield slice(a, b), slice(*store.offsets[[a, b]].tolist())


def get_columns(store: Store) -> Columns:
    """Return the arrays of a store by name."""
    columns: Columns = {}
    for name, array in vars(store).items():
        if name in (*STEP_FIELDS, *EPISODE_FIELDS, "offsets") and array is not None:
            columns[name] = array
    return columns


def hash_store(spec: Json, tasks: list[str], arrays: Columns) -> str:
    """Return the fingerprint of the spec, the texts and every byte of the arrays."""
    digest = hashlib.blake2b(digest_size=16)
    whole = [(slice(0), slice(None))]
    for _ in _hash_blocks(digest, spec, tasks, arrays, whole):
        pass
    return digest.hexdigest()


def _hash_blocks(
    digest: hashlib.blake2b,
    spec: Json,
    tasks: list[str],
    arrays: Columns,
    parts: Iterable[tuple[slice, slice]],
) -> Iterator[tuple[slice, slice]]:
    """Update a hash with all of a store, and yield the parts (episodes, rows) of its observations as
    they are read.
    """
    # empty values of later fields are left out, so that the fingerprints of older stores stay
    later = ("entity_schema", "categorical")
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


def check_texts(text: str, stores: Collection[Store], dataset: Node) -> None:
    """Raise a ValueError if a run asks for task texts that its data do not follow.

    Args:
        text: the option of the run. `episode` asks for the texts that the data have, `none` for no
            texts, `auto` for nothing.
        stores: of the run.
        dataset: the config node of the data.
    """
    if text == "auto":
        return
    if text == "none":
        if "text" not in dataset and has_texts(stores):
            raise ValueError(
                f"text=none: expected a dataset with the option `text`, got {dataset['_target_']}, "
                "whose episodes have their own texts; let it leave them out, or give text=auto"
            )
        return
    if not has_texts(stores):
        raise ValueError(
            f"text={text}: expected episodes with a task text, got none; give text=none, or data "
            "whose episodes have a text (Episode.task)"
        )
    if text == "episode":
        return
    # a mixture has the option for its parts
    takes_text = "text" in dataset and not any(store.is_mixture for store in stores)
    texts_of_parts = set()
    for store in stores:
        texts_of_parts |= {info.get("text") for info in store.part_infos.values()}
    if not takes_text and text not in texts_of_parts:
        raise ValueError(
            f"text={text}: expected a dataset with the option `text`, got "
            f"{dataset['_target_']}, whose episodes have their own texts; give text=episode"
        )


def find_text_option(info: Json, *, has_texts: bool) -> str:
    """Return the option `text` that data were read with: `episode` for texts of their own.

    info: of the dataset; those of a store made by a user do not say it.
    """
    return str(info.get("text") or ("episode" if has_texts else "none"))


def has_texts(stores: Iterable[Store]) -> bool:
    """Return whether an episode of these stores has a task text."""
    return any(any(store.tasks) for store in stores)


def replace_task_texts(
    store: Store, text: str, texts: Sequence[str], wordings: Json | None = None
) -> Store:
    """Return a store with other task texts.

    Args:
        store: with canonical texts.
        text: the option `text`.
        texts: (E,) of each episode.
        wordings: {text: facts} of the texts that are paraphrased, kept as `info["wordings"]`; None:
            of all with text=paraphrased, else of none.
    """
    info = {key: value for key, value in store.info.items() if key != "wordings"} | {"text": text}
    if wordings is None and text == "paraphrased":
        wordings = dict(zip(texts, episode_facts(store), strict=True))
    if wordings:
        info["wordings"] = wordings
    number: dict[str, int] = {}
    task = np.array([number.setdefault(each, len(number)) for each in texts], store.task.dtype)
    return replace(store, tasks=tuple(number), task=task, info=info)


def episode_facts(store: Store) -> list[Json]:
    """Return the facts of each episode of a store with canonical texts, (E,); {} without facts."""
    facts_by_task = [store.facts.get(task, {}) for task in store.tasks]
    return [facts_by_task[i] for i in store.task.tolist()]
