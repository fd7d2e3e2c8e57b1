"""Run directories of a sweep: `--multirun optim.lr=1e-3,2e-3` trains each value in its own."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from decisionllm.files import safe_name

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

# Hydra's flags that stand alone, and --help
BARE_FLAGS = (
    "--help",
    "--hydra-help",
    "--version",
    "--resolve",
    "--run",
    "--multirun",
    "--shell-completion",
)
# Hydra's flags that take the next word
VALUE_FLAGS = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--info",
    "-i",
)
INTERPOLATION = re.compile(r"\$\{([^${}]+)\}")
CHOICE = "hydra:runtime.choices."  # how an interpolation names the choice of a group


def parse_overrides(words: Sequence[str]) -> list["Override"]:
    """The words of a command line but its flags, as Hydra reads them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides(without_flags(words))


def without_flags(words: Iterable[str]) -> list[str]:
    """The words of a command line but its flags and what belongs to one, such as --cfg job."""
    return split_flags(words)[0]


def split_flags(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Divide the words of a command line: those that are no flags, and the flags with what belongs
    to them, such as --config-dir mine.
    """
    others = []
    flags = []
    for before, word in pairwise(["", *words]):
        belongs_to_flag = before in VALUE_FLAGS and "=" not in word
        if word.startswith("-") or belongs_to_flag:
            flags.append(word)
        else:
            others.append(word)
    return others, flags


def swept_keys(words: Sequence[str]) -> list[str]:
    """The keys with several values on a command line, in their order: ["seed", "optim.lr"]."""
    return [
        override.key_or_group for override in parse_overrides(words) if override.is_sweep_override()
    ]


def run_directory(config: "DictConfig", swept: Iterable[str], job: Iterable[str]) -> str:
    """The run directory of one job of a sweep.

    It is `run`, and the swept options that it does not already depend on.

    Args:
        config: of the job, as Hydra composed it, with its interpolations.
        swept: keys with several values, see `swept_keys`.
        job: the words of this job, such as ["seed=0", "optim.lr=0.001"].

    Returns:
        `runs/umaze/value-0-lr-0.001` for run=runs/umaze/value-${seed} and a sweep over seed and
        optim.lr.
    """
    values = dict(word.lstrip("+~").split("=", 1) for word in job if "=" in word)
    covered = {"run", *references(config, "run")}
    if "run" not in values:  # each experiment has a run directory of its own name
        covered.add("experiment")
    missing = [key for key in swept if key not in covered]
    names = [option_name(key) for key in missing]
    directory = str(config.run)
    for key in missing:
        label = option_name(key)
        if names.count(label) > 1:
            label = key
        directory += f"-{label}-{safe_value(values[key])}"
    return directory


def option_name(key: str) -> str:
    """The key of an option without its groups: optim.lr -> lr."""
    return key.rpartition(".")[2]


def references(config: "DictConfig", key: str) -> set[str]:
    """The options and groups that an option is interpolated from, directly or through others."""
    from omegaconf import OmegaConf

    at, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(config, at) if at else config
    if not OmegaConf.is_dict(node) or name not in node:
        return set()
    value = node._get_node(name)._value()
    names: set[str] = set()
    if not isinstance(value, str):
        return names
    for reference in INTERPOLATION.findall(value):
        if reference.startswith(CHOICE):
            names.add(reference.removeprefix(CHOICE))
        elif reference not in names:
            names |= {reference, *references(config, reference)}
    return names


def safe_value(value: str) -> str:
    """A value as part of the name of a folder: [0.5,1] -> 0.5-1."""
    return safe_name(value.strip("[]{}() '\""))
