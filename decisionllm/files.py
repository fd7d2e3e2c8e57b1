"""Writing files and folders all or nothing, digests that show damage, errors that say what to do,
and the folder of what is made once.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import uuid4


def cache_dir() -> Path:
    """$DECISIONLLM_HOME, or ~/.cache/decisionllm: the default of the option cache_dir, and where
    backbones are kept.
    """
    return Path(os.environ.get("DECISIONLLM_HOME", "~/.cache/decisionllm")).expanduser()


# how a function is applied to each file of a dataset
MAP_FILES: ContextVar[Callable[..., Any]] = ContextVar("each", default=map)
AGAIN = "fetch it again"  # the fix for a damaged file that came from elsewhere
DIGESTS = "checksums.json"  # {name: digest} of the files of a folder
PARTIAL = ".partial-"  # begins the name of what `atomic` has not finished
MAKE_AGAIN = "delete the folder, it is made again"  # the fix for a damaged folder of the cache
AT_ONCE = 1 << 20  # bytes of a file that are read at a time


@contextmanager
def explain_errors(
    what: str, *errors: type[Exception], fix: str = "", raised: type[Exception] = ValueError
) -> Iterator[None]:
    """Raise another error in place of one of these in the block: what is wrong, the error itself,
    the fix.
    """
    try:
        yield
    except errors as error:
        raise raised(f"{what} ({error})" + f"; {fix}" * bool(fix)) from error


def check_writable(folder: Path, *names: str, option: str = "out=...") -> None:
    """Raise an OSError unless files can be written in a folder: before work whose results go there.

    A file is really written, in a folder of its own beside the results, and removed again: modes
    and access lists do not tell of a read-only or full disk. A missing folder is not made.

    Args:
        folder: of the results.
        names: of the files that are written or appended to, if they are there already.
        option: that names the folder, for the message.
    """
    fix = f"make room or get the right to write there, or choose another {option}"
    failed = f"{folder}: could not be written"
    with explain_errors(failed, OSError, fix=fix, raised=OSError):
        made = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=existing_parent(folder)))
        try:
            (made / "written").write_bytes(b"written")
        finally:
            shutil.rmtree(made, ignore_errors=True)
        for name in names:
            if (folder / name).exists():
                (folder / name).open("ab").close()


def existing_parent(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists.

    Raises:
        OSError: one of the folders cannot be looked at, or is a file.
    """
    folder = Path(os.path.abspath(folder))
    try:
        folder.stat()
    except FileNotFoundError:
        if folder.is_symlink():  # that leads nowhere
            raise
        return existing_parent(folder.parent)
    return folder


def new_path(path: str | Path) -> Path:
    """Return the path of a new file or folder, `~` expanded; a FileExistsError if it exists."""
    path = Path(path).expanduser()
    if path.exists():
        raise FileExistsError(f"{path}: is there already; move it away, or choose another path")
    return path


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Write a file or a folder all or nothing: a reader finds the whole old content or the whole
    new one, never a part.

    The block writes to the path it is given, in the same parent folder (made where it is missing)
    and with the same suffix, as a file or as a folder that it makes itself. At the end of the block
    the partial path is renamed to `path`; after an exception it is removed and `path` stays as it
    was. Refuse to overwrite before the block, where that is wanted: see `absent`. A file is
    replaced in one step. A folder is first renamed to `<name>.old`, which is all that is there if
    the process is killed between the two renames.

        with atomic("runs/x/run.json") as partial:
            partial.write_text(json.dumps(info))

        with atomic("data/store") as partial:
            partial.mkdir()
            np.save(partial / "rewards.npy", rewards)

    Args:
        path: the file or folder to write; `~` is not expanded.

    Yields:
        The partial path. It does not exist yet, its name is hidden and unique, so that several
        processes may write the same path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{PARTIAL}{uuid4().hex[:12]}-{path.name}")
    try:
        yield partial
        if partial.is_dir():
            _replace_folder(path, partial)
        else:
            partial.replace(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


def _replace_folder(path: Path, new: Path) -> None:
    """Put a folder in the place of another one, which a rename does not do."""
    old = path.with_name(f"{path.name}.old")
    while new.is_dir():
        try:
            if path.is_dir():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            new.rename(path)
        except OSError as error:
            raced = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
            if not raced or not new.is_dir():
                raise  # else another process has replaced it in between: try again
    shutil.rmtree(old, ignore_errors=True)


def cached_digest(name: str, compute: Callable[[], str]) -> str:
    """Return the digest that an earlier call put into the cache folder for what has this name, or
    compute and keep it.
    """
    record = cache_dir() / "digests" / hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    if record.is_file():
        return record.read_text(encoding="ascii")
    digest = compute()
    with atomic(record) as partial:
        partial.write_text(digest, encoding="ascii")
    return digest


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Write a folder all or nothing, as `atomic` does, with digests of all its files.

    Yields:
        The partial folder, empty.
    """
    with atomic(path) as partial:
        partial.mkdir()
        yield partial
        seal(partial)


def seal(folder: Path, *names: str) -> None:
    """Write the digests of files of a folder into its checksums.json.

    The digests show damage: flipped bytes, a file cut short, a file of another folder. They do not
    protect from an attacker, who can write digests too.

    Args:
        folder: of the files.
        names: of the files in it; none: all files in it and below it.
    """
    sealed_names = list(names)
    if not names:
        below = [file for file in folder.rglob("*") if file.is_file()]
        sealed_names = sorted(file.relative_to(folder).as_posix() for file in below)
        if DIGESTS in sealed_names:
            sealed_names.remove(DIGESTS)
    write_json(folder / DIGESTS, {name: _digest_file(folder / name) for name in sealed_names})


def check_bytes(folder: Path, name: str) -> None:
    """Compare a file of a folder with its digest. A folder without checksums.json, as versions
    before wrote it, is not checked.

    Raises:
        ValueError: its bytes are not those that were written, or checksums.json does not name
            it.
        OSError: it cannot be read.
    """
    digests = _read_digests(folder)
    if digests is None:
        return
    if name not in digests:
        raise ValueError(
            f"{folder / DIGESTS} is damaged or of another folder: it has no digest of {name}"
        )
    got = _digest_file(folder / name)
    if got != digests[name]:
        raise ValueError(
            f"its bytes are not those that were written: expected {digests[name]}, got {got}"
        )


def check_all(folder: Path, *, fix: str = "") -> None:
    """Compare all files that the checksums.json of a folder names with their digests, see
    `check_bytes`.

    Args:
        folder: of the files.
        fix: what to do if one is damaged. By default: restore a copy, or delete the digests.

    Raises:
        ValueError: a file is not as it was written, or missing; with what to do.
    """
    fix = fix or f"restore a copy; {explain_own_change(folder)}"
    with explain_errors(f"{folder} is damaged", ValueError, fix=fix):
        names = list(_read_digests(folder) or {})
    for name in names:
        with explain_errors(f"{folder / name} is damaged or missing", ValueError, OSError, fix=fix):
            check_bytes(folder, name)


def explain_own_change(folder: Path) -> str:
    """Return what to do where a file of a folder was changed on purpose."""
    return f"if you changed it yourself, delete {folder / DIGESTS}"


def _read_digests(folder: Path) -> dict[str, str] | None:
    """Return the content of a folder's checksums.json; None without one. A ValueError if it is
    damaged.
    """
    file = folder / DIGESTS
    if not file.is_file():
        return None
    with explain_errors(f"{file} is damaged", ValueError):
        digests = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(digests, dict):
            raise ValueError(f"expected digests by name, got {digests}")
    return digests


def _digest_file(path: Path) -> str:
    """Return the size of a file, and the CRC-32 of its bytes."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(AT_ONCE):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return f"{size} bytes, CRC-32 {crc:08x}"


def safe_name(text: str) -> str:
    """Return a text as part of a file name, with - for each run of other letters than \\w.+-."""
    return re.sub(r"[^\w.+-]+", "-", text)


def write_json(path: str | Path, value: object) -> None:
    """Write a JSON value as a file, all or nothing."""
    with atomic(path) as partial:
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the values of a JSON lines file, without a last line that was cut short; a ValueError for
    other damage.
    """
    values = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if _is_cut_short(line):
                break
            damaged = f"{path}: line {number} is damaged"
            with explain_errors(damaged, ValueError, fix="delete the line, or restore a copy"):
                value = json.loads(line.decode("utf-8-sig"))
                if not isinstance(value, dict):
                    raise ValueError(f"expected {{KEY: VALUE}}, got {value!r}")
            values.append(value)
    return values


def write_lines(path: Path, values: Iterable[object]) -> None:
    """Write JSON values as a JSON lines file, all or nothing."""
    with atomic(path) as partial:
        partial.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def append_line(path: Path, value: object) -> None:
    """Append a JSON value to a JSON lines file. A last line that was cut short is removed."""
    if path.is_file() and _last_byte(path) not in (b"", b"\n"):
        write_lines(path, read_lines(path))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def _last_byte(path: Path) -> bytes:
    """Return the last byte of a file; empty if it has none."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return file.read()


def _is_cut_short(line: bytes) -> bool:
    """Return whether a writer was killed within this line: only the last one of a file can be."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line.decode("utf-8-sig"))
    except ValueError:
        return True
    return False
