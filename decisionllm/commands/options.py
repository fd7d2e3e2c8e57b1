"""Typed options of a command: a dataclass whose fields state what their values must be."""

from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from decisionllm.checks import check_seed, unknown_key_message
from decisionllm.files import explain_errors
from decisionllm.registry import Node

Options = TypeVar("Options")
# (name of the option, its value) -> the value in its type; a ValueError for one that cannot be
Reader = Callable[[str, Any], Any]


def option(reader: Reader) -> Any:
    """Declare a field of a dataclass of options whose value is read by this function."""
    return field(metadata={"reader": reader})


def matching(expected: str, test: Callable[[Any], bool]) -> Any:
    """Declare a value that passes a test. expected: such a value, for the message."""

    def read(name: str, value: object) -> object:
        if not test(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
        return value

    return option(read)


def number_from(least: float) -> Any:
    """Declare a number with this lowest value."""
    return matching(f"{least} or more", lambda value: value >= least)


def more_than(bound: float) -> Any:
    """Declare a number above this one."""
    return matching(f"more than {bound}", lambda value: value > bound)


def seed_number() -> Any:
    """Declare a seed of numpy and torch."""

    def read(name: str, value: int) -> int:
        check_seed(name, value)
        return value

    return option(read)


def word(*words: str, optional: bool = False) -> Any:
    """Declare one of these words; with `optional`, or None."""
    values = [*words, None] if optional else words
    return matching(f"one of {', '.join(words)}", lambda value: value in values)


def numbers() -> Any:
    """Declare a list of numbers."""

    def read(name: str, values: list[object]) -> list[float]:
        with explain_errors(f"{name}: expected numbers", ValueError, TypeError):
            return [float(value) for value in values]  # type: ignore[arg-type]

    return option(read)


def read_options(options_class: type[Options], options: Node, prefix: str = "") -> Options:
    """Read plain dicts into a dataclass of options.

    Args:
        options_class: its fields are the options, those of a group a dataclass of their own.
        options: a value for each of them.
        prefix: group of the options, such as "act.".

    Raises:
        ValueError: a value cannot be, or a group has no such option.
    """
    assert is_dataclass(options_class)
    types = get_type_hints(options_class)
    names = [prefix + each.name for each in fields(options_class)]
    for key in options:
        if prefix and prefix + key not in names:
            raise ValueError(unknown_key_message(prefix + key, names))
    values = {}
    for each in fields(options_class):
        name = prefix + each.name
        value = options[each.name]
        if is_dataclass(types[each.name]):
            value = read_options(types[each.name], value, f"{name}.")
        elif "reader" in each.metadata:
            value = each.metadata["reader"](name, value)
        values[each.name] = value
    return options_class(**values)
