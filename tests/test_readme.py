"""The README is short, its first run really runs, and what it names exists.

Its commands and snippets are run by test_docs.py.
"""

import re
import shlex
from pathlib import Path

import pytest

from decisionllm.__main__ import COMMANDS
from tests.conftest import command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGETS = sorted(
    set(
        re.findall(
            r"`make (\w+)`|^make (\w+)",
            README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
            re.M,
        )
    )
)


def test_it_has_at_most_1800_words():
    assert 500 < len(README.split()) <= 1800


@pytest.mark.slow
def test_the_first_run_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = README.split("## First run")[1].split("```sh\n")[1].split("```")[0]
    assert (
        {shlex.split(line)[1] for line in block.splitlines()}
        == {"data", "train", "evaluate"}
        < set(COMMANDS)
    )
    for line in block.splitlines():
        verb, *overrides = shlex.split(line)[1:]
        assert (
            command(
                verb, *overrides, *(["steps=20", "log.tracker=none"] if verb == "train" else [])
            )
            == 0
        )
    assert (tmp_path / "runs" / "report.html").is_file() and (
        tmp_path / "runs" / "results.jsonl"
    ).is_file()


def test_what_the_layout_names_exists():
    tree = README.split("## Layout")[1].split("```")[1]
    names = [
        (line, name)
        for line in tree.splitlines()
        for name in re.findall(r"^ {0,2}([\w./]+(?:/|\.py))", line)
    ]
    assert len(names) > 15
    for line, name in names:
        base = ROOT / "decisionllm" if line.startswith("  ") else ROOT
        assert (base / name).exists(), name


def test_every_folder_of_the_package_is_in_the_layout():
    tree = README.split("## Layout")[1].split("```")[1]
    folders = {path.parent.name for path in (ROOT / "decisionllm").glob("*/*.py")}
    assert folders == set(re.findall(r"^  (\w+)/", tree, re.M))


def test_what_the_tables_name_as_experiments_exists():
    pages = README + (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in re.findall(r"`experiment=([\w-]+)`", pages):
        assert (ROOT / "configs" / "experiment" / f"{name}.yaml").is_file(), name


def test_the_numbers_of_the_readme_are_those_of_the_results():
    """Every row of a README table has numbers that a table of the docs or
    of the lab has.
    """
    pages = ("docs/results.md", "docs/benchmarks.md", "lab/results.md")
    docs = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    number = re.compile(r"-?\d+(?:\.\d+)?")
    numbers = set(number.findall(docs))
    tables = README.split("## Results")[1].split("## Layout")[0]
    rows = [
        line for line in tables.splitlines() if line.startswith("|") and not set(line) <= set("|- ")
    ]
    assert len(rows) > 20
    for row in rows:
        for cell in row.split("|")[2:]:
            assert set(number.findall(cell)) <= numbers, row


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wrong = [
        target for target in map("".join, TARGETS) if not re.search(rf"^{target}:", makefile, re.M)
    ]
    assert not wrong, wrong
