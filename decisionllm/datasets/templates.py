"""Task texts of the options `text` and `task`: one text for all episodes, or a template that names
parts of the first observation, such as "Go to {desired_goal}."
"""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.space_parts import VECTOR

# values of the option `text` of Minari data and Gymnasium environments
TEXTS = (
    "auto",  # its own text where `task_from` names one
    "none",
    "constant",
    "template",
    "episode",  # its own text, from where `task_from` says
)
WRITTEN = ("constant", "template")  # those that read the option `task`
NAME = re.compile(r"\{([^{}]*)\}")  # str.format would read the dot of a nested name as an attribute


def make_text_writer(
    option: str,
    template: str,
    parts: Sequence[tuple[str, int]],
    *,
    texts: Sequence[str] = (),
    suffix: str = "",
) -> Callable[[np.ndarray, Mapping[str, str]], str]:
    """Return a function that writes the task text of an episode.

    Args:
        option: that holds the template, such as `dataset.task`, to begin a message with.
        template: the text; `{NAME}` stands for the numbers of that part, rounded to two decimals.
        parts: (name, numbers) of the parts of an observation, in the order of its columns.
        texts: names of its parts that are texts.
        suffix: text behind the message about an unknown name.

    Returns:
        A function of the first observation (S,) and its texts by name: "Go to {goal}." gives "Go to
            1.25, -0.5.", and "{mission}!" the text of this part.

    Raises:
        ValueError: the template names a part that the observation does not have.
    """
    columns: dict[str, slice] = {}
    first = 0
    for name, size in parts:
        columns[name] = slice(first, first + size)
        first += size
    names = [*columns, *texts]
    unknown = [name for name in NAME.findall(template) if name not in names]
    if unknown:
        message = f"{option}: expected names of parts of the observation, [{', '.join(names)}]"
        message += f", got {', '.join(unknown)}"
        if suffix:
            message += f"; {suffix}"
        elif names == [VECTOR]:
            message += "; the observation is one vector without named parts"
        raise ValueError(message)

    def write(row: np.ndarray, values: Mapping[str, str]) -> str:
        def fill(match: re.Match[str]) -> str:
            name = match[1]
            return values[name] if name in texts else _format_numbers(row[columns[name]])

        return NAME.sub(fill, template)

    return write


def _format_numbers(numbers: np.ndarray) -> str:
    """Return numbers as text, rounded to two decimals: "1.25, -0.5, 3"."""
    rounded = [round(float(number), 2) + 0.0 for number in numbers]  # + 0.0: no negative zero
    return ", ".join(f"{number:.2f}".rstrip("0").rstrip(".") for number in rounded)


def fixed_task_text(
    group: str,
    text: str,
    task: str,
    choices: Sequence[str],
) -> str:
    """Return the task text of every episode, or its template; "" unless `text` is of `WRITTEN`.

    Args:
        group: of the options, for messages.
        text: the option `text`.
        task: the option `task`.
        choices: values of the option `text`.
    """
    check_one_of(f"{group}.text", text, choices)
    if text not in WRITTEN:
        return ""
    if not task:
        raise ValueError(f"{group}.task: text={text} needs a text, got none; give {group}.task=...")
    return task


def describe_unread_task(text: str, task: str) -> list[str]:
    """Return the fault of a task text that is given but not read; see `data_quality.list_faults`."""
    if not task or text in WRITTEN:
        return []
    return [f"the task text {task!r} is not read, since text={text}"]


def label_text(text: str, *, has_own: bool) -> str:
    """Return the option `text` for results: `episode` where the episodes' own texts are read, and
    `none` where text=auto reads none.
    """
    if has_own:
        return "episode"
    return "none" if text == "auto" else text
