"""Each neighbour of the core can be taken away.

In a copy of the tree without the neighbour's folder, its tests, and the experiments and studies, the
core reads data, trains, rolls out and writes a report. Without all six neighbours, all files of the
core's tests are imported, and those in SELECTED are run. All quick tests of the core would take
minutes, and would find no more than a name that is imported in a function.
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


def run_without(neighbours, folder, *options):
    """Run pytest on the core's tests in a copy of the tree that lacks these neighbours."""
    for name in ("decisionllm", "tests"):
        shutil.copytree(ROOT / name, folder / name)  # with what Python has compiled
        for neighbour in neighbours:
            shutil.rmtree(folder / name / neighbour)
    without_recipes = shutil.ignore_patterns("experiment", "study")
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=without_recipes)
    shutil.copy(ROOT / "pyproject.toml", folder)
    # without what this run of pytest was told, such as a seed of its order
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", *options],
        cwd=folder,
        env=env | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_the_core_works_without_a_neighbour(neighbour, tmp_path):
    printed = run_without([neighbour], tmp_path, "tests/contracts/test_core.py")
    assert " passed" in printed and " skipped" not in printed


@pytest.mark.slow
def test_the_core_works_without_all_neighbours(tmp_path):
    # not given one by one: files of NEEDS that are named are collected all the same
    ignored = [f"--ignore=tests/{name}" for name in (*NEIGHBOURS, *OF_THE_REPOSITORY)]
    printed = run_without(NEIGHBOURS, tmp_path, "-k", SELECTED, *ignored, "tests")
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
