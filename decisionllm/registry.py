"""@register and discover: the one extension mechanism. The decorator is read, not run, so that
`--help` imports no torch.

`@register("head", "bins", num_bins=64)` in a module of a searched folder files the callable below
it in Hydra's ConfigStore: its keyword-only parameters become the config keys and their defaults the
values; its positional parameters are what the code supplies at run time. Another package registers
its modules by the entry point group `decisionllm`. A class that is registered nowhere is used by
its path: `head._target_=theirlab.heads.Flow`.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

PACKAGE = Path(__file__).parent
SEARCHED = (
    "backbones/*.py",
    "baselines/*.py",
    "datasets/*.py",
    "eval/*.py",
    "models/heads.py",
    "models/imagined.py",
    "models/inverse_dynamics.py",
    "models/landmarks.py",
    "models/objectives/*.py",
    "models/sequence.py",
    "policy/imagined.py",
    "tokenizers/trajectory.py",
    "worlds/*/*.py",
    "teams/*.py",
    "teams/*/*.py",
    "bidding/*.py",
    "estimates/*.py",
    "export/*.py",
)
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
Thing = TypeVar("Thing")
Node = dict[str, Any]  # a config; of a registered choice, `_target_` and its options, see `choice`


def register(group: str, name: str, /, **defaults: object) -> Callable[[Thing], Thing]:
    """Mark a function or class as the choice `group=name`, with these defaults in place of its
    signature's.
    """
    return lambda thing: thing


@cache
def discover() -> dict[str, dict[str, Node]]:
    """The registered choices: {group: {name: {"_target_": ..., key: default, ...}}}."""
    return {group: made for group, made in _registered().items() if group not in FUNCTIONS}


def function_targets(group: str) -> list[str]:
    """The paths of the functions of one of the groups FUNCTIONS; nothing is imported."""
    return [node["_target_"] for node in _registered().get(group, {}).values()]


def function_names(group: str) -> list[str]:
    """The names in one of the groups FUNCTIONS; nothing is imported."""
    return [*_registered().get(group, {})]


def function(group: str, name: str) -> Callable[..., Any] | None:
    """The function of this name in one of the groups FUNCTIONS; None: there is none."""
    node = _registered().get(group, {}).get(name)
    if node is None:
        return None
    module, _, attribute = node["_target_"].rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found


def required_function(group: str, name: str, option: str) -> Callable[..., Any]:
    """Return the function of this name in one of the groups FUNCTIONS.

    Raises:
        ValueError: there is none; the message names the option that asks for it.
    """
    found = function(group, name)
    if found is None:
        names = ", ".join(function_names(group))
        raise ValueError(f"{option}={name}: expected one of {names}, got {name}")
    return found


@cache
def _registered() -> dict[str, dict[str, Node]]:
    """All that `register` marks, as `discover` returns it."""
    found: dict[str, dict[str, Node]] = {}
    for module, path in _own_modules():
        _add_marked(found, module, path)
    for entry in entry_points(group="decisionllm"):
        try:
            spec = find_spec(entry.value)
            if spec is None or not spec.origin:
                raise ValueError(f"expected a module, {entry.value} is not there")
            _add_marked(found, entry.value, Path(spec.origin))
        except (ValueError, SyntaxError, ImportError, OSError) as error:
            wrong = f"entry point decisionllm:{entry.name} ({entry.value}) is wrong ({error})"
            raise ValueError(f"{wrong}; mend or uninstall the package that has it") from error
    return found


def _add_marked(found: dict[str, dict[str, Node]], module: str, path: Path) -> None:
    """Add what `register` marks in the file of a module."""
    for node in ast.parse(path.read_bytes()).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for mark in _marks(node):
            group, name = (ast.literal_eval(a) for a in mark.args)
            defaults = {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}
            made = _choice(f"{module}.{node.name}", node, defaults)
            taken = found.setdefault(group, {}).setdefault(name, made)
            if taken is not made:
                both = f"{taken['_target_']} and {made['_target_']}"
                raise ValueError(f"{group}={name} is registered twice: by {both}")


def _marks(node: ast.FunctionDef | ast.ClassDef) -> Iterator[ast.Call]:
    """The decorators `@register(...)` of a function or class."""
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "register":
            yield mark


def _own_modules() -> Iterator[tuple[str, Path]]:
    """(name, file) of the modules of the package that are searched, the core's first."""
    files: list[Path] = []
    for pattern in SEARCHED:
        files += sorted(PACKAGE.glob(pattern))
    for path in files:
        name = path.relative_to(PACKAGE.parent).with_suffix("")
        yield ".".join(name.parts), path


def _choice(target: str, node: ast.FunctionDef | ast.ClassDef, defaults: Node) -> Node:
    """The config node of a registered function or class. An option without a default is `???`."""
    options: Node = {}
    for called in _called(node):
        for parameter, value in zip(called.args.kwonlyargs, called.args.kw_defaults, strict=True):
            options[parameter.arg] = "???" if value is None else ast.literal_eval(value)
    unknown = sorted(defaults.keys() - options.keys())
    if unknown:
        raise ValueError(
            f"@register of {target}: no option {', '.join(unknown)}; it has "
            f"{', '.join(options) or 'none'}"
        )
    return {"_target_": target, **options, **defaults}


def _called(node: ast.FunctionDef | ast.ClassDef) -> list[ast.FunctionDef]:
    """The function whose parameters are the options: itself, or the constructor of a class, if it
    has its own.
    """
    if isinstance(node, ast.FunctionDef):
        return [node]
    methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
    return [method for method in methods if method.name == "__init__"]


def choice(group: str, name: str, /, **options: object) -> Node:
    """The config node of a registered choice, for Python: choice("dataset", "synthetic",
    episodes=40).

    Args:
        group: such as dataset, env, backbone or head.
        name: as registered.
        options: in place of its defaults. A Path becomes text: a config holds what JSON can hold.

    Raises:
        ValueError: no such choice, or it has no such option.
    """
    known = discover().get(group, {})
    if name not in known:
        raise ValueError(f"no {group} {name!r}; there are {', '.join(known) or 'none'}")
    node = known[name]
    unknown = sorted(options.keys() - node.keys())
    if unknown:
        raise ValueError(
            f"{group}={name}: no option {', '.join(unknown)}; there are {', '.join(node)}"
        )
    given: Node = {}
    for key, value in options.items():
        given[key] = str(value) if isinstance(value, Path) else value
    return node | given


def no_choice() -> Node:
    """The config node of a group without a choice, such as env=none."""
    return {"_target_": "none"}


def is_none(node: Node) -> bool:
    """Whether a group has no choice, as with env=none."""
    return node.get("_target_") == "none"


def build(node: Node, *supplied: object) -> Any:
    """Call what a config node names: `_target_` with the supplied positional arguments and the
    node's keys.

    An option that still refers to another one, such as "${text}", takes the default of the
    callable: a node made by `choice` is not part of a composed configuration.

    Raises:
        ValueError: there is no such callable, or an option is missing or unknown.
    """
    target = node["_target_"]
    options = {key: value for key, value in node.items() if key != "_target_"}
    missing = sorted(key for key, value in options.items() if value == "???")
    if missing:
        raise ValueError(f"{target}: give a value to {', '.join(missing)}")
    thing = _named(target)
    try:
        options = _without_references(target, thing, options)
        signature(thing).bind(*supplied, **options)
    except TypeError as error:
        raise ValueError(f"{target}: {error}") from error
    return thing(*supplied, **options)


def lacks_text(node: Node, text: str | None) -> bool:
    """Whether a dataset or an environment of a user's own is to be given the task text of a run, as
    registered ones are: if there is one, and the callable has this option and no other value of it.
    """
    if text in (None, "none") or "text" in node:
        return False
    return takes(node["_target_"], "text")


def takes(target: str, option: str) -> bool:
    """Whether what a path names is a callable with this option; a ValueError if there is nothing of
    this name.
    """
    thing = _named(target)
    return callable(thing) and option in signature(thing).parameters


def with_option_defaults(node: Node) -> Node:
    """A node with the default of each option of its callable that it lacks, which `build` takes."""
    found = dict(node)
    for name, option in signature(_named(node["_target_"])).parameters.items():
        if option.kind is Parameter.KEYWORD_ONLY and option.default is not Parameter.empty:
            found.setdefault(name, option.default)
    return found


def _named(target: str) -> Callable[..., Any]:
    """The class or function of a path, such as `mylab.Flow`."""
    path, _, name = target.rpartition(".")
    if not path:
        raise ValueError(f"{name}: expected the path of a class or function, such as mylab.Flow")
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        # an optional package that the module imports
        if not f"{path}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{target}: {error}; PYTHONPATH=FOLDER says where it is") from error
    try:
        thing: Callable[..., Any] = getattr(module, name)
    except AttributeError as error:
        raise ValueError(f"{target}: {error}") from error
    return thing


def _without_references(target: str, thing: Callable[..., object], options: Node) -> Node:
    """The options without those whose value is an unresolved "${...}"; a ValueError if the callable
    has no default for one.
    """
    unresolved = [key for key, value in options.items() if is_reference(value)]
    if not unresolved:
        return options
    parameters = signature(thing).parameters
    missing = [
        key
        for key in unresolved
        if key in parameters and parameters[key].default is Parameter.empty
    ]
    if missing:
        raise ValueError(f"{target}: give a value to {', '.join(sorted(missing))}")
    return {key: value for key, value in options.items() if key not in unresolved}


def is_reference(value: object) -> bool:
    """Whether the value of an option refers to another option, such as "${text}"."""
    return isinstance(value, str) and value.startswith("${") and value.endswith("}")
