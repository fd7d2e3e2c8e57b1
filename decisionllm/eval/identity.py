"""The configuration behind a row of results: what is pooled as seeds of one result, and how results are told apart."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from decisionllm.config import OPTIONAL, Node, TrainConfig, flat, plain, with_defaults
from decisionllm.policy.checkpoint import MAY_DIFFER
from decisionllm.registry import discover

Row = dict[str, Any]
Options = Mapping[str, Any]

GROUPS = ("dataset", "env", "backbone", "head", *OPTIONAL)
# `decode` and `part` are columns of a row, `name` is the policy
NOT_OPTIONS = (*MAY_DIFFER, "name", "seed", "part", "act.decode")
# rows that agree in these columns look alike in a table
ALIKE = ("dataset", "protocol", "policy", "changed")
# an option may follow the training seed, as in dataset.seed='${seed}' or init_from='runs/start-${seed}'
MAY_FOLLOW = ("seed", "init_from", "folder")
EVALUATED = {"decode": "act.decode=", "env_seed": "env seed ", "part": "part "}  # columns, and how a label names them
LONGEST = 32  # characters of a value in a label


def options_of(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that identify its configuration: {"dataset": "synthetic", "optim.lr": 0.002, ...}.

    They are the choice of each group, the options that differ from their defaults, and all seeds but that of training.
    What cannot change a result is left out.
    """
    found: dict[str, Any] = {}
    defaults = dict(base_defaults(baseline="policy" in run_config))
    for group in GROUPS:
        if node := run_config.get(group):
            found[group], usual = nearest(group, node, str(run_config["name"]))
            defaults |= flat(usual, f"{group}.")
    for key, value in flat({key: value for key, value in run_config.items() if key != "policy"}).items():
        ignored = key in NOT_OPTIONS or key.endswith("._target_")
        if not ignored and (key.endswith(".seed") or value != resolved(defaults.get(key), run_config)):
            found[key] = value
    usual_choices = {"env": found.get("dataset")} | dict.fromkeys(OPTIONAL, "none")
    return {key: value for key, value in found.items() if key not in usual_choices or value != usual_choices[key]}


def nearest(group: str, node: Node, name: str = "") -> tuple[str, Node]:
    """The registered choice behind a node: its name and its defaults; of a callable that is not registered, its path and {}.

    Several choices may name one callable. Then it is the choice called `name`, or else the one that the node changes least.
    """
    target = node["_target_"]
    known = {key: usual for key, usual in discover().get(group, {}).items() if usual["_target_"] == target}
    if not known:
        return target, {}

    def changes(key: str) -> int:
        return sum(node.get(option) != usual for option, usual in known[key].items())

    nearest_name = name if name in known else min(known, key=changes)
    return nearest_name, {key: value for key, value in known[nearest_name].items() if key != "_target_"}


@cache
def base_defaults(*, baseline: bool) -> Mapping[str, Any]:
    """The defaults of the options outside of the groups, flat, of `train` or of `baseline`."""
    return flat(with_defaults("baseline", {}) if baseline else asdict(TrainConfig({}, {}, {})))


def resolved(value: Any, run_config: Mapping[str, Any]) -> Any:
    """A default that refers to another option, such as ${optim.lr}, with the value of the run; None if the run lacks it."""
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return plain({**run_config, "asked": value})["asked"]
    except OmegaConfBaseException:
        return None


def effective(options: Options, key: str) -> Any:
    """The value of an option, given or by default; None if this configuration has no such option."""
    if key in options:
        return options[key]
    group, _, name = key.partition(".")
    if key in GROUPS:
        return options.get("dataset") if key == "env" else "none"
    if group in GROUPS:
        usual = discover().get(group, {}).get(effective(options, group), {}).get(name)
    else:
        usual = base_defaults(baseline="algorithm" in options).get(key)
    if usual == "???":
        return None
    reference = re.fullmatch(r"\$\{([\w.]+)\}", str(usual))
    return effective(options, reference[1]) if reference else usual


def pools(rows: Sequence[Row], columns: Sequence[str]) -> list[list[Row]]:
    """The rows of each result: those that agree in these columns, in their configuration and in how they were evaluated.

    Rows without `options` were written by an earlier version; they are compared by the columns alone.
    """
    exact: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        exact[_key(row, columns)].append(row)
    found: list[list[Row]] = []
    alone: dict[str, list[list[Row]]] = defaultdict(list)  # of one seed, by all but what may follow it
    for members in exact.values():
        if "options" in members[0] and len({row["seed"] for row in members}) == 1:
            alone[_key(members[0], columns, following=False)].append(members)
        else:
            found.append(members)
    for singles in alone.values():
        joined: list[list[Row]] = []
        for members in singles:
            fits = (seeds for seeds in joined if all(_follow_seeds(members[0], row) for row in seeds))
            if (seeds := next(fits, None)) is None:
                joined.append(members)
            else:
                seeds += members
        found += joined
    return found


def _key(row: Row, columns: Sequence[str], *, following: bool = True) -> str:
    """What the rows of one result have in common, as JSON. following: with data, and options, that may follow the seed."""
    common = [row.get(column) for column in columns]
    if "options" in row:
        options = {key: value for key, value in row["options"].items() if following or not _may_follow(key)}
        common += [options, row.get("env_seed"), row.get("part"), row.get("fingerprint") if following else None]
    return json.dumps(common, sort_keys=True, default=str)


def _follow_seeds(one: Row, other: Row) -> bool:
    """Whether two rows of different seeds differ only in options that follow the seed, and in data if these are among them."""
    pairs = {key: (one["options"].get(key), other["options"].get(key)) for key in {**one["options"], **other["options"]}}
    different = {key: pair for key, pair in pairs.items() if _may_follow(key) and pair[0] != pair[1]}
    follow = all(_as_seed(a, one["seed"]) == _as_seed(b, other["seed"]) for a, b in different.values())
    own_data = any(key.startswith("data") for key in different)
    same_data = own_data or one.get("fingerprint") == other.get("fingerprint")
    return one["seed"] != other["seed"] and follow and same_data


def _may_follow(key: str) -> bool:
    return key.rpartition(".")[2] in MAY_FOLLOW


def _as_seed(value: Any, seed: int) -> str:
    """The value with {seed} in place of this number: "runs/start-3" -> "runs/start-{seed}"."""
    return re.sub(rf"(?<!\d){seed}(?!\d)", "{seed}", str(value))


def names(results: Sequence[Sequence[Row]]) -> list[str]:
    """The policy of each result; of results that look alike in a table, with the options in which they differ."""
    alike: dict[str, list[int]] = defaultdict(list)
    for i, members in enumerate(results):
        alike[str([members[0].get(column) for column in ALIKE])].append(i)
    found = [str(members[0]["policy"]) for members in results]
    for indices in alike.values():
        for i, words in zip(indices, differences([results[i] for i in indices]), strict=True):
            found[i] = ", ".join([found[i], *words])
    return found


def differences(results: Sequence[Sequence[Row]]) -> list[list[str]]:
    """For each result the options in which it differs from the others, in words: ["optim.lr=0.002", "env seed 3"]."""
    recorded = [members for members in results if "options" in members[0]]
    keys = sorted({key for members in recorded for key in members[0]["options"]})
    facts = [_facts(members, keys) for members in recorded]
    different = [key for key in dict.fromkeys(key for known in facts for key in known) if len({f.get(key) for f in facts}) > 1]
    words = [[known[key] for key in different if key in known] for known in facts]
    if len(set(map(str, words))) < len({_key(members[0], ("decode",)) for members in recorded}):
        for told, members in zip(words, recorded, strict=True):
            told.append(f"data {str(members[0].get('fingerprint'))[:8]}")
    left = iter(words)
    unknown = ["options not recorded"] * bool(recorded)
    return [next(left) if "options" in members[0] else unknown for members in results]


def _facts(members: Sequence[Row], keys: Iterable[str]) -> dict[str, str]:
    """What a label may say about a result: {key: words}. keys: of the options that some of the results have."""
    found = {}
    for key in keys:
        values = [effective(row["options"], key) for row in members]
        # others follow the seed
        if values[0] is not None and all(value == values[0] for value in values):
            found[key] = f"{key}={brief(values[0])}"
    for column, start in EVALUATED.items():
        if members[0].get(column) is not None:
            found[column] = f"{start}{members[0][column]}"
    return found


def brief(value: Any) -> str:
    """A value in a label: a long one is cut, and a digest tells it from others that begin alike."""
    text = str(value)
    if len(text) <= LONGEST:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=2).hexdigest()
    return f"{text[: LONGEST // 2]}...{digest}"
