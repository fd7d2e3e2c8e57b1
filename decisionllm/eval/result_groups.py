"""Group the rows of results that differ only in their seed, and name each group by its options."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from decisionllm.command_line import fill_defaults
from decisionllm.config import GROUPS, default_options, flatten, to_plain_dicts
from decisionllm.registry import Node, discover
from decisionllm.runs.directory import options_that_may_differ
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


def identifying_options(run_config: Json) -> Json:
    """Return the options of a run that identify its configuration: {"dataset": "synthetic", ...}.

    They are the choice of each group, the options that differ from their defaults, and all seeds
    but that of training. Options that cannot change a result are left out.
    """
    options: Json = {}
    defaults = dict(base_defaults(baseline="policy" in run_config))
    for group in GROUPS:
        if group in run_config:
            name, of_choice = nearest_choice(group, run_config[group], str(run_config["name"]))
            options[group] = name
            defaults |= flatten(of_choice, f"{group}.")
    values = flatten({key: value for key, value in run_config.items() if key != "policy"})
    ignored = (*NOT_OPTIONS, *options_that_may_differ(values))
    for key, value in values.items():
        if key in ignored or key.endswith("._target_"):
            continue
        if key.endswith(".seed") or value != resolve_default(defaults.get(key), run_config):
            options[key] = value
    for group, choice in (default_choices() | {"env": options.get("dataset")}).items():
        if options.get(group) == choice:
            options.pop(group, None)
    return options


def nearest_choice(group: str, node: Node, name: str = "") -> tuple[str, Node]:
    """Return the registered choice behind a node.

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

    def count_changes(key: str) -> int:
        return sum(node.get(option) != default for option, default in choices[key].items())

    if name not in choices:
        name = min(choices, key=count_changes)
    return name, choices[name]


@cache
def default_choices() -> Json:
    """Return the choices of `train` by default, {"tokenizer": "trajectory", ...}."""
    nodes = {group: default_options()[group] for group in GROUPS}
    return {group: nearest_choice(group, node)[0] for group, node in nodes.items() if node}


@cache
def base_defaults(*, baseline: bool) -> Json:
    """Return the defaults of the options outside of the groups, flat, of `train` or of `baseline`."""
    if baseline:
        return flatten(fill_defaults("baseline", {}))
    return flatten(default_options())


def resolve_default(value: Any, run_config: Json) -> Any:
    """Return a default; of one that refers to another option, such as ${optim.lr}, the value in the run.

    None if the run lacks that option.
    """
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return to_plain_dicts({**run_config, "asked": value})["asked"]
    except OmegaConfBaseException:
        return None


def effective_value(options: Options, key: str) -> Any:
    """Return the value of an option, set or by default; None if the configuration has no such one."""
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
        default = choices.get(effective_value(options, group), {}).get(name)
    else:
        default = base_defaults(baseline=is_baseline).get(key)
    if default == "???":
        return None
    reference = re.fullmatch(r"\$\{([\w.]+)\}", str(default))
    return effective_value(options, reference[1]) if reference else default


def group_rows(rows: Sequence[Row], columns: Sequence[str]) -> list[list[Row]]:
    """Group the rows of each result.

    Rows of a result agree in these columns, in their configuration and in how they were evaluated.
    Their targets agree too, but headline targets are of the data of each seed.
    """
    exact: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        exact[_key(row, columns), _target(row)].append(row)
    groups: list[list[Row]] = []
    # groups of one seed, by all but the options that may follow the seed
    of_one_seed: dict[tuple[str, str], list[list[Row]]] = defaultdict(list)
    for (_, target), members in exact.items():
        if len({row["seed"] for row in members}) == 1:
            key = _key(members[0], columns, with_followers=False)
            of_one_seed[key, target].append(members)
        else:
            groups.append(members)
    for singles in of_one_seed.values():
        groups += _join_seeds(singles)
    return groups


def _target(row: Row) -> str:
    """Return the target return as far as rows of one result have it in common."""
    target = row["target_return"]
    return "headline" if row["headline"] and target is not None else str(target)


def _join_seeds(singles: Sequence[list[Row]]) -> list[list[Row]]:
    """Join groups of one seed each whose options follow the seed."""
    joined: list[list[Row]] = []
    for members in singles:
        for seeds in joined:
            if all(_follow_seeds(members[0], row) for row in seeds):
                seeds += members
                break
        else:
            joined.append(members)
    return joined


def _key(row: Row, columns: Sequence[str], *, with_followers: bool = True) -> str:
    """Return the values that rows of one result have in common, as JSON.

    with_followers: with data, and options, that may follow the seed.
    """
    common = [row.get(column) for column in columns]
    options = options_in(row)
    fingerprint = row.get("fingerprint")
    if not with_followers:
        options = {key: value for key, value in options.items() if not _may_follow(key)}
        fingerprint = None
    common += [options, row.get("env_seed"), row.get("part"), fingerprint]
    return json.dumps(common, sort_keys=True, default=str)


def options_in(row: Row) -> Json:
    """Return the options of a row; none are recorded in rows of other programs."""
    options: Json = row.get("options", {})
    return options


def _follow_seeds(one: Row, other: Row) -> bool:
    """Return whether two rows differ only in the seed, in options that follow it, and so in the
    data.
    """
    if one["seed"] == other["seed"]:
        return False
    have_own_data = False
    options, other_options = options_in(one), options_in(other)
    for key in {**options, **other_options}:
        value, counterpart = options.get(key), other_options.get(key)
        if not _may_follow(key) or value == counterpart:
            continue
        if not _name_their_seeds(value, one["seed"], counterpart, other["seed"]):
            return False
        have_own_data |= key.startswith("data")
    return have_own_data or one.get("fingerprint") == other.get("fingerprint")


def _may_follow(key: str) -> bool:
    return key.rpartition(".")[2] in MAY_FOLLOW


def _name_their_seeds(value: object, seed: int, counterpart: object, other_seed: int) -> bool:
    """Return whether two values are alike but for numbers that are the seeds: runs/v1/start-1 of
    seed 1 and runs/v1/start-2 of seed 2.
    """
    words = re.split(r"(\d+)", str(value))
    counterparts = re.split(r"(\d+)", str(counterpart))
    if len(words) != len(counterparts):
        return False
    seeds = (str(seed), str(other_seed))
    return all(a == b or (a, b) == seeds for a, b in zip(words, counterparts, strict=True))


def name_results(results: Sequence[Sequence[Row]]) -> list[str]:
    """Return the policy of each result, with the options in which it differs from results like it."""
    alike: dict[str, list[int]] = defaultdict(list)  # results that look alike in a table
    for i, members in enumerate(results):
        alike[str([members[0].get(column) for column in ALIKE])].append(i)
    names = [str(members[0]["policy"]) for members in results]
    for indices in alike.values():
        labels = differences([results[i] for i in indices])
        for i, words in zip(indices, labels, strict=True):
            names[i] = ", ".join([names[i], *words])
    return names


def differences(results: Sequence[Sequence[Row]]) -> list[list[str]]:
    """Return the options in which each result differs from the others: ["optim.lr=0.1",
    "env seed 3"].
    """
    keys: set[str] = set()
    for members in results:
        keys |= options_in(members[0]).keys()
    all_labels = [_labels(members, sorted(keys)) for members in results]
    differing = find_differing_keys(all_labels)
    words = [[labels[key] for key in differing if key in labels] for labels in all_labels]
    configurations = {_key(members[0], ("decode",)) for members in results}
    if len(set(map(str, words))) < len(configurations):
        for label, members in zip(words, results, strict=True):
            label.append(f"data {str(members[0].get('fingerprint'))[:8]}")
    return words


def find_differing_keys(all_labels: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys of which labels {key: words} have not all the same words."""
    keys = dict.fromkeys(key for labels in all_labels for key in labels)
    return [key for key in keys if len({labels.get(key) for labels in all_labels}) > 1]


def _labels(members: Sequence[Row], keys: Iterable[str]) -> dict[str, str]:
    """Return the words of a label about a result: {key: words}.

    keys: of the options that some of the results have.
    """
    labels = {}
    for key in keys:
        values = [effective_value(options_in(row), key) for row in members]
        is_shared = all(value == values[0] for value in values)  # others follow the seed
        if is_shared and values[0] is not None:
            labels[key] = f"{key}={shorten(values[0])}"
    for column, start in EVALUATED.items():
        if members[0].get(column) is not None:
            labels[column] = f"{start}{members[0][column]}"
    return labels


def shorten(value: object) -> str:
    """Cut a long value for a label; a digest tells it from others that begin alike."""
    text = str(value) or "none"
    if len(text) <= LONGEST:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=2).hexdigest()
    return f"{text[: LONGEST // 2]}...{digest}"
