"""@register and discover: the one extension mechanism. The decorator is read, not run, so that `--help` imports no torch.

`@register("head", "bins", num_bins=64)` in a module of a searched folder files the callable below it in Hydra's ConfigStore:
its keyword-only parameters become the config keys and their defaults the values; its positional parameters are what the
code supplies at run time. Somebody else's class needs no registration: `head._target_=theirlab.heads.Flow`.
"""

import ast
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path

PACKAGE = Path(__file__).parent
SEARCHED = ("datasets/*.py", "eval/*.py", "backbones/*.py", "models/heads.py")


def register(group, name, **defaults):
    """Mark a function or class as the choice `group=name`, with these defaults in place of its signature's."""
    return lambda thing: thing


@cache
def discover():
    """Everything registered: {group: {name: {"_target_": ..., key: default, ...}}}."""
    found = {}
    for path in sorted(path for pattern in SEARCHED for path in PACKAGE.glob(pattern)):
        module = ".".join(("decisionllm", *path.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and getattr(mark.func, "id", None) == "register":
                    group, name = (ast.literal_eval(a) for a in mark.args)
                    choice = _choice(f"{module}.{node.name}", node, {k.arg: ast.literal_eval(k.value) for k in mark.keywords})
                    taken = found.setdefault(group, {}).setdefault(name, choice)
                    if taken is not choice:
                        raise ValueError(f"{group}={name} is registered twice: by {taken['_target_']} and {choice['_target_']}")
    return found


def _choice(target, node, defaults):
    function = (
        node
        if isinstance(node, ast.FunctionDef)
        else next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    )
    names = [a.arg for a in function.args.kwonlyargs] if function else []
    options = dict(zip(names, function.args.kw_defaults, strict=True)) if function else {}
    unknown = sorted(set(defaults) - set(names))
    if unknown:
        raise ValueError(f"@register of {target}: no option {', '.join(unknown)}; it has {', '.join(names) or 'none'}")
    values = {name: "???" if node is None else ast.literal_eval(node) for name, node in options.items()}
    return {"_target_": target, **values, **defaults}


def build(choice, *supplied):
    """Call what a config node names: `_target_` with the supplied positional arguments and the node's keys."""
    module, _, name = choice["_target_"].rpartition(".")
    options = {key: value for key, value in choice.items() if key != "_target_"}
    missing = sorted(key for key, value in options.items() if value == "???")
    if missing:
        raise ValueError(f"{choice['_target_']}: give a value to {', '.join(missing)}")
    module = import_module(module)
    try:
        thing = getattr(module, name)
        signature(thing).bind(*supplied, **options)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{choice['_target_']}: {error}") from error
    return thing(*supplied, **options)
