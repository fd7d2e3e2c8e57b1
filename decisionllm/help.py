"""The text of `decisionllm COMMAND --help`: its choices, and its options with their meanings."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decisionllm.command_line import HYDRA_KEYS, config_folder, list_choices
from decisionllm.config import flatten
from decisionllm.option_docs import (
    choice_meanings,
    command_meanings,
    format_value,
)

WIDTH = 100  # letters of a line
COLUMN = 34  # letters of an option with its default, before its meaning
EXAMPLES = {
    "train": (
        "decisionllm train dataset=synthetic text=goal backbone=nano window=4 steps=300 run=runs/first",
        "decisionllm train dataset=arrays dataset.path=log.npz env=gymnasium env.id=Pendulum-v1",
        "decisionllm train experiment=umaze-llm seed=1 log.rollout_every=500",
    ),
}
# the options that a first week needs, shown before all others
FIRST = {
    "train": (
        "dataset",
        "env",
        "text",
        "backbone",
        "head",
        "model.condition_on",
        "window",
        "steps",
        "optim.batch_size",
        "optim.lr",
        "log.rollout_every",
        "log.tracker",
        "device",
        "seed",
        "run",
    ),
}


def format_help(command: str, about: str, *, usage: str, words: Sequence[str]) -> str:
    """Return the help of a command.

    Args:
        command: one of `decisionllm COMMAND`.
        about: what it does.
        usage: the command with the action that it takes, if it takes one.
        words: of the command line, without flags. The options of a choice are shown where it is
            made, as in `decisionllm data dataset=auction --help`.
    """
    import hydra
    import yaml
    from omegaconf import OmegaConf

    source = (config_folder() / f"{command}.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(source)["defaults"]
    groups = choice_groups(defaults)
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = hydra.compose(command, [*words], return_hydra_config=True)
    choice_by_group = composed.hydra.runtime.choices
    config: Any = OmegaConf.to_container(composed, resolve=False)

    # -- the value and the meaning of each option: of the command, and of each choice --
    meanings = command_meanings(source)
    options = {}
    options_by_choice = {}
    for key, value in config.items():
        if key in groups and isinstance(value, dict) and "_target_" in value:
            options[key] = choice_by_group[key]
            options_by_choice[f"{key}={choice_by_group[key]}"] = value
        elif key not in HYDRA_KEYS:
            options |= flatten({key: value})

    # -- the text --
    parts = [f"decisionllm {command}: {about}", f"usage: {usage} [key=value ...]"]
    if command in EXAMPLES:
        parts.append("\n".join(["examples:", *(f"  {line}" for line in EXAMPLES[command])]))
    first = FIRST.get(command, ())
    if first:
        parts.append(format_options("options of a first week:", first, options, meanings))
    if groups:
        choices = list_choices()
        lines = ["choices, as group=choice:"]
        for group in groups:
            lines.append(fill(f"{group}: {', '.join(sorted(choices[group]))}", "  ", "    "))
        parts.append("\n".join(lines))
    rest = [key for key in options if key not in first]
    title = "options and their defaults, as key=value:"
    parts.append(format_options(title, rest, options, meanings))
    for choice, node in options_by_choice.items():
        target = node.pop("_target_")
        if node:
            group = choice.partition("=")[0]
            described = choice_meanings(target)
            named = {f"{group}.{key}": value for key, value in node.items()}
            meanings_of = {f"{group}.{key}": meaning for key, meaning in described.items()}
            parts.append(format_options(f"options of {choice}:", named, named, meanings_of))
    return "\n\n".join(parts)


def format_options(
    title: str, keys: Iterable[str], values: Mapping[str, object], meanings: Mapping[str, str]
) -> str:
    """Return a block of the help: a title, and each option with its default and its meaning."""
    lines = [title]
    for key in keys:
        option = f"  {key}={format_value(values[key])}"
        text = f"{option:{COLUMN}}  {meanings.get(key, '')}".rstrip()
        if len(option) > COLUMN:
            lines.append(option)
            text = f"{'':{COLUMN}}  {meanings.get(key, '')}"
        lines.append(fill(text, "", " " * (COLUMN + 2)))
    return "\n".join(lines)


def fill(text: str, first: str, rest: str) -> str:
    """Break a text into lines with these indentations, between words alone."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def choice_groups(defaults: Sequence[str | dict[str, str | None]]) -> list[str]:
    """The groups of a Hydra defaults list in which a user chooses."""
    keys = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    return [key for key in keys if not key.startswith("override ")]
