"""The options of `scale` and of its study, checked."""

import sys
from dataclasses import dataclass

from decisionllm.checks import check_one_of
from decisionllm.commands.options import word
from decisionllm.registry import Node

KEYS = ("name", "train", "evaluate", "axes", "seeds", "budget", "lr", "windows")
AXES = ("size", "fraction", "quality")
RULES: dict[str, dict[str, tuple[str, ...]]] = {  # the keys that each rule reads
    "budget": {"steps": ("steps",), "compute": ("flops",)},
    "lr": {"fixed": (), "sweep": ("values",)},
}
TINY = sys.float_info.min  # the least number above 0
MOST = sys.float_info.max  # all but infinity


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """The options of `scale`; configs/scale.yaml explains them and has their defaults."""

    action: str = word("plan", "run", "status", "retry", "report")
    study: Node
    out: str
    read: str
    executor: str  # this one and the five below: see `executors.build_executor`
    workers: int
    processes: int
    gpus: float
    address: str
    slurm: Node
    probe: int
    keep: bool
    cache_dir: str
    device: str
    trust: list[str]


def check_study(study: Node) -> Node:
    """Return the study, with an empty `exclude` if it has none; raise a ValueError for the first key
    that is missing, or value that cannot be.
    """
    study = {"exclude": [], **study}
    for key in KEYS:
        if key not in study:
            raise ValueError(
                f"study: expected {key}, found none; configs/study/smoke.yaml has every key"
            )
    check_axes(study["axes"], study["seeds"])
    grid_values = {name: to_words(list(values)) for name, values in study["axes"].items()}
    grid_values["seed"] = to_words(list(study["seeds"]))
    for entry in study["exclude"]:
        if not is_in_grid(entry, grid_values):
            raise ValueError(
                f"study.exclude: expected axes and values of the grid, got {entry}; the grid "
                f"has {grid_values}"
            )
    for group in RULES:
        check_rule(group, study[group])
    if not is_number(study["windows"], TINY, whole=True):
        raise ValueError(f"study.windows: expected a whole number above 0, got {study['windows']}")
    return study


def check_axes(axes: Node, seeds: list[int]) -> None:
    """Raise a ValueError if an axis is unknown, has no values, or values that cannot be."""
    for name in axes:
        if name not in AXES:
            raise ValueError(f"study.axes: expected axes among {', '.join(AXES)}, got {name!r}")
    values_by_axis = {**axes, "seeds": seeds}
    for name in (*AXES, "seeds"):
        if not values_by_axis.get(name):
            raise ValueError(f"study: an empty grid, {name} has no values; give it at least one")
    check_numbers(
        "study.axes.fraction", axes["fraction"], "a list of shares above 0, at most 1", TINY, 1
    )
    if not isinstance(axes["quality"], dict):
        check_numbers(
            "study.axes.quality",
            axes["quality"],
            "a list of quantiles within 0 .. 1, or {name: [dataset options]}",
            0,
            1,
        )
    check_numbers("study.seeds", seeds, "a list of whole numbers, 0 or more", 0, whole=True)


def check_numbers(
    name: str, value: object, expected: str, low: float, high: float = MOST, *, whole: bool = False
) -> None:
    """Raise a ValueError unless an option is a list of numbers within low .. high.

    expected: such a list, in words.
    """
    numbers = value if isinstance(value, list) else []
    if not numbers or not all(is_number(each, low, high, whole=whole) for each in numbers):
        raise ValueError(f"{name}: expected {expected}, got {value}")


def is_number(value: object, low: float, high: float = MOST, *, whole: bool = False) -> bool:
    """Return whether a value of a study is a number within low .. high, or a whole one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high and not (whole and isinstance(value, float))


def is_in_grid(entry: object, grid_values: dict[str, list[str]]) -> bool:
    """Return whether an entry of `exclude` names axes of the grid and their values, `grid_values`
    as words.
    """
    if not isinstance(entry, dict) or not entry:
        return False
    return all(
        set(to_words(values)) <= {*grid_values.get(axis, [])} for axis, values in entry.items()
    )


def check_rule(group: str, options: Node) -> None:
    """Raise a ValueError if a rule of the study is unknown or lacks a value that it reads."""
    rule: str = options.get("rule", "")
    check_one_of(f"study.{group}.rule", rule, RULES[group])
    for key in RULES[group][rule]:
        value = options.get(key)
        if key == "values":
            check_numbers(f"study.{group}.{key}", value, "a list of rates above 0", TINY)
        elif not is_number(value, TINY, whole=key == "steps"):
            kind = "a whole number" if key == "steps" else "a number"
            raise ValueError(
                f"study.{group}.{key}: rule={rule} needs it, expected {kind} above 0, got {value}"
            )


def to_words(values: object) -> list[str]:
    """Write one value or several values of an axis as words."""
    if not isinstance(values, list):
        values = [values]
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in values]


def is_excluded(study: Node, size: str, quality: str, fraction: float, seed: int) -> bool:
    """Return whether an entry of `exclude` has this value on each of its axes."""
    cell = {"size": size, "quality": quality, "fraction": fraction, "seed": seed}
    values_of_cell = {axis: to_words(value)[0] for axis, value in cell.items()}
    for entry in study["exclude"]:
        if all(values_of_cell[axis] in to_words(values) for axis, values in entry.items()):
            return True
    return False
