"""Meanings of options, read from the one place where each stands: the comment at a field of
`config.py`, the docstring of a choice's callable, or the comment in configs/COMMAND.yaml.

Everything is read as source text: an import of the callables would import torch.
"""

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from decisionllm import config, registry
from decisionllm.checks import split_list

# of an option that means what another callable's option of its name does: "see `build_backbone`."
REFERENCE = re.compile(r"see `(?P<path>[\w.]+)`(?P<more>.*)")
YAML_KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?P<value>.*?)(?: # (?P<comment>.*))?")


def training_meanings() -> dict[str, str]:
    """Return the meaning of each option of `TrainConfig`, in its order: {"optim.lr": "peak ..."}."""
    return _class_meanings(config.TrainConfig, "")


def _class_meanings(options_class: type, prefix: str) -> dict[str, str]:
    """Return the meanings of a dataclass's fields: the comment on their line, or above it."""
    source = inspect.getsource(options_class)
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    line_by_field: dict[str, tuple[int, str]] = {}  # index of its first line; its last line's end
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rest = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
            line_by_field[node.target.id] = (node.lineno - 1, rest)
    meanings: dict[str, str] = {}
    for each in fields(options_class):
        if isinstance(each.default_factory, type) and is_dataclass(each.default_factory):
            meanings |= _class_meanings(each.default_factory, f"{prefix}{each.name}.")
            continue
        line, rest = line_by_field[each.name]
        comment = rest.partition("# ")[2]
        if not comment or comment.startswith("type: ignore"):
            comment = _comment_above(lines, line)
        meanings[prefix + each.name] = comment
    return meanings


def _comment_above(lines: Sequence[str], line: int) -> str:
    """Join the lines of the comment that ends above a line."""
    comments: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("# "):
        line -= 1
        comments.insert(0, lines[line].strip().removeprefix("# "))
    return " ".join(comments)


def command_meanings(source: str) -> dict[str, str]:
    """Return the meanings of the options of a command, by their keys: {"act.decode": "mode, mean"}.

    source: of its YAML file, whose comments are the meanings. A key without a comment means what
        the option of `train` with this name does.
    """
    meanings = training_meanings()
    parents: list[str] = []
    for line in source.splitlines():
        match = YAML_KEY.fullmatch(line)
        if not match:
            continue
        depth = len(match["indent"]) // 2
        parents = [*parents[:depth], match["key"]]
        keys = [".".join(parents)]
        inline = re.fullmatch(r"\{(.+)\}", match["value"].strip())
        if inline:
            keys = [f"{keys[0]}.{pair.partition(':')[0]}" for pair in split_list(inline[1])]
        for key in keys:
            meanings[key] = match["comment"] or meanings.get(key, "")
    return meanings


def choice_meanings(target: str) -> dict[str, str]:
    """Return the meaning of each option of a function or class by its path; "" for one that its
    docstring does not explain.
    """
    explained = _arguments(target)
    meanings = {}
    for name in registry.read_options(target):
        meanings[name] = explained.get(name, "").removesuffix(".")
    return meanings


def format_value(value: Any) -> str:
    """Format a default as one writes it on the command line; a reference as the option it names."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    for resolver in (
        r"policy_name:\$\{hydra:runtime\.choices\.(\w+)\}",
        r"hydra:runtime\.choices\.(\w+)",
    ):
        value = re.sub(rf"\$\{{{resolver}\}}", r"${\1}", str(value))
    return re.sub(r"^\$\{oc\.select:([\w.]+),.*\}$", r"${\1}", value) or '""'


@cache
def _arguments(target: str) -> Mapping[str, str]:
    """Return the entries of the section `Args` of a docstring, references to others resolved."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", _docstring(target) + "\n", re.M)
    if section is None:
        return {}
    meanings = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section[1]):
        names, _, text = " ".join(entry.split()).partition(": ")
        for name in split_list(names):
            meanings[name] = _resolve_reference(text, name, target)
    return meanings


def _resolve_reference(text: str, name: str, target: str) -> str:
    """Replace "see `other`" by the meaning of the option of this name there, if it has one."""
    reference = REFERENCE.fullmatch(text)
    if reference is None:
        return text
    module = target.rpartition(".")[0]
    first, dot, rest = reference["path"].partition(".")
    path = registry.read_imports(module).get(first, f"{module}.{first}") + dot + rest
    meaning = _arguments(path).get(name, "")
    return meaning.removesuffix(".") + reference["more"] if meaning else text


def _docstring(target: str) -> str:
    definition: Any = registry.read_definition(target)
    return ast.get_docstring(definition) or ""
