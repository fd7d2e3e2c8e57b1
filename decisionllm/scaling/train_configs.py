"""The config of `train` of each size and quality of a study."""

import re
from collections.abc import Iterable, Mapping
from itertools import product

from decisionllm.command_line import UsageError, check_options
from decisionllm.config import merge
from decisionllm.registry import Node
from decisionllm.scaling.study_data import Cell

FOLLOWS = re.compile(r"\$\{(seed|steps|data\.fraction|optim\.lr)\}")  # options that the grid sets
# the same, and what of a study says their values
SET_BY = {"seed": "study.seeds", "steps": "study.budget", "data.fraction": "study.axes.fraction"}
# keys of a config that a result does not depend on
NOT_THE_RUNS = (
    "run",
    "cache_dir",
    "device",
    "fresh",
    "trust",
)


def compose_train_configs(study: Node) -> dict[Cell, Node]:
    """Compose the config of `train` of each (size, quality), as the command line does."""
    config_by_cell = {}
    composed: dict[tuple[str, ...], Node] = {}  # qualities of one mixture share a config
    sizes = study["axes"]["size"].items()
    for (size, size_words), quality in product(sizes, list_qualities(study["axes"]["quality"])):
        name, mixture, quantile = quality
        overrides = [*study["train"], *size_words, *mixture]
        for word in overrides:
            if FOLLOWS.search(str(word)):
                raise ValueError(
                    f"study: {word} would be the same in every run, since options are composed "
                    "once for each size; expected a size for each value"
                )
        check_overrides(overrides, SET_BY)
        check_overrides(mixture, SET_BY | {"optim.lr": "study.lr, or each size,"})
        line = (*map(str, overrides), f"name='{size}'", "run=x", "log.tracker=none")
        if line not in composed:
            composed[line] = compose("train", line)
        config = composed[line]
        execution = config["team"]["execution"]
        if execution != "per_agent":
            raise ValueError(
                f"study.train: expected team.execution=per_agent, got {execution}; a study "
                "counts single agents"
            )
        config = {key: value for key, value in config.items() if key not in NOT_THE_RUNS}
        if quantile is not None:
            config = merge(config, {"data": {"min_return_quantile": quantile}})
        config_by_cell[size, name] = config
    return config_by_cell


def check_overrides(overrides: Iterable[object], set_by: Mapping[str, str]) -> None:
    """Raise a ValueError for an override of `train` whose option the grid sets in each run.

    set_by: what of a study says the values of an option.
    """
    for word in overrides:
        key = str(word).lstrip("+").partition("=")[0]
        if key in set_by:
            raise ValueError(f"study: {word} would have no effect; {set_by[key]} says {key}")


def list_qualities(
    axis: list[float] | dict[str, list[str]],
) -> list[tuple[str, list[str], float | None]]:
    """List (name, overrides of `train`, least quantile of returns) of each quality: a quantile, or
    overrides, which may name one.
    """
    if isinstance(axis, list):
        return [(f"{quantile:g}", [], float(quantile)) for quantile in axis]
    return [(name, overrides, None) for name, overrides in axis.items()]


def compose(command: str, overrides: Iterable[object]) -> Node:
    """Compose the config of a command as its command line does."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    line = [str(word) for word in overrides]
    try:
        config = hydra.compose(command, line, return_hydra_config=True)
        OmegaConf.set_struct(config, False)
        return check_options(config, command, config.pop("hydra").runtime.choices, line)
    except (HydraException, OmegaConfBaseException, UsageError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"study: `decisionllm {command} {' '.join(line)}` does not compose: {reason}"
        ) from error
