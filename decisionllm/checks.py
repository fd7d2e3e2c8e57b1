"""Words of a user read and checked: one of several, lists, ranges; an unknown name with the nearest
that is known.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def unknown(kind: str, name: Any, known: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest that is known."""
    known = list(known)
    near = get_close_matches(str(name), known, 1)
    return (
        f"no {kind} {name!r}; {f'did you mean {near[0]}? ' if near else ''}there are "
        f"{', '.join(known) or 'none'}"
    )


def unknown_key(key: str, keys: Iterable[str]) -> str:
    """The message for an unknown key, with the nearest: in the same group if there is one, or else
    anywhere; of a group, the same name.
    """
    keys = list(keys)
    at, _, name = key.rpartition(".")
    anywhere = {k.rpartition(".")[2]: k for k in keys}
    beside = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == at}
    searched = (beside, 0.6), (anywhere, 1.0 if at and beside else 0.6)
    near = next(
        (
            known[found[0]]
            for known, alike in searched
            if (found := get_close_matches(name, known, 1, alike))
        ),
        None,
    )
    others = (
        f"there are {', '.join(beside.values())}"
        if at and beside
        else "--cfg job shows those there are"
    )
    return f"no key {key!r} in the config; {f'did you mean {near}?' if near else others}"


def one_of(name: str, value: Any, known: Iterable[Any]) -> None:
    """Raise a ValueError that names the known values unless `value` is one of them."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def listed(given: Any) -> list[str]:
    """A list, or words separated by commas, as a list of words; "" -> []."""
    words = (
        given if isinstance(given, list | tuple) else str(given).split(",") if str(given) else []
    )
    return [str(x).strip() for x in words]


def ranges(name: str, given: Any, *, nothing: str = "", within: range | None = None) -> list[int]:
    """ "4,0-2" -> [4, 0, 1, 2], each once.

    Args:
        name: of the option, for messages.
        given: as the user wrote it.
        nothing: what an empty value stands for; "": an empty value is an error.
        within: the numbers that exist.

    Raises:
        ValueError: not a list of ranges, or a number outside `within`.
    """
    parts = listed(given)
    matches = [match for part in parts if (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part))]
    if len(matches) < len(parts) or not (parts or nothing):
        or_nothing = f", or nothing for {nothing}" if nothing else ""
        raise ValueError(f"{name}: expected such as 0-6 or 7,8{or_nothing}, got {given!r}")
    pairs = [(int(match[1]), int(match[2] or match[1])) for match in matches]
    if any(first > last for first, last in pairs):
        raise ValueError(f"{name}: expected ranges that go up, got {given!r}")
    found: dict[int, None] = {}  # as a set that keeps the order
    for first, last in pairs:
        found |= dict.fromkeys(range(first, last + 1))
    wrong = [number for number in found if within and number not in within]
    if within and wrong:
        raise ValueError(f"{name}: expected {within[0]} .. {within[-1]}, got {wrong[0]}")
    return list(found)
