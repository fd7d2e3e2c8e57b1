"""Stores of datasets by their config: written on first use, found again by a hash of their options."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout

from decisionllm.datasets.dataset_reader import (
    data_node,
    get_reader,
    list_files,
    reader_options,
    set_task_texts,
)
from decisionllm.datasets.store import FORMAT, Store, get_columns, hash_store, open_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.protocols import Source
from decisionllm.registry import (
    Node,
    build,
    has_option,
    has_return_type,
    is_none,
    no_choice,
)

NO_TRANSFORM = no_choice()


def prepare_store(dataset: Node, cache_dir: str | Path, transform: Node = NO_TRANSFORM) -> Store:
    """Open the store of a dataset as a transform changes it, with the texts of the dataset's option
    `text`; write it on first use.

    Args:
        dataset: a config node, see `registry.choice`.
        cache_dir: stores are in cache_dir/stores. A second process that prepares the same store
            waits for the first one.
        transform: a config node; what it names takes a Store and returns a Source. Its store is
            kept beside that of the dataset itself, and made again where the version of its reader
            has changed.

    Raises:
        ValueError: an option cannot be.
    """
    store = _open_canonical_store(dataset, cache_dir)
    if not is_none(transform):
        source = build(dict(transform), store)
        version = get_reader(transform).version
        key = _hash_json([version, store.fingerprint, source.info, dict(transform)])
        name = f"{_folder_prefix(transform)}-{key}"
        path = Path(cache_dir).expanduser() / "stores" / name
        store = _write_once(path, lambda: source, transform["_target_"])
    with_texts = set_task_texts(store, dataset)
    if with_texts.tasks == store.tasks and np.array_equal(with_texts.task, store.task):
        return with_texts
    spec = asdict(with_texts.spec)
    fingerprint = hash_store(spec, list(with_texts.tasks), get_columns(with_texts))
    return replace(with_texts, fingerprint=fingerprint)


def _open_canonical_store(dataset: Node, cache_dir: str | Path) -> Store:
    """Open the store of a dataset with canonical texts, or write it.

    The name of its folder is a hash of the options of its data, of the sizes and times of the files
    that its reader reads, so that a new or replaced file is read, and of the reader's version, so
    that stores of an older reader are made again.
    """
    dataset = data_node(dataset)
    if has_return_type(dataset["_target_"], Store):  # a store that exists: nothing is written
        return cast(Store, build(dataset))
    stamps: list[object] = []
    for file in list_files(dataset):
        stat = file.stat()
        stamps.append([str(file), stat.st_size, stat.st_mtime_ns])
    reader = get_reader(dataset)
    if reader.version:
        stamps.append(reader.version)
    if reader.input_datasets is not None:
        sources = reader.input_datasets(**reader_options(dataset))
        stamps.append([get_reader(node).version for node in sources])
    name = f"{_folder_prefix(dataset)}-{_hash_json([FORMAT, dataset, stamps])}"
    path = Path(cache_dir).expanduser() / "stores" / name
    if (path / "card.json").is_file():
        return open_store(path)
    if has_option(dataset["_target_"], "opened"):
        read = partial(build, dataset, partial(prepare_store, cache_dir=cache_dir))
    else:
        read = partial(build, dataset)
    return _write_once(path, read, dataset["_target_"])


def _write_once(path: Path, read: Callable[[], object], target: str) -> Store:
    """Open the store at cache_dir/stores/NAME. The first process that asks for it reads its source
    and writes it; the others wait.

    Args:
        path: of the store.
        read: reads its source, or opens another store, which is then returned. It may take long.
        target: what `read` calls, for errors.
    """
    locks = path.parents[1] / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with _wait_for_lock(locks / path.name):
        if (path / "card.json").is_file():  # made while this process waited
            return open_store(path)
        source = read()
        if isinstance(source, Store):
            return source
        if not isinstance(source, Source) or "name" not in source.info:
            got = f"info {source.info}" if isinstance(source, Source) else type(source).__name__
            raise ValueError(
                f"{target}: expected a decisionllm.protocols.Source(spec, episodes, "
                f'{{"name": ...}}) of a reader, got {got}'
            )
        # This process has the lock, so that a partial store is left of a process that was killed.
        for partial_store in path.parent.glob(f".partial-*-{path.name}"):
            shutil.rmtree(partial_store)
        return write_store(path, source)


def _wait_for_lock(file: Path) -> AcquireReturnProxy[FileLock]:
    """Return the acquired lock of a store, and say so where another process has it."""
    lock = FileLock(file)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process that reads {file.name}", file=sys.stderr, flush=True)
        return lock.acquire()


def _folder_prefix(node: Node) -> str:
    """Return the first word of a store's folder: `maze2d` for decisionllm.worlds.maze2d.dataset."""
    module = node["_target_"].rpartition(".")[0]
    return str(module.removesuffix(".dataset").rpartition(".")[2])


def _hash_json(content: object) -> str:
    """Return a short hash of JSON values, for the name of a folder."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=6).hexdigest()
