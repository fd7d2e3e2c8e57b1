"""Writing files and folders all or nothing, errors that say what to do, and the folder of what is made once."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import uuid4


def cache_dir() -> Path:
    """$DECISIONLLM_HOME, or ~/.cache/decisionllm: the default of the option cache_dir, and where backbones are kept."""
    return Path(os.environ.get("DECISIONLLM_HOME", "~/.cache/decisionllm")).expanduser()


EACH: ContextVar[Callable[..., Any]] = ContextVar("each", default=map)  # how a function is applied to each file of a dataset
AGAIN = "fetch it again"  # the remedy for a damaged file that came from elsewhere


@contextmanager
def explained(what: str, *errors: type[Exception], remedy: str = "", raised: type[Exception] = ValueError) -> Iterator[None]:
    """Raise another error in place of one of these in the block: what is wrong, the error itself, the remedy."""
    try:
        yield
    except errors as error:
        raise raised(f"{what} ({error})" + f"; {remedy}" * bool(remedy)) from error


def absent(path: str | Path) -> Path:
    """The path of a file or folder to write, `~` expanded; a FileExistsError if there is one."""
    path = Path(path).expanduser()
    if path.exists():
        raise FileExistsError(f"{path}: is there already; move it away, or choose another path")
    return path


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Write a file or a folder all or nothing: a reader finds the whole old content or the whole new one, never a part.

    The block writes to the path it is given, in the same parent folder (made where it is missing) and with the same suffix, as a
    file or as a folder that it makes itself. At the end of the block the partial path is renamed to `path`; after an exception it
    is removed and `path` stays as it was. Refuse to overwrite before the block, where that is wanted: see `absent`. A file is replaced in one
    step. A folder is first renamed to `<name>.old`, which is all that is there if the process is killed between the two renames.

        with atomic("runs/x/run.json") as partial:
            partial.write_text(json.dumps(info))

        with atomic("data/store") as partial:
            partial.mkdir()
            np.save(partial / "rewards.npy", rewards)

    Args:
        path: the file or folder to write; `~` is not expanded.

    Yields:
        The partial path. It does not exist yet, its name is hidden and unique, so that several processes may write the same path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, old = path.with_name(f".partial-{uuid4().hex[:12]}-{path.name}"), path.with_name(f"{path.name}.old")
    try:
        yield partial
        if not partial.is_dir():
            partial.replace(path)
        while partial.is_dir():  # a rename does not replace a folder
            try:
                if path.is_dir():
                    shutil.rmtree(old, ignore_errors=True)
                    path.rename(old)
                partial.rename(path)
                shutil.rmtree(old, ignore_errors=True)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) or not partial.is_dir():
                    raise  # else another process has replaced it in between
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
