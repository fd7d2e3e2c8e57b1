"""What a dataset reader tells the package beside its data: its version, its files, its texts.

Task texts are made when a store is opened, so that another wording of the texts needs no new store.
A reader has two functions for this, see `DatasetReader`: `data_options` and `set_texts`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from decisionllm.datasets.store import Store
from decisionllm.registry import Node, is_reference, resolve_text
from decisionllm.schema import Json


@dataclass(frozen=True, kw_only=True)
class DatasetReader:
    """The functions and the version of a dataset reader. Its module names it `READER`; each function
    takes the options of the reader.

    A reader is a function that returns a `Source`. It has a row in a table
    of choices; its keyword-only parameters become `dataset.*` options. One with a first parameter `opened` is
    given a function that opens the store of another dataset by its config node.

    Attributes:
        version: raise it when the reader makes other data of the same options, so that its stores
            are made again.
        files: (**options) -> the files that are read. A store is made again when one of them
            changes.
        input_datasets: (**options) -> the config nodes of the other datasets that are read. A store is
            made again when the version of one of their readers changes.
        data_options: (**options) -> the options that the data depend on: those given, with the
            canonical `text`. If `text` changes more than texts, the options keep the difference: a
            goal in the text of a Maze2D log also decides its rewards. None: all options.
        set_texts: (store, **options) -> the store with the texts that the option `text` asks for, see
            `store.replace_task_texts`. None: its texts are data.
    """

    version: int | None = None
    files: Callable[..., list[Path]] | None = None
    input_datasets: Callable[..., list[Node]] | None = None
    data_options: Callable[..., Json] | None = None
    set_texts: Callable[..., Store] | None = None


def get_reader(node: Node) -> DatasetReader:
    """Return the `READER` of the module that a config node names, of a dataset or a transform.

    A module without one reads nothing but its options.

    Raises:
        ValueError: the module has functions that a `READER` would name, and no `READER`.
    """
    module = node["_target_"].rpartition(".")[0]
    names = vars(import_module(module))
    if "READER" in names:
        reader: DatasetReader = names["READER"]
        return reader
    unused = [name for name in ("VERSION", "files", "data_options", "set_texts") if name in names]
    if unused:
        raise ValueError(
            f"{module}: expected READER = decisionllm.datasets.dataset_reader.DatasetReader("
            f"files=files, ...) at its end, got {', '.join(unused)} that nothing would call"
        )
    return DatasetReader()


def reader_options(dataset: Node) -> Json:
    """Return the options of a config node, without those that still refer to another option and so
    have their default; text=auto is resolved.
    """
    options: Json = {}
    for key, value in resolve_text(dataset).items():
        if key != "_target_" and not is_reference(value):
            options[key] = value
    return options


def data_node(dataset: Node) -> Json:
    """Return the config node of the data of a dataset, with the canonical text where its reader has
    one.
    """
    data_options = get_reader(dataset).data_options
    if data_options is None:
        return resolve_text(dataset)
    return {"_target_": dataset["_target_"], **data_options(**reader_options(dataset))}


def list_files(dataset: Node) -> list[Path]:
    """Return the files that the reader of a dataset reads."""
    files = get_reader(dataset).files
    return [] if files is None else files(**reader_options(dataset))


def set_task_texts(store: Store, dataset: Node) -> Store:
    """Return a store with the texts that the option `text` of its dataset asks for; the fingerprint
    is still that of the canonical texts.
    """
    set_texts = get_reader(dataset).set_texts
    return store if set_texts is None else set_texts(store, **reader_options(dataset))
