"""Each neighbour of the core can be taken away.

In a copy of the tree without the neighbour's folder, its tests, and the experiments and studies, all
files of the core's tests are imported, and of their tests those in SELECTED are run: they read data,
train, roll out and write a report. All quick tests of the core would take minutes for each of six
neighbours, and would find no more than a name that is imported in a function.
"""

import ast
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
    "test_readme.py",
    "test_walls.py",
}
SELECTED = "contracts and (test_core or synthetic or arrays or tested)"


@pytest.mark.slow
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_the_core_works_without_a_neighbour(neighbour, tmp_path):
    left_out = shutil.ignore_patterns("__pycache__")
    for folder in ("decisionllm", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
        shutil.rmtree(tmp_path / folder / neighbour)
    without_recipes = shutil.ignore_patterns("experiment", "study")
    shutil.copytree(ROOT / "configs", tmp_path / "configs", ignore=without_recipes)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    options = ["-m", "pytest", "-p", "no:randomly", "-k", SELECTED, "tests"]
    # not given one by one: files of NEEDS that are named are collected all the same
    options += [f"--ignore=tests/{name}" for name in (*NEIGHBOURS, *OF_THE_REPOSITORY)]
    done = subprocess.run(
        [sys.executable, *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout


def test_what_needs_a_neighbour_is_there():
    missing = []
    for node_id, needed in NEEDS.items():
        file, _, name = node_id.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if (name and name not in names) or not set(needed.split()) <= {*NEIGHBOURS}:
            missing.append(f"{node_id}: {needed}")
    assert not missing, "\n".join(missing)
