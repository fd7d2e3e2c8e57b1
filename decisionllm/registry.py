"""Choices of the command line by name: `head=bins` is a row of a table, see `choices.py`.

The core has a table, each neighbour has one in its folder, and an installed package names the
module of its own by the entry point group `decisionllm`. A class that is in no table is used by its
path: `head._target_=theirlab.heads.Flow`.
"""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
# folders with a table of their own; each may be deleted, with its choices
NEIGHBOURS = ("worlds", "teams", "bidding", "estimates")
# Groups of functions that the package looks up by name, see `function`; they are no options.
#   export: (target, store) writes a store in another format, `decisionllm data export=NAME:TARGET`;
#     with a parameter `env` it is given the config node of the environment, with `say` a function
#     that prints a line
#   raw_export: (target, dataset node, say) writes what a dataset's options name, without a store
#   final_observations: (store) -> (E, S), of a world whose stores do not keep them
#   estimator: (log, discount, seed) -> `protocols.Estimator`, of `decisionllm compare`
#   policy: (tensors, device) -> what acts, of a run that another command than `train` wrote
#   partner: (observations, infos) -> actions, dicts by agent, of env=pettingzoo
#   model: the subclass of `SequenceModel` that is trained with team.execution=NAME
#   sampler: (steps, store, episodes, options of a Sampler) -> its windows with team.execution=NAME
#   env_imports: (node of env=NAME) -> `trust.Import`s, what its options import
#   summary: (store) -> lines of the card of a store
#   minari_repair: (dataset of minari) -> `datasets.minari.MinariRepair`; None: of another world
FUNCTIONS = (
    "export",
    "raw_export",
    "final_observations",
    "estimator",
    "policy",
    "partner",
    "model",
    "sampler",
    "env_imports",
    "summary",
    "minari_repair",
)
Node = dict[str, Any]  # a config; of a choice, `_target_` and its options, see `choice`
Table = dict[str, dict[str, Node]]  # {group: {name: node}}


@cache
def discover() -> Table:
    """Return the choices: {group: {name: {"_target_": ..., option: default, ...}}}."""
    return {group: nodes for group, nodes in _read_tables().items() if group not in FUNCTIONS}


def function_targets(group: str) -> list[str]:
    """Return the paths of the functions of one of the groups FUNCTIONS; nothing is imported."""
    return [node["_target_"] for node in _read_tables().get(group, {}).values()]


def function_names(group: str) -> list[str]:
    """Return the names in one of the groups FUNCTIONS; nothing is imported."""
    return [*_read_tables().get(group, {})]


def find_function(group: str, name: str) -> Callable[..., Any] | None:
    """Import the function of this name in one of the groups FUNCTIONS; None if there is none."""
    node = _read_tables().get(group, {}).get(name)
    return None if node is None else _import_callable(node["_target_"])


def get_function(group: str, name: str, option: str) -> Callable[..., Any]:
    """Import the function of this name in one of the groups FUNCTIONS.

    Raises:
        ValueError: there is none; the message names the option that asks for it.
    """
    imported = find_function(group, name)
    if imported is None:
        names = ", ".join(function_names(group))
        raise ValueError(f"{option}={name}: expected one of {names}, got {name}")
    return imported


@cache
def _read_tables() -> Table:
    """Merge the tables of the core, of its neighbours and of installed packages."""
    merged: Table = {}
    packages = ["decisionllm"]
    for name in NEIGHBOURS:
        if (PACKAGE / name / "choices.py").is_file():
            packages.append(f"decisionllm.{name}")
    for package in packages:
        _add_table(merged, f"{package}.choices")
    for entry in entry_points(group="decisionllm"):
        try:
            _add_table(merged, entry.value)
        except (ValueError, SyntaxError, ImportError, OSError, AttributeError) as error:
            wrong = f"entry point decisionllm:{entry.name} ({entry.value}) is wrong ({error})"
            raise ValueError(f"{wrong}; mend or uninstall the package that has it") from error
    return merged


def _add_table(merged: Table, module: str) -> None:
    """Add the rows of the table `CHOICES` of a module, each with all options of its callable."""
    table: Table = import_module(module).CHOICES
    for group, rows in table.items():
        nodes = merged.setdefault(group, {})
        for name, row in rows.items():
            target = row["_target_"]
            if name in nodes:
                both = f"{nodes[name]['_target_']} and {target}"
                raise ValueError(f"{group}={name} is in two rows: {both}")
            options = read_options(target)
            unknown = sorted(row.keys() - options.keys() - {"_target_"})
            if unknown:
                raise ValueError(
                    f"{group}={name}: {target} has no option {', '.join(unknown)}; it has "
                    f"{', '.join(options) or 'none'}"
                )
            nodes[name] = {"_target_": target} | options | row


def read_options(target: str) -> Node:
    """Return the options of a function or class, {keyword-only parameter: default}; `???` where
    there is no default. Positional parameters are what the code supplies at run time.

    They are read from the source: an import would import torch, and `--help` would take seconds.
    """
    definition: ast.stmt | None = read_definition(target)
    if isinstance(definition, ast.ClassDef):
        methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
        definition = methods.get("__init__")
    if not isinstance(definition, ast.FunctionDef):
        return {}
    options: Node = {}
    parameters = definition.args
    for parameter, value in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
        options[parameter.arg] = "???" if value is None else ast.literal_eval(value)
    return options


def read_definition(target: str) -> ast.FunctionDef | ast.ClassDef:
    """Parse the function or class of a path, at the top level of a module that is not imported."""
    module, _, name = target.rpartition(".")
    for node in _parse_module(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"{target}: expected a function or class, {module} defines none")


def read_imports(module: str) -> dict[str, str]:
    """Return the names that a module imports by `from`, with their paths."""
    paths = {}
    for node in _parse_module(module).body:
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                paths[each.asname or each.name] = f"{node.module}.{each.name}"
    return paths


@cache
def _parse_module(module: str) -> ast.Module:
    """Parse the source of a module, which is not imported."""
    spec = find_spec(module)
    if spec is None or not spec.origin:
        raise ValueError(f"expected a module, {module} is not there")
    return ast.parse(Path(spec.origin).read_bytes())


def choice(group: str, name: str, /, **options: object) -> Node:
    """Return the config node of a choice, for Python: choice("dataset", "synthetic", episodes=40).

    Args:
        group: such as dataset, env, backbone or head.
        name: as in the tables.
        options: in place of its defaults. A Path becomes text: a config holds what JSON can hold.

    Raises:
        ValueError: no such choice, or it has no such option.
    """
    nodes = discover().get(group, {})
    if name not in nodes:
        raise ValueError(f"no {group} {name!r}; there are {', '.join(nodes) or 'none'}")
    node = nodes[name]
    unknown = sorted(options.keys() - node.keys())
    if unknown:
        raise ValueError(
            f"{group}={name}: no option {', '.join(unknown)}; there are {', '.join(node)}"
        )
    changes: Node = {}
    for key, value in options.items():
        changes[key] = str(value) if isinstance(value, Path) else value
    return node | changes


def no_choice() -> Node:
    """Return the config node of a group without a choice, such as env=none."""
    return {"_target_": "none"}


def is_none(node: Node) -> bool:
    """Return whether a group has no choice, as with env=none."""
    return node.get("_target_") == "none"


def build(node: Node, *supplied: object) -> Any:
    """Call the `_target_` of a config node with the supplied positional arguments and the node's
    options.

    An option that still refers to another one, such as "${text}", takes the default of the
    callable: a node made by `choice` is not part of a composed configuration.

    Raises:
        ValueError: there is no such callable, or an option is missing or unknown.
    """
    target = node["_target_"]
    options = {key: value for key, value in resolve_text(node).items() if key != "_target_"}
    missing = sorted(key for key, value in options.items() if value == "???")
    if missing:
        raise ValueError(f"{target}: give a value to {', '.join(missing)}")
    called = _import_callable(target)
    try:
        options = _drop_references(target, called, options)
        signature(called).bind(*supplied, **options)
    except TypeError as error:
        raise ValueError(f"{target}: {error}") from error
    return called(*supplied, **options)


def needs_text(node: Node, text: str | None) -> bool:
    """Return whether a dataset or an environment of a user's own is to be given the task text of a
    run, as those of the tables are: it is not `auto`, and the callable has this option and no other
    value of it.
    """
    if text in (None, "auto") or "text" in node:
        return False
    return has_option(node["_target_"], "text")


def resolve_text(node: Node) -> Node:
    """Return the config node of a dataset or an environment with the default of its callable in
    place of text=auto: `none` of our environments, `auto` of those that have texts of their own.
    """
    if node.get("text") != "auto":
        return node
    option = signature(_import_callable(node["_target_"])).parameters.get("text")
    if option is None or option.default is Parameter.empty:
        return node
    return node | {"text": option.default}


def has_option(target: str, option: str) -> bool:
    """Return whether a path names a callable with this option; a ValueError if it names nothing."""
    called = _import_callable(target)
    return callable(called) and option in signature(called).parameters


def has_return_type(target: str, kind: type) -> bool:
    """Return whether a path names a function that is annotated to return this class."""
    called = _import_callable(target)
    return callable(called) and signature(called).return_annotation in (kind, kind.__name__)


def fill_option_defaults(node: Node) -> Node:
    """Add the default of each option of its callable that a node lacks."""
    options = dict(node)
    for name, option in signature(_import_callable(node["_target_"])).parameters.items():
        if option.kind is Parameter.KEYWORD_ONLY and option.default is not Parameter.empty:
            options.setdefault(name, option.default)
    return options


def _import_callable(target: str) -> Callable[..., Any]:
    """Import the class or function of a path, such as `mylab.Flow`."""
    module_name, _, name = target.rpartition(".")
    if not module_name:
        raise ValueError(f"{name}: expected the path of a class or function, such as mylab.Flow")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # an optional package that the module imports
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{target}: {error}; PYTHONPATH=FOLDER says where it is") from error
    try:
        imported: Callable[..., Any] = getattr(module, name)
    except AttributeError as error:
        raise ValueError(f"{target}: {error}") from error
    return imported


def _drop_references(target: str, called: Callable[..., object], options: Node) -> Node:
    """Return the options without those whose value is an unresolved "${...}"; a ValueError if the
    callable has no default for one.
    """
    unresolved = [key for key, value in options.items() if is_reference(value)]
    if not unresolved:
        return options
    parameters = signature(called).parameters
    missing = [
        key
        for key in unresolved
        if key in parameters and parameters[key].default is Parameter.empty
    ]
    if missing:
        raise ValueError(f"{target}: give a value to {', '.join(sorted(missing))}")
    return {key: value for key, value in options.items() if key not in unresolved}


def is_reference(value: object) -> bool:
    """Return whether the value of an option refers to another option, such as "${text}"."""
    return isinstance(value, str) and value.startswith("${") and value.endswith("}")
