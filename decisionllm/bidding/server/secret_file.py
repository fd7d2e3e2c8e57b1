"""Permissions of a file of secrets, as ssh checks those of its own files. Windows has others."""

import os
import stat
from pathlib import Path

POSIX = os.name == "posix"


def check_writers(path: str | Path, status: os.stat_result) -> None:
    """Raise a ValueError if others than its owner may write a file, or everybody may put another
    one in its place.
    """
    if not POSIX:
        return
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"expected a file that its owner alone may write, got mode {octal(status)} of {path};"
            f" chmod 600 {path}"
        )
    # the folder of the file, and that of a link to it
    for folder in (os.path.dirname(os.path.realpath(path)), os.path.dirname(os.path.abspath(path))):
        folder_status = os.stat(folder)
        is_sticky = folder_status.st_mode & stat.S_ISVTX
        if folder_status.st_mode & stat.S_IWOTH and not is_sticky:
            raise ValueError(
                f"expected a file in a folder that not everybody may write, got mode"
                f" {octal(folder_status)} of {folder}; chmod o-w {folder}"
            )


def list_exposures(
    path: str | Path, status: os.stat_result, *, user: int, is_plain: bool
) -> list[str]:
    """Return what may expose a file of secrets or change it, each with what to do.

    Args:
        path: of the file.
        status: of the file.
        user: that the server runs as.
        is_plain: whether the file holds secrets themselves, not their digests alone.
    """
    exposures: list[str] = []
    if is_plain and status.st_mode & stat.S_IROTH:
        exposures.append(
            f"{path} holds tokens and has mode {octal(status)}: all users of this machine may read"
            f" them; chmod 600 {path}, or give their sha256"
        )
    is_foreign = status.st_uid not in (0, user)
    if is_foreign and not os.statvfs(path).f_flag & os.ST_RDONLY:
        exposures.append(
            f"{path} belongs to user {status.st_uid}, who may change it, and the server runs as"
            f" user {user}; chown {user} {path}"
        )
    return exposures


def octal(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
