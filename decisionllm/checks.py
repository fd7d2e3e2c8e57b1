"""Checks of what a user wrote: one of several words, lists, ranges; an unknown name is answered with
the nearest one.
"""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from numbers import Real


def unknown_name_message(kind: str, name: object, names: Iterable[str]) -> str:
    """The message for an unknown name, with those that begin with it, or else the nearest."""
    names = list(names)
    near = [other for other in names if other.startswith(f"{name}-")]
    if not near:
        near = get_close_matches(str(name), names, 1)
    there_are = f"there are {', '.join(names) or 'none'}"
    if near:
        there_are = f"did you mean {' or '.join(near)}? {there_are}"
    return f"no {kind} {name!r}; {there_are}"


def unknown_key_message(key: str, keys: Iterable[str]) -> str:
    """The message for an unknown key, with the nearest: in the same group if there is one, or else
    anywhere; of a group, the same name.
    """
    group, _, name = key.rpartition(".")
    anywhere = {}  # {name: key}
    beside = {}
    for other in keys:
        other_group, _, other_name = other.rpartition(".")
        anywhere[other_name] = other
        if other_group == group:
            beside[other_name] = other
    is_group = bool(group and beside)

    near = get_close_matches(name, beside, 1)
    if near:
        return f"no key {key!r} in the config; did you mean {beside[near[0]]}?"
    cutoff = 1.0 if is_group else 0.6  # of a known group the same name alone
    near = get_close_matches(name, anywhere, 1, cutoff)
    if near:
        return f"no key {key!r} in the config; did you mean {anywhere[near[0]]}?"
    fix = "--cfg job shows those there are"
    if is_group:
        fix = f"there are {', '.join(beside.values())}"
    return f"no key {key!r} in the config; {fix}"


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise a ValueError that names the known values unless `value` is one of them."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise a ValueError if a number is smaller."""
    if not value >= least:
        raise ValueError(f"{name}: expected {least} or more, got {value}")


SEED_END = 2**63  # numpy's int64 and torch hold the seeds below


def check_seed(name: str, value: float) -> None:
    """Raise a ValueError if a number is no seed of numpy and torch."""
    check_at_least(name, value, 0)
    if value >= SEED_END:
        raise ValueError(f"{name}: expected less than 2**63, got {value}")


def check_positive(name: str, value: float) -> None:
    """Raise a ValueError unless a number is more than 0."""
    if not value > 0:
        raise ValueError(f"{name}: expected more than 0, got {value}")


def check_share(name: str, value: float) -> None:
    """Raise a ValueError unless a number is a part of a whole."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a share within 0 .. 1, got {value}")


def is_number_list(value: object) -> bool:
    """Return whether a value is a list of numbers, of Python or of numpy."""
    if not isinstance(value, list | tuple):
        return False
    return all(isinstance(number, Real) for number in value)


def split_list(value: object) -> list[str]:
    """A list, or words separated by commas, as a list of words; "" -> []."""
    if isinstance(value, list | tuple):
        words = list(value)
    elif str(value):
        words = str(value).split(",")
    else:
        words = []
    return [str(word).strip() for word in words]


def parse_ranges(
    name: str, value: object, *, nothing: str = "", within: range | None = None
) -> list[int]:
    """ "4,0-2" -> [4, 0, 1, 2], each once.

    Args:
        name: of the option, for messages.
        value: as the user wrote it.
        nothing: what an empty value stands for; "": an empty value is an error.
        within: the numbers that exist.

    Raises:
        ValueError: not a list of ranges, or a number outside `within`.
    """
    expected = "such as 0-6 or 7,8"
    if nothing:
        expected += f", or nothing for {nothing}"
    parts = split_list(value)
    if not parts and not nothing:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    numbers: dict[int, None] = {}  # as a set that keeps the order
    for part in parts:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
        first = int(match[1])
        last = int(match[2] or first)
        if first > last:
            raise ValueError(f"{name}: expected ranges that go up, got {value!r}")
        numbers |= dict.fromkeys(range(first, last + 1))
    if within:
        for number in numbers:
            if number not in within:
                raise ValueError(f"{name}: expected {within[0]} .. {within[-1]}, got {number}")
    return list(numbers)
