"""The words of a command line, composed by Hydra and checked: every key has a value in the type of
its default, and no key is one that nothing reads.
"""

import json
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decisionllm import registry
from decisionllm.checks import check_seed, unknown_key_message, unknown_name_message
from decisionllm.config import OPTIONAL, default_options, flatten, merge, to_plain_dicts
from decisionllm.files import safe_name
from decisionllm.registry import Node
from decisionllm.schema import Json
from decisionllm.sweep import BARE_FLAGS, VALUE_FLAGS, parse_overrides, without_flags

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "keys with values",
}


# options that are paths, of commands and of choices
PATH_OPTIONS = (
    "run",
    "out",
    "init_from",
    "path",
    "minari_id",
    "journal",
    "to",
    "from",
    "tokens",
    "models_dir",
    "shadow",
    "probe_pairs",
)


# what reads the files of a format that is no name of a dataset
FORMATS = {
    **dict.fromkeys(("npz", "hdf5", "h5", "d4rl"), "dataset=arrays reads .npz and HDF5 files"),
    **dict.fromkeys(("parquet", "arrow"), "dataset=huggingface reads Parquet and Arrow files"),
    "csv": "dataset=arrays reads a CSV file once numpy has made it an .npz file, see docs/data.md",
}

HYDRA_KEYS = ("defaults", "hydra")  # keys of a file of configs/ that are no options


class UsageError(Exception):
    """The command line names what does not exist, or gives a value that cannot be."""


def config_folder() -> Path:
    """The folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    package = registry.PACKAGE.resolve()
    folders = (package / "configs", package.parent / "configs")
    return next(folder for folder in folders if folder.is_dir())


def fill_defaults(command: str, changes: Json) -> Node:
    """The given options of a command, those left out as in configs/COMMAND.yaml; a ValueError for
    an unknown one.
    """
    import yaml

    options = yaml.safe_load((config_folder() / f"{command}.yaml").read_text(encoding="utf-8"))
    options = {key: value for key, value in options.items() if key not in HYDRA_KEYS}
    for key in changes:
        if key not in options:
            raise ValueError(unknown_key_message(key, options))
    return merge(options, changes)


@cache
def store_choices() -> None:
    """File every registered choice, and the defaults of `train`, in Hydra's ConfigStore."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    groups = dict(registry.discover())
    # a dataset without an env of its name has none
    groups["env"] = dict.fromkeys(groups["dataset"], registry.no_choice()) | groups["env"]
    for group in OPTIONAL:
        groups[group] = {"none": registry.no_choice()} | groups[group]
    instance = ConfigStore.instance()
    # Hydra copies it for each config that it composes, and only reads the copy
    vars(instance)["__deepcopy__"] = lambda memo: instance
    store = instance.store
    for group, choices in groups.items():
        for name, node in choices.items():
            store(group=group, name=name, node=node)
    # until one is chosen, see `checked_options`; --help and --cfg job need none
    store(group="dataset", name="none", node=registry.no_choice())
    options = {key: value for key, value in default_options().items() if key not in groups}
    store(name="train_options", node=options)
    OmegaConf.register_new_resolver("policy_name", policy_name, replace=True)


def policy_name(choice: str, *, _root_: "DictConfig") -> str:
    """The name of a policy by default: of the backbone that is built, safe in a path.

    Args:
        choice: of the group `backbone`.
        _root_: the config, as OmegaConf passes it.

    Returns:
        The last word of backbone._target_ if it is not that of the choice; the name of
        backbone.folder or backbone.hub_id; or the choice. Behind it the weights, unless pretrained.
    """
    from omegaconf import OmegaConf

    target, folder, hub_id, weights = (
        OmegaConf.select(_root_, f"backbone.{key}")
        for key in ("_target_", "folder", "hub_id", "weights")
    )
    if target != registry.discover()["backbone"].get(choice, {}).get("_target_"):
        return str(target).rpartition(".")[2]
    source = str(folder or hub_id or "")
    name = Path(source).expanduser().absolute().name if source else ""
    safe = safe_name(name.removesuffix(".gguf")).strip("-.")
    suffix = f"-{weights}" if weights not in (None, "pretrained") else ""
    return (safe or choice) + suffix


def check_options(
    config: "DictConfig", command: str, choice_by_group: Json, words: Iterable[str]
) -> Node:
    """The config as plain dicts: a value for every key, in the type of its default, and no key that
    nothing reads.

    If `_target_` is replaced, only the options that the user gave are kept, and the task text of the
    run where it has one.

    Args:
        config: as Hydra composed it.
        command: whose config it is.
        choice_by_group: the choice of each group.
        words: of the command line.

    Raises:
        UsageError: a key is unknown, lacks a value, or has one of another type.
    """
    from omegaconf import OmegaConf

    choices = [
        f"{group}={name}" for group, name in choice_by_group.items() if name and "/" not in group
    ]
    defaults = compose_defaults(command, *choices)
    user_keys = {word.lstrip("+").partition("=")[0] for word in words}
    OmegaConf.set_struct(config, False)
    references = references_to_runs(config)
    ComposedConfig(config, defaults, user_keys).check()
    options = to_plain_dicts(config)
    if "dataset" in options and registry.is_none(options["dataset"]):
        raise UsageError(no_dataset_message())
    for key in options.keys() & PATH_OPTIONS:
        options[key] = expand_home(options[key])
    if references:
        options["env"] |= references
    return options


@dataclass(frozen=True)
class ComposedConfig:
    """A config as Hydra composed it, which these methods change, and what it is checked against."""

    config: "DictConfig"
    defaults: "DictConfig"  # the same without the words of the user
    user_keys: Collection[str]  # the keys of these words

    @cached_property
    def default_keys(self) -> list[str]:
        """The keys of the defaults."""
        return leaf_keys(self.defaults)

    def check(self) -> None:
        """Check every key, see `check_key`, give texts, see `fill_text`, and raise a UsageError if
        one of the defaults is not there.
        """
        for key in leaf_keys(self.config):
            self.check_key(key)
        for group in ("dataset", "env"):
            self.fill_text(group)
        absent = [name for name in list(self.defaults) if name not in list(self.config)]
        if absent:
            raise UsageError(f"{', '.join(absent)}: expected a value, got none")

    def check_key(self, key: str) -> None:
        """Give a key the type of its default, or raise a UsageError; a default of a choice that
        another `_target_` replaced is taken out. key: with dots.
        """
        from omegaconf import OmegaConf

        at, _, name = key.rpartition(".")
        node = self.parent_node(key)
        is_default = key in self.default_keys and key not in self.user_keys
        replaced = bool(at) and self.is_replaced(at)
        if replaced and is_default and name != "_target_":
            del node[name]
            return
        if OmegaConf.is_missing(node, name):
            raise UsageError(f"{key}: expected a value, got none; give {key}=...")
        if replaced:
            return
        if key in self.default_keys:
            value = select_value(self.config, key, strict=True)
            default = select_value(self.defaults, key)
            # an experiment may give one level where the option also takes several
            if {type(value), type(default)} == {str, list} and self.accepts_lists(at, name):
                default = None
            OmegaConf.update(self.config, key, convert_value(key, value, default))
        elif not self.accepts_any_key(at):
            raise UsageError(unknown_key_message(key, self.default_keys))

    def accepts_lists(self, at: str, name: str) -> bool:
        """Return whether an option takes a list as well as one value: it has no default, or refers to
        another option, which is checked itself. at: its node.
        """
        from omegaconf import OmegaConf

        if not at:
            return False
        target = select_value(self.config, f"{at}._target_", strict=True)
        return OmegaConf.is_interpolation(self.parent_node(f"{at}.{name}"), name) or is_open(
            target, name
        )

    def parent_node(self, key: str) -> Any:
        """The node that holds a key, or a UsageError if a part of the key has a dot itself."""
        from omegaconf import OmegaConf

        at = key.rpartition(".")[0]
        node = OmegaConf.select(self.config, at) if at else self.config
        if not OmegaConf.is_config(node):
            nested = "keys without a dot; write them nested, as in {a: {b: 1}}"
            raise UsageError(f"{key}: expected {nested}")
        return node

    def is_replaced(self, node: str) -> bool:
        """Return whether the user gave a node another `_target_` than that of its choice."""
        target = f"{node}._target_"
        return bool(
            select_value(self.config, target, strict=True) != select_value(self.defaults, target)
        )

    def accepts_any_key(self, at: str) -> bool:
        """Return whether a node, or one above it, is {} by default, or an option of a registered choice
        that is null or missing by default, or that refers to an option that is.
        """
        for above in accumulate(at.split("."), "{}.{}".format):
            default = select_value(self.defaults, above)
            if default == {} or (default is None and above in self.default_keys):
                return True
            parent, _, name = above.rpartition(".")
            if parent and is_open(
                select_value(self.config, f"{parent}._target_", strict=True), name
            ):
                return True
        return False

    def fill_text(self, group: str) -> None:
        """Give the option `text` of a run to a dataset or an environment of the user, see
        `registry.needs_text`. group: `dataset` or `env`.
        """
        text = select_value(self.config, "text")
        if self.is_replaced(group) and registry.needs_text(self.config[group], text):
            self.config[group]["text"] = text


def is_open(target: object, option: str) -> bool:
    """Return whether an option of a registered callable is null or missing by default."""
    for choices in registry.discover().values():
        for node in choices.values():
            if node["_target_"] == target and node.get(option, "") in (None, "???"):
                return True
    return False


@cache
def compose_defaults(command: str, *choices: str) -> "DictConfig":
    """The config of a command with these choices and no other word, such as "dataset=synthetic".

    The jobs of a sweep, and the cells of a study, share one. It is only read.
    """
    import hydra

    return hydra.compose(command, [*choices])


def select_value(node: "DictConfig", key: str, *, strict: bool = False) -> Any:
    """The value of a key of a config, nested configs as plain containers. strict: a reference that
    leads nowhere is an error.
    """
    from omegaconf import OmegaConf

    value = OmegaConf.select(node, key, throw_on_resolution_failure=strict)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def references_to_runs(config: "DictConfig") -> Node:
    """Take out and return the options of an env named in `evaluate` that refer to options of each
    run, see `env_options_of`.
    """
    from omegaconf import OmegaConf

    if "env" not in config or "dataset" in config:
        return {}
    names = [key for key in config.env if OmegaConf.is_interpolation(config.env, key)]
    references = {key: config.env._get_node(key)._value() for key in names}
    for key in references:
        del config.env[key]
    return references


def expand_home(path: object) -> object:
    """A path, or a list of paths, with the home folder in place of `~`."""
    if isinstance(path, list):
        return [expand_home(each) for each in path]
    return str(Path(path).expanduser()) if isinstance(path, str) and path.startswith("~") else path


def convert_value(key: str, value: Any, default: Any) -> Any:
    """The value in the type of its default: 1 -> 1.0, 1e3 -> 1000, 7 -> "7". Where the default is
    null, any value; the name of a folder may be a number too.

    Raises:
        UsageError: the value is of another type, or no seed.
    """
    name = key.rpartition(".")[2]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "seed" and is_number:
        try:
            check_seed(key, value)
        except ValueError as error:
            raise UsageError(error) from error
    if default is None:
        is_place = name in PATH_OPTIONS and is_number
        return str(value) if is_place else value
    kind = type(default)
    if type(value) is kind:
        return value
    if is_number and kind in (float, str):
        return kind(value)
    if is_number and kind is int and value % 1 == 0:
        return int(value)
    raise UsageError(f"{key}: expected {KINDS[kind]}, got {json.dumps(value)}")


def explain_dashes(words: Sequence[str]) -> str | None:
    """Explain how to write the first option that is given with dashes, as other programs have it:
    `--steps=10` or `--steps 10`; None without one.
    """
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        is_flag = any(known.startswith(flag) for known in VALUE_FLAGS)
        is_flag = is_flag or (not equals and any(known.startswith(flag) for known in BARE_FLAGS))
        if not re.match("--[a-z]", word) or is_flag:
            continue
        if not equals:
            behind = [each for each in words[i + 1 : i + 2] if not each.startswith("-")]
            value = next(iter(behind), "...")
        key = flag.removeprefix("--").replace("-", "_")
        return f"{word}: options have no dashes; write {shlex.quote(f'{key}={value}')}"
    return None


def explain_error(command: str, words: list[str]) -> str | None:
    """Explain in one line what Hydra could not compose: the first choice or key that does not
    exist; None if it is something else.
    """
    from hydra.errors import HydraException

    groups = list_choices()
    try:
        overrides = parse_overrides(words)
        return explain_choice(overrides, groups) or explain_option(command, overrides, groups)
    except HydraException:
        return explain_unquoted(words)


def find_undecodable(words: Iterable[str]) -> str | None:
    """Return a message about the first file of a folder of configs that is not UTF-8, or None.

    words: of the command line, `--config-dir FOLDER` or `--config-dir=FOLDER` among them.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    options, _ = parser.parse_known_args(list(words))
    for folder in options.config_dir:
        for file in sorted(Path(folder).expanduser().rglob("*.yaml")):
            try:
                file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                return f"{file}: expected UTF-8 ({error}); save it in this encoding"
    return None


def explain_choice(overrides: Sequence["Override"], groups: Mapping[str, list[str]]) -> str | None:
    """The message for the first choice that does not exist, or None."""
    for override in overrides:
        group = override.key_or_group
        for name in override_values(override):
            if group in groups and name not in groups[group]:
                if group == "dataset" and name in FORMATS:
                    return f"no dataset {name!r}; {FORMATS[name]}"
                return unknown_name_message(group, name, groups[group])
    return None


def explain_option(
    command: str, overrides: Sequence["Override"], groups: Mapping[str, list[str]]
) -> str | None:
    """The message for the first key that is not in the config of these choices, or None."""
    import hydra

    choice_by_group = {}
    for override in overrides:
        if override.key_or_group in groups:
            choice_by_group[override.key_or_group] = override_values(override)[-1]
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = hydra.compose(
            command, [f"{group}={name}" for group, name in choice_by_group.items()]
        )
    keys = leaf_keys(config)
    for override in overrides:
        key = override.key_or_group
        if override.is_add() or key.partition(".")[0] == "hydra" or key in groups or key in keys:
            continue
        needs_dataset = "dataset._target_" in keys and choice_by_group.keys().isdisjoint(
            ("dataset", "experiment")
        )
        if needs_dataset and key.startswith("dataset."):
            return no_dataset_message()
        group = key.rpartition(".")[0]
        if group and select_value(config, group) == {}:
            return f"no key {key!r} in the config; to add an option to {group}, write +{key}=..."
        return unknown_key_message(key, [*groups, *keys])
    return None


def override_values(override: "Override") -> list[Any]:
    """The values of a key on the command line, several in a sweep."""
    if override.is_sweep_override():
        return [*override.sweep_string_iterator()]
    return [override.value()]


def list_choices() -> dict[str, list[str]]:
    """The names that each group of the command line has."""
    groups = {group: [*choices] for group, choices in registry.discover().items()}
    for group in OPTIONAL:
        groups[group].append("none")
    for group in ("experiment", "study"):
        groups[group] = sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))
    return groups


def no_dataset_message() -> str:
    """The message where no dataset was chosen, with those there are."""
    names = ", ".join(registry.discover()["dataset"])
    return (
        "dataset: expected one, got none; give dataset=synthetic for a first try, "
        f"experiment=..., or dataset=... of {names}"
    )


def explain_unquoted(words: Iterable[str]) -> str | None:
    """The first word that is no KEY=VALUE, or whose value Hydra reads in quotes alone, and how to
    write it; None if all are read, or for another reason.
    """
    for word in without_flags(words):
        if is_readable(word):
            continue
        fault = explain_quotes(word)
        if fault is not None:
            return fault
    return None


def explain_quotes(word: str) -> str | None:
    """Explain how to write a word that Hydra does not read; None if quotes do not help."""
    key, equals, value = word.partition("=")
    if not equals:
        example = "as in run=runs/first; quotes keep the spaces of a value: 'run=my runs/first'"
        return f"{word}: expected KEY=VALUE, {example}"
    is_list = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if is_list else value
    special = first_special_character(inner)
    if special is None or inner.startswith(("[", "{")):
        return None
    quoted = quote(value)
    if is_list:
        parts = [quote(part.strip()) for part in inner.split(",")]
        quoted = f"[{','.join(parts)}]"
    written = f"{key}={quoted}"
    if not is_readable(written):
        return None
    needs = f"Hydra reads a value with {special} in quotes alone"
    return f"{word}: {needs}; write {shlex.quote(written)}"


def first_special_character(value: str) -> str | None:
    """The first letter of a value, but for commas, that Hydra does not read within a word."""
    for letter in value:
        if letter != "," and not is_readable(f"x=a{letter}a"):
            return letter
    return None


def quote(value: str) -> str:
    """A value as Hydra reads it: in quotes if it needs them."""
    return value if is_readable(f"x={value}") else f'"{value}"'


def is_readable(word: str) -> bool:
    """Return whether Hydra's parser reads this word."""
    from hydra.errors import HydraException

    try:
        parse_overrides([word])
    except HydraException:
        return False
    return True


def leaf_keys(config: "DictConfig") -> list[str]:
    """The keys of a config of Hydra, those of its nodes with dots: ["steps", "head.deviation",
    ...].
    """
    from omegaconf import OmegaConf

    nested: Any = OmegaConf.to_container(config)
    return [*flatten(nested)]
