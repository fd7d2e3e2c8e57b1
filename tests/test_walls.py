"""Each neighbour of the core can be taken away.

In a copy of the tree without the neighbour's folder, its tests, and the experiments and studies, the
core reads data, trains, rolls out and writes a report. Without all six neighbours, all files of the
core's tests are imported, and those in SELECTED are run. All quick tests of the core would take
minutes, and would find no more than a name that is imported in a function.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NEEDS, NEIGHBOURS

ROOT = Path(__file__).parents[1]
# about files of the whole repository, so that they need every neighbour
OF_THE_REPOSITORY = {
    "test_benchmarks.py",
    "test_configs.py",
    "test_docs.py",
    "test_examples.py",
    "test_lab.py",
    "test_pictures.py",
    "test_readme.py",
    "test_walls.py",
}
SELECTED = "contracts and (test_core or synthetic or arrays or tested)"


# runs pytest in each folder with its words; what both import from elsewhere is imported once
RUN = """
import json, os, sys
import accelerate, hydra.utils, matplotlib.pyplot, pytest, scipy.stats
from transformers import AutoModel, GPT2Model, PreTrainedTokenizerFast, Qwen2Model
for folder, words in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.chdir(folder)
        printed = os.open("printed", os.O_CREAT | os.O_WRONLY)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        sys.path.insert(0, folder)
        imported = "ignore::pytest.PytestAssertRewriteWarning"
        os._exit(pytest.main(["-p", "no:randomly", "-W", imported, *words]))
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status))
"""


def copy_without(neighbours, folder):
    """Copy the tree without these neighbours, and without recipes."""
    for name in ("decisionllm", "tests"):
        shutil.copytree(ROOT / name, folder / name)  # with what Python has compiled
        for neighbour in neighbours:
            shutil.rmtree(folder / name / neighbour)
    without_recipes = shutil.ignore_patterns("experiment", "study")
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=without_recipes)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What pytest printed without each neighbour, and without `all`, {neighbour: (code, text)}."""
    path = tmp_path_factory.mktemp("walls")
    words_by_folder = {
        copy_without([name], path / name): ["tests/contracts/test_core.py"] for name in NEIGHBOURS
    }
    # not given one by one: files of NEEDS that are named are collected all the same
    ignored = [f"--ignore=tests/{name}" for name in (*NEIGHBOURS, *OF_THE_REPOSITORY)]
    of_all = copy_without(NEIGHBOURS, path / "all")
    words_by_folder[of_all] = ["-k", SELECTED, *ignored, "tests"]
    # without what this run of pytest was told, such as a seed of its order
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, json.dumps(words_by_folder)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    codes = map(int, done.stdout.split())
    return {
        Path(folder).name: (code, (Path(folder) / "printed").read_text(encoding="utf-8"))
        for folder, code in zip(words_by_folder, codes, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("neighbour", [*NEIGHBOURS, "all"])
def test_the_core_works_without_a_neighbour(neighbour, runs):
    code, printed = runs[neighbour]
    assert code == 0, printed[-5000:]
    assert " passed" in printed and " skipped" not in printed


def test_what_needs_a_neighbour_is_there():
    missing = []
    for node_id, needed in NEEDS.items():
        file, _, name = node_id.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if (name and name not in names) or not set(needed.split()) <= {*NEIGHBOURS}:
            missing.append(f"{node_id}: {needed}")
    assert not missing, "\n".join(missing)
