"""Imports only go down a floor, or stay in their own folder: read from the syntax trees, nothing is
run.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "decisionllm"
FLOORS = (
    {"schema", "registry", "files", "checks", "randomness"},
    {"config", "protocols", "distributed", "hardware", "sweep", "progress", "hub"},
    {"trust", "executors", "option_docs"},
    {"command_line"},
    {"help"},
    {"tokenizers"},
    {"datasets", "backbones"},
    {"baselines"},
    {"models"},
    {"runs"},
    {"policy"},
    {"eval"},
    {"commands"},
    {"worlds", "teams", "estimates", "export"},
    {"bidding", "scaling"},
    {"__init__", "__main__", "choices"},
)
# imported where they are used
OPTIONAL = {
    "d3rlpy",
    "d4rl",
    "minari",
    "minigrid",
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
    "opentelemetry",
}
# only serve imports them
HTTP = {
    f"decisionllm.bidding.server.{name}"
    for name in (
        "access",
        "answers",
        "app",
        "bidding",
        "campaign_routes",
        "direct",
        "exchange",
        "metrics",
        "middleware",
        "model_routes",
        "openrtb",
        "otel",
        "policy_routes",
        "protocol",
        "schemas",
    )
}
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
            yield from (
                [f"decisionllm.{alias.name}" for alias in node.names] if here else [node.module]
            )


def of(path):
    return ".".join(("decisionllm", *path.relative_to(PACKAGE).with_suffix("").parts))


def test_imports_only_go_down():
    wrong = []
    for path in FILES:
        here = room(of(path))
        if floor(here) is None:
            wrong.append(f"{here} has no floor")
            continue
        for module in imports(ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
            if (
                not module.startswith("decisionllm.")
                or module == "decisionllm.__version__"
                or room(module) == here
            ):
                continue
            below = floor(room(module))
            if below is None:
                wrong.append(f"{module} has no floor")
            elif below >= floor(here):
                wrong.append(f"{of(path)} imports {module}, which is not below it")
    assert not wrong, "\n".join(wrong)


def test_dotted_paths_in_strings_only_point_down():
    wrong = []
    for path in FILES:
        here = room(of(path))
        constants = (
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant)
        )
        for text in constants:
            if not isinstance(text, str) or not re.fullmatch(r"decisionllm(?:\.\w+)+", text):
                continue
            if room(text) != here and floor(room(text)) >= floor(here):
                wrong.append(f"{of(path)} names {text}, which is not below it")
    assert not wrong, "\n".join(wrong)


def test_optional_packages_are_imported_where_they_are_used():
    wrong = []
    for path in FILES:
        modules = set(imports(ast.parse(path.read_text(encoding="utf-8")).body))
        packages = ({module.split(".")[0] for module in modules} & OPTIONAL) | (modules & HTTP)
        if of(path) not in HTTP and packages:
            wrong.append(f"{of(path)} imports {', '.join(sorted(packages))} at its head")
    assert not wrong, "\n".join(wrong)


def test_the_ground_floor_stands_on_torch_and_numpy_alone():
    import sys

    for name in FLOORS[0]:
        packages = {
            module.split(".")[0]
            for module in imports(
                ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8")))
            )
        }
        assert packages <= {"torch", "numpy", "einops"} | sys.stdlib_module_names


def lacks_encoding(call):
    """Return whether a call opens text in the encoding of the locale; a mode that is not a literal
    is left out.
    """
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    of_files = {"mode", "buffering", "errors", "newline"}
    if name not in ("open", "read_text", "write_text") or not keywords.keys() <= of_files:
        return False
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return len(call.args) == 1
    place = 1 if isinstance(call.func, ast.Name) else 0
    default = call.args[place] if len(call.args) > place else ast.Constant("r")
    mode = ast.unparse(keywords.get("mode", default)).strip("'\"")
    return bool(re.fullmatch("[rwaxt+]+", mode))


def test_text_is_opened_in_an_encoding_that_is_named():
    # ruff's rule PLW1514 sees paths only where it can infer their type
    root = PACKAGE.parent
    wrong = []
    for folder in ("decisionllm", "tests", "benchmarks", "examples", "docs", "lab"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and lacks_encoding(node):
                    wrong.append(f"{path.relative_to(root)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
