"""What a user may write for an option: one of its values, a list, ranges of numbers."""

import re


def one_of(name, value, known):
    """Nothing, if an option has one of its known values; else a ValueError that names them."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def listed(given):
    """A list, or words with commas between them -> words; nothing written -> none"""
    words = given if isinstance(given, list | tuple) else str(given).split(",") if str(given) else []
    return [str(x).strip() for x in words]


def ranges(name, given, *, nothing="", within=None):
    """ "4,0-2" -> [4, 0, 1, 2], each once. nothing: what it stands for if none is written, where that may be. within: a range of what there is."""
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in listed(given)]
    if not all(parts) or not (parts or nothing):
        raise ValueError(
            f"{name}: expected such as 0-6 or 7,8{f', or nothing for {nothing}' if nothing else ''}, got {given!r}"
        )
    pairs = [(int(m[1]), int(m[2] or m[1])) for m in parts]
    if any(first > last for first, last in pairs):
        raise ValueError(f"{name}: expected ranges that go up, got {given!r}")
    found = list(dict.fromkeys(x for first, last in pairs for x in range(first, last + 1)))
    if within and (wrong := [x for x in found if x not in within]):
        raise ValueError(f"{name}: expected {within[0]} .. {within[-1]}, got {wrong[0]}")
    return found
