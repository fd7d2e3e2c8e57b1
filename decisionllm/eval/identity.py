"""The configuration behind a row of results: which rows are seeds of one result, and its name."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from decisionllm.command_line import with_defaults
from decisionllm.config import GROUPS, default_options, flat, plain
from decisionllm.registry import Node, discover
from decisionllm.runs.directory import may_differ
from decisionllm.schema import Json

Row = Json
Options = Mapping[str, Any]

# `decode` and `part` are columns of a row, `name` is the policy
NOT_OPTIONS = ("name", "seed", "part", "act.decode")
# rows that agree in these columns look alike in a table
ALIKE = ("world", "protocol", "policy", "changed")
# an option may follow the training seed: dataset.seed='${seed}', init_from='runs/start-${seed}'
MAY_FOLLOW = ("seed", "init_from", "folder")
# columns, and how a label names them
EVALUATED = {"decode": "act.decode=", "env_seed": "env seed ", "part": "part "}
LONGEST = 32  # characters of a value in a label


def options_of(run_config: Json) -> Json:
    """The options of a run that identify its configuration: {"dataset": "synthetic", ...}.

    They are the choice of each group, the options that differ from their defaults, and all seeds
    but that of training. Options that cannot change a result are left out.
    """
    found: Json = {}
    defaults = dict(base_defaults(baseline="policy" in run_config))
    for group in GROUPS:
        if group in run_config:
            found[group], usual = nearest(group, run_config[group], str(run_config["name"]))
            defaults |= flat(usual, f"{group}.")
    own = flat({key: value for key, value in run_config.items() if key != "policy"})
    left_out = (*NOT_OPTIONS, *may_differ(own))
    for key, value in own.items():
        if key in left_out or key.endswith("._target_"):
            continue
        if key.endswith(".seed") or value != resolved(defaults.get(key), run_config):
            found[key] = value
    for group, choice in (default_choices() | {"env": found.get("dataset")}).items():
        if found.get(group) == choice:
            found.pop(group, None)
    return found


def nearest(group: str, node: Node, name: str = "") -> tuple[str, Node]:
    """The registered choice behind a node.

    Several choices may name one callable. Then it is the choice called `name`, or else the one that
    the node changes least.

    Returns:
        Its name and its defaults; of a callable that is not registered, its path and {}.
    """
    target = node["_target_"]
    choices = {}
    for key, defaults in discover().get(group, {}).items():
        if defaults["_target_"] == target:
            choices[key] = dict(defaults)
            del choices[key]["_target_"]
    if not choices:
        return target, {}

    def changes(key: str) -> int:
        return sum(node.get(option) != usual for option, usual in choices[key].items())

    if name not in choices:
        name = min(choices, key=changes)
    return name, choices[name]


@cache
def default_choices() -> Json:
    """The choices of `train` by default, {"tokenizer": "trajectory", ...}."""
    nodes = {group: default_options()[group] for group in GROUPS}
    return {group: nearest(group, node)[0] for group, node in nodes.items() if node}


@cache
def base_defaults(*, baseline: bool) -> Json:
    """The defaults of the options outside of the groups, flat, of `train` or of `baseline`."""
    if baseline:
        return flat(with_defaults("baseline", {}))
    return flat(default_options())


def resolved(value: Any, run_config: Json) -> Any:
    """A default; one that refers to another option, such as ${optim.lr}, has its value in the run.

    None if the run lacks that option.
    """
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return plain({**run_config, "asked": value})["asked"]
    except OmegaConfBaseException:
        return None


def effective(options: Options, key: str) -> Any:
    """The value of an option, given or by default; None if the configuration has no such one."""
    if key in options:
        return options[key]
    group, _, name = key.partition(".")
    is_baseline = "algorithm" in options
    if key == "env":
        return options.get("dataset")
    if key in GROUPS:
        return "none" if is_baseline else default_choices().get(key, "none")
    if group in GROUPS:
        choices = discover().get(group, {})
        usual = choices.get(effective(options, group), {}).get(name)
    else:
        usual = base_defaults(baseline=is_baseline).get(key)
    if usual == "???":
        return None
    reference = re.fullmatch(r"\$\{([\w.]+)\}", str(usual))
    return effective(options, reference[1]) if reference else usual


def pools(rows: Sequence[Row], columns: Sequence[str]) -> list[list[Row]]:
    """The rows of each result.

    Rows of a result agree in these columns, in their configuration and in how they were evaluated.
    Their targets agree too, but headline targets are of the data of each seed. Rows without
    `options` were written by an earlier version; they are compared by the columns alone.
    """
    exact: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        exact[_key(row, columns), _target(row)].append(row)
    found: list[list[Row]] = []
    # by all but the options that may follow
    alone: dict[tuple[str, str], list[list[Row]]] = defaultdict(list)
    for (_, target), members in exact.items():
        if "options" in members[0] and len({row["seed"] for row in members}) == 1:
            alone[_key(members[0], columns, following=False), target].append(members)
        else:
            found.append(members)
    for singles in alone.values():
        found += _joined(singles)
    return found


def _target(row: Row) -> str:
    """What of a row's target return says whether another row is of the same result."""
    target = row["target_return"]
    return "headline" if row["headline"] and target is not None else str(target)


def _joined(singles: Sequence[list[Row]]) -> list[list[Row]]:
    """Rows of one seed each, joined where their options follow the seed."""
    joined: list[list[Row]] = []
    for members in singles:
        for seeds in joined:
            if all(_follow_seeds(members[0], row) for row in seeds):
                seeds += members
                break
        else:
            joined.append(members)
    return joined


def _key(row: Row, columns: Sequence[str], *, following: bool = True) -> str:
    """The values that rows of one result have in common, as JSON.

    following: with data, and options, that may follow the seed.
    """
    common = [row.get(column) for column in columns]
    if "options" in row:
        options = row["options"]
        if not following:
            options = {key: value for key, value in options.items() if not _may_follow(key)}
        fingerprint = row.get("fingerprint") if following else None
        common += [options, row.get("env_seed"), row.get("part"), fingerprint]
    return json.dumps(common, sort_keys=True, default=str)


def _follow_seeds(one: Row, other: Row) -> bool:
    """Whether two rows differ only in the seed, in options that follow it, and so in the data."""
    if one["seed"] == other["seed"]:
        return False
    own_data = False
    for key in {**one["options"], **other["options"]}:
        value = one["options"].get(key)
        counterpart = other["options"].get(key)
        if not _may_follow(key) or value == counterpart:
            continue
        if not _name_their_seeds(value, one["seed"], counterpart, other["seed"]):
            return False
        own_data |= key.startswith("data")
    return own_data or one.get("fingerprint") == other.get("fingerprint")


def _may_follow(key: str) -> bool:
    return key.rpartition(".")[2] in MAY_FOLLOW


def _name_their_seeds(value: object, seed: int, counterpart: object, other_seed: int) -> bool:
    """Whether two values are alike but for numbers that are the seeds: runs/v1/start-1 of seed 1
    and runs/v1/start-2 of seed 2.
    """
    words = re.split(r"(\d+)", str(value))
    counterparts = re.split(r"(\d+)", str(counterpart))
    if len(words) != len(counterparts):
        return False
    seeds = (str(seed), str(other_seed))
    return all(a == b or (a, b) == seeds for a, b in zip(words, counterparts, strict=True))


def names(results: Sequence[Sequence[Row]]) -> list[str]:
    """The policy of each result, with the options in which it differs from results like it."""
    alike: dict[str, list[int]] = defaultdict(list)  # results that look alike in a table
    for i, members in enumerate(results):
        alike[str([members[0].get(column) for column in ALIKE])].append(i)
    found = [str(members[0]["policy"]) for members in results]
    for indices in alike.values():
        words_of = differences([results[i] for i in indices])
        for i, words in zip(indices, words_of, strict=True):
            found[i] = ", ".join([found[i], *words])
    return found


def differences(results: Sequence[Sequence[Row]]) -> list[list[str]]:
    """The options in which each result differs from the others: ["optim.lr=0.1", "env seed 3"]."""
    recorded = [members for members in results if "options" in members[0]]
    options: set[str] = set()
    for members in recorded:
        options |= members[0]["options"].keys()
    words = _different([_facts(members, sorted(options)) for members in recorded])
    configurations = {_key(members[0], ("decode",)) for members in recorded}
    if len(set(map(str, words))) < len(configurations):
        for label, members in zip(words, recorded, strict=True):
            label.append(f"data {str(members[0].get('fingerprint'))[:8]}")

    labels = iter(words)
    found = []
    for members in results:
        if "options" in members[0]:
            found.append(next(labels))
        elif recorded:
            found.append(["options not recorded"])
        else:
            found.append([])
    return found


def _different(facts: Sequence[dict[str, str]]) -> list[list[str]]:
    """The words of each result whose key has not the same words in all of them."""
    values: dict[str, set[str | None]] = {}
    for known in facts:
        for key in known:
            values[key] = {other.get(key) for other in facts}
    words = []
    for known in facts:
        words.append([known[key] for key in values if len(values[key]) > 1 and key in known])
    return words


def _facts(members: Sequence[Row], keys: Iterable[str]) -> dict[str, str]:
    """The words of a label about a result: {key: words}.

    keys: of the options that some of the results have.
    """
    found = {}
    for key in keys:
        values = [effective(row["options"], key) for row in members]
        is_shared = all(value == values[0] for value in values)  # others follow the seed
        if is_shared and values[0] is not None:
            found[key] = f"{key}={brief(values[0])}"
    for column, start in EVALUATED.items():
        if members[0].get(column) is not None:
            found[column] = f"{start}{members[0][column]}"
    return found


def brief(value: object) -> str:
    """A value in a label: a long one is cut, and a digest tells it from others that begin alike."""
    text = str(value)
    if len(text) <= LONGEST:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=2).hexdigest()
    return f"{text[: LONGEST // 2]}...{digest}"
