"""Writes docs/options.md from the dataclasses of decisionllm/config.py and from the registered
choices: python -m docs.options
"""

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from decisionllm import config
from decisionllm.config import GROUPS
from decisionllm.eval.result_groups import nearest_choice
from decisionllm.option_docs import choice_meanings, format_value, training_meanings
from decisionllm.registry import Node, discover

INTRO = """# Options

<!-- written by `python -m docs.options` from decisionllm/config.py and docstrings; edit those -->

```sh
decisionllm train --help
decisionllm train --cfg job
```

`--help` lists the choices of a command and its options with their meanings, `--cfg job` prints the whole configuration, resolved. This page is written from the
code. [Training](train.md) explains the options in context."""
SECTIONS = {  # title, prefix, introduction
    config.TrainConfig: ("Run", "", "Everything that a training run depends on (`TrainConfig`)."),
    config.DataOptions: ("Data", "data.", "Which episodes of the dataset are trained on."),
    config.ModelOptions: ("Model", "model.", "What the model conditions on."),
    config.TeamOptions: ("Teams", "team.", "For agents whose episodes share a `group`."),
    config.OptimOptions: ("Optimiser", "optim.", "AdamW and its schedule."),
    config.LogOptions: ("Log", "log.", "Validation, checkpoints and trackers."),
    config.ActOptions: (
        "Acting",
        "act.",
        "How the trained policy acts. `evaluate` and `serve` take `act.stride` and `act.decode` too.",
    ),
}
CHOICES = """`dataset=NAME` chooses; `dataset.OPTION=` sets one of its options. `???` must be given; `${text}` takes the value of the option `text`. Several
defaults are those of several choices, in their order."""


def rows(options_class: type, prefix: str) -> list[tuple[str, str, str]]:
    """(option, default, meaning) of each field of a dataclass of options."""
    described = []
    for each in fields(options_class):
        option = f"{prefix}{each.name}"
        if is_dataclass(each.default_factory):
            continue
        default = "" if each.default is MISSING else format_value(each.default)
        if each.name in GROUPS and each.default_factory is not MISSING:
            name, _ = nearest_choice(each.name, each.default_factory())
            default = name
        elif each.default_factory is list:
            default = "[]"
        default = f"`{default}`" if default.strip('"') else ""
        described.append((f"`{option}`", default, training_meanings()[option]))
    return described


def cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(header: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(cell, line)) + " |" for line in lines),
    ]


def page() -> str:
    """The text of docs/options.md."""
    parts = [INTRO]
    for options_class, (title, prefix, intro) in SECTIONS.items():
        lines = table(("option", "default", "meaning"), rows(options_class, prefix))
        parts += ["", f"## {title}", "", intro, "", *lines]
    parts += ["", "## Choices", "", CHOICES, ""]
    for group, choices in discover().items():
        parts += [f"### {group}", ""]
        targets: dict[str, dict[str, Node]] = {}  # presets of one callable share a table
        for name, node in choices.items():
            targets.setdefault(node["_target_"], {})[name] = node
        for target, presets in targets.items():
            names = ", ".join(f"`{group}={name}`" for name in presets)
            lines = []
            for option, meaning in choice_meanings(target).items():
                values = [format_value(node[option]) for node in presets.values()]
                default = values[0] if len({*values}) == 1 else "/".join(values)
                lines.append((f"`{group}.{option}`", f"`{default}`", meaning))
            if lines:
                parts += [f"{names}:", "", *table(("option", "default", "meaning"), lines), ""]
            else:
                parts += [f"{names}: no options.", ""]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "options.md").write_text(page(), encoding="utf-8")
