"""Imports only go down a floor, or stay in their own folder: read from the syntax trees, nothing is run."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "decisionllm"
FLOORS = (
    {"schema", "registry", "files"},
    {"config", "protocols", "distributed", "sweep"},
    {"tokenizers", "envs"},
    {"baselines"},
    {"datasets", "backbones"},
    {"models"},
    {"policy"},
    {"eval", "serving"},
    {"train", "baseline", "evaluate", "serve", "export", "backup"},
    {"scaling"},  # trains and evaluates
    {"data", "scale"},
    {"__init__", "__main__"},
)
OPTIONAL = {
    "d3rlpy",
    "d4rl",
    "minari",
    "pyarrow",
    "tensorstore",
    "pettingzoo",
    "mpe2",
    "jax",
    "jaxmarl",
    "gymnasium_robotics",
    "mujoco",
    "ray",
    "submitit",
    "fastapi",
    "uvicorn",
    "pydantic",
    "starlette",
    "prometheus_client",
    "wandb",
    "httpx",
    "gguf",
    "onnx",
    "onnxscript",
    "onnxruntime",
}  # imported where they are used
HTTP = {
    f"decisionllm.serving.{name}" for name in ("app", "direct", "metrics", "middleware", "openrtb", "protocol", "schemas")
}  # only serve imports them
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module):
    """decisionllm.datasets.store -> datasets"""
    return module.split(".")[1]


def floor(name):
    return next((i for i, names in enumerate(FLOORS) if name in names), None)


def imports(nodes):
    """The modules that these import statements name, in full."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            here = node.module == "decisionllm"
            yield from ([f"decisionllm.{alias.name}" for alias in node.names] if here else [node.module])


def of(path):
    return ".".join(("decisionllm", *path.relative_to(PACKAGE).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=of)
def test_imports_only_go_down(path):
    here = room(of(path))
    assert floor(here) is not None, f"{here} has no floor"
    for module in imports(ast.walk(ast.parse(path.read_text()))):
        if module.startswith("decisionllm.") and module != "decisionllm.__version__" and room(module) != here:
            assert floor(room(module)) is not None, f"{module} has no floor"
            assert floor(room(module)) < floor(here), f"{of(path)} imports {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=of)
def test_dotted_paths_in_strings_only_point_down(path):
    here = room(of(path))
    strings = (
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    for module in (word for text in strings for word in re.findall(r"^decisionllm(?:\.\w+)+$", text)):
        assert room(module) == here or floor(room(module)) < floor(here), f"{of(path)} names {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=of)
def test_optional_packages_are_imported_where_they_are_used(path):
    modules = set(imports(ast.parse(path.read_text()).body))
    if of(path) not in HTTP:
        assert not {module.split(".")[0] for module in modules} & OPTIONAL and not modules & HTTP


def test_the_ground_floor_stands_on_torch_and_numpy_alone():
    import sys

    for name in FLOORS[0]:
        found = {module.split(".")[0] for module in imports(ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())))}
        assert found <= {"torch", "numpy", "einops"} | sys.stdlib_module_names
