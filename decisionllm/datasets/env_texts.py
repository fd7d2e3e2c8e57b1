"""The task text of an episode from an environment, the option `task_from`: from the info of its
reset, or from a part of its observations that is a text; and from the records of both in Minari.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Values = dict[str, Any]  # by path: info.KEY, nested keys joined by dots, and observation.NAME
ROOTS = ("info", "observation")


def choose_task_from(group: str, task_from: str, text: str, parts: Sequence[str]) -> str:
    """Return the path of the text of an episode, `info.KEY` or `observation.NAME`; empty: none.

    Args:
        group: of the options, `env` or `dataset`, for messages.
        task_from: the option.
        text: the option `text`; `episode` reads the one part of an observation that is a text,
            `none` no text.
        parts: names of the parts of an observation that are texts.

    Raises:
        ValueError: the options do not name one source of texts.
    """
    if text == "none":
        return ""
    named = [f"observation.{part}" for part in parts]
    root, _, key = task_from.partition(".")
    if task_from and (root not in ROOTS or not key):
        raise ValueError(
            f"{group}.task_from: expected info.KEY, a key of the info, or observation.NAME, a part of "
            f"the observation, got {task_from!r}"
        )
    if task_from and text not in ("auto", "episode"):
        raise ValueError(
            f"{group}.task_from: expected text=auto, episode or none beside {task_from}, got "
            f"text={text}, which has texts of its own; leave one of the two out"
        )
    if root == "observation" and task_from not in named:
        raise ValueError(
            f"{group}.task_from: expected a part of the observation that is a text, "
            f"{', '.join(named) or 'of which there is none'}, got {task_from}"
        )
    if text == "episode" and not task_from:
        if len(named) == 1:
            return named[0]
        raise ValueError(
            f"{group}.text: expected {group}.task_from with text=episode, got none; it is one of "
            f"{', '.join(named) or 'info.KEY'}, where the text of an episode stands"
        )
    return task_from


def values_by_path(info: Mapping[str, Any], texts: Mapping[str, Any]) -> Values:
    """Return the values of infos and texts of observations by path.

    Args:
        info: of a reset or a step, or of an episode with the values of all steps.
        texts: the parts of an observation that are texts, see `space_parts.text_values`.
    """
    return _flatten_mapping("info", info) | {
        f"observation.{name}": text for name, text in texts.items()
    }


def _flatten_mapping(path: str, mapping: Mapping[str, Any]) -> Values:
    """Return the values of nested mappings by path, keys joined by dots."""
    values: Values = {}
    for key, value in mapping.items():
        inner = f"{path}.{key}"
        values |= _flatten_mapping(inner, value) if isinstance(value, Mapping) else {inner: value}
    return values


def find_texts(values: Values) -> dict[str, str]:
    """Return the values that are texts, by path."""
    texts = {path: to_text(value) for path, value in values.items()}
    return {path: text for path, text in texts.items() if text is not None}


def to_text(value: Any) -> str | None:
    """Return a text as str, bytes read as UTF-8; of a column of equal texts the text; else None."""
    value = to_list(value)
    if isinstance(value, list | tuple) and len(value) and all(v == value[0] for v in value):
        value = value[0]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if isinstance(value, str) else None


def to_list(value: Any) -> Any:
    """Return an array that may hold texts as a list, any other value as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        return value.reshape(-1).tolist()
    return value


def get_task_text(values: Values, task_from: str, option: str = "env.task_from") -> str:
    """Return the task text at a path.

    Args:
        values: of a reset, or of an episode.
        task_from: the path, see `choose_task_from`.
        option: for messages.

    Raises:
        ValueError: there is no such path, or the value is no text, or the text changes.
    """
    if task_from not in values:
        paths = ", ".join(values) or "nothing"
        raise ValueError(f"{option}: expected {task_from}, got {paths}; name one that holds a text")
    text = to_text(values[task_from])
    if text is None:
        raise ValueError(
            f"{option}: expected one text for each episode as {task_from}, got "
            f"{describe_no_text(values[task_from])}"
        )
    return text


def describe_no_text(value: Any) -> str:
    """Describe a value that is not one text, and the fix, for a message."""
    column = to_list(value)
    if isinstance(column, list | tuple):
        for step, text in enumerate(column):
            if to_text(text) is not None and text != column[0]:
                return (
                    f"{column[0]!r} and, after step {step}, {text!r}; end the episode where its text "
                    "changes, or name another one"
                )
    return f"{reprlib.repr(value)}; name one that holds a text, the same throughout an episode"
