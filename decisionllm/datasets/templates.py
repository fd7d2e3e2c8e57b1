"""Task texts that name parts of an episode's first observation: "Go to {desired_goal}." """

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from decisionllm.datasets.spaces import VECTOR

# values of the option `text` of Minari data and Gymnasium environments
TEXTS = (
    "none",
    "constant",
    "template",
    "episode",  # its own text, from where `task_from` says
)
NAME = re.compile(r"\{([^{}]*)\}")  # str.format would read the dot of a nested name as an attribute


def writer(
    option: str,
    template: str,
    parts: Sequence[tuple[str, int]],
    *,
    texts: Sequence[str] = (),
    hint: str = "",
) -> Callable[[np.ndarray, Mapping[str, str]], str]:
    """The function that writes the task text of an episode.

    Args:
        option: that holds the template, such as `dataset.task`, to begin a message with.
        template: the text; `{NAME}` stands for the numbers of that part, rounded to two decimals.
        parts: (name, numbers) of the parts of an observation, in the order of its columns.
        texts: names of its parts that are texts.
        hint: what a message says of an unknown name beside the names that there are.

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
        if hint:
            message += f"; {hint}"
        elif names == [VECTOR]:
            message += "; the observation is one vector without named parts"
        raise ValueError(message)

    def write(row: np.ndarray, values: Mapping[str, str]) -> str:
        def fill(match: re.Match[str]) -> str:
            name = match[1]
            return values[name] if name in texts else _in_words(row[columns[name]])

        return NAME.sub(fill, template)

    return write


def _in_words(numbers: np.ndarray) -> str:
    """Numbers, rounded to two decimals: "1.25, -0.5, 3"."""
    rounded = [round(float(number), 2) + 0.0 for number in numbers]  # + 0.0: no negative zero
    return ", ".join(f"{number:.2f}".rstrip("0").rstrip(".") for number in rounded)
