"""The option `parts` of `mixture` and `embodiments`.

Parts are a list, or {label: part}; the label names the part on the command line. A part is the name
of a registered dataset, or its options as a dict: `{dataset: maze2d-umaze, noise: 0.2}`. The dict
may have further keys:

- `env`: options of the environment that `evaluate` takes for the part: the dataset's own, or the
  one that it names, `{env: pettingzoo, ...}`. By default it has the `text` of the dataset.
- `weight`: how often the part is drawn, by default 1.
- `augment`, `step_discount`: in place of those of the run.
- `head`, `tokenizer`, `window`: of an embodiment, in place of those of the run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from decisionllm.config import to_plain_dicts
from decisionllm.registry import Node, choice, discover, no_choice
from decisionllm.schema import Json

PartOption = str | Json  # a part as a user writes it: the name of a dataset, or its options
PartsOption = Sequence[PartOption] | Mapping[str, PartOption]
ONLY = "data"  # the embodiment of a dataset of one space


@dataclass(frozen=True, kw_only=True)
class Part:
    """A dataset among several, with its options in place of the run's; None: those of the run."""

    dataset: Node
    env: Node | None = None
    head: Node | None = None
    tokenizer: Node | None = None
    augment: Node | None = None
    step_discount: float | None = None
    window: int | None = None
    weight: float | None = None

    def card(self, info: Json) -> Json:
        """Return the part as the info of a mixture holds it. info: of its dataset."""
        options = {name: value for name, value in vars(self).items() if value is not None}
        return options | {"dataset": info}


def parse_parts(
    parts: PartsOption, options: Json | None = None, text: str = "auto", text_wordings: int = 0
) -> dict[str, Part]:
    """Return the parts by label.

    Args:
        parts: see above.
        options: of all parts, unless a part has its own.
        text, text_wordings: of all parts, unless a part has its own.

    Raises:
        ValueError: no part, two of one label, or a name or option that does not exist.
    """
    parts_by_label = {}
    for label, part in _label_parts(parts):
        parts_by_label[label] = _parse_part(label, part, options or {}, text, text_wordings)
    return parts_by_label


def _label_parts(parts: PartsOption) -> list[tuple[str, PartOption]]:
    """Return (label, part) of each part; the label is the name of its dataset by default."""
    if not parts or not isinstance(parts, list | tuple | dict):
        raise ValueError(
            "dataset.parts: expected names of datasets, such as [maze2d-umaze,maze2d-medium], got "
            f"{parts!r}"
        )
    labelled: list[tuple[Any, Any]] = []
    if isinstance(parts, dict):
        labelled += parts.items()
    else:
        for part in parts:
            label = part.get("dataset") if isinstance(part, dict) else part
            labelled.append((label, part))
    for _, part in labelled:
        if not isinstance(part, str | dict):
            raise ValueError(
                "dataset.parts: expected each part as a name or as {dataset: name, ...}, got "
                f"{part!r}"
            )
    labels = [label for label, _ in labelled]
    are_usable = all(isinstance(label, str) and "." not in label for label in labels)
    if not are_usable or ONLY in labels or len(set(labels)) < len(labels):
        raise ValueError(
            f"dataset.parts: expected a label of its own for each, without a dot and not {ONLY}, as "
            f"{{label: {{dataset: name}}}}, got {parts!r}"
        )
    return labelled


def _parse_part(
    label: str, option: PartOption, options: Json, text: str, text_wordings: int
) -> Part:
    """Return one part, see `parse_parts`; its nodes may refer to its dataset or to the texts."""
    own: Json = {"dataset": option} if isinstance(option, str) else option
    _check_part(f"dataset.parts: {label}", own)
    name = own.get("dataset", label)
    keys_of_part = [field.name for field in fields(Part)]
    dataset = {key: value for key, value in own.items() if key not in keys_of_part}
    if "_target_" not in dataset:
        dataset = choice("dataset", name, **{**options, **dataset})
    nodes: Node = {"dataset": dataset, "env": _resolve_env(name, own.get("env", {}))}
    if own.get("head"):
        nodes["head"] = _resolve_choice("head", own["head"])
    if own.get("tokenizer"):
        nodes["tokenizer"] = own["tokenizer"]
    resolved = to_plain_dicts(_text_options(dataset, text, text_wordings) | nodes)
    draws: Json = {key: own.get(key) for key in ("step_discount", "window", "weight")}
    if "augment" in own:
        draws["augment"] = _resolve_choice("augment", own["augment"])
    return Part(**{key: resolved[key] for key in nodes}, **draws)


def _resolve_env(dataset: str, options: Node) -> Node:
    """Return the config node of the environment of a part: the one that the option `env` names, or
    the one with the name of the dataset.
    """
    own = {key: value for key, value in options.items() if key != "env"}
    if "env" in options:
        return choice("env", options["env"]) | own
    return discover()["env"].get(dataset, no_choice()) | own


def _resolve_choice(group: str, choice_or_node: str | Node) -> Node:
    """Return the config node of a choice by its name; a node stays as it is."""
    if not isinstance(choice_or_node, str):
        return choice_or_node
    if choice_or_node == "none":
        return no_choice()
    return choice(group, choice_or_node)


def _check_part(name: str, own: Node) -> None:
    """Raise a ValueError for an option of a part that cannot be, but for those of its dataset.

    Args:
        name: of the part, to begin a message with.
        own: its options.
    """
    for key in ("env", "tokenizer"):
        value = own.get(key, {})
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected {key} as {{OPTION: VALUE}}, got {value!r}")
    window = own.get("window", 1)
    discount = own.get("step_discount", 1.0)
    weight = own.get("weight", 1.0)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"{name}: expected a window of 1 or more steps, got {window!r}")
    if not isinstance(discount, int | float) or not 0 < discount <= 1:
        raise ValueError(f"{name}: expected step_discount above 0 and at most 1, got {discount!r}")
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"{name}: expected a finite weight of 0 or more, got {weight!r}")


def _text_options(dataset: Node, text: str, text_wordings: int) -> Node:
    """Return the options `text` and `text_wordings` of the env of a part: those of its dataset, or
    else of the run.
    """
    options: Node = {"text": text, "text_wordings": text_wordings}
    for key in options:
        reference = f"${{{key}}}"
        if dataset.get(key, reference) != reference:
            options[key] = dataset[key]
    return options
