"""The task text of an episode in the info of a Gymnasium environment, and in the infos that Minari
records of it: the option `task_from=info.KEY`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Info = Mapping[str, Any]  # of a reset or a step; of a Minari episode with the values of all steps


def check_task_from(group: str, task_from: str, text: str) -> None:
    """Raise a ValueError unless the options `task_from` and `text` name one source of texts.

    Args:
        group: of the options, `env` or `dataset`, for messages.
        task_from: `info.KEY`; empty: nothing is read.
        text: the option `text`.
    """
    if task_from and not task_from.startswith("info."):
        raise ValueError(
            f"{group}.task_from: expected info.KEY, a key of the info, got {task_from!r}"
        )
    if task_from and text not in ("none", "episode"):
        raise ValueError(
            f"{group}.task_from: expected text=episode or text=none beside {task_from}, got "
            f"text={text}, which has texts of its own; leave one of the two out"
        )
    if text == "episode" and not task_from:
        raise ValueError(
            f"{group}.text: expected {group}.task_from with text=episode, got none; give "
            f"{group}.task_from=info.KEY, the key of the info that holds the text of an episode"
        )


def find_texts(info: Info) -> dict[str, str]:
    """Return the texts of an info by path, `info.KEY`."""
    texts = {path: to_text(value_at(info, path)) for path in list_paths(info)}
    return {path: text for path, text in texts.items() if text is not None}


def list_paths(info: Info, prefix: str = "info") -> list[str]:
    """Return the paths of the values of an info, nested keys joined by dots."""
    paths = []
    for key, value in info.items():
        path = f"{prefix}.{key}"
        paths += list_paths(value, path) if isinstance(value, Mapping) else [path]
    return paths


def to_text(value: Any) -> str | None:
    """Return a text as str, bytes read as UTF-8; of a column of equal texts the text; else None."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        value = value.reshape(-1).tolist()
    if isinstance(value, list | tuple) and len(value) and all(each == value[0] for each in value):
        value = value[0]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if isinstance(value, str) else None


def value_at(info: Info, task_from: str) -> Any:
    """Return the value that an info holds where `task_from` says; None where there is none."""
    value: Any = {"info": info}
    for key in task_from.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def task_of(info: Info, task_from: str, option: str = "env.task_from") -> str:
    """Return the task text that an info holds.

    Args:
        info: of a reset, or of an episode.
        task_from: where, `info.KEY`.
        option: for messages.

    Raises:
        ValueError: it has no such key, or the value is no text, or the text changes.
    """
    value = value_at(info, task_from)
    text = to_text(value)
    if value is None:
        keys = ", ".join(list_paths(info)) or "nothing"
        raise ValueError(f"{option}: expected {task_from}, got {keys}; name one that holds a text")
    if text is None:
        raise ValueError(
            f"{option}: expected one text for each episode as {task_from}, got {value!r}; name a key "
            "that holds a text, the same throughout an episode"
        )
    return text
