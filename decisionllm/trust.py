"""Decide what a config that was read from disk may import.

A run's config names callables by `_target_`, and to import their modules is to execute them. A
config from disk may name registered choices, what the user's own config names, and what is in
modules that the user trusts by the option `trust`. Everything else is refused before any import.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from decisionllm import registry
from decisionllm.config import default_options

# entry point of an exported environment, whose argument `env` is a config node
EXPORTED = "decisionllm.eval.minari_export:Single"
# "${text}", which OmegaConf replaces by another value of the same config; other forms compute
# values, and may make nodes that no check has seen
REFERENCE = re.compile(r"\$\{[\w.]+\}")
MOST_NAMED = 4  # imports that a message names
Result = TypeVar("Result")


@dataclass(frozen=True)
class Trust:
    """Imports that a config from disk may make beside registered choices.

    Attributes:
        modules: with all that is in them and below them.
        typed: texts of the user's own config.
    """

    modules: frozenset[str] = frozenset()
    typed: frozenset[str] = frozenset()

    def covers(self, named: "Import") -> bool:
        if named.text in self.typed:
            return True
        return any(named.name == m or named.name.startswith(f"{m}.") for m in self.modules)


NOTHING_TRUSTED = Trust()
TRUST: ContextVar[Trust] = ContextVar("trust", default=NOTHING_TRUSTED)


class Import(NamedTuple):
    """An option of a config by which a module is imported."""

    option: str  # such as env.id
    text: str  # its value, such as mylab:Pump-v0
    name: str  # of the callable or module, such as mylab

    def describe(self) -> str:
        named = "" if self.name in self.text else f" ({self.name})"
        return f"{self.option}={self.text}{named}"


@contextmanager
def trust_modules(modules: Iterable[str] = (), *, typed: object = None) -> Iterator[None]:
    """Trust these modules within the block, beside those that are trusted already.

    Args:
        modules: such as `mylab`, which covers `mylab.heads`.
        typed: the user's own config; what it names is trusted too.

    Raises:
        ValueError: a module is no text.
    """
    names = [modules] if isinstance(modules, str) else list(modules)
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"trust: expected names of modules, such as [mylab], got {name!r}")
    texts = [value for _, value in walk_values(typed) if isinstance(value, str)]
    before = TRUST.get()
    token = TRUST.set(Trust(before.modules.union(names), before.typed.union(texts)))
    try:
        yield
    finally:
        TRUST.reset(token)


def trust_user_modules(command: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Make a command trust the modules of its option `trust`, and what its config names."""

    @wraps(command)
    def run(config: Any) -> Result:
        is_record = is_dataclass(config) and not isinstance(config, type)
        options = asdict(config) if is_record else config
        with trust_modules(options.get("trust") or (), typed=options):
            return command(config)

    return run


def is_typed(text: str) -> bool:
    """Return whether the user's own config has this text, or a config from disk alone."""
    return text in TRUST.get().typed


def check_config(config: object, where: object) -> None:
    """Raise a ValueError if a config from disk would import what is not trusted, or if a value of
    it would be computed by OmegaConf. where: its file, for the message.
    """
    check_imports(find_imports(config), where)
    for option, value in walk_values(config):
        if isinstance(value, str) and "${" in value and not is_plain_reference(value):
            raise ValueError(
                f"{where}: expected resolved values, got {option}={value!r}, which OmegaConf would "
                "compute; write the value itself"
            )


def check_nodes(content: object, where: object) -> None:
    """Raise a ValueError if config nodes within a JSON value would import what is not trusted."""
    check_imports(find_imports(content), where)


def check_imports(named: Iterable[Import], where: object) -> None:
    """Raise a ValueError that names those of these imports that are not trusted. where: the file
    that names them.
    """
    trust = TRUST.get()
    refused = [each for each in named if not trust.covers(each)]
    if not refused:
        return
    shown = [each.describe() for each in refused[:MOST_NAMED]]
    more = " ..." * (len(refused) > MOST_NAMED)
    if any(is_of_another_version(each.name) for each in refused):
        raise ValueError(
            f"{where}: expected modules of this version of decisionllm, got {', '.join(shown)}{more}; "
            "train again, or replace them by their names in CHANGELOG.md"
        )
    modules = ",".join(sorted({module_to_trust(each.name) for each in refused}))
    raise ValueError(
        f"{where}: expected registered choices, got {', '.join(shown)}{more}, whose code would be "
        f"executed; if you trust its author, add trust=[{modules}] to the command, or to "
        "decisionllm.load"
    )


def is_of_another_version(name: str) -> bool:
    """Return whether a dotted path names a module of this package that is not there."""
    package, *parts = name.split(".")
    place = registry.PACKAGE
    for part in parts:
        if not (place / part).is_dir():
            return package == "decisionllm" and not (place / f"{part}.py").is_file()
        place = place / part
    return False


def module_to_trust(name: str) -> str:
    """The module that covers a name: its package, and of this package the name itself."""
    package = name.partition(".")[0]
    return name if package == "decisionllm" else package


def find_imports(content: object) -> Iterator[Import]:
    """Yield the imports that the nodes within a value would make, but for registered choices."""
    for at, node in walk_values(content):
        if not isinstance(node, dict) or "_target_" not in node:
            continue
        target = node["_target_"]
        prefix = f"{at}." if at else ""
        if not isinstance(target, str):
            yield Import(f"{prefix}_target_", repr(target), repr(target))
        elif target not in registered_targets() and not registry.is_none(node):
            yield Import(f"{prefix}_target_", target, target)
        elif target in imports_by_target():
            for option, text, name in imports_by_target()[target](node):
                yield Import(prefix + option, text, name)


def walk_values(content: object) -> Iterator[tuple[str, object]]:
    """(its path with dots, value) of each value within nested dicts and lists, each container once."""
    stack: list[tuple[str, object]] = [("", content)]
    seen: set[int] = set()  # a YAML file may hold a list that contains itself
    while stack:
        at, value = stack.pop()
        yield at, value
        if not isinstance(value, dict | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [(f"{at}.{key}" if at else str(key), each) for key, each in items]
        stack += reversed(inner)


@cache
def registered_targets() -> frozenset[str]:
    """The `_target_` of every registered choice, and of every kind of `policy`."""
    targets = registry.function_targets("policy")
    for choices in registry.discover().values():
        targets += [node["_target_"] for node in choices.values()]
    return frozenset(targets)


def is_plain_reference(value: str) -> bool:
    """Return whether a text with "${" refers to another option, or is the default of a registered one."""
    return bool(REFERENCE.fullmatch(value)) or value in default_texts()


@cache
def default_texts() -> frozenset[str]:
    """The texts among the default options of `train` and of registered choices."""
    defaults = walk_values([registry.discover(), default_options()])
    return frozenset(value for _, value in defaults if isinstance(value, str))


# -- options of registered choices that name a module --


def gymnasium_imports(node: registry.Node) -> Iterator[Import]:
    """Yield the imports of `gymnasium.make`: an id mylab:Pump-v0 imports mylab. GymV21Environment
    and GymV26Environment take another such id as an argument.
    """
    arguments = node.get("arguments")
    texts = {"id": node.get("id")}
    if isinstance(arguments, dict):
        texts["arguments.env_id"] = arguments.get("env_id")
    for option, text in texts.items():
        module, colon, _ = str(text).partition(":")
        if colon:
            yield Import(option, str(text), module)


def minari_env_imports(node: registry.Node) -> Iterator[Import]:
    """Yield the entry points of the environment that a Minari dataset describes."""
    id, metadata = minari_metadata(node)
    spec = metadata.get("eval_env_spec") or metadata.get("env_spec")
    yield from entry_point_imports(id, spec)


def minari_data_imports(node: registry.Node) -> Iterator[Import]:
    """Yield the imports of a Minari dataset without its spaces: Minari makes its environment to ask
    for them.
    """
    id, metadata = minari_metadata(node)
    if not {"observation_space", "action_space"} <= metadata.keys():
        yield from entry_point_imports(id, metadata.get("env_spec"))


def minari_metadata(node: registry.Node) -> tuple[str, dict[str, Any]]:
    """The id of a Minari dataset, and what it says of itself; {} if it is not there or damaged."""
    id = str(node.get("minari_id"))
    root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
    folder = Path(id).expanduser()
    if not folder.is_dir():
        folder = Path(root).expanduser() / local_minari_id(id)
    with suppress(OSError, ValueError):
        metadata = json.loads((folder / "data" / "metadata.json").read_text(encoding="utf-8"))
        if isinstance(metadata, dict):
            return id, metadata
    return id, {}


def local_minari_id(minari_id: str) -> str:
    """Return the id that a download of `hf://OWNER/ID` has on this machine; of another id itself."""
    return re.sub(r"^\w+://[^/]+/", "", minari_id)


def entry_point_imports(minari_id: str, spec: object) -> Iterator[Import]:
    """The entry points of an environment's spec (JSON) and of its wrappers, but for those that an
    installed package has registered with Gymnasium; and what the config nodes among its arguments
    import, as an export of this package has one.
    """
    with suppress(ValueError):
        described = json.loads(str(spec))
        for named in find_imports(described):
            yield Import("minari_id", minari_id, named.name)
        nodes = [node for _, node in walk_values(described) if isinstance(node, dict)]
        for text in [node["entry_point"] for node in nodes if node.get("entry_point")]:
            if not is_registered_entry_point(str(text)):
                yield Import("minari_id", minari_id, str(text).replace(":", "."))
        for node in nodes:
            module, colon, _ = str(node.get("env_id")).partition(":")
            if colon:
                yield Import("minari_id", minari_id, module)


def is_registered_entry_point(text: str) -> bool:
    """Return whether an entry point is in Gymnasium's registry, to which Gymnasium-Robotics adds its own
    when it is imported; or a wrapper of Gymnasium's own; or the environment that exports name.
    """
    import gymnasium

    if text == EXPORTED:
        return True

    if text.startswith("gymnasium_robotics."):
        with suppress(ImportError):
            import_module("gymnasium_robotics")
    module, _, name = text.partition(":")
    if f"{module}.".startswith("gymnasium.wrappers.") and name in gymnasium.wrappers.__all__:
        return True
    return any(spec.entry_point == text for spec in gymnasium.registry.values())


@cache
def imports_by_target() -> dict[str, Callable[[registry.Node], Iterator[Import]]]:
    """Return the functions that find what the options of a node import, by its `_target_`."""
    choices = registry.discover()
    functions: dict[str, Callable[[registry.Node], Iterator[Import]]] = {
        choices["env"]["gymnasium"]["_target_"]: gymnasium_imports,
        choices["env"]["minari"]["_target_"]: minari_env_imports,
        choices["dataset"]["minari"]["_target_"]: minari_data_imports,
    }
    for name in registry.function_names("env_imports"):
        target = choices["env"][name]["_target_"]
        functions[target] = registry.get_function("env_imports", name, "env")
    return functions
